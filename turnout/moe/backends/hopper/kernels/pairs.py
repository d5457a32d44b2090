"""Weights of 4 bits or bf16, so few pairs that none is sorted: programs find their pairs
(kernels/hopper/gemm_pairs.py). Bounds are those seen on an H200 (docs/notes/hopper-kernels.md).

No torch here. Legend: T tokens, k top-k, N weight rows, K columns.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from turnout.kernels.common.sizes import power_of_two
from turnout.moe.backends.hopper.launch import Batch, Gemm
from turnout.moe.backends.hopper.layer_shape import PACKED, LayerShape
from turnout.moe.backends.hopper.tile_config import Choices, LayerTiles, TileConfig, chunks
from turnout.vocabulary import Format

if TYPE_CHECKING:
    from torch import Tensor

    from turnout.moe.batch import LateChoice

PAIR = 1  # tokens of a tile
# Pairs are sorted where a smaller part of them goes to experts of their own: 4 tokens of GPT-OSS-20B, of
# which 0.83 do, take 66 us sorted and 61 unsorted (MXFP4).
DISTINCT = {PACKED: 0.8, Format.BF16: 0.87}
BLOCK_K = {PACKED: 256, Format.BF16: 128}
MOST_AHEAD = 4
# Strips of 16 weight rows of GEMM1, over this rank's pairs, from which on its programs are of two or of four;
# of four only where they have so many times as many columns.
SOME_STRIPS, MANY_STRIPS, MANY_LONG = 900, 1150, 3.6e6
# Programs of GEMM2 of one strip, beyond which they are of two, and beyond which these share no columns; where
# most pairs are other ranks', they are of two beyond twice the latter.
FULL, OVERFULL = 200, 400
MOST_GROUP = 8
MOST_LOGITS = 512  # of a token that chooses here
MOST_CHUNKS = 16  # of a slice: the kernels' code has each


class Pairs(TileConfig, frozen=True, tag="pairs"):
    """num_stages: chunks of block_k columns that a warp loads ahead of the one it multiplies. group_m: of
    GEMM2, pairs of a token that a program multiplies at once. split_k: warps that share a strip's columns.
    late: of GEMM1, whether GEMM2's programs start when its products are done, rather than when its tokens are
    on their way.
    """

    split_k: int = 1
    late: bool = False

    weights = (PACKED, Format.BF16)
    most_pairs = 64  # two for each lane of a warp
    batch_invariant = False
    adds_pairs = True
    leaves_pairs = False

    @classmethod
    def rule(cls, shape: LayerShape, tokens: int) -> LayerTiles | None:
        if not shape.unsorted(tokens, DISTINCT[shape.weights]):
            return None
        return LayerTiles(_first(shape, tokens), _second(shape, tokens))

    @classmethod
    def choices(cls, shape: LayerShape, tokens: int, ruled: LayerTiles) -> list[Choices]:
        if tokens * shape.top_k > cls.most_pairs:
            return []
        own = ruled if ruled.second.adds_pairs else ()

        def runs(found: tuple[TileConfig, ...], *, first: bool) -> tuple[TileConfig, ...]:
            return tuple(c for c in dict.fromkeys(found) if not c.refusal(shape, first=first))

        first = runs((*own[:1], *_first_choices(shape)), first=True)
        second = runs((*own[1:], *_second_choices(shape)), first=False)
        return [Choices(first=first, second=second)] if first and second else []

    def chooses(self, shape: LayerShape) -> bool:
        """Where a warp holds a token's logits in registers, and its choices in 32 lanes."""
        return shape.num_experts <= MOST_LOGITS and shape.top_k <= 32

    def unsorted(self, shape: LayerShape, tokens: int) -> bool:
        return True

    def refusal(self, shape: LayerShape, *, first: bool) -> str:
        if first and self.group_m != 1:
            return f"group_m {self.group_m} in GEMM1 of unsorted pairs"
        return super().refusal(shape, first=first)

    def own_refusal(self, shape: LayerShape) -> str:
        n, m, warps, group, split = self.block_n, self.block_m, self.num_warps, self.group_m, self.split_k
        if n not in (16, 32, 64, 128) or m != PAIR or warps not in (2, 4, 8, 16):
            return f"block_n {n}, block_m {m} with num_warps {warps} for unsorted pairs"
        if group not in (1, 2, 4, 8) or split not in (1, 2, 4, 8) or warps % (group * split):
            return f"num_warps {warps} for group_m {group}, split_k {split}"
        strips, ahead = n * group * split / (16 * warps), self.num_stages
        if strips not in (1, 2) or self.block_k not in (128, 256) or not 1 <= ahead <= MOST_AHEAD:
            return f"{strips:g} strips of a warp, block_k {self.block_k}, num_stages {ahead}"
        return ""

    def shared_bytes(self, shape: LayerShape, *, first: bool) -> int:
        held = columns(shape.columns(first=first), self.split_k, self.block_k)
        return self.group_m * self.split_k * (2 * held + 4 * self.block_n)

    def sort(self, batch: Batch, *, widest_first: bool) -> None:
        """Nothing is."""

    def launch(self, g: Gemm) -> None:
        """GEMM2 gives the sums of tokens, in the dtype of `out`."""
        from turnout.kernels.hopper.gemm_pairs import gemm_of_pairs, gemm_of_tokens

        w, ids, split, steps = g.w, g.table, self.split_k, self.block_k // 64
        (T, k), (n_blocks, k_blocks) = ids.shape, w.blocks
        n_tiles = -(-w.padded_rows // self.block_n)
        whole = whole_chunks(w.inner, split, self.block_k) if w.format == Format.BF16 else 0
        found = 32 if (T * k if g.first else k) <= 32 else 64
        sizes = w.padded_rows, g.columns, k_blocks, n_blocks, g.x.stride(0), g.out.stride(0), k, *g.held
        count = chunks(w.inner, split, self.block_k)
        choosing, (num_logits, scaling), (top_k, parts, of_all, padded, logits) = _choosing(g.choice, ids)
        if g.first:
            gemm_of_pairs[(T * k * n_tiles,)](
                g.x, w.codes, w.scales, w.alpha, w.any_bias, g.out, ids, *choosing, w.inner, T * k, *sizes,
                num_logits, *g.numbers, w.format, g.kind, w.bias is not None, found, self.block_n, steps,
                count, whole, split, self.num_stages, self.late, top_k, parts, padded, logits, True,
                num_warps=self.num_warps, launch_pdl=True,
            )  # fmt: skip
        else:
            gemm_of_tokens[(T * n_tiles,)](
                g.x, w.codes, w.scales, w.alpha, w.any_bias, g.out, ids, g.any_weights, *choosing[:2],
                w.inner, *sizes, num_logits, scaling, w.format, w.bias is not None, found, self.block_n,
                steps, count, whole, self.group_m, split, self.num_stages, self.group_m >= k, top_k, parts,
                of_all, padded, logits, True, num_warps=self.num_warps, launch_pdl=True,
            )  # fmt: skip

    def sum(self, batch: Batch) -> None:
        """GEMM2 did."""


def _choosing(choice: LateChoice | None, ids: Tensor) -> tuple[Any, Any, Any]:
    """What both kernels take of a choice, of pointers, numbers and constants: see `chosen_pairs`."""
    if choice is None:
        return (ids, ids, ids), (0, 1.0), (0, 1, False, False, 32)
    logits, real = choice.logits_P1E, choice.real_1
    P, _, E = logits.shape
    pointers = logits, logits if real is None else real, choice.counts_E
    constants = choice.top_k, P, choice.of_all, real is not None, max(32, power_of_two(E))
    return pointers, (E, choice.scaling), constants


def whole_chunks(K: int, split_k: int, block_k: int) -> int:
    """Chunks of bf16 whose columns exist and are their slice's, whichever slice."""
    steps = block_k // 64
    blocks = math.ceil(math.ceil(K / 64) / split_k)
    return max(0, min(blocks // steps, (K // 64 - (split_k - 1) * blocks) // steps))


def columns(K: int, split_k: int, block_k: int) -> int:
    """Of a slice's tokens in shared memory."""
    return block_k * power_of_two(chunks(K, split_k, block_k))


def _first(shape: LayerShape, tokens: int) -> Pairs:
    K, others = shape.hidden, shape.local_experts < shape.num_experts
    strips = shape.touched(tokens) * shape.w13_rows / 16
    if chunks(K, 4, 256) > MOST_CHUNKS:
        return Pairs(16, PAIR, 256, 1, 8, split_k=8)
    if shape.weights == Format.BF16:
        block_k = 128 if chunks(K, 4, 128) <= MOST_CHUNKS else 256
        return Pairs(16, PAIR, block_k, 512 // block_k, 4, split_k=4)
    many = strips >= MANY_STRIPS and strips * K >= MANY_LONG
    if many and chunks(K, 2, 256) <= MOST_CHUNKS:
        return Pairs(64, PAIR, 256, 1, 8, split_k=2)
    if others and strips >= SOME_STRIPS:
        return Pairs(32, PAIR, 256, 1, 4, split_k=4)
    return Pairs(16, PAIR, 256, 3, 4, split_k=4, late=others)


def _second(shape: LayerShape, tokens: int) -> Pairs:
    held = shape.top_k * shape.local_experts / shape.num_experts  # mean pairs of a token that are this rank's
    bf16, strips, K = shape.weights == Format.BF16, tokens * shape.hidden / 16, shape.inner
    block_k, ahead = BLOCK_K[shape.weights], 2 if bf16 else 1
    if held > shape.top_k / 2:
        group = _group_of_all(shape.top_k)
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
    while group > 1 and chunks(K, slots // group, block_k) > MOST_CHUNKS:
        group //= 2
    if chunks(K, slots // group, block_k) > MOST_CHUNKS:
        rows, warps, slots = 16, 8, 8
    return Pairs(rows, PAIR, block_k, ahead, warps, group, slots // group)


def _first_choices(shape: LayerShape) -> list[Pairs]:
    """What may be best for GEMM1, at any size: block_n, block_k, num_stages, num_warps, split_k, late."""
    found = [
        (16, 256, 3, 4, 4, False),
        (16, 256, 3, 4, 4, True),
        (16, 256, 1, 4, 4, False),
        (16, 256, 1, 4, 4, True),
        (64, 256, 1, 8, 2, False),
        (16, 256, 3, 2, 2, False),
        (32, 256, 1, 4, 4, False),
    ]
    if shape.weights == Format.BF16:
        found = [
            (16, 256, 2, 4, 4, False),
            (16, 128, 4, 4, 4, False),
            (16, 128, 4, 2, 2, False),
            (16, 128, 2, 8, 8, False),
        ]
    return [Pairs(n, PAIR, k, ahead, warps, 1, split, late) for n, k, ahead, warps, split, late in found]


def _second_choices(shape: LayerShape) -> list[Pairs]:
    """The same for GEMM2: block_n, num_stages, num_warps, group_m, split_k."""
    bf16, top_k = shape.weights == Format.BF16, shape.top_k
    if top_k * shape.local_experts / shape.num_experts > top_k / 2:
        group = _group_of_all(top_k)
        split = 8 // group
        found = [(16, 1, 8, group, split), (16, 4 if bf16 else 3, 8, group, split)]
        found += [(32, 1, 16, group, split), (32, 1, 8, group, split), (32, 1, 2 * group, group, 1)]
    else:
        found = [(16, 1, 4, 1, 4), (16, 1, 4, 2, 2), (32, 1, 4, 2, 2), (16, 1, 2, 1, 2), (16, 1, 8, 2, 4)]
    least, block_k = 2 if bf16 else 1, BLOCK_K[shape.weights]
    return [
        Pairs(rows, PAIR, block_k, max(least, ahead), warps, group, split)
        for rows, ahead, warps, group, split in found
    ]


def _group_of_all(top_k: int) -> int:
    return min(MOST_GROUP, power_of_two(top_k))
