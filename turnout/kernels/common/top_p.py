"""A draw by top-p over the whole vocabulary, for rows whose best tokens were not enough, in one launch
(Triton).

The host does not know which rows those are: one program looks at each row, and ends at once where the best
were enough. The others search: 31 sums over a row, of what exceeds a bound, find the least probability that
top-p keeps, and as many the one that the draw falls on. Among equal ones the first tokens come first. A
row's bits do not depend on the batch.

Sorting these rows instead would need their number on the host, which would wait for the device to learn it.

Legend: S rows, V vocabulary. Bits: of a probability as int32, whose order is that of the probabilities.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

TOKENS, WARPS = 4096, 16  # at once, of a program
BITS = tl.constexpr(31)  # of a probability, without its sign
INFINITY = tl.constexpr(0x7F800000)


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
    """The least bits beyond which the sum stays below `bound`, or INCLUSIVE: does not exceed it."""
    low = 0
    high = INFINITY
    for _ in range(BITS):
        middle = low + (high - low) // 2
        above = _above(row_ptr, middle, V, TOKENS)
        fits = above <= bound if INCLUSIVE else above < bound
        high = tl.where(fits, middle, high)
        low = tl.where(fits, low, middle)
    return high


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
        least = _first_bits(row_ptr, limit, False, V, TOKENS)
        above = _above(row_ptr, least, V, TOKENS)
        each = least.to(tl.float32, bitcast=True).to(tl.float64)
        last = tl.ceil((limit - above) / each) - 1  # of those with the least probability, from 0
        kept = above + (last + 1) * each
        floor = tl.load(floor_ptr + row).to(tl.int32, bitcast=True)
        if floor > least:
            kept = _above(row_ptr, floor - 1, V, TOKENS)
        target = tl.load(uniform_ptr + row) * kept
        bits = _first_bits(row_ptr, target, True, V, TOKENS)
        each = bits.to(tl.float32, bitcast=True).to(tl.float64)
        place = tl.floor((target - _above(row_ptr, bits, V, TOKENS)) / each)
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
