"""How the kernel for few tokens per expert cuts a GEMM (kernels/hopper/gemm_few.py): its rule and its limits.

Its warps hold whole strips of 16 weight rows and may share the columns of a strip. Where strips are few, more
warps per strip keep a GPU busy; where they are many, one is best, for sums over warps cost a barrier. Bounds
are those seen on an H200, of 132 multiprocessors (docs/performance.md).

No torch here. Legend: N weight rows, K columns.
"""

from __future__ import annotations

import math

CHUNK = 4  # blocks of 64 columns that a warp takes at once
STAGES = 4
WHOLE_BYTES = 64 * 1024  # of tokens in shared memory, up to which all of them are copied first
# Strips, over all experts that got a token, up to which four or two warps share the columns of each.
FOUR_SLICES, TWO_SLICES = 400, 2200
FEW_STRIPS = 740  # up to which programs are of two strips, to be more
LEAST_BLOCKS = 8  # of a slice
# So many strips, of so many columns and in whole chunks, gain 2 % from warps that hold two.
MANY_STRIPS, DEEP_COLUMNS = 7000, 2048
MOST_STAGES = 16


def cut(strips: float, tokens: int, K: int) -> tuple[int, int, int, int]:
    """(weight rows, stages, warps, slices) of a program."""
    slices = 4 if strips < FOUR_SLICES else 2 if strips < TWO_SLICES else 1
    while slices > 1 and 64 * LEAST_BLOCKS * slices > K:
        slices //= 2
    fits = 2 * tokens * K <= WHOLE_BYTES
    if slices == 1:
        deep = K >= DEEP_COLUMNS and K % (64 * CHUNK) == 0
        return 128 if deep and strips >= MANY_STRIPS else 64, STAGES, 4, 1
    whole = chunks(K, slices, CHUNK)
    if slices == 4:
        return (16, whole, 4, 4) if fits else (32, min(whole, MOST_STAGES), 8, 4)
    rows, warps = (32, 4) if strips < FEW_STRIPS else (64, 8)
    return rows, whole if fits else STAGES, warps, 2


def chunks(K: int, slices: int, k_blocks: int) -> int:
    """Turns of a warp's loop. As many stages hold all that a program needs of the tokens."""
    return math.ceil(math.ceil(K / 64 / slices) / k_blocks)


def shared_bytes(tokens: int, k_blocks: int, stages: int, slices: int) -> int:
    return stages * slices * k_blocks * 128 * tokens


def refuse(rows: int, tokens: int, k_blocks: int, stages: int, warps: int, slices: int) -> str:
    """Why the kernel does not run it; "" if it does. Shared memory apart."""
    if tokens not in (8, 16, 32) or rows not in (16, 32, 64, 128, 256):
        return f"tiles of {rows} weight rows by {tokens} tokens for few tokens per expert"
    if warps not in (4, 8) or slices not in (1, 2, 4, 8) or k_blocks not in (1, 2, 4):
        return f"{warps} warps in {slices} slices, {k_blocks} blocks at once"
    strips = rows // 16 * slices / warps  # of a warp
    if strips not in (1, 2, 4) or warps < slices or strips * k_blocks > 8:
        return f"{rows} rows with {warps} warps in {slices} slices, {k_blocks} blocks at once"
    return "" if 2 <= stages <= MOST_STAGES else f"{stages} stages"
