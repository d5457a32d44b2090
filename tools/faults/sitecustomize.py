"""Failures inside a step, for tools.chaos: ranks with this folder in PYTHONPATH fail when they are told to.

A signal of `SIGNALS` makes the next step of the rank that gets it fail, after its forward; "lose" loses its
next message to the server. A request whose prompt begins with the token ids in TURNOUT_POISON kills every
rank that computes it. With TURNOUT_KEEP_NOTHING a server without requests begins to hold nothing of them that
would let them survive ranks, or ceases to, at each SIGUSR2, for tools.ledger_cost. With TURNOUT_CLOCK_JUMPS
the clock of all processes, as time.time() tells it, jumps by so many seconds back and forth twice a second.
"""

import itertools
import json
import os
import resource
import signal
import sys
import time

import psutil

FAULTS = ("raise", "memory", "exit", "lose")
SIGNALS = {name: signal.SIGRTMIN + i for i, name in enumerate(FAULTS)}


def fail(fault: str) -> None:
    if fault == "raise":
        raise RuntimeError("injected")
    if fault == "memory":
        import torch

        room = psutil.Process().memory_info().vms + (64 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (room, room))
        torch.ones(1 << 30)
    os._exit(3)


def install() -> None:
    from turnout.engine import worker
    from turnout.engine.messages import Outputs
    from turnout.engine.scheduler.scheduler import Scheduler

    poison = json.loads(os.environ.get("TURNOUT_POISON", "[]"))
    computed = Scheduler.computed
    due: list[str] = []

    def failing(self, chunks):
        chunks = list(chunks)
        if due and due != ["lose"]:
            fail(due.pop())
        if poison and any(chunk.request.tokens[: len(poison)] == poison for chunk in chunks):
            os.kill(os.getpid(), signal.SIGKILL)
        computed(self, chunks)

    run = worker.run

    def run_losing(core, step_sync, commands, send, profiler):
        def lose_or_send(event):
            if due == ["lose"] and isinstance(event, Outputs):
                due.clear()
            else:
                send(event)

        run(core, step_sync, commands, lose_or_send, profiler)

    Scheduler.computed, worker.run = failing, run_losing
    for fault, number in SIGNALS.items():
        signal.signal(number, lambda number, frame, fault=fault: due.append(fault))


def keep_nothing_at_times():
    from turnout.server.supervise.admission import Admission
    from turnout.server.supervise.engine import EngineSupervisor

    def submit(self, request, sink):
        self._group.submit(request, sink)

    def abort(self, ids):
        self._group.abort(ids)

    def nothing(self, *rest):
        pass

    usual = EngineSupervisor.submit, EngineSupervisor.abort, Admission.add, Admission.remove
    other = submit, abort, nothing, nothing
    ways = itertools.cycle((other, usual))

    def toggle(number, frame):
        (EngineSupervisor.submit, EngineSupervisor.abort, Admission.add, Admission.remove) = next(ways)

    signal.signal(signal.SIGUSR2, toggle)


def let_the_clock_jump(seconds: float) -> None:
    true_time = time.time
    time.time = lambda: true_time() + seconds * (int(time.monotonic() * 2) % 3 - 1)


if "turnout.engine.fork_server" in sys.orig_argv:
    install()
if "serve" in sys.orig_argv and os.environ.get("TURNOUT_KEEP_NOTHING"):
    keep_nothing_at_times()
if jumps := os.environ.get("TURNOUT_CLOCK_JUMPS"):
    let_the_clock_jump(float(jumps))
