"""What steps of an engine take on this GPU, decoding in CUDA graphs or without and prefilling, and where the
time goes.

    python -m tools.decode_steps demo --output benchmarks/results/steps-DEVICE-DATE.json
    python -m tools.random_checkpoint /dev/shm/qwen3-30b && python -m tools.decode_steps /dev/shm/qwen3-30b

Requests of --context tokens decode together. Contexts of more than 64 are not computed: their caches and
states hold noise, so that what is chosen among them is spread over all of them. A step is timed whole, from
the schedule to sampled tokens, as the mean over STEPS of them; `kernel_us` adds up the GPU's kernels of a
step, which may overlap, by PARTS as well, and `busy` is the part of the profiled time in which at least one
ran. A profiled graph starts about 0.1 ms late, so `step_busy` relates the time in which kernels ran to
`step_ms`, which no profiler saw. `fastest_step_ms` and `slowest_step_ms` are of single steps: a GPU that
reaches its power limit lowers its clock, within a few dozen of them. `replay_ms` is what a replay of the
step's graph takes, the median of groups of them on the GPU's clock: a busy host does not lengthen it.
`floor_share` is the time that reading the step's bytes takes at BYTES_PER_S over the step's, and
`roofline_ms` that of its parts if each takes as long as its bytes or its products, whichever is longer
(step_floor.py). Prompts of --prefill tokens are timed from their arrival to the first token of the last, the
median of TIMES. Other flags of the engine are read from the environment. `copy_share` is the time that the
same bytes take at this GPU's own copy rate, `copied_bytes_per_s`, over a replay's.
"""

from __future__ import annotations

import argparse
import logging
import re
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch.profiler import ProfilerActivity, profile

from tools.command_line import parser_for
from tools.kernel_timing import BYTES_PER_S, copied_bytes_per_s
from tools.step_floor import work_of_step
from tools.timeline import busy, covered
from turnout import LLM, SamplingParams
from turnout.attention.caches import AttentionCaches
from turnout.bench.results import device_of, result, save
from turnout.engine.core import EngineCore
from turnout.engine.messages import AddRequest
from turnout.engine.ranks.step_sync import SyncedStep
from turnout.engine.scheduler.scheduler import Chunk
from turnout.engine.step.cuda_graphs import Computed, graph_for
from turnout.errors import UserError
from turnout.parallel.hardware import detect

PROMPT, LENGTH = 64, 128  # tokens of a prompt that is computed, and of an answer
BEFORE, STEPS, PROFILED = 3, 40, 4  # the first step lays out the pages of all requests
TIMES = 5  # that prompts are timed
REPLAYS, GROUPS = 10, 9  # of a graph, between two events, and how many times
KERNELS = 16  # listed per row, those that take most
# Of a step, by what kernels are called: the first that is found.
PARTS = {
    "indexer": r"score_tile|choose_places",
    "compressor": r"keep_tokens",
    "DeltaNet": r"step_heads|step_columns|convolve_heads|prepare_blocks|carry_columns|gate_heads"
    # fla-core's:
    r"|gated_delta|gdn_|causal_conv1d|chunk_fwd_kernel_o|w_u_fwd|l2norm_fwd|norm_gated_fwd|fused_beta",
    "attention": r"attend|join_spans|flash|fmha|rotate|turn_heads|norm_latents|gate_values",
    "streams": r"stream",
    "experts": r"expert|gemm_of|pairs|places|held|choose_by|quantize",
    "dense products": r"nvjet|gemm|gemv|cutlass|xmma|split|cublas|add_parts|multiply|decode",
    "norms": r"norm",
}


