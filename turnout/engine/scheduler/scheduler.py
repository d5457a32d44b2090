"""Who computes what in the next step: admission, chunked prefill, preemption, page accounting.

One rule for all requests: whatever tokens lack keys and values are computed next. A decoding request
lacks one, a new or preempted one lacks many and gets them in chunks, in steps that decode others.

  * Decoding goes first; prefill shares what is left of the step's token budget, oldest first; drafts of
    decoding requests (ngram.py) get what is then left of tokens and pages, and displace no request.
  * A request is admitted, in order of arrival, when pages for all its known tokens are there (kv_cache.py),
    so that only decoding can run out of pages.
  * Out of pages, the latest arrival loses its pages and is computed again later. The oldest is never
    preempted and fits alone (`refuse` made sure), so something always advances.

Torch-free: the tests drive it with thousands of random schedules.
"""

from __future__ import annotations

import time
from bisect import insort
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from typing import NamedTuple

from turnout.engine.scheduler.kv_cache import KVCache
from turnout.engine.scheduler.prefill_delayer import PrefillDelayer, Prompts
from turnout.engine.scheduler.request import Request
from turnout.engine.scheduler.step_times import StepTimes
from turnout.engine.speculative.switch import DraftSwitch


class Lack(StrEnum):
    """What a request waits for."""

    NOTHING = ""
    SLOTS = "running_requests"
    PAGES = "kv_pages"
    PREFILL = "prefill_tokens"
    RANKS = "other_ranks"


class Chunk(NamedTuple):
    """Tokens [start, end) of a request, to be computed in this step; the last ones may be drafts.

    A tuple, for a step makes one of each request, and that takes a frozen dataclass five times as long.
    """

    request: Request
    start: int
    end: int
    drafts: tuple[int, ...] = ()

    @property
    def length(self) -> int:
        return self.end - self.start

    @property
    def known_end(self) -> int:
        """Where the request's own tokens end and drafts begin."""
        return self.end - len(self.drafts)

    @property
    def tokens(self) -> list[int]:
        """0 for one that only the device knows: the last, where `awaits`."""
        known = self.request.tokens[self.start : self.known_end]
        return [*known, 0, *self.drafts] if self.awaits else [*known, *self.drafts]

    @property
    def awaits(self) -> bool:
        """Whether the last token is pending. There are no drafts then."""
        return self.known_end > len(self.request.tokens)

    @property
    def decodes(self) -> bool:
        """Whether all but drafts is one token."""
        return self.end - len(self.drafts) - self.start == 1

    @property
    def samples(self) -> bool:
        """Whether this chunk predicts tokens that are not known yet: by its last row and those of drafts."""
        return self.end - len(self.drafts) == self.request.length


def with_rows(chunks: Iterable[Chunk]) -> Iterator[tuple[Chunk, int]]:
    """Each chunk of a step with the row of its first token."""
    row = 0
    for chunk in chunks:
        yield chunk, row
        row += chunk.length


def _order(request: Request) -> tuple[int, int]:
    return request.order


