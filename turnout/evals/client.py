"""Ask a list of questions over the OpenAI chat interface, some at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

from turnout.errors import UserError
from turnout.evals.tasks import Question, is_correct


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One reply. `tokens` are completion tokens as the server counted them."""

    question: Question
    text: str
    correct: bool
    tokens: int
    seconds: float
    finish_reason: str


async def served_model(client: httpx.AsyncClient) -> str:
    """The id of the first model the server offers. Raises UserError if there is no such server."""
    try:
        reply = await client.get("models")
        reply.raise_for_status()
        return str(reply.json()["data"][0]["id"])
    except httpx.HTTPStatusError as error:
        why = f"HTTP {error.response.status_code}: {reason(error.response)}"
    except (httpx.HTTPError, KeyError, IndexError, TypeError, ValueError) as error:
        why = str(error) or type(error).__name__
    raise UserError(
        f"{client.base_url}: no OpenAI-compatible server answers ({why}); "
        "check --base-url (it usually ends in /v1) and --api-key"
    )


def reason(response: httpx.Response) -> str:
    """Why a server refused, in its own words if they have OpenAI's form."""
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.text[:500]


async def ask(client: httpx.AsyncClient, model: str, question: Question, max_tokens: int) -> Answer:
    """One greedy chat completion. Raises UserError with the server's words if they are none."""
    start = time.perf_counter()
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question.text}],
        "max_tokens": max_tokens,
        "temperature": 0,
    }
    try:
        reply = await client.post("chat/completions", json=body)
    except httpx.HTTPError as error:
        raise UserError(f"{client.base_url}: the request failed ({error or type(error).__name__})") from None
    if reply.status_code != 200:
        raise UserError(f"{client.base_url}: HTTP {reply.status_code}: {reply.text[:500]}")
    try:
        content = reply.json()
        choice = content["choices"][0]
        text = str(choice["message"]["content"] or "")
        tokens = int((content.get("usage") or {}).get("completion_tokens", 0))
        finish_reason = str(choice["finish_reason"])
    except (KeyError, IndexError, TypeError, ValueError):
        raise UserError(f"{client.base_url}: this is no chat completion: {reply.text[:500]}") from None
    return Answer(
        question=question,
        text=text,
        correct=is_correct(text, question),
        tokens=tokens,
        seconds=time.perf_counter() - start,
        finish_reason=finish_reason,
    )


def counter(base_url: str, name: str) -> float | None:
    """A metric of a Turnout server, summed over its ranks; None: the server does not say."""
    url = base_url.rstrip("/").removesuffix("/v1") + "/metrics"
    try:
        families = list(text_string_to_metric_families(httpx.get(url, timeout=10).text))
    except (httpx.HTTPError, ValueError):
        return None
    found = [s.value for family in families for s in family.samples if s.name == f"turnout:{name}"]
    return sum(found) if found else None


async def ask_all(
    questions: Sequence[Question],
    *,
    base_url: str,
    api_key: str = "",
    max_concurrency: int,
    max_tokens: int,
    on_answer: Callable[[Answer], None] = lambda _: None,
) -> list[Answer]:
    """Every question, `max_concurrency` in flight, in the order given."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    limits = httpx.Limits(max_connections=max_concurrency)
    gate = asyncio.Semaphore(max_concurrency)
    root = base_url.rstrip("/") + "/"

    async with httpx.AsyncClient(base_url=root, headers=headers, limits=limits, timeout=600) as client:
        model = await served_model(client)

        async def one(question: Question) -> Answer:
            async with gate:
                answer = await ask(client, model, question, max_tokens)
            on_answer(answer)
            return answer

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(question)) for question in questions]
        except* UserError as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]
