"""What the routes share that generate: who may come in, what a request costs, and the requests that are
running."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from turnout.checkpoint.config import read_config
from turnout.checkpoint.locate import locate
from turnout.config import ServerConfig
from turnout.engine.ranks.local_launcher import signals_held
from turnout.engine.sampling.detokenizer import TextStream
from turnout.engine.sampling_params import SamplingParams
from turnout.engine.tokenizer import Tokenizer
from turnout.server.api.answer_parsing import Parsing
from turnout.server.api.errors import ApiError, invalid, unavailable
from turnout.server.api.generation import Choice, Generation, for_choice
from turnout.server.api.intake import Intake
from turnout.server.api.parsing.registry import Parsers
from turnout.server.api.protocol import ChatBody, CompletionBody, GenerationBody, check_ids
from turnout.server.api.scoring import LabelRequest, ScoreBody, scores
from turnout.server.api.sizes import Limits
from turnout.server.api.structured import compiled
from turnout.server.api.turns import Turn
from turnout.server.metrics import Metrics
from turnout.server.request_log import (
    INCOMING,
    Incoming,
    Observer,
    RequestRecord,
    SequenceRecord,
    log_requests,
)
from turnout.server.supervise.interface import Engine
from turnout.server.tracing import Tracer

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's


class Service:
    """The requests of one process. Lives in the event loop's thread.

    on_end: called when a request has its answer, or its client has left.
    """

    def __init__(self, config: ServerConfig, engine: Engine):
        self.config = config
        self.engine = engine
        self.model_name = config.served_model_name or model_name(config.model)
        self.metrics = Metrics(self.model_name)
        self.observers: list[Observer] = []  # of every request that has ended
        self.draining = False
        self.on_end: Callable[[], None] = lambda: None
        self.tokenizer: Tokenizer | None = None
        self.parsers = Parsers.chosen(config.tool_call_parser, config.reasoning_parser)  # checks the names
        self.limits = Limits(model=self.model_name, max_context=0, vocab_size=0)  # until the engine is ready
        self.intake = Intake(config.max_request_bytes)
        self._active: set[Generation] = set()
        self._room = 0  # for sequences that run and wait, once the engine is ready
        self._idle = asyncio.Event()
        self._idle.set()

    async def load_tokenizer(self) -> Tokenizer:
        """The model's. Raises UserError."""
        config = self.config
        return await asyncio.to_thread(
            Tokenizer.load, locate(config.model), trust_remote_code=config.trust_remote_code
        )

    def open(self, tokenizer: Tokenizer, *, reads: bool = True) -> None:
        """Let requests in, once the engine is ready. Raises UserError for parsers that do not go together.

        reads: whether they are read by this process.
        """
        ready = self.engine.ready
        assert ready is not None
        self.limits = Limits(
            model=self.model_name, max_context=ready.max_context, vocab_size=ready.vocab_size
        )
        self.parsers = Parsers.chosen(
            self.config.tool_call_parser,
            self.config.reasoning_parser,
            template=tokenizer.chat_template,
            model_type=read_config(locate(self.config.model)).get("model_type"),
        )
        if reads:
            self.intake.open(tokenizer, self.limits, self.config)
        self._room = ready.info["config"]["max_running_requests"] + self.config.max_queued_requests
        self.tokenizer = tokenizer

    def observe_requests(self) -> Tracer | None:
        """Log and trace requests as configured. Raises UserError."""
        config = self.config
        if config.log_requests != "off":
            texts = config.log_requests == "full"
            self.observers.append(log_requests(self.decode if texts else None))
        if not config.otlp_traces_endpoint:
            return None
        with signals_held():
            tracer = Tracer(config.otlp_traces_endpoint, self.model_name)
        self.observers.append(tracer.observe)
        return tracer

    @property
    def num_active(self) -> int:
        return len(self._active)

    def check_open(self) -> Tokenizer:
        """Raises ApiError 503 unless requests are taken, if only to wait for the ranks to restart."""
        if self.engine.failure:
            raise unavailable(f"the engine failed: {self.engine.failure}", "engine_failed")
        if self.draining:
            raise unavailable("the server is shutting down", "shutting_down")
        if self.tokenizer is None:
            raise unavailable("the model is loading", "loading")
        if not self.engine.accepting:
            raise self.restarting()
        return self.tokenizer

    def restarting(self) -> ApiError:
        """What to answer while the ranks restart."""
        return unavailable(f"restarting: {self.engine.last_failure or 'as told to'}", "restarting")

    async def complete(
        self, body: CompletionBody, prompts: list[list[int]], given_id: str | None = None
    ) -> Generation:
        """Start what `body` asks for; `prompts` are its token ids. given_id: by a header. Raises ApiError."""
        if body.max_tokens == 0 and not body.echo:
            raise invalid("max_tokens: must be at least 1 unless echo is true", "max_tokens")
        return await self._start("cmpl", body, prompts, DEFAULT_COMPLETION_TOKENS, given_id=given_id)

    async def chat(self, body: ChatBody, prompts: list[list[int]], given_id: str | None = None) -> Generation:
        """As `complete`."""
        if body.max_tokens == 0:
            raise invalid("max_tokens: must be at least 1", "max_tokens")
        parsing = Parsing.of(body, self.parsers, self.check_open())
        return await self._start("chatcmpl", body, prompts, None, parsing, given_id)

    async def score(self, body: ScoreBody, prompts: list[list[int]]) -> dict[str, Any]:
        """The answer to /v1/score; `prompts` are token ids of the items with their query. Raises ApiError."""
        check_ids(body.label_token_ids, self.limits.vocab_size, "label_token_ids")
        generation = await self._start("score", LabelRequest.of(body, prompts), prompts, None)
        try:
            among = bool(body.apply_softmax)
            found = await scores(generation.deltas(), len(prompts), among_labels=among)
        finally:
            self.release(generation)
        usage = generation.usage()
        return {"object": "scoring", "model": self.model_name, "scores": found, "usage": usage}

    def release(self, generation: Generation) -> None:
        """The request has been answered or its client has left; harmless when repeated."""
        generation.close()
        self._active.discard(generation)
        if not self._active:
            self._idle.set()
        self.on_end()

    async def wait_idle(self) -> None:
        await self._idle.wait()

    def cut_off(self) -> None:
        """End all running requests with an error."""
        for generation in self._active:
            generation.fail(
                unavailable("the server shut down before the answer was complete", "shutting_down")
            )

    async def _start(
        self,
        kind: str,
        body: GenerationBody,
        prompts: list[list[int]],
        default_tokens: int | None,
        parsing: Parsing | None = None,
        given_id: str | None = None,
    ) -> Generation:
        """Thousands of sequences may be asked for at once: other requests have their turns in between."""
        self.check_open()  # again: things may have changed while the prompts were encoded
        if body.priority and self.config.scheduling_policy != "priority":
            raise invalid(
                "priority: this server takes requests in order of arrival; leave it out, or start the server "
                "with --scheduling-policy priority",
                "priority",
            )
        count, generation = (body.n or 1) * len(prompts), None
        await self._admit(count)
        try:
            choices = await self._choices(body, prompts, default_tokens, parsing or Parsing())
            self.check_open()
            key = f"{kind}-{uuid.uuid4().hex}"
            id = body.chosen_id or given_id or key
            generation = Generation(
                key,
                id,
                self.engine,
                self.metrics,
                choices,
                self._record(id, choices),
                self.observers,
                cache_salt=body.cache_salt or "",
                priority=body.priority or 0,
                stream_interval=body.stream_interval or self.config.stream_interval,
            )
            self._active.add(generation)
            self._idle.clear()
            await self._submit(generation)
            return generation
        except BaseException:
            if generation:
                self.release(generation)
            raise
        finally:
            self.engine.unreserve(count - (generation.num_submitted if generation else 0))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, special ones included."""
        assert self.tokenizer is not None
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def _record(self, id: str, choices: Sequence[Choice]) -> RequestRecord | None:
        if not self.observers:
            return None
        incoming = INCOMING.get() or Incoming()
        return RequestRecord(
            id=id,
            model=self.model_name,
            sampling=choices[0].sampling,
            arrival=time.time(),
            sequences=[SequenceRecord(prompt_ids=choice.prompt_ids) for choice in choices],
            path=incoming.path,
            traceparent=incoming.traceparent,
        )

    async def _choices(
        self,
        body: GenerationBody,
        prompts: list[list[int]],
        default_tokens: int | None,
        parsing: Parsing,
    ) -> list[Choice]:
        tokenizer = self.check_open()
        grammar = ""
        if restrictions := body.restrictions() | parsing.calls:
            after = parsing.thinking(tokenizer, prompts[0])
            grammar = await asyncio.to_thread(compiled, restrictions, after)
        turn = Turn()
        sampling_of: dict[int, SamplingParams] = {}  # by max_tokens
        choices: list[Choice] = []
        for whole_ids in prompts:
            prompt_ids = self._truncate(whole_ids, body, default_tokens)
            limit = self._token_limit(len(prompt_ids), body.max_tokens, default_tokens)
            if limit not in sampling_of:
                sampling_of[limit] = body.sampling(limit, self.limits.vocab_size, grammar)
            sampling = sampling_of[limit]
            for choice in range(body.n or 1):
                own = for_choice(sampling, choice)
                text = TextStream(tokenizer, own, keep=parsing.kept)
                parser = parsing.parser(tokenizer, prompt_ids)
                choices.append(Choice(len(choices), prompt_ids, own, text, parser, one_call=parsing.one_call))
            await turn.share()
        return choices

    async def _submit(self, generation: Generation) -> None:
        """Raises ApiError 503 if the engine stops serving meanwhile."""
        turn = Turn()
        for choice in generation.choices:
            generation.submit(choice)
            if await turn.share():
                self.check_open()

    async def _admit(self, count: int) -> None:
        """Reserve room for so many sequences. Raises ApiError if there is none, now or ever."""
        if count > self._room:
            raise invalid(
                f"n times the number of prompts is {count}, but at most {self._room} are served at once"
            )
        present = await self.engine.reserve(count, self._room)
        if present is not None:
            raise unavailable(f"{present} sequences are running or queued; try again later", "queue_full")

    def _truncate(self, prompt_ids: list[int], body: GenerationBody, default_tokens: int | None) -> list[int]:
        """The last `truncate_prompt_tokens` of a prompt; -1: as many as leave room for the answer."""
        keep = body.truncate_prompt_tokens
        if keep == -1:
            keep = self.limits.max_context - (body.max_tokens or default_tokens or 1)
        return prompt_ids[-keep:] if keep is not None and keep > 0 else prompt_ids

    def _token_limit(self, num_prompt: int, asked: int | None, default: int | None) -> int:
        """max_tokens of a prompt. Raises ApiError 400 if prompt and output exceed the context."""
        context = self.limits.max_context
        room = context - num_prompt
        if asked is None and room >= 1:
            return min(default or room, room)
        if room < (asked or 0) or asked is None:
            wanted = f" and max_tokens is {asked}" if asked is not None else ""
            raise invalid(
                f"the context holds {context} tokens, but the prompt has {num_prompt}{wanted}; "
                "shorten the prompt or lower max_tokens",
                "prompt" if room < 1 else "max_tokens",
                "context_length_exceeded",
            )
        return asked


def model_name(model: str) -> str:
    """What clients call a model: a hub id as it is, a folder by its own name."""
    path = Path(model).expanduser()
    return path.resolve().name if path.is_dir() else model
