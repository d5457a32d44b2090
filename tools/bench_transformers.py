"""The peer of the serving benchmark: transformers' own `generate` on the same weights.

Run as a process of its own (`python -m tools.bench_transformers FOLDER ...`), so that neither side shares
threads, caches or memory with the other; prints its rows as JSON. Without `--loads` it answers each list of
loads that comes in as a line.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from turnout.bench.serve import ServeBench

EXPERTS = ("eager", "batched_mm", "grouped_mm")


@dataclass(frozen=True, kw_only=True)
class Load:
    """`prompts` random prompts, `batch` of them at a time. Lengths are in tokens."""

    batch: int
    prompts: int
    input_len: int = 64
    output_len: int = 64


def transformers_rows(folder: str, loads: Sequence[Load], *, dtype: str) -> list[dict]:
    """For each load a row with `output_throughput` in tokens/s, of each of transformers' implementations."""
    rows = []
    for experts in EXPERTS:
        command = [sys.executable, "-m", "tools.bench_transformers", folder, "--dtype", dtype]
        command += ["--experts", experts, "--loads", json.dumps([asdict(load) for load in loads])]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        base = {"system": "transformers", "experts": experts, "dtype": dtype}
        if done.returncode:
            failed = {"error_message": done.stderr.strip().splitlines()[-1]}
            rows += [base | asdict(load) | failed for load in loads]
        else:
            rows += [base | row for row in json.loads(done.stdout.splitlines()[-1])]
    return rows


class Peer:
    """A process that loads the weights once and measures what it is asked for. A context manager."""

    def __init__(self, folder: str, *, dtype: str, experts: str) -> None:
        command = [sys.executable, "-m", "tools.bench_transformers", folder, "--dtype", dtype]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen([*command, "--experts", experts], text=True, **pipes)
        self._base = {"system": "transformers", "experts": experts, "dtype": dtype}

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()

    def row(self, load: Load) -> dict[str, Any]:
        """As one of `transformers_rows`. Raises RuntimeError if the process has ended."""
        questions, answers = self._process.stdin, self._process.stdout
        assert questions is not None, "it is a pipe"
        assert answers is not None, "it is a pipe"
        questions.write(json.dumps([asdict(load)]) + "\n")
        questions.flush()
        answer = answers.readline()
        if not answer:
            raise RuntimeError(f"transformers ended, with status {self._process.wait()}")
        return self._base | json.loads(answer)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--experts", default="grouped_mm", choices=EXPERTS)
    parser.add_argument("--loads", help="a JSON list of loads, see Load")
    args = parser.parse_args()

    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        args.folder, dtype=getattr(torch, args.dtype), experts_implementation=args.experts
    )

    def generate(batch: torch.Tensor, output_len: int) -> int:
        out = model.generate(
            batch,
            attention_mask=torch.ones_like(batch),
            max_new_tokens=output_len,
            min_new_tokens=output_len,
            do_sample=False,
            pad_token_id=0,
        )
        return out.shape[0] * (out.shape[1] - batch.shape[1])

    def measured(load: Load) -> dict[str, Any]:
        bench = ServeBench(input_len=load.input_len, num_prompts=load.prompts)
        batches = torch.tensor(bench.prompts()).split(load.batch)
        generate(batches[0], min(load.output_len, 8))
        start, cpu = time.perf_counter(), time.process_time()
        tokens = sum(generate(batch, load.output_len) for batch in batches)
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
        return asdict(load) | {
            "cpu_s": cpu,
            "output_tokens": tokens,
            "duration_s": seconds,
            "output_throughput": tokens / seconds,
        }

    with torch.inference_mode():
        for line in [args.loads] if args.loads else sys.stdin:
            print(json.dumps([measured(Load(**load)) for load in json.loads(line)]), flush=True)


if __name__ == "__main__":
    main()
