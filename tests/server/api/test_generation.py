"""Outputs that come at once: the answer is the one that they give one by one."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import write_tokenizer
from turnout.config import ServerConfig
from turnout.engine.messages import RequestOutput, TokenLogprobs
from turnout.engine.sampling.detokenizer import TextStream
from turnout.engine.sampling_params import SamplingParams
from turnout.engine.tokenizer import Tokenizer
from turnout.server.api.errors import ApiError
from turnout.server.api.generation import Choice, Delta, Generation
from turnout.server.api.parsing.parts import Arguments, Call, Parser, Reasoning, Text, merged
from turnout.server.api.parsing.registry import CALL_PARSERS, Parsers
from turnout.server.metrics import Metrics
from turnout.server.request_log import RequestRecord, SequenceRecord
from turnout.server.supervise.engine import EngineSupervisor

PROSE = "Déjà vu: 🍐 and 🦉 meet at noon; they talk until STOP is said, and after that ¿nobody? says more."
SCHEMAS = {"add": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}}
ANSWER = (
    "<think>Two numbers, hm.</think>I shall add them."
    '<tool_call>\n{"name": "add", "arguments": {"a": 19, "b": 23}}\n</tool_call>'
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return Tokenizer.load(folder)


class Run:
    """A generation whose outputs the test delivers to the ledger's entries, as ranks would."""

    def __init__(self, tokenizer: Tokenizer, samplings: list[SamplingParams], parsers: list[Parser | None]):
        self.engine = EngineSupervisor(ServerConfig(model="unused"))
        self.metrics = Metrics("unused")
        self.choices = [
            Choice(i, [1, 2], sampling, TextStream(tokenizer, sampling), parser)
            for i, (sampling, parser) in enumerate(zip(samplings, parsers, strict=True))
        ]
        self.record = RequestRecord(
            id="a",
            model="unused",
            sampling=samplings[0],
            arrival=0.0,
            sequences=[SequenceRecord(prompt_ids=[1, 2]) for _ in samplings],
        )
        self.generation = Generation(
            "a", "a", self.engine, self.metrics, self.choices, self.record, (), cache_salt="", priority=0
        )
        self.deltas: list[list[tuple[int, Delta]]] = []
        self.error: ApiError | None = None

    def go(self, groups: list[list[tuple[int, RequestOutput | ApiError]]]) -> None:
        """Deliver the outputs, each with its choice, a group at a time; the client takes all after each. What
        ends the whole request comes as an ApiError."""
        asyncio.run(self._go(groups))

    async def _go(self, groups: list[list[tuple[int, RequestOutput | ApiError]]]) -> None:
        for choice in self.choices:
            self.generation.submit(choice)
        entries = {entry.request.id: entry for entry in self.engine.ledger.due()}
        reading = asyncio.create_task(self._read())
        await asyncio.sleep(0)
        for group in groups:
            for index, output in group:
                if isinstance(output, ApiError):
                    self.generation.fail(output)
                elif f"a-{index}" in self.engine.ledger._entries:  # else aborted: no group would deliver it
                    self.engine._deliver(entries[f"a-{index}"], output)
            for _ in range(3):
                await asyncio.sleep(0)
        await asyncio.wait_for(reading, 10)

    async def _read(self) -> None:
        try:
            async for batch in self.generation.deltas():
                self.deltas.append([(choice.index, delta) for choice, delta in batch])
        except ApiError as error:
            self.error = error

    def totals(self) -> list[dict[str, Any]]:
        found = []
        for choice in self.choices:
            total = Delta()
            for batch in self.deltas:
                for index, delta in batch:
                    if index == choice.index:
                        total.add(delta)
            found.append(
                {
                    "text": total.text,
                    "reasoning": "".join(part.text for part in total.parts if isinstance(part, Reasoning)),
                    "calls": [part.name for part in total.parts if isinstance(part, Call)],
                    "arguments": "".join(part.text for part in total.parts if isinstance(part, Arguments)),
                    "logprobs": total.logprobs,
                    "prompt_logprobs": total.prompt_logprobs,
                    "first": total.first,
                    "finish_reason": total.finish_reason,
                    "stop_reason": total.stop_reason,
                    "logged": self.record.sequences[choice.index].output_ids,
                }
            )
        return found

    def gaps(self) -> float:
        return self.metrics.inter_token.buckets()[-1][1]


