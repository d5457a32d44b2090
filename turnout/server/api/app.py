"""The routes. Each reads its body, asks the service or the control, and renders the answer."""

from __future__ import annotations

import hmac
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from difflib import get_close_matches
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from turnout import __version__
from turnout.server.api.anthropic.answer import PING, collect_message, stream_message
from turnout.server.api.anthropic.body import CountBody, MessagesBody
from turnout.server.api.connection import COMMENT, EventStream, read_body, while_connected
from turnout.server.api.control import Control
from turnout.server.api.errors import ApiError, invalid, json_response
from turnout.server.api.generation import Generation
from turnout.server.api.openai_responses.answer import ResponseAnswer
from turnout.server.api.openai_responses.body import ResponsesBody
from turnout.server.api.openapi import OPERATIONS, describe
from turnout.server.api.preparation import check_model
from turnout.server.api.profiling import ProfileBody
from turnout.server.api.protocol import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    TokenizeBody,
    parse,
)
from turnout.server.api.render import ChatRenderer, CompletionRenderer, Renderer, collect, stream
from turnout.server.api.request_ids import RequestIds
from turnout.server.api.routes import Routes
from turnout.server.api.scoring import ScoreBody
from turnout.server.api.service import Service
from turnout.server.api.turns import Turns

PROFILE_BYTES = 4096  # of a body that says what to record
RESPONSE_FORMAT = "response_format"  # of chat; what other protocols call it:
FORMATS = {"/v1/messages": "output_config.format", "/v1/responses": "text.format"}
PATHS = [operation.path for operation in OPERATIONS]
CLIENT_CLOSED_REQUEST = 499  # no client reads it; access logs do


def create_app(control: Control) -> Starlette:
    """The whole HTTP interface."""
    service = control.service
    keyed = Routes(partial(_check_key, service.config.api_key))
    _add_info(control, keyed)
    _add_control(control, keyed)
    _add_generation(service, keyed)
    _add_tokens(service, keyed)
    return _app([*_open_routes(control), *keyed.routes])


def create_app_for_requests(service: Service, others: ASGIApp) -> Starlette:
    """Of a process that generates and tokenises; `others` takes all requests that are not about that."""
    keyed = Routes(partial(_check_key, service.config.api_key))
    _add_generation(service, keyed)
    _add_tokens(service, keyed)
    return _app([*keyed.routes, Route("/{path:path}", others)])


def _app(routes: Sequence[Route]) -> Starlette:
    app = Starlette(routes=routes)
    app.add_middleware(Turns)
    app.add_middleware(RequestIds)
    handle_errors(app)
    return app


def _check_key(key: str | None, request: Request) -> None:
    if key is None or carries_key(request.headers.get("authorization", ""), key):
        return
    # Anthropic's clients have a header of their own.
    if not carries_key(f"bearer {request.headers.get('x-api-key', '')}", key):
        raise ApiError(
            401, "missing or wrong API key: send `Authorization: Bearer KEY`", code="invalid_api_key"
        )


def carries_key(authorization: str, key: str) -> bool:
    """Whether an Authorization header names `key`, compared in a time that tells nothing about it."""
    scheme, _, given = authorization.partition(" ")
    raw = given.strip(" ").encode("latin-1")  # header values are bytes, which starlette reads as Latin-1
    return hmac.compare_digest(raw, key.encode()) and scheme.lower() == "bearer"


def _open_routes(control: Control) -> list[Route]:
    """For probes and scrapers, which carry no key."""
    router = Routes()

    @router.get("/health")
    async def health(request: Request) -> Response:
        """200 while this process lives."""
        return json_response({"status": "ok"})

    @router.get("/ready")
    async def ready(request: Request) -> Response:
        """200 if a request sent now would be served, else 503 with the reason."""
        control.check_ready()
        return json_response({"status": "ready"})

    @router.get("/metrics")
    async def metrics(request: Request) -> Response:
        return PlainTextResponse(control.service.metrics.text(), media_type="text/plain; version=0.0.4")

    return router.routes


def _add_info(control: Control, router: Routes) -> None:
    @router.get("/version")
    async def version(request: Request) -> Response:
        return json_response({"version": __version__})

    @router.get("/openapi.json")
    async def openapi(request: Request) -> Response:
        return json_response(describe(with_key=control.service.config.api_key is not None))

    @router.get("/v1/models")
    async def models(request: Request) -> Response:
        return json_response({"object": "list", "data": [control.model_card()]})

    @router.get("/v1/models/{model:path}")
    async def model(request: Request) -> Response:
        check_model(request.path_params["model"], control.service.limits)
        return json_response(control.model_card())

    @router.get("/server_info")
    async def server_info(request: Request) -> Response:
        return json_response(control.describe())

    @router.get("/load")
    async def load(request: Request) -> Response:
        return json_response(control.load())

    @router.get("/model_info")
    @router.get("/get_model_info")
    async def model_info(request: Request) -> Response:
        return json_response(control.model_info())


