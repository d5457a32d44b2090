"""Lengths that no request may exceed, checked before anything looks at single elements.

Four megabytes of JSON hold two million elements. To validate each, or to list what is wrong with each, takes
seconds; to see that there are too many takes none.
"""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass
from typing import Any

from turnout.server.api.errors import ApiError, invalid

MAX_PROMPTS = 2048
MAX_STOP_STRINGS = 64
MAX_FIELDS = 256  # of one JSON object
MAX_TOOLS = 512
MAX_CALLS = 512  # of one message


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What requests are measured against.

    model:       the name that the server answers to
    max_context: tokens of prompt and output together
    vocab_size:  token ids lie in [0, vocab_size)
    """

    model: str
    max_context: int
    vocab_size: int


def check_sizes(data: dict[str, Any], limits: Limits) -> None:
    """Raise ApiError 400 if a list or an object in the body `data`, decoded JSON, is too long to be served.

    Takes time for the messages and prompts of a request that may fit, never for longer lists.
    """
    _check(data, MAX_FIELDS, "the body", "fields")
    _check(data.get("stop"), MAX_STOP_STRINGS, "stop", "strings", kinds=list)
    for name, what in (("stop_token_ids", "token ids"), ("logit_bias", "entries")):
        _check(data.get(name), limits.vocab_size, name, f"{what}, as many as the vocabulary has")
    if data.get("truncate_prompt_tokens") is None:
        _check_tokens(data.get("prompt"), limits.max_context, "prompt")
    _check_tokens(data.get("tokens"), limits.max_context, "tokens")
    _check(data.get("stop_sequences"), MAX_STOP_STRINGS, "stop_sequences", "strings", kinds=list)
    _check(data.get("tools"), MAX_TOOLS, "tools", "tools", kinds=list)
    _check_tokens(data.get("query"), limits.max_context, "query")
    _check_tokens(data.get("items"), limits.max_context, "items")
    _check(data.get("items"), MAX_PROMPTS, "items", "items", kinds=list)
    _check_prompts(data.get("prompt"))
    for name in ("messages", "input"):
        _check_messages(name, data.get(name), limits.max_context)


def too_long(param: str, message: str) -> ApiError:
    """The refusal of what exceeds the context."""
    return invalid(message, param, "context_length_exceeded")


def _check(value: Any, most: int, where: str, what: str, kinds: Any = (list, dict)) -> None:
    if isinstance(value, kinds) and len(value) > most:
        raise invalid(f"{where}: {len(value)} are too many; at most {most} {what}", where.split(".")[0])


def _check_tokens(value: Any, max_context: int, param: str) -> None:
    """Of a list of token ids, or of lists of them."""
    if not isinstance(value, list):
        return
    lists: list[Sized] = [v for v in value[:MAX_PROMPTS] if isinstance(v, list)]
    if type(value[0] if value else None) is int:
        lists = [value]
    longest = max(map(len, lists), default=0)
    if longest > max_context:
        raise too_long(
            param,
            f"{param}: the context holds {max_context} tokens, but the prompt has {longest}; shorten it",
        )


def _check_prompts(value: Any) -> None:
    if isinstance(value, list) and value and type(value[0]) is not int:
        _check(value, MAX_PROMPTS, "prompt", "prompts")


def _check_messages(name: str, messages: Any, max_context: int) -> None:
    if not isinstance(messages, list):
        return
    if len(messages) > max_context:
        raise too_long(
            name,
            f"{name}: {len(messages)} messages take at least as many tokens, but the context holds "
            f"{max_context}; send fewer",
        )
    for i, message in enumerate(messages):
        _check(message, MAX_FIELDS, f"{name}.{i}", "fields", kinds=dict)
        if not isinstance(message, dict):
            continue
        _check(message.get("tool_calls"), MAX_CALLS, f"{name}.{i}.tool_calls", "calls", kinds=list)
        content = message.get("content")
        _check(content, max_context, f"{name}.{i}.content", "parts, as many as the context has tokens")
