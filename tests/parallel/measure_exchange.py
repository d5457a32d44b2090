"""How long a step exchange takes: `python -m tests.parallel.measure_exchange [ranks] [exchanges]`.

Prints the median and the 99th percentile over exchanges of ranks that do nothing else, then how late a
rank notices another one that comes after 1, 10 and 100 ms, then the CPU that ranks use while they wait a
second for one.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import tempfile
import time
from pathlib import Path

from turnout.parallel.exchange import SharedExchange, StepRecord

DELAYS = 0.001, 0.01, 0.1  # seconds
REPEATS = 20


def measure(path: Path, rank: int, size: int, count: int) -> None:
    exchange = SharedExchange(path, rank, size)
    exchange(StepRecord())
    times = []
    for number in range(count):
        began = time.perf_counter()
        exchange(StepRecord(tokens=number))
        times.append(1e6 * (time.perf_counter() - began))
    if rank == 0:
        slow = statistics.quantiles(times, n=100)[98]
        print(f"{size} ranks: median {statistics.median(times):.1f} us, 99 % within {slow:.1f} us")
    for delay in DELAYS:
        late = [_lateness(exchange, rank, size, delay) for _ in range(REPEATS)]
        if rank == 0:
            print(f"a rank {1e3 * delay:g} ms late is noticed within {1e6 * statistics.median(late):.0f} us")
    before = time.process_time()
    _lateness(exchange, rank, size, 1.0)
    if rank == 0:
        print(f"waiting for a second takes {1e3 * (time.process_time() - before):.1f} ms of CPU")


def _lateness(exchange: SharedExchange, rank: int, size: int, delay: float) -> float:
    """Seconds from the arrival of the last rank to this one's return."""
    exchange(StepRecord())
    if rank == size - 1:
        time.sleep(delay)
    arrived = time.monotonic_ns()  # one clock for all processes
    records = exchange(StepRecord(tokens=arrived))
    return (time.monotonic_ns() - max(record.tokens for record in records)) / 1e9


def main(size: int = 2, count: int = 20_000) -> None:
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "steps"
        ranks = [context.Process(target=measure, args=(path, rank, size, count)) for rank in range(size)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