def outputs(
    ids: list[int], name: str, *, logprobs: bool, rng: random.Random, stop: bool
) -> list[RequestOutput]:
    """An engine's: the first says how long it waited, some hold several tokens, the last says why it ends."""
    found, at = [], 0
    while at < len(ids):
        size = 1 if at == 0 else rng.choice([1, 1, 1, 2, 3])
        some = ids[at : at + size]
        output = RequestOutput(id=name, token_ids=some)
        if logprobs:
            output.logprobs = [
                TokenLogprobs(token, -at - i / 8, 1, [(token, -1.0)]) for i, token in enumerate(some)
            ]
        if at == 0:
            output.waited, output.cached_tokens, output.prompt_logprobs = (0.1, 0.2), 1, [None]
        at += size
        found.append(output)
    found[-1].finish_reason = "stop" if stop else "length"
    found[-1].stop_token = ids[-1] if stop else None
    return found


def grouped(order: list[Any], rng: random.Random) -> list[list[Any]]:
    groups, at = [], 0
    while at < len(order):
        size = rng.choice([1, 2, 5, 30])
        groups.append(order[at : at + size])
        at += size
    return groups


@pytest.mark.parametrize("seed", range(40))
def test_however_many_come_at_once(tokenizer: Tokenizer, seed: int):
    rng = random.Random(seed)
    ids = tokenizer.encode(PROSE)
    samplings = [
        SamplingParams(max_tokens=500),
        SamplingParams(max_tokens=500, stop=("STOP",), min_tokens=rng.choice([0, 200])),
        SamplingParams(max_tokens=500, stop=("STOP", "meet at"), include_stop_str_in_output=True),
        SamplingParams(max_tokens=500, logprobs=1, include_stop_str_in_output=rng.random() < 0.5),
    ]
    each = [
        outputs(ids, f"a-{i}", logprobs=bool(s.logprobs), rng=rng, stop=rng.random() < 0.5)
        for i, s in enumerate(samplings)
    ]
    waiting = {i: list(of_one) for i, of_one in enumerate(each)}
    order = []
    while waiting:
        i = rng.choice(list(waiting))
        order.append((i, waiting[i].pop(0)))
        if not waiting[i]:
            del waiting[i]
    one_by_one = Run(tokenizer, samplings, [None] * 4)
    one_by_one.go([[item] for item in order])
    at_once = Run(tokenizer, samplings, [None] * 4)
    at_once.go(grouped(order, rng))
    assert at_once.error is one_by_one.error is None
    assert at_once.totals() == one_by_one.totals()
    assert at_once.generation.usage() == one_by_one.generation.usage()
    assert at_once.gaps() == one_by_one.gaps() == sum(choice.num_tokens - 1 for choice in at_once.choices)
    assert at_once.totals()[0]["text"] == (PROSE if each[0][-1].stop_token is None else PROSE[:-1])
    for batch in at_once.deltas:
        indices = [index for index, _ in batch]
        assert len(indices) == len(set(indices))  # one delta of each choice


def parser() -> Parser:
    found = Parsers(CALL_PARSERS["qwen3"], CALL_PARSERS["qwen3"]).parser(SCHEMAS, "", streams_arguments=True)
    assert found is not None
    return found


