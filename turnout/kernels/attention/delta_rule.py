"""One token of each request through Gated DeltaNet in Triton, in place in its slot.

Convolution, gates, the state's update and the gated norm are one launch: each step of its own would be but a
launch, and the state, 64 kB of each value head, is read and written once. A program has a key head of a
request, whose window no other program touches, and takes its value heads one after the other. Of few
requests these programs would be few and long: then a program has some columns of a value head's state, and
the last of those of a key head to be done moves the window on and norms. Slots and positions are read on the
device, so that a graph captures it. Everything is computed in float32; attention/delta_rule.py is the
reference.

Legend: B requests, X what the layer computed of a token, C channels of the convolution, W its width, Hk/Hv
key/value heads, R = Hv / Hk, Dk/Dv their sizes, DkP/DvP powers of two from these on, P parts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from turnout.kernels.common.dependent import launches_early
from turnout.kernels.common.parts import count_parts

NUM_WARPS = 4
FEW = 4  # requests, whose states are divided by columns
COLUMNS = 32


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
def inverse_length(x):
    """1 / |x| of a key or a query."""
    return tl.rsqrt(tl.sum(x * x, 0) + 1e-6)


@triton.jit
def softplus(x):
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(x)))


@triton.jit
def gated_norm(o, norm, z, DV: tl.constexpr, eps):
    """The RMS norm of o [DV], by weights `norm`, times silu(z)."""
    return o * tl.rsqrt(tl.sum(o * o, 0) / DV + eps) * norm * z / (1.0 + tl.exp(-z))


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
    q *= scale * inverse_length(q)
    k *= inverse_length(k)
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
        state *= tl.exp(decay * softplus(a))
        d = beta * (v - tl.sum(state * k[:, None], 0))
        state += k[:, None] * d[None, :]
        tl.store(first + r * DK * DV, state, mask=both)
        o = tl.sum(state * q[:, None], 0)
        if r + 1 < R:
            state = tl.load(first + (r + 1) * DK * DV, mask=both & goes_on, other=0.0)
        y = gated_norm(o, norm, z, DV, eps)
        tl.store(out_ptr + (b * Hv + g) * DV + j, y.to(out_ptr.dtype.element_ty), mask=values)


@triton.jit
def read_sum(ptr, held, part_stride, PARTS: tl.constexpr, KIND: tl.constexpr):
    """What is at `ptr`, where `held`, the sum of PARTS, rounded to KIND."""
    x = tl.load(ptr, mask=held, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        x += tl.load(ptr + part * part_stride, mask=held, other=0.0).to(tl.float32)
    return x.to(KIND)


@triton.jit
def read_new_taps(
    row_ptr, window_ptr, part_stride, C, c, held, seen, W: tl.constexpr, WP: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """As `read_taps`, of a row in parts."""
    w = tl.arange(0, WP)[:, None]
    now = read_sum(row_ptr + c, held, part_stride, PARTS, window_ptr.dtype.element_ty)
    before = tl.load(window_ptr + w * C + c[None, :], mask=(w < W - 1) & seen[None, :], other=0.0)
    return tl.where(w == W - 1, now[None, :], before)


@triton.jit(do_not_specialize=["part_stride"])
def step_columns(
    mixed_ptr, slots_ptr, positions_ptr, windows_ptr, states_ptr, conv_ptr, decay_ptr, bias_ptr, norm_ptr,
    o_ptr, done_ptr, out_ptr, X, Hk, part_stride, scale, eps,
    R: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DKP: tl.constexpr, DVP: tl.constexpr,
    COLUMNS: tl.constexpr, W: tl.constexpr, WP: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As `step_heads`, of mixed [B, X], or of the sum of PARTS, `part_stride` apart. A program has COLUMNS of
    a value head.

    o float32 [B, Hv, DV]: what programs leave for the last of a key head. done int32 [B, Hk]: how many are
    done; 0, and 0 again in the end.
    """
    BLOCKS: tl.constexpr = (DV + COLUMNS - 1) // COLUMNS
    b = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1)
    g = h * R + tl.program_id(2) // BLOCKS
    i = tl.arange(0, DKP)
    j = tl.program_id(2) % BLOCKS * COLUMNS + tl.arange(0, COLUMNS)
    Hv = Hk * R
    C = 2 * Hk * DK + Hv * DV
    kind: tl.constexpr = windows_ptr.dtype.element_ty
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.load(slots_ptr + b).to(tl.int64)
    goes_on = tl.load(positions_ptr + b) > 0
    row, window = mixed_ptr + b * X, windows_ptr + slot * (W - 1) * C
    keys, values = i < DK, j < DV
    both = keys[:, None] & values[None, :]
    at = states_ptr + ((slot * Hv + g) * DK + i[:, None]) * DV + j[None, :]
    state = tl.load(at, mask=both & goes_on, other=0.0)
    cq = h * DK + i
    ck = Hk * DK + cq
    cv = 2 * Hk * DK + g * DV + j
    q_taps = read_new_taps(row, window, part_stride, C, cq, keys, keys & goes_on, W, WP, PARTS)
    k_taps = read_new_taps(row, window, part_stride, C, ck, keys, keys & goes_on, W, WP, PARTS)
    v_taps = read_new_taps(row, window, part_stride, C, cv, values, values & goes_on, W, WP, PARTS)
    of_head = row + C + Hv * DV + g
    b_logit = read_sum(of_head, True, part_stride, PARTS, kind).to(tl.float32)
    a = read_sum(of_head + Hv, True, part_stride, PARTS, kind).to(tl.float32) + tl.load(bias_ptr + g)
    q = convolve(q_taps, conv_ptr, C, cq, keys, W, WP)
    k = convolve(k_taps, conv_ptr, C, ck, keys, W, WP)
    v = convolve(v_taps, conv_ptr, C, cv, values, W, WP)
    q *= scale * inverse_length(q)
    k *= inverse_length(k)
    soft = softplus(a)
    state *= tl.exp(tl.load(decay_ptr + g) * soft)
    d = (v - tl.sum(state * k[:, None], 0)) / (1.0 + tl.exp(-b_logit))
    state += k[:, None] * d[None, :]
    tl.store(at, state, mask=both)
    tl.store(o_ptr + (b * Hv + g) * DV + j, tl.sum(state * q[:, None], 0), mask=values)
    tl.debug_barrier()
    # Whoever finds that all others are done sees what they left, and knows that they have read the window.
    if tl.atomic_add(done_ptr + b * Hk + h, 1, sem="acq_rel") == R * BLOCKS - 1:
        tl.store(done_ptr + b * Hk + h, 0)
        end_heads(
            row, window, o_ptr, norm_ptr, out_ptr, part_stride, C, Hk, b, h, cq, ck, keys, goes_on, eps,
            R, DK, DV, DVP, W, WP, PARTS,
        )  # fmt: skip


