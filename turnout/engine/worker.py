"""The engine process of one rank: a copy of the fork server (fork_server.py), started by the server.

Standard input brings one line of JSON, a `Start`, and then stays open; its end means that the server is
gone. Signals are the server's business: a terminal or a service manager sends them to the whole group, and
the server decides how to stop.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import msgspec
import zmq

from turnout.cache import place_temporary_files
from turnout.config import Config
from turnout.engine.messages import (
    Abort,
    AddRequest,
    Command,
    EngineStats,
    Event,
    Failed,
    Outputs,
    Profiled,
    Ready,
    RequestOutput,
    ResetPrefixCache,
    Shutdown,
    Wake,
    command_decoder,
    encoder,
)
from turnout.engine.profiling import Profiler
from turnout.engine.progress_bars import loading_bar
from turnout.engine.ranks.local_launcher import leave_signals_to_launcher, leave_with_launcher
from turnout.engine.ranks.step_sync import StepSync, SyncedStep
from turnout.engine.startup import StartupTimes
from turnout.engine.stream_intervals import StreamIntervals
from turnout.errors import UserError
from turnout.flags import flag_name
from turnout.parallel.health import Board, Pulse

if TYPE_CHECKING:  # torch loads after the first signs of life
    from turnout.engine.engine_plan import EnginePlan
    from turnout.models.interface import ProgressFn

STATS_INTERVAL = 1.0  # seconds
FLUSH_MS = 2000  # to deliver the last message


class Core(Protocol):
    """What the loop needs of the engine core."""

    @property
    def synced(self) -> SyncedStep | None: ...
    def add(self, request: AddRequest) -> None: ...
    def abort(self, ids: list[str]) -> None: ...
    def reset_prefix_cache(self) -> None: ...
    def step(self) -> list[RequestOutput]: ...
    def stats(self) -> EngineStats: ...


class Start(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a rank is told first.

    folder:      for files that the ranks of this host share: new for every start of the engine, since what
                 an earlier one left would be taken for ours; we remove it if the server dies
    config:      fields of `Config`
    verify:      "quick" or "full" checks the experts before requests may come
    rank:        of all
    init_method: of the ranks' rendezvous, see `parallel.groups.connect`
    commands:    address of the server's ROUTER, to which this rank is the DEALER named `identity`
    events:      address of the server's PULL
    curve:       public key of both, public and secret key of this rank, in Z85; none where all is local
    waiting:     requests that go on as soon as the ranks are ready
    """

    folder: str
    config: dict[str, Any]
    rank: int
    init_method: str
    commands: str
    events: str
    identity: str
    verify: str = "off"
    curve: tuple[str, str, str] | None = None
    waiting: int = 0


def main(weights_memory: int = -1, keeper: int = -1, spare: bool = False) -> int:
    """weights_memory, keeper: see `build_engine`. spare: whether this process was there before it was to
    start. The exit code."""
    leave_signals_to_launcher()
    startup = StartupTimes(with_process=not spare)
    place_temporary_files()
    orders = sys.stdin.buffer.readline()
    if not orders:  # the server has ended
        return 1
    start = msgspec.json.decode(orders, type=Start)
    leave_with_launcher(sys.stdin.fileno(), start.folder)
    if sys.platform == "linux":
        Path("/proc/self/comm").write_text(f"turnout rank {start.rank}")
    context = zmq.Context()
    commands = _connect(context, zmq.DEALER, start.commands, start.curve, start.identity)
    events = _connect(context, zmq.PUSH, start.events, start.curve)

    def send(event: Event) -> None:
        events.send(encoder.encode(event))

    who = f"rank {start.rank}: " if start.config.get("tp_size", 1) > 1 else ""
    try:
        core, step_sync, watch = load(start, send, startup, weights_memory, keeper)
        run(core, step_sync, commands, send, Profiler(start.rank, watch))
        return 0
    except UserError as error:
        send(Failed(f"{who}{error}", rank=start.rank, user_error=True))
        return 2
    except Exception as error:
        traceback.print_exc()
        send(Failed(f"{who}the engine failed: {type(error).__name__}: {error}", rank=start.rank))
        return 1
    finally:
        context.destroy(linger=FLUSH_MS)


def run(
    core: Core, step_sync: StepSync, commands: zmq.Socket, send: Callable[[Event], None], profiler: Profiler
) -> None:
    """Execute commands, step, report, until all ranks were told to shut down.

    Sleeps on the socket while no rank has work, but steps once in a while even so: a rank that another one
    waits for joins it. Ranks that share requests execute a command when all of them have it, and until then
    no rank sleeps.
    """
    pending: deque[Command] = deque()
    intervals = StreamIntervals()
    reported, reports = 0.0, 1  # the first went out when this rank was loaded
    while True:
        resting = core.synced is None or not (core.synced.phase or core.synced.pending)
        told = commands.poll(int(STATS_INTERVAL * 1000) if resting else 0)
        while commands.poll(0):
            command = command_decoder.decode(commands.recv())
            if isinstance(command, Wake):
                continue
            pending.append(command)
            step_sync.received += 1
            step_sync.leaving |= isinstance(command, Shutdown)
        granted = step_sync.received
        if step_sync.topology.attention_tp > 1:
            granted = core.synced.commands if core.synced else 0
        outputs: list[RequestOutput] = []
        while step_sync.executed < granted:
            command = pending.popleft()
            if isinstance(profiled := profiler.executes(command), Profiled):
                send(profiled)
            elif not profiled:
                intervals.note(command)
                outputs += execute(core, command)
            step_sync.executed += 1
        with profiler.step():
            outputs += core.step()
        if core.synced and core.synced.phase:
            profiler.stepped(core.synced.phase)
        if core.synced and core.synced.leaving:
            return
        outputs, now = intervals.due(outputs), time.monotonic()
        if outputs or told or now - reported >= STATS_INTERVAL:
            outputs = outputs if step_sync.leads else []
            send(Outputs(number=reports, outputs=outputs, stats=core.stats()))
            reported, reports = now, reports + 1