@pytest.mark.parametrize("seed", range(20))
def test_reasoning_is_counted_and_arguments_come_as_they_are_written(tokenizer: Tokenizer, seed: int):
    rng = random.Random(seed)
    sampling = SamplingParams(max_tokens=500)
    of_one = outputs(tokenizer.encode(ANSWER), "a-0", logprobs=False, rng=rng, stop=False)
    order = [(0, output) for output in of_one]
    one_by_one = Run(tokenizer, [sampling], [parser()])
    one_by_one.go([[item] for item in order])
    at_once = Run(tokenizer, [sampling], [parser()])
    at_once.go(grouped(order, rng))
    assert at_once.totals() == one_by_one.totals()
    assert at_once.totals()[0]["reasoning"] == "Two numbers, hm."
    assert at_once.totals()[0]["text"] == "I shall add them."
    assert at_once.totals()[0]["calls"] == ["add"]
    assert at_once.generation.usage() == one_by_one.generation.usage()
    written = [
        [
            part.text
            for batch in run.deltas
            for _, delta in batch
            for part in delta.parts
            if isinstance(part, Arguments)
        ]
        for run in (at_once, one_by_one)
    ]
    assert written[0] == written[1]
    assert len(written[0]) > 1
    for batch in at_once.deltas:
        for _, delta in batch:
            assert delta.parts == merged(delta.parts) or any(
                isinstance(p, Call | Arguments) for p in delta.parts
            )


def test_what_came_before_an_error_is_said(tokenizer: Tokenizer):
    ids = tokenizer.encode("abc")
    run = Run(tokenizer, [SamplingParams(max_tokens=9)] * 2, [None] * 2)
    first = RequestOutput(id="a-0", token_ids=ids[:1], waited=(0.0, 0.0))
    others = [
        (0, RequestOutput(id="a-0", token_ids=ids[1:2])),
        (1, RequestOutput(id="a-1", token_ids=ids[:1], waited=(0.0, 0.0))),
        (0, RequestOutput(id="a-0", token_ids=ids[2:])),
        (1, RequestOutput(id="a-1", finish_reason="error", error="it broke")),
    ]
    run.go([[(0, first)], others])
    assert run.error is not None
    assert "it broke" in run.error.message
    assert [total["text"] for total in run.totals()] == ["abc", "a"]


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("finished", [0, 1, 2])
def test_what_ends_a_request_ends_it_whichever_choices_have_finished(
    tokenizer: Tokenizer, finished: int, together: bool
):
    """As at the end of --shutdown-timeout; an answer that is complete by then stays so."""
    ids = tokenizer.encode("ab")
    run = Run(tokenizer, [SamplingParams(max_tokens=2)] * 2, [None] * 2)
    order: list[tuple[int, RequestOutput | ApiError]] = [
        (i, RequestOutput(id=f"a-{i}", token_ids=ids, waited=(0.0, 0.0), finish_reason="length"))
        for i in range(finished)
    ]
    order.append((0, ApiError(503, "cut off")))
    run.go([order] if together else [[item] for item in order])
    assert (run.error is None) == (finished == 2)
    assert [total["text"] for total in run.totals()] == ["ab"] * finished + [""] * (2 - finished)


def test_ranks_that_took_over_are_noted(tokenizer: Tokenizer):
    """What other ranks went on with says so, also if it comes together with what the first ones sent."""
    ids = tokenizer.encode("abcd")
    run = Run(tokenizer, [SamplingParams(max_tokens=9)], [None])
    run.go(
        [
            [
                (0, RequestOutput(id="a-0", token_ids=ids[:1], waited=(0.1, 0.2))),
                (0, RequestOutput(id="a-0", token_ids=ids[1:2])),
                (0, RequestOutput(id="a-0", token_ids=ids[2:3], waited=(0.3, 0.4))),
                (0, RequestOutput(id="a-0", token_ids=ids[3:], finish_reason="length", preempted=[5.0])),
            ]
        ]
    )
    (sequence,) = run.record.sequences
    assert (len(sequence.resumed), sequence.waited, sequence.preempted) == (1, (0.1, 0.2), [5.0])
    assert sequence.output_ids == ids
    assert run.deltas[0][0][1].parts == [Text("abcd")]
