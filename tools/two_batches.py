"""What --enable-two-batch-overlap does on GPUs of this host: whole steps of an engine with it and without.

    python -m tools.random_checkpoint /dev/shm/model --num-layers 8
    python -m tools.two_batches /dev/shm/model --world-size 2 --output benchmarks/results/two-batches-....json

Every rank has requests of its own (data-parallel attention) and a share of the experts. A model is loaded
once for each dispatcher; the same steps then run as one batch and as two that take turns. Times are of the
slowest rank, the median over steps. The timeline is one layer's kernels on rank 0 as torch's profiler saw
them, on the stream that computes and the one on which tokens are sent, in microseconds.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import multiprocessing as processes
from torch.profiler import ProfilerActivity, profile

from tools.command_line import parser_for
from tools.timeline import on_gpu, recorded
from turnout import LLM
from turnout.bench.results import device_of, result, save
from turnout.config import Config, Launched
from turnout.engine.messages import AddRequest
from turnout.engine.sampling_params import SamplingParams
from turnout.engine.step.forward import Forward
from turnout.errors import PlanRefused
from turnout.parallel.group_exchange import gather_values
from turnout.parallel.hardware import detect

PROMPT = 64  # tokens of requests that decode
STEPS = 20
SHOWN = 3  # layer of the timeline


class Bench:
    """One rank's engine, with its forwards as one batch (False) and as two (True)."""

    def __init__(self, llm: LLM):
        self._llm, self._core = llm, llm._open()
        engine_plan = self._core.engine_plan
        whole = replace(engine_plan, plan=replace(engine_plan.plan, two_batches=False))
        self._forwards = {
            True: self._core._forward,
            False: Forward(whole, self._core._model, self._core._attention),
        }

    def rows(self, dispatcher: str, decode: list[int], prefill: list[int]) -> Iterator[dict[str, Any]]:
        for phase, loads in (("decode", decode), ("prefill", prefill)):
            for tokens in loads:
                row: dict[str, Any] = {"dispatcher": dispatcher, "phase": phase, "tokens": tokens}
                for two, name in ((False, "one_batch_ms"), (True, "two_batches_ms")):
                    self._core._forward = self._forwards[two]
                    with self._decoding(tokens) if phase == "decode" else self._prompts(tokens) as step:
                        row[name] = self._median_ms(step)
                        if two and tokens == loads[-1]:
                            row["timeline"] = self._timeline(step)
                yield row

    def close(self) -> None:
        """Drop all graphs, which may not outlive their ranks' communicators."""
        for forward in self._forwards.values():
            forward.graphs = None

    @contextmanager
    def _decoding(self, requests: int) -> Iterator[Callable[[], None]]:
        ids = self._add(requests, PROMPT, 4 * STEPS)
        while self._core.synced is None or self._core.synced.phase != "decode":
            self._core.step()
        yield lambda: self._core.step() and None
        self._core.abort(ids)
        self._core.step()

    @contextmanager
    def _prompts(self, tokens: int) -> Iterator[Callable[[], None]]:
        def step() -> None:
            self._add(1, tokens, 1)
            while self._core.has_work():
                self._core.step()

        yield step

    def _add(self, requests: int, tokens: int, length: int) -> list[str]:
        draw = torch.Generator().manual_seed(self._llm.rank)
        sampling = SamplingParams(max_tokens=length, ignore_eos=True, temperature=0)
        prompts = torch.randint(10, 200, (requests, tokens), generator=draw).tolist()
        for i, prompt in enumerate(prompts):
            self._core.add(AddRequest(id=str(i), prompt_ids=prompt, sampling=sampling))
        return [str(i) for i in range(requests)]

    def _median_ms(self, step: Callable[[], None]) -> float:
        times = []
        for i in range(STEPS + 3):
            _wait()
            gather_values(self._llm._groups.world, i)  # begin together
            start = time.perf_counter()
            step()
            _wait()
            times.append(1000 * (time.perf_counter() - start))
        slowest = map(max, zip(*gather_values(self._llm._groups.world, times[3:]), strict=True))
        return statistics.median(slowest)

    def _timeline(self, step: Callable[[], None]) -> list[dict[str, Any]]:
        """Kernels of a layer of both micro-batches, by start: each has two norms in it."""
        kind = ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU
        with profile(activities=[kind]) as seen:
            step()
            _wait()
        kernels = on_gpu(seen)
        norms = [i for i, kernel in enumerate(kernels) if "norm_rows" in kernel.name]
        if len(norms) <= 4 * (SHOWN + 1):
            return []
        shown = kernels[norms[4 * SHOWN] : norms[4 * (SHOWN + 1)]]
        return recorded(shown)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def run(rank: int, options: argparse.Namespace, folder: str) -> None:
    rows: list[dict[str, Any]] = []
    size = options.world_size
    for dispatcher in options.dispatchers:
        most = max(options.decode)
        config = Config(
            model=options.model,
            device=options.device,
            tp_size=size,
            dp_size=size,
            ep_size=size,
            enable_dp_attention=True,
            enable_two_batch_overlap=True,
            moe_a2a_backend=dispatcher,
            max_running_requests=most,
            cuda_graph_max_bs=most,
            chunked_prefill_size=max(options.prefill),
            max_prefill_tokens=max(options.prefill),
            max_total_tokens=65536,
            disable_prefix_cache=True,
            load_progress=False,
        )
        place = Launched(
            rank=rank, size=size, ranks_per_node=size, init_method=f"file://{folder}/{dispatcher}"
        )
        with suppress(PlanRefused), LLM.from_config(config, place) as llm:
            bench = Bench(llm)
            for row in bench.rows(dispatcher, options.decode, options.prefill):
                rows.append(row)
                if rank == 0:
                    print({key: value for key, value in row.items() if key != "timeline"}, flush=True)
            bench.close()
    if rank == 0 and options.output is not None:
        save(result("two-batches", rows, devices=size, **device_of(detect())), options.output)


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("model")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--dispatchers", nargs="+", default=["none", "nvlink"])
    parser.add_argument("--decode", type=int, nargs="+", default=[64, 256], help="requests of a rank")
    parser.add_argument("--prefill", type=int, nargs="+", default=[2048, 8192], help="tokens of a rank")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        processes.spawn(run, (options, folder), nprocs=options.world_size)


if __name__ == "__main__":
    main()
