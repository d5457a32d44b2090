"""Draw ten decode steps and one prompt of an engine, before and after: without overlapped steps and prompt
graphs, and with them.

    python -m tools.random_checkpoint /dev/shm/model
    python -m tools.step_timeline /dev/shm/model --output steps.svg

One engine is recorded in both ways by the engine's profiler, as `/start_profile` does; tools.timeline draws
profiles of a server in the same way. The prompt comes alone; then --requests of 64 tokens decode together.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tools.command_line import parser_for
from tools.decode_steps import log_start
from tools.timeline import joined, panels_of_profile, svg, trace
from turnout import LLM
from turnout.engine.core import EngineCore
from turnout.engine.messages import AddRequest, Profiled, StartProfile, StopProfile
from turnout.engine.profiling import Profiler
from turnout.engine.sampling_params import SamplingParams
from turnout.parallel.health import Unwatched

PROMPT = 64  # tokens of requests that decode


def record(core: EngineCore, steps: int, prompt: int, requests: int) -> dict[str, Any]:
    """The Chrome trace of an engine that computes a prompt alone, and then at least `steps` decode steps."""
    for _ in range(2):  # the first recording starts the profiler up
        profiler = Profiler(0, Unwatched())
        profiler.executes(StartProfile(steps=1000, began=time.time()))
        _answer(core, profiler, 1, prompt, 1)
        _answer(core, profiler, requests, PROMPT, steps + 4)
        recorded = profiler.executes(StopProfile())
    assert isinstance(recorded, Profiled)
    return {"traceEvents": json.loads(b"[" + zlib.decompress(recorded.trace) + b"]")}


@contextmanager
def before(core: EngineCore) -> Iterator[None]:
    """Tokens are read before the next step is planned, and steps with prompts are launched kernel by kernel:
    as with --disable-overlap-schedule and --disable-prefill-graph."""
    overlaps, graphs = core._overlap, core._forward.prefill_graphs
    core._overlap, core._forward.prefill_graphs = False, None
    try:
        yield
    finally:
        core._overlap, core._forward.prefill_graphs = overlaps, graphs


def _answer(core: EngineCore, profiler: Profiler, requests: int, prompt: int, length: int) -> None:
    """Compute this many requests to their ends; sizes in tokens."""
    sampling = SamplingParams(max_tokens=length, ignore_eos=True, temperature=0)
    for i in range(requests):
        core.add(AddRequest(id=str(i), prompt_ids=[i % 50 + 1] * prompt, sampling=sampling))
    while core.has_work():
        with profiler.step():
            core.step()
        if core.synced and core.synced.phase:
            profiler.stepped(core.synced.phase)


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("model")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--prompt", type=int, default=128, help="tokens")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--output", type=Path, required=True, help="SVG")
    parser.add_argument("--trace", type=Path, help="JSON")
    options = parser.parse_args()
    log_start()
    asked = options.steps, options.prompt, options.requests
    flags: dict[str, Any] = {"max_total_tokens": 65536, "max_running_requests": options.requests}
    with LLM(
        options.model, device=options.device, load_progress=False, disable_prefix_cache=True, **flags
    ) as llm:
        core = llm._open()
        with before(core):
            panels = panels_of_profile(record(core, *asked), "before", options.steps, rank=0)
        panels |= panels_of_profile(record(core, *asked), "after", options.steps, rank=0)
    print(*panels, sep="\n")
    options.output.write_text(svg({title: joined(shown) for title, shown in panels.items()}))
    if options.trace is not None:
        options.trace.write_text(json.dumps(trace(panels)))


if __name__ == "__main__":
    main()
