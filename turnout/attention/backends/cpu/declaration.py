"""What attention by compiled kernels on a CPU declares."""

from __future__ import annotations

from turnout.attention.capability import AttentionBackend, StateKernels
from turnout.packages import NUMBA
from turnout.vocabulary import AttentionKind

BACKEND = AttentionBackend(
    name="cpu",
    devices=frozenset({"cpu"}),
    dtypes=frozenset({"float32"}),
    implementations=dict.fromkeys(
        (AttentionKind.FULL, AttentionKind.SLIDING_WINDOW),
        "turnout.attention.backends.cpu.paged:CompiledAttention",
    ),
    most_head_dim=256,
    head_multiple=16,
    page_multiple=16,
    package=NUMBA,
    states=StateKernels(
        implementation="turnout.attention.backends.cpu.states:CompiledStates",
        dtypes=frozenset({"float32"}),
        most_head_dim=256,
        head_multiple=16,
        takes_chunks=True,
    ),
)
