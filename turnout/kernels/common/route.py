"""A router's choice in one launch: scores, top-k, renormalising, padding and counting (Triton).

Of 128 experts 8 take torch 15 kernels, its top-k alone 9.4 us of one token and 12.5 us of 64 on an H200; this
one takes 2.4 us of either. A program has a token's logits in registers and takes the largest k times, the
lowest id among equals.

Legend: T tokens, E experts, EP its power of two, k top-k, KP its power of two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from turnout.kernels.common.dependent import launches_early
from turnout.kernels.common.parts import count_parts


@triton.jit
def _load_logits(logits_ptr, token, e, T, E, BEYOND: tl.constexpr, PARTS: tl.constexpr):
    """float32 [EP]: the sum of the parts of a token's logits; BEYOND where there is no expert."""
    logits = tl.load(logits_ptr + token * E + e, mask=e < E, other=BEYOND).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        logits += tl.load(logits_ptr + (part * T + token) * E + e, mask=e < E, other=0.0)
    return logits


@triton.jit
def ordered(x):
    """float32, no NaN, to int32 of the same order, which warps reduce in one instruction, not ten."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)  # zeros of either sign are equal
    return bits ^ (bits >> 31 & 0x7FFFFFFF)


@triton.jit
def value_of(ordered):
    """The float32 of `ordered`."""
    return (ordered ^ (ordered >> 31 & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def take_best(left, e, EP: tl.constexpr):
    """The largest of what is left (`ordered`), the lowest e that has it, and what is left without it."""
    top = tl.max(left, 0)
    at = tl.min(tl.where(left == top, e, EP), 0)
    return top, at, tl.where(e == at, -0x80000000, left)


@triton.jit
def _store_choice(
    ids, weights, real_ptr, ids_ptr, weights_ptr, counts_ptr, token, j, K: tl.constexpr, KP: tl.constexpr,
    PADDED: tl.constexpr,
):  # fmt: skip
    """A token's ids and weights [KP], of which K count; of padding -1 and 0."""
    real = True
    if PADDED:
        real = tl.load(real_ptr + token) != 0
        ids = tl.where(real, ids, -1)
        weights = tl.where(real, weights, 0.0)
    tl.store(ids_ptr + token * K + j, ids, mask=j < K)
    tl.store(weights_ptr + token * K + j, weights, mask=j < K)
    tl.atomic_add(counts_ptr + ids, tl.full([KP], 1, tl.int64), mask=(j < K) & real, sem="relaxed")


@triton.jit(do_not_specialize=["T"])
def choose_experts(
    logits_ptr, real_ptr, ids_ptr, weights_ptr, counts_ptr, scaling, T, E,
    PARTS: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, EP: tl.constexpr, OF_ALL: tl.constexpr,
    RENORMALIZE: tl.constexpr, PADDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """ids int32 [T, K] and weights float32 [T, K] of logits [T, E]; counts int64 [E] += choices.

    logits: the sum of PARTS [T, E].
    OF_ALL: weights are shares of the softmax over all experts, not over the chosen ones only. PADDED: rows
    that real, bool [T], denies get ids -1 and weights 0. A row with a NaN gets weights NaN.
    """
    token = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, EP)
    j = tl.arange(0, KP)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    logits = _load_logits(logits_ptr, token, e, T, E, float("-inf"), PARTS)
    # What may be chosen stays above -inf, whatever it is, so that no expert is taken twice.
    left = ordered(tl.where(logits > -3e38, logits, tl.where(e < E, -3e38, float("-inf"))))
    best = value_of(tl.max(left, 0))
    ids = tl.full([KP], -1, tl.int32)
    powers = tl.zeros([KP], tl.float32)
    for i in tl.static_range(K):
        top, at, left = take_best(left, e, EP)
        ids = tl.where(j == i, at, ids)
        powers = tl.where(j == i, tl.exp(value_of(top) - best), powers)
    whole = tl.sum(tl.exp(logits - best), 0)  # NaN if any logit is
    if OF_ALL:
        weights = powers / whole
        if RENORMALIZE:
            weights /= tl.sum(weights, 0)
    else:
        weights = powers / tl.sum(powers, 0) + 0 * whole
    weights *= scaling
    _store_choice(ids, weights, real_ptr, ids_ptr, weights_ptr, counts_ptr, token, j, K, KP, PADDED)


