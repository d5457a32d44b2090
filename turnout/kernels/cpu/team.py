"""Threads that stay with a step while its kernels of phases (phases.py) follow each other.

A call of Python's thread pool takes 50 us and more before another thread computes: that thread has to wake,
and to wait for Python's global lock, twice. Half a layer for 32 requests takes 300. So a helper, once awake,
looks for the next call in memory, without Python, and goes back to sleep when none has come for a while: at
the end of a step or soon after. It leaves its core to whoever wants it meanwhile.

Whoever calls puts what the kernel needs into one of a few slots, says so, and begins. A helper that comes
late finds no pieces left, and a slot in which one still is takes no other call.

A piece that a helper has begun is waited for, and where others want the cores too that may take a scheduler's
slice of 4 ms, as long as a whole step. After such a wait calls are one thread's for 50 times as long.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from struct import Struct
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from turnout.kernels.cpu.jit import function_at_address, kernel, part
from turnout.kernels.cpu.phases import PATIENCE, PHASE, WAITED, add, clock, now, pause, yield_processor
from turnout.kernels.cpu.vectors import (
    F32,
    I64,
    get_i64,
    load_as,
    number,
    pointer,
    put_i64,
    stack,
    store,
    zeros,
)

MOST_PHASES = 8  # of a kernel
SLOTS = 8
AWAKE, FIRST_SLOT = 64, 128  # bytes from the call that came last: helpers awake; slots
# Of a slot: its call, by number, helpers inside, callers inside, helpers that have joined, threads that may,
# the kernel; phases and arguments.
INSIDE, CALLERS, JOINED, THREADS, KERNEL, PHASES = 8, 16, 24, 32, 40, 64
GIVEN = PHASES + MOST_PHASES * PHASE
SLOT = 1024
MOST_ARGUMENTS = (SLOT - GIVEN) // 8
STAY = 500_000  # ns, for which a helper looks for another call
LONG = 1_000_000  # ns, of a wait
ALONE = 50  # times as long as a long wait


@intrinsic
def _call(_: Any, function: Any, phases: Any, threads: Any, given: Any) -> Any:
    """Call a kernel of phases at an address."""

    def build(context: Any, b: ir.IRBuilder, sig: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [I64, I64, I64])
        b.call(b.inttoptr(args[0], kind.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), build


@intrinsic
def _set(_: Any, address: Any, value: Any) -> Any:
    """Store, in one order with `add` and `now` of all threads."""

    def build(context: Any, b: ir.IRBuilder, sig: Any, args: Any) -> Any:
        b.atomic_rmw("xchg", pointer(b, args[0], I64), args[1], "seq_cst")
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), build


def _numbers(name: str, kind: types.Type, llvm: ir.Type, size: int) -> Any:
    def build(_: Any, address: Any, count: Any) -> Any:
        if not isinstance(count, types.IntegerLiteral):
            return None
        given = types.UniTuple(kind, count.literal_value)

        def code(context: Any, b: ir.IRBuilder, sig: Any, args: Any) -> Any:
            at = [b.add(args[0], number(size * i)) for i in range(count.literal_value)]
            return context.make_tuple(b, sig.return_type, [load_as(b, place, llvm) for place in at])

        return given(types.int64, count), code

    build.__name__ = build.__qualname__ = name
    return intrinsic(build)


integers = _numbers("integers", types.int64, I64, 8)  # (address, literal count): so many int64 from there on
floats = _numbers("floats", types.float32, F32, 4)


@part
def _cleared(phases):
    for at in range(phases, phases + MOST_PHASES * PHASE, 64):
        store(at, zeros())


@kernel("int64(int64, int64, int64, int64, int64, int64, int64)")
def _share(team, slot, call, function, given, size, threads):
    """Call a kernel with `size` bytes of arguments, next to whatever helpers come.

    Returns for how long threads waited in one of its phases, ns, or -1 where no helper could come.
    """
    at = team + FIRST_SLOT + slot * SLOT
    shared = False
    if threads > 1:
        shared = add(at + CALLERS, 1) == 0
        if shared:
            _set(at, 0)
            shared = now(at + INSIDE) == 0
        if not shared:
            add(at + CALLERS, -1)
    if not shared:
        phases = stack(512)
        _cleared(phases)
        _call(function, phases, threads, given)
        return -1
    _cleared(at + PHASES)
    for i in range(0, size, 8):
        put_i64(at + GIVEN + i, get_i64(given + i))
    put_i64(at + JOINED, 0)
    put_i64(at + THREADS, threads)
    put_i64(at + KERNEL, function)
    _set(at, call)
    _set(team, call)
    _call(function, at + PHASES, threads, given)
    waited = 0
    for phase in range(at + PHASES, at + GIVEN, PHASE):
        waited = max(waited, get_i64(phase + WAITED))
    add(at + CALLERS, -1)
    return waited


@kernel("void(int64, int64)")
def _help(team, seen):
    """Take part in calls until none has come for a while. seen: address of the number of the last one."""
    looks, until = 0, clock() + STAY
    while True:
        call = now(team)
        if call == get_i64(seen):
            looks += 1
            pause()
            if looks % PATIENCE == 0:
                yield_processor()
                if clock() > until:
                    add(team + AWAKE, -1)
                    if now(team) == call:
                        return
                    add(team + AWAKE, 1)  # one has come meanwhile
            continue
        put_i64(seen, call)
        at = team + FIRST_SLOT + call % SLOTS * SLOT
        add(at + INSIDE, 1)
        if now(at) == call:
            threads, function = get_i64(at + THREADS), get_i64(at + KERNEL)
            if add(at + JOINED, 1) < threads - 1:
                _call(function, at + PHASES, threads, at + GIVEN)
        add(at + INSIDE, -1)
        until = clock() + STAY


@kernel("int64(int64, int64)")
def _to_wake(team, wanted):
    """How many helpers to wake that `wanted` are awake; they count as awake from now on."""
    missing = wanted - now(team + AWAKE)
    if missing <= 0:
        return 0
    add(team + AWAKE, missing)
    return missing


class Team:
    """The helpers of a process, made when they are first wanted."""

    def __init__(self) -> None:
        size = FIRST_SLOT + SLOTS * SLOT
        self._memory = (ctypes.c_int64 * (size // 8 + 8))()
        self._address = -(-ctypes.addressof(self._memory) // 64) * 64
        self._awake = ctypes.c_int64.from_address(self._address + AWAKE)
        self._calls = itertools.count(1)
        self._owners: list[object] = [None] * SLOTS
        self._wakes: SimpleQueue[None] = SimpleQueue()
        self._helpers, self._hiring = 0, threading.Lock()
        self._alone_until = 0  # time.monotonic_ns()

    def __call__(self, kernel: int, threads: int, owner: object, given: Any, size: int) -> None:
        """Call the kernel at an address on `threads` threads.

        given: an array with `size` bytes of arguments. owner: of what the kernel reads outside of its phases,
        kept for helpers that come late.
        """
        sharing = threads
        if threads > 1:
            if self._alone_until:
                if time.monotonic_ns() < self._alone_until:
                    sharing = 1
                else:
                    self._alone_until = 0
            if sharing > 1 and self._awake.value < threads - 1:
                self._wake(threads - 1)
        call = next(self._calls)
        slot = call % SLOTS
        waited = _share(self._address, slot, call, kernel, ctypes.addressof(given), size, sharing)
        if waited >= 0:
            self._owners[slot] = owner
        if waited > LONG:
            self._alone_until = time.monotonic_ns() + ALONE * waited

    def _wake(self, wanted: int) -> None:
        if self._helpers < wanted:
            with self._hiring:
                for _ in range(wanted - self._helpers):
                    threading.Thread(target=self._work, name="turnout-kernels", daemon=True).start()
                self._helpers = max(self._helpers, wanted)
        for _ in range(_to_wake(self._address, wanted)):
            self._wakes.put(None)

    def _work(self) -> None:
        seen = ctypes.c_int64(0)
        while True:
            self._wakes.get()
            _help(self._address, ctypes.addressof(seen))


class PhasedKernel:
    """A kernel of phases, and what its arguments are: so many int64, then so many float32."""

    def __init__(self, compiled: Any, integers: int, floats: int) -> None:
        self._compiled = compiled  # keeps the code
        self._address = compiled.address
        self._struct = Struct(f"={integers}q{floats}f{'4x' if floats % 2 else ''}")
        assert self._struct.size <= 8 * MOST_ARGUMENTS, "arguments fit a slot"
        self._given = ctypes.c_int64 * (self._struct.size // 8)

    def __call__(self, threads: int, owner: object, *args: Any) -> None:
        """Call it with `args` on `threads` threads. owner: see `Team`."""
        given = self._given()
        self._struct.pack_into(given, 0, *args)
        _team(self._address, threads, owner, given, self._struct.size)


def phased(integers: int, floats: int) -> Callable[[Callable[..., Any]], PhasedKernel]:
    """The decorated function (address of its phases, number of threads, address of its arguments) as a
    `PhasedKernel`."""

    def made(function: Callable[..., Any]) -> PhasedKernel:
        return PhasedKernel(function_at_address("void(int64, int64, int64)")(function), integers, floats)

    return made


_team = Team()


def _begin_anew() -> None:
    """In a forked process, which has no helpers."""
    global _team
    _team = Team()


os.register_at_fork(after_in_child=_begin_anew)
