"""Weights and activations in FP8, many tokens per expert: rows lie in the order of experts from the
quantisation of x to the sum over pairs (kernels/hopper/gemm_fp8_specialised.py).

No torch here. Legend: P pairs (token, expert), H hidden, I intermediate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from turnout.formats.spec import FORMATS
from turnout.kernels.common.sizes import power_of_two
from turnout.moe.backends.hopper.launch import Batch, Gemm
from turnout.moe.backends.hopper.layer_shape import LayerShape
from turnout.moe.backends.hopper.tile_config import Choices, LayerTiles, TileConfig
from turnout.vocabulary import Format

if TYPE_CHECKING:
    from torch import Tensor

GROUP = FORMATS[Format.FP8].group  # columns that share a scale
ABOVE = 18  # mean tokens of an expert, from which on this kernel is best
WORTH_TIMING = 8  # the same, from which on it may be


class Fp8Sorted(TileConfig, frozen=True, tag="fp8_sorted"):
    """There is one configuration: the kernel's code has its sizes."""

    weights = (Format.FP8,)
    persistent = True
    sorts_rows = True
    leaves_pairs = False

    @classmethod
    def takes(cls, shape: LayerShape) -> bool:
        """Its tiles are whole: the TMA stores them."""
        return super().takes(shape) and not (shape.w13_rows % ONLY.block_n or shape.hidden % ONLY.block_n)

    @classmethod
    def rule(cls, shape: LayerShape, tokens: int) -> LayerTiles | None:
        return LayerTiles(ONLY, ONLY) if shape.per_expert(tokens) > ABOVE else None

    @classmethod
    def choices(cls, shape: LayerShape, tokens: int, ruled: LayerTiles) -> list[Choices]:
        return [Choices.same(ONLY)] if shape.per_expert(tokens) > WORTH_TIMING else []

    def own_refusal(self, shape: LayerShape) -> str:
        return "" if self == ONLY else f"no configuration of {self.kernel} but {ONLY}"

    def shared_bytes(self, shape: LayerShape, *, first: bool) -> int:
        """GEMM2 gives a stage to the rows it stores, which are larger."""
        stage = GROUP * (self.block_n + self.block_m)
        return self.num_stages * stage + (0 if first else 4 * 64 * 128 * 2 - stage)

    def sort(self, batch: Batch, *, widest_first: bool) -> None:
        """And quantise tokens into the order of experts."""
        from turnout.kernels.hopper.quantize_groups import quantize_places

        super().sort(batch, widest_first=widest_first)
        x_TH, (T, H), k = batch.x_TH, batch.x_TH.shape, batch.ids_TK.shape[1]
        row = power_of_two(H)
        quantize_places[(T,)](
            x_TH, batch.space.place, *_halves(batch.space.y, T * k, H), H, x_TH.stride(0), k, row, True,
            num_warps=min(16, max(4, row // 512)), launch_pdl=True,
        )  # fmt: skip

    def launch(self, g: Gemm) -> None:
        """GEMM1's rows lie where y will be, which is not yet written then; its results in e4m3 where h is."""
        from turnout.kernels.hopper.gemm_fp8_specialised import gemm

        P, K = len(g.out), g.x.shape[1]
        h, h_scale = _halves(g.space.h, P, g.columns if g.first else K)
        rows = _halves(g.space.y, P, K) if g.first else (h, h_scale)
        gemm(
            *rows, g.w.codes, g.w.scales, g.w.bias, h if g.first else g.out, h_scale, g.order, g.table,
            g.any_weights, first=g.first, activation=(str(g.activation.kind), *g.numbers),
            stages=self.num_stages, group=self.group_m, programs=g.processors,
        )  # fmt: skip

    def sum(self, batch: Batch) -> None:
        from turnout.kernels.hopper.sort import sum_places

        (T, H), k, block = batch.out_TH.shape, batch.ids_TK.shape[1], 1024
        few = 2 * batch.shape.local_experts <= batch.shape.num_experts
        sum_places[(T, -(-H // block))](
            batch.space.y[: T * k * H].view(T * k, H), batch.space.place, batch.out_TH, H,
            k, block, few, True, num_warps=2 if few else 4, launch_pdl=True,
        )  # fmt: skip


ONLY = Fp8Sorted(block_n=256, block_m=128, block_k=128, num_stages=4, num_warps=4, group_m=8)


def _halves(region: Tensor, P: int, K: int) -> tuple[Tensor, Tensor]:
    """Of a region of 2 P K bytes: e4m3 [P, K] in the first half, and after it float32 [P K / GROUP]."""
    import torch

    scales = region.view(torch.float32)[P * K // 4 :]
    return region.view(torch.float8_e4m3fn)[: P * K].view(P, K), scales[: P * K // GROUP]
