"""The evaluation's HTTP client against servers that behave, fail, and are not there."""

from __future__ import annotations

import asyncio

import pytest

from tests.evals.stub import serving
from turnout.errors import UserError
from turnout.evals.client import ask_all
from turnout.evals.tasks import Question

QUESTIONS = [Question(text=f"{n} + 0", expected=str(n)) for n in range(9)]


def ask(url: str, **options):
    return asyncio.run(
        ask_all(QUESTIONS, base_url=url, **({"max_concurrency": 4, "max_tokens": 7} | options))
    )


def test_answers_come_in_order_and_are_judged():
    heard = []
    with serving() as server:
        answers = ask(server.url, on_answer=heard.append)
    assert [a.question for a in answers] == QUESTIONS
    assert [a.correct for a in answers] == [True] * 8 + [False]  # the last one has no text
    assert answers[-1].text == ""
    assert sum(a.tokens for a in answers) == 2 * len(QUESTIONS)
    assert sorted(a.question.text for a in heard) == sorted(q.text for q in QUESTIONS)


def test_what_is_asked():
    with serving() as server:
        ask(server.url + "/", api_key="key")
    for body, headers in server.bodies:
        assert (body["model"], body["temperature"], body["max_tokens"]) == ("stub", 0, 7)
        assert headers["Authorization"] == "Bearer key"


@pytest.mark.parametrize("limit", [1, 3])
def test_no_more_in_flight_than_asked_for(limit):
    with serving() as server:
        server.together = limit
        ask(server.url, max_concurrency=limit)
    assert server.most == limit


def test_an_error_status_is_shown_with_the_servers_words():
    with serving(status=503) as server, pytest.raises(UserError, match=r"HTTP 503: .*the stub refuses"):
        ask(server.url)


@pytest.mark.parametrize("reply", ["{", "[]", "{}", '{"choices": []}', '{"choices": [{"message": 3}]}'])
def test_a_reply_that_is_no_chat_completion(reply):
    with serving(reply=reply) as server, pytest.raises(UserError, match="no chat completion"):
        ask(server.url)


def test_a_server_without_models():
    with serving(models=False) as server, pytest.raises(UserError, match="no OpenAI-compatible server"):
        ask(server.url)


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/v1", "nonsense", "http://["])
def test_no_server(url):
    with pytest.raises(UserError, match="--base-url"):
        ask(url)
