"""The two batch layouts, and hidden states with their scales.

Legend: T tokens, H hidden, k top-k, E_loc local experts, C capacity per expert.
Padding has one name everywhere: expert id -1 with weight 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from turnout.formats import fp8, nvfp4
from turnout.vocabulary import Format, Layout


@dataclass(frozen=True, kw_only=True)
class Hidden:
    """Hidden states `[..., H]` in a wire format: "bf16" (any float dtype), "fp8" or "nvfp4".

    fp8:   data e4m3 [..., H], scale float32 [..., H/128]
    nvfp4: data uint8 [..., H/2], scale e4m3 [..., H/16], global_scale float32 scalar (multiplies)
    """

    data: Tensor
    format: Format = Format.BF16
    scale: Tensor | None = None
    global_scale: Tensor | None = None

    def decode(self) -> Tensor:
        """[..., H] as numbers: `data` itself for "bf16", float32 for the others."""
        if self.format == Format.BF16:
            return self.data
        assert self.scale is not None, f"{self.format} hidden states carry scales"
        if self.format == Format.FP8:
            return fp8.decode_activation(self.data, self.scale)
        assert self.global_scale is not None, "nvfp4 hidden states carry a global scale"
        return nvfp4.decode(self.data, self.scale, self.global_scale)


@dataclass(frozen=True, kw_only=True)
class LateChoice:
    """The scores of one token whose experts the runner's own kernels choose, by their softmax.

    logits: float32 [P, 1, E], whose sum over P is meant. of_all: weights are shares of all experts' softmax,
    not of the chosen ones'; times `scaling` either way. real: bool [1], False if the token is padding.
    counts: int64 [E], grow by the choices.
    """

    logits_P1E: Tensor
    top_k: int
    of_all: bool
    scaling: float
    real_1: Tensor | None
    counts_E: Tensor


@dataclass(frozen=True, kw_only=True)
class TokensBatch:
    """Layout "tokens": the runner applies the top-k weights and sums over k, giving [T, H].

    adds_parts: it may leave a sum to whoever reads the result, and give parts [P, T, H], the last dimension
    contiguous, which hold until any layer's next call; rows of padding are then of any value. choice: for a
    runner that `chooses`, and then ids and weights hold nothing.
    """

    layout: ClassVar[Layout] = Layout.TOKENS
    hidden: Hidden  # [T, H]
    topk_ids: Tensor  # int32 [T, k], global expert ids, -1 is padding
    topk_weights: Tensor  # float32 [T, k]
    adds_parts: bool = False
    choice: LateChoice | None = None


@dataclass(frozen=True, kw_only=True)
class ExpertsBatch:
    """Layout "batched_experts": C rows per local expert; output [E_loc, C, H] is unweighted."""

    layout: ClassVar[Layout] = Layout.BATCHED_EXPERTS
    hidden: Hidden  # [E_loc, C, H]
    counts: Tensor  # int32 [E_loc], on the device: rows in use per expert
