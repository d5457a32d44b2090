"""Outputs that follow grammars, from a random model, checked by jsonschema and re; and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.engine.schemas import draw_schema
from tests.ranks import Pools, Rank
from turnout import LLM, SamplingParams
from turnout.config import Config, load
from turnout.engine import grammar
from turnout.engine.messages import AddRequest
from turnout.errors import UserError

SETTINGS = {"device": "cpu", "num_threads": 1, "load_progress": False, "max_total_tokens": 16384}
END = 257  # of tests/tiny.py's tokenizer


def schema_grammar(schema: Any, **options: Any) -> str:
    return grammar.grammar(grammar.json_value(schema, **options))


def params(grammar: str, **fields: Any) -> SamplingParams:
    return SamplingParams(**({"grammar": grammar, "max_tokens": 400, "temperature": 1.0, "seed": 7} | fields))


@pytest.fixture(scope="module")
def llm(tiny_folder: Path) -> Iterator[LLM]:
    with LLM(str(tiny_folder), **SETTINGS) as llm:
        yield llm


def validate(text: str, schema: Any) -> None:
    kind = jsonschema.Draft202012Validator
    kind(schema, format_checker=kind.FORMAT_CHECKER).validate(json.loads(text))


def drawn(seeds: range) -> list[tuple[dict[str, Any], str]]:
    schemas = [draw_schema(seed) for seed in seeds]
    return [(schema, schema_grammar(schema)) for schema in schemas]


def answers_are_valid(llm: LLM, seeds: range) -> None:
    cases = drawn(seeds)
    asked = [params(whole, seed=i, temperature=(0.0, 1.0, 3.0)[i % 3]) for i, (_, whole) in enumerate(cases)]
    completions = llm.generate([[i % 256] for i in range(len(cases))], asked, progress=False)
    complete = 0
    for (schema, _), completion in zip(cases, completions, strict=True):
        assert completion.error is None
        if completion.finish_reason == "stop":
            validate(completion.text, schema)
            complete += 1
    assert complete >= 0.97 * len(cases)  # the others met max_tokens


def test_every_complete_answer_of_a_random_model_is_valid(llm: LLM):
    answers_are_valid(llm, range(60))


@pytest.mark.more
def test_three_hundred_more_schemas(llm: LLM):
    answers_are_valid(llm, range(1000, 1300))


@pytest.mark.parametrize(
    ("expression", "pattern"),
    [
        (grammar.matching(r"[a-c]{3}/\d+x?"), r"[a-c]{3}/[0-9]+x?"),
        (grammar.one_of(map(grammar.literal, ["left", "right", 'a "b"\n'])), r'left|right|a "b"\n'),
        (
            grammar.lark('root ::= "(" item ("," item)* ")"\nitem ::= [0-9] | "x"'),
            r"\(([0-9]|x)(,([0-9]|x))*\)",
        ),
        (grammar.lark('start: "a" B\nB: /[xy]{2}/'), r"a[xy]{2}"),
        (grammar.repeated(grammar.literal("ab"), between=r"/\n?/"), r"ab(\n?ab)*"),
    ],
)
def test_expressions_mean_what_regular_expressions_do(llm: LLM, expression: str, pattern: str):
    whole = grammar.grammar(expression)
    grammar.check(whole)
    asked = [params(whole, seed=seed, max_tokens=120) for seed in range(8)]
    for completion in llm.generate([[1, 2]] * 8, asked, progress=False):
        assert completion.finish_reason == "stop"
        assert re.fullmatch(pattern, completion.text)


@pytest.mark.parametrize("begun", [False, True])
def test_reasoning_is_free_and_the_answer_after_it_is_not(llm: LLM, begun: bool):
    after = grammar.Reasoning(begin="<think>", end="</think>", begun=begun)
    whole = grammar.grammar(grammar.json_value({"type": "boolean"}), after=after)
    begin = "" if begun else "<think>"
    free = continued(llm, whole, begin, max_tokens=20)
    assert not any(re.search("true|false|</think>", text) for text in free)
    assert len(set(free)) == len(free)
    thought = begin + "so {it} is\n</think>"
    assert {text.strip() for text in continued(llm, whole, thought, max_tokens=60)} == {"true", "false"}
    if not begun:  # a model need not think
        assert set(continued(llm, whole, "t", max_tokens=60)) == {"rue"}


def continued(llm: LLM, whole: str, output: str, *, max_tokens: int) -> list[str]:
    """What several requests add to an output that began so."""
    core, begun = llm._open(), llm.tokenizer.encode(output)
    for i in range(8):
        sampling = params(whole, seed=i, max_tokens=len(begun) + max_tokens)
        core.add(AddRequest(id=str(i), prompt_ids=[3], sampling=sampling, output_ids=begun))
    found: dict[str, list[int]] = {}
    while core.has_work():
        for output_ in core.step():
            assert output_.error is None
            found.setdefault(output_.id, []).extend(output_.token_ids)
    return [llm.tokenizer.decode(ids) for ids in found.values()]


def test_tool_calls_name_tools_and_follow_their_schemas(llm: LLM):
    move = {
        "type": "object",
        "properties": {"by": {"enum": [1, 2]}},
        "required": ["by"],
        "additionalProperties": False,
    }
    written = '<call>\n{{"name": "{name}", "arguments": {arguments}}}\n</call>'
    whole = grammar.grammar(
        grammar.repeated(
            grammar.tool_calls([("move", move), ("stop", {"enum": [{}]})], written), between=r"/\n?/"
        )
    )
    asked = [params(whole, seed=seed) for seed in range(10)]
    for completion in llm.generate([[5]] * 10, asked, progress=False):
        calls = re.findall(r"<call>\n(.*?)\n</call>\n?", completion.text, flags=re.DOTALL)
        if completion.finish_reason == "stop":
            assert calls
            assert re.fullmatch(r"(<call>\n[^<]*\n</call>\n?)+", completion.text)
        for call in map(json.loads, calls):
            validate(json.dumps(call["arguments"]), move if call["name"] == "move" else {"enum": [{}]})


def test_an_answer_that_max_tokens_cuts_is_the_beginning_of_the_whole_one(llm: LLM):
    whole = schema_grammar({"type": "array", "items": {"type": "integer"}, "minItems": 20, "maxItems": 20})
    (long,), (cut,) = (llm.generate([[9]], params(whole, max_tokens=n), progress=False) for n in (400, 7))
    assert (long.finish_reason, cut.finish_reason) == ("stop", "length")
    assert cut.token_ids == long.token_ids[:7]


def test_the_end_of_the_sequence_comes_only_where_the_grammar_ends(llm: LLM):
    whole = grammar.grammar(grammar.matching("[0-9]{4,9}"))
    asked = [params(whole, seed=seed, logit_bias={END: 100.0}) for seed in range(6)]
    for completion in llm.generate([[9]] * 6, asked, progress=False):
        assert re.fullmatch("[0-9]{4}", completion.text)
        assert completion.token_ids[-1] == END


def test_min_tokens_holds_back_the_end_as_far_as_the_grammar_goes_on(llm: LLM):
    for pattern, length in (("[0-9]{1,9}", 6), ("[0-9]{3}", 3)):
        asked = params(grammar.grammar(grammar.matching(pattern)), logit_bias={END: 100.0}, min_tokens=6)
        (completion,) = llm.generate([[9]], asked, progress=False)
        assert (len(completion.text), completion.finish_reason, completion.error) == (length, "stop", None)


def test_log_probabilities_are_those_of_the_model_without_the_grammar(llm: LLM):
    whole = schema_grammar({"type": "integer", "minimum": 100, "maximum": 999})
    (free,) = llm.generate([[4, 5]], SamplingParams(max_tokens=1, logprobs=3), progress=False)
    (bound,) = llm.generate([[4, 5]], params(whole, logprobs=3), progress=False)
    assert free.logprobs is not None
    assert bound.logprobs is not None
    for one, other in zip(bound.logprobs[0].top, free.logprobs[0].top, strict=True):
        assert one == pytest.approx(other, abs=1e-5)
    assert bound.logprobs[0].logprob < free.logprobs[0].logprob


def mixed(count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Requests with grammars and without, sampled and greedy, whose outputs repeat themselves."""
    listed = schema_grammar(
        {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 4, "maxItems": 9}
    )
    kinds = [
        params(listed, max_tokens=90),
        params("", max_tokens=60),
        params(listed, temperature=0.0, max_tokens=90, min_tokens=5),
        params(
            grammar.grammar(grammar.matching("(ab|cd){12}")),
            max_tokens=60,
            temperature=0.7,
            frequency_penalty=0.3,
        ),
    ]
    prompts = [[(7 * i + j) % 256 for j in range(1 + i % 9)] for i in range(count)]
    return prompts, [kinds[i % len(kinds)] for i in range(count)]


