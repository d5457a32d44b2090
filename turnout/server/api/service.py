"""What the routes share: who may come in, what a request costs, and the requests that are running."""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from turnout import __version__
from turnout.checkpoint.config import read_config
from turnout.checkpoint.locate import locate
from turnout.config import ServerConfig
from turnout.engine.sampling.detokenizer import TextStream
from turnout.engine.sampling_params import SamplingParams
from turnout.engine.tokenizer import Tokenizer
from turnout.server.api.answer_parsing import Parsing
from turnout.server.api.errors import ApiError, invalid, unavailable
from turnout.server.api.generation import Choice, Generation, for_choice
from turnout.server.api.intake import Intake
from turnout.server.api.parsing.registry import Parsers
from turnout.server.api.profiling import ProfileBody, merged
from turnout.server.api.protocol import ChatBody, CompletionBody, GenerationBody, check_ids
from turnout.server.api.scoring import LabelRequest, ScoreBody, scores
from turnout.server.api.sizes import Limits
from turnout.server.api.structured import compiled
from turnout.server.api.turns import Turn
from turnout.server.metrics import Metrics
from turnout.server.request_log import INCOMING, Incoming, Observer, RequestRecord, SequenceRecord
from turnout.server.supervise.engine import EngineSupervisor
from turnout.server.supervise.ledger import EngineFailed

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's