class Bench:
    """A loaded model, alone on the GPU."""

    def __init__(self, model: str, options: argparse.Namespace) -> None:
        start = time.perf_counter()
        most = max(options.requests)
        self._options = options
        self._llm = LLM(
            model,
            device=options.device,
            load_progress=False,
            disable_prefix_cache=True,
            max_total_tokens=max(65536, most * (options.context + 2 * LENGTH)),
            max_running_requests=most,
            cuda_graph_max_bs=most,
        )
        _wait()
        self.loaded: dict[str, Any] = {
            "model": model,
            "layers": len(self._llm.info()["description"]["shape"]["attention"]),
            "load_s": time.perf_counter() - start,
            "planned_bytes": self._llm.info()["memory"]["total"],
        }
        if torch.cuda.is_available():
            self.loaded["allocated_bytes"] = torch.cuda.memory_allocated()
            self.loaded["peak_bytes"] = torch.cuda.max_memory_allocated()
            self.loaded["copied_bytes_per_s"] = copied_bytes_per_s(torch.device("cuda"))
        print(self.loaded, flush=True)

    def rows(self) -> list[dict[str, Any]]:
        core, found = self._llm._open(), [self.loaded]
        if self._options.context > PROMPT:
            fill(core._forward._attention)
        graphs, options = core._forward.graphs, self._options
        loads = [(graphs, requests) for requests in options.requests]
        loads += [(None, requests) for requests in options.eager]
        for kept, requests in loads:
            core._forward.graphs = kept
            found.append(
                {"model": self.loaded["model"], "decode": "graphs" if kept else "eager"}
                | {"requests": requests, "context": options.context}
                | self._throughput(requests)
                | self._steps(core, requests)
            )
            _show(found[-1])
        core._forward.graphs = graphs
        for tokens, requests in options.prefill:
            found.append(
                {"model": self.loaded["model"], "prompt_tokens": tokens, "requests": requests}
                | self._prefill(core, tokens, requests)
            )
            _show(found[-1])
        self._llm.close()
        return found

    def _throughput(self, requests: int) -> dict[str, float]:
        """Of whole answers, prompts included, if these are computed."""
        if self._options.context > PROMPT:
            return {}
        sampling = SamplingParams(max_tokens=LENGTH, ignore_eos=True, temperature=0)
        start = time.perf_counter()
        self._llm.generate(_prompts(requests, PROMPT), sampling, progress=False)
        return {"tokens_per_s": requests * LENGTH / (time.perf_counter() - start)}

    def _steps(self, core: EngineCore, requests: int) -> dict[str, Any]:
        context = self._options.context
        ids = _add(core, _prompts(requests, context), LENGTH)
        decoding = False
        with skipped(core) if context > PROMPT else nullcontext():
            while not decoding:
                core.step()
                decoding = core.synced is not None and core.synced.phase == "decode"
        for _ in range(BEFORE):
            core.step()
        check_decoding(core, requests)
        step_ms, single = _timed_steps(core)
        with profile(activities=[_watched()]) as seen:
            for _ in range(PROFILED):
                core.step()
            _wait()
        check_decoding(core, requests)
        replays = replay_ms(core)
        core.abort(ids)
        core.step()
        tokens = context + STEPS // 2
        work = work_of_step(self._llm.info(), core._forward._attention, requests, tokens)
        nbytes = sum(part.nbytes for part in work.values())
        roofline_ms = 1e3 * sum(part.seconds for part in work.values())
        if replays:
            at_a_copys_rate = nbytes / self.loaded["copied_bytes_per_s"] * 1e3
            replays["copy_share"] = at_a_copys_rate / replays["replay_ms"]
        shares = {"floor_share": nbytes / BYTES_PER_S / (step_ms / 1e3), "roofline_ms": roofline_ms}
        kernels = _kernels(seen, PROFILED)
        step_busy = min(1.0, kernels["covered_us"] / (1000 * step_ms))  # watched kernels may take longer
        return {"step_ms": step_ms} | single | shares | {"step_busy": step_busy} | replays | kernels

    def _prefill(self, core: EngineCore, tokens: int, requests: int) -> dict[str, Any]:
        """The median of TIMES, after one more, and the kernels of another, of all its steps together."""
        prompts, times = _prompts(requests, tokens), []
        for _ in range(1 + TIMES):
            _wait()
            start = time.perf_counter()
            steps = self._prompt_steps(core, prompts)
            _wait()
            times.append(time.perf_counter() - start)
        seconds = median(times[1:])
        with profile(activities=[_watched()]) as seen:
            self._prompt_steps(core, prompts)
            _wait()
        rate = requests * tokens / seconds
        return {"seconds": seconds, "steps": steps, "tokens_per_s": rate} | _kernels(seen, 1)

    def _prompt_steps(self, core: EngineCore, prompts: list[list[int]]) -> int:
        _add(core, prompts, 1)
        steps = 0
        while core.has_work():
            core.step()
            steps += 1
        return steps


def fill(caches: AttentionCaches) -> None:
    """With noise, all that is kept of tokens."""
    torch.manual_seed(0)
    for keeper in (*caches.groups, *caches.states):
        for kept in vars(keeper).values():
            if isinstance(kept, torch.Tensor) and kept.is_floating_point():
                kept.normal_()


@contextmanager
def skipped(core: EngineCore) -> Iterator[None]:
    """Steps take requests further, each a whole prompt, but compute no layer."""
    scheduler, forward, caches = core._scheduler, core._forward, core._forward._attention
    like: Any = {"dtype": caches.groups[0].dtype, "device": caches.device}

    def noise(chunks: Sequence[Chunk], synced: SyncedStep) -> Computed:
        rows = sum(chunk.length for chunk in chunks)
        one = torch.randn(1, forward._model.shape.hidden_size, **like)
        return Computed(hidden_NH=one.expand(rows, -1))

    # All prompts in one step: the first requests would end while later ones are still taken further.
    room = scheduler.max_running * scheduler.max_context
    with (
        patch.multiple(forward, prefill_graphs=None, graphs=None, eagerly=noise),
        patch.multiple(scheduler, prefill_tokens=room, chunk_tokens=room),
        patch.object(core, "_step_sizes", [0] * 64),  # counts of steps, by a size that no step should have
    ):
        yield


