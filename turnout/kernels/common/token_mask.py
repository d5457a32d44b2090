"""Tokens that may not follow get the logit -inf, by a bit each, in one launch (Triton).

Legend: S rows, V vocabulary, W words of 32 tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

TOKENS = 4096  # of a program


@triton.jit(do_not_specialize=["V", "W"])
def forbid(logits_ptr, allowed_ptr, V, W, logits_stride, TOKENS: tl.constexpr):
    """logits [S, V] = -inf where the bit of allowed, int32 [S, W], is 0: bit t % 32 of word t // 32."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    word = tl.load(allowed_ptr + row * W + token // 32, mask=token < V, other=-1)
    denied = ((word >> (token % 32)) & 1) == 0
    minus_inf = tl.full([TOKENS], float("-inf"), logits_ptr.dtype.element_ty)
    tl.store(logits_ptr + row * logits_stride + token, minus_inf, mask=denied & (token < V))


def forbid_tokens(logits_SV: Tensor, allowed_SW: Tensor) -> None:
    """In place; see `forbid`. W is at least V / 32."""
    S, V = logits_SV.shape
    if S:
        forbid[(S, triton.cdiv(V, TOKENS))](
            logits_SV, allowed_SW, V, allowed_SW.shape[1], logits_SV.stride(0), TOKENS=TOKENS
        )
