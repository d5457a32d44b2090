"""Invariants of pages and queues under random schedules; no model, no torch."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from turnout.engine.messages import AddRequest
from turnout.engine.sampling_params import SamplingParams
from turnout.engine.scheduler.block_pool import ROOT, KVBlockPool, chain
from turnout.engine.scheduler.kv_cache import KVCache
from turnout.engine.scheduler.request import Request
from turnout.engine.scheduler.scheduler import Scheduler

PAGE = 4


def start(id: str, prompt: list[int], max_tokens: int) -> Request:
    message = AddRequest(id=id, prompt_ids=prompt, sampling=SamplingParams(max_tokens=max_tokens))
    return Request.start(message, seed=0, eos_token_ids=())


def make(
    num_pages: int,
    *,
    reuse: bool = True,
    running: int = 4,
    chunk: int = 8,
    budget: int = 16,
    tokens_per_request: int = 1,
    windows: dict[int, int] | None = None,
    by_priority: bool = False,
) -> Scheduler:
    """windows: the pages of further cache groups, by their windows."""
    pools = [KVBlockPool(num_pages, reuse=reuse)]
    pools += [KVBlockPool(pages, reuse=reuse, window=window) for window, pages in (windows or {}).items()]
    return Scheduler(
        KVCache(pools, PAGE),
        max_running=running,
        chunk_tokens=chunk,
        prefill_tokens=budget,
        max_context=64,
        tokens_per_request=tokens_per_request,
        by_priority=by_priority,
    )


def check(scheduler: Scheduler, requests: list[Request]) -> None:
    """Every page of a group is free, cached or live, exactly once; live ones are held as often as listed."""
    for request in requests:
        assert (request.row >= 0) == (request in scheduler.running)
        assert bool(request.kv) == (request.row >= 0)
    for number, pool in enumerate(scheduler.kv.pools):
        held: dict[int, int] = {}
        for request in scheduler.running:
            kv = request.kv[number]
            for page in kv.pages[kv.freed :]:
                held[page] = held.get(page, 0) + 1
            assert len(set(kv.pages[kv.freed :])) == len(kv.pages) - kv.freed
            assert request.computed <= request.room <= len(kv.pages) * PAGE
            assert kv.freed == (max(0, request.computed + 1 - pool.window) // PAGE if pool.window else 0)
        assert len(held) == pool.num_live
        assert {page: pool._holders[page] for page in held} == held
        free, cached = set(pool._free), set(pool._cached)
        assert len(pool._free) == len(free)
        assert not free & cached
        assert not (free | cached) & set(held)
        assert len(free) + len(cached) + len(held) == pool.num_pages
    assert len({r.row for r in scheduler.running}) == len(scheduler.running) <= scheduler.max_running


def check_contents(request: Request, writers: list[dict[int, list[int]]], scheduler: Scheduler) -> None:
    """The keys of every token that the next one sees, in each group, are those of this request's prefix."""
    for pool, kv, writer in zip(scheduler.kv.pools, request.kv, writers, strict=True):
        first = max(0, request.computed + 1 - pool.window) if pool.window else 0
        for place in range(first, request.computed):
            page = kv.pages[place // PAGE]
            assert writer[page][place % PAGE] == hash(tuple(request.tokens[: place + 1]))


@settings(max_examples=150, deadline=None)
@given(
    data=st.data(),
    num_pages=st.integers(8, 24),
    reuse=st.booleans(),
    running=st.integers(1, 5),
    chunk=st.integers(1, 12),
    budget=st.integers(1, 20),
    drafts=st.integers(0, 5),
    windows=st.dictionaries(st.integers(1, 20), st.integers(8, 24), max_size=2),
)
def test_random_schedules(
    data: st.DataObject,
    num_pages: int,
    reuse: bool,
    running: int,
    chunk: int,
    budget: int,
    drafts: int,
    windows: dict[int, int],
) -> None:
    """A simulated cache records what each slot holds, so that a wrong page is noticed at once."""
    scheduler = make(
        num_pages,
        reuse=reuse,
        running=running,
        chunk=chunk,
        budget=budget,
        tokens_per_request=1 + drafts,
        windows=windows,
    )
    slots = [{page: [0] * PAGE for page in range(pool.num_pages)} for pool in scheduler.kv.pools]
    alive: list[Request] = []
    arrived = 0
    for _ in range(400):
        if arrived < 12 and data.draw(st.integers(0, 2)) == 0:
            prompt = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=20))
            max_tokens = data.draw(st.integers(1, 12))
            assert scheduler.refuse(len(prompt), max_tokens) is None
            alive.append(start(str(arrived), prompt, max_tokens))
            scheduler.add(alive[-1])
            arrived += 1
        if alive and data.draw(st.integers(0, 30)) == 0:
            scheduler.remove(alive.pop(data.draw(st.integers(0, len(alive) - 1))))
        advance(scheduler, alive, slots)
        check(scheduler, alive)
        if arrived == 12 and not alive:
            break
    else:
        raise AssertionError("the schedule does not come to an end")
    for pool in scheduler.kv.pools:
        assert pool.num_live == 0
        assert pool.num_available == pool.num_pages