def execute(core: Core, command: Command) -> list[RequestOutput]:
    """Pass `command` on; a request that the engine refuses ends here, and harms no other."""
    if isinstance(command, Abort):
        core.abort(command.ids)
    elif isinstance(command, ResetPrefixCache):
        core.reset_prefix_cache()
    elif isinstance(command, AddRequest):
        try:
            core.add(command)
        except UserError as error:
            return [RequestOutput(id=command.id, finish_reason="error", error=str(error), user_error=True)]
    return []


class Noted:
    """Progress of loading, shown, and noted on the board."""

    def __init__(self, show: ProgressFn, watch: Pulse):
        self.parts = 0  # begun
        self._show, self._watch = show, watch
        watch.parts = lambda: self.parts

    def __call__(self, what: str, done: int, total: int) -> None:
        self.parts += 1
        self._watch.note(0, "loading" if what.startswith("loading") else "compiling")
        self._show(what, done, total)


def load(
    start: Start,
    send: Callable[[Event], None],
    startup: StartupTimes,
    weights_memory: int = -1,
    keeper: int = -1,
) -> tuple[Core, StepSync, Pulse]:
    """Plan, say so, join the other ranks, load the weights and announce that requests may come.

    Raises UserError.
    """
    from turnout.engine.builder import build_engine
    from turnout.engine.engine_plan import resolve
    from turnout.engine.ranks.rendezvous import rendezvous

    startup.begin("plan")
    config = Config(**start.config)
    engine_plan = resolve(config, rank=start.rank)
    watch = Pulse(Board(Path(start.folder) / "board", config.tp_size), start.rank)
    speaks = start.rank == 0
    if not speaks:  # every rank makes do in the same way
        logging.getLogger("turnout.cache").setLevel(logging.ERROR)
    if speaks:
        print(*summary(engine_plan), sep="\n", file=sys.stderr, flush=True)
    startup.begin("rendezvous")
    groups, step_sync = rendezvous(engine_plan, init_method=start.init_method)
    watch.collectives = lambda: groups.calls
    with loading_bar(shown=speaks and config.load_progress) as show:
        progress = Noted(show, watch)
        core = build_engine(
            engine_plan,
            groups=groups,
            step_sync=step_sync,
            watch=watch,
            progress=progress,
            verify=start.verify,
            startup=startup,
            weights_memory=weights_memory,
            keeper=keeper,
            waiting=start.waiting,
        )
    watch.parts = lambda: progress.parts + core.layers_begun
    gc.collect()
    gc.freeze()  # what is loaded stays: no collection during a step need walk it
    vocab_size = engine_plan.description.shape.vocab_size
    startup.end()
    if speaks:
        print(startup, file=sys.stderr, flush=True)
    info = core.info() | {"summary": summary(core.engine_plan), "startup_seconds": startup.seconds}
    info = json.loads(json.dumps(info))  # subclasses of str and int become plain
    send(Outputs(outputs=[], stats=core.stats()))
    send(Ready(rank=start.rank, info=info, max_context=engine_plan.max_context, vocab_size=vocab_size))
    return core, step_sync, watch


def summary(engine_plan: EnginePlan) -> list[str]:
    """What is about to run, in a few lines; `turnout plan` says why."""
    moe, shape, plan = engine_plan.description.moe, engine_plan.description.shape, engine_plan.plan
    memory = engine_plan.memory
    runners = " and ".join(
        f"{phase.runner} with dispatcher {phase.dispatcher} ({phase.phase})"
        for phase in (plan.prefill, plan.decode)
    )
    return [
        f"{engine_plan.config.model}: {shape.architecture}, {shape.num_layers} layers, "
        f"top-{moe.top_k} of {moe.num_experts} experts in {moe.format}",
        f"experts run on {runners}; GEMMs multiply with {plan.activation_format}, "
        f"weights are kept {plan.weight_storage}",
        f"{engine_plan.hardware.name}, computing in {engine_plan.compute_dtype}: "
        f"{_megabytes(memory.dense + memory.experts)} of weights, {_megabytes(memory.kv)} of KV cache "
        f"for {engine_plan.num_pages * engine_plan.page_size} tokens; context {engine_plan.max_context}",
        *(
            f"{flag_name(name)} {engine_plan.size(name)}: {reason}"
            for name, reason in engine_plan.size_reasons.items()
            if engine_plan.hardware.device == "cuda"
        ),
    ]


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"


def _connect(
    context: zmq.Context, kind: int, address: str, curve: tuple[str, str, str] | None, identity: str = ""
) -> zmq.Socket:
    socket = context.socket(kind)
    socket.set_hwm(0)
    if curve:
        server, public, secret = (key.encode() for key in curve)
        socket.curve_serverkey, socket.curve_publickey, socket.curve_secretkey = server, public, secret
    if identity:
        socket.identity = identity.encode()
    socket.connect(address)
    return socket


def main_and_exit(weights_memory: int = -1, keeper: int = -1, spare: bool = False) -> NoReturn:
    """`main`, and then the end of this process: taking torch apart in order takes seconds, and the server
    waits."""
    code = 1
    try:
        code = main(weights_memory, keeper, spare)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main_and_exit()
