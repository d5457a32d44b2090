"""All choices of one HTTP request: submitted together, their outputs turned into text as they come."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from turnout.engine.messages import AddRequest, RequestOutput, TokenLogprobs, apart, as_one
from turnout.engine.sampling.detokenizer import TextDelta, TextStream
from turnout.engine.sampling_params import SamplingParams
from turnout.server.api.errors import ApiError
from turnout.server.api.parsing.parts import Arguments, Call, Parser, Part, Text, ends_call, merged
from turnout.server.metrics import Metrics
from turnout.server.request_log import Observer, RequestRecord
from turnout.server.supervise.interface import Engine
from turnout.server.supervise.ledger import EngineFailed


@dataclass(slots=True)
class Delta:
    """What one choice gained. Several add up to the whole answer."""

    parts: list[Part] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    first: bool = False  # nothing came before it
    finish_reason: str | None = None
    stop_reason: str | int | None = None  # the stop string or token that ended it

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, Text))

    def add(self, later: Delta) -> None:
        self.parts += later.parts
        self.logprobs += later.logprobs
        self.prompt_logprobs = self.prompt_logprobs or later.prompt_logprobs
        self.first = self.first or later.first
        self.finish_reason = later.finish_reason
        self.stop_reason = later.stop_reason


@dataclass(slots=True)
class Choice:
    """One continuation of one prompt, and what is known of it so far.

    parser:   takes its text apart; None: it is plain text
    one_call: it ends with its first call
    """

    index: int
    prompt_ids: list[int]
    sampling: SamplingParams
    text: TextStream
    parser: Parser | None = None
    one_call: bool = False
    num_tokens: int = 0
    reasoning_tokens: int = 0
    has_calls: bool = False
    cached_tokens: int = 0
    first_token_time: float = 0.0
    last_token_time: float = 0.0
    waited: tuple[float, float] | None = None  # in the queue, and for the first token; of the first engine
    started: bool = False
    finished: bool = False


Item = tuple[Choice, RequestOutput | EngineFailed | ApiError]


class Generation:
    """The choices of one request, each to be submitted. Whoever makes one must close it, however it ends."""

    def __init__(
        self,
        key: str,
        id: str,
        engine: Engine,
        metrics: Metrics,
        choices: Sequence[Choice],
        record: RequestRecord | None,
        observers: Sequence[Observer],
        *,
        cache_salt: str,
        priority: int,
        stream_interval: int = 1,
    ):
        """key: what the engine calls it, unique; id: what the client calls it, which need not be.

        record: filled in if anybody observes it, and given to `observers` when the request has ended.
        cache_salt, priority, stream_interval: see AddRequest.
        """
        self.id = id
        self._key = key
        self.created = int(time.time())
        self.choices = choices
        self._engine = engine
        self._metrics = metrics
        self._arrival = time.perf_counter()
        self._come: list[Item] = []  # and not digested
        self._waiter: asyncio.Future[None] | None = None  # of `deltas`, while nothing has come
        self._unfinished = len(choices)
        self.num_submitted = 0  # of the choices
        self._cut_short: str = "abort"  # why choices end that have not finished
        self._cache_salt, self._priority, self._stream_interval = cache_salt, priority, stream_interval
        self._record, self._observers = record, observers

    @property
    def finished(self) -> bool:
        """Whether all choices have, so that no delta follows."""
        return not self._unfinished

    def submit(self, choice: Choice) -> None:
        """Hand one of the choices to the engine, which must be serving."""

        def sink(output: RequestOutput | EngineFailed) -> None:
            self._put((choice, output))

        request = AddRequest(
            id=self._name(choice),
            prompt_ids=choice.prompt_ids,
            sampling=choice.sampling,
            cache_salt=self._cache_salt,
            priority=self._priority,
            arrival=time.time(),
            stream_interval=self._stream_interval,
        )
        self._engine.submit(request, sink)
        self.num_submitted += 1

    async def deltas(self) -> AsyncIterator[list[tuple[Choice, Delta]]]:
        """What the choices gained since they were last asked for, until all have finished. Raises ApiError,
        after what came before it.

        What a choice gained at once is one delta, but for calls of tools, whose arguments come as the model
        writes them.
        """
        while self._unfinished:
            if not self._come:
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
            items, self._come = self._come, []
            gained: list[tuple[Choice, Delta]] = []
            try:
                for choice, output in arranged(items):
                    if not choice.finished or (self._unfinished and isinstance(output, ApiError)):
                        gained.append((choice, self._digest(choice, output)))
            except ApiError:
                if gained:
                    yield united(gained)
                raise
            if gained:
                yield gained if len(gained) == 1 else united(gained)

    async def totals(self) -> list[Delta]:
        """The whole answer of each choice, once all have finished. Raises ApiError."""
        totals = [Delta() for _ in self.choices]
        async for batch in self.deltas():
            for choice, delta in batch:
                totals[choice.index].add(delta)
        return totals

    def fail(self, error: ApiError) -> None:
        """End the request with `error`, whichever choices have finished, unless all have."""
        self._put((self.choices[0], error))

    def _put(self, item: Item) -> None:
        self._come.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def close(self) -> None:
        """Free what the engine still holds for this request."""
        unfinished = [choice for choice in self.choices if not choice.finished]
        self._engine.abort(self._name(choice) for choice in unfinished)
        for choice in unfinished:
            self._finish(choice, self._cut_short)
        if self._record is not None:
            record, self._record = self._record, None
            record.ended = time.time()
            for observe in self._observers:
                observe(record)

    def usage(self) -> dict[str, object]:
        """OpenAI's usage object; a prompt counts once, however many choices continue it."""
        per_prompt = {id(choice.prompt_ids): choice for choice in reversed(self.choices)}
        prompt = sum(len(choice.prompt_ids) for choice in per_prompt.values())
        cached = sum(choice.cached_tokens for choice in per_prompt.values())
        completion = sum(choice.num_tokens for choice in self.choices)
        usage: dict[str, object] = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        if any(choice.parser for choice in self.choices):
            reasoning = sum(choice.reasoning_tokens for choice in self.choices)
            usage["completion_tokens_details"] = {"reasoning_tokens": reasoning}
        return usage

    def _name(self, choice: Choice) -> str:
        return f"{self._key}-{choice.index}"

    def _digest(self, choice: Choice, output: RequestOutput | EngineFailed | ApiError) -> Delta:
        try:
            return self._digested(choice, output)
        except ApiError as error:
            self._cut_short = "error"
            if self._record is not None:
                self._record.error = error.message
            raise

    def _digested(self, choice: Choice, output: RequestOutput | EngineFailed | ApiError) -> Delta:
        if not isinstance(output, RequestOutput) or output.finish_reason in ("error", "abort"):
            raise _refusal(output)
        choice.waited = choice.waited or output.waited
        piece = choice.text.push(output)
        if self._record is not None:
            self._record.sequences[choice.index].note(output, piece.token_ids, time.time())
        self._observe(choice, piece)
        parts = _parts(choice, piece)
        delta = Delta(
            parts=parts,
            logprobs=piece.logprobs,
            prompt_logprobs=piece.prompt_logprobs,
            first=not choice.started,
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
        )
        choice.started = True
        if piece.stopped and output.finish_reason is None:
            self._engine.abort([self._name(choice)])
        if piece.finish_reason:
            self._finish(choice, piece.finish_reason)
        return delta

    def _observe(self, choice: Choice, piece: TextDelta) -> None:
        choice.cached_tokens = choice.cached_tokens or piece.cached_tokens
        count = len(piece.token_ids)
        if not count:
            return
        now = time.perf_counter()
        if choice.num_tokens == 0:
            choice.first_token_time = now
            self._metrics.first_token.observe(now - self._arrival)
        else:
            # Several at once share the time since the last.
            self._metrics.inter_token.observe((now - choice.last_token_time) / count, count)
        choice.num_tokens += count
        choice.last_token_time = now

    def _finish(self, choice: Choice, reason: str) -> None:
        choice.finished = True
        self._unfinished -= 1
        self._metrics.finished(reason)
        if self._record is not None:
            self._record.sequences[choice.index].finish_reason = reason
        if reason not in ("abort", "error"):
            self._observe_whole(choice)

    def _observe_whole(self, choice: Choice) -> None:
        metrics, tokens = self._metrics, choice.num_tokens
        metrics.latency.observe(time.perf_counter() - self._arrival)
        metrics.prompt_tokens.observe(len(choice.prompt_ids))
        metrics.generation_tokens.observe(tokens)
        metrics.max_tokens.observe(choice.sampling.max_tokens)
        if choice.waited is not None:
            queue, prefill = choice.waited
            metrics.queue_time.observe(queue)
            metrics.prefill_time.observe(prefill)
        if tokens:
            decode = choice.last_token_time - choice.first_token_time
            metrics.decode_time.observe(decode)
            if tokens > 1:
                metrics.time_per_token.observe(decode / (tokens - 1))


