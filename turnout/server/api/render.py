"""What the choices gained -> OpenAI's response objects, whole or as a stream of server-sent events."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from typing import Any, Protocol

import msgspec

from turnout.engine.messages import TokenLogprobs
from turnout.engine.tokenizer import Tokenizer
from turnout.server.api.connection import encode_event
from turnout.server.api.errors import ApiError
from turnout.server.api.generation import Choice, Delta, Generation
from turnout.server.api.parsing.parts import Arguments, Call, Part, Reasoning, Text, merged
from turnout.server.api.protocol import ChatBody, CompletionBody

encode = msgspec.json.Encoder().encode
LOWEST_LOGPROB = -9999.0  # OpenAI's stand-in for minus infinity, which JSON cannot hold


class Renderer(Protocol):
    """One style of response. `whole` and `part` are the values of its `object` field."""

    whole: str
    part: str

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        """The first streamed part of a choice, before any token."""
        ...

    def chunks(self, choice: Choice, delta: Delta) -> list[dict[str, Any]]:
        """Streamed parts of `choice`; none where nothing can be said yet."""
        ...

    def answer(self, choice: Choice, total: Delta) -> dict[str, Any]:
        """A whole choice."""
        ...


async def collect(generation: Generation, renderer: Renderer, model: str) -> dict[str, Any]:
    """The response object once all choices have finished. Raises ApiError."""
    totals = await generation.totals()
    answers = [renderer.answer(c, totals[c.index]) for c in generation.choices]
    return _envelope(generation, renderer.whole, model, answers) | {"usage": generation.usage()}


async def stream(
    generation: Generation, renderer: Renderer, model: str, *, usage: bool
) -> AsyncIterator[bytes]:
    """Server-sent events. An error after the start is an event of its own, and no [DONE] follows.

    Events that are ready together go out in one write.
    """
    absent = {"usage": None} if usage else {}
    whole = encode_event(_envelope(generation, renderer.part, model, []) | absent)
    head, _, tail = whole.rpartition(b"[]")  # all of an event but its choices; after them stands no list

    def event(choices: list[dict[str, Any]]) -> bytes:
        return b"%b%b%b" % (head, encode(choices), tail)

    openings = [opening for c in generation.choices if (opening := renderer.opening(c)) is not None]
    if openings:
        yield b"".join(event([opening]) for opening in openings)
    parts: list[bytes] = []
    try:
        async for batch in generation.deltas():
            parts += [event([chunk]) for c, delta in batch for chunk in renderer.chunks(c, delta)]
            if parts and not generation.finished:
                yield b"".join(parts)
                parts = []
    except ApiError as error:
        yield encode_event(error.body())
        return
    if usage:
        own = _envelope(generation, renderer.part, model, [])
        parts.append(encode_event(own | {"usage": generation.usage()}))
    yield b"".join([*parts, b"data: [DONE]\n\n"])


def _says_something(delta: Delta) -> bool:
    return bool(delta.parts or delta.logprobs or delta.prompt_logprobs or delta.finish_reason or delta.first)


def _envelope(generation: Generation, kind: str, model: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": generation.id,
        "object": kind,
        "created": generation.created,
        "model": model,
        "choices": choices,
    }


class ChatRenderer:
    """A generation as `/v1/chat/completions` answers it: whole, or as chunks of a stream."""

    whole = "chat.completion"
    part = "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer, body: ChatBody):
        self._tokenizer = tokenizer
        self._body = body
        self._wants_logprobs = bool(body.logprobs)
        self._num_calls: dict[int, int] = {}  # streamed so far, by choice
        self._waiting: dict[int, list[Part]] = {}  # reasoning that is not sent yet, by choice

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        return self._choice(choice, "delta", {"role": "assistant", "content": ""}, None, None)

    def chunks(self, choice: Choice, delta: Delta) -> list[dict[str, Any]]:
        """One for each kind of text; of each call one with its name, then those with its arguments."""
        if not _says_something(delta):
            return []
        contents = [
            content for part in self._shown(choice, delta) for content in self._contents(choice, part)
        ]
        contents = contents or [{}]
        last = len(contents) - 1
        return [
            self._choice(
                choice,
                "delta",
                content,
                self._logprobs(delta) if i == 0 else None,
                delta.finish_reason if i == last else None,
            )
            for i, content in enumerate(contents)
        ]

    def _shown(self, choice: Choice, delta: Delta) -> list[Part]:
        """The parts that are sent now: reasoning perhaps never, or only when it is complete."""
        if self._body.include_reasoning is False:
            return [part for part in delta.parts if not isinstance(part, Reasoning)]
        if self._body.stream_reasoning is not False:
            return delta.parts
        waiting = self._waiting.setdefault(choice.index, [])
        waiting += delta.parts
        if not (delta.finish_reason or any(not isinstance(part, Reasoning) for part in waiting)):
            return []
        shown = merged(waiting)
        waiting.clear()
        return shown

    def _contents(self, choice: Choice, part: Part) -> list[dict[str, Any]]:
        if isinstance(part, Text):
            return [{"content": part.text}]
        if isinstance(part, Reasoning):
            return [{"reasoning_content": part.text, "reasoning": part.text}]
        if isinstance(part, Arguments):
            index = self._num_calls[choice.index] - 1
            return [{"tool_calls": [{"index": index, "function": {"arguments": part.text}}]}]
        index = self._num_calls.get(choice.index, 0)
        self._num_calls[choice.index] = index + 1
        name = {"name": part.name, "arguments": ""}
        begun = {"tool_calls": [{"index": index, "id": part.id, "type": "function", "function": name}]}
        return [begun] if part.open else [begun, *self._contents(choice, Arguments(part.arguments))]

    def answer(self, choice: Choice, total: Delta) -> dict[str, Any]:
        reasoning = "".join(part.text for part in total.parts if isinstance(part, Reasoning))
        calls = [
            {"id": part.id, "type": "function", "function": {"name": part.name, "arguments": part.arguments}}
            for part in total.parts
            if isinstance(part, Call)
        ]
        content = total.text or (None if calls else "")
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if reasoning and self._body.include_reasoning is not False:
            message |= {"reasoning_content": reasoning, "reasoning": reasoning}
        if calls:
            message["tool_calls"] = calls
        return self._choice(choice, "message", message, self._logprobs(total), total.finish_reason)

    def _choice(
        self, choice: Choice, key: str, content: dict[str, Any], logprobs: Any, finish: str | None
    ) -> dict[str, Any]:
        return {"index": choice.index, key: content, "logprobs": logprobs, "finish_reason": finish}

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        if not self._wants_logprobs:
            return None
        return {"content": [self._token(entry) for entry in delta.logprobs], "refusal": None}

    def _token(self, entry: TokenLogprobs) -> dict[str, Any]:
        top = [self._scored(token, logprob) for token, logprob in entry.top]
        return self._scored(entry.token_id, entry.logprob) | {"top_logprobs": top}

    def _scored(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self._tokenizer.token_bytes(token_id)
        return {
            "token": raw.decode(errors="replace"),
            "logprob": _finite(logprob),
            "bytes": list(raw),
        }


class CompletionRenderer:
    """A generation as `/v1/completions` answers it: whole, or as chunks of a stream."""

    whole = "text_completion"
    part = "text_completion"

    def __init__(self, tokenizer: Tokenizer, body: CompletionBody):
        self._tokenizer = tokenizer
        self._body = body
        self._offsets: dict[int, int] = {}  # of each choice's next token, in characters

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        return None

    def chunks(self, choice: Choice, delta: Delta) -> list[dict[str, Any]]:
        return [self.answer(choice, delta)] if _says_something(delta) else []

    def answer(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        echo = bool(self._body.echo) and delta.first
        text = self._prompt_text(choice) + delta.text if echo else delta.text
        return {
            "index": choice.index,
            "text": text,
            "logprobs": None if self._body.logprobs is None else self._logprobs(choice, delta, echo),
            "finish_reason": delta.finish_reason,
        }

    def _prompt_text(self, choice: Choice) -> str:
        """The prompt as it was sent, if as a whole text; else what its tokens stand for."""
        prompt = self._body.prompt[choice.index // (self._body.n or 1)]
        if isinstance(prompt, str) and self._body.truncate_prompt_tokens is None:
            return prompt
        skip = choice.sampling.skip_special_tokens
        return self._tokenizer.decode(choice.prompt_ids, skip_special_tokens=skip)

    def _logprobs(self, choice: Choice, delta: Delta, echo: bool) -> dict[str, list[Any]]:
        """Four parallel lists. The first token of a prompt has no log-probability: null."""
        entries: list[TokenLogprobs | None] = list(delta.logprobs)
        if echo:
            entries = list(delta.prompt_logprobs or []) + entries
        ids = [entry.token_id if entry else choice.prompt_ids[0] for entry in entries]
        offset = self._offsets.get(choice.index, 0)
        offsets = []
        for token_id in ids:
            offsets.append(offset)
            offset += _characters_begun(self._tokenizer.token_bytes(token_id))
        self._offsets[choice.index] = offset
        return {
            "tokens": [self._name(token_id) for token_id in ids],
            "token_logprobs": [entry and _finite(entry.logprob) for entry in entries],
            "top_logprobs": [entry and self._top(entry) for entry in entries],
            "text_offset": offsets,
        }

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """By name, best first, and the token itself if it is not among the best."""
        names: dict[str, float] = {}
        for token_id, logprob in [*entry.top, (entry.token_id, entry.logprob)]:
            names.setdefault(self._name(token_id), _finite(logprob))
        return names

    def _name(self, token_id: int) -> str:
        """The token's text; like OpenAI `bytes:\\xe2\\x80` for a part of a character; else its number.

        Names key a dictionary, so that tokens without text, of which a padded vocabulary has many, need one.
        """
        raw = self._tokenizer.token_bytes(token_id)
        if not raw:
            return f"token_id:{token_id}"
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _characters_begun(raw: bytes) -> int:
    """How many characters start in `raw`, so that a character split over tokens counts once."""
    return sum(byte & 0xC0 != 0x80 for byte in raw)


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LOWEST_LOGPROB
