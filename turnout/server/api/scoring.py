"""/v1/score: how likely given tokens are as a model's next one, after each of several texts (SGLang's)."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from turnout.server.api.body import Body
from turnout.server.api.protocol import CompletionBody, RequestId, TokenId
from turnout.server.api.sizes import MAX_PROMPTS

if TYPE_CHECKING:  # the process of large bodies reads this file, and needs no engine and no metrics
    from turnout.server.api.generation import Choice, Delta

MAX_LABELS = 1024
_TEXT_OR_IDS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer", "minimum": 0}}]}
_ITEMS = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_PROMPTS},
        {"type": "array", "items": _TEXT_OR_IDS["anyOf"][1], "minItems": 1, "maxItems": MAX_PROMPTS},
    ]
}


def _text_or_ids(value: Any) -> str | list[int]:
    if isinstance(value, str) or (isinstance(value, list) and all(type(i) is int for i in value)):
        return value
    raise ValueError("must be a string or a list of token ids")


def _items(value: Any) -> list[str] | list[list[int]]:
    items = [value] if isinstance(value, str) else value
    if isinstance(items, list) and items and len({type(item) for item in items}) == 1:
        return [_text_or_ids(item) for item in items]  # type: ignore[return-value]
    raise ValueError("must be a string, a list of strings, or a list of lists of token ids")


class ScoreBody(Body):
    """Each item follows the query, or comes before it; both are texts, or both token ids."""

    model: str | None = None
    query: Annotated[str | list[int], BeforeValidator(_text_or_ids), WithJsonSchema(_TEXT_OR_IDS)]
    items: Annotated[
        list[str] | list[list[int]],
        BeforeValidator(_items),
        Field(max_length=MAX_PROMPTS),
        WithJsonSchema(_ITEMS),
    ]
    label_token_ids: Annotated[list[TokenId], Field(min_length=1, max_length=MAX_LABELS, fail_fast=True)]
    apply_softmax: bool | None = None
    item_first: bool | None = None
    rid: RequestId | None = None

    @model_validator(mode="after")
    def _one_kind(self) -> ScoreBody:
        if isinstance(self.query, str) != isinstance(self.items[0], str):
            raise ValueError("query and items must both be texts, or both token ids")
        return self

    def prompts(self) -> list[str | list[int]]:
        first = bool(self.item_first)
        return [item + self.query if first else self.query + item for item in self.items]  # type: ignore


class LabelRequest(CompletionBody):
    """What ScoreBody asks of the engine: one token of each prompt, and what the labels would have been."""

    label_token_ids: list[int]

    @classmethod
    def of(cls, body: ScoreBody, prompts: Sequence[list[int]]) -> LabelRequest:
        labels = body.label_token_ids
        return cls(prompt=list(prompts), max_tokens=1, temperature=0.0, label_token_ids=labels, rid=body.rid)

    def reported(self) -> dict[str, Any]:
        return {"logprobs": 0, "logprob_token_ids": tuple(self.label_token_ids)}


async def scores(
    deltas: AsyncIterator[list[tuple[Choice, Delta]]], count: int, *, among_labels: bool
) -> list[list[float]]:
    """By item and label, from what `count` choices gain: probabilities among all tokens, or the labels."""
    found: list[list[float]] = [[] for _ in range(count)]
    async for batch in deltas:
        for choice, delta in batch:
            for entry in delta.logprobs:
                found[choice.index] = [math.exp(logprob) for _, logprob in entry.top]
    if among_labels:
        found = [[p / total if (total := sum(row)) else 1 / len(row) for p in row] for row in found]
    return found
