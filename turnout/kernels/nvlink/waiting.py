"""Flags between ranks: polling a rank's own memory with a time limit, and which peer was waited for (Triton).

Every warp of a program polls for itself, so all agree, in a barrier that counts, whether to look again:
without it, warps that saw a flag early met the others in the wrong barrier and took rows for padding that had
arrived.
A tensor of fewer elements than there are threads is held several times over, by warps that may have looked at
different times, while a reduction across warps sees one of them. What was polled so is loaded again when all
have agreed; where each thread holds elements of its own, or each warp all of them, what was polled is right.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

DISPATCH, COMBINE, CAPACITY = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)  # phases of a failure
TOKENS = tl.constexpr((1 << 24) - 1)  # of a count


@triton.jit
def failure(phase, peer, number):
    """What a rank says when it gives up: phase, the rank it waited for, and epoch (CAPACITY: tokens)."""
    return (phase.to(tl.int64) << 52) | (peer.to(tl.int64) << 40) | (number.to(tl.int64) & ((1 << 40) - 1))


@triton.jit
def fail(failed_ptr, told_ptr, word):
    if tl.atomic_cas(failed_ptr, tl.zeros([], tl.int64), word) == 0:
        tl.store(told_ptr, word)


@triton.jit
def at(address, offset, kind: tl.constexpr):
    """The pointer `offset` bytes after `address`."""
    return (address + offset).to(tl.pointer_type(kind))


@triton.jit
def at_word(address, offset, kind: tl.constexpr):
    """The same, where both are multiples of 16: what is stored there may be stored 16 bytes at a time."""
    return tl.multiple_of((address + offset).to(tl.pointer_type(kind)), 16)


@triton.jit
def pick(x_R, r: tl.constexpr, size: tl.constexpr):
    """Element r of x [size]."""
    return tl.sum(tl.where(tl.arange(0, size) == r, x_R, 0), 0)


@triton.jit
def now(INTERPRETED: tl.constexpr):
    """Nanoseconds."""
    if INTERPRETED:
        return tl.zeros([], tl.int64)
    else:
        return globaltimer()


@triton.jit
def anyone(flag, INTERPRETED: tl.constexpr):
    """How many threads have a positive `flag`. Warps read memory that changes each for itself; they must
    decide together whether to look again, for there are barriers ahead."""
    if INTERPRETED:
        return flag
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.gt.s32 p, $1, 0; bar.red.popc.u32 $0, 0, p; }", "=r,r", [flag],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def late(polls, began, limit, INTERPRETED: tl.constexpr):
    """Whether a wait has lasted longer than `limit` ns; interpreted, longer than `limit` polls."""
    over = False
    if INTERPRETED:
        over = polls > limit
    else:
        if (polls & 255) == 255:  # reading the clock takes longer than a poll
            over = anyone((globaltimer() - began > limit).to(tl.int32), INTERPRETED) > 0
    return over


@triton.jit
def look(address, wanted, INTERPRETED: tl.constexpr):
    """The int64 at each address that is wanted, else 0. What a peer wrote before it released that flag may be
    read after the next barrier: a fence, which would wait for this program's own stores, is not needed."""
    if INTERPRETED:
        return tl.load(at(address, 0, tl.int64), mask=wanted, other=0)
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $2, 0; mov.b64 $0, 0; @p ld.acquire.sys.global.b64 $0, [$1]; }",
            "=l,l,r", [address, wanted.to(tl.int32)], dtype=tl.int64, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def nonzero(word):
    """int32: two zeros as (0, -0)."""
    return tl.where(word == 0, -2147483648, word)


@triton.jit
def slices(ids_ptr, t, real, experts_per_slice, K: tl.constexpr, KP: tl.constexpr):
    """Ids of token t, -1 where there is none, and which slice of the experts each is in."""
    k = tl.arange(0, KP)
    id_K = tl.load(ids_ptr + t * K + k, mask=(k < K) & real, other=-1)
    return id_K, tl.where(id_K < 0, -1, id_K // experts_per_slice)
