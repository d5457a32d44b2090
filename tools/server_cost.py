"""What a streamed token costs the server process: its CPU time, by number of streaming clients.

    python -m tools.server_cost demo --clients 64,256 --baseline CHECKOUT --output FILE

Every client streams one answer of `--tokens` tokens, so that what a request costs once hardly counts. With
`--baseline`, a folder with another commit's files, a server of that commit gets the same load in turns with
this one's, so that what else the machine does meets both alike. CPU time is that of all threads of the server
process; ranks and clients have processes of their own.
"""

from __future__ import annotations

import os
import statistics
from argparse import ArgumentTypeError
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil

from tools.launchers import started
from tools.ledger_cost import run_seconds
from tools.ranks import MODES, finish, ranks_parser
from turnout.bench.results import check_output, commit
from turnout.bench.serve import ServeBench, measure, place
from turnout.config import ServerConfig, load
from turnout.server.launch import ServerProcess

PROMPT_TOKENS = 32


def servers(config: ServerConfig, baseline: Path | None, stack: ExitStack) -> dict[str, ServerProcess]:
    """This commit's server, and the baseline's if there is one."""
    trees = {"own": Path(__file__).parents[1]} | ({"baseline": baseline} if baseline else {})
    found = {}
    for name, tree in trees.items():
        # Safe: `python -m` would otherwise look in the present folder first.
        with patch.dict(os.environ, {"PYTHONPATH": str(tree.resolve()), "PYTHONSAFEPATH": "1"}):
            found[name], _ = started(config, stack)
    return found


def run(
    server_of: dict[str, ServerProcess], clients: int, tokens: int, rounds: int
) -> dict[str, list[dict[str, float]]]:
    """For each server a row for each round. The first round warms up and does not count."""
    bench = ServeBench(
        input_len=PROMPT_TOKENS, output_len=tokens, num_prompts=clients, max_concurrency=clients
    )
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in server_of}
    for number in range(rounds + 1):
        for name in rows if number % 2 else reversed(rows):
            server = server_of[name]
            assert server.base_url is not None
            process = psutil.Process(server.process.pid)
            before = run_seconds(process)
            measured = measure(replace(bench, seed=2 * number), server.base_url)
            used = run_seconds(process) - before
            if number:
                rows[name].append(
                    {
                        "server_us_per_token": 1e6 * used / measured["output_tokens"],
                        "server_share_of_a_core": used / measured["duration_s"],
                        "tokens_per_s": measured["output_throughput"],
                        "median_itl_ms": measured["median_itl_ms"],
                    }
                )
    return rows


def medians(rows: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """The median of each figure of each server, and of the rounds' ratios of CPU time."""
    found: dict[str, Any] = {
        name: {figure: statistics.median(row[figure] for row in of_server) for figure in of_server[0]}
        for name, of_server in rows.items()
    }
    if "baseline" in rows:
        found["cpu_ratio"] = statistics.median(
            own["server_us_per_token"] / other["server_us_per_token"]
            for own, other in zip(rows["own"], rows["baseline"], strict=True)
        )
    return found


def numbers(text: str) -> Sequence[int]:
    try:
        found = [int(word) for word in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise ArgumentTypeError(f"{text!r}: must be positive numbers with commas between them, like 64,256")
    return found


def main() -> None:
    parser = ranks_parser(__doc__, mode="one")
    parser.add_argument("--clients", type=numbers, default=[64, 256], help="at once, several with commas")
    parser.add_argument(
        "--tokens", type=int, default=256, help="of each answer; each client gets one a round"
    )
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--baseline", type=Path, help="a checkout of the commit to compare with")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.baseline and not (options.baseline / "turnout").is_dir():
        parser.error(f"--baseline {options.baseline}: holds no folder `turnout`; give a checkout's root")
    check_output(options.output)
    most = max(options.clients)
    flags = {
        "model": options.model,
        "port": 0,
        "max_running_requests": most,
        "max_total_tokens": most * (PROMPT_TOKENS + options.tokens + 32),
    }
    config = load(ServerConfig, flags | MODES[options.mode])
    with ExitStack() as stack:
        server_of = servers(config, options.baseline, stack)
        where = place(str(server_of["own"].base_url))
        rows = []
        for clients in options.clients:
            rounds = run(server_of, clients, options.tokens, options.rounds)
            shared = {"mode": options.mode, "clients": clients, "tokens": options.tokens}
            if options.baseline:
                shared["baseline_commit"] = commit(options.baseline / "turnout")
            rows.append({**shared, **medians(rounds), "rounds": rounds})
    finish("server-cost", rows, options.output, failed=False, **where)


if __name__ == "__main__":
    main()