class Scheduler:
    """Queues and pages. `schedule` -> forward -> `computed` -> tokens appended by the caller -> `extended`.

    tokens_per_request: what a decoding request may bring to a step, its drafts included. states_per_request:
    slots of states that a request has: one, or one for each of these tokens. by_priority: lower priorities
    count as earlier arrivals. times: of steps, where these have a target.
    switch: says which steps bring drafts; None: all do. delayer: says which steps admit no request; None: all
    do.
    """

    def __init__(
        self,
        kv: KVCache,
        *,
        max_running: int,
        chunk_tokens: int,
        prefill_tokens: int,
        max_context: int,
        tokens_per_request: int = 1,
        states_per_request: int = 1,
        by_priority: bool = False,
        times: StepTimes | None = None,
        switch: DraftSwitch | None = None,
        delayer: PrefillDelayer | None = None,
    ):
        self.kv = kv
        self.max_running = max_running
        self.chunk_tokens = chunk_tokens
        self.prefill_tokens = prefill_tokens
        self.max_context = max_context
        self.tokens_per_request, self._states_per_request = tokens_per_request, states_per_request
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # oldest first, as in `waiting`
        self.times, self.switch, self.delayer = times, switch, delayer
        self.only_decoding = 0  # requests of the last schedule, if it had nothing else
        self.drafting = False  # whether these were to bring drafts
        self._by_priority = by_priority
        self._arrivals = 0
        self.preemptions = 0
        self._lacks_pages = self._holds_prompts = False  # as of the last schedule
        self._rows = list(range(max_running - 1, -1, -1))

    @property
    def step_tokens(self) -> int:
        """The most tokens one step may hold: all running requests have room to decode."""
        return max(self.prefill_tokens, self.max_running * self.tokens_per_request)

    @property
    def lack(self) -> Lack:
        """What kept the first waiting request out of the last schedule."""
        if not self.waiting:
            return Lack.NOTHING
        if self._lacks_pages:
            return Lack.PAGES
        if self._holds_prompts:
            return Lack.RANKS
        return Lack.SLOTS if len(self.running) >= self.max_running else Lack.PREFILL

    def lower(self, *, max_running: int, prefill_tokens: int) -> None:
        """Take these sizes, where they are smaller. Before any request."""
        self.max_running = min(self.max_running, max_running)
        self.prefill_tokens = min(self.prefill_tokens, prefill_tokens)
        self.chunk_tokens = min(self.chunk_tokens, prefill_tokens)

    def refuse(self, num_prompt: int, max_tokens: int) -> str | None:
        """Why a request of these sizes can never run, or None if it can."""
        total = num_prompt + max_tokens
        if total > self.max_context:
            return (
                f"prompt of {num_prompt} tokens and max_tokens {max_tokens} make {total}, but the context "
                f"holds {self.max_context}; shorten the prompt or lower max_tokens"
            )
        stored = max(total - 1, num_prompt)  # no token attends to the last one
        room = self.kv.most_tokens
        if room is not None and stored > room:
            return (
                f"prompt of {num_prompt} tokens and max_tokens {max_tokens} need {stored} tokens of KV "
                f"cache, but there are {room} in all; shorten the prompt, lower max_tokens, or raise "
                "--max-total-tokens or --mem-fraction-static"
            )
        return None

    def add(self, request: Request) -> None:
        self._arrivals += 1
        request.order = (request.priority if self._by_priority else 0, self._arrivals)
        insort(self.waiting, request, key=_order)

    def remove(self, request: Request) -> None:
        """Forget a finished or aborted request and free what it holds."""
        if request.row >= 0:
            self.running.remove(request)
            self._vacate(request)
        else:
            self.waiting.remove(request)

    def schedule(self) -> list[Chunk]:
        """The chunks of the next step, at most one per request; [] if there is nothing to do."""
        lacked_pages, self._lacks_pages = self._lacks_pages, False
        decoding = sum(request.remaining == 1 for request in self.running)
        self.drafting = self._wants_drafts(decoding)
        budget = min(self.prefill_tokens, self.step_tokens - decoding)
        if self.times is not None:
            budget = self.times.prompt_tokens(decoding, budget)
        chunks, budget, preempted = self._continue_running(budget)
        self._lacks_pages |= preempted
        self._holds_prompts = not (preempted or lacked_pages) and self._hold(decoding)
        if not (preempted or self._holds_prompts):
            chunks += self._admit(budget)
        self.only_decoding = decoding if decoding == len(chunks) else 0
        return self._with_drafts(chunks) if self.drafting else chunks

    def may_draft(self) -> bool:
        """Whether the next step may bring drafts, for which all tokens so far have to be known."""
        if self.tokens_per_request == 1:
            return False
        decoding = [request for request in self.running if request.remaining == 1]
        return self._wants_drafts(len(decoding)) and any(request.most_drafts > 0 for request in decoding)

    def next_prompts(self, chunks: Sequence[Chunk]) -> Prompts:
        """What other ranks should know of the step after the one of `chunks`, which was just scheduled."""
        if self.delayer is None:
            return Prompts.NONE
        ends = {chunk.request.id: chunk.known_end for chunk in chunks}
        unfinished = any(
            request.length - ends.get(request.id, request.computed) > 1 for request in self.running
        )
        if unfinished or self.lack == Lack.PREFILL:
            return Prompts.DUE
        return self.delayer.says() if self._holds_prompts else Prompts.NONE

    def computed(self, chunks: Iterable[Chunk]) -> None:
        """Record that the forward of `chunks` is done; pages that it filled become reusable.

        Drafts do not count before the request is `extended` by them.
        """
        for chunk in chunks:
            self.kv.computed(chunk.request, chunk.known_end)

    def extended(self, request: Request) -> None:
        """Record that `request` got its tokens of this step, all but the last of which were drafts.

        Keys and values of accepted drafts are there already, as is the state of recurrent layers behind the
        last of them; pages that only rejected ones needed are freed.
        """
        if request.row < 0:
            return  # preempted before its tokens were known
        if self._states_per_request > 1:
            slots, accepted = request.state_slots, len(request.tokens) - 1 - request.computed
            slots[0], slots[accepted] = slots[accepted], slots[0]
        self.kv.computed(request, len(request.tokens) - 1)
        self.kv.trim(request)

    def _wants_drafts(self, decoding: int) -> bool:
        return self.tokens_per_request > 1 and (self.switch is None or self.switch.drafts(decoding))

    def _with_drafts(self, chunks: list[Chunk]) -> list[Chunk]:
        """`chunks`, those of decoding requests extended by drafts as long as there is room."""
        room = self.step_tokens - sum(chunk.length for chunk in chunks)
        extended = []
        for chunk in chunks:
            drafts = self._drafts(chunk, min(room, self.tokens_per_request - 1))
            room -= len(drafts)
            if drafts:
                chunk = chunk._replace(end=chunk.end + len(drafts), drafts=drafts)
            extended.append(chunk)
        return extended

    def _drafts(self, chunk: Chunk, room: int) -> tuple[int, ...]:
        request = chunk.request
        count = min(room, request.most_drafts)
        if count <= 0 or not (chunk.decodes and chunk.samples):
            return ()
        drafts = request.draft(count)
        if not self.kv.grow(request, chunk.end + len(drafts)):
            drafts = drafts[: request.room - chunk.end]
        return tuple(drafts)

    def _hold(self, decoding: int) -> bool:
        """Whether the request that could be admitted now waits for other ranks."""
        able = bool(self.waiting) and len(self.running) < self.max_running
        return able and self.delayer is not None and self.delayer.holds(decoding)

    def _continue_running(self, budget: int) -> tuple[list[Chunk], int, bool]:
        """Chunks of running requests, the prefill budget left, and whether anyone was preempted."""
        chunks: list[Chunk] = []
        preempted = False
        index = 0
        while index < len(self.running):
            request = self.running[index]
            decoding = request.remaining == 1
            length = 1 if decoding else min(request.remaining, self._most_tokens(request.computed, budget))
            end = request.computed + length
            while end > request.room and not self.kv.grow(request, end):
                preempted = True
                if self._preempt_latest() is request:
                    return chunks, budget, preempted
            if length > 0:
                chunks.append(Chunk(request, request.computed, end))
                budget -= 0 if decoding else length
            index += 1
        return chunks, budget, preempted

    def _admit(self, budget: int) -> list[Chunk]:
        chunks: list[Chunk] = []
        while self.waiting and len(self.running) < self.max_running and budget > 0:
            request = self.waiting[0]
            # A page for each running request stays, so that their next tokens do not preempt this one again.
            most = min(self.chunk_tokens, budget)
            if not self.kv.admit(request, most, spare=len(self.running)):
                self._lacks_pages = True
                break
            if not request.admitted:
                request.admitted = True
                request.admitted_at = time.monotonic()
                request.cached_tokens = request.computed
            self.waiting.popleft()
            request.row = self._rows.pop()
            first = request.row * self._states_per_request
            request.state_slots = list(range(first, first + self._states_per_request))
            insort(self.running, request, key=_order)
            self.kv.begun(request)
            length = min(request.remaining, self._most_tokens(request.computed, budget))
            chunks.append(Chunk(request, request.computed, request.computed + length))
            budget -= length
        return chunks

    def _most_tokens(self, start: int, budget: int) -> int:
        """Of a prompt's chunk from `start` on."""
        longest = self.kv.longest_chunk(start)
        most = min(self.chunk_tokens, budget)
        return most if longest is None else min(most, longest)

    def _preempt_latest(self) -> Request:
        victim = self.running.pop()
        self._vacate(victim)
        insort(self.waiting, victim, key=_order)
        self.preemptions += 1
        victim.preempted.append(time.time())
        return victim

    def _vacate(self, request: Request) -> None:
        self.kv.release(request)
        self._rows.append(request.row)
        request.row = -1