def check_decoding(core: EngineCore, requests: int) -> None:
    """Raises UserError unless the last step had one token of as many requests."""
    synced = core.synced
    had = sum(synced.tokens) if synced is not None else 0
    if synced is None or synced.phase != "decode" or had != requests:
        raise UserError(f"{requests} requests were to decode together, and the last step had {had} tokens")


def _timed_steps(core: EngineCore) -> tuple[float, dict[str, float]]:
    """ms of a step: the mean over STEPS; the fastest and the slowest by the GPU's clock, if there is one."""
    _wait()
    marks, start = [], time.perf_counter()
    for _ in range(STEPS):
        core.step()
        if torch.cuda.is_available():
            marks.append(torch.cuda.Event(enable_timing=True))
            marks[-1].record()
    _wait()
    mean = 1000 * (time.perf_counter() - start) / STEPS
    times = [before.elapsed_time(after) for before, after in pairwise(marks)]
    single = {"fastest_step_ms": min(times), "slowest_step_ms": max(times)} if times else {}
    return mean, single


def replay_ms(core: EngineCore) -> dict[str, float]:
    """Of the graph that the last step replayed, if it did, on the same tokens again and again."""
    graphs, synced = core._forward.graphs, core.synced
    size = graph_for(synced, graphs.sizes) if graphs is not None and synced is not None else None
    if graphs is None or synced is None or size is None:
        return {}
    graph, times = graphs.graph_of(size, synced.longest).graph, []
    for _ in range(GROUPS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / REPLAYS)
    return {"replay_ms": median(times)}


def _prompts(requests: int, tokens: int) -> list[list[int]]:
    draw = torch.Generator().manual_seed(0)
    return torch.randint(10, 200, (requests, tokens), generator=draw).tolist()


def _add(core: EngineCore, prompts: list[list[int]], length: int) -> list[str]:
    ids = [f"bench-{i}" for i in range(len(prompts))]
    sampling = SamplingParams(max_tokens=length, ignore_eos=True, temperature=0)
    for id, prompt in zip(ids, prompts, strict=True):
        core.add(AddRequest(id=id, prompt_ids=prompt, sampling=sampling))
    return ids


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _watched() -> ProfilerActivity:
    return ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU


def _show(row: dict[str, Any]) -> None:
    print({key: value for key, value in row.items() if key not in ("kernels", "parts")}, flush=True)
    for name, part in row["parts"].items():
        print(f"    {part['us']:9.1f} us {part['launches']:7.1f} x [{name}]", flush=True)
    for kernel in row["kernels"]:
        print(f"    {kernel['us']:9.1f} us {kernel['launches']:7.1f} x {kernel['name']}", flush=True)


def part_of(kernel: str) -> str:
    """Of PARTS, by the name of a kernel; "rest" where none fits."""
    return next((part for part, names in PARTS.items() if re.search(names, kernel)), "rest")


def _kernels(seen: profile, times: int) -> dict[str, Any]:
    """Of one of `times` repetitions."""
    totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    parts: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    spans = []
    for event in seen.events() or ():
        if event.device_type.name == "CUDA":
            spans.append((event.time_range.start, event.time_range.end))
            for sums in totals[event.name[:80]], parts[part_of(event.name)]:
                sums[0] += 1 / times
                sums[1] += event.device_time / times
    largest = sorted(totals.items(), key=lambda item: -item[1][1])[:KERNELS]
    return {
        "launches": round(sum(count for count, _ in totals.values())),
        "kernel_us": sum(us for _, us in totals.values()),
        "busy": busy(spans),
        "covered_us": covered(spans) / times,
        "parts": {name: {"launches": count, "us": us} for name, (count, us) in sorted(parts.items())},
        "kernels": [{"name": name, "launches": count, "us": us} for name, (count, us) in largest],
    }


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16, 64], help="decoded in graphs")
    parser.add_argument("--context", type=int, default=PROMPT, help="tokens of requests that decode")
    parser.add_argument("--eager", type=int, nargs="*", default=[1, 64], help="decoded without graphs")
    parser.add_argument(
        "--prefill",
        type=_load,
        nargs="*",
        default=[(2048, 1), (2048, 16), (128, 64)],
        metavar="TOKENSxREQUESTS",
    )
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    log_start()
    rows = [row for model in options.models for row in Bench(model, options).rows()]
    if options.output is not None:
        save(result("steps", rows, **device_of(detect())), options.output)


def log_start() -> None:
    """Print when each phase of a start begins, and how many kernels were compiled for how long."""
    logging.basicConfig(level=logging.WARNING, format="%(relativeCreated)d ms: %(message)s")
    logging.getLogger("turnout.engine.startup").setLevel(logging.DEBUG)
    logging.getLogger("turnout.kernels.common.compilation").setLevel(logging.INFO)


def _load(text: str) -> tuple[int, int]:
    tokens, requests = text.split("x")
    return int(tokens), int(requests)


if __name__ == "__main__":
    main()
