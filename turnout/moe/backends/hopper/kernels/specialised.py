"""Weights of 4 bits or bf16, many tokens per expert: four warps load, eight multiply
(kernels/hopper/gemm_specialised.py). No torch here."""

from __future__ import annotations

from turnout.moe.backends.hopper.launch import Gemm, boxes_of
from turnout.moe.backends.hopper.layer_shape import PACKED, LayerShape
from turnout.moe.backends.hopper.tile_config import Choices, LayerTiles, TileConfig
from turnout.vocabulary import Format

WARPS = 12
EPILOGUE_BYTES = 6 * 1024  # of shared memory, for results and barriers
ABOVE = {PACKED: 64, Format.BF16: 48}  # mean tokens of an expert, from which on the first of CHOICES is best


class Specialised(TileConfig, frozen=True, tag="specialised"):
    """The tile configuration of the GEMM whose warps divide loading and multiplying."""

    weights = (PACKED, Format.BF16)
    persistent = True

    @classmethod
    def rule(cls, shape: LayerShape, tokens: int) -> LayerTiles | None:
        best = CHOICES[shape.weights][0]
        return LayerTiles(best, best) if shape.per_expert(tokens) > ABOVE[shape.weights] else None

    @classmethod
    def choices(cls, shape: LayerShape, tokens: int, ruled: LayerTiles) -> list[Choices]:
        few = 4 * shape.per_expert(tokens)
        return [Choices.same(config) for config in CHOICES[shape.weights] if few > config.block_m]

    def own_refusal(self, shape: LayerShape) -> str:
        n, m = self.block_n, self.block_m
        widths = (64, 128, 144, 160) if shape.weights == PACKED else (64, 128, 256)
        if self.num_warps != WARPS or self.block_k not in (64, 128) or not 3 <= self.num_stages <= 12:
            return f"num_warps {self.num_warps}, block_k {self.block_k}, num_stages {self.num_stages}"
        if n not in (128, 256) or m not in widths or n * m > 256 * 160:
            return f"block_n {n}, block_m {m} with specialised warps"
        return ""

    def shared_bytes(self, shape: LayerShape, *, first: bool) -> int:
        weights = self.block_n // 64 * (2048 + 256) if shape.weights == PACKED else 128 * self.block_n
        return self.num_stages * self.block_k // 64 * (weights + 128 * self.block_m) + EPILOGUE_BYTES

    def widest_first(self, shape: LayerShape) -> bool:
        return shape.weights == PACKED

    def launch(self, g: Gemm) -> None:
        from turnout.kernels.hopper.gemm_specialised import expert_gemm_specialised

        w, steps = g.w, self.block_k // 64
        gather, codes = g.pairs and g.first, w.codes
        n_blocks, k_blocks = w.blocks
        if w.format == Format.BF16:
            codes = boxes_of(codes.view(-1, w.inner), [self.block_n, 64], bits=16)
        tokens = 1 << self.block_m.bit_length() - 1
        extra = self.block_m - tokens
        # Narrow tiles of bf16 wait for their weights, however few their products.
        widths = 4 if w.format == Format.BF16 else min(8, tokens // 16)
        rows = [g.x if gather or not m else boxes_of(g.x, [m, 64], bits=16) for m in (tokens, extra)]
        expert_gemm_specialised[(g.processors,)](
            *rows, codes, w.scales, w.alpha, w.any_bias, g.out, g.order, g.table,
            g.any_weights,
            w.inner, w.padded_rows, g.columns, k_blocks, n_blocks, g.x.stride(0), g.out.stride(0), g.top_k,
            *g.numbers,
            w.format, g.kind, gather, g.pairs and not g.first, w.bias is not None,
            self.block_n, tokens, extra, widths, steps, self.num_stages, self.group_m, k_blocks % steps > 0,
            g.pairs,
            num_warps=4, launch_pdl=g.pairs,
        )  # fmt: skip


# block_n, block_m, block_k, num_stages, num_warps, group_m
CHOICES = {
    PACKED: (Specialised(256, 128, 128, 4, WARPS, 8), Specialised(256, 144, 128, 4, WARPS, 8)),
    Format.BF16: (Specialised(256, 128, 64, 4, WARPS, 8), Specialised(128, 256, 64, 4, WARPS, 8)),
}