def choose(
    logits: Tensor,
    top_k: int,
    *,
    of_all: bool,
    renormalize: bool,
    scaling: float,
    real_T: Tensor | None,
    counts_E: Tensor,
) -> tuple[Tensor, Tensor]:
    """(ids int32 [T, k], weights float32 [T, k]); see `choose_experts`.

    logits: [T, E], or float32 [P, T, E], whose sum over P is meant.
    """
    logits = logits.contiguous()
    T, E = logits.shape[-2:]
    ids_TK = torch.empty(T, top_k, dtype=torch.int32, device=logits.device)
    weights_TK = torch.empty(T, top_k, dtype=torch.float32, device=logits.device)
    if T:
        block, early = triton.next_power_of_2(E), launches_early(logits.device)
        choose_experts[(T,)](
            logits, ids_TK if real_T is None else real_T, ids_TK, weights_TK, counts_E, scaling, T, E,
            count_parts(logits), top_k, triton.next_power_of_2(top_k), block, of_all,
            renormalize, real_T is not None, early,
            num_warps=1 if block <= 256 else 4, launch_pdl=early,
        )  # fmt: skip
    return ids_TK, weights_TK


@triton.jit
def _roots(logits):
    """Square roots of softplus."""
    small = tl.exp(-tl.abs(logits))
    softplus = tl.where(small < 1e-4, small - small * small / 2, tl.log(1.0 + small))
    return tl.sqrt(softplus + tl.maximum(logits, 0.0))