def advance(scheduler: Scheduler, alive: list[Request], slots: list[dict[int, list[int]]]) -> None:
    chunks = scheduler.schedule()
    assert bool(chunks) == bool(alive)
    assert len({chunk.request for chunk in chunks}) == len(chunks)
    assert sum(chunk.length for chunk in chunks) <= scheduler.step_tokens
    for chunk in chunks:
        request = chunk.request
        assert 0 < chunk.known_end - chunk.start <= max(scheduler.chunk_tokens, 1)
        assert len(chunk.drafts) < scheduler.tokens_per_request
        assert not chunk.drafts or (chunk.decodes and chunk.samples)
        assert chunk.start == request.computed
        check_contents(request, slots, scheduler)
        tokens = request.tokens[: chunk.start] + chunk.tokens
        for pool, kv, written in zip(scheduler.kv.pools, request.kv, slots, strict=True):
            for place in range(chunk.start, chunk.end):
                page = kv.pages[place // PAGE]
                assert pool._holders[page] == 1, "a shared page is never written"
                written[page][place % PAGE] = hash(tuple(tokens[: place + 1]))
    sampling = [(chunk.request, chunk.drafts) for chunk in chunks if chunk.samples]
    scheduler.computed(chunks)
    for request, drafts in sampling:
        for draft in (*drafts, None):
            request.tokens.append(len(request.tokens) % 7 % 2)  # now as drafted, now not
            if request.tokens[-1] != draft:
                break
        scheduler.extended(request)
        assert all(len(kv.pages) == -(-request.computed // PAGE) for kv in request.kv)
        if request.num_output == request.sampling.max_tokens:
            scheduler.remove(request)
            alive.remove(request)


def test_decoding_goes_first_and_long_prompts_share_what_is_left() -> None:
    scheduler = make(64, chunk=8, budget=10)
    short, long = start("short", [1] * 3, 10), start("long", [2] * 30, 10)
    scheduler.add(short)
    scheduler.add(long)
    assert [(c.request.id, c.length) for c in step(scheduler)] == [("short", 3), ("long", 7)]
    assert [(c.request.id, c.length) for c in step(scheduler)] == [("short", 1), ("long", 8)]


def step(scheduler: Scheduler, then: int = 0) -> list:
    """All requests that sample get the token `then`."""
    chunks = scheduler.schedule()
    done = [chunk for chunk in chunks if chunk.samples]
    scheduler.computed(chunks)
    for chunk in done:
        chunk.request.tokens.append(then)
        scheduler.extended(chunk.request)
    return chunks


def test_the_oldest_is_never_preempted() -> None:
    scheduler = make(8, running=4, budget=64, chunk=64)
    requests = [start(str(i), [i] * 6, 26) for i in range(3)]
    for request in requests:
        scheduler.add(request)
    while requests[0].num_output < 25:
        step(scheduler)
        assert requests[0] is scheduler.running[0]
    assert scheduler.preemptions > 0


def test_order_of_arrival_survives_preemption() -> None:
    scheduler = make(9, running=4, budget=64, chunk=64)
    requests = [start(str(i), [i] * 8, 20) for i in range(5)]
    for request in requests:
        scheduler.add(request)
    finished = []
    while len(finished) < 5:
        for chunk in step(scheduler):
            if chunk.request.num_output >= 20 and chunk.request not in finished:
                scheduler.remove(chunk.request)
                finished.append(chunk.request)
        order = [int(r.id) for r in [*scheduler.running, *scheduler.waiting]]
        assert order == sorted(order)
    assert finished == requests


def test_nobody_is_admitted_to_pages_that_the_next_tokens_of_others_need() -> None:
    scheduler = make(8, running=4, budget=64, chunk=64)
    for id in "ab":
        scheduler.add(start(id, [1] * 11, 8))
    scheduler.add(start("c", [2] * 4, 8))
    assert [chunk.request.id for chunk in step(scheduler)] == ["a", "b"]
    assert scheduler.kv.pools[0].num_available == 2
    assert [chunk.request.id for chunk in step(scheduler)] == ["a", "b"]


def test_drafts_take_what_prompts_leave_of_a_step() -> None:
    scheduler = make(64, running=2, chunk=8, budget=8, tokens_per_request=5)
    scheduler.add(start("repeating", [1, 2, 3, 1, 2], 20))
    step(scheduler, then=3)
    scheduler.add(start("prompt", [4] * 30, 2))
    assert [chunk.tokens for chunk in step(scheduler)] == [[3, 1], [4] * 8]


def test_drafts_take_pages_that_nobody_else_needs() -> None:
    scheduler = make(4, running=2, chunk=8, budget=16, tokens_per_request=5)
    scheduler.add(start("repeating", [1, 2, 3, 1, 2], 20))
    scheduler.add(start("growing", [9, 8, 7, 6], 5))
    step(scheduler, then=3)
    assert scheduler.kv.pools[0].num_available == 1
    assert [chunk.tokens for chunk in step(scheduler)] == [[3, 1, 2], [3]]
    assert scheduler.preemptions == 0


def test_digests_name_the_whole_prefix() -> None:
    first = chain(ROOT, [1, 2, 3, 4])
    assert first == chain(ROOT, [1, 2, 3, 4])
    assert len({first, chain(ROOT, [1, 2, 3, 5]), chain(first, [1, 2, 3, 4]), chain(ROOT, [1, 2, 3])}) == 4


def test_the_pool_evicts_the_least_recently_used_prefix_from_its_end() -> None:
    pool = KVBlockPool(4)
    old, new = pool.allocate(2), pool.allocate(2)
    assert old is not None
    assert new is not None
    digests = [bytes([i]) for i in range(4)]
    for page, digest in zip(old + new, digests, strict=True):
        pool.publish(page, digest)
    pool.release(old)
    pool.release(new)
    assert pool.num_available == pool.num_cached == 4
    assert pool.allocate(1) == [old[1]]
    assert pool.match(digests[:2]) == [old[0]]
    assert pool.match(digests[2:]) == new
    assert pool.allocate(4) is None
    assert pool.num_available == 3


def test_pages_needed_count_cached_prefix_pages_once() -> None:
    """A prefix found in the cache takes no fresh pages, but makes its pages unavailable."""
    scheduler = make(8, budget=64, chunk=64)
    first = start("a", list(range(16)), 1)
    scheduler.add(first)
    step(scheduler)
    scheduler.remove(first)
    assert scheduler.kv.pools[0].num_cached == 4
    second, third = start("b", list(range(16)) + [1] * 4, 4), start("c", list(range(16)) + [2] * 4, 4)
    scheduler.add(second)
    scheduler.add(third)
    assert [(c.request.id, c.start, c.end) for c in step(scheduler)] == [("b", 16, 20), ("c", 16, 20)]
    assert scheduler.kv.pools[0].num_live == 6


def test_lower_priorities_go_first_and_are_preempted_last() -> None:
    scheduler = make(4, running=2, budget=64, by_priority=True)
    requests = [start(str(i), [i], 30) for i in range(4)]
    for request, priority in zip(requests, (1, 0, -2, 0), strict=True):
        request.priority = priority
        scheduler.add(request)
    step(scheduler)
    assert [request.id for request in scheduler.running] == ["2", "1"]
    assert [request.id for request in scheduler.waiting] == ["3", "0"]
    while not scheduler.preemptions:
        step(scheduler)
    assert [request.id for request in scheduler.running] == ["2"]
    assert [request.id for request in scheduler.waiting] == ["1", "3", "0"]


def test_priorities_do_not_count_in_order_of_arrival() -> None:
    scheduler = make(4, running=2, budget=64)
    requests = [start(str(i), [i], 4) for i in range(3)]
    requests[2].priority = -5
    for request in requests:
        scheduler.add(request)
    step(scheduler)
    assert [request.id for request in scheduler.waiting] == ["2"]


def test_a_forgotten_pool_finds_nothing_and_loses_no_page() -> None:
    pool = KVBlockPool(4)
    pages = pool.allocate(3) or []
    digests = [chain(ROOT, [i]) for i in range(3)]
    for page, digest in zip(pages, digests, strict=True):
        pool.publish(page, digest)
    pool.release(pages[:1])
    pool.forget()
    assert pool.match(digests[:1]) == [] == pool.match(digests[1:2])
    pool.release(pages[1:])
    assert (pool.num_available, pool.num_cached) == (4, 0)
    assert sorted(pool.allocate(4) or []) == [0, 1, 2, 3]
