"""`make bench`: the CPU benchmarks in one run, and transformers on the same machine and weights.

Serving: the demo model, 128 requests of 64 tokens in and 64 out, at concurrency 1, 8 and 32; memory of
all server processes; then transformers' `generate` at batch 1 and 32. Layer: `bench moe`. Everything is
saved under benchmarks/results/.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import httpx
import psutil
from rich.console import Console
from rich.table import Table

from tools.bench_transformers import transformers_rows
from tools.demo.export import decoded
from turnout.bench import moe
from turnout.bench.results import default_path, result, save
from turnout.bench.serve import ServeBench, measure
from turnout.checkpoint import locate
from turnout.config import ServerConfig
from turnout.parallel.hardware import cpu_name
from turnout.server.launch import launch

console = Console()
PEER_PROMPTS = {1: 8, 32: 64}  # transformers' rate does not depend on how many batches follow each other


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


def serving() -> dict:
    """Throughput of the server at three concurrencies, and of transformers at two batch sizes."""
    rows = []
    with launch(ServerConfig(model="demo", port=0)) as base_url:
        measure(ServeBench(num_prompts=8), base_url)
        for concurrency, prompts in ((1, 128), (8, 128), (32, 128)):
            bench = ServeBench(max_concurrency=concurrency, num_prompts=prompts)
            row = {"system": "turnout", "concurrency": concurrency} | measure(bench, base_url)
            rows.append(row | server_memory(base_url))
    with tempfile.TemporaryDirectory() as folder:
        peer = Path(folder) / "demo-bf16"
        decoded(locate("demo"), peer)
        for batch, prompts in PEER_PROMPTS.items():
            for dtype in ("float32", "bfloat16"):
                rows += transformers_rows(str(peer), ServeBench(), dtype=dtype, batch=batch, prompts=prompts)
    return result("serve", rows, device=cpu_name(), command="make bench")


def show_serving(content: dict) -> None:
    rows = content["rows"]
    table = Table("system", "concurrency", "output tokens/s", "of transformers' best", "memory MB")
    best = {
        batch: max(r.get("output_throughput", 0.0) for r in rows if r.get("batch") == batch)
        for batch in PEER_PROMPTS
    }
    for row in rows:
        size = row.get("concurrency") or row.get("batch")
        name = row["system"] + (f" {row['experts']} {row['dtype']}" if "experts" in row else "")
        rate = row.get("output_throughput")
        ratio = f"{rate / best[size]:.2f}x" if rate and size in best else ""
        memory = f"{row['rss_mb']:.0f}" if "rss_mb" in row else ""
        table.add_row(name, str(size), f"{rate:.0f}" if rate else row["error_message"], ratio, memory)
    console.print(table)


def main() -> None:
    content = serving()
    show_serving(content)
    save(content, default_path(content))
    layer = moe.run(
        formats=("bf16", "nvfp4", "mxfp4", "fp8"),
        tokens=(1, 16, 64, 256, 1024),
        device="cpu",
        command="make bench",
    )
    save(layer, default_path(layer))
    console.print(f"saved {default_path(content)} and {default_path(layer)}")


if __name__ == "__main__":
    main()