def _refusal(output: RequestOutput | EngineFailed | ApiError) -> ApiError:
    """What to say of an output that ends a request before its answer is complete."""
    if isinstance(output, EngineFailed):
        return ApiError(500, f"the engine failed: {output}", code="engine_failed")
    if isinstance(output, ApiError):
        return output
    if output.finish_reason == "error":
        message = output.error or "the engine could not compute this request"
        return ApiError(400 if output.user_error else 500, message)
    return ApiError(503, "the engine ended this request", code="aborted")


def _parts(choice: Choice, piece: TextDelta) -> list[Part]:
    """What `piece` adds to an answer. Corrects how it ends: with calls, or with the first of them."""
    if choice.parser is None:
        return [Text(piece.text)] if piece.text else []
    if choice.parser.in_reasoning:
        choice.reasoning_tokens += len(piece.token_ids)
    parts = choice.parser.push(piece.text)
    if piece.finish_reason is not None:
        parts += choice.parser.finish(cut=piece.finish_reason == "length")
    if piece.finish_reason is None and not _tell_of_calls(parts):  # as most of them
        return parts
    choice.has_calls = choice.has_calls or any(isinstance(part, Call) for part in parts)
    ends = [at for at, part in enumerate(parts) if ends_call(part)]
    if ends and choice.one_call:
        del parts[ends[0] + 1 :]
        piece.stopped, piece.finish_reason, piece.stop_reason = True, "stop", None
    if choice.has_calls and piece.finish_reason == "stop":
        piece.finish_reason = "tool_calls"
    return parts


