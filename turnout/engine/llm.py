"""Offline generation: a model in this process, prompts in, completions out.

with LLM("demo") as llm:
    for completion in llm.generate(["2 + 2 =", "3 + 3 ="], SamplingParams(max_tokens=8)):
        print(completion.text)

Several models may be loaded at once. Calls of several threads for one model follow one another.

Under torchrun the model is spread over its processes, the ranks. Each makes the same calls with the same
prompts; each data-parallel group answers its share, and all ranks get all completions.
"""

from __future__ import annotations

import os
import sys
import threading
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, ClassVar, NoReturn

import msgspec

from turnout.config import Config, Launched, launched, load
from turnout.engine import grammar
from turnout.engine.builder import build_engine
from turnout.engine.core import EngineCore
from turnout.engine.engine_plan import resolve
from turnout.engine.messages import AddRequest, EngineStats, TokenLogprobs, encoder
from turnout.engine.progress_bars import counting_bar, loading_bar
from turnout.engine.ranks.rendezvous import check_launch, rendezvous
from turnout.engine.sampling.detokenizer import TextDelta, TextStream
from turnout.engine.sampling_params import SamplingParams
from turnout.engine.tokenizer import Tokenizer
from turnout.errors import UserError
from turnout.parallel.group_exchange import gather_values
from turnout.parallel.groups import Groups, disconnect

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]

FORKED = (
    "this process was forked from one that had made an LLM, and lacks the threads that compute; give "
    'each LLM a process of its own, by multiprocessing\'s method "spawn" or "forkserver"'
)


@dataclass(slots=True)
class Completion:
    """The answer to one prompt.

    finish_reason: "stop", "length", or "error" (the model produced no finite logits; `error` says so).
    stop_reason: the stop string or stop token id that ended it, if one did.
    logprobs: one entry per token if asked for; prompt_logprobs: one per prompt token, the first None.
    """

    prompt_token_ids: list[int]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    cached_tokens: int = 0
    error: str | None = None

    def _add(self, delta: TextDelta) -> None:
        self.text += delta.text
        self.token_ids += delta.token_ids
        if self.logprobs is not None:
            self.logprobs += delta.logprobs
        self.prompt_logprobs = self.prompt_logprobs or delta.prompt_logprobs
        self.cached_tokens = self.cached_tokens or delta.cached_tokens
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
            self.error = delta.error


