"""Conversations of the official clients with the demo model, whose calls of a tool are run, as a document.

    python -m tools.transcript          write docs/agents.md

A server of the demo model answers `openai` (chat and Responses) and `anthropic` (Messages) in the loop that
coding agents run: ask, run what the model calls, send the result back, until it says something.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import openai

from turnout.config import ServerConfig
from turnout.errors import UserError
from turnout.evals.demo import CALCULATOR, calculate
from turnout.server.launch import launch

FILE = Path(__file__).parents[1] / "docs" / "agents.md"
QUESTION = "Use the calculator for 4817 * 263."
MOST_TURNS = 4
HEAD = f"""\
# What coding agents see

<!-- Written by tools/transcript.py from a server's answers. -->

The loop that coding agents run, by the official Python clients against `turnout serve demo`: the model is
told of a calculator, its calls are run, and what they gave goes back until it answers. Streams are shown as
the pieces that arrived, `|` between them; arguments of calls arrive while the model writes them.

The question each time: *{QUESTION}*
"""
FUNCTION: dict[str, Any] = CALCULATOR["function"]


def run(name: str, arguments: str) -> str:
    """What the tool gives, whatever the model wrote."""
    try:
        given = json.loads(arguments)
    except ValueError as error:
        return f"error: the arguments are not JSON: {error}"
    if name != FUNCTION["name"] or not isinstance(given, dict):
        return f"error: there is no tool {name}"
    return calculate(str(given.get("expression", "")))


def chat(base_url: str) -> Iterator[str]:
    client = openai.OpenAI(base_url=base_url, api_key="unused")
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    for _ in range(MOST_TURNS):
        calls: dict[int, dict[str, Any]] = {}
        texts: list[str] = []
        pieces: dict[int, list[str]] = {}
        fields: dict[str, Any] = {"model": "demo", "tools": [CALCULATOR], "temperature": 0}
        for part in client.chat.completions.create(**fields, messages=messages, stream=True):
            delta = part.choices[0].delta
            texts += [delta.content] if delta.content else []
            for call in delta.tool_calls or ():
                if call.id:
                    calls[call.index] = {"id": call.id, "name": call.function.name}
                pieces.setdefault(call.index, []).append(call.function.arguments)
        yield from _said(texts)
        made = [
            {
                "id": call["id"],
                "type": "function",
                "function": {"name": call["name"], "arguments": "".join(pieces[index])},
            }
            for index, call in calls.items()
        ]
        messages.append({"role": "assistant", "content": "".join(texts), "tool_calls": made or None})
        for index, call in calls.items():
            result = run(call["name"], "".join(pieces[index]))
            yield from _called(call["name"], pieces[index], result)
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        if not calls:
            return


def responses(base_url: str) -> Iterator[str]:
    client = openai.OpenAI(base_url=base_url, api_key="unused")
    conversation: list[Any] = [{"role": "user", "content": QUESTION}]
    for _ in range(MOST_TURNS):
        pieces: dict[str, list[str]] = {}
        fields: dict[str, Any] = {"model": "demo", "tools": [{"type": "function", **FUNCTION}]}
        for event in client.responses.create(**fields, input=conversation, temperature=0, stream=True):
            if event.type in ("response.output_text.delta", "response.function_call_arguments.delta"):
                pieces.setdefault(event.item_id, []).append(event.delta)
            last = event
        output = last.response.output  # type: ignore[union-attr]
        conversation += [item.model_dump(exclude_none=True) for item in output]
        calls = [item for item in output if item.type == "function_call"]
        yield from _said(
            itertools.chain.from_iterable(
                pieces.get(item.id, []) for item in output if item.type == "message"
            )
        )
        for call in calls:
            result = run(call.name, call.arguments)
            yield from _called(call.name, pieces[call.id], result)
            conversation.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
        if not calls:
            return


def messages(base_url: str) -> Iterator[str]:
    import anthropic  # which takes a second: not for every worker that collects tests of this file

    client = anthropic.Anthropic(base_url=base_url.removesuffix("/v1"), api_key="unused")
    tool = {
        "name": FUNCTION["name"],
        "description": FUNCTION["description"],
        "input_schema": FUNCTION["parameters"],
    }
    conversation: list[Any] = [{"role": "user", "content": QUESTION}]
    for _ in range(MOST_TURNS):
        fields: dict[str, Any] = {"model": "demo", "max_tokens": 256, "tools": [tool]}
        pieces: dict[int, list[str]] = {}
        with client.messages.stream(**fields, messages=conversation, extra_body={"temperature": 0}) as stream:
            for event in stream:
                if event.type == "content_block_delta":
                    more = (
                        event.delta.partial_json
                        if event.delta.type == "input_json_delta"
                        else event.delta.text
                    )
                    pieces.setdefault(event.index, []).append(more)
            content = stream.get_final_message().content
        conversation.append({"role": "assistant", "content": content})
        results: list[Any] = []
        for index, block in enumerate(content):
            if block.type == "text":
                yield from _said(pieces[index])
            elif block.type == "tool_use":
                result = run(block.name, json.dumps(block.input))
                yield from _called(block.name, pieces[index], result)
                results.append({"type": "tool_result", "tool_use_id": block.id, "content": result})
        if not results:
            return
        conversation.append({"role": "user", "content": results})


def _said(pieces: Iterable[str]) -> Iterator[str]:
    if text := "|".join(pieces):
        yield f"model   {text}"


def _called(name: str, pieces: Iterable[str], result: str) -> Iterator[str]:
    yield f"model   calls {name}: {'|'.join(piece for piece in pieces if piece)}"
    yield f"tool    {result}"


LOOPS = {
    "Chat completions, by `openai`": chat,
    "Responses, by `openai`": responses,
    "Messages, by `anthropic`": messages,
}


def document(base_url: str) -> str:
    parts = [HEAD]
    for title, loop in LOOPS.items():
        parts.append(f"## {title}\n\n```\n" + "\n".join(loop(base_url)) + "\n```\n")
    return "\n".join(parts)


def main() -> None:
    with launch(ServerConfig(model="demo", port=0), show=False) as base_url:
        FILE.write_text(document(base_url))
    print(f"{FILE.name}: written")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        raise SystemExit(str(error)) from None
