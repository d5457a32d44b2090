"""One row's residual sum, norm, product by a router's matrix and choice of experts, in one launch (Triton).

As `multiply_normed_row` (normed_row.py), whose parts of logits a launch of its own adds up and chooses by
(route.py). Here the last program to leave its parts does (route_by_counting.py), which a counter tells it
that it leaves at 0.

Legend: H hidden (the product's inputs), E experts, EP its power of two, k top-k, KP its power of two, P
parts of delta.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from turnout.kernels.common.dependent import launches_early
from turnout.kernels.common.route_by_counting import MOST_EXPERTS, choose_by_counting
from turnout.kernels.common.split_gemm import OUTPUTS, pieces


@triton.jit
def choose_of_normed_row(
    x_ptr, delta_ptr, gain_ptr, w_ptr, sum_ptr, normed_ptr, y_ptr, done_ptr,
    real_ptr, ids_ptr, weights_ptr, counts_ptr, E, H, eps, w_stride, scaling,
    PARTS: tl.constexpr, HP: tl.constexpr, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr,
    PIECES: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, EP: tl.constexpr, OF_ALL: tl.constexpr,
    RENORMALIZE: tl.constexpr, PADDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As `multiply_normed_row`, y float32 [PIECES, E], then ids int32 [K] and weights float32 [K] by
    `choose_by_counting`. done int32 [1]: 0 before and after. real: bool [1], if PADDED."""
    tile = tl.program_id(0)
    piece = tl.program_id(1)
    m = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    c = piece * COLUMNS + tl.arange(0, COLUMNS)
    h = tl.arange(0, HP)
    held = h < H
    kind: tl.constexpr = x_ptr.dtype.element_ty
    w_at = w_ptr + m.to(tl.int64)[:, None] * w_stride + c[None, :]
    w = tl.load(w_at, mask=m[:, None] < E, other=0.0)
    gain = tl.load(gain_ptr + c).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    whole = tl.load(x_ptr + h, mask=held, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + c).to(tl.float32)
    for i in tl.static_range(PARTS):
        whole += tl.load(delta_ptr + i * H + h, mask=held, other=0.0).to(tl.float32)
        x += tl.load(delta_ptr + i * H + c).to(tl.float32)
    whole = whole.to(kind).to(tl.float32)
    rounded = x.to(kind)
    scale = tl.rsqrt(tl.sum(whole * whole, 0) / H + eps)
    normed = (rounded.to(tl.float32) * scale * gain).to(kind)
    y = tl.sum(w.to(tl.float32) * normed.to(tl.float32)[None, :], 1)
    tl.store(y_ptr + piece * E + m, y, mask=m < E)
    tl.debug_barrier()
    # Whoever finds that all others are done sees what they left.
    before = tl.atomic_add(done_ptr, 1, sem="acq_rel")
    first = tl.full([COLUMNS], 0, tl.int32) + tile == 0
    if PARTS > 0:
        tl.store(sum_ptr + c, rounded, mask=first)
    tl.store(normed_ptr + c, normed, mask=first)
    if before == tl.num_programs(0) * PIECES - 1:
        tl.store(done_ptr, 0)
        choose_by_counting(
            y_ptr, real_ptr, ids_ptr, weights_ptr, counts_ptr, scaling, E, E,
            PIECES, K, KP, EP, OF_ALL, RENORMALIZE, PADDED,
        )  # fmt: skip


def chosen(
    x_1H: Tensor,
    delta: Tensor | None,
    gain_H: Tensor,
    eps: float,
    weight_EH: Tensor,
    top_k: int,
    done_1: Tensor,
    *,
    of_all: bool,
    renormalize: bool,
    scaling: float,
    real_1: Tensor | None,
    counts_E: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """(x + delta, its RMS norm times gain, ids int32 [1, k], weights float32 [1, k]) of one row: what
    `normed_parts` and `route.choose` give; None where separate kernels do better.

    x: [1, H] of a 16-bit type, which gain and weight have too. delta: [1, H], or parts of it [P, 1, H]. done:
    int32 [1], 0 before and after. Other arguments as of `route.choose`.
    """
    (N, H), E = x_1H.shape, len(weight_EH)
    width, steps = pieces(N, E, H)
    if N != 1 or steps != 1 or H % width or x_1H.dtype not in (torch.bfloat16, torch.float16):
        return None
    if E > MOST_EXPERTS or weight_EH.dtype != x_1H.dtype:
        return None
    x_1H = x_1H.contiguous()
    total_1H = x_1H if delta is None else torch.empty_like(x_1H)
    normed_1H = torch.empty_like(x_1H)
    y_PE = torch.empty(H // width, E, dtype=torch.float32, device=x_1H.device)
    ids_1K = torch.empty(1, top_k, dtype=torch.int32, device=x_1H.device)
    weights_1K = torch.empty(1, top_k, dtype=torch.float32, device=x_1H.device)
    count = 0 if delta is None else len(delta) if delta.dim() == 3 else 1
    early = launches_early(x_1H.device)
    choose_of_normed_row[(-(-E // OUTPUTS), len(y_PE))](
        x_1H, x_1H if delta is None else delta.contiguous(), gain_H, weight_EH, total_1H, normed_1H, y_PE,
        done_1, ids_1K if real_1 is None else real_1, ids_1K, weights_1K, counts_E,
        E, H, eps, weight_EH.stride(0), scaling,
        count, triton.next_power_of_2(H), OUTPUTS, width, len(y_PE), top_k, triton.next_power_of_2(top_k),
        triton.next_power_of_2(E), of_all, renormalize, real_1 is not None, early,
        num_warps=8 if count > 1 else 4, launch_pdl=early,
    )  # fmt: skip
    return total_1H, normed_1H, ids_1K, weights_1K
