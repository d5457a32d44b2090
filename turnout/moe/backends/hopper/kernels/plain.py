"""Weights in bf16, any number of tokens (kernels/hopper/gemm.py). No torch here."""

from __future__ import annotations

import math

from turnout.moe.backends.hopper.kernels.tiled import Tiled, programs
from turnout.moe.backends.hopper.launch import Gemm
from turnout.moe.backends.hopper.layer_shape import LayerShape
from turnout.moe.backends.hopper.tile_config import MULTIPROCESSORS, LayerTiles, Rules
from turnout.vocabulary import Format

# Where programs fill the multiprocessors at most once, rows as long as this (columns) gain from tiles with
# more of them in flight: 46 us instead of 59 for 2 tokens of DeepSeek-V3 on one of eight ranks, 38 for 42 for
# one.
LONG = 6144


class Plain(Tiled, frozen=True, tag="plain"):
    """The tile configuration of the GEMM of bf16 weights."""

    weights = (Format.BF16,)

    @classmethod
    def rules(cls) -> Rules[Tiled]:
        return RULES

    @classmethod
    def rule(cls, shape: LayerShape, tokens: int) -> LayerTiles:
        long = shape.unsorted(tokens) and shape.hidden >= LONG
        if long and programs(shape, tokens, DEEP.first) <= MULTIPROCESSORS:
            return DEEP
        return super().rule(shape, tokens)

    def own_refusal(self, shape: LayerShape) -> str:
        wrong = self.block_k not in (64, 128, 256)
        return f"block_k {self.block_k}" if wrong else super().own_refusal(shape)

    def shared_bytes(self, shape: LayerShape, *, first: bool) -> int:
        return 2 * self.num_stages * self.block_k * (self.block_n + self.block_m)

    def launch(self, g: Gemm) -> None:
        from turnout.kernels.hopper.gemm import expert_gemm

        w = g.w
        n_blocks, k_blocks = w.blocks
        expert_gemm[(g.most_tiles * -(-n_blocks // (self.block_n // 64)),)](
            g.x, w.codes, w.any_bias, g.out, g.order, g.table, g.any_weights,
            w.inner, w.padded_rows, g.columns, k_blocks, n_blocks, g.x.stride(0), g.out.stride(0), g.top_k,
            *g.held, *g.numbers,
            g.kind, g.pairs and g.first, g.pairs and not g.first, g.unsorted, w.bias is not None,
            self.block_n, self.block_m, self.block_k // 64, self.num_stages, self.group_m, g.pairs,
            num_warps=self.num_warps, launch_pdl=g.pairs,
        )  # fmt: skip


# block_n, block_m, block_k, num_stages, num_warps, group_m
RULES = (
    (5, Plain(64, 8, 128, 4, 4, 1)),
    (12, Plain(64, 16, 128, 5, 4, 1)),
    (24, Plain(128, 32, 64, 5, 4, 1)),
    (48, Plain(128, 64, 64, 4, 4, 1)),
    (400, Plain(256, 128, 64, 4, 8, 8)),
    (math.inf, Plain(128, 256, 64, 4, 8, 8)),
)
DEEP = LayerTiles(Plain(64, 16, 128, 6, 4, 1), Plain(128, 16, 128, 6, 4, 1))
