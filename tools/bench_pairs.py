"""Serving on a CPU and transformers' `generate`, by turns: medians of ratios of runs that follow each other.

`tools.bench_cpu` measures one after the other, which a machine that others use too, and whose speed they
change, cannot compare. Here each round has the server at 1 and 32 clients, each right before `generate` of
the same weights at batch 1 and 32, in float32 by each of the implementations of experts named below, of which
the best counts. A ratio is of two runs of the same round. Both sides compute with as many threads as
they take by themselves.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch
from rich.console import Console

from tools.bench_transformers import Load, Peer
from tools.demo.export import decoded
from turnout.bench.results import result, save
from turnout.bench.serve import ServeBench, measure
from turnout.checkpoint import locate
from turnout.config import ServerConfig
from turnout.parallel.hardware import cpu_name
from turnout.server.launch import launch

console = Console()
PEERS = ("eager", "grouped_mm")
# Clients: prompts of the server's run and of transformers', and the latter's implementations. With 32 rows
# grouped_mm takes ten times as long as eager.
LOADS = {1: (16, 4, PEERS), 32: (64, 32, PEERS[:1])}


def server_seconds(base_url: str) -> float:
    """Of all cores, by the server that this process has started, and its children, so far."""
    info = httpx.get(base_url.rstrip("/").removesuffix("/v1") + "/server_info").json()
    server = psutil.Process(info["ranks"][0]["pid"])
    while server.ppid() != os.getpid():  # a rank is a copy of another process that the server started
        above = server.parent()
        assert above is not None, "this process has started the server"
        server = above
    times = [process.cpu_times() for process in (server, *server.children(recursive=True))]
    return sum(of.user + of.system for of in times)


def one_round(base_url: str, peers: dict[str, Peer], number: int) -> list[dict[str, Any]]:
    rows = []
    for clients, (ours, theirs, names) in LOADS.items():
        bench = ServeBench(max_concurrency=clients, num_prompts=ours, seed=number)
        before = server_seconds(base_url)
        served = measure(bench, base_url) | {"cpu_s": server_seconds(base_url) - before}
        rows.append({"system": "turnout", "round": number, "concurrency": clients, **served})
        load = Load(batch=clients, prompts=theirs)
        rows += [{"round": number, **peers[name].row(load)} for name in names]
    return rows


def ratios(rows: list[dict[str, Any]], clients: int, seconds: str = "duration_s") -> list[float]:
    """Of each round: the server's tokens in a second over the best of transformers'. seconds: which; "cpu_s"
    are those of all cores, which other users of a machine change less."""
    found: dict[int, tuple[list[float], list[float]]] = {}
    for row in rows:
        if row.get("concurrency", row.get("batch")) == clients:
            sides = found.setdefault(row["round"], ([], []))
            sides[row["system"] == "transformers"].append(row["output_tokens"] / row[seconds])
    return [max(ours) / max(theirs) for ours, theirs in found.values()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo", help="a folder with an NVFP4 checkpoint")
    parser.add_argument("--name", help="of the model, in the result; else the folder's")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    name = args.name or Path(args.model).name
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        decoded(locate(args.model), Path(folder) / "bf16")
        base_url = stack.enter_context(launch(ServerConfig(model=args.model, port=0)))
        peers = {
            experts: stack.enter_context(Peer(f"{folder}/bf16", dtype="float32", experts=experts))
            for experts in PEERS
        }
        measure(ServeBench(num_prompts=8), base_url)
        for number in range(args.rounds):
            rows += (found := one_round(base_url, peers, number))
            for clients in LOADS:
                by_time, by_cpu = (ratios(found, clients, of)[0] for of in ("duration_s", "cpu_s"))
                console.print(f"round {number}, {clients} clients: {by_time:.2f}x, of CPU time {by_cpu:.2f}x")
            keep(rows, name, args.output)


def keep(rows: list[dict[str, Any]], name: str, path: Path) -> None:
    """Save the rounds so far, and medians of their ratios."""
    rounds = rows[-1]["round"] + 1
    command = f"python -m tools.bench_pairs --model {name} --rounds {rounds}"
    content = result(f"by-turns-{name}", rows, device=cpu_name(), command=command)
    content["threads"], content["load_average"] = torch.get_num_threads(), os.getloadavg()
    medians = {
        seconds: {str(clients): statistics.median(ratios(rows, clients, seconds)) for clients in LOADS}
        for seconds in ("duration_s", "cpu_s")
    }
    content["median_ratios"] = medians
    save(content, path)
    console.print(f"medians of {rounds} rounds: {medians}; saved {path}")


if __name__ == "__main__":
    main()
