"""Runner "flashinfer_cutlass": FlashInfer's CUTLASS kernels; bf16, FP8 blocks on Hopper, NVFP4 on Blackwell.

bf16 weights as they are; FP8 weights with the scales of their 128 x 128 blocks, the library rounding the
inputs of both GEMMs per token and 128 columns; NVFP4 W4A4 with the scales of formats.scales.resolve,
where x comes in bf16 and is quantised while it is sorted. FP8 with one scale per weight arrives as blocks
that share it: the library's kernels for it would round inputs by one calibrated scale, which is coarser.

Legend: E experts, N rows, K columns, H hidden, I intermediate.
"""

from __future__ import annotations

import torch
from torch import Tensor

from turnout.formats import layouts
from turnout.formats.experts import ExpertWeights
from turnout.formats.packed import PackedTensor
from turnout.formats.scales import resolve
from turnout.moe.backends.flashinfer import weights_cutlass
from turnout.moe.backends.flashinfer.declaration import CUTLASS
from turnout.moe.backends.flashinfer.fused_moe import CutlassRunner, Prepared, biases


class FlashinferCutlassRunner(CutlassRunner):
    """A `CutlassRunner` (fused_moe.py) of weights in bf16, FP8 blocks or NVFP4."""

    capability = CUTLASS

    def _prepared(self, experts: ExpertWeights) -> Prepared:
        make = {"bf16": self._bf16, "fp8": self._fp8, "nvfp4": self._nvfp4}[experts.format]
        b13 = experts.b13
        if b13 is not None:
            b13 = weights_cutlass.up_gate(b13, gated=self._spec.activation.gated, dim=-1)
        b13, b2 = biases(experts, experts.w2.shape[1], b13, self._device)
        w13, w2, scales, options = make(experts)
        return Prepared(
            w13=w13, w2=w2, inner=experts.w2.shape[2], scales=scales, options=options, b13=b13, b2=b2
        )

    def _bf16(self, experts: ExpertWeights) -> tuple[Tensor, Tensor, list[Tensor], dict[str, bool]]:
        w13, w2 = (w.data.to(self._device, torch.bfloat16).contiguous() for w in (experts.w13, experts.w2))
        return self._up_gate(w13), w2, [], {}

    def _fp8(self, experts: ExpertWeights) -> tuple[Tensor, Tensor, list[Tensor], dict[str, bool]]:
        (w13, s13), (w2, s2) = (self._parts(w) for w in (experts.w13, experts.w2))
        w13 = self._up_gate(w13.view(torch.uint8)).view(w13.dtype)
        return (
            w13,
            w2,
            [self._up_gate(s13.float()), s2.float().clone()],
            {"use_deepseek_fp8_block_scale": True},
        )

    def _nvfp4(self, experts: ExpertWeights) -> tuple[Tensor, Tensor, list[Tensor], dict[str, bool]]:
        (w13, s13), (w2, s2) = (self._parts(w) for w in (experts.w13, experts.w2))
        w13, s13 = self._up_gate(w13), self._up_gate(s13.view(torch.uint8))
        found = resolve(experts)
        a1, a2, alpha1, alpha2 = (
            x.to(self._device, torch.float32).contiguous()
            for x in (found.a1, found.a2, found.alpha1, found.alpha2)
        )
        b1, b2 = (self._tiles(s) for s in (s13, s2.view(torch.uint8)))
        return w13.view(torch.int64), w2.view(torch.int64), [a1, b1, alpha1, a2, b2, alpha2], {}

    def _parts(self, weights: PackedTensor) -> tuple[Tensor, Tensor]:
        assert weights.scale is not None, f"{weights.format} weights carry scales"
        return weights.data.to(self._device).contiguous(), weights.scale.to(self._device).contiguous()

    def _up_gate(self, rows: Tensor) -> Tensor:
        return weights_cutlass.up_gate(rows, gated=self._spec.activation.gated).contiguous()

    def _tiles(self, scales: Tensor) -> Tensor:
        """uint8 [E, N, G] to int32 [E, N padded to 128, G / 4 padded]: the tiles one after the other."""
        E, N, G = scales.shape
        rows, groups = -(-N // layouts.TILE_ROWS) * layouts.TILE_ROWS, -(-G // layouts.TILE_GROUPS)
        return layouts.swizzle(scales).contiguous().view(E, rows, 4 * groups).view(torch.int32)