class LLM:
    """A loaded model. Close it, or use it as a context manager, to free its memory early.

    Threads may share it. It stays in its process: a forked one lacks the threads that compute, and would wait
    for them forever.
    """

    tokenizer: Tokenizer
    _core: EngineCore | None
    _groups: Groups
    _process: ClassVar[int] = 0  # which made an LLM

    def __init__(self, model: str | os.PathLike[str] = "demo", **flags: Any):
        """`flags` are the fields of `turnout.config.Config`. Raises UserError."""
        if not isinstance(model, str | os.PathLike):
            raise UserError(f"model={model!r}: must be the path of a checkpoint folder, a hub id, or demo")
        self._start(load(Config, {"model": os.fspath(model), **flags}), launched())

    @classmethod
    def from_config(cls, config: Config, launched: Launched | None = None) -> LLM:
        """The model of a resolved configuration; no flag or environment variable is read.

        launched: which of several ranks this process is.
        """
        llm = cls.__new__(cls)
        llm._start(config, launched)
        return llm

    def __enter__(self) -> LLM:
        self._open()
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError("an LLM can neither be copied nor pickled; make one in each process")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free weights and KV cache, and leave the other ranks. A closed LLM answers no more.

        Waits for calls that are being answered in other threads. Does nothing in a forked process.
        """
        if os.getpid() != LLM._process:
            return
        with self._turn:
            if self._core is not None:
                self._core.close()
                if self._groups.world.size > 1:
                    disconnect()
            self._core = None

    @property
    def rank(self) -> int:
        """Of this process among those that share the model; one of them, 0, may print for all."""
        return self._groups.world.rank

    def from_first(self, value: Any) -> Any:
        """What rank 0 has as `value`, on every rank; all must call."""
        return gather_values(self._groups.world, value if self.rank == 0 else None)[0]

    def info(self) -> dict[str, Any]:
        """Resolved configuration, plan, memory and model shape."""
        return self._open().info()

    def stats(self) -> EngineStats:
        """Counters of this rank since it was made."""
        return self._open().stats()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[Completion]:
        """One completion per prompt, in order. A prompt is text or token ids; one alone is a list of one.

        `sampling`: for all prompts, or one each. `progress`: show a bar on standard error; None: if it
        is a terminal and there are several prompts. Raises UserError, before any work, for a prompt or
        parameters that cannot run.
        """
        listed = _as_list(prompts)
        ids = [self.tokenizer.encode(p) if isinstance(p, str) else list(p) for p in listed]
        return self._run(ids, _for_each(sampling, len(ids)), progress)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
        **template_options: Any,
    ) -> list[Completion]:
        """As `generate`, for one conversation or several, through the model's chat template."""
        conversations: Sequence[Any] = messages if _are_conversations(messages) else [messages]
        ids = [self.tokenizer.encode_chat(c, **template_options) for c in conversations]
        return self._run(ids, _for_each(sampling, len(ids)), progress)

    def _start(self, config: Config, launched: Launched | None) -> None:
        self._core = None
        self._issued = 0
        self._turn, self._answering = threading.RLock(), False
        if LLM._process not in (0, os.getpid()):
            raise UserError(FORKED)
        check_launch(config, launched)
        engine_plan = resolve(config, rank=launched.rank if launched else 0)
        self.tokenizer = Tokenizer.load(engine_plan.folder, trust_remote_code=config.trust_remote_code)
        self._groups, step_sync = rendezvous(
            engine_plan, init_method=launched.init_method if launched else ""
        )
        LLM._process = os.getpid()
        with loading_bar(shown=self.rank == 0 and config.load_progress) as progress:
            self._core = build_engine(
                engine_plan,
                groups=self._groups,
                step_sync=step_sync,
                progress=progress,
            )

    def _open(self) -> EngineCore:
        if os.getpid() != LLM._process:
            raise UserError(FORKED)
        if self._core is None:
            raise UserError("this LLM is closed; make a new one")
        return self._core

    def _run(
        self, prompts: list[list[int]], sampling: Sequence[SamplingParams], progress: bool | None
    ) -> list[Completion]:
        self._open()
        with self._turn:
            if self._answering:  # a signal's handler calls; waiting would be forever
                raise UserError("this LLM is in the middle of an answer, which this call has interrupted")
            self._answering = True
            try:
                return self._run_in_turn(prompts, sampling, progress)
            finally:
                self._answering = False

    def _run_in_turn(
        self, prompts: list[list[int]], sampling: Sequence[SamplingParams], progress: bool | None
    ) -> list[Completion]:
        core, topology = self._open(), self._groups.topology
        requests = [self._request(ids, params) for ids, params in zip(prompts, sampling, strict=True)]
        self._check_same(requests)
        for i, request in enumerate(requests):
            _check(core, request, i, len(requests))
        if progress is None:
            progress = len(requests) > 1 and sys.stderr is not None and sys.stderr.isatty()
        answers = self._answer(
            core, requests[topology.dp_rank :: topology.dp_size], progress and self.rank == 0
        )
        found: dict[str, Completion] = {}
        for share in gather_values(self._groups.world, answers):
            found |= share
        return [found[request.id] for request in requests]

    def _answer(self, core: EngineCore, requests: list[AddRequest], shown: bool) -> dict[str, Completion]:
        """Answers by request. All ranks take part, each with requests or without."""
        answers = {
            request.id: Completion(
                prompt_token_ids=request.prompt_ids,
                logprobs=None if request.sampling.logprobs is None else [],
            )
            for request in requests
        }
        try:
            self._drive(core, requests, answers, shown)
        except BaseException:
            if self._groups.world.size > 1:  # the others are elsewhere, and cannot be found again
                self._core = None
            else:  # an interrupt must leave no request behind
                core.abort(list(answers))
                core.step()
            raise
        return answers

    def _drive(
        self, core: EngineCore, requests: list[AddRequest], answers: dict[str, Completion], shown: bool
    ) -> None:
        """Step until no rank has work."""
        streams = {request.id: TextStream(self.tokenizer, request.sampling) for request in requests}
        for request in requests:
            core.add(request)
        with counting_bar("generating", len(requests), shown=shown) as answered:
            working = True
            while working:
                for output in core.step():
                    delta = streams[output.id].push(output)
                    answers[output.id]._add(delta)
                    if delta.stopped and output.finish_reason is None:
                        core.abort([output.id])
                    if delta.finish_reason is not None:
                        answered()
                working = core.synced is None or bool(core.synced.phase)

    def _check_same(self, requests: list[AddRequest]) -> None:
        """Raise UserError, on every rank, if they were not all given the same."""
        digests = gather_values(self._groups.world, zlib.crc32(encoder.encode(requests)))
        if len(set(digests)) > 1:
            other = next(i for i, digest in enumerate(digests) if digest != digests[0])
            raise UserError(
                f"ranks 0 and {other} were given different prompts or parameters: every rank must make the "
                "same calls"
            )

    def _request(self, ids: list[int], sampling: SamplingParams) -> AddRequest:
        if sampling.seed is None:  # one that does not depend on which rank answers
            seed = (self._open().engine_plan.config.random_seed + self._issued) % 2**63
            sampling = msgspec.structs.replace(sampling, seed=seed)
        self._issued += 1
        return AddRequest(id=str(self._issued), prompt_ids=ids, sampling=sampling)


def _check(core: EngineCore, request: AddRequest, index: int, count: int) -> None:
    try:
        core.check(request)
        if request.sampling.grammar:
            grammar.check(request.sampling.grammar)
    except UserError as error:
        raise UserError(f"prompt {index + 1} of {count}: {error}" if count > 1 else str(error)) from None


def _as_list(prompts: Any) -> list[Prompt]:
    """Raises UserError for what is no prompt."""
    one = isinstance(prompts, str) or (
        _is_sequence(prompts) and bool(prompts) and isinstance(prompts[0], int)
    )
    listed = [prompts] if one else list(prompts) if _is_sequence(prompts) else [prompts]
    for i, prompt in enumerate(listed):
        if not isinstance(prompt, str) and not (
            _is_sequence(prompt) and all(type(token) is int and abs(token) < 2**63 for token in prompt)
        ):
            raise UserError(
                f"prompt {i + 1} of {len(listed)} is {prompt!r}: must be a text or a list of token ids"
            )
    return listed


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _are_conversations(messages: Any) -> bool:
    """Several, rather than one; a text or a dictionary is neither, which the tokenizer says."""
    return isinstance(messages, list | tuple) and all(isinstance(m, list | tuple) for m in messages)


def _for_each(
    sampling: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> Sequence[SamplingParams]:
    if sampling is None or isinstance(sampling, SamplingParams):
        return [sampling or SamplingParams()] * count
    if not _is_sequence(sampling) or not all(isinstance(params, SamplingParams) for params in sampling):
        raise UserError(f"sampling={sampling!r}: must be SamplingParams, or a list of one for each prompt")
    if len(sampling) != count:
        raise UserError(f"{len(sampling)} sampling parameters for {count} prompts: give one, or one each")
    return sampling
