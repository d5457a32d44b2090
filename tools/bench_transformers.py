"""The peer of the serving benchmark: transformers' own `generate` on the same weights.

Run as a process of its own (`python -m tools.bench_transformers FOLDER ...`), so that neither side shares
threads, caches or memory with the other; prints one JSON row.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from typing import Any

from turnout.bench.serve import ServeBench

EXPERTS = ("eager", "batched_mm", "grouped_mm")


def transformers_rows(folder: str, bench: ServeBench, *, dtype: str, batch: int, prompts: int) -> list[dict]:
    """Rows with `output_throughput` in tokens/s, one for each of transformers' experts implementations."""
    rows = []
    for experts in EXPERTS:
        command = [sys.executable, "-m", "tools.bench_transformers", folder, "--dtype", dtype]
        command += ["--batch", str(batch), "--prompts", str(prompts), "--experts", experts]
        command += ["--input-len", str(bench.input_len), "--output-len", str(bench.output_len)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        base = {"system": "transformers", "experts": experts, "dtype": dtype, "batch": batch}
        if done.returncode:
            rows.append(base | {"error_message": done.stderr.strip().splitlines()[-1]})
        else:
            rows.append(base | json.loads(done.stdout.splitlines()[-1]))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--experts", default="grouped_mm", choices=EXPERTS)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=64)
    args = parser.parse_args()

    import torch
    from transformers import AutoModelForCausalLM

    bench = ServeBench(input_len=args.input_len, output_len=args.output_len, num_prompts=args.prompts)
    model: Any = AutoModelForCausalLM.from_pretrained(
        args.folder, dtype=getattr(torch, args.dtype), experts_implementation=args.experts
    )
    prompts = torch.tensor(bench.prompts())

    def generate(batch: torch.Tensor) -> int:
        out = model.generate(
            batch,
            attention_mask=torch.ones_like(batch),
            max_new_tokens=bench.output_len,
            min_new_tokens=bench.output_len,
            do_sample=False,
            pad_token_id=0,
        )
        return out.shape[0] * (out.shape[1] - batch.shape[1])

    with torch.inference_mode():
        generate(prompts[: args.batch, :8])
        start = time.perf_counter()
        tokens = sum(generate(batch) for batch in prompts.split(args.batch))
        seconds = time.perf_counter() - start
    print(json.dumps({"output_tokens": tokens, "duration_s": seconds, "output_throughput": tokens / seconds}))


if __name__ == "__main__":
    main()
