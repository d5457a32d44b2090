"""OpenAI's response objects and their streamed events."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from typing import Any, Literal

from typing_extensions import TypedDict

from turnout.server.api.blocks import Blocks, Step
from turnout.server.api.connection import encode_event
from turnout.server.api.errors import ApiError
from turnout.server.api.generation import Delta, Generation
from turnout.server.api.openai_responses.body import ResponsesBody
from turnout.server.api.parsing.parts import Arguments, Call, Part, Reasoning, Text, ends_call, merged


class Response(TypedDict):
    """More fields repeat what was asked for."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete", "in_progress", "failed"]
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None


class ResponseEvent(TypedDict):
    """`response.created`, `.in_progress`; `.added`, `.done` of `output_item` and `content_part`; `.delta`,
    `.done` of `output_text`, `reasoning_text` and `function_call_arguments`; last `response.completed`,
    `.incomplete` or `.failed`."""

    type: str
    sequence_number: int


class ResponseAnswer:
    """The answer to one request."""

    def __init__(self, generation: Generation, body: ResponsesBody, model: str):
        self._generation, self._body, self._model = generation, body, model
        self._id = generation.id.replace("chatcmpl-", "resp_", 1)
        self._numbers = itertools.count()

    async def collect(self) -> dict[str, Any]:
        """The whole answer. Raises ApiError."""
        (total,) = await self._generation.totals()
        output = [self._item(i, part, "completed") for i, part in enumerate(merged(total.parts))]
        if total.parts:
            output[-1]["status"] = _last_status(total, total.parts[-1])
        return self._response(_status(total), output)

    async def stream(self) -> AsyncIterator[bytes]:
        """Server-sent events."""
        blocks, output, finish = Blocks(), list[dict[str, Any]](), Delta()
        begun = self._response("in_progress", [])
        yield self._event("created", response=begun) + self._event("in_progress", response=begun)
        try:
            async for batch in self._generation.deltas():
                for _, delta in batch:
                    finish.finish_reason = delta.finish_reason
                    steps = [(step, "completed") for step in blocks.push(delta.parts)]
                    if delta.finish_reason is not None:
                        steps += [(step, _last_status(delta, step.part)) for step in blocks.end()]
                    if steps:
                        yield b"".join(self._told(*step) for step in steps)
                    output += [
                        self._item(s.index, s.part, status) for s, status in steps if s.what == "close"
                    ]
        except ApiError as error:
            failed = self._response("failed", output)
            failed["error"] = {"code": error.code or "server_error", "message": error.message}
            yield self._event("failed", response=failed)
            return
        status = _status(finish)
        yield self._event(status, response=self._response(status, output))

    def _event(self, kind: str, **fields: Any) -> bytes:
        name = f"response.{kind}"
        return encode_event({"type": name, "sequence_number": next(self._numbers), **fields}, name)

    def _told(self, step: Step, status: str) -> bytes:
        """The events of one step. status: of the item, if it closes."""
        item_id = self._item_id(step.index)
        where: dict[str, Any] = {"item_id": item_id, "output_index": step.index}
        part, in_part = step.part, where | {"content_index": 0}
        if step.what == "open":
            item = self._item(step.index, part, "in_progress")
            added = self._event("output_item.added", output_index=step.index, item=item)
            if not isinstance(part, Text):
                return added
            return added + self._event("content_part.added", **in_part, part=_text_part(""))
        if step.what == "more":
            if isinstance(part, Text):
                return self._event("output_text.delta", **in_part, delta=part.text, logprobs=[])
            if isinstance(part, Reasoning):
                return self._event("reasoning_text.delta", **in_part, delta=part.text)
            arguments = part.text if isinstance(part, Arguments) else part.arguments
            return (
                self._event("function_call_arguments.delta", **where, delta=arguments) if arguments else b""
            )
        if isinstance(part, Text):
            done = self._event("output_text.done", **in_part, text=part.text, logprobs=[])
            done += self._event("content_part.done", **in_part, part=_text_part(part.text))
        elif isinstance(part, Reasoning):
            done = self._event("reasoning_text.done", **in_part, text=part.text)
        else:
            assert isinstance(part, Call)
            done = (
                b""
                if part.open
                else self._event(
                    "function_call_arguments.done", **where, name=part.name, arguments=part.arguments
                )
            )
        item = self._item(step.index, part, status)
        return done + self._event("output_item.done", output_index=step.index, item=item)

    def _item_id(self, index: int) -> str:
        return f"item_{self._id.removeprefix('resp_')}_{index}"

    def _item(self, index: int, part: Part, status: str) -> dict[str, Any]:
        """One item of the output; one that is in progress has no content yet."""
        item: dict[str, Any] = {"id": self._item_id(index), "status": status}
        done = status != "in_progress"
        if isinstance(part, Text):
            content = [_text_part(part.text)] if done else []
            return item | {"type": "message", "role": "assistant", "content": content}
        if isinstance(part, Reasoning):
            thought = [{"type": "reasoning_text", "text": part.text}] if done else []
            return item | {"type": "reasoning", "summary": [], "content": thought}
        assert isinstance(part, Call)
        arguments = part.arguments if done else ""
        return item | {
            "type": "function_call",
            "call_id": part.id,
            "name": part.name,
            "arguments": arguments,
        }

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        body = self._body
        asked = body.model_dump(mode="json", by_alias=True, include={"tool_choice", "reasoning", "text"})
        ended = status not in ("in_progress", "failed")
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._generation.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self._model,
            "output": output,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": asked["reasoning"] or {"effort": None, "summary": None},
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": asked["text"] or {"format": {"type": "text"}},
            "tool_choice": asked["tool_choice"] or "auto",
            "tools": [tool.model_dump(mode="json") for tool in body.offered],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": self._usage() if ended else None,
            "metadata": {},
        }

    def _usage(self) -> dict[str, Any]:
        (choice,) = self._generation.choices
        prompt, output = len(choice.prompt_ids), choice.num_tokens
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": choice.cached_tokens},
            "output_tokens": output,
            "output_tokens_details": {"reasoning_tokens": choice.reasoning_tokens},
            "total_tokens": prompt + output,
        }


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _status(total: Delta) -> str:
    return "incomplete" if total.finish_reason == "length" else "completed"


def _last_status(total: Delta, part: Part) -> str:
    """Of the last item, `part`, of an answer."""
    return "completed" if ends_call(part) else _status(total)
