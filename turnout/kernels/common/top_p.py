"""A draw by top-p over the whole vocabulary, for rows whose best tokens were not enough, in one launch
(Triton).

The host does not know which rows those are: one program looks at each row, and ends at once where the best
were enough. The others search: 15 times a row is summed beyond three bounds at once, to find the least
probability that top-p keeps, and as often for the one that the draw falls on. Among equal ones the first
tokens come first. A row's bits do not depend on the batch.

Sorting rows instead is faster where few need it, but takes several times the memory of the logits; and to
sort only those that need it the host would have to wait for their number.

Legend: S rows, V vocabulary. Bits: of a probability as int32, whose order is that of the probabilities.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

TOKENS, WARPS = 8192, 32  # at once, of a program
TWO = tl.constexpr(1 << 30)  # its bits, beyond those of any probability
PASSES = tl.constexpr(15)  # of two bits each


@triton.jit
def _load(row_ptr, token, V: tl.constexpr):
    probs = tl.load(row_ptr + token, mask=token < V, other=0.0)
    return probs, probs.to(tl.int32, bitcast=True)


@triton.jit
def _above(row_ptr, bits, V: tl.constexpr, TOKENS: tl.constexpr):
    """The sum of probabilities beyond those of these bits, in float64."""
    total = tl.zeros([TOKENS], tl.float64)
    for start in range(0, V, TOKENS):
        probs, bits_of = _load(row_ptr, start + tl.arange(0, TOKENS), V)
        total += tl.where(bits_of > bits, probs, 0.0).to(tl.float64)
    return tl.sum(total, 0)


@triton.jit
def _first_bits(row_ptr, bound, INCLUSIVE: tl.constexpr, V: tl.constexpr, TOKENS: tl.constexpr):
    """The least bits beyond which the sum stays below `bound`, or INCLUSIVE: does not exceed it; and the sum.

    Each pass over the row leaves a quarter of the bits.
    """
    low = 0
    high = TWO
    above = tl.sum(tl.zeros([2], tl.float64), 0)
    for _ in range(PASSES):
        half, quarter = (high - low) // 2, (high - low) // 4
        a, b, c = low + quarter, low + half, low + half + quarter
        above_a = tl.zeros([TOKENS], tl.float64)
        above_b = tl.zeros([TOKENS], tl.float64)
        above_c = tl.zeros([TOKENS], tl.float64)
        for start in range(0, V, TOKENS):
            probs, bits = _load(row_ptr, start + tl.arange(0, TOKENS), V)
            above_a += tl.where(bits > a, probs, 0.0).to(tl.float64)
            above_b += tl.where(bits > b, probs, 0.0).to(tl.float64)
            above_c += tl.where(bits > c, probs, 0.0).to(tl.float64)
        sum_a, sum_b, sum_c = tl.sum(above_a, 0), tl.sum(above_b, 0), tl.sum(above_c, 0)
        in_a = sum_a <= bound if INCLUSIVE else sum_a < bound
        in_b = sum_b <= bound if INCLUSIVE else sum_b < bound
        in_c = sum_c <= bound if INCLUSIVE else sum_c < bound
        low = tl.where(in_a, low, tl.where(in_b, a, tl.where(in_c, b, c)))
        high = tl.where(in_a, a, tl.where(in_b, b, tl.where(in_c, c, high)))
        above = tl.where(in_a, sum_a, tl.where(in_b, sum_b, tl.where(in_c, sum_c, above)))
    return high, above


@triton.jit
def draw(
    probs_ptr, enough_ptr, limit_ptr, floor_ptr, uniform_ptr, chosen_ptr,
    V: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """chosen[s] = a token of probs [S, V], float32, of the fewest best ones that hold limit[s], float64, if
    these are no less than floor[s], float32, by uniform[s], float64 in [0, 1). Rows with enough[s] stay."""
    row = tl.program_id(0)
    if tl.load(enough_ptr + row) == 0:
        row_ptr = probs_ptr + row.to(tl.int64) * V
        limit = tl.load(limit_ptr + row)
        least, above = _first_bits(row_ptr, limit, False, V, TOKENS)
        each = least.to(tl.float32, bitcast=True).to(tl.float64)
        last = tl.ceil((limit - above) / each) - 1  # of those with the least probability, from 0
        kept = above + (last + 1) * each
        floor = tl.load(floor_ptr + row).to(tl.int32, bitcast=True)
        if floor > least:
            kept = _above(row_ptr, floor - 1, V, TOKENS)
        target = tl.load(uniform_ptr + row) * kept
        bits, above = _first_bits(row_ptr, target, True, V, TOKENS)
        each = bits.to(tl.float32, bitcast=True).to(tl.float64)
        place = tl.floor((target - above) / each)
        place = tl.where(bits == least, tl.minimum(place, last), place)
        place = tl.minimum(place, V).to(tl.int32)
        found, seen = 0, 0
        for start in range(0, V, TOKENS):
            token = start + tl.arange(0, TOKENS)
            _, bits_of = _load(row_ptr, token, V)
            equal = (bits_of == bits).to(tl.int32)
            earlier = (equal > 0) & (seen + tl.cumsum(equal, 0) - 1 <= place)
            found = tl.maximum(found, tl.max(tl.where(earlier, token, 0), 0))
            seen += tl.sum(equal, 0)
        tl.store(chosen_ptr + row, found)


def draw_top_p(
    probs_SV: Tensor, enough_S: Tensor, limit_S: Tensor, floor_S: Tensor, uniform_S: Tensor, chosen_S: Tensor
) -> None:
    """Into `chosen`, int64, in place; see `draw`. All contiguous; enough: bool."""
    S, V = probs_SV.shape
    draw[(S,)](probs_SV, enough_S, limit_S, floor_S, uniform_S, chosen_S, V=V, TOKENS=TOKENS, num_warps=WARPS)
