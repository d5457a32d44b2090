"""What a chat template writes is what the parser reads, however the text is cut; nothing is ever lost."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.server.api.parsing.formats import PUBLISHED, render
from turnout.server.api.parsing import harmony, tagged
from turnout.server.api.parsing.parts import Arguments, Call, Part, Reasoning, Text, merged
from turnout.server.api.parsing.registry import CALL_PARSERS, Parsers

QUICK = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
FAMILIES = sorted(PUBLISHED)
WORDS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), min_size=1, max_size=12)
PIECES = [
    "<",
    "</",
    "<tool",
    "<|",
    "think>",
    "{",
    '"',
    "\\",
    "\n",
    "call>",
    "｜",
    "a b",
    "é",
    "🦉",
    "``",
    "}",
]
ODD = st.lists(st.sampled_from(PIECES), max_size=6).map("".join)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(-1e9, 1e9) | ODD,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("xyz"), inner, max_size=3),
    max_leaves=6,
)
KINDS: dict[str, st.SearchStrategy[Any]] = {
    "string": ODD | WORDS,
    "integer": st.integers(-(2**53), 2**53),
    "number": st.floats(-1e9, 1e9, allow_subnormal=False),
    "boolean": st.booleans(),
    "null": st.none(),
    "array": st.lists(JSON, max_size=3),
    "object": st.dictionaries(st.sampled_from(["k", "a b", "ü"]), JSON, max_size=3),
}
SCHEMA = {"type": "object", "properties": {f"a_{kind}": {"type": kind} for kind in KINDS}}
SCHEMAS = {"get_weather": SCHEMA, "f": SCHEMA}
ARGUMENTS = st.fixed_dictionaries({}, optional={f"a_{kind}": values for kind, values in KINDS.items()})
CALLS = st.lists(
    st.fixed_dictionaries({"name": st.sampled_from(sorted(SCHEMAS)), "arguments": ARGUMENTS}), max_size=3
)
PROSE = st.lists(st.sampled_from(["Let me look.", "2 < 3", "`x`", "a\n\nb", "<b>", "ü🦉", "{}"]), max_size=3)
TEXT = PROSE.map(" ".join)


def cut(text: str, at: list[int]) -> list[str]:
    """`text` in pieces that end at each place of `at`."""
    places = sorted({0, len(text), *(place % (len(text) + 1) for place in at)})
    return [text[a:b] for a, b in itertools.pairwise(places)]


def parse(family: str, pieces: list[str], opening: str = "", *, length: bool = False) -> list[Part]:
    return merged(parts_of(family, pieces, opening, length=length))


def parts_of(
    family: str, pieces: list[str], opening: str = "", *, length: bool = False, streams: bool = False
) -> list[Part]:
    """As they are handed out."""
    parsers = Parsers(CALL_PARSERS[family], CALL_PARSERS[family])
    parser = parsers.parser(SCHEMAS, opening, streams_arguments=streams)
    assert parser is not None
    found = [part for piece in pieces for part in parser.push(piece)]
    return found + parser.finish(cut=length)


def plain(parts: list[Part]) -> tuple[str, str, list[tuple[str, Any]]]:
    return (
        "".join(part.text for part in parts if isinstance(part, Reasoning)),
        "".join(part.text for part in parts if isinstance(part, Text)),
        [(part.name, json.loads(part.arguments)) for part in parts if isinstance(part, Call)],
    )


def expressible(family: str, calls: list[dict[str, Any]]) -> bool:
    """Whether the family's format can hold these arguments: none escapes its own marks."""
    written = json.dumps(calls, ensure_ascii=False)
    return not any(mark in written for mark in PUBLISHED[family].forbidden)


@pytest.mark.parametrize("family", FAMILIES)
@QUICK
@given(st.booleans(), TEXT, TEXT, CALLS, st.lists(st.integers(0, 500), max_size=8))
def test_a_rendered_answer_is_read_back(
    family: str, streams: bool, reasoning: str, content: str, calls: list[dict[str, Any]], at: list[int]
):
    if not expressible(family, calls):
        return
    written = render(family, reasoning=reasoning, content=content, calls=calls)
    read = plain(merged(parts_of(family, cut(written, at), streams=streams)))
    assert read == (reasoning, content, [(call["name"], call["arguments"]) for call in calls])


