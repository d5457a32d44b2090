"""How the kernels for so few pairs that none is sorted cut a layer (kernels/hopper/gemm_pairs.py).

Their tilings are those of tiles of PAIR tokens, of which some fields mean something else: `stages` are the
chunks that a warp loads ahead of the one it multiplies; `group`, of GEMM2, the pairs of a token that a
program multiplies at once; of GEMM1, whether GEMM2's programs start when its tokens are on their way (SOON)
or its products done (LATE). Bounds are those seen on an H200 (docs/performance.md).

No torch here. Legend: N weight rows, K columns.
"""

from __future__ import annotations

import math

from turnout.moe.backends.hopper import tile_few

PAIR = 1  # tokens of a tile
SOON, LATE = 1, 2
MOST_PAIRS = 64  # of a batch: two for each lane of a warp
KERNELS = ("packed", "bf16")  # of RULES, that have weights these kernels read
MOST_AHEAD = 4
# Strips of 16 weight rows of GEMM1, over this rank's pairs, from which on its programs are of two or of four;
# of four only where they have so many times as many columns.
SOME_STRIPS, MANY_STRIPS, MANY_LONG = 900, 1150, 3.6e6
# Programs of GEMM2 of one strip, beyond which they are of two, and beyond which these share no columns; where
# most pairs are other ranks', they are of two beyond twice the latter.
FULL, OVERFULL = 200, 400
MOST_GROUP = 8
MOST_CHUNKS = 16  # of a slice: the kernels' code has each

Cut = tuple[int, int, int, int, int, int, int]  # a Tiling's fields


def cut_first(strips: float, K: int, kernel: str, *, shared: bool) -> Cut:
    """shared: other ranks hold experts, too."""
    if tile_few.chunks(K, 4, tile_few.CHUNK) > MOST_CHUNKS:
        return (16, PAIR, tile_few.CHUNK, 1, 8, SOON, 8)
    if kernel == "bf16":
        blocks = 2 if tile_few.chunks(K, 4, 2) <= MOST_CHUNKS else tile_few.CHUNK
        return (16, PAIR, blocks, 8 // blocks, 4, SOON, 4)
    many = strips >= MANY_STRIPS and strips * K >= MANY_LONG
    if many and tile_few.chunks(K, 2, tile_few.CHUNK) <= MOST_CHUNKS:
        return (64, PAIR, tile_few.CHUNK, 1, 8, SOON, 2)
    if shared and strips >= SOME_STRIPS:
        return (32, PAIR, tile_few.CHUNK, 1, 4, SOON, 4)
    return (16, PAIR, tile_few.CHUNK, 3, 4, LATE if shared else SOON, 4)


def cut_second(tokens: int, top_k: int, held: float, N: int, K: int, kernel: str) -> Cut:
    """held: mean pairs of a token that are this rank's."""
    bf16, strips = kernel == "bf16", tokens * N / 16
    blocks, ahead = (2, 2) if bf16 else (tile_few.CHUNK, 1)
    if held > top_k / 2:
        group = _group_of_all(top_k)
        rows, warps, slots = 16, 8, 8
        if not bf16 and strips > FULL:
            slots = slots if strips <= OVERFULL else group
            rows, warps = 32, 2 * slots
        elif not bf16:
            ahead = 3
    else:
        group = min(4, 1 << max(0, round(math.log2(held))))
        warps = slots = 8 if bf16 and group > 1 else 4
        rows = 32 if not bf16 and group > 1 and strips > 2 * OVERFULL else 16
    while group > 1 and tile_few.chunks(K, slots // group, blocks) > MOST_CHUNKS:
        group //= 2
    if tile_few.chunks(K, slots // group, blocks) > MOST_CHUNKS:
        rows, warps, slots = 16, 8, 8
    return (rows, PAIR, blocks, ahead, warps, group, slots // group)


def first_choices(kernel: str) -> list[Cut]:
    """What may be best for GEMM1, at whatever size."""
    if kernel == "bf16":
        cuts = [
            (16, 4, 2, 4, SOON, 4),
            (16, 2, 4, 4, SOON, 4),
            (16, 2, 4, 2, SOON, 2),
            (16, 2, 2, 8, SOON, 8),
        ]
    else:
        cuts = [
            (16, 4, 3, 4, SOON, 4),
            (16, 4, 3, 4, LATE, 4),
            (16, 4, 1, 4, SOON, 4),
            (16, 4, 1, 4, LATE, 4),
        ]
        cuts += [(64, 4, 1, 8, SOON, 2), (16, 4, 3, 2, SOON, 2), (32, 4, 1, 4, SOON, 4)]
    return [
        (rows, PAIR, blocks, ahead, warps, when, parts) for rows, blocks, ahead, warps, when, parts in cuts
    ]


def second_choices(top_k: int, held: float, kernel: str) -> list[Cut]:
    """The same for GEMM2."""
    blocks = 2 if kernel == "bf16" else tile_few.CHUNK
    if held > top_k / 2:
        group = _group_of_all(top_k)
        slices = 8 // group
        cuts = [(16, 1, 8, group, slices), (16, 4 if kernel == "bf16" else 3, 8, group, slices)]
        cuts += [(32, 1, 16, group, slices), (32, 1, 8, group, slices), (32, 1, 2 * group, group, 1)]
    else:
        cuts = [(16, 1, 4, 1, 4), (16, 1, 4, 2, 2), (32, 1, 4, 2, 2), (16, 1, 2, 1, 2), (16, 1, 8, 2, 4)]
    least = 2 if kernel == "bf16" else 1
    return [
        (rows, PAIR, blocks, max(least, ahead), warps, group, slices)
        for rows, ahead, warps, group, slices in cuts
    ]


def _group_of_all(top_k: int) -> int:
    return min(MOST_GROUP, 1 << (top_k - 1).bit_length())


def whole_chunks(K: int, slices: int, k_blocks: int) -> int:
    """Chunks of bf16 whose columns exist and are their slice's, whichever slice."""
    blocks = math.ceil(math.ceil(K / 64) / slices)
    return max(0, min(blocks // k_blocks, (K // 64 - (slices - 1) * blocks) // k_blocks))


def columns(K: int, slices: int, k_blocks: int) -> int:
    """Of a slice's tokens in shared memory."""
    chunks = tile_few.chunks(K, slices, k_blocks)
    return k_blocks * 64 << max(0, chunks - 1).bit_length()


def shared_bytes(cut: Cut, K: int) -> int:
    rows, _, k_blocks, _, _, group, slices = cut
    return group * slices * (2 * columns(K, slices, k_blocks) + 4 * rows)


def refuse(cut: Cut) -> str:
    """Why the kernels do not run it; "" if they do. Shared memory apart."""
    rows, tokens, k_blocks, ahead, warps, group, slices = cut
    if rows not in (16, 32, 64, 128) or tokens != PAIR or warps not in (2, 4, 8, 16):
        return f"tiles of {rows} weight rows and {tokens} pairs with {warps} warps"
    slots = group * slices
    if group not in (1, 2, 4, 8) or slices not in (1, 2, 4, 8) or warps % slots:
        return f"{warps} warps for {group} pairs in {slices} slices"
    strips = rows * slots / (16 * warps)
    if strips not in (1, 2) or k_blocks not in (2, 4) or not 1 <= ahead <= MOST_AHEAD:
        return f"{strips:g} strips of a warp, {k_blocks} blocks at once, {ahead} chunks ahead"
    return ""
