"""What several runners share that end in FlashInfer."""