@pytest.mark.parametrize("family", FAMILIES)
def test_every_cut_in_two_and_single_characters(family: str):
    calls = [
        {"name": "get_weather", "arguments": {"a_string": 'Ulm "</tool" \\ <', "a_integer": 3}},
        {"name": "f", "arguments": {}},
    ]
    written = render(family, reasoning="Hm.\n\nYes.", content="Look:", calls=calls)
    expected = ("Hm.\n\nYes.", "Look:", [(call["name"], call["arguments"]) for call in calls])
    for streams in (False, True):
        for pieces in (
            [written],
            list(written),
            *([written[:at], written[at:]] for at in range(len(written))),
        ):
            assert plain(merged(parts_of(family, pieces, streams=streams))) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_an_unfinished_call_is_text_and_never_broken_json(family: str):
    calls = [{"name": "f", "arguments": {"a_string": "x", "a_object": {"k": 1}}}]
    written = render(family, reasoning="", content="Go.", calls=calls)
    whole = [(call["name"], call["arguments"]) for call in calls]
    for at in range(len(written)):
        _, text, read = plain(parse(family, [written[:at]], length=True))
        assert read in ([], whole)
        if not read and "Go." in written[:at]:
            assert text.startswith("Go.")
        if at == len(written) // 2:
            assert not read


@pytest.mark.parametrize("family", FAMILIES)
@QUICK
@given(data=st.data())
def test_noise_raises_nothing_and_depends_on_no_cut(family: str, data: st.DataObject):
    """Marks in any order, with broken JSON between them, are read alike in any pieces."""
    calls = [{"name": "f", "arguments": {"a_string": "x"}}]
    pieces = [*render(family, reasoning="r", content="c", calls=calls).split("f"), *PIECES, '{"a": NaN}', "f"]
    noise = "".join(data.draw(st.lists(st.sampled_from(pieces), max_size=8)))
    at = data.draw(st.lists(st.integers(0, 300), max_size=6))
    read = plain(parse(family, [noise]))
    assert plain(parse(family, cut(noise, at))) == read
    for _, arguments in read[2]:
        assert isinstance(arguments, dict)


# Families that write arguments as JSON, so that these can be handed out while they are written.
WRITES_JSON = ["deepseek_v3", "deepseek_v31", "gpt_oss", "kimi_k2", "qwen3"]


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("family", FAMILIES)
def test_arguments_are_handed_out_while_they_are_written(family: str):
    arguments = {"a_string": 'x = {"y": 1}\\ "}"', "a_array": [{"k": []}], "a_object": {}}
    calls = [{"name": "f", "arguments": arguments}, {"name": "get_weather", "arguments": {}}]
    written = render(family, reasoning="", content="", calls=calls)
    parts = parts_of(family, list(written), streams=True)
    begun = [at for at, part in enumerate(parts) if isinstance(part, Call)]
    if family not in WRITES_JSON:
        assert not any(isinstance(part, Arguments) for part in parts)
        return
    given = [part.text for part in parts[: begun[1]] if isinstance(part, Arguments)]
    assert "".join(given) == json.dumps(arguments)
    assert len(given) > 0.8 * len(json.dumps(arguments))  # a character each, but for escapes
    assert not any(map(is_json, itertools.accumulate(given[:-1])))
    assert [isinstance(part, Arguments) and part.last for part in parts].count(True) == 2


@pytest.mark.parametrize("family", WRITES_JSON)
def test_an_unfinished_call_that_is_handed_out_is_left_open_and_never_json(family: str):
    calls = [{"name": "f", "arguments": {"a_string": "x}", "a_object": {"k": 1}}}]
    written = render(family, reasoning="", content="Go.", calls=calls)
    whole = json.dumps(calls[0]["arguments"])
    lengths = []
    for at in range(len(written)):
        pieces = list(written[:at])
        found = merged(parts_of(family, pieces, length=True, streams=True))
        found_calls = [part for part in found if isinstance(part, Call)]
        lengths.append(len(found_calls[0].arguments) if found_calls else 0)
        for call in found_calls:
            assert whole.startswith(call.arguments)
            assert is_json(call.arguments) is not call.open
        if not found_calls and "Go." in written[:at]:
            assert plain(found)[1].startswith("Go.")
    assert {*range(2, len(whole))} <= set(lengths)


@pytest.mark.parametrize("family", WRITES_JSON)
@QUICK
@given(data=st.data())
def test_what_is_handed_out_depends_on_no_cut(family: str, data: st.DataObject):
    """Broken arguments, functions that are not offered, several calls, in any pieces."""
    calls = [{"name": "f", "arguments": {"a_string": "x\\", "a_array": [1]}}]
    pieces = [*render(family, reasoning="r", content="c", calls=calls).split("x"), *PIECES, "]", "g", "f"]
    noise = "".join(data.draw(st.lists(st.sampled_from(pieces), max_size=8)))
    at, length = data.draw(st.lists(st.integers(0, 300), max_size=6)), data.draw(st.booleans())

    def read(pieces: list[str]) -> list[Any]:
        found = merged(parts_of(family, pieces, length=length, streams=True))
        return [replace(part, id="") if isinstance(part, Call) else part for part in found]

    expected = read([noise])
    assert read(cut(noise, at)) == expected
    assert read(list(noise)) == expected
    # The same calls are read where none is handed out before it is whole, or they are not JSON.
    whole = [part for part in parse(family, [noise], length=length) if isinstance(part, Call)]
    streamed = [part for part in expected if isinstance(part, Call) and is_json(part.arguments)]
    for call in whole:
        assert any(
            (call.name, json.loads(call.arguments)) == (other.name, json.loads(other.arguments))
            for other in streamed
        )