class Service:
    """The state of one server. Lives in the event loop's thread."""

    def __init__(self, config: ServerConfig, engine: EngineSupervisor):
        self.config = config
        self.engine = engine
        self.model_name = config.served_model_name or model_name(config.model)
        self.metrics = Metrics(engine, self.model_name)
        self.observers: list[Observer] = []  # of every request that has ended
        self.draining = False
        self._created = int(time.time())
        self.tokenizer: Tokenizer | None = None
        self.parsers = Parsers.chosen(config.tool_call_parser, config.reasoning_parser)  # checks the names
        self.limits = Limits(model=self.model_name, max_context=0, vocab_size=0)  # until the engine is ready
        self.intake = Intake(config.max_request_bytes)
        self._active: set[Generation] = set()
        self._room = 0  # for sequences that run and wait, once the engine is ready
        self._promised = 0  # sequences that were let in and are yet to be submitted
        self._idle = asyncio.Event()
        self._idle.set()

    def open(self, tokenizer: Tokenizer) -> None:
        """Let requests in, once the engine is ready. Raises UserError for parsers that do not go together."""
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
        self.intake.open(tokenizer, self.limits, self.config)
        self._room = ready.info["config"]["max_running_requests"] + self.config.max_queued_requests
        self.tokenizer = tokenizer

    @property
    def num_active(self) -> int:
        return len(self._active)

    def check_ready(self) -> Tokenizer:
        """Raises ApiError 503 unless a request could be served now."""
        tokenizer = self.check_open()
        if not self.engine.serving:
            raise self._restarting()
        return tokenizer

    def check_open(self) -> Tokenizer:
        """Raises ApiError 503 unless requests are taken, if only to wait for the ranks to restart."""
        if self.engine.failure:
            raise unavailable(f"the engine failed: {self.engine.failure}", "engine_failed")
        if self.draining:
            raise unavailable("the server is shutting down", "shutting_down")
        if self.tokenizer is None:
            raise unavailable("the model is loading", "loading")
        if not self.engine.accepting:
            raise self._restarting()
        return self.tokenizer

    def _restarting(self) -> ApiError:
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

    def reset_prefix_cache(self) -> None:
        """Compute all prompts again from now on. Raises ApiError 503 unless ready."""
        self.check_ready()
        self.engine.reset_prefix_cache()

    def load(self) -> dict[str, int]:
        """/load: vLLM's count of requests that are being served, and of their sequences where they are."""
        stats = self.engine.stats.values()
        return {
            "server_load": self.num_active,
            "running": sum(rank.num_running for rank in stats),
            "waiting": sum(rank.num_waiting for rank in stats),
        }

    def model_info(self) -> dict[str, Any]:
        """/model_info: SGLang's, by which routers tell what a worker serves."""
        ready = self.engine.ready
        shape = ready.info["description"]["shape"] if ready else {}
        return {
            "model_path": self.config.model,
            "tokenizer_path": self.config.model,
            "served_model_name": self.model_name,
            "is_generation": True,
            "architectures": [shape["architecture"]] if shape else [],
            "vocab_size": self.limits.vocab_size or None,
            "max_context_length": self.limits.max_context or None,
            "max_req_input_len": self.limits.max_context or None,
            "eos_token_ids": list(shape.get("eos_token_ids", ())),
            "weight_version": "default",
            "preferred_sampling_params": None,
        }

    def model_card(self) -> dict[str, Any]:
        """OpenAI's model object, with the context length as other engines add it."""
        return {
            "id": self.model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "turnout",
            "max_model_len": self.limits.max_context or None,
        }

    def describe(self) -> dict[str, Any]:
        """/server_info: how the server was configured, what the engine decided, and how each rank fares."""
        ready = self.engine.ready
        return {
            "version": __version__,
            "model": self.model_name,
            "pid": os.getpid(),
            "state": self.state,
            "requests": {"active": self.num_active, "sequences": self.engine.num_requests},
            "config": self.config.describe(),
            "plan": ready.info.get("plan") if ready else None,
            "engine": ready.info if ready else None,
            "restarts": self.engine.restarts,
            "last_failure": str(self.engine.last_failure) if self.engine.last_failure else None,
            "ranks": self.engine.describe_ranks(),
            "seconds_since_report": round(time.monotonic() - self.engine.heard, 3),
        }

    @property
    def state(self) -> str:
        if self.engine.failure:
            return "failed"
        if self.draining:
            return "draining"
        if self.tokenizer is None:
            return "loading"
        return "ready" if self.engine.serving else "restarting"

    def restart(self) -> None:
        """Restart the ranks without losing a request. Raises ApiError 403 and 503."""
        self.check_key_is_set("/restart")
        self.check_ready()
        self.engine.restart()

    def check_key_is_set(self, path: str) -> None:
        """Raises ApiError 403 for what only those may do who hold a key, if there is none."""
        if self.config.api_key is None:
            raise ApiError(403, f"POST {path} needs a server that was started with --api-key")

    def start_profile(self, body: ProfileBody) -> None:
        """Let all ranks record their next steps. Raises ApiError 409 and 503."""
        self.check_ready()
        if self.engine.profiling:
            raise ApiError(409, "a profile is being recorded: get it with POST /stop_profile first")
        self.engine.start_profile(body.command(time.time()))

    async def stop_profile(self) -> AsyncIterator[bytes]:
        """One Chrome trace of what all ranks recorded, in parts. Raises ApiError 409 and 503."""
        self.check_ready()
        if not self.engine.profiling:
            raise ApiError(409, "no profile is being recorded: begin with POST /start_profile")
        try:
            traces = await self.engine.stop_profile()
        except EngineFailed as failure:
            raise unavailable(f"the profile is lost: {failure}", "restarting") from None
        return merged(traces)

    def release(self, generation: Generation) -> None:
        """The request has been answered or its client has left; harmless when repeated."""
        generation.close()
        self._active.discard(generation)
        if not self._active:
            self._idle.set()

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
        promised = (body.n or 1) * len(prompts)
        self._admit(promised)
        self._promised += promised
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
        finally:
            self._promised -= promised
        self._active.add(generation)
        self._idle.clear()
        try:
            await self._submit(generation)
        except BaseException:
            self.release(generation)
            raise
        return generation

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
        turn, left = Turn(), len(generation.choices)
        self._promised += left
        try:
            for choice in generation.choices:
                generation.submit(choice)
                self._promised -= 1
                left -= 1
                if await turn.share():
                    self.check_open()
        finally:
            self._promised -= left

    def _admit(self, count: int) -> None:
        if count > self._room:
            raise invalid(
                f"n times the number of prompts is {count}, but at most {self._room} are served at once"
            )
        present = self.engine.num_requests + self._promised
        if present + count > self._room:
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
