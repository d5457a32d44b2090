"""What attention by Triton kernels declares."""

from __future__ import annotations

from turnout.attention.capability import HALF_PRECISION, AttentionBackend, StateKernels
from turnout.packages import TRITON
from turnout.vocabulary import AttentionKind

BACKEND = AttentionBackend(
    name="triton",
    devices=frozenset({"cuda"}),
    dtypes=HALF_PRECISION,
    implementations={
        AttentionKind.FULL: "turnout.attention.backends.triton.paged:TritonAttention",
        AttentionKind.SLIDING_WINDOW: "turnout.attention.backends.triton.paged:TritonAttention",
        AttentionKind.LATENT: "turnout.attention.backends.triton.latent:TritonLatent",
        AttentionKind.COMPRESSED: "turnout.attention.backends.triton.compressed:TritonCompressed",
        AttentionKind.SPARSE_LATENT: "turnout.attention.backends.triton.latent:TritonSparseLatent",
    },
    most_head_dim=256,
    package=TRITON,
    device_tables=True,
    states=StateKernels(
        implementation="turnout.attention.backends.triton.states:TritonStates",
        most_head_dim=128,
    ),
)
