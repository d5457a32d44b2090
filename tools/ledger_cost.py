"""What it costs to keep requests, so that they survive ranks, while nothing fails.

    python -m tools.ledger_cost demo --mode dp2 --pairs 30 --output benchmarks/results/ledger-cost-DEVICE.json

Gives the same load again and again to a server that keeps requests and keeps nothing of them in turns, so
that both are the same processes, and compares each pair of runs: tokens per second, CPU time of all
processes, and CPU time of the server process, where all the difference is made and which ranks do not blur.
Next to that, what the server does to keep requests is timed by itself. Exits with 1 if keeping them costs
0.5 % of all CPU time or more (median of the pairs).
"""

from __future__ import annotations

import itertools
import math
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import psutil

from tools.chaos import FAULTS
from tools.launchers import processes, started
from tools.ranks import MODES, finish, ranks_parser
from turnout.bench.results import check_output
from turnout.bench.serve import ServeBench, measure
from turnout.config import ServerConfig, load
from turnout.engine.messages import AddRequest, RequestOutput
from turnout.engine.sampling_params import SamplingParams
from turnout.server.launch import ServerProcess
from turnout.server.supervise.admission import Admission
from turnout.server.supervise.engine import EngineSupervisor
from turnout.server.supervise.ledger import EngineFailed, Entry

MOST = 0.005
REPEATS = 7


def unread(output: RequestOutput | EngineFailed) -> None:
    pass


def seconds(work: Callable[[], None]) -> float:
    """Of CPU time, the median of a few."""
    took = []
    for _ in range(REPEATS):
        begun = time.process_time()
        work()
        took.append(time.process_time() - begun)
    return statistics.median(took)


def kept(clients: int, prompt: int, tokens: int) -> tuple[float, float]:
    """CPU seconds for each request and for each output, of so many requests that run at once."""
    numbers = itertools.count()

    def requests() -> list[AddRequest]:
        sampling = SamplingParams(max_tokens=tokens)
        return [
            AddRequest(id=f"{next(numbers)}-0", prompt_ids=[1] * prompt, sampling=sampling)
            for _ in range(clients)
        ]

    def submitted() -> tuple[EngineSupervisor, Admission, list[Entry]]:
        supervisor, admission = EngineSupervisor(ServerConfig()), Admission(clients)
        entries = []
        for request in requests():
            supervisor.ledger.add(request, unread)
            for entry in supervisor.ledger.due():
                entry.message()
                admission.add(entry.request.id)
                entries.append(entry)
        return supervisor, admission, entries

    def answer(outputs: int) -> None:
        supervisor, admission, entries = submitted()
        for _ in range(outputs - 1):
            for entry in entries:
                supervisor._deliver(entry, RequestOutput(id=entry.request.id, token_ids=[7]))
        for entry in entries:
            admission.remove(entry.request.id)
            supervisor._deliver(entry, RequestOutput(id=entry.request.id, finish_reason="length"))

    def answer_without(outputs: int) -> None:
        made = requests()
        for _ in range(outputs):
            for request in made:
                unread(RequestOutput(id=request.id, token_ids=[7]))

    def extra(outputs: int) -> float:
        return seconds(lambda: answer(outputs)) - seconds(lambda: answer_without(outputs))

    short, long = extra(2), extra(2002)
    per_output = (long - short) / 2000 / clients
    return short / clients - 2 * per_output, per_output


def run_seconds(process: psutil.Process) -> float:
    """For how long the threads of a process have run, to the nanosecond; 0 if it has ended."""
    with suppress(OSError):
        tasks = Path(f"/proc/{process.pid}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9
    return 0.0


def used(server: ServerProcess) -> tuple[float, float]:
    """CPU seconds so far of the server process, and of all that it started as well."""
    own, *others = (run_seconds(process) for process in processes(server))
    return own, own + sum(others)


def run(config: ServerConfig, bench: ServeBench, pairs: int) -> dict[str, list[dict[str, float]]]:
    """For requests that are kept and that are not, a row for each pair. The first pair warms up and does not
    count."""
    variables = {
        "PYTHONPATH": os.pathsep.join([str(FAULTS), os.environ.get("PYTHONPATH", "")]),
        "TURNOUT_KEEP_NOTHING": "1",
    }
    rows: dict[str, list[dict[str, float]]] = {"kept": [], "none": []}
    with ExitStack() as stack:
        with patch.dict(os.environ, variables):
            server, _ = started(config, stack)
        assert server.base_url is not None
        for pair in range(pairs + 1):
            for turn, kind in enumerate(rows if pair % 2 else reversed(rows)):
                if turn or not pair:  # the next pair begins as the last one ended
                    server.process.send_signal(signal.SIGUSR2)
                before = used(server)
                measured = measure(replace(bench, seed=2 * pair), server.base_url)
                own, all_of_them = (after - first for after, first in zip(used(server), before, strict=True))
                if pair:
                    tokens = measured["output_tokens"]
                    rows[kind].append(
                        {
                            "tokens_per_s": measured["output_throughput"],
                            "server_us_per_token": 1e6 * own / tokens,
                            "us_per_token": 1e6 * all_of_them / tokens,
                        }
                    )
    return rows


def middle(values: Iterable[float]) -> dict[str, float]:
    """The median, and between what it lies with a confidence of 95 %, whatever the distribution."""
    ordered = sorted(values)
    away = 0.98 * math.sqrt(len(ordered))  # a binomial's 1.96 standard deviations
    low = max(math.floor(len(ordered) / 2 - away), 0)
    high = len(ordered) - 1 - low
    return {"median": statistics.median(ordered), "low": ordered[low], "high": ordered[high]}


def compared(rows: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    """What keeping requests changes, over the pairs."""
    pairs = list(zip(rows["kept"], rows["none"], strict=True))
    return {
        "throughput_ratio": middle(kept["tokens_per_s"] / none["tokens_per_s"] for kept, none in pairs),
        "cpu_ratio": middle(kept["us_per_token"] / none["us_per_token"] for kept, none in pairs),
        "overhead": middle(
            (kept["server_us_per_token"] - none["server_us_per_token"]) / none["us_per_token"]
            for kept, none in pairs
        ),
    }


def main() -> None:
    parser = ranks_parser(__doc__, mode="dp2")
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=50, help="of each answer; each client gets one")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    check_output(options.output)
    clients = options.clients
    bench = ServeBench(output_len=options.tokens, num_prompts=clients, max_concurrency=clients)
    config = load(ServerConfig, {"model": options.model, "port": 0} | MODES[options.mode])
    per_request, per_output = kept(clients, bench.input_len, options.tokens)
    rows = run(config, bench, options.pairs)
    per_token = statistics.median(row["us_per_token"] for row in rows["kept"])
    row = {
        "mode": options.mode,
        "pairs": options.pairs,
        "clients": clients,
        **compared(rows),
        "timed": {
            "us_per_request": 1e6 * per_request,
            "us_per_output": 1e6 * per_output,
            "share": 1e6 * (per_output + per_request / options.tokens) / per_token,
        },
        "runs": rows,
    }
    finish("ledger-cost", [row], options.output, failed=row["overhead"]["median"] >= MOST)


if __name__ == "__main__":
    main()
