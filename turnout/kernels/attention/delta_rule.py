"""One token of each request through Gated DeltaNet in Triton, in place in its slot.

Convolution, gates, the state's update and the gated norm are one launch: each step of its own would be but a
launch, and the state, 64 kB of each value head, is read and written once. A program has a key head of a
request, whose window no other program touches, and takes its value heads one after the other. Slots and
positions are read on the device, so that a graph captures it. Everything is computed in float32;
attention/delta_rule.py is the reference.

Legend: B requests, X what the layer computed of a token, C channels of the convolution, W its width, Hk/Hv
key/value heads, R = Hv / Hk, Dk/Dv their sizes, DkP/DvP powers of two from these on.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from turnout.kernels.common.dependent import launches_early

MAX_HEAD = 128  # a head's state is one tile
NUM_WARPS = 4


@triton.jit
def read_taps(row_ptr, window_ptr, C, c, held, seen, W: tl.constexpr, WP: tl.constexpr):
    """[WP, channels] of channels c, where `held`: what the convolution sees of them, oldest token first.

    seen: where the window [W - 1, C] holds anything; elsewhere it counts as zeros.
    """
    w = tl.arange(0, WP)[:, None]
    before = tl.load(window_ptr + w * C + c[None, :], mask=(w < W - 1) & seen[None, :], other=0.0)
    now = tl.load(row_ptr + 0 * w + c[None, :], mask=(w == W - 1) & held[None, :], other=0.0)
    return before + now


@triton.jit
def convolve(taps, conv_ptr, C, c, held, W: tl.constexpr, WP: tl.constexpr):
    """silu of the convolution of channels c."""
    w = tl.arange(0, WP)[:, None]
    weights = tl.load(conv_ptr + w * C + c[None, :], mask=(w < W) & held[None, :], other=0.0)
    sums = tl.sum(taps.to(tl.float32) * weights.to(tl.float32), 0)
    return sums / (1.0 + tl.exp(-sums))


@triton.jit
def move_on(taps, window_ptr, C, c, held, W: tl.constexpr, WP: tl.constexpr):
    """Leave the window of channels c a token later. All threads must have read it."""
    w = tl.arange(0, WP)[:, None]
    tl.store(window_ptr + (w - 1) * C + c[None, :], taps, mask=(w >= 1) & (w < W) & held[None, :])


@triton.jit
def step_heads(
    mixed_ptr, slots_ptr, positions_ptr, windows_ptr, states_ptr, conv_ptr, decay_ptr, bias_ptr, norm_ptr,
    out_ptr, X, Hk, scale, eps,
    R: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DKP: tl.constexpr, DVP: tl.constexpr,
    W: tl.constexpr, WP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [B, Hv * DV] of mixed [B, X]. windows [slots, W - 1, C], states float32 [slots, Hv, DK, DV].

    A position of 0 begins with zeros, whatever the slot holds. Everything is read as early as it can be: a
    program waits for memory, and few of them fit on a multiprocessor.
    """
    b = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1)
    i = tl.arange(0, DKP)
    j = tl.arange(0, DVP)
    Hv = Hk * R
    C = 2 * Hk * DK + Hv * DV
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.load(slots_ptr + b).to(tl.int64)
    goes_on = tl.load(positions_ptr + b) > 0
    row, window = mixed_ptr + b * X, windows_ptr + slot * (W - 1) * C
    keys, values = i < DK, j < DV
    tile = i[:, None] * DV + j[None, :]
    both = keys[:, None] & values[None, :]
    first = states_ptr + (slot * Hv + h * R) * DK * DV + tile
    state = tl.load(first, mask=both & goes_on, other=0.0)
    cq = h * DK + i
    ck = Hk * DK + cq
    q_taps = read_taps(row, window, C, cq, keys, keys & goes_on, W, WP)
    k_taps = read_taps(row, window, C, ck, keys, keys & goes_on, W, WP)
    q = convolve(q_taps, conv_ptr, C, cq, keys, W, WP)
    k = convolve(k_taps, conv_ptr, C, ck, keys, W, WP)
    q *= scale * tl.rsqrt(tl.sum(q * q, 0) + 1e-6)
    k *= tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
    tl.debug_barrier()
    move_on(q_taps, window, C, cq, keys, W, WP)
    move_on(k_taps, window, C, ck, keys, W, WP)
    for r in tl.static_range(R):
        g = h * R + r
        cv = 2 * Hk * DK + g * DV + j
        v_taps = read_taps(row, window, C, cv, values, values & goes_on, W, WP)
        a = tl.load(row + C + Hv * DV + Hv + g).to(tl.float32) + tl.load(bias_ptr + g)
        decay = tl.load(decay_ptr + g)
        beta = 1.0 / (1.0 + tl.exp(-tl.load(row + C + Hv * DV + g).to(tl.float32)))
        z = tl.load(row + C + g * DV + j, mask=values, other=0.0).to(tl.float32)
        norm = tl.load(norm_ptr + j, mask=values, other=0.0).to(tl.float32)
        v = convolve(v_taps, conv_ptr, C, cv, values, W, WP)
        tl.debug_barrier()
        move_on(v_taps, window, C, cv, values, W, WP)
        soft = tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(a)))
        state *= tl.exp(decay * soft)
        d = beta * (v - tl.sum(state * k[:, None], 0))
        state += k[:, None] * d[None, :]
        tl.store(first + r * DK * DV, state, mask=both)
        o = tl.sum(state * q[:, None], 0)
        if r + 1 < R:
            state = tl.load(first + (r + 1) * DK * DV, mask=both & goes_on, other=0.0)
        y = o * tl.rsqrt(tl.sum(o * o, 0) / DV + eps) * norm * z / (1.0 + tl.exp(-z))
        tl.store(out_ptr + (b * Hv + g) * DV + j, y.to(out_ptr.dtype.element_ty), mask=values)


def step(
    mixed_BX: Tensor,
    slots_B: Tensor,
    positions_B: Tensor,
    windows_SWC: Tensor,
    states_SHKV: Tensor,
    conv_WC: Tensor,
    decay_H: Tensor,
    bias_H: Tensor,
    norm_V: Tensor,
    eps: float,
) -> Tensor:
    """[B, Hv Dv] of one token of each request, whose window and state, in its slot, move on by it.

    slots, positions: int64. windows [S, W - 1, C] and states [S, Hv, Dk, Dv]: contiguous.
    """
    mixed_BX = mixed_BX.contiguous()
    B, Hv, Dk, Dv = len(mixed_BX), *states_SHKV.shape[1:]
    Hk = (conv_WC.shape[1] - Hv * Dv) // (2 * Dk)
    out_BY = mixed_BX.new_empty(B, Hv * Dv)
    if B:
        early = launches_early(mixed_BX.device)
        step_heads[(B, Hk)](
            mixed_BX, slots_B, positions_B, windows_SWC, states_SHKV, conv_WC, decay_H, bias_H, norm_V,
            out_BY, mixed_BX.shape[1], Hk, Dk**-0.5, eps,
            Hv // Hk, Dk, Dv, *map(triton.next_power_of_2, (Dk, Dv)),
            len(conv_WC), triton.next_power_of_2(len(conv_WC)), early,
            num_warps=NUM_WARPS, launch_pdl=early,
        )  # fmt: skip
    return out_BY
