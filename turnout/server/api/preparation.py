"""From the bytes of a request's body to what the engine takes: parsed, checked, tokenised.

Pure functions, for the server's event loop and for the process of large bodies (`large_bodies`) alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from turnout.engine.tokenizer import Tokenizer
from turnout.errors import UserError
from turnout.server.api.anthropic.body import CountBody, MessagesBody
from turnout.server.api.body import Body
from turnout.server.api.chat import Message, TemplateFields, system_first
from turnout.server.api.errors import ApiError, invalid
from turnout.server.api.openai_responses.body import ResponsesBody
from turnout.server.api.protocol import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    check_ids,
    parse,
    validated,
)
from turnout.server.api.scoring import ScoreBody
from turnout.server.api.sizes import Limits, too_long
from turnout.server.api.tools import Tool

B = TypeVar("B", bound=Body)


def prepare(cls: type[B], raw: bytes | bytearray, tokenizer: Tokenizer, limits: Limits) -> tuple[B, Any]:
    """The body as a `cls`, and what it asks about: token ids of each prompt; for DetokenizeBody a text;
    for other protocols the chat that they ask for, and its token ids.

    Raises ApiError 400 for what is wrong or cannot fit the context, 404 for another model.
    """
    body = parse(cls, raw, limits)
    return body, translate(body, tokenizer, limits)


def translate(body: Body, tokenizer: Tokenizer, limits: Limits) -> Any:
    """The second half of `prepare`."""
    check_model(body.model, limits)  # type: ignore[attr-defined]
    return _TRANSLATORS[type(body)](body, tokenizer, limits)


def check_model(name: str | None, limits: Limits) -> None:
    """Raises ApiError 404 if a request names another model."""
    if name not in (None, limits.model):
        raise ApiError(
            404,
            f"model {name!r} does not exist; this server serves {limits.model!r}",
            param="model",
            code="model_not_found",
        )


def _completion(body: CompletionBody, tokenizer: Tokenizer, limits: Limits) -> list[list[int]]:
    special, cut = body.add_special_tokens is not False, body.truncate_prompt_tokens is not None
    return [_prompt(prompt, tokenizer, limits, special=special, cut=cut) for prompt in body.prompt]


def _chat(body: ChatBody, tokenizer: Tokenizer, limits: Limits) -> list[list[int]]:
    cut = body.truncate_prompt_tokens is not None
    return [_conversation(body.messages, body, body.offered, tokenizer, limits, cut=cut)]


def _as_chat(
    body: CountBody | ResponsesBody, tokenizer: Tokenizer, limits: Limits
) -> tuple[ChatBody, list[list[int]]]:
    """The chat that a request of another protocol asks for, and its prompt."""
    chat = validated(ChatBody, body.for_chat())
    prompts = _chat(chat, tokenizer, limits)
    room = limits.max_context - len(prompts[0])
    if isinstance(body, MessagesBody) and room > 0:  # agents ask for more than small contexts hold
        chat.max_tokens = min(body.max_tokens, room)
    return chat, prompts


def _tokenize(body: TokenizeBody, tokenizer: Tokenizer, limits: Limits) -> list[list[int]]:
    if body.messages is not None:
        return [_conversation(body.messages, body, body.offered, tokenizer, limits)]
    special = body.add_special_tokens is not False
    return [_prompt(body.prompt or "", tokenizer, limits, special=special)]


def _score(body: ScoreBody, tokenizer: Tokenizer, limits: Limits) -> list[list[int]]:
    return [_prompt(prompt, tokenizer, limits, special=True) for prompt in body.prompts()]


def _detokenize(body: DetokenizeBody, tokenizer: Tokenizer, limits: Limits) -> str:
    check_ids(body.tokens, limits.vocab_size, "tokens")
    return tokenizer.decode(body.tokens, skip_special_tokens=body.skip_special_tokens is not False)


_TRANSLATORS: dict[type[Body], Callable[[Any, Tokenizer, Limits], Any]] = {
    CompletionBody: _completion,
    ChatBody: _chat,
    ScoreBody: _score,
    ResponsesBody: _as_chat,
    MessagesBody: _as_chat,
    CountBody: _as_chat,
    TokenizeBody: _tokenize,
    DetokenizeBody: _detokenize,
}


def _prompt(
    prompt: str | list[int], tokenizer: Tokenizer, limits: Limits, *, special: bool, cut: bool = False
) -> list[int]:
    """cut: the prompt will be cut to what fits, so that it may be longer."""
    if isinstance(prompt, str):
        if not cut:
            _check_text(prompt, tokenizer, limits, "prompt")
        prompt = tokenizer.encode(prompt, add_special_tokens=special)
    check_ids(prompt, limits.vocab_size, "prompt")
    if not prompt:
        raise invalid("prompt: must not be empty", "prompt")
    return prompt


def _conversation(
    messages: list[Message],
    options: TemplateFields,
    tools: list[Tool],
    tokenizer: Tokenizer,
    limits: Limits,
    *,
    cut: bool = False,
) -> list[int]:
    """Token ids of a conversation by the model's chat template, up to where the answer begins."""
    if tools and not tokenizer.takes_tools:
        raise invalid(
            "tools: this model's chat template shows no tools to the model; leave them out", "tools"
        )
    variables = options.template_options()
    if tools:
        variables["tools"] = [tool.for_template() for tool in tools]
    special = variables.pop("add_special_tokens")
    text = _rendered([message.for_template() for message in messages], variables, tokenizer)
    if not cut:
        _check_text(text, tokenizer, limits, "messages")
    return tokenizer.encode(text, add_special_tokens=special)


def _rendered(messages: list[dict[str, Any]], variables: dict[str, Any], tokenizer: Tokenizer) -> str:
    """The prompt. Templates that refuse messages of the system, but for one at the beginning, get one."""
    try:
        return tokenizer.render_chat(messages, **variables)
    except UserError as error:
        refusal = invalid(f"messages: {error}", "messages")
    joined = system_first(messages)
    if joined == messages:
        raise refusal
    try:
        return tokenizer.render_chat(joined, **variables)
    except UserError:
        raise refusal from None


def _check_text(text: str, tokenizer: Tokenizer, limits: Limits, param: str) -> None:
    """Raise ApiError 400 if `text` cannot fit the context, however it is tokenised."""
    least = tokenizer.least_tokens(text)
    if least > limits.max_context:
        raise too_long(
            param,
            f"{param}: the context holds {limits.max_context} tokens, but {len(text.encode())} bytes of text "
            f"have {least} at least, since one covers at most {tokenizer.longest_token} bytes; shorten it",
        )
