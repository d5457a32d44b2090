"""Parts of a kernel that follow each other, with pieces of work of each that threads share.

All threads of a call run the same code: of each phase they take pieces until none is left, and go on when
those that others took are done. So a thread that comes late, because its core was busy, delays nothing: it
finds no pieces left and touches no memory but the phases' own. It may come after the call is over.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from turnout.kernels.cpu.jit import inline, part
from turnout.kernels.cpu.tiles import dots_between
from turnout.kernels.cpu.vectors import I32, I64, pointer, take

PHASE = 64  # bytes: pieces taken, threads numbered, threads inside, pieces taken of a second kind
SECOND = 24  # where the last of these is
OUTPUTS = 64  # of a matrix that are a piece
ROWS = 8  # that are a piece of what goes row by row
PATIENCE = 64  # looks at what others do before the processor is left to them


@intrinsic
def _add(_: Any, address: Any, value: Any) -> Any:
    def build(context: Any, b: ir.IRBuilder, sig: Any, args: Any) -> Any:
        return b.atomic_rmw("add", pointer(b, args[0], I64), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), build


@intrinsic
def _now(_: Any, address: Any) -> Any:
    def build(context: Any, b: ir.IRBuilder, sig: Any, args: Any) -> Any:
        return b.load_atomic(pointer(b, args[0], I64), "seq_cst", 8)

    return types.int64(types.int64), build


@intrinsic
def _yield_processor(_: Any) -> Any:
    def build(context: Any, b: ir.IRBuilder, sig: Any, args: Any) -> Any:
        function = cgutils.get_or_insert_function(b.module, ir.FunctionType(I32, []), "sched_yield")
        b.call(function, [])
        return context.get_dummy_value()

    return types.void(), build


@part
def begin(phase):
    """Before a thread takes its first piece."""
    _add(phase + 16, 1)


@part
def end(phase):
    """After no piece was left: until what others took is done."""
    _add(phase + 16, -1)
    looks = 0
    while _now(phase + 16) > 0:
        looks += 1
        if looks % PATIENCE == 0:
            _yield_processor()


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
