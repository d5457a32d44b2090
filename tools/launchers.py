"""Ranks that Ray starts, next to those that the server starts itself: until ready, under load, in memory.

    python -m tools.launchers demo --mode dp4 --pairs 6 --output benchmarks/results/launchers-DEVICE.json

Starts one server of each kind, one after the other, and then gives both the same load in turns, so that what
else the machine does meets both alike. Exits with 1 if Ray's give less than 0.98 of the tokens per second
(median of the pairs).
"""

from __future__ import annotations

import statistics
import textwrap
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil

from tools.ranks import MODES, finish, ranks_parser
from turnout.bench.results import check_output
from turnout.bench.serve import ServeBench, measure
from turnout.config import ServerConfig, load
from turnout.packages import Package
from turnout.server.launch import ServerProcess
from turnout.server.supervise.ray_ranks import OLDEST

LAUNCHERS = ("mp", "ray")
RAY = Package(module="ray", distribution="ray", minimum=OLDEST, install="pip install 'turnout[ray]'")
LEAST = 0.98


def processes(server: ServerProcess) -> list[psutil.Process]:
    """The server, and all that it started, Ray's own included."""
    first = psutil.Process(server.process.pid)
    return [first, *first.children(recursive=True)]


def cpu_seconds(server: ServerProcess) -> float:
    """That its processes have used so far."""
    used = 0.0
    for process in processes(server):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            used += times.user + times.system
    return used


def memory(pids: Sequence[int]) -> dict[str, float]:
    """Of the ranks, in MB.

    resident: what each has in memory, added up. proportional: the same, but what several have mapped counts
    once. weights_*: of these, prepared weights.
    """
    found = dict.fromkeys(("resident", "proportional", "weights_resident", "weights_proportional"), 0.0)
    for pid in pids:
        for mapped in psutil.Process(pid).memory_maps(grouped=False):
            kinds = ("", "weights_") if "turnout-weights" in mapped.path else ("",)
            for kind in kinds:
                found[f"{kind}resident"] += mapped.rss / 1e6
                found[f"{kind}proportional"] += mapped.pss / 1e6
    return found


def started(config: ServerConfig, stack: ExitStack) -> tuple[ServerProcess, float]:
    """A server, and the seconds until it was ready."""
    begun = time.monotonic()
    server = ServerProcess(config, show=False)
    stack.callback(server.stop)
    server.wait_ready()
    return server, time.monotonic() - begun


def run(config: ServerConfig, bench: ServeBench, pairs: int) -> list[dict[str, Any]]:
    """A row for each launcher. The first pair warms up and does not count."""
    with ExitStack() as stack:
        made = {
            launcher: started(replace(config, distributed_executor_backend=launcher), stack)
            for launcher in LAUNCHERS
        }
        speeds: dict[str, list[float]] = {launcher: [] for launcher in LAUNCHERS}
        used, tokens = dict.fromkeys(LAUNCHERS, 0.0), dict.fromkeys(LAUNCHERS, 0)
        for pair in range(pairs + 1):
            for launcher in LAUNCHERS if pair % 2 else reversed(LAUNCHERS):
                server = made[launcher][0]
                assert server.base_url is not None
                before = cpu_seconds(server)
                row = measure(replace(bench, seed=2 * pair), server.base_url)
                if pair:
                    speeds[launcher].append(row["output_throughput"])
                    used[launcher] += cpu_seconds(server) - before
                    tokens[launcher] += row["output_tokens"]
        return [
            {
                "launcher": launcher,
                "ready_s": made[launcher][1],
                "tokens_per_s": speeds[launcher],
                "cpu_us_per_token": 1e6 * used[launcher] / tokens[launcher],
                "to_mp": statistics.median(
                    own / local for own, local in zip(speeds[launcher], speeds["mp"], strict=True)
                ),
                **_described(made[launcher][0]),
            }
            for launcher in LAUNCHERS
        ]


def _described(server: ServerProcess) -> dict[str, Any]:
    assert server.base_url is not None
    info = httpx.get(f"{server.base_url.removesuffix('/v1')}/server_info", timeout=10).json()
    return {
        "startup_seconds": info["engine"]["startup_seconds"],
        "ranks_mb": memory([rank["pid"] for rank in info["ranks"]]),
    }


def in_words(results: Path) -> str:
    """For docs/operations.md: what the newest result says of four ranks of the demo on a CPU."""
    file = sorted(results.glob("launchers-cpu-*.json"))[-1]
    local, ray = msgspec.json.decode(file.read_bytes())["rows"]
    memory = {name: f"{megabytes:,.0f} MB" for name, megabytes in local["ranks_mb"].items()}
    pairs = f"median of {len(ray['tokens_per_s'])} pairs; `benchmarks/results/{file.name}`"
    text = (
        "On a CPU ranks share the memory of both: "
        f"`python -m tools.launchers demo --mode {local['mode']}` finds "
        f"{memory['weights_resident']} of prepared weights mapped by four ranks of the demo that take "
        f"{memory['weights_proportional']}, and {memory['resident']} of everything that take "
        f"{memory['proportional']}. Ranks that Ray starts, on a cluster that it starts for them, are ready "
        f"after {ray['ready_s']:.1f} s, others after {local['ready_s']:.1f} s, and give "
        f"{ray['to_mp']:.2f} of their tokens per second ({pairs})."
    )
    return textwrap.fill(text, 118, break_on_hyphens=False)


def main() -> None:
    parser = ranks_parser(__doc__, mode="dp4")
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=100, help="of each answer; each client gets two")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if lacking := RAY.lacking():
        parser.error(f"{lacking}; {RAY.install}")
    check_output(options.output)
    flags = {"model": options.model, "port": 0, "disable_prefix_cache": True}
    config = load(ServerConfig, flags | MODES[options.mode])
    clients = options.clients
    bench = ServeBench(output_len=options.tokens, num_prompts=2 * clients, max_concurrency=clients)
    rows = [{"mode": options.mode, **row} for row in run(config, bench, options.pairs)]
    finish("launchers", rows, options.output, failed=rows[-1]["to_mp"] < LEAST)


if __name__ == "__main__":
    main()
