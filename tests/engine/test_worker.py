"""The loop of the engine process, driven over real sockets by a test that plays the server."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import zmq

from tests.engine.toy import make_core
from tests.server.processes import eventually
from turnout.engine.messages import (
    Abort,
    AddRequest,
    Command,
    EngineStats,
    Event,
    Outputs,
    RequestOutput,
    Shutdown,
    Wake,
    encoder,
    event_decoder,
)
from turnout.engine.profiling import Profiler
from turnout.engine.ranks.step_sync import StepSync, SyncedStep
from turnout.engine.sampling_params import SamplingParams
from turnout.engine.worker import run
from turnout.errors import UserError
from turnout.parallel.health import Unwatched
from turnout.vocabulary import Phase


class Counting:
    """A core that gives each request one token per step: the number of the step."""

    def __init__(self) -> None:
        self.left: dict[str, int] = {}
        self.steps = 0
        self.step_sync = StepSync()
        self.synced: SyncedStep | None = None
        self.may_step = threading.Event()
        self.may_step.set()

    def add(self, request: AddRequest) -> None:
        if request.prompt_ids == [13]:
            raise UserError("unlucky prompt")
        self.left[request.id] = request.sampling.max_tokens

    def abort(self, ids: list[str]) -> None:
        for id in ids:
            self.left.pop(id, None)

    def step(self) -> list[RequestOutput]:
        self.synced = self.step_sync.sync(len(self.left), Phase.DECODE if self.left else None, longest=1)
        if not self.synced.phase:
            return []
        self.may_step.wait(60)
        time.sleep(0.002)
        self.steps += 1
        self.left = {id: left - 1 for id, left in self.left.items()}
        done = [id for id, left in self.left.items() if left == 0]
        outputs = [
            RequestOutput(id=id, token_ids=[self.steps], finish_reason="length" if id in done else None)
            for id in self.left
        ]
        self.abort(done)
        return outputs

    def stats(self) -> EngineStats:
        return EngineStats(steps=self.steps, num_running=len(self.left))


class Server:
    """The other end of the sockets."""

    def __init__(self, folder: Path):
        self.core = Counting()
        context = zmq.Context.instance()
        self.commands = context.socket(zmq.ROUTER)
        self.commands.router_mandatory = True  # fail rather than drop
        self.commands.bind(f"ipc://{folder}/commands")
        receiving = context.socket(zmq.DEALER)
        receiving.identity = b"rank"
        receiving.connect(f"ipc://{folder}/commands")
        receiving.send(b"here")
        self.commands.recv_multipart()
        self.events: list[tuple[float, Event]] = []
        self.thread = threading.Thread(
            target=run,
            args=(self.core, self.core.step_sync, receiving, self.record, Profiler(0, Unwatched())),
        )
        self.thread.start()

    def record(self, event: Event) -> None:
        self.events.append((time.monotonic(), event_decoder.decode(encoder.encode(event))))

    def send(self, *commands: Command) -> None:
        for command in commands:
            self.commands.send_multipart([b"rank", encoder.encode(command)])

    def add(self, id: str, tokens: int, prompt: int = 1) -> None:
        self.send(AddRequest(id=id, prompt_ids=[prompt], sampling=SamplingParams(max_tokens=tokens)))

    def outputs(self, id: str) -> list[RequestOutput]:
        events = [event for _, event in self.events if isinstance(event, Outputs)]
        return [output for event in events for output in event.outputs if output.id == id]

    def wait_for(self, id: str, seconds: float = 60) -> RequestOutput:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if (outputs := self.outputs(id)) and outputs[-1].finish_reason:
                return outputs[-1]
            time.sleep(0.005)
        raise AssertionError(f"{id} did not finish")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    yield server
    server.send(Shutdown())
    server.thread.join(60)
    assert not server.thread.is_alive()


def test_requests_are_stepped_together(server: Server):
    server.core.may_step.clear()
    server.add("long", 200)
    server.add("short", 3)
    server.core.may_step.set()
    assert server.wait_for("long").finish_reason == "length"
    assert len(server.outputs("long")) == 200
    assert len(server.outputs("short")) == 3
    assert server.core.steps < 203


def test_a_refused_request_ends_alone(server: Server):
    server.add("good", 10)
    server.add("bad", 10, prompt=13)
    refused = server.wait_for("bad")
    assert (refused.finish_reason, refused.error, refused.user_error) == ("error", "unlucky prompt", True)
    assert server.wait_for("good").finish_reason == "length"


def test_an_abort_takes_effect_before_the_next_step(server: Server):
    server.add("endless", 10**6)
    assert eventually(lambda: len(server.outputs("endless")) >= 3)
    server.send(Abort(["endless", "unknown"]))
    assert eventually(lambda: server.events[-1][1].stats.num_running == 0)
    steps = server.core.steps
    time.sleep(0.1)
    assert server.core.steps == steps


def test_an_idle_loop_reports_about_once_a_second(server: Server):
    assert eventually(lambda: len(server.events) >= 3)
    times = [at for at, _ in server.events]
    assert all(later - earlier > 0.5 for earlier, later in pairwise(times))  # a busy machine is late


def test_waking_a_resting_rank_asks_for_nothing(server: Server):
    assert eventually(lambda: bool(server.events))  # of the first step of all

    def wakes() -> bool:
        told, began = len(server.events), time.monotonic()
        server.send(Wake())
        assert eventually(lambda: len(server.events) > told)
        return time.monotonic() - began < 0.1  # otherwise after a second

    assert any(wakes() for _ in range(20)), "still resting"
    assert server.core.step_sync.received == 0


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_an_abort_that_arrives_during_a_step_frees_pages_before_the_next(overlap: str):
    """With the engine's own core, whose counters say which step was the last to hold any."""
    server, receiving = (zmq.Context.instance().socket(kind) for kind in (zmq.ROUTER, zmq.DEALER))
    server.bind("inproc://aborts")
    receiving.identity = b"rank"
    receiving.connect("inproc://aborts")
    core = make_core(overlap_schedule=overlap, disable_prefix_cache=True)
    events: list[Outputs] = []
    held: list[tuple[int, int, int]] = []  # after each step: requests, pages, and forwards so far

    def send(command: Command) -> None:
        server.send_multipart([b"rank", encoder.encode(command)])
        assert receiving.poll(5000)

    step = core.step

    def observed() -> list[RequestOutput]:
        outputs = step()
        stats = core.stats()
        held.append((stats.num_running, stats.pages_used, stats.steps))
        if stats.steps == 5 and stats.num_running == 3:
            send(Abort(["a", "b"]))
        elif stats.steps == 8 and stats.num_running == 1:
            send(Abort(["c"]))
        elif not stats.num_running:
            send(Shutdown())
        return outputs

    core.step = observed
    for id in "abc":
        sampling = SamplingParams(max_tokens=60, ignore_eos=True)
        send(AddRequest(id=id, prompt_ids=[1, 2, 3, 4, 5], sampling=sampling))
    run(core, core._step_sync, receiving, events.append, Profiler(0, Unwatched()))
    of = {steps: (running, pages) for running, pages, steps in reversed(held)}
    assert of[5] == (3, 3 * of[6][1])
    assert of[6][0] == 1
    assert of[8][0] == 1
    assert held[-1][:2] == (0, 0)
    assert held[-1][2] == 8  # no forward after the last abort
    ended = [output.id for event in events for output in event.outputs if output.finish_reason == "abort"]
    assert ended == ["a", "b", "c"]
    for socket in (server, receiving):
        socket.close(linger=0)