@triton.jit(do_not_specialize=["T"])
def choose_by_sigmoid(
    logits_ptr, bias_ptr, real_ptr, ids_ptr, weights_ptr, counts_ptr, scaling, T, E,
    PARTS: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, EP: tl.constexpr, BIASED: tl.constexpr,
    GROUPS: tl.constexpr, KEPT: tl.constexpr, GP: tl.constexpr, SIZE: tl.constexpr, ROOTS: tl.constexpr,
    RENORMALIZE: tl.constexpr, PADDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As `choose_experts`, with sigmoid scores as weights, or ROOTS of softplus; bias, float32 [E], moves the
    choice alone.

    A token chooses from the KEPT of GROUPS groups, SIZE experts each, whose two best biased scores are the
    largest sums.
    """
    token = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, EP)
    j = tl.arange(0, KP)
    bias = tl.zeros([EP], tl.float32)
    if BIASED:
        bias = tl.load(bias_ptr + e, mask=e < E, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    logits = _load_logits(logits_ptr, token, e, T, E, 0.0, PARTS)
    if ROOTS:
        scores = _roots(logits)
    else:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    # Without a bias logits are in the same order, and large ones, whose scores are all 1, in no tie.
    left = scores + bias if BIASED or GROUPS > 1 else logits
    left = tl.where(left > -3e38, left, -3e38)
    if GROUPS > 1:
        group = e // SIZE
        g = tl.arange(0, GP)
        sums = tl.full([GP], float("-inf"), tl.float32)
        for i in tl.static_range(GROUPS):
            own = tl.where(group == i, left, float("-inf"))
            best = tl.max(own, 0)
            if SIZE > 1:
                at = tl.min(tl.where(own == best, e, EP), 0)
                best += tl.max(tl.where(e == at, float("-inf"), own), 0)
            sums = tl.where(g == i, best, sums)
        kept = e < 0
        for _ in tl.static_range(KEPT):
            best = tl.max(sums, 0)
            at = tl.min(tl.where(sums == best, g, GP), 0)
            sums = tl.where(g == at, float("-inf"), sums)
            kept = kept | (group == at)
        left = tl.where(kept, left, float("-inf"))
    left = ordered(tl.where(e < E, left, float("-inf")))
    ids = tl.full([KP], -1, tl.int32)
    weights = tl.zeros([KP], tl.float32)
    for i in tl.static_range(K):
        _, at, left = take_best(left, e, EP)
        ids = tl.where(j == i, at, ids)
        weights = tl.where(j == i, tl.sum(tl.where(e == at, scores, 0.0), 0), weights)
    if RENORMALIZE:
        weights /= tl.sum(weights, 0) + 1e-20
    weights = weights * scaling + 0 * tl.sum(scores, 0)  # NaN if any logit is
    _store_choice(ids, weights, real_ptr, ids_ptr, weights_ptr, counts_ptr, token, j, K, KP, PADDED)


def choose_sigmoid(
    logits: Tensor,
    top_k: int,
    *,
    bias_E: Tensor | None,
    groups: int,
    kept: int,
    roots: bool = False,
    renormalize: bool,
    scaling: float,
    real_T: Tensor | None,
    counts_E: Tensor,
) -> tuple[Tensor, Tensor]:
    """(ids int32 [T, k], weights float32 [T, k]); see `choose_by_sigmoid`. logits: as in `choose`."""
    logits = logits.contiguous()
    T, E = logits.shape[-2:]
    ids_TK = torch.empty(T, top_k, dtype=torch.int32, device=logits.device)
    weights_TK = torch.empty(T, top_k, dtype=torch.float32, device=logits.device)
    if T:
        block, early = triton.next_power_of_2(E), launches_early(logits.device)
        choose_by_sigmoid[(T,)](
            logits, logits if bias_E is None else bias_E, ids_TK if real_T is None else real_T, ids_TK,
            weights_TK, counts_E, scaling, T, E, count_parts(logits), top_k,
            triton.next_power_of_2(top_k), block, bias_E is not None, groups, kept,
            triton.next_power_of_2(groups), E // groups, roots, renormalize, real_T is not None, early,
            num_warps=1 if block <= 256 else 4, launch_pdl=early,
        )  # fmt: skip
    return ids_TK, weights_TK


@triton.jit(do_not_specialize=["T"])
def choose_by_token(
    logits_ptr, table_ptr, tokens_ptr, real_ptr, ids_ptr, weights_ptr, counts_ptr, scaling, T, E,
    PARTS: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, RENORMALIZE: tl.constexpr, PADDED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """As `choose_by_sigmoid` with ROOTS, of the experts in row tokens[t] of the table, int32 [V, K]."""
    token = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, KP)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    ids = tl.load(table_ptr + tl.load(tokens_ptr + token) * K + j, mask=j < K, other=0)
    logits = tl.zeros([KP], tl.float32)
    for part in tl.static_range(PARTS):
        logits += tl.load(logits_ptr + (part * T + token) * E + ids).to(tl.float32)
    weights = tl.where(j < K, _roots(logits), 0.0)
    if RENORMALIZE:
        weights /= tl.sum(weights, 0) + 1e-20
    weights *= scaling
    _store_choice(ids, weights, real_ptr, ids_ptr, weights_ptr, counts_ptr, token, j, K, KP, PADDED)


def choose_of_token(
    logits: Tensor,
    top_k: int,
    *,
    table_VK: Tensor,
    token_ids_T: Tensor,
    renormalize: bool,
    scaling: float,
    real_T: Tensor | None,
    counts_E: Tensor,
) -> tuple[Tensor, Tensor]:
    """(ids int32 [T, k], weights float32 [T, k]); see `choose_by_token`. logits: as in `choose`; token_ids:
    int64."""
    logits = logits.contiguous()
    T, E = logits.shape[-2:]
    ids_TK = torch.empty(T, top_k, dtype=torch.int32, device=logits.device)
    weights_TK = torch.empty(T, top_k, dtype=torch.float32, device=logits.device)
    if T:
        early = launches_early(logits.device)
        choose_by_token[(T,)](
            logits, table_VK, token_ids_T.contiguous(), ids_TK if real_T is None else real_T, ids_TK,
            weights_TK, counts_E, scaling, T, E, count_parts(logits), top_k,
            triton.next_power_of_2(top_k), renormalize, real_T is not None, early,
            num_warps=1, launch_pdl=early,
        )  # fmt: skip
    return ids_TK, weights_TK
