"""The half of a decoder layer that keeps a state of each request, as one call for a step of few tokens.

Gated DeltaNet (delta_rule.py) with the norm before it and its two projections; decoder_layer.py says why, and
when.

Legend: N tokens of the step, B requests, H hidden, X what is computed of a token, C channels of the
convolution, W its width, Hk/Hv key/value heads, R = Hv / Hk, Dk/Dv their sizes, Y = Hv Dv.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from turnout.kernels.cpu import delta_rule, experts
from turnout.kernels.cpu.decoder_layer import Bound, dots_phase, in_one_call, norm_phase, residual
from turnout.kernels.cpu.phases import PHASE, begin, end
from turnout.kernels.cpu.team import floats, integers, phased
from turnout.kernels.cpu.threads import threads_for

_advance = delta_rule._advance


@dataclass(frozen=True)
class Requests:
    """Those of a step, and where a layer keeps their states: see `delta_rule.advance`."""

    slots_B: Tensor
    positions_B: Tensor
    ends_B: Tensor | None
    windows_SWC: Tensor
    states_SHKV: Tensor


@phased(26, 3)
def _recurrent_half(phases, threads, given):
    """sums [N, H] = x + delta (0: x is the sum); out [N, H] = what the layer makes of its norm, projected.

    space: of (H + X + Y) N float32. The rest: see `_norm` and `_advance`.
    """
    (
        x, delta, sums, out, space, N, ends, slots, positions, B, windows, states,
        gain, mixed_weight, conv, W, decay, bias, norm, out_weight, H, X, Hk, R, Dk, Dv,
    ) = integers(given, 26)  # fmt: skip
    eps, scale, norm_eps = floats(given + 26 * 8, 3)
    mixed = space + N * H * 4
    y = mixed + N * X * 4
    norm_phase(phases, threads, x, delta, gain, sums, space, N, H, eps)
    phases += PHASE
    dots_phase(phases, threads, space, N, mixed_weight, X, H, mixed)
    phases += PHASE
    begin(phases)
    _advance(
        phases, mixed, X * 4, ends, slots, positions, B, windows, states, conv, W, decay, bias, norm, y,
        Hk, R, Dk, Dv, scale, norm_eps,
    )  # fmt: skip
    end(phases)
    phases += PHASE
    dots_phase(phases, threads, y, N, out_weight, H, Hk * R * Dv, out)


@dataclass(kw_only=True, eq=False)
class RecurrentHalf(Bound):
    """Norm, projections and Gated DeltaNet. Weights are contiguous float32; see `DeltaCell`."""

    mixed_XH: Tensor
    out_HY: Tensor
    conv_WC: Tensor
    decay_H: Tensor
    bias_H: Tensor
    norm_D: Tensor
    norm_eps: float
    key_heads: int

    def __post_init__(self) -> None:
        (X, H), (W, C), Hv, Dv = self.mixed_XH.shape, self.conv_WC.shape, len(self.decay_H), len(self.norm_D)
        Hk, Y = self.key_heads, Hv * Dv
        Dk = (C - Y) // (2 * Hk)
        self._dense, self._others, self._room = (X + Y) * H, 3 * Y * Dk, H + X + Y
        self._bound = (
            self.mixed_XH.data_ptr(), self.conv_WC.data_ptr(), W, self.decay_H.data_ptr(),
            self.bias_H.data_ptr(), self.norm_D.data_ptr(), self.out_HY.data_ptr(), H, X, Hk, Hv // Hk,
            Dk, Dv,
        )  # fmt: skip
        self._scale = Dk**-0.5

    def __call__(
        self, x_NH: Tensor, delta_NH: Tensor | None, gain_H: Tensor, eps: float, requests: Requests
    ) -> tuple[Tensor, Tensor] | None:
        """(x + delta, what the layer makes of its norm), float32 [N, H]; None for a step that is not one
        call.

        gain: contiguous float32, the weight of the norm. States of the requests move on.
        """
        N = len(x_NH)
        if not in_one_call(N, N * self._dense):
            return None
        x_NH, delta_NH, sums_NH, out_NH = residual(x_NH, delta_NH)
        space = torch.empty(N * self._room)
        slots_B = requests.slots_B
        _recurrent_half(
            threads_for(N * (self._dense + self._others)), self, x_NH.data_ptr(),
            experts.address(delta_NH), sums_NH.data_ptr(), out_NH.data_ptr(), space.data_ptr(), N,
            experts.address(requests.ends_B), slots_B.data_ptr(), requests.positions_B.data_ptr(),
            len(slots_B), requests.windows_SWC.data_ptr(), requests.states_SHKV.data_ptr(),
            gain_H.data_ptr(), *self._bound, eps, self._scale, self.norm_eps,
        )  # fmt: skip
        return sums_NH, out_NH