def arranged(items: Sequence[Item]) -> Iterable[Item]:
    """The same outputs, `joined` or, where a parser says which tokens are reasoning, token by token."""
    if len(items) == 1 and (items[0][0].parser is None or not isinstance(items[0][1], RequestOutput)):
        return items
    found: list[Item] = []
    for choice, output in joined(items):
        if choice.parser is not None and isinstance(output, RequestOutput):
            found += [(choice, one) for one in apart(output)]
        else:
            found.append((choice, output))
    return found


def joined(items: Sequence[Item]) -> list[Item]:
    """The same outputs, those of a choice as one: when the server is behind, a token then costs less.

    Apart remain what ends a request with an error, the first output of an engine, which says how long it
    waited, and outputs of a choice whose parser says which tokens are reasoning.
    """
    runs: list[tuple[Choice, list[Any]]] = []
    latest: dict[int, list[Any]] = {}  # by choice, the run that goes on
    for choice, output in items:
        if not _can_be_joined(choice, output):
            latest.pop(choice.index, None)
            runs.append((choice, [output]))
        elif choice.index in latest:
            latest[choice.index].append(output)
        else:
            latest[choice.index] = [output]
            runs.append((choice, latest[choice.index]))
    return [(choice, run[0] if len(run) == 1 else as_one(run)) for choice, run in runs]


def _can_be_joined(choice: Choice, output: RequestOutput | EngineFailed | ApiError) -> bool:
    return (
        choice.parser is None
        and isinstance(output, RequestOutput)
        and output.finish_reason not in ("error", "abort")
        and output.waited is None
        and output.prompt_logprobs is None
    )


def united(gained: Iterable[tuple[Choice, Delta]]) -> list[tuple[Choice, Delta]]:
    """The same deltas, those of a choice as one as far as they say nothing of calls of tools."""
    found: list[tuple[Choice, Delta]] = []
    latest: dict[int, Delta] = {}  # by choice, the one that goes on
    for choice, delta in gained:
        if _tell_of_calls(delta.parts):
            latest.pop(choice.index, None)
            found.append((choice, delta))
        elif choice.index in latest:
            latest[choice.index].add(delta)
        else:
            latest[choice.index] = delta
            found.append((choice, delta))
    for _, delta in found:
        if len(delta.parts) > 1 and not _tell_of_calls(delta.parts):
            delta.parts = merged(delta.parts)
    return found


def _tell_of_calls(parts: Sequence[Part]) -> bool:
    for part in parts:  # noqa: SIM110 - a generator takes five times as long
        if isinstance(part, (Call, Arguments)):
            return True
    return False


def for_choice(sampling: SamplingParams, choice: int) -> SamplingParams:
    """The choices of one prompt differ: each takes the next seed, and after the last 64-bit one the first."""
    if choice == 0 or sampling.seed is None:
        return sampling
    seed = (sampling.seed + choice + 2**63) % 2**64 - 2**63
    return msgspec.structs.replace(sampling, seed=seed)
