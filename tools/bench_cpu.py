"""`make bench`: the CPU benchmarks in one run, and transformers on the same machine and weights.

Serving: the demo model, 128 requests of 64 tokens in and 64 out, at concurrency 1, 8 and 32, and prompts of
512 tokens, one at a time, to their first token; memory of all server processes; then transformers' `generate`
at batch 1 and 32, and of those prompts. Layer: `bench moe`. Everything is saved under benchmarks/results/,
with the processor, its flags and the bfloat16 units in use. It takes nine minutes on two cores.

`--model FOLDER` serves another NVFP4 checkpoint than the demo, next to transformers' `generate` of its
weights in bf16, without the long prompts and the layer; in four minutes.

`--cpu-bf16-units` confines both sides to slower units than the processor has: what a machine without them
does, as far as this one can tell.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import httpx
import psutil
from rich.console import Console
from rich.table import Table

from tools.bench_transformers import Load, transformers_rows
from tools.demo.export import decoded
from turnout.bench import moe
from turnout.bench.results import default_path, result, save
from turnout.bench.serve import ServeBench, measure
from turnout.checkpoint import locate
from turnout.config import ServerConfig
from turnout.errors import UserError
from turnout.parallel.hardware import Hardware, cpu_name, detect
from turnout.server.launch import launch
from turnout.vocabulary import Bf16Units

console = Console()
LONG = {"input_len": 512, "output_len": 1}  # a prompt, and the token that ends waiting for it
CLIENTS, REQUESTS = (1, 8, 32), 128
LONG_PROMPTS = 32
PEER_LOADS = (  # transformers' rate does not depend on how many batches follow each other
    Load(batch=1, prompts=8),
    Load(batch=32, prompts=64),
    Load(batch=1, prompts=LONG_PROMPTS, **LONG),
)
# What oneDNN, which multiplies for torch, may use where the units of a processor are refused.
PEER_LIMITS = {Bf16Units.AVX512: "AVX512_CORE_BF16", Bf16Units.NONE: "AVX512_CORE"}


def server_memory(base_url: str) -> dict[str, float]:
    """MB of the server and all its children: resident, and proportional (shared pages counted once)."""
    info = httpx.get(base_url.rstrip("/").removesuffix("/v1") + "/server_info").json()
    root = psutil.Process(info["ranks"][0]["pid"]).parent()
    assert root is not None, "the engine has a parent"
    processes = [root, *root.children(recursive=True)]
    memory = [process.memory_full_info() for process in processes]
    return {
        "rss_mb": sum(m.rss for m in memory) / 1e6,
        "pss_mb": sum(m.pss for m in memory) / 1e6,
    }


def serving(model: str, units: str) -> dict:
    """Throughput of the server at several loads, and of transformers."""
    rows, demo = [], model == "demo"
    with launch(ServerConfig(model=model, port=0, cpu_bf16_units=units)) as base_url:
        measure(ServeBench(num_prompts=8), base_url)
        benches = [ServeBench(max_concurrency=clients, num_prompts=REQUESTS) for clients in CLIENTS]
        if demo:
            benches.append(ServeBench(max_concurrency=1, num_prompts=LONG_PROMPTS, **LONG))
        for bench in benches:
            row = {"system": "turnout", "concurrency": bench.max_concurrency} | measure(bench, base_url)
            rows.append(row | server_memory(base_url))
    with tempfile.TemporaryDirectory() as folder:
        peer = Path(folder) / "bf16"
        decoded(locate(model), peer)
        for dtype in ("float32", "bfloat16"):
            console.print(
                f"transformers' generate in {dtype}, by each of its implementations: about two minutes"
            )
            rows += transformers_rows(str(peer), PEER_LOADS if demo else PEER_LOADS[:2], dtype=dtype)
    name = "serve" if demo else f"serve-{Path(model).name}"
    command = "make bench" if demo else f"python -m tools.bench_cpu --model {Path(model).name}"
    return result(name, rows, device=cpu_name(), command=command)


def show_serving(content: dict) -> None:
    rows = content["rows"]
    table = Table("system", "concurrency", "prompt", "output tokens/s", "of transformers' best", "memory MB")
    best: dict[tuple[int, int], float] = {}
    for row in rows:
        load = row.get("batch"), row["input_len"]
        best[load] = max(best.get(load, 0.0), row.get("output_throughput", 0.0))
    for row in rows:
        size = row.get("concurrency") or row["batch"]
        name = row["system"] + (f" {row['experts']} {row['dtype']}" if "experts" in row else "")
        rate = row.get("output_throughput")
        fastest = best.get((size, row["input_len"]))
        ratio = f"{rate / fastest:.2f}x" if rate and fastest else ""
        memory = f"{row['rss_mb']:.0f}" if "rss_mb" in row else ""
        table.add_row(
            name,
            str(size),
            str(row["input_len"]),
            f"{rate:.0f}" if rate else row["error_message"],
            ratio,
            memory,
        )
    console.print(table)


def confined(asked: str) -> Hardware:
    """This machine with no faster units than `asked` for, which oneDNN then does without too.

    Before the first product of this process. Raises UserError for units that this processor has not.
    """
    machine = detect("cpu")
    if asked not in ("auto", *machine.known_bf16_units):
        known = ", ".join(machine.known_bf16_units)
        raise UserError(f"--cpu-bf16-units {asked}: {machine.processor} has only {known}")
    confined = machine.with_bf16_units(asked)
    if confined != machine:
        os.environ["ONEDNN_MAX_CPU_ISA"] = PEER_LIMITS[confined.bf16_units]
    return confined


def keep(content: dict, machine: Hardware, asked: str) -> Path:
    """Save a result with the units that were in use; the file's name says so where some were refused."""
    content["bf16_units"] = str(machine.bf16_units)
    if asked != "auto":
        flags = f"--cpu-bf16-units {asked}"
        content["command"] += f" ARGS='{flags}'" if content["command"] == "make bench" else f" {flags}"
    path = default_path(content)
    if machine != detect("cpu"):
        path = path.with_stem(f"{path.stem}-units-{machine.bf16_units}")
    save(content, path)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpu-bf16-units", default="auto", choices=["auto", *Bf16Units])
    parser.add_argument("--model", default="demo", help="a folder with an NVFP4 checkpoint")
    args = parser.parse_args()
    asked = args.cpu_bf16_units
    machine = confined(asked)
    console.print(
        f"{machine.processor} ({', '.join(machine.vector_flags)}): bfloat16 is multiplied by units: "
        f"{machine.bf16_units}; the server computes in float32, the layer in both"
    )
    content = serving(args.model, asked)
    show_serving(content)
    saved = keep(content, machine, asked)
    if args.model != "demo":
        console.print(f"saved {saved}; bfloat16 units: {machine.bf16_units}")
        return
    layer = moe.run(
        formats=("bf16", "nvfp4", "mxfp4", "fp8"),
        tokens=(1, 16, 64, 256, 1024),
        device="cpu",
        cpu_bf16_units=asked,
        command="make bench",
    )
    console.print(f"saved {saved} and {keep(layer, machine, asked)}; bfloat16 units: {machine.bf16_units}")


if __name__ == "__main__":
    main()
