"""What several runners share that end in FlashInfer, and what its kernels take beside weights."""