@pytest.fixture(scope="module")
def wanted(llm: LLM) -> list[list[int]]:
    """What each request of `mixed` gets when it comes alone."""
    return [llm.generate([p], [s], progress=False)[0].token_ids for p, s in zip(*mixed(12), strict=True)]


@pytest.mark.parametrize(
    "flags",
    [
        {"speculative_algorithm": "ngram"},
        {"max_total_tokens": 192, "page_size": 4, "max_running_requests": 12},
        {"chunked_prefill_size": 3, "max_running_requests": 5},
    ],
    ids=["drafts", "preemption", "chunks"],
)
def test_answers_are_the_same_however_they_are_computed(
    tiny_folder: Path, wanted: list[list[int]], flags: dict[str, Any]
):
    with LLM(str(tiny_folder), **(SETTINGS | flags)) as other:
        found = other.generate(*mixed(12), progress=False)
        stats = other.stats()
    assert [completion.token_ids for completion in found] == wanted
    assert stats.spec_accepted_tokens > 0 or "speculative_algorithm" not in flags
    assert stats.preemptions > 0 or "page_size" not in flags


def on_rank(rank: Rank, config: Config) -> list[list[int]]:
    with LLM.from_config(config, rank.launched()) as llm:
        return [completion.token_ids for completion in llm.generate(*mixed(12), progress=False)]


