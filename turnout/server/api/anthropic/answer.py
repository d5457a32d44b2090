"""Anthropic's message objects and streamed events."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any, Literal

from typing_extensions import TypedDict

from turnout.server.api.anthropic.body import MessagesBody
from turnout.server.api.blocks import Blocks, Step
from turnout.server.api.connection import encode_event
from turnout.server.api.errors import ApiError
from turnout.server.api.generation import Delta, Generation
from turnout.server.api.parsing.parts import Arguments, Call, Part, Reasoning, Text, merged

PING = encode_event({"type": "ping"}, "ping")  # while there is nothing to say


class MessageUsage(TypedDict):
    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int


class Message(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: (
        Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"] | None
    )
    stop_sequence: str | None
    usage: MessageUsage


class MessageEvent(TypedDict):
    """message_start, content_block_start, content_block_delta, content_block_stop, message_delta,
    message_stop, ping or error; each also names itself in the field `event` of the stream."""

    type: str


class TokenCount(TypedDict):
    input_tokens: int


async def collect_message(generation: Generation, body: MessagesBody, model: str) -> dict[str, Any]:
    """The whole answer. Raises ApiError."""
    (total,) = await generation.totals()
    content = [_block(part) for part in merged(total.parts)]
    ending = _ending(total, generation, body)
    return _message(generation, model, content) | ending | {"usage": _usage(generation)}


async def stream_message(generation: Generation, body: MessagesBody, model: str) -> AsyncIterator[bytes]:
    """Server-sent events. An error after the start is the last of them."""
    blocks, total = Blocks(), Delta()
    start = _message(generation, model, []) | {"usage": _usage(generation)}
    yield _event("message_start", message=start)
    try:
        async for batch in generation.deltas():
            for _, delta in batch:
                total.finish_reason, total.stop_reason = delta.finish_reason, delta.stop_reason
                if steps := blocks.push(delta.parts):
                    yield b"".join(map(_told, steps))
    except ApiError as error:
        yield encode_event(error.anthropic_body(), "error")
        return
    ends = b"".join(map(_told, blocks.end()))
    ending = _ending(total, generation, body)
    yield ends + _event("message_delta", delta=ending, usage=_usage(generation)) + _event("message_stop")


def _event(kind: str, **fields: Any) -> bytes:
    return encode_event({"type": kind, **fields}, kind)


def _told(step: Step) -> bytes:
    if step.what == "close":
        return _event("content_block_stop", index=step.index)
    if step.what == "open":
        return _event("content_block_start", index=step.index, content_block=_block(step.part, empty=True))
    if isinstance(step.part, Text):
        delta = {"type": "text_delta", "text": step.part.text}
    elif isinstance(step.part, Reasoning):
        delta = {"type": "thinking_delta", "thinking": step.part.text}
    else:
        more = step.part.text if isinstance(step.part, Arguments) else step.part.arguments
        delta = {"type": "input_json_delta", "partial_json": more}
    return _event("content_block_delta", index=step.index, delta=delta)


def _block(part: Part, *, empty: bool = False) -> dict[str, Any]:
    """empty: as it begins. Thoughts carry no signature: this server accepts any."""
    if isinstance(part, Text):
        return {"type": "text", "text": "" if empty else part.text}
    if isinstance(part, Reasoning):
        return {"type": "thinking", "thinking": "" if empty else part.text, "signature": ""}
    assert isinstance(part, Call)
    return {
        "type": "tool_use",
        "id": part.id,
        "name": part.name,
        "input": {} if empty else json.loads(part.arguments),
    }


def _message(generation: Generation, model: str, content: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": generation.id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": None,
        "stop_sequence": None,
    }


def _ending(total: Delta, generation: Generation, body: MessagesBody) -> dict[str, Any]:
    (choice,) = generation.choices
    is_cut_by_context = choice.sampling.max_tokens < body.max_tokens
    length = "model_context_window_exceeded" if is_cut_by_context else "max_tokens"
    reasons = {"tool_calls": "tool_use", "length": length}
    if isinstance(total.stop_reason, str) and total.finish_reason == "stop":
        return {"stop_reason": "stop_sequence", "stop_sequence": total.stop_reason}
    return {"stop_reason": reasons.get(total.finish_reason or "", "end_turn"), "stop_sequence": None}


def _usage(generation: Generation) -> dict[str, int]:
    (choice,) = generation.choices
    return {
        "input_tokens": len(choice.prompt_ids) - choice.cached_tokens,
        "output_tokens": choice.num_tokens,
        "cache_read_input_tokens": choice.cached_tokens,
        "cache_creation_input_tokens": 0,
    }
