"""The logits of a step in float32 and the best of each row, as they come from the head (Triton).

Composed by torch a step of 64 requests reads and writes 175 MB for it, in two copies and a search that takes
22 us by itself; here they are read once, in 16 bits, and written once. Programs of some columns each find
their own best; a second launch finds that of a row. Both begin before their predecessors have ended
(programmatic dependent launch).

Legend: S rows, V vocabulary, C parts of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from turnout.kernels.common.dependent import launches_early
from turnout.kernels.common.route import ordered

TOKENS = 4096  # of a program
NAN = tl.constexpr(0x7FFFFFFF)  # above all that is `ordered`
INFINITE = tl.constexpr(0x7F800000)  # `ordered`, of infinity; of the negative one it is -INFINITE - 1


@triton.jit
def widen_logits(
    x_ptr, out_ptr, best_ptr, at_ptr, V, C, TOKENS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """out float32 [S, V] = x [S, V]; best int32 [S, C], `ordered`, and at int32 [S, C], the first token that
    has it, of each part of TOKENS columns. A NaN is best of all."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    token = part * TOKENS + tl.arange(0, TOKENS)
    held = token < V
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(x_ptr + row * V + token, mask=held, other=float("-inf")).to(tl.float32)
    tl.store(out_ptr + row * V + token, x, mask=held)
    order = tl.where(x == x, ordered(x), NAN)
    best = tl.max(order, 0)
    tl.store(best_ptr + row * C + part, best)
    tl.store(at_ptr + row * C + part, tl.min(tl.where((order == best) & held, token, V), 0))


@triton.jit(do_not_specialize=["S"])
def choose_tokens(best_ptr, at_ptr, chosen_ptr, S, C, CP: tl.constexpr, PDL: tl.constexpr):
    """chosen int64 [2, S]: the first token of the best part, and whether its logit is finite. CP: C's power
    of two."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, CP)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    order = tl.load(best_ptr + row * C + part, mask=part < C, other=-0x80000000)
    at = tl.load(at_ptr + row * C + part, mask=part < C, other=0x7FFFFFFF)
    best = tl.max(order, 0)
    token = tl.min(tl.where(order == best, at, 0x7FFFFFFF), 0)
    finite = (best < INFINITE) & (best > -INFINITE - 1)
    tl.store(chosen_ptr + row, token.to(tl.int64))
    tl.store(chosen_ptr + S + row, finite.to(tl.int64))


def widen_and_choose(x_SV: Tensor, out_SV: Tensor) -> Tensor:
    """int64 [2, S]: the token of each row's largest logit, the first of equal ones, and whether that logit is
    finite. out: float32, contiguous, gets x, of a 16- or 32-bit type."""
    x_SV = x_SV.contiguous()
    (S, V), device = x_SV.shape, x_SV.device
    chosen_2S = torch.empty(2, S, dtype=torch.int64, device=device)
    if S:
        parts, early = triton.cdiv(V, TOKENS), launches_early(device)
        best_SC, at_SC = (torch.empty(S, parts, dtype=torch.int32, device=device) for _ in range(2))
        widen_logits[(S, parts)](
            x_SV, out_SV, best_SC, at_SC, V, parts, TOKENS, early, num_warps=4, launch_pdl=early
        )
        choose_tokens[(S,)](
            best_SC, at_SC, chosen_2S, S, parts, triton.next_power_of_2(parts), early,
            num_warps=1, launch_pdl=early,
        )  # fmt: skip
    return chosen_2S
