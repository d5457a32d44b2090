"""A router's choice of experts by their places (Triton), in another way than route.py.

No largest logit is taken k times in turn, each time with two sums across the threads that wait for each
other: every expert counts those that come before it, all at once, which tells its place. As exact, ties and
all; for few experts, since each is compared with each.

Legend: T tokens, E experts, EP its power of two, k top-k, KP its power of two.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from turnout.kernels.common.dependent import launches_early

MOST_EXPERTS = 128  # whose places one program counts: each is compared with each


@triton.jit
def choose_by_counting(
    y_ptr, real_ptr, ids_ptr, weights_ptr, counts_ptr, scaling, E, part_stride,
    PARTS: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, EP: tl.constexpr, OF_ALL: tl.constexpr,
    RENORMALIZE: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """As `choose_experts`, of one token: ids [K], weights [K]; counts [E] += choices. y: the sum of PARTS
    [E], `part_stride` apart, which other programs may have stored."""
    e = tl.arange(0, EP)
    j = tl.arange(0, KP)
    logits = tl.load(y_ptr + e, mask=e < E, other=float("-inf"), cache_modifier=".cg").to(tl.float32)
    for part in tl.static_range(1, PARTS):
        at = y_ptr + part * part_stride + e
        logits += tl.load(at, mask=e < E, other=0.0, cache_modifier=".cg").to(tl.float32)
    # What may be chosen stays above -inf, whatever it is, so that no expert is taken twice.
    left = tl.where(logits > -3e38, logits, tl.where(e < E, -3e38, float("-inf")))
    # Others are rows, so that a thread adds up what it has compared.
    ahead = (left[:, None] > left[None, :]) | ((left[:, None] == left[None, :]) & (e[:, None] < e[None, :]))
    place = tl.sum(ahead.to(tl.int32), 0)
    chosen = (place[:, None] == j[None, :]) & (j[None, :] < K)
    best = tl.max(left, 0)
    ids = tl.sum(tl.where(chosen, e[:, None], 0), 0)
    tops = tl.sum(tl.where(chosen, left[:, None], 0.0), 0)
    powers = tl.where(j < K, tl.exp(tops - best), 0.0)
    whole = tl.sum(tl.exp(logits - best), 0)  # NaN if any logit is
    if OF_ALL:
        weights = powers / whole
        if RENORMALIZE:
            weights /= tl.sum(weights, 0)
    else:
        weights = powers / tl.sum(powers, 0) + 0 * whole
    weights *= scaling
    real = True
    if PADDED:
        real = tl.load(real_ptr) != 0
        ids = tl.where(real, ids, -1)
        weights = tl.where(real, weights, 0.0)
    tl.store(ids_ptr + j, ids, mask=j < K)
    tl.store(weights_ptr + j, weights, mask=j < K)
    tl.atomic_add(counts_ptr + ids, tl.full([KP], 1, tl.int64), mask=(j < K) & real, sem="relaxed")


@triton.jit(do_not_specialize=["part_stride"])
def count_places(
    logits_ptr, real_ptr, ids_ptr, weights_ptr, counts_ptr, scaling, E, part_stride,
    PARTS: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, EP: tl.constexpr, OF_ALL: tl.constexpr,
    RENORMALIZE: tl.constexpr, PADDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """What `choose_experts` gives; a program for each token."""
    token = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    choose_by_counting(
        logits_ptr + token * E, real_ptr + token, ids_ptr + token * K, weights_ptr + token * K, counts_ptr,
        scaling, E, part_stride, PARTS, K, KP, EP, OF_ALL, RENORMALIZE, PADDED,
    )  # fmt: skip


def choose_into(
    ids_TK: Tensor,
    weights_TK: Tensor,
    logits: Tensor,
    *,
    of_all: bool,
    renormalize: bool,
    scaling: float,
    real_T: Tensor | None,
    counts_E: Tensor,
) -> None:
    """Fill ids, int32, and weights, float32, as `route.choose` does of contiguous logits of at most
    MOST_EXPERTS experts and at least one token."""
    (T, E), K, early = logits.shape[-2:], ids_TK.shape[1], launches_early(logits.device)
    count_places[(T,)](
        logits, ids_TK if real_T is None else real_T, ids_TK, weights_TK, counts_E, scaling, E, T * E,
        len(logits) if logits.dim() == 3 else 1, K, triton.next_power_of_2(K), triton.next_power_of_2(E),
        of_all, renormalize, real_T is not None, early, num_warps=4, launch_pdl=early,
    )  # fmt: skip