def test_arguments_that_are_no_json_after_all_are_handed_out_as_written():
    broken = '<tool_call>{"name": "f", "arguments": {"a": 1,, "b": "}"}}</tool_call> So.'
    call, text = merged(parts_of("qwen3", list(broken), streams=True))
    assert isinstance(call, Call)
    assert (call.name, call.arguments, call.open) == ("f", '{"a": 1,, "b": "}"}}', False)
    assert text == Text(" So.")
    unknown = '<tool_call>{"name": "g", "arguments": {"a": 1}}</tool_call>'
    (call,) = parts_of("qwen3", list(unknown), streams=True)  # which is not offered
    assert call == Call("g", '{"a": 1}', call.id)


MALFORMED = {
    "qwen3": "<tool_call>\n{'name': f}\n</tool_call>",
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=x>\n1\n</function>\n</tool_call>",
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n{}"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "deepseek_v31": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>[1]<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "deepseek_v32": (
        '<｜DSML｜function_calls><｜DSML｜invoke name="f">x</｜DSML｜invoke></｜DSML｜function_calls>'
    ),
    "deepseek_v4": "<｜DSML｜tool_calls>nothing</｜DSML｜tool_calls>",
    "glm45": "<tool_call>f\n<arg_key>x</arg_key>1</tool_call>",
    "glm47": "<tool_call></tool_call>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>f<|tool_call_end|><|tool_calls_section_end|>",
    "minimax_m2": '<minimax:tool_call><invoke name="f"><parameter>1</parameter></invoke></minimax:tool_call>',
    "gpt_oss": "<|channel|>commentary to=functions.f<|message|>{x}<|call|>",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_malformed_calls_come_back_as_they_were(family: str):
    before, after = ("Before. ", " After.") if family != "gpt_oss" else ("", "")
    written = before + MALFORMED[family] + after
    for pieces in ([written], list(written)):
        assert parse(family, pieces) == [Text(written)]


@pytest.mark.parametrize("family", FAMILIES)
def test_text_after_a_call_is_kept(family: str):
    calls = [{"name": "f", "arguments": {"a_integer": 1}}]
    more = "<|call|><|start|>assistant<|channel|>final<|message|>Done." if family == "gpt_oss" else " Done."
    written = render(family, reasoning="", content="", calls=calls) + more
    for pieces in ([written], list(written)):
        call, text = parse(family, pieces)
        assert isinstance(call, Call)
        assert text in (Text(" Done."), Text("Done."))


def test_reasoning_that_the_prompt_opened():
    for opening in ("<|im_start|>assistant\n<think>\n", "… assistant: <think>"):
        assert parse("qwen3", ["So.", "\n</think>\n\nYes."], opening) == [Reasoning("So."), Text("Yes.")]
    closed = "<|im_start|>user\n<think><|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert parse("qwen3", ["Yes."], closed) == [Text("Yes.")]


def test_what_is_not_looked_for_stays():
    text = "<think>a</think><tool_call>{}</tool_call>"
    for parsers, expected in (
        (Parsers(CALL_PARSERS["qwen3"], None), [Text(text)]),
        (Parsers(None, CALL_PARSERS["qwen3"]), [Reasoning("a"), Text("<tool_call>{}</tool_call>")]),
    ):
        parser = parsers.parser({}, "")
        assert parser is not None
        assert merged(parser.push(text) + parser.finish(cut=False)) == expected


def test_a_tag_named_in_an_answer_is_no_reasoning():
    text = "The tag <think> opens it, </think> closes it."
    assert parse("qwen3", list(text)) == [Text(text)]


@pytest.mark.parametrize("family", FAMILIES)
def test_work_is_proportional_to_what_is_new(family: str, monkeypatch: pytest.MonkeyPatch):
    """Characters that a push looks at (what was held back, and what is new) do not grow with the answer."""
    looked_at = 0

    def count(text: str, at: int, marks: tuple[str, ...]) -> int:
        nonlocal looked_at
        looked_at += len(text) - at
        return original(text, at, marks)

    original = tagged.undecided
    monkeypatch.setattr(tagged, "undecided", count)
    monkeypatch.setattr(harmony, "undecided", count)
    per_character = []
    for size in (1_000, 20_000):
        long = {"name": "f", "arguments": {"a_string": "word " * (size // 5)}}
        written = render(family, reasoning="so " * (size // 3), content="and " * (size // 4), calls=[long])
        looked_at = 0
        parse(family, [written[at : at + 4] for at in range(0, len(written), 4)])
        per_character.append(looked_at / len(written))
    assert per_character[1] <= 1.05 * per_character[0]
    assert per_character[1] < 3
