"""Weights of 4 bits, any number of tokens (kernels/hopper/gemm_packed.py). No torch here."""

from __future__ import annotations

import math

from turnout.moe.backends.hopper.kernels.tiled import Tiled
from turnout.moe.backends.hopper.launch import Gemm
from turnout.moe.backends.hopper.layer_shape import PACKED, LayerShape
from turnout.moe.backends.hopper.tile_config import Rules


class Packed(Tiled, frozen=True, tag="packed"):
    """The tile configuration of the GEMM of 4-bit weights."""

    weights = (PACKED,)

    @classmethod
    def rules(cls) -> Rules[Tiled]:
        return RULES

    def own_refusal(self, shape: LayerShape) -> str:
        if self.block_n == 256 or self.block_k != 64 or self.num_warps != 4:
            return f"block_n {self.block_n} with num_warps {self.num_warps}, block_k {self.block_k}"
        return super().own_refusal(shape)

    def shared_bytes(self, shape: LayerShape, *, first: bool) -> int:
        return self.num_stages * self.block_k // 64 * (self.block_n // 64 * (2048 + 256) + 128 * self.block_m)

    def launch(self, g: Gemm) -> None:
        from turnout.kernels.hopper.gemm_packed import expert_gemm_packed, most_registers, rest_of

        w = g.w
        n_blocks, k_blocks = w.blocks
        expert_gemm_packed[(g.most_tiles * -(-n_blocks // (self.block_n // 64)),)](
            g.x, w.codes, w.scales, w.alpha, w.any_bias, g.out, g.order, g.table, g.any_weights,
            w.inner, w.padded_rows, g.columns, k_blocks, n_blocks, g.x.stride(0), g.out.stride(0), g.top_k,
            *g.held, *g.numbers,
            w.format, g.kind, g.pairs and g.first, g.pairs and not g.first, g.unsorted, w.bias is not None,
            self.block_n, self.block_m, self.num_stages, rest_of(k_blocks, self.num_stages),
            w.inner % 64 == 0, self.group_m, g.pairs,
            num_warps=4, maxnreg=most_registers(self.block_n, self.block_m), launch_pdl=g.pairs,
        )  # fmt: skip


# block_n, block_m, block_k, num_stages, num_warps, group_m
RULES = (
    (4, Packed(128, 8, 64, 5, 4, 1)),
    (13, Packed(128, 16, 64, 5, 4, 1)),
    (27, Packed(128, 32, 64, 5, 4, 1)),
    (36, Packed(128, 64, 64, 5, 4, 1)),
    (72, Packed(128, 64, 64, 5, 4, 8)),
    (math.inf, Packed(128, 128, 64, 5, 4, 8)),
)
