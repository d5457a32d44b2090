"""How the FP8 kernel for small tiles cuts a GEMM (kernels/hopper/gemm_fp8.py), and where it quantises.

Bounds are those seen on an H200 (benchmarks/results/expert-gemm-fp8-inside-nvidia-h200-2026-11-22.json).

No torch here. Legend: K columns, in groups of 128.
"""

from __future__ import annotations

import math

NARROW = 8  # tokens of a tile whose programs quantise them in GEMM2
# Mean tokens per expert up to which a tiling is used: weight rows, tokens, groups a step, stages, warps.
RULES = (
    (1, (64, 8, 2, 4, 4)),
    (5, (64, 8, 2, 3, 4)),
    (12, (64, 16, 1, 5, 4)),
    (24, (64, 32, 2, 3, 4)),
    (math.inf, (128, 64, 1, 4, 4)),
)
# GEMM2's, where there are enough programs: those that quantise their tokens then do it half as often.
WIDER = {8: (128, 8, 1, 4, 4), 16: (128, 16, 1, 4, 4)}
WIDER_PROGRAMS = 264

Cut = tuple[int, int, int, int, int]

# What may be best, by tokens of a tile; for GEMM1 and GEMM2.
CHOICES: dict[int, tuple[tuple[Cut, ...], tuple[Cut, ...]]] = {
    8: (
        ((64, 8, 2, 3, 4), (64, 8, 2, 4, 4), (64, 8, 1, 5, 4), (128, 8, 2, 3, 4)),
        ((128, 8, 1, 4, 4), (128, 8, 1, 3, 4), (256, 8, 1, 3, 8), (128, 8, 2, 3, 4), (64, 8, 1, 3, 4)),
    ),
    16: (
        ((64, 16, 1, 5, 4), (64, 16, 2, 3, 4), (128, 16, 1, 4, 4)),
        ((64, 16, 1, 5, 4), (64, 16, 1, 4, 4), (128, 16, 1, 4, 4)),
    ),
    32: (
        ((64, 32, 2, 3, 4), (64, 32, 1, 4, 4), (128, 32, 1, 4, 4)),
        ((64, 32, 2, 3, 4), (64, 32, 1, 4, 4), (128, 32, 1, 4, 4)),
    ),
    64: (((128, 64, 1, 4, 4), (64, 64, 1, 5, 4)), ((128, 64, 1, 4, 4), (64, 64, 1, 5, 4))),
}
ALONE = ((64, 8, 2, 4, 4), (64, 8, 4, 3, 4), (64, 8, 2, 6, 4), (64, 8, 1, 8, 4))  # where none is sorted


def choices(tokens: int, *, direct: bool) -> list[tuple[tuple[Cut, ...], tuple[Cut, ...]]]:
    """To be timed where the rule takes tiles of `tokens`: those, and twice and half as wide ones."""
    if direct:
        return [(ALONE, ALONE)]
    return [found for width, found in CHOICES.items() if tokens <= 2 * width and width <= 2 * tokens]


def quantizes(cut: tuple[int, ...], K: int, room: int, *, first: bool, direct: bool) -> bool:
    """Whether programs quantise the rows of x that they multiply: where pairs are not sorted, which spares a
    launch in either GEMM, and in GEMM2 of the narrowest tiles.

    cut: as in RULES. room: bytes of shared memory. first, direct: as of `moe.gemms.Gemm`.
    """
    rows, tokens, k_blocks, stages, *_ = cut
    groups = 1 << (-(-K // 128) - 1).bit_length()
    held = groups * ((128 + 4) * tokens + 8) + 256 * groups * direct
    return (direct or (not first and tokens == NARROW)) and (
        held + stages * (k_blocks * 128 * rows + 8) <= room
    )
