"""What the demo model is trained with: right, written as the chat template writes it, apart from what it is
measured with."""

from __future__ import annotations

import json
import random
import re
from itertools import islice

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from tests.tools.test_wordmath import EQUATION, evaluate
from tools.demo import calls, fields, paraphrase, sums, words
from tools.demo.chat import CHAT_TEMPLATE, END, prompt, segments
from tools.demo.dialogues import Conversation, heldout, stream
from tools.demo.numbers import spelled
from tools.demo.stories import frames, scenes, told, unseen
from tools.demo.stories.draw import Draw
from tools.demo.wording import HELDOUT_NOUNS, Wording

COUNT = 3000


@pytest.fixture(scope="module")
def conversations() -> list[Conversation]:
    return list(islice(stream("test"), COUNT))


def rendered(messages: list, tools: list, **kwargs: object) -> str:
    # The documented way to render without a tokenizer; apply_chat_template calls it.
    return render_jinja_template([messages], tools=tools or None, chat_template=CHAT_TEMPLATE, **kwargs)[0][0]


def test_pieces_are_what_the_chat_template_writes(conversations):
    plain = [c for c in conversations if not any("thought" in m for m in c.messages)][:300]
    assert any(c.tools for c in plain)
    for c in plain:
        assert "".join(text for text, _ in segments(c.messages, c.tools)) == rendered(c.messages, c.tools)


@pytest.mark.parametrize("thinking", [False, True])
def test_prompts_are_what_the_chat_template_writes(thinking):
    for item in heldout(6, seed=1):
        expected = rendered(item.messages, item.tools, add_generation_prompt=True, enable_thinking=thinking)
        assert prompt(item.messages, item.tools, thinking) == expected


def test_only_answers_are_learned(conversations):
    for c in conversations:
        pieces = list(segments(c.messages, c.tools))
        learned = [text for text, own in pieces if own]
        assert len(learned) == sum(m["role"] == "assistant" for m in c.messages)
        assert all(text.endswith(END) for text in learned)


@pytest.mark.parametrize("unseen_words", [False, True])
def test_every_equation_holds_and_leads_to_the_answer(unseen_words):
    """Python's own parser evaluates both sides."""
    rng = random.Random(3)
    for _ in range(COUNT):
        d = Wording(rng, unseen_words)
        story = d.one(*told.STORIES, *scenes.STORIES, *sums.STORIES, *frames.STORIES)(d)
        results = []
        for step in story.steps:
            equation = EQUATION.search(step)
            assert equation, step
            values = {evaluate(side) for side in equation.group().split(" = ")}
            assert len(values) == 1, step
            results.append(values.pop())
        assert results[-1] == story.answer, story


def test_retelling_keeps_the_numbers():
    rng = random.Random(4)
    for _ in range(500):
        d = Wording(rng, False)
        story = told.groups(d)
        words = paraphrase.paraphrased(d, story).question.lower().replace("-", " ").replace(" and ", " ")
        for number in re.findall(r"\d+", story.question):
            assert re.search(rf"\b{number}\b", words) or spelled(int(number), " ") in words, (story, words)


def test_held_out_words_are_not_in_training(conversations):
    text = " ".join(m["content"] for c in conversations for m in c.messages).lower()
    assert not [noun for noun in HELDOUT_NOUNS if re.search(rf"\b{noun}s?\b", text)]
    names = {tool["function"]["name"] for c in conversations for tool in c.tools}
    assert not names & {"arithmetic", "do_sum", "converter", "unit_convert"}
    assert not json_keys(conversations) & {"buyer", "article", "pieces", "price_each", "location"}
    phrases = (
        "do you know|comes to how much|figure out|i wonder what|let the machine|two things|turn it into json|"
        "would be how many|together with|split by|reduced by|was born|is the home of|we shipped"
    )
    for phrase in phrases.split("|"):
        assert phrase not in text, phrase


def json_keys(conversations: list[Conversation]) -> set[str]:
    answers = [c.messages[-1]["content"] for c in conversations]
    return {key for text in answers if text.startswith("{") for key in json.loads(text)}


def test_training_is_varied(conversations):
    """Names and keys hardly come twice, so that they can only be copied from the prompt."""
    offered = [tool["function"] for c in conversations for tool in c.tools]
    assert len({tool["name"] for tool in offered}) > 0.4 * len(offered)
    assert len({key for tool in offered for key in tool["parameters"]["properties"]}) > 300
    assert len(json_keys(conversations)) > 300
    openings = [" ".join(c.messages[-1]["content"].split()[:3]) for c in conversations]
    assert len(set(openings)) > 1000


def test_arguments_can_be_read_off_the_request():
    rng = random.Random(6)
    for _ in range(800):
        t = calls.varied(Wording(rng, False))
        offered = {
            tool["function"]["name"]: tool["function"]["parameters"]["properties"] for tool in t.offered.tools
        }
        assert len(offered) == len(t.offered.tools)
        for call in t.calls:
            assert list(call.arguments) == list(offered[call.name])
            if call.name != t.offered.calculator[0]:
                assert all(str(value).lower() in t.question.lower() for value in call.arguments.values()), t


def test_facts_can_be_read_off_the_text():
    rng = random.Random(7)
    for _ in range(800):
        question, value = fields.varied(Wording(rng, False))
        for key, fact in value.items():
            assert key in question
            assert isinstance(fact, bool) or str(fact) in question, (question, value)


def test_made_up_words_are_never_held_out_ones():
    d = Wording(random.Random(8), False)
    made = {words.made_up(d) for _ in range(30_000)}
    assert len(made) > 25_000
    assert not made & words.KEPT_OUT


def test_no_training_question_is_told_like_a_held_out_template(conversations):
    """Compared by their words without numbers and names: few runs of six words are shared."""

    def runs(text: str) -> set[tuple[str, ...]]:
        words = re.findall(r"[a-z]+", text.lower())
        return {tuple(words[i : i + 6]) for i in range(len(words) - 5)}

    known: set[tuple[str, ...]] = set()
    for c in conversations:
        for message in c.messages:
            if message["role"] == "user":
                known |= runs(message["content"])
    alike = []
    for template in unseen.STORIES:
        told_so = runs(template(Draw(random.Random(1))).question)
        if len(told_so & known) > 0.2 * len(told_so):
            alike.append((template.__name__, told_so & known))
    assert not alike


def test_what_is_expected_is_right_and_other_answers_are_not():
    for item in heldout(8, seed=2):
        if item.form == "number":
            assert item.right(f"<think>\n1\n</think>\n\nwork\n#### {item.expected}")
            assert not item.right(f"#### {item.expected}1")
        elif item.form == "calls":
            written = "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in item.expected)
            assert item.right(written)
            assert not item.right(written.replace("arguments", "args"))
            assert not item.right("no call")
        elif item.form == "json":
            assert item.right(json.dumps(item.expected))
            assert not item.right("{")


@pytest.mark.parametrize(
    ("n", "words"),
    [
        (0, "zero"),
        (13, "thirteen"),
        (40, "forty"),
        (345, "three hundred forty-five"),
        (2001, "two thousand one"),
    ],
)
def test_spelled(n, words):
    assert spelled(n) == words
