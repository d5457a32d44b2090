"""Weights and activations in FP8, small tiles of any number of tokens (kernels/hopper/gemm_fp8.py).

Bounds are those seen on an H200 (benchmarks/results/expert-gemm-fp8-inside-nvidia-h200-2026-11-22.json).

No torch here. Legend: R rows of x, K columns, in groups of 128.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from turnout.formats.spec import FORMATS
from turnout.kernels.common.sizes import power_of_two
from turnout.moe.backends.hopper.kernels.tiled import Tiled
from turnout.moe.backends.hopper.launch import Batch, Gemm, boxes_of, count_pairs
from turnout.moe.backends.hopper.layer_shape import LayerShape
from turnout.moe.backends.hopper.tile_config import (
    MIN_TOKENS,
    MULTIPROCESSORS,
    SHARED_BYTES,
    Choices,
    LayerTiles,
    Rules,
    TileConfig,
)
from turnout.vocabulary import Format

if TYPE_CHECKING:
    from torch import Tensor

GROUP = FORMATS[Format.FP8].group  # columns that share a scale
WIDER_PROGRAMS = 2 * MULTIPROCESSORS


class Fp8(Tiled, frozen=True, tag="fp8"):
    """The tile configuration of the GEMM of FP8 weights by FP8 activations."""

    weights = (Format.FP8,)

    @classmethod
    def rules(cls) -> Rules[Tiled]:
        return RULES

    @classmethod
    def rule(cls, shape: LayerShape, tokens: int) -> LayerTiles:
        tiles = super().rule(shape, tokens)
        wider = WIDER.get(tiles.block_m)
        if shape.unsorted(tokens) or wider is None:
            return tiles
        many = shape.most_tiles(tokens, wider.block_m) * shape.hidden > WIDER_PROGRAMS * wider.block_n
        return tiles._replace(second=wider) if many else tiles

    @classmethod
    def choices(cls, shape: LayerShape, tokens: int, ruled: LayerTiles) -> list[Choices]:
        """What small tiles are fast is known: those of the rule's width, of twice and of half of it."""
        own = cls.rule(shape, tokens)

        def of(config: TileConfig, found: tuple[Fp8, ...]) -> tuple[TileConfig, ...]:
            return tuple(dict.fromkeys((config, *found) if config.block_m == found[0].block_m else found))

        near = [found for width, found in FAST.items() if 0.5 <= width / own.block_m <= 2]
        if shape.unsorted(tokens):
            near = [(FAST_UNSORTED, FAST_UNSORTED)]
        return [Choices(first=of(own.first, first), second=of(own.second, second)) for first, second in near]

    def own_refusal(self, shape: LayerShape) -> str:
        wrong = self.block_k not in (128, 256, 512)
        return f"block_k {self.block_k}" if wrong else super().own_refusal(shape)

    def shared_bytes(self, shape: LayerShape, *, first: bool) -> int:
        steps = self.num_stages * self.block_k // GROUP
        return steps * (128 * (self.block_n + self.block_m) + 4 * self.block_m)

    def quantizes(self, K: int, *, first: bool, unsorted: bool) -> bool:
        """Whether programs quantise the rows of x that they multiply: where pairs are not sorted, which
        spares a launch in either GEMM, and in GEMM2 of the narrowest tiles; if K columns have room."""
        groups = power_of_two(-(-K // GROUP))
        held = groups * ((128 + 4) * self.block_m + 8) + 256 * groups * unsorted
        return (unsorted or (not first and self.block_m == MIN_TOKENS)) and (
            held + self.num_stages * (self.block_k * self.block_n + 8) <= SHARED_BYTES
        )

    def sort(self, batch: Batch, *, widest_first: bool) -> None:
        """And quantise tokens, in the same launch."""
        from turnout.kernels.hopper.quantize_groups import sort_and_quantize

        block, programs, warps = count_pairs(batch)
        (T, H), at_once, space = batch.x_TH.shape, 4 * warps, batch.space
        groups = -(-H // GROUP)
        sort_and_quantize[(programs + -(-T * groups // at_once),)](
            batch.ids_TK, space.counts, space.order, space.tiles, batch.x_TH, *space.quantized,
            batch.ids_TK.numel(), *batch.held, self.block_m, programs, T, H, batch.x_TH.stride(0),
            block, batch.padded_count, batch.at_once, groups, at_once, True,
            num_warps=warps, launch_pdl=True,
        )  # fmt: skip

    def launch(self, g: Gemm) -> None:
        from turnout.kernels.hopper.gemm_fp8 import expert_gemm_fp8

        w = g.w
        inside = self.quantizes(g.x.shape[1], first=g.first, unsorted=g.unsorted)
        rows, scales = (g.x, w.scales) if inside else _quantized(g)
        expert_gemm_fp8[(g.most_tiles * -(-w.rows // self.block_n),)](
            rows, scales, boxes_of(w.codes.view(-1, w.inner), [self.block_n, GROUP], bits=8), w.scales,
            w.any_bias, g.out, g.order, g.table, g.any_weights,
            w.rows, g.columns, g.x.stride(0), g.out.stride(0), g.top_k, *g.held, *g.numbers,
            w.inner // GROUP, inside, g.kind, g.pairs and g.first, g.pairs and not g.first,
            g.unsorted, w.paired, w.bias is not None,
            self.block_n, self.block_m, self.block_k // GROUP, self.num_stages, self.group_m, g.pairs,
            num_warps=self.num_warps, launch_pdl=g.pairs,
        )  # fmt: skip


def _quantized(g: Gemm) -> tuple[Tensor, Tensor]:
    """g.x as e4m3 [R, K'] and float32 [R, K' / GROUP], flat, K' being K up to a multiple of GROUP."""
    from turnout.kernels.hopper.quantize_groups import quantize_rows

    R, K = g.x.shape
    codes, scales = g.space.quantized
    if g.first and g.pairs and not g.unsorted:
        return codes, scales  # as `sort` left them
    groups = -(-K // GROUP)
    block = 64 if R * groups > 1 << 16 else 16
    quantize_rows[(-(-R * groups // block),)](
        g.x, codes, scales, R, K, g.x.stride(0), groups, block, g.pairs, launch_pdl=g.pairs
    )
    return codes, scales


# block_n, block_m, block_k, num_stages, num_warps
RULES = (
    (1, Fp8(64, 8, 256, 4, 4)),
    (5, Fp8(64, 8, 256, 3, 4)),
    (12, Fp8(64, 16, 128, 5, 4)),
    (24, Fp8(64, 32, 256, 3, 4)),
    (math.inf, Fp8(128, 64, 128, 4, 4)),
)
# GEMM2's by block_m, where there are enough programs: they quantise their tokens half as often then.
WIDER = {8: Fp8(128, 8, 128, 4, 4), 16: Fp8(128, 16, 128, 4, 4)}
_32 = (Fp8(64, 32, 256, 3, 4), Fp8(64, 32, 128, 4, 4), Fp8(128, 32, 128, 4, 4))
_64 = (Fp8(128, 64, 128, 4, 4), Fp8(64, 64, 128, 5, 4))
FAST = {  # by block_m, for GEMM1 and GEMM2
    8: (
        (Fp8(64, 8, 256, 3, 4), Fp8(64, 8, 256, 4, 4), Fp8(64, 8, 128, 5, 4), Fp8(128, 8, 256, 3, 4)),
        (
            Fp8(128, 8, 128, 4, 4),
            Fp8(128, 8, 128, 3, 4),
            Fp8(256, 8, 128, 3, 8),
            Fp8(128, 8, 256, 3, 4),
            Fp8(64, 8, 128, 3, 4),
        ),
    ),
    16: (
        (Fp8(64, 16, 128, 5, 4), Fp8(64, 16, 256, 3, 4), Fp8(128, 16, 128, 4, 4)),
        (Fp8(64, 16, 128, 5, 4), Fp8(64, 16, 128, 4, 4), Fp8(128, 16, 128, 4, 4)),
    ),
    32: (_32, _32),
    64: (_64, _64),
}
FAST_UNSORTED = (Fp8(64, 8, 256, 4, 4), Fp8(64, 8, 512, 3, 4), Fp8(64, 8, 256, 6, 4), Fp8(64, 8, 128, 8, 4))