@triton.jit
def end_heads(
    row, window, o_ptr, norm_ptr, out_ptr, part_stride, C, Hk, b, h, cq, ck, keys, goes_on, eps,
    R: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, W: tl.constexpr,
    WP: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Move the window of key head h and its value heads on, and norm what they gave, o [B, Hv, DV]. cq, ck:
    the channels of the head's query and key, where `keys`."""
    Hv = Hk * R
    q_taps = read_new_taps(row, window, part_stride, C, cq, keys, keys & goes_on, W, WP, PARTS)
    k_taps = read_new_taps(row, window, part_stride, C, ck, keys, keys & goes_on, W, WP, PARTS)
    tl.debug_barrier()
    move_on(q_taps, window, C, cq, keys, W, WP)
    move_on(k_taps, window, C, ck, keys, W, WP)
    n = tl.arange(0, DVP)
    whole = n < DV
    norm = tl.load(norm_ptr + n, mask=whole, other=0.0).to(tl.float32)
    for r in tl.static_range(R):
        head = (h * R + r) * DV + n
        c = 2 * Hk * DK + head
        o = tl.load(o_ptr + b * Hv * DV + head, mask=whole, other=0.0, cache_modifier=".cg")
        z = read_sum(row + C + head, whole, part_stride, PARTS, window.dtype.element_ty).to(tl.float32)
        taps = read_new_taps(row, window, part_stride, C, c, whole, whole & goes_on, W, WP, PARTS)
        tl.debug_barrier()
        move_on(taps, window, C, c, whole, W, WP)
        y = gated_norm(o, norm, z, DV, eps)
        tl.store(out_ptr + b * Hv * DV + head, y.to(out_ptr.dtype.element_ty), mask=whole)


def step(
    mixed: Tensor,
    slots_B: Tensor,
    positions_B: Tensor,
    windows_SWC: Tensor,
    states_SHKV: Tensor,
    conv_WC: Tensor,
    decay_H: Tensor,
    bias_H: Tensor,
    norm_V: Tensor,
    eps: float,
    done_X: Tensor | None = None,
) -> Tensor:
    """[B, Hv Dv] of one token of each request, whose window and state, in its slot, move on by it.

    mixed: [B, X]; of no more than FEW requests with `done`, int32 [FEW Hk] that is 0 between calls, also
    float32 parts [P, B, X], whose sum is meant. slots, positions: int64. windows [S, W - 1, C] and states
    [S, Hv, Dk, Dv]: contiguous.
    """
    mixed = mixed.contiguous()
    (B, X), (Hv, Dk, Dv), W = mixed.shape[-2:], states_SHKV.shape[1:], len(conv_WC)
    Hk = (conv_WC.shape[1] - Hv * Dv) // (2 * Dk)
    out_BY = windows_SWC.new_empty(B, Hv * Dv)
    if not B:
        return out_BY
    held = mixed, slots_B, positions_B, windows_SWC, states_SHKV, conv_WC, decay_H, bias_H, norm_V
    sizes = Hv // Hk, Dk, Dv, *map(triton.next_power_of_2, (Dk, Dv))
    early = launches_early(mixed.device)
    if done_X is None or B > FEW:
        step_heads[(B, Hk)](
            *held, out_BY, X, Hk, Dk**-0.5, eps, *sizes, W, triton.next_power_of_2(W), early,
            num_warps=NUM_WARPS, launch_pdl=early,
        )  # fmt: skip
        return out_BY
    o_BHV = torch.empty(B, Hv, Dv, dtype=torch.float32, device=mixed.device)
    columns = min(COLUMNS, triton.next_power_of_2(Dv))
    step_columns[(B, Hk, Hv // Hk * triton.cdiv(Dv, columns))](
        *held, o_BHV, done_X, out_BY, X, Hk, B * X, Dk**-0.5, eps, *sizes, columns,
        W, triton.next_power_of_2(W), count_parts(mixed), early,
        num_warps=NUM_WARPS, launch_pdl=early,
    )  # fmt: skip
    return out_BY
