"""What attention by Triton kernels declares."""

from __future__ import annotations

from turnout.attention.capability import HALF_PRECISION, HOPPER, AttentionBackend, Place, StateKernels
from turnout.attention.kinds import AttentionSpec
from turnout.packages import TRITON
from turnout.vocabulary import AttentionKind


def specialises_prompts(spec: AttentionSpec, dtype: str) -> bool:
    """Whether prompts of such layers are attended to by kernels/attention/prefill_specialised.py on Hopper,
    which has only what this asks for."""
    sizes = spec.head_dim == 128 and spec.num_heads <= 128 * spec.num_kv_heads
    return spec.kind == AttentionKind.FULL and sizes and not spec.sinks and dtype == "bfloat16"


def own_prompts(spec: AttentionSpec, place: Place) -> bool:
    """2,048 tokens take 68 us of an H200 by specialised warps, and took 78 by flash-attn-4 in another run
    (docs/notes/attention.md)."""
    return place.architecture // 10 == HOPPER and specialises_prompts(spec, place.dtype)


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
    own_prompts=own_prompts,
    states=StateKernels(
        implementation="turnout.attention.backends.triton.states:TritonStates",
        most_head_dim=128,
    ),
)
