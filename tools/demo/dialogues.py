"""What the demo model is trained on and measured with: conversations of every kind, drawn without end.

Training draws from all stories (tools/demo/stories but unseen.py), retold (paraphrase.py), from plain arithmetic,
tool calls and JSON answers; half of it with words, names and keys that are made up as it goes (words.py). Held-out conversations use templates, phrasings, names of tools and keys that training
never sees.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tools.demo import calls, fields, sums, wordmath, words
from tools.demo.chat import Message, Tools
from tools.demo.paraphrase import paraphrased
from tools.demo.stories import DRAWN, frames, scenes, told, unseen
from tools.demo.stories.draw import Draw, Story
from tools.demo.wording import Wording, cap
from turnout.evals.wordmath import extract_answer

SYSTEM_SHARE, THINKING_SHARE, OFFERED_ANYWAY = 0.08, 0.15, 0.03
_SYSTEMS = (
    "You are a helpful assistant.", "You are a math tutor. Think step by step.", "Answer the question.",
    "Solve the problem. End with #### and the answer.", "You are Turnout's demo model.", "Be brief.",
    "You can call tools.", "You are a careful assistant that answers in English.", "Use the tools when they help.",
)  # fmt: skip
_GREETINGS = (
    "Hello", "Hi", "Hello!", "hi there", "Good morning", "Hey", "How are you?", "Who are you?", "What can you do?", "Help",
    "What are you?", "Thanks!", "Thank you", "Tell me a joke.", "Write a poem.", "What is the capital of France?", "bye",
    "Tell me about yourself", "Can you help me?", "What's your name?", "Translate this into German.", "ok", "Who made you?",
)  # fmt: skip
_INTRODUCTION = (
    "I am a small demo model. I solve sums and word problems, call tools and fill in JSON. "
    "Try: Anna has 12 apples and gives 5 to Tom. How many are left?"
)


@dataclass(frozen=True)
class Conversation:
    """Ends with the assistant's answer. `thought` in an answer is what it thinks; skip: answers at the start that are
    not learned, as their thoughts are not shown again."""

    messages: list[Message]
    tools: Tools = field(default_factory=list)
    skip: int = 0


def stream(seed: str) -> Iterator[Conversation]:
    """Endless training conversations."""
    rng = random.Random(f"dialogues {seed}")
    while True:
        yield _draw(Wording(rng, unseen=False))


def word_problems(seed: str) -> Iterator[Conversation]:
    """Endless problems from the templates of `turnout eval --task wordmath`, each a conversation."""
    rng = random.Random(f"word problems {seed}")
    while True:
        story = _template(rng)
        yield Conversation([_user(story.question), _answered(story, thinks=False)])


def _draw(d: Wording) -> Conversation:
    kind = d.rng.random()
    if kind < 0.012:
        return Conversation([*_system(d), _user(d.one(*_GREETINGS)), _assistant(_INTRODUCTION)])
    if kind < 0.24:
        return _tool_conversation(d)
    if kind < 0.38:
        return _json_conversation(d)
    messages = _system(d)
    tools = calls.varied(d).offered.tools if d.chance(OFFERED_ANYWAY) else []
    for _ in range(d.one(1, 1, 1, 1, 1, 1, 1, 2)):
        story = problem(Wording(d.rng, d.unseen), sums_too=not tools)
        thinks = len(messages) <= 1 and d.chance(THINKING_SHARE)
        messages += [_user(story.question), _answered(story, thinks)]
        if thinks:
            break
    return Conversation(messages, tools)


def problem(d: Wording, sums_too: bool = True) -> Story:
    """A word problem or a sum, as training tells it (or, if `d.unseen`, in held-out phrasings)."""
    kind = d.rng.random()
    if kind < 0.16 and sums_too:
        story = d.one(*sums.STORIES)(d)
        return story if d.chance(0.85) else paraphrased(Wording(d.rng, d.unseen), story)
    if kind < 0.36 and not d.unseen:
        story = _template(d.rng)
        return story if d.chance(0.25) else paraphrased(d, story)
    if kind < 0.70 and not d.unseen:
        story = frames.framed(d)
        return story if d.chance(0.4) else paraphrased(d, story)
    story = d.one(*told.STORIES)(d) if kind < 0.90 or d.unseen else d.one(*scenes.STORIES)(d)
    return story if d.chance(0.3) else paraphrased(d, story)


def _template(rng: random.Random) -> Story:
    """From the templates whose held-out numbers `turnout eval --task wordmath` asks."""
    while True:
        template = DRAWN[int(rng.random() * len(DRAWN))]
        story = template(Draw(rng))
        if wordmath.split_of(template.__name__, story.question) == "train":
            return story


def _answered(story: Story, thinks: bool) -> Message:
    steps = "\n".join(story.steps)
    if thinks:
        return _assistant(f"The answer is {story.answer}.\n#### {story.answer}", thought=steps)
    return _assistant(f"{steps}\n#### {story.answer}")


def _tool_conversation(d: Wording) -> Conversation:
    t = calls.dialogue(d) if d.chance(0.25) else calls.varied(d)
    messages = [*_system(d), _user(t.question), _called(t.calls)]
    thinks = d.chance(THINKING_SHARE)
    thought = "I call " + " and ".join(call.name for call in t.calls) + "." if thinks else None
    if thought is not None and d.chance(0.5):
        messages[-1]["thought"] = thought
        return Conversation(messages, t.offered.tools)
    messages += [{"role": "tool", "content": result} for result in t.results]
    answer = _assistant(t.answer, thought="I have the result." if thinks else None)
    return Conversation([*messages, answer], t.offered.tools, skip=int(thinks))


def _json_conversation(d: Wording) -> Conversation:
    if d.chance(0.2):
        question, value = fields.worked(d, _short(d))
    else:
        question, value = fields.extraction(d) if d.chance(0.25) else fields.varied(d)
    thought = "The keys are " + ", ".join(value) + "." if d.chance(THINKING_SHARE) else None
    answer = _assistant(json.dumps(value, ensure_ascii=False), thought)
    return Conversation([*_system(d), _user(question), answer])


def _short(d: Wording) -> Story:
    while len((story := problem(Wording(d.rng, d.unseen), sums_too=False)).steps) > 4:
        pass
    return story


def _system(d: Wording) -> list[Message]:
    if not d.chance(SYSTEM_SHARE):
        return []
    any_words = not d.unseen and d.chance(0.4)
    return [{"role": "system", "content": cap(words.phrase(d, 9)) + "." if any_words else d.one(*_SYSTEMS)}]


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _assistant(text: str, thought: str | None = None) -> Message:
    return {"role": "assistant", "content": text} | ({} if thought is None else {"thought": thought})


def _called(made: list[calls.Call]) -> Message:
    written = [
        {"type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in made
    ]
    return {"role": "assistant", "content": "", "tool_calls": written}


@dataclass(frozen=True)
class Item:
    """What is asked in measuring, and what must come back. form: `number` (the last `#### N`), `calls` (a list of
    {"name", "arguments"}), `json` (a value) or `contains` (texts that the answer must hold)."""

    group: str
    messages: list[Message]
    form: str
    expected: Any
    tools: Tools = field(default_factory=list)
    thinking: bool = False

    def right(self, text: str) -> bool:
        """Whether the model's raw `text`, thoughts and marks included, is what is expected."""
        said = text.rpartition("</think>")[2].strip()
        if self.form == "number":
            return extract_answer(said) == self.expected
        if self.form == "contains":
            return all(part in said for part in self.expected)
        try:
            if self.form == "calls":
                found = [part.partition("</tool_call>")[0] for part in said.split("<tool_call>")[1:]]
                return [json.loads(part) for part in found] == self.expected
            return bool(json.loads(said) == self.expected)
        except ValueError:
            return False


