"""The description of the interface at /openapi.json, made from the bodies that are parsed and the answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from turnout import __version__
from turnout.server.api import responses
from turnout.server.api.anthropic.answer import Message, MessageEvent, TokenCount
from turnout.server.api.anthropic.body import CountBody, MessagesBody
from turnout.server.api.openai_responses.answer import Response as Answered
from turnout.server.api.openai_responses.answer import ResponseEvent
from turnout.server.api.openai_responses.body import ResponsesBody
from turnout.server.api.profiling import ProfileBody
from turnout.server.api.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from turnout.server.api.scoring import ScoreBody
from turnout.server.api.turns import PROBES

REFERENCE = "#/components/schemas/{model}"


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One route. `events`: what each server-sent event holds if the body asks for a stream."""

    path: str
    does: str
    answer: Any = None
    body: Any = None
    events: Any = None
    media_type: str = "application/json"
    refusals: tuple[int, ...] = ()
    acts: bool = False  # without a body
    optional: bool = False  # is the body
    error: Any = responses.Error

    @property
    def method(self) -> str:
        return "post" if self.acts or self.body is not None else "get"


GENERATES = (400, 404, 408, 413, 500, 503)
OPERATIONS = (
    Operation(path="/health", does="Whether the process lives.", answer=responses.Status),
    Operation(
        path="/ready",
        does="Whether a request sent now would be served.",
        answer=responses.Status,
        refusals=(503,),
    ),
    Operation(path="/metrics", does="Counters and latencies for Prometheus.", media_type="text/plain"),
    Operation(path="/version", does="The version of the server.", answer=responses.Version),
    Operation(path="/openapi.json", does="This description.", answer=dict[str, Any]),
    Operation(path="/server_info", does="Configuration, plan and ranks.", answer=responses.ServerInfo),
    Operation(
        path="/restart",
        does="Restart the ranks, with the weights that are on disk then; requests wait, and go on.",
        answer=responses.Status,
        refusals=(403, 503),
        acts=True,
    ),
    Operation(
        path="/start_profile",
        does="Let all ranks record what they do in their next steps.",
        body=ProfileBody,
        optional=True,
        answer=responses.Status,
        refusals=(400, 403, 408, 409, 413, 503),
    ),
    Operation(
        path="/stop_profile",
        does="What the ranks have recorded, as one Chrome trace.",
        answer=responses.Trace,
        refusals=(403, 409, 503),
        acts=True,
    ),
    Operation(
        path="/reset_prefix_cache",
        does="Reuse no prefix that was computed so far.",
        answer=responses.Status,
        refusals=(503,),
        acts=True,
    ),
    Operation(
        path="/flush_cache",
        does="As /reset_prefix_cache.",
        answer=responses.Status,
        refusals=(503,),
        acts=True,
    ),
    Operation(path="/load", does="Requests being served.", answer=responses.Load),
    Operation(path="/model_info", does="What is served, as SGLang says it.", answer=responses.ModelInfo),
    Operation(path="/get_model_info", does="As /model_info.", answer=responses.ModelInfo),
    Operation(path="/v1/models", does="The one model that is served.", answer=responses.ModelList),
    Operation(path="/v1/models/{model}", does="A model by its id.", answer=responses.Model, refusals=(404,)),
    Operation(
        path="/v1/completions",
        does="Continue prompts.",
        body=CompletionBody,
        answer=responses.Completion,
        events=responses.CompletionChunk,
        refusals=GENERATES,
    ),
    Operation(
        path="/v1/chat/completions",
        does="Answer a conversation.",
        body=ChatBody,
        answer=responses.ChatCompletion,
        events=responses.ChatCompletionChunk,
        refusals=GENERATES,
    ),
    Operation(
        path="/v1/score",
        does="How likely given tokens are next, after each of several texts.",
        body=ScoreBody,
        answer=responses.Scores,
        refusals=GENERATES,
    ),
    Operation(
        path="/v1/responses",
        does="Answer a conversation, in the newer protocol of OpenAI; nothing is kept.",
        body=ResponsesBody,
        answer=Answered,
        events=ResponseEvent,
        refusals=GENERATES,
    ),
    Operation(
        path="/v1/messages",
        does="Answer a conversation, in Anthropic's protocol.",
        body=MessagesBody,
        answer=Message,
        events=MessageEvent,
        refusals=GENERATES,
        error=responses.AnthropicError,
    ),
    Operation(
        path="/v1/messages/count_tokens",
        does="How many tokens a conversation has, in Anthropic's protocol.",
        body=CountBody,
        answer=TokenCount,
        refusals=GENERATES,
        error=responses.AnthropicError,
    ),
    Operation(path="/v1/embeddings", does="Refused: there are none.", acts=True, refusals=(400,)),
    Operation(
        path="/tokenize",
        does="Token ids of a text or a conversation.",
        body=TokenizeBody,
        answer=responses.Tokens,
        refusals=GENERATES,
    ),
    Operation(
        path="/detokenize",
        does="The text of token ids.",
        body=DetokenizeBody,
        answer=responses.Text,
        refusals=GENERATES,
    ),
)
STREAMS = (
    "One object, or events if `stream` is true. The last event is `[DONE]`, unless an error comes after the "
    "first: it is an event of its own then, and the last."
)
REASONS = {
    400: "The request is wrong; the message names the field.",
    401: "The API key is missing or wrong.",
    403: "The server was started without --api-key.",
    404: "Another model is served.",
    408: "The body came too slowly.",
    409: "A profile is being recorded already, or none is.",
    413: "The body is larger than --max-request-bytes.",
    500: "The engine failed while it computed this request.",
    503: "Not now: loading, restarting, shutting down, or too many requests.",
}