@pytest.mark.parametrize(
    "sizes",
    [{"tp_size": 2, "dp_size": 2, "ep_size": 2, "enable_dp_attention": True}, {"tp_size": 2, "ep_size": 2}],
)
def test_every_rank_forbids_alike(
    ranks: Pools, tiny_folder: Path, wanted: list[list[int]], sizes: dict[str, Any]
):
    config = load(Config, {"model": str(tiny_folder), "speculative_algorithm": "ngram", **SETTINGS, **sizes})
    assert ranks(2).run(on_rank, config) == [wanted, wanted]


def test_a_resumed_answer_goes_on_where_its_grammar_was(llm: LLM, wanted: list[list[int]]):
    prompts, asked = mixed(12)
    core = llm._open()
    for cut in (1, 5):
        for i, (prompt, sampling, whole) in enumerate(zip(prompts, asked, wanted, strict=True)):
            core.add(
                AddRequest(id=f"{cut}-{i}", prompt_ids=prompt, sampling=sampling, output_ids=whole[:cut])
            )
        found: dict[str, list[int]] = {}
        while core.has_work():
            for output in core.step():
                found[output.id] = found.get(output.id, []) + output.token_ids
        assert found == {f"{cut}-{i}": whole[cut:] for i, whole in enumerate(wanted)}


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        (
            {"type": "object", "properties": {"a": {"not": {}}}},
            "schema.properties.a: keyword 'not' is not supported",
        ),
        ({"propertees": {}}, "keyword 'propertees' is not supported; did you mean 'properties'?"),
        ({"type": "array", "uniqueItems": True}, "keyword 'uniqueItems' is not supported"),
        ({"type": "string", "format": "color"}, "Unknown format: color"),
        ({"type": "string", "pattern": "(a"}, "pattern: regex parse error"),
        ({"$ref": "#/$defs/none"}, "$ref: Pointer '/$defs/none' does not exist"),
        ({"type": "strng"}, "Invalid type: strng"),
        ({"type": "integer", "minimum": 3, "maximum": 1}, "minimum (3) is greater than maximum (1)"),
        ({"type": "number", "exclusiveMinimum": True}, "exclusiveMinimum must be the limit itself, a number"),
        ({"oneOf": [{"type": "string"}, {"minLength": 2}]}, "oneOf constraints are not supported"),
        ({"x-guidance": {"lenient": True}}, "keyword 'x-guidance' is not supported"),
        (
            {"type": "object", "minProperties": 2},
            "schema: minProperties 2 cannot be kept where keys are free",
        ),
        ({"items": [3]}, "schema.items.0: must be a JSON schema"),
        (False, "Unsatisfiable schema"),
        ({"enum": [str(i) for i in range(20_000)]}, "bytes, at most"),
        ({"allOf": [{"anyOf": [{"properties": {f"{k}{i}": {}}} for k in "ab"]} for i in range(12)]}, "too"),
    ],
)
def test_a_schema_that_cannot_be_followed_is_refused_with_the_keyword(schema: Any, reason: str):
    with pytest.raises(UserError) as caught:
        grammar.check(schema_grammar(schema))
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_schemas_nested_too_deep_are_refused():
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(grammar.MAX_DEPTH + 1):
        schema = {"type": "array", "items": schema}
    with pytest.raises(UserError, match=r"nested|levels deep"):
        schema_grammar(schema)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: grammar.matching("(a"), "unclosed group"),
        (lambda: grammar.matching("(?=a)b"), "look-around"),
        (lambda: grammar.lark("root ::= missing"), "Rule 'missing' not found"),
        (lambda: grammar.lark('start: "a" missing'), 'unknown name: "missing"'),
        (lambda: grammar.lark("hello world"), "neither Lark nor GBNF"),
        (
            lambda: grammar.tool_calls([("f", {"not": {}})], "{name}({arguments})"),
            "tool 'f': schema",
        ),
    ],
)
def test_other_expressions_that_mean_nothing_are_refused(make: Any, reason: str):
    with pytest.raises(UserError) as caught:
        grammar.check(grammar.grammar(make()))
    assert reason in str(caught.value)


def test_what_cannot_be_combined_or_compiled_is_refused_offline(llm: LLM):
    whole = schema_grammar({"type": "null"})
    with pytest.raises(UserError, match="ignore_eos"):
        llm.generate("x", params(whole, ignore_eos=True), progress=False)
    with pytest.raises(UserError, match="prompt 2 of 2: Unimplemented"):
        llm.generate(["x", "y"], [params(whole), params('start: %json {"not": {}}')], progress=False)