def _add_control(control: Control, router: Routes) -> None:
    @router.post("/reset_prefix_cache")
    @router.post("/flush_cache")
    async def reset_prefix_cache(request: Request) -> Response:
        control.reset_prefix_cache()
        return json_response({"status": "ok"})

    @router.post("/start_profile")
    async def start_profile(request: Request) -> Response:
        control.check_key_is_set("/start_profile")
        raw = await read_body(request, PROFILE_BYTES, small=PROFILE_BYTES, on_large=_nothing)
        control.start_profile(parse(ProfileBody, raw or b"{}"))
        return json_response({"status": "profiling"})

    @router.post("/stop_profile")
    async def stop_profile(request: Request) -> Response:
        """A trace for chrome://tracing or Perfetto."""
        control.check_key_is_set("/stop_profile")
        named = {"Content-Disposition": 'attachment; filename="turnout-profile.json"'}
        trace = await control.stop_profile()
        return StreamingResponse(trace, headers=named, media_type="application/json")

    @router.post("/restart")
    async def restart(request: Request) -> Response:
        """200 as soon as the ranks begin to restart; /ready says when they serve."""
        control.restart()
        return json_response({"status": "restarting"})


def _add_generation(service: Service, router: Routes) -> None:
    @router.post("/v1/completions")
    async def completions(request: Request) -> Response:
        tokenizer = service.check_open()
        body, prompts = await service.intake.read(CompletionBody, request)
        generation = await service.complete(body, prompts, request.state.given_id)
        return await _answer(service, request, body, generation, CompletionRenderer(tokenizer, body))

    @router.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        tokenizer = service.check_open()
        body, prompts = await service.intake.read(ChatBody, request)
        generation = await service.chat(body, prompts, request.state.given_id)
        return await _answer(service, request, body, generation, ChatRenderer(tokenizer, body))

    @router.post("/v1/score")
    async def score(request: Request) -> Response:
        service.check_open()
        body, prompts = await service.intake.read(ScoreBody, request)
        return json_response(await while_connected(request.receive, service.score(body, prompts)))

    @router.post("/v1/responses")
    async def create_response(request: Request) -> Response:
        service.check_open()
        body, (chat, prompts) = await service.intake.read(ResponsesBody, request)
        generation = await service.chat(chat, prompts, request.state.given_id)
        answer = ResponseAnswer(generation, body, service.model_name)
        return await _send(
            service, request, generation, answer.stream() if body.stream else None, answer.collect
        )

    @router.post("/v1/messages")
    async def create_message(request: Request) -> Response:
        service.check_open()
        body, (chat, prompts) = await service.intake.read(MessagesBody, request)
        generation = await service.chat(chat, prompts, request.state.given_id)
        model = service.model_name
        parts = stream_message(generation, body, model) if body.stream else None
        whole = partial(collect_message, generation, body, model)
        return await _send(service, request, generation, parts, whole, waiting=PING)

    @router.post("/v1/embeddings")
    async def embeddings(request: Request) -> Response:
        raise invalid("this server generates text and makes no embeddings; ask one of an embedding model")


def _add_tokens(service: Service, router: Routes) -> None:
    """Between text and token ids, without the engine."""

    @router.post("/v1/messages/count_tokens")
    async def count_tokens(request: Request) -> Response:
        service.check_open()
        _, (_, (ids,)) = await service.intake.read(CountBody, request)
        return json_response({"input_tokens": len(ids)})

    @router.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        service.check_open()
        _, (ids,) = await service.intake.read(TokenizeBody, request)
        return json_response({"tokens": ids, "count": len(ids), "max_model_len": service.limits.max_context})

    @router.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        service.check_open()
        _, text = await service.intake.read(DetokenizeBody, request)
        return json_response({"prompt": text})


async def _nothing() -> None:
    """For bodies that are small or refused."""


async def _answer(
    service: Service, request: Request, body: GenerationBody, generation: Generation, renderer: Renderer
) -> Response:
    """Stream or collect, in OpenAI's style."""
    model = service.model_name
    parts = stream(generation, renderer, model, usage=body.wants_usage) if body.stream else None
    return await _send(service, request, generation, parts, partial(collect, generation, renderer, model))


async def _send(
    service: Service,
    request: Request,
    generation: Generation,
    parts: AsyncIterator[bytes] | None,
    whole: Callable[[], Coroutine[Any, Any, dict[str, Any]]],
    *,
    waiting: bytes = COMMENT,
) -> Response:
    """Stream `parts`, with `waiting` where there are none for long, or collect; either way the generation is
    released when the client has its answer or leaves."""
    if parts is not None:
        return EventStream(parts, on_end=partial(service.release, generation), waiting=waiting)
    try:
        return json_response(await while_connected(request.receive, whole()))
    finally:
        service.release(generation)


def handle_errors(app: Starlette) -> None:
    """Every error leaves in its protocol's shape."""

    def answer(request: Request, error: ApiError) -> Response:
        own = FORMATS.get(request.url.path, RESPONSE_FORMAT)
        error.message = error.message.replace(RESPONSE_FORMAT, own, 1)
        error.param = own if error.param == RESPONSE_FORMAT else error.param
        return error.response(anthropic=request.url.path.startswith("/v1/messages"))

    async def api_error(request: Request, error: ApiError) -> Response:
        return answer(request, error)

    async def http_error(request: Request, error: HTTPException) -> Response:
        said = f"{request.method} {request.url.path}: {error.detail}"
        if error.status_code == 404:
            near = get_close_matches(request.url.path, PATHS, 1)
            said += f"; did you mean {near[0]}?" if near else "; GET /openapi.json lists what there is"
        refusal = ApiError(error.status_code, said, headers=error.headers)
        return answer(request, refusal)

    async def client_left(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    async def bug(request: Request, error: Exception) -> Response:
        return answer(request, ApiError(500, "internal server error; the server's log has the details"))

    answers: dict[type[Exception], Any] = {
        ApiError: api_error,
        HTTPException: http_error,
        ClientDisconnect: client_left,
        Exception: bug,
    }
    for kind, handler in answers.items():
        app.add_exception_handler(kind, handler)
