"""Expert weights in the form that the Hopper kernels take (kernels/expert_gemm*.py)."""

from __future__ import annotations

import torch
from torch import Tensor

from turnout.formats.packed import PackedTensor
from turnout.formats.spec import FORMATS
from turnout.moe.backends.hopper.fragments import fill, pair_rows, to_fragments
from turnout.moe.backends.hopper.fragments_fp8 import fill_fp8, to_fragments_fp8
from turnout.vocabulary import Format

FP8_GROUP = FORMATS[Format.FP8].group  # columns that share a scale


class Matrix:
    """One GEMM's weights [E, N, K] in the form its kernel takes, with the bias in the same row order.

    paired: rows are gate then up, and become 8 of gate, 8 of up in turn. What is kept as it comes (neither
    paired, nor 4-bit, nor to be moved) is not copied; the rest is made expert by expert.
    """

    def __init__(
        self,
        weights: PackedTensor,
        bias: Tensor | None,
        paired: bool,
        device: torch.device,
        *,
        w4a8: bool = False,
    ) -> None:
        """w4a8: MXFP4 weights that are multiplied with FP8 activations."""
        self.format, self.paired, self._w4a8 = str(weights.format), paired, w4a8
        self.rows, self.inner = weights.shape[1:]
        self.codes: Tensor
        self.scales: Tensor
        self.alpha: Tensor
        if w4a8:
            self._fragments_fp8 = to_fragments_fp8(weights, paired=paired, device=device)
            self.codes, self.scales = self._fragments_fp8.codes, self._fragments_fp8.scales
            self.alpha = self._fragments_fp8.alpha
            self.blocks = self.codes.shape[2], self.codes.shape[1]
            self.padded_rows = 64 * self.blocks[0]
        elif FORMATS[weights.format].bits == 4:
            self._fragments = to_fragments(weights, paired=paired, device=device)
            self.codes, self.scales = self._fragments.codes, self._fragments.scales
            self.alpha = self._fragments.alpha
            self.blocks = self.codes.shape[1], self.codes.shape[2]
            self.padded_rows = 64 * self.blocks[0]
        else:
            dtype = torch.float8_e4m3fn if weights.format == Format.FP8 else torch.bfloat16
            if paired:
                self.codes = torch.empty(weights.shape, dtype=dtype, device=device)
                self._load_rows(weights)
            else:
                self.codes = weights.data.to(device, dtype).contiguous()
            self.alpha = torch.zeros(1, device=device)
            self.scales = self.alpha
            if weights.format == Format.FP8:
                assert weights.scale is not None, "fp8 weights carry scales"
                self.scales = weights.scale.to(device, torch.float32).contiguous()
            columns = FP8_GROUP if weights.format == Format.FP8 else 64
            self.blocks = -(-self.rows // 64), -(-self.inner // columns)
            self.padded_rows = self.rows
        self.bias = None if bias is None else self._bias(bias.to(device, torch.float32))

    def load(self, weights: PackedTensor, bias: Tensor | None) -> None:
        """Take other values of the same shapes and format into the same storage."""
        if self._w4a8:
            fill_fp8(self._fragments_fp8, weights, paired=self.paired)
        elif FORMATS[weights.format].bits == 4:
            fill(self._fragments, weights, paired=self.paired)
        else:
            self._load_rows(weights)
        if weights.format == Format.FP8 and weights.scale is not None:
            self.scales.copy_(weights.scale)
        if self.bias is not None and bias is not None:
            self.bias.copy_(self._bias(bias.to(self.bias.device, torch.float32)))

    def _load_rows(self, weights: PackedTensor) -> None:
        for mine, new in zip(self.codes, weights.data, strict=True):
            rows = new.to(mine.device, mine.dtype).view(torch.uint8)  # for e4m3 lacks operations
            mine.view(torch.uint8).copy_(pair_rows(rows) if self.paired else rows)

    @property
    def any_bias(self) -> Tensor:
        """The bias, or something in its place for a kernel that is told to leave it."""
        return self.alpha if self.bias is None else self.bias

    def _bias(self, bias_EN: Tensor) -> Tensor:
        E, N = bias_EN.shape
        out = bias_EN.new_zeros(E, self.padded_rows)
        if not self.paired:
            out[:, :N] = bias_EN
            return out
        half, padded = N // 2, self.padded_rows // 2
        out[:, :half], out[:, padded : padded + half] = bias_EN[:, :half], bias_EN[:, half:]
        return pair_rows(out.unsqueeze(-1)).squeeze(-1)
