"""What decode steps of an engine take on this GPU, in CUDA graphs and without, and where the time goes.

    python -m tools.decode_steps demo --output benchmarks/results/decode-DEVICE-DATE.json
    python -m tools.random_checkpoint /dev/shm/qwen3-30b && python -m tools.decode_steps /dev/shm/qwen3-30b

Requests of 64 prompt tokens decode together. A step is timed whole, from the schedule to sampled tokens, as
the mean over STEPS of them; `kernel_us` adds up the GPU's kernels of a step, which may overlap.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from turnout import LLM, SamplingParams
from turnout.bench.results import gpu_driver, result, save
from turnout.engine.core import EngineCore
from turnout.engine.messages import AddRequest

CONCURRENCY = (1, 16, 64)
PROMPT, LENGTH = 64, 128  # tokens
STEPS, PROFILED = 40, 4
KERNELS = 12  # listed per row, those that take most


class Bench:
    """A loaded model, alone on the GPU."""

    def __init__(self, model: str) -> None:
        start = time.perf_counter()
        self._llm = LLM(
            model, device="cuda", load_progress=False, disable_prefix_cache=True, max_total_tokens=65536
        )
        torch.cuda.synchronize()
        self.loaded: dict[str, Any] = {
            "model": model,
            "layers": self._llm.info()["description"]["shape"]["num_layers"],
            "load_s": time.perf_counter() - start,
            "allocated_bytes": torch.cuda.memory_allocated(),
            "peak_bytes": torch.cuda.max_memory_allocated(),
            "planned_bytes": self._llm.info()["memory"]["total"],
        }
        draw = torch.Generator().manual_seed(0)
        self._prompts = torch.randint(10, 200, (max(CONCURRENCY), PROMPT), generator=draw).tolist()

    def rows(self) -> list[dict[str, Any]]:
        core, found = self._llm._open(), [self.loaded]
        graphs = core._forward.graphs
        for kept in (graphs, None):
            core._forward.graphs = kept
            for requests in CONCURRENCY:
                found.append(
                    {"model": self.loaded["model"], "decode": "graphs" if kept else "eager"}
                    | {"requests": requests}
                    | self._throughput(requests)
                    | self._steps(core, requests)
                )
                print({key: value for key, value in found[-1].items() if key != "kernels"}, flush=True)
        core._forward.graphs = graphs
        self._llm.close()
        return found

    def _throughput(self, requests: int) -> dict[str, float]:
        """Of whole answers, prompts included."""
        sampling = SamplingParams(max_tokens=LENGTH, ignore_eos=True, temperature=0)
        start = time.perf_counter()
        self._llm.generate(self._prompts[:requests], sampling, progress=False)
        return {"tokens_per_s": requests * LENGTH / (time.perf_counter() - start)}

    def _steps(self, core: EngineCore, requests: int) -> dict[str, Any]:
        ids = [f"bench-{i}" for i in range(requests)]
        sampling = SamplingParams(max_tokens=LENGTH, ignore_eos=True, temperature=0)
        for id, prompt in zip(ids, self._prompts, strict=False):
            core.add(AddRequest(id=id, prompt_ids=prompt, sampling=sampling))
        decoding = False
        while not decoding:
            core.step()
            decoding = core.agreed is not None and core.agreed.phase == "decode"
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(STEPS):
            core.step()
        torch.cuda.synchronize()
        step_ms = 1000 * (time.perf_counter() - start) / STEPS
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            for _ in range(PROFILED):
                core.step()
            torch.cuda.synchronize()
        core.abort(ids)
        core.step()
        return {"step_ms": step_ms} | _kernels(seen)


def _kernels(seen: profile) -> dict[str, Any]:
    totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for event in seen.events() or ():
        if event.device_type.name == "CUDA":
            totals[event.name[:80]][0] += 1 / PROFILED
            totals[event.name[:80]][1] += event.device_time / PROFILED
    largest = sorted(totals.items(), key=lambda item: -item[1][1])[:KERNELS]
    return {
        "launches": round(sum(count for count, _ in totals.values())),
        "kernel_us": sum(us for _, us in totals.values()),
        "kernels": [{"name": name, "launches": count, "us": us} for name, (count, us) in largest],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows = [row for model in options.models for row in Bench(model).rows()]
    content = result("decode", rows, device=torch.cuda.get_device_name(), driver=gpu_driver())
    if options.output is not None:
        save(content, options.output)


if __name__ == "__main__":
    main()