def describe(*, with_key: bool) -> dict[str, Any]:
    """The OpenAPI document. `with_key`: all routes but probes want the API key."""
    shapes = {
        shape: "validation" if shape is operation.body else "serialization"
        for operation in OPERATIONS
        for shape in (operation.body, operation.answer, operation.events)
        if shape is not None
    } | dict.fromkeys((responses.Error, responses.AnthropicError), "serialization")
    inputs = [(shape, mode, TypeAdapter(shape)) for shape, mode in shapes.items()]
    found, definitions = TypeAdapter.json_schemas(inputs, ref_template=REFERENCE)  # type: ignore[arg-type]
    schemas = {shape: found[shape, mode] for shape, mode in shapes.items()}  # type: ignore[index]
    paths: dict[str, Any] = {}
    for operation in OPERATIONS:
        guarded = with_key and operation.path not in PROBES
        paths[operation.path] = {operation.method: _operation(operation, schemas, guarded=guarded)}
    components = {"schemas": definitions["$defs"]}
    if with_key:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.2.0",  # the first that describes the events of a stream (itemSchema)
        "info": {"title": "Turnout", "version": __version__},
        "paths": paths,
        "components": components,
    }


def _operation(operation: Operation, schemas: dict[Any, Any], *, guarded: bool) -> dict[str, Any]:
    described: dict[str, Any] = {
        "summary": operation.does,
        "operationId": operation.path.strip("/").translate(str.maketrans("/{}.", "____")),
        "responses": {
            "200": {
                "description": "Done." if operation.events is None else STREAMS,
                "content": _answers(operation, schemas),
            }
        },
    }
    if "{model}" in operation.path:
        schema = {"type": "string", "minLength": 1}
        described["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": schema}]
    if operation.body is not None:
        content = {"application/json": {"schema": schemas[operation.body]}}
        described["requestBody"] = {"required": not operation.optional, "content": content}
    for status in sorted((*operation.refusals, *((401,) if guarded else ()))):
        described["responses"][str(status)] = {
            "description": REASONS[status],
            "content": {"application/json": {"schema": schemas[operation.error]}},
        }
    if guarded:
        described["security"] = [{"key": []}]
    return described


def _answers(operation: Operation, schemas: dict[Any, Any]) -> dict[str, Any]:
    answer = {"type": "string"} if operation.answer is None else schemas[operation.answer]
    content: dict[str, Any] = {operation.media_type: {"schema": answer}}
    if operation.events is not None:
        event = {"anyOf": [schemas[operation.events], schemas[operation.error]]}
        content["text/event-stream"] = {"itemSchema": _event_holding(event)}
    return content


def _event_holding(shape: dict[str, Any]) -> dict[str, Any]:
    """A server-sent event whose data is JSON of `shape`, or the mark of the end."""
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": shape}
    return {
        "type": "object",
        "properties": {
            "data": {
                "if": {"const": "[DONE]"},
                "then": True,
                "else": data,
            }
        },
        "required": ["data"],
    }
