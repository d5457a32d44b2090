"""What decides which graph a step replays, and what a replay is given; on GPUs they are test_gpu*.py's."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Barrier

import pytest
import torch

from tests.engine import toy
from tests.engine.scheduler.test_scheduler import PAGE, make, start
from tests.engine.toy import SHAPE
from tests.kernels import interpreted
from turnout.attention.caches import AttentionCaches
from turnout.attention.kinds import cache_groups
from turnout.attention.torch import TorchAttention
from turnout.config import Config
from turnout.engine.cuda_graph_policy import first_sizes, graph_sizes
from turnout.engine.ranks.step_sync import StepSync
from turnout.engine.step.cuda_graphs import contexts, fields, graph_for
from turnout.parallel.exchange import StepRecord
from turnout.parallel.topology import Topology
from turnout.vocabulary import Phase


@pytest.mark.parametrize("most", [1, 2, 3, 7, 8, 64, 100, 256, 300, 1000])
def test_sizes_waste_little_and_reach_the_most(most: int):
    sizes = graph_sizes(Config(cuda_graph_max_bs=most, max_running_requests=1000))
    assert (
        sizes == sorted(set(sizes)) == graph_sizes(Config(cuda_graph_max_bs=1000, max_running_requests=most))
    )
    assert sizes[-1] == most
    for batch in range(1, most + 1):
        size = next(size for size in sizes if size >= batch)
        assert size <= max(2 * batch, batch + 7) if batch <= 256 else size < batch + 32


def test_sizes_count_drafts():
    flags = {"cuda_graph_max_bs": 9, "max_running_requests": 20, "speculative_num_steps": 2}
    assert graph_sizes(Config(speculative_algorithm="MTP", **flags))[-1] == 27
    assert graph_sizes(Config(speculative_algorithm="ngram", **flags))[-1] == 36
    assert graph_sizes(Config(**flags))[-1] == 9


@pytest.mark.parametrize("most", [1, 3, 64, 100, 512])
def test_graphs_captured_first_hold_every_batch(most: int):
    sizes = graph_sizes(Config(cuda_graph_max_bs=most, max_running_requests=most))
    first = first_sizes(sizes)
    assert set(first) <= set(sizes)
    assert len(first) <= 2 + most.bit_length()
    for batch in range(1, most + 1):
        assert next(size for size in first if size >= batch) < 2 * batch


@pytest.mark.parametrize(("waiting", "more"), [(0, []), (8, []), (9, []), (20, [24]), (24, [24]), (100, [])])
def test_graphs_of_requests_that_wait_are_captured_first(waiting: int, more: list[int]):
    sizes = graph_sizes(Config(cuda_graph_max_bs=40, max_running_requests=40))
    assert first_sizes(sizes, waiting) == sorted([1, 2, 4, 8, 16, 32, 40, *more])


@dataclass
class Together:
    """An exchange between threads."""

    size: int
    records: list[StepRecord] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.records = [StepRecord()] * self.size
        self._barrier = Barrier(self.size)

    def of(self, rank: int) -> Callable[[StepRecord], list[StepRecord]]:
        def exchange(record: StepRecord) -> list[StepRecord]:
            self.records[rank] = record
            self._barrier.wait(20)
            found = list(self.records)
            self._barrier.wait(20)
            return found

        return exchange


@pytest.mark.parametrize("dp_size", [1, 2, 4])
def test_all_ranks_replay_the_graph_that_holds_the_largest(dp_size: int):
    """Phases and tokens at random, ranks without work among them; 70 is more than any graph holds."""
    ranks, steps, sizes = 4, 60, graph_sizes(Config(cuda_graph_max_bs=64, max_running_requests=64))
    together, draw = Together(ranks), random.Random(dp_size)
    brought = [
        [
            draw.choice([(None, 0), (Phase.DECODE, draw.randint(1, 70)), (Phase.DECODE, 1)])
            for _ in range(dp_size)
        ]
        for _ in range(steps)
    ]
    for step in brought[::4]:
        step[0] = (Phase.PREFILL, draw.randint(2, 99))

    def choices(rank: int) -> list[tuple[int | None, Phase | None]]:
        topology = Topology(
            tp_size=ranks, dp_size=dp_size, ep_size=ranks, enable_dp_attention=dp_size > 1, rank=rank
        )
        step_sync = StepSync(topology, together.of(rank))
        found = []
        for step in brought:
            phase, tokens = step[topology.dp_rank]
            synced = step_sync.sync(tokens, phase, longest=10 * topology.dp_rank + tokens)
            assert synced.longest == max(10 * rank + step[rank][1] for rank in range(dp_size))
            found.append((graph_for(synced, sizes), synced.phase))
        return found

    with ThreadPoolExecutor(ranks) as pool:
        chosen = list(pool.map(choices, range(ranks)))
    assert chosen == [chosen[0]] * ranks
    for step, (size, phase) in zip(brought, chosen[0], strict=True):
        phases, most = {phase for phase, _ in step}, max(tokens for _, tokens in step)
        assert phase == next(p for p in (Phase.PREFILL, Phase.DECODE, None) if p in phases)
        if phase != Phase.DECODE or most > 64:
            assert size is None
        else:
            assert size == min(s for s in sizes if s >= most)
    assert {size is None for size, _ in chosen[0]} == {True, False}


def test_ranks_capture_what_was_left_at_the_same_steps_and_at_rest():
    """Capturing is collective. One rank has requests at times, and outputs of them, the other has none."""
    together, ranks, steps = Together(2), 2, 120
    draw = random.Random(3)
    coming = {step: draw.randint(1, 6) for step in range(2, steps, 17)}

    def captures(rank: int) -> tuple[list[int], list[int]]:
        topology = Topology(tp_size=2, dp_size=2, ep_size=2, enable_dp_attention=True, rank=rank)
        core = toy.make_core(overlap_schedule="on", step_sync=StepSync(topology, together.of(rank)))
        captured, unread, step = [], [], 0
        core._forward.use_rest = lambda: captured.append(step)
        for step in range(steps):
            if step in coming and rank == 0:
                core.add(toy.request(str(step), [1, 2, 3], max_tokens=coming[step], ignore_eos=True))
            if core.step() and step in captured:
                unread.append(step)
        return captured, unread

    with ThreadPoolExecutor(ranks) as pool:
        (first, unread), (second, _) = pool.map(captures, range(ranks))
    assert first == second
    assert unread == []  # no output waits for a capture
    rests = [step for step in range(steps) if not any(at <= step <= at + n for at, n in coming.items())]
    assert set(first) <= set(rests)
    assert len(first) > len(rests) / 2


def paged(pages: int, running: int) -> AttentionCaches:
    group = TorchAttention(
        *cache_groups(SHAPE.attention),
        num_pages=pages,
        page_size=PAGE,
        max_running=running,
        max_context=64,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    return AttentionCaches([group])


@pytest.mark.parametrize("drafts", [0, 5])
@pytest.mark.parametrize("seed", range(6))
def test_the_table_on_the_device_follows_every_schedule(seed: int, drafts: int):
    """Admissions, growth, preemptions and reused rows, with eager steps between replays, and with drafts of
    more than a page, most of which do not hold."""
    draw, running, pages = random.Random(seed), 4, 22
    scheduler = make(pages, running=running, tokens_per_request=1 + drafts)
    attention = paged(pages, running)
    alive, replays, replaced = [], 0, 0
    for i in range(400):
        if draw.random() < 0.15:
            prompt = [draw.randrange(9) for _ in range(draw.choice([1, 3, 8, 20]))]
            alive.append(start(str(i), prompt, 40))
            alive[-1].drafts_by_layer = drafts > 0
            scheduler.add(alive[-1])
        for request in alive:
            request.proposed = [draw.randrange(9) for _ in range(draw.randint(0, drafts))]
        chunks = sorted(scheduler.schedule(), key=lambda chunk: not chunk.decodes)
        if all(chunk.decodes for chunk in chunks) and draw.random() < 0.8:
            rows_of = [(chunk, place) for chunk in chunks for place in range(chunk.start, chunk.end)]
            size = len(rows_of) + draw.randint(0, 2)
            given = torch.tensor(fields(chunks, attention, size, num_drawn=7), dtype=torch.int64)
            ids, starts, ends, rows, places, slots = given
            table = contexts(attention.groups[0], starts, slots, rows, 64)
            longest = max((place for _, place in rows_of), default=0) + 1
            fewer = contexts(attention.groups[0], starts, slots, rows, longest)
            assert torch.equal(fewer, table[:, : -(-longest // PAGE)])
            for b, (chunk, place) in enumerate(rows_of):
                known = place // PAGE + 1
                assert table[b, :known].tolist() == chunk.request.kv[0].pages[:known]
                assert ids[b] == [*chunk.request.tokens, *chunk.drafts][place]
                assert slots[b] == chunk.request.kv[0].pages[known - 1] * PAGE + place % PAGE
                assert (starts[b], ends[b]) == (place, place + 1)
            assert places.tolist() == list(range(7, 7 + size))  # each its own: no token is pending
            padding = slice(len(rows_of), None)
            assert (slots[padding] == attention.groups[0].spare_slot).all()
            assert not ends[padding].any()
            assert (table[padding, 0] == pages).all()
            replays += bool(chunks)
        else:
            singles = [chunk for chunk in chunks if chunk.decodes]
            attention.laid_out(singles, chunks[len(singles) :])
        scheduler.computed(chunks)
        for chunk in chunks:
            if chunk.samples:
                held = chunk.drafts[: draw.randint(0, len(chunk.drafts))]
                chunk.request.tokens += [*held, draw.randrange(9)]
                scheduler.extended(chunk.request)
        for request in [r for r in alive if r.num_output >= 40 or draw.random() < 0.01]:
            alive.remove(request)
            scheduler.remove(request)
        replaced = scheduler.preemptions
    assert replays > 100
    assert replaced > 0


@pytest.mark.parametrize(
    "runs",
    [
        ("graphs", "eager"),
        ("ngrams", "draft layer"),
        ("short contexts",),
        pytest.param(("overlap", "windows"), marks=pytest.mark.more),
        pytest.param(("prefill", "states"), marks=pytest.mark.more),
        pytest.param(("prefill of states",), marks=pytest.mark.more),
    ],
    ids=", ".join,
)
def test_what_a_graph_would_replay_decodes_as_the_model_does(runs: tuple[str, ...]):
    """In Triton's interpreter, with padding, rows that come and go, drafts, and two batches in turns."""
    found = interpreted.printed("tests.engine.step.graphs_in_interpreter", *runs)
    shown = dict.fromkeys(("tokens", "turns", "drafts", "replays", "short"), True)
    assert found == dict.fromkeys(runs, shown)
