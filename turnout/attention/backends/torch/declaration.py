"""What attention in plain torch declares: the reference of every kind, for any size and type."""

from __future__ import annotations

from turnout.attention.capability import HALF_PRECISION, AttentionBackend, StateKernels
from turnout.vocabulary import AttentionKind

BACKEND = AttentionBackend(
    name="torch",
    devices=frozenset({"cpu", "cuda"}),
    dtypes=HALF_PRECISION | {"float32"},
    index_fp8=True,
    states=StateKernels(implementation="turnout.attention.states:RequestStates"),
    implementations={
        AttentionKind.FULL: "turnout.attention.torch:TorchAttention",
        AttentionKind.SLIDING_WINDOW: "turnout.attention.torch:TorchAttention",
        AttentionKind.LATENT: "turnout.attention.latent:LatentAttention",
        AttentionKind.SPARSE_LATENT: "turnout.attention.sparse_latent:SparseLatentAttention",
        AttentionKind.COMPRESSED: "turnout.attention.compressed:CompressedAttention",
    },
)
