"""Expert weights in the form that the Hopper kernels take (kernels/expert_gemm*.py)."""

from __future__ import annotations

import torch
from torch import Tensor

from turnout.formats.fragments import pair_rows, to_fragments
from turnout.formats.packed import PackedTensor

FP8_GROUP = 128  # columns that share a scale


class Matrix:
    """One GEMM's weights [E, N, K] in the form its kernel takes, with the bias in the same row order."""

    def __init__(
        self, weights: PackedTensor, bias: Tensor | None, paired: bool, device: torch.device
    ) -> None:
        self.format, self.paired = weights.format, paired
        self.rows, self.inner = weights.shape[1:]
        self.codes: Tensor
        self.scales: Tensor
        self.alpha: Tensor
        if weights.format == "fp8":
            assert weights.scale is not None, "fp8 weights carry scales"
            codes = weights.data.to(device).view(torch.uint8)
            self.codes = (pair_rows(codes) if paired else codes.contiguous()).view(torch.float8_e4m3fn)
            self.scales = weights.scale.to(device, torch.float32).contiguous()
            self.alpha = torch.zeros(1, device=device)
            self.blocks = -(-self.rows // 64), self.inner // FP8_GROUP
            self.padded_rows = self.rows
        elif weights.format == "bf16":
            plain = weights.data.to(device, torch.bfloat16)
            self.codes = pair_rows(plain) if paired else plain.contiguous()
            self.scales = self.alpha = torch.zeros(1, device=device)
            self.blocks = -(-self.rows // 64), -(-self.inner // 64)
            self.padded_rows = self.rows
        else:
            fragments = to_fragments(weights, paired=paired, device=device)
            self.codes, self.scales, self.alpha = fragments.codes, fragments.scales, fragments.alpha
            self.blocks = fragments.codes.shape[1], fragments.codes.shape[2]
            self.padded_rows = 64 * self.blocks[0]
        self.bias = None if bias is None else self._bias(bias.to(device, torch.float32))

    @property
    def any_bias(self) -> Tensor:
        """The bias, or something in its place for a kernel that is told to leave it."""
        return self.alpha if self.bias is None else self.bias

    def load(self, other: Matrix) -> None:
        """Take over another's values in the same storage."""
        for mine, new in (
            (self.codes, other.codes),
            (self.scales, other.scales),
            (self.alpha, other.alpha),
            (self.bias, other.bias),
        ):
            if mine is not None and new is not None:
                mine.view(torch.uint8).copy_(new.view(torch.uint8))

    def _bias(self, bias_EN: Tensor) -> Tensor:
        E, N = bias_EN.shape
        out = bias_EN.new_zeros(E, self.padded_rows)
        if not self.paired:
            out[:, :N] = bias_EN
            return out
        half, padded = N // 2, self.padded_rows // 2
        out[:, :half], out[:, padded : padded + half] = bias_EN[:, :half], bias_EN[:, half:]
        return pair_rows(out.unsqueeze(-1)).squeeze(-1)
