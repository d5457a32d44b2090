"""What a rank does in its next steps, as torch's profiler sees it, in the form of Chrome's traces."""

from __future__ import annotations

import json
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnout.engine.messages import Command, Profiled, StartProfile, StopProfile
from turnout.parallel.health import Progress

if TYPE_CHECKING:
    from torch.profiler import profile

STEP = "step"  # an event for each step
PIDS = 1000  # of one rank in a merged trace; more are not told apart


class Profiler:
    """Records from a StartProfile on, for as many steps with a forward as it says or until a StopProfile."""

    def __init__(self, rank: int, watch: Progress):
        """watch: told before what may hold Python's lock for seconds."""
        self._rank, self._watch = rank, watch
        self._command = StartProfile(steps=0)
        self._running: profile | None = None
        self._left = 0  # steps
        self._phases: list[str] = []  # of the steps so far, "" of those without a forward
        self._trace = b""

    def executes(self, command: Command) -> Profiled | bool:
        """Whether `command` is about profiling, which is then done; what was recorded for a StopProfile."""
        if isinstance(command, StartProfile):
            self._start(command)
        elif isinstance(command, StopProfile):
            self._stop()
            trace, self._trace = self._trace, b""
            return Profiled(rank=self._rank, trace=trace)
        else:
            return False
        return True

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around a step."""
        if self._running is None:
            yield
            return
        from torch.profiler import record_function

        self._phases.append("")
        with record_function(STEP):
            yield

    def stepped(self, phase: str) -> None:
        """There was a forward of this phase in the step."""
        if self._running is not None:
            self._phases[-1] = phase
            self._left -= 1
            if not self._left:
                self._stop()

    def _start(self, command: StartProfile) -> None:
        from torch.profiler import profile

        self._stop()
        self._watch.note(None, "profiling")
        self._command, self._left, self._phases = command, command.steps, []
        self._running = profile(record_shapes=command.record_shapes, with_stack=command.with_stack)
        self._running.start()

    def _stop(self) -> None:
        if self._running is None:
            return
        self._watch.note(None, "profiling")
        running, self._running = self._running, None
        running.stop()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            running.export_chrome_trace(str(path))
            recorded = json.loads(path.read_bytes())
        name_phases(recorded["traceEvents"], self._phases)
        events = placed(recorded, self._rank, self._command.began)
        self._trace = zlib.compress(b",\n".join(json.dumps(event).encode() for event in events), level=1)


def name_phases(events: list[dict[str, Any]], phases: Sequence[str]) -> None:
    """Give each step among `events` an argument `phase`; "" if it had no forward."""
    steps = [e for e in events if e.get("name") == STEP and e.get("cat") == "user_annotation"]
    for step, phase in zip(sorted(steps, key=lambda step: step["ts"]), phases, strict=False):
        step["args"] = step.get("args", {}) | {"phase": phase}


def placed(recorded: dict[str, Any], rank: int, began: float) -> list[dict[str, Any]]:
    """The events of a trace with times in us since `began` (of time.time()), and with processes and links of
    this rank's own."""
    offset = (recorded.get("baseTimeNanoseconds", 0) - round(began * 1e9)) / 1000
    pids: dict[Any, int] = {}
    events = []
    for event in recorded["traceEvents"]:
        pid = pids.setdefault(event.get("pid"), min(len(pids), PIDS - 1))
        event["pid"] = rank * PIDS + pid
        if "ts" in event:
            event["ts"] = round(event["ts"] + offset, 3)
        if "id" in event:
            event["id"] = f"{rank}.{event['id']}"
        if event.get("ph") == "M" and event["name"] == "process_name":
            event["args"]["name"] = f"rank {rank}: {event['args'].get('name', '')}"
        if event.get("ph") == "M" and event["name"] == "process_sort_index":
            event["args"]["sort_index"] = event["pid"]
        events.append(event)
    return events
