"""MXFP4 weights by FP8 activations, any number of tokens (kernels/hopper/gemm_w4a8.py). No torch here."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from turnout.kernels.common.sizes import power_of_two
from turnout.moe.backends.hopper import layer_shape
from turnout.moe.backends.hopper.launch import Gemm, boxes_of
from turnout.moe.backends.hopper.layer_shape import LayerShape
from turnout.moe.backends.hopper.tile_config import Choices, LayerTiles, TileConfig, by_mean_tokens

if TYPE_CHECKING:
    from torch import Tensor

COLUMNS = 128  # columns of a step; rows are quantised up to a whole one
BATCHED_TOKENS = 96  # of an expert, the most that tiles of rows by expert are made for; room says little
RESULT_BYTES = 5 * 1024  # of shared memory, for results on their way to memory


class W4A8(TileConfig, frozen=True, tag="w4a8"):
    """The tile configuration of the GEMM of MXFP4 weights by FP8 activations."""

    weights = (layer_shape.W4A8,)
    persistent = True
    sorts_rows = True

    @classmethod
    def rule(cls, shape: LayerShape, tokens: int) -> LayerTiles:
        config = by_mean_tokens(RULES, shape.per_expert(tokens))
        return LayerTiles(config, config)

    @classmethod
    def batched_experts_rule(cls, shape: LayerShape, capacity: int) -> LayerTiles:
        config = by_mean_tokens(RULES, min(capacity, BATCHED_TOKENS))
        return LayerTiles(config, config)

    @classmethod
    def choices(cls, shape: LayerShape, tokens: int, ruled: LayerTiles) -> list[Choices]:
        near = (config for _, config in RULES if 0.5 <= config.block_m / ruled.block_m <= 2)
        return [Choices.same(config) for config in near]

    def own_refusal(self, shape: LayerShape) -> str:
        n, m = self.block_n, self.block_m
        if n not in (128, 256) or m not in (16, 32, 64, 128, 256) or n * m > 256 * 128:
            return f"block_n {n}, block_m {m} of W4A8"
        if (self.block_k, self.num_warps) != (COLUMNS, 4) or self.num_stages < 3:
            return f"block_k {self.block_k}, num_warps {self.num_warps}, num_stages {self.num_stages} of W4A8"
        return ""

    def shared_bytes(self, shape: LayerShape, *, first: bool) -> int:
        return self.num_stages * (128 * self.block_m + self.block_n // 64 * (4096 + 256)) + RESULT_BYTES

    def widest_first(self, shape: LayerShape) -> bool:
        return True

    def launch(self, g: Gemm) -> None:
        from turnout.kernels.hopper.gemm_w4a8 import expert_gemm_w4a8

        w, (codes, scales) = g.w, _quantized(g)
        n_blocks, groups = w.blocks
        expert_gemm_w4a8[(g.processors,)](
            boxes_of(codes, [self.block_m, COLUMNS], bits=8), scales,
            boxes_of(w.codes.view(-1, 32), [self.block_n // 2, 32], bits=32),
            w.scales, w.alpha, w.any_bias, g.out, g.order, g.table, g.any_weights,
            n_blocks, g.columns, groups, g.out.stride(0), *g.numbers,
            g.kind, not g.first, g.pairs and not g.first, w.bias is not None, self.block_n // 64,
            self.block_m, 4 if self.block_m > 32 else 1, self.num_stages, self.group_m, g.pairs,
            num_warps=self.num_warps, launch_pdl=g.pairs,
        )  # fmt: skip


def _quantized(g: Gemm) -> tuple[Tensor, Tensor]:
    """Launch the quantisation of a GEMM's rows: e4m3 [R, K'], in the order of experts or as they are, and
    float32 [R]. K' is K up to a multiple of COLUMNS."""
    from turnout.kernels.hopper.quantize_rows import quantize_rows, quantize_tokens

    R, (rows, K), columns = len(g.out), g.x.shape, g.w.blocks[1] * COLUMNS
    codes_RK, scales_R = g.space.quantized[0][: R * columns].view(R, columns), g.space.quantized[1]
    padded = power_of_two(columns)
    at_once = max(1, 4096 // padded)
    programs = -(-rows // at_once)
    if g.pairs and g.first:
        quantize_tokens[(programs,)](
            g.x, g.space.place, codes_RK, scales_R, rows, K, g.x.stride(0), g.top_k, columns, padded,
            at_once, True, launch_pdl=True,
        )  # fmt: skip
    else:
        quantize_rows[(min(programs, 16 * g.processors),)](
            g.x, g.table, codes_RK, scales_R, rows, K, g.x.stride(0), columns, padded, at_once, g.pairs,
            g.pairs, launch_pdl=g.pairs,
        )  # fmt: skip
    return codes_RK, scales_R


# block_n, block_m, block_k, num_stages, num_warps, group_m
RULES = (
    (12, W4A8(256, 16, 128, 8, 4, 1)),
    (24, W4A8(256, 32, 128, 8, 4, 1)),
    (48, W4A8(256, 64, 128, 8, 4, 8)),
    (96, W4A8(256, 128, 128, 6, 4, 8)),
    (math.inf, W4A8(128, 256, 128, 5, 4, 8)),
)
