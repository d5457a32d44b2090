"""What schemathesis is told besides the description: what costs time, and rules across fields."""

from __future__ import annotations

from typing import Any

import schemathesis
from schemathesis.generation import GenerationMode

from turnout.server.api.structured import StructuredFields

VOCABULARY = 384  # of the tiny model
# A description says what each field may be; these refusals are about several, the tokenizer, or the model.
ACROSS_FIELDS = (
    "must not be empty",  # a text that this tokenizer makes no tokens of
    f"does not lie in [0, {VOCABULARY})",
    "the context holds",
    "n times the number of prompts",
    "must lie in [0, max_tokens]",
    "must be at least 1 unless echo is true",
    "max_tokens: must be at least 1",
    "differ; give one",
    "exclude each other",
    "give either prompt or messages",
    "are for messages, not for a prompt",
    "stream_options is only allowed when stream is true",
    "top_logprobs is only allowed when logprobs is true",
    "0 leaves no prompt",
    "is no variable to choose",
    "is not a variable of chat templates",
    "is not the id of a call",
    "makes no embeddings",
    "must be less than max_tokens",
    'goes with type "tool"',
    "this model takes text only",
    "ids must differ",
    "names must differ",
    "is not the name of a tool",
    "there are no tools",
    "must be the text of a JSON object",
    "chat template",  # which may refuse whatever is in chat_template_kwargs
    "both say what the answer must be",
    "goes with type",
    "an output that follows a grammar",
    "this server takes requests in order of arrival",
    "query and items must both be",
    *(f"{name}: " for name in StructuredFields.model_fields),  # a schema or pattern that cannot be compiled
    "structured_outputs.",
    "output_config.format: ",
    "text.format: ",
)


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """Ask for few tokens, of the model that is served and from its vocabulary."""
    if not isinstance(case.body, dict):
        return
    body = case.body = as_integers(case.body)
    if case.path in ("/v1/messages", "/v1/responses"):
        limit = "max_tokens" if case.path == "/v1/messages" else "max_output_tokens"
        given = body.get(limit)
        if given is None or (type(given) is int and given > 0):
            body[limit] = 2
    elif "prompt" in body or "messages" in body:
        if body.get("max_tokens") is None and body.get("max_completion_tokens") is None:
            body["max_tokens"] = 2
        for name, most in (("max_tokens", 3), ("max_completion_tokens", 3), ("n", 2)):
            if type(body.get(name)) is int and most < body[name] <= 512:
                body[name] = most
    if isinstance(body.get("model"), str):
        body["model"] = "tiny"
    if is_positive(case):
        for name in body.keys() & {"prompt", "tokens", "stop_token_ids", "query", "items", "label_token_ids"}:
            body[name] = within_vocabulary(body[name])


def is_positive(case: Any) -> bool:
    """Whether the case is meant to be allowed by the description."""
    generation = case.meta.generation if case.meta else None
    return generation is not None and generation.mode is GenerationMode.POSITIVE


def within_vocabulary(value: Any) -> Any:
    if isinstance(value, list):
        return [within_vocabulary(item) for item in value]
    return value % VOCABULARY if isinstance(value, int) else value


def as_integers(value: Any) -> Any:
    """2.0 as 2: JSON has one kind of number, the server wants integers written as such."""
    if isinstance(value, dict):
        return {name: as_integers(item) for name, item in value.items()}
    if isinstance(value, list):
        return [as_integers(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


@schemathesis.check
def what_the_description_allows_is_served(context: Any, response: Any, case: Any) -> None:
    if not is_positive(case) or response.status_code != 400:
        return
    message = response.json()["error"]["message"]
    assert any(rule in message for rule in ACROSS_FIELDS), f"refused, though described as allowed: {message}"
