"""Parts of a kernel that follow each other, with pieces of work of each that threads share.

All threads of a call run the same code: of each phase they take pieces until none is left, and go on when
those that others took are done. So a thread that comes late, because its core was busy, delays nothing: it
finds no pieces left and touches no memory but the phases' own. It may come after the call is over. But
whoever has taken a piece is waited for, also while another process has its core: a phase notes how long.
"""

from __future__ import annotations

import time
from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from turnout.kernels.cpu.jit import inline, part
from turnout.kernels.cpu.tiles import dots_between
from turnout.kernels.cpu.vectors import I8, I32, I64, get_i64, pointer, put_i64, stack, take

PHASE = 64  # bytes: pieces taken, threads numbered, threads inside, pieces taken of a second kind, waits
SECOND = 24  # where pieces of the second kind are counted
WAITED = 32  # and the time for which a thread has waited, ns; 0 where that was short
OUTPUTS = 64  # of a matrix that are a piece
ROWS = 8  # that are a piece of what goes row by row
X86 = binding.get_default_triple().startswith(("x86_64", "i686"))
PATIENCE = 64  # looks at what others do before the processor is left to them


@intrinsic
def add(_: Any, address: Any, value: Any) -> Any:
    def build(context: Any, b: ir.IRBuilder, sig: Any, args: Any) -> Any:
        return b.atomic_rmw("add", pointer(b, args[0], I64), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), build


@intrinsic
def now(_: Any, address: Any) -> Any:
    def build(context: Any, b: ir.IRBuilder, sig: Any, args: Any) -> Any:
        return b.load_atomic(pointer(b, args[0], I64), "seq_cst", 8)

    return types.int64(types.int64), build


@intrinsic
def yield_processor(_: Any) -> Any:
    def build(context: Any, b: ir.IRBuilder, sig: Any, args: Any) -> Any:
        function = cgutils.get_or_insert_function(b.module, ir.FunctionType(I32, []), "sched_yield")
        b.call(function, [])
        return context.get_dummy_value()

    return types.void(), build


@intrinsic
def pause(_: Any) -> Any:
    """For a loop that looks at memory: x86's hint that it does."""

    def build(context: Any, b: ir.IRBuilder, sig: Any, args: Any) -> Any:
        if X86:
            kind = ir.FunctionType(ir.VoidType(), [])
            b.call(cgutils.get_or_insert_function(b.module, kind, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), build


@intrinsic
def _read_clock(_: Any, to: Any) -> Any:
    """Seconds and nanoseconds, an int64 each."""

    def build(context: Any, b: ir.IRBuilder, sig: Any, args: Any) -> Any:
        kind = ir.FunctionType(I32, [I32, I8.as_pointer()])
        function = cgutils.get_or_insert_function(b.module, kind, "clock_gettime")
        b.call(function, [ir.Constant(I32, time.CLOCK_MONOTONIC), pointer(b, args[0], I8)])
        return context.get_dummy_value()

    return types.void(types.int64), build


@part
def clock():
    """Nanoseconds."""
    found = stack(16)
    _read_clock(found)
    return get_i64(found) * 1_000_000_000 + get_i64(found + 8)


@part
def begin(phase):
    """Before a thread takes its first piece."""
    add(phase + 16, 1)


@part
def end(phase):
    """After no piece was left: until what others took is done."""
    add(phase + 16, -1)
    looks, since = 0, 0
    while now(phase + 16) > 0:
        looks += 1
        if looks % PATIENCE == 0:
            if since == 0:
                since = clock()
            yield_processor()
    if since:
        put_i64(phase + WAITED, clock() - since)


@inline
def piece(threads, size, whole):
    """How much of `whole` threads take at a time: all of it if there is one thread."""
    return whole if threads == 1 else size


@part
def shared_dots(counter, threads, x, N, weight, M, K, out):
    """`dots`, whose outputs are shared by threads."""
    size = piece(threads, OUTPUTS, M)
    while True:
        first = take(counter) * size
        if first >= M:
            return
        dots_between(x, N, weight, first, min(first + size, M), M, K, out)