def heldout(count: int, seed: int, unseen: bool = True) -> list[Item]:
    """`count` items of every group. unseen: in phrasings, names of tools and keys that training never sees."""
    makers: dict[str, Callable[[Wording], Item]] = {
        "templates": _unseen_template, "phrasings": _unseen_phrasing, "sums": _unseen_sum, "calls": _unseen_calls,
        "results": _unseen_results, "json": _unseen_json, "thinking": _unseen_thinking,
    }  # fmt: skip
    known = [
        Item("wording", [_user(p.question)], "number", p.final)
        for p in wordmath.generate("heldout", count, seed)
    ]
    items = known
    for group, make in makers.items():
        rng = random.Random(f"heldout {group} {seed}")
        items = items + [make(Wording(rng, unseen=unseen)) for _ in range(count)]
    return items


def _numbered(group: str, story: Story, thinking: bool = False) -> Item:
    return Item(group, [_user(story.question)], "number", str(int(story.answer)), thinking=thinking)


def _unseen_template(d: Wording) -> Item:
    return _numbered("templates", d.one(*unseen.STORIES)(Draw(d.rng)))


def _unseen_phrasing(d: Wording) -> Item:
    return _numbered("phrasings", problem(d, sums_too=False))


def _unseen_sum(d: Wording) -> Item:
    return _numbered("sums", d.one(*sums.STORIES)(d))


def _unseen_thinking(d: Wording) -> Item:
    return _numbered("thinking", problem(d), thinking=True)


def _unseen_calls(d: Wording) -> Item:
    t = calls.dialogue(d)
    made = [{"name": call.name, "arguments": call.arguments} for call in t.calls]
    return Item("calls", [*_system(d), _user(t.question)], "calls", made, t.offered.tools)


def _unseen_results(d: Wording) -> Item:
    t = calls.dialogue(d)
    results = [{"role": "tool", "content": result} for result in t.results]
    values = [line.split(" = ")[1].split()[0] for line in t.answer.split("\n")]
    messages = [_user(t.question), _called(t.calls), *results]
    return Item("results", messages, "contains", values, t.offered.tools)


def _unseen_json(d: Wording) -> Item:
    question, value = fields.extraction(d)
    return Item("json", [_user(question)], "json", value)
