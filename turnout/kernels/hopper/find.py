"""Finding the pairs (token, expert) of this rank's experts among a few, or choosing the experts of one token,
in every warp alike (Gluon).

The 32 lanes of each warp load an id each, or two, and a ballot counts those in front that are held. So no
warp waits for another, and a program that is told the nth pair held, not the nth, comes last if there is
none: on one of eight ranks most end at once, and would have taken the place of one that has work.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from turnout.kernels.common.route import ordered, take_best, value_of
from turnout.kernels.hopper.decode import bits


@gluon.constexpr_function
def pairs_layout(slots: int, pairs: int, across: int) -> gl.DistributedLinearLayout:
    """[slots, pairs]: `across` times `slots` warps have a slot each, their lanes the pairs."""
    warps = [[0, 0]] * (across.bit_length() - 1) + bits(slots, 0, 2)
    return gl.DistributedLinearLayout(bits(pairs // 32, 1, 2, 32), bits(32, 1, 2), warps, [], [slots, pairs])


@gluon.jit
def count_held(held, PAIRS: gl.constexpr):
    """int32 [PAIRS] of zeros and ones, lane after lane of every warp -> how many ones up to each."""
    if PAIRS == 32:
        return gl.inline_asm_elementwise(
            """
            {
            .reg .pred p;
            .reg .b32 m, le;
            setp.ne.b32 p, $1, 0;
            vote.sync.ballot.b32 m, p, 0xffffffff;
            mov.u32 le, %lanemask_le;
            and.b32 m, m, le;
            popc.b32 $0, m;
            }
            """,
            "=r,r",
            [held],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        return gl.inline_asm_elementwise(
            """
            {
            .reg .pred p, q;
            .reg .b32 m, n, le, all;
            setp.ne.b32 p, $2, 0;
            setp.ne.b32 q, $3, 0;
            vote.sync.ballot.b32 m, p, 0xffffffff;
            vote.sync.ballot.b32 n, q, 0xffffffff;
            mov.u32 le, %lanemask_le;
            popc.b32 all, m;
            and.b32 m, m, le;
            popc.b32 $0, m;
            and.b32 n, n, le;
            popc.b32 n, n;
            add.u32 $1, n, all;
            }
            """,
            "=r,=r,r,r",
            [held],
            dtype=gl.int32,
            is_pure=False,
            pack=2,
        )


@gluon.jit
def held_pairs(ids_ptr, n_pairs, first_expert, num_experts, PAIRS: gl.constexpr, LAYOUT: gl.constexpr):
    """Of n_pairs pairs, [PAIRS] each: place, local expert, number among those held from 1 on, 0: not held."""
    i = gl.arange(0, PAIRS, LAYOUT)
    expert = gl.load(ids_ptr + i, mask=i < n_pairs, other=-1) - first_expert
    held = (expert >= 0) & (expert < num_experts) & (i < n_pairs)
    return i, expert, gl.where(held, count_held(held.to(gl.int32), PAIRS), 0)


@gluon.jit
def chosen_pairs(
    logits_ptr, real_ptr, num_logits, scaling, TOP_K: gl.constexpr, PARTS: gl.constexpr,
    OF_ALL: gl.constexpr, PADDED: gl.constexpr, LOGITS: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """As `held_pairs` of all experts, and weights float32 [PAIRS], of the one token that logits are of: what
    route.py's `choose_experts` gives, with shares of the chosen experts unless OF_ALL.

    logits: the sum of PARTS float32 [num_logits]. PADDED: real, bool [1], may deny the token.
    """
    EP: gl.constexpr = LOGITS.shape[1]
    e = gl.arange(0, EP, gl.SliceLayout(0, LOGITS))
    logits = gl.load(logits_ptr + e, mask=e < num_logits, other=float("-inf"))
    for part in gl.static_range(1, PARTS):
        logits += gl.load(logits_ptr + part * num_logits + e, mask=e < num_logits, other=0.0)
    # What may be chosen stays above -inf, whatever it is, so that no expert is taken twice.
    left = ordered(gl.where(logits > -3e38, logits, gl.where(e < num_logits, -3e38, float("-inf"))))
    best = value_of(gl.max(left, 0))
    i = gl.arange(0, LAYOUT.shape[1], gl.SliceLayout(0, LAYOUT))
    expert = i * 0 - 1
    powers = i * 0.0
    for n in gl.static_range(TOP_K):
        top, at, left = take_best(left, e, EP)
        expert = gl.where(i == n, at, expert)
        powers = gl.where(i == n, gl.exp(value_of(top) - best), powers)
    whole = gl.sum(gl.exp(logits - best), 0)  # NaN if any logit is
    if OF_ALL:
        weights = powers / whole
    else:
        weights = powers / gl.sum(powers, 0) + 0 * whole
    numbers = gl.where(i < TOP_K, i + 1, 0)
    if PADDED:
        numbers = gl.where(gl.load(real_ptr) != 0, numbers, 0)
    return i, expert, numbers, weights * scaling


@gluon.jit
def count_chosen(counts_ptr, expert, chosen):
    """counts int64 += 1 of each expert [PAIRS] that is chosen."""
    one = expert.to(gl.int64) * 0 + 1
    gl.atomic_add(counts_ptr + expert, one, mask=chosen, sem="relaxed")


@gluon.jit
def pairs_of(
    ids_ptr, logits_ptr, real_ptr, n_pairs, first_expert, num_experts, num_logits, scaling,
    TOP_K: gl.constexpr, PARTS: gl.constexpr, OF_ALL: gl.constexpr, PADDED: gl.constexpr,
    LOGITS: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """`chosen_pairs`; or, if TOP_K is 0, `held_pairs`, whose weights are 0 here."""
    if TOP_K > 0:
        i, expert, numbers, weights = chosen_pairs(
            logits_ptr, real_ptr, num_logits, scaling, TOP_K, PARTS, OF_ALL, PADDED, LOGITS, LAYOUT
        )
    else:
        i, expert, numbers = held_pairs(
            ids_ptr, n_pairs, first_expert, num_experts, LAYOUT.shape[1], gl.SliceLayout(0, LAYOUT)
        )
        weights = i * 0.0
    return i, expert, numbers, weights


@gluon.jit
def of_number(values, numbers, wanted):
    """Of `values` [PAIRS] the one whose number is `wanted` [S]; 0 where there is none."""
    return gl.sum(gl.where(numbers[None, :] == wanted[:, None], values[None, :], 0), 1)
