"""What it costs to keep requests, so that they survive ranks: the ledger's share of all CPU time under load.

    python -m tools.ledger_cost demo --mode dp2 --clients 64

Times what the server does for that, for each request and each output, by itself; then serves and counts the
CPU time of all processes for each of the same. Exits with 1 if the share is 0.5 % or more.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack

from tools.launchers import cpu_seconds, started
from tools.ranks import MODES, ranks_parser
from turnout.bench.serve import ServeBench, measure
from turnout.config import ServerConfig, load
from turnout.engine.messages import AddRequest, RequestOutput
from turnout.engine.sampling_params import SamplingParams
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


def used(config: ServerConfig, bench: ServeBench) -> float:
    """CPU seconds of all processes of a server for each token that it gives."""
    with ExitStack() as stack:
        server, _ = started(config, stack)
        assert server.base_url is not None
        measure(bench, server.base_url)
        before = cpu_seconds(server)
        row = measure(bench, server.base_url)
        return (cpu_seconds(server) - before) / row["output_tokens"]


def main() -> None:
    parser = ranks_parser(__doc__, mode="dp2")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=100, help="of each answer")
    options = parser.parse_args()
    bench = ServeBench(
        output_len=options.tokens, num_prompts=2 * options.clients, max_concurrency=options.clients
    )
    config = load(ServerConfig, {"model": options.model, "port": 0} | MODES[options.mode])
    per_request, per_output = kept(options.clients, bench.input_len, options.tokens)
    per_token = used(config, bench)
    share = (per_output + per_request / options.tokens) / per_token
    print(
        f"{1e6 * per_request:.1f} us of CPU for a request and {1e6 * per_output:.2f} us for an output, of "
        f"{1e6 * per_token:.0f} us that all processes use for a token: {share:.3%}"
    )
    sys.exit(int(share >= MOST))


if __name__ == "__main__":
    main()
