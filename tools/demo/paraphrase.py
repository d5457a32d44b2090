"""Other ways to tell the same word problem: words for numbers, synonyms, other things, facts that do not matter."""

from __future__ import annotations

import re

from tools.demo import words
from tools.demo.numbers import spelled
from tools.demo.stories.draw import Story
from tools.demo.wording import Wording, plural_of

_NUMBER = re.compile(r"(?<![\d.,$:])\d{1,4}(?![\d%]|\.\d|,\d)")
_DOLLARS = re.compile(r"\$(\d+)")
_SYNONYMS = {
    "buys": ("purchases", "gets", "picks up"), "gives": ("hands", "gives"), "altogether": ("in total", "in all"),
    "in total": ("altogether", "in all", "all together", "overall"), "each": ("each", "apiece"),
    "gets": ("receives",), "children": ("kids",), "has": ("has", "owns"), "left": ("left", "remaining", "left over"),
    "every": ("each",), "needs": ("requires", "needs"), "finds": ("discovers", "comes across"), "earns": ("makes",),
    "gives away": ("donates",), "loses": ("misplaces", "loses"), "sells": ("sells", "sells off"),
    "then": ("after that", "afterwards", "next"), "Then": ("After that,", "Afterwards,", "Next,", "Later"),
    "travels": ("goes", "moves"), "costs": ("is", "sells for", "costs"), "how many": ("how many", "what number of"),
    "together": ("together", "in total", "combined"), "starts with": ("begins with", "has"),
}  # fmt: skip
_WORDS = re.compile(r"\b(" + "|".join(sorted(map(re.escape, _SYNONYMS), key=len, reverse=True)) + r")\b")
_BEFORE = (
    "Solve this: ", "Here is a problem. ", "Please help: ", "Can you solve this? ", "Question: ", "Problem: ", "Hi! ",
    "Hello, I have a question. ", "My homework says: ", "Math problem: ", "Let's see. ", "I need help with this: ",
    "Try this one: ", "Think about this: ", "Suppose the following. ", "Read this: ", "Imagine this: ",
)  # fmt: skip
_NEW_BEFORE = ("Could you work this out for me? ", "A riddle for you: ", "Hey, quick one: ")
_AFTER = (
    " Explain.", " Show your work.", " Please answer.", " Think step by step.", " Can you tell me?", " Thanks!",
    " Give the number.", " Solve it.", " What is the answer?", " Please help me.",
)  # fmt: skip
_NEW_AFTER = (" I can't figure it out.", " Walk me through it.")
_IDLE = (
    "{n} is {k} years old.", "It is a sunny day.", "{n} likes music.", "{n} has {k} cousins.", "The shop opens at {k} "
    "o'clock.", "{n} lives in house number {k}.", "It rained for {k} days last month.", "{n} is {k} cm tall.",
    "The weather is nice.", "{n} watches {k} birds in the park.", "A bus passes every {k} minutes.", "{n} has a dog "
    "named Rex.", "{n} went to bed at {k} o'clock.", "The {t} are pretty.", "{n} does not like {t}.", "There are {k} "
    "clouds in the sky.", "Next to it lies a book with {k} pages.", "{n} bought {k} {t} for somebody else last year.",
)  # fmt: skip
_NEW_IDLE = ("{n} wears size {k}.", "The trip there took {k} minutes.", "{n} plays football on Sundays.")
_STRANGE = re.compile(r"(?<![$\w'{])[a-z]{3,}(?![\w'])")
_SENTENCE = re.compile(r"(?<=[.?!]) (?=[A-Z0-9])")


def paraphrased(d: Wording, story: Story) -> Story:
    """The same problem, told otherwise; its steps and its answer stay."""
    text = story.question
    if d.chance(0.35):
        text = _WORDS.sub(lambda m: d.one(*_SYNONYMS[m[1]]) if d.chance(0.4) else m[1], text)
    if not d.unseen and d.chance(0.25):
        text = _strange(d, text, set(" ".join(story.steps).lower().split()))
    if d.chance(0.2):
        text = _idle(d, text)
    if d.chance(0.3):
        text = _in_words(d, text)
    if d.chance(0.15):
        text = _question_first(text)
    if d.chance(0.2):
        text = d.say(*_BEFORE, new=_NEW_BEFORE) + text
    if d.chance(0.12):
        text += d.say(*_AFTER, new=_NEW_AFTER)
    if d.chance(0.06):
        text = text.lower()
    if d.chance(0.05):
        text = text.replace(". ", d.one("; ", ", ", "\n", " - "))
    if d.chance(0.05):
        text = text.rstrip("?.")
    return Story(text, story.steps, story.answer)


def _in_words(d: Wording, text: str) -> str:
    """Some numbers, or all, spelled out; amounts of dollars too."""
    share = d.one(0.4, 0.7, 1.0)
    hyphen, link = d.one("-", "-", " "), d.one(" ", " and ")

    def word(match: re.Match[str]) -> str:
        return spelled(int(match[0]), hyphen, link) if d.chance(share) else match[0]

    def dollars(match: re.Match[str]) -> str:
        return f"{match[1]} dollars" if d.chance(0.7) and match[1] != "1" else match[0]

    out = _NUMBER.sub(word, _DOLLARS.sub(dollars, text))
    return out[:1].upper() + out[1:]


def _strange(d: Wording, text: str, kept: set[str]) -> str:
    """One to three words that the working does not repeat, replaced or with others put between. What an unknown word
    means then follows from those around it."""
    for _ in range(d.one(1, 1, 2, 3)):
        found = [m for m in _STRANGE.finditer(text) if m[0] not in kept]
        if not found:
            return text
        at = d.one(*found)
        other = words.any_word(d)
        kept = kept | {other}
        text = text[: at.start()] + (f"{other} {at[0]}" if d.chance(0.4) else other) + text[at.end() :]
    return text


def _idle(d: Wording, text: str) -> str:
    """With a sentence that has nothing to do with the question."""
    name = d.someone().name
    idle = _made_up_idle(d) if not d.unseen and d.chance(0.5) else d.say(*_IDLE, new=_NEW_IDLE)
    said = idle.format(n=name, k=d.number(2, 60), t=plural_of(d.thing("goods")))
    sentences = _SENTENCE.split(text)
    at = d.number(0, max(0, len(sentences) - 1))
    return " ".join([*sentences[:at], said[:1].upper() + said[1:], *sentences[at:]])


def _made_up_idle(d: Wording) -> str:
    """`{n} {verb} {k} ...`, of any words."""
    verb = words.any_word(d)
    return d.one(f"{{n}} {verb}s {words.phrase(d, 3)}.", f"{{n}} {verb}s {{k}} {words.phrase(d, 2)}.", f"The {words.any_word(d)} "
                 f"is {words.any_word(d)}.", f"The {words.any_word(d)} {verb}s {{k}} {words.any_word(d)}.", f"{{n}}'s "
                 f"{words.any_word(d)} is {words.any_word(d)}.", f"{{n}}'s {words.any_word(d)} is {{k}}.",
                 f"There is {words.phrase(d, 2)} in the {words.any_word(d)}.").replace(" .", ".")  # fmt: skip


def _question_first(text: str) -> str:
    sentences = _SENTENCE.split(text)
    if len(sentences) < 2 or not sentences[-1].endswith("?"):
        return text
    return " ".join([sentences[-1], *sentences[:-1]])
