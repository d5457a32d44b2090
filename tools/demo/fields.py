"""Answers as JSON: what a sentence says, by the keys that are asked for."""

from __future__ import annotations

import json
from typing import Any

from tools.demo.stories.draw import Story
from tools.demo.wording import Wording, plural_of

_KEYS = {
    "name": ("name", "person", "who", "customer"), "item": ("item", "product", "thing", "object"),
    "count": ("count", "quantity", "number", "amount"), "price": ("price", "cost", "unit_price"),
    "city": ("city", "place", "town"), "age": ("age", "years"), "total": ("total", "sum"),
    "paid": ("paid", "done"),
}  # fmt: skip
_NEW_KEYS = {
    "name": ("buyer",),
    "item": ("article",),
    "count": ("pieces",),
    "price": ("price_each",),
    "city": ("location",),
}
_CITIES = "Paris London Berlin Rome Madrid Oslo Tokyo Cairo Lima Boston Chicago Delhi Lagos Prague Vienna Dublin".split()
_KINDS = {"name": "string", "item": "string", "city": "string", "paid": "boolean"}
_ASKS = (
    "Answer as JSON with the keys {k}.", "Reply in JSON with {k}.", "Give a JSON object with {k}.", "Return JSON: {k}.",
    "Extract {k} as JSON.", "As JSON ({k}), please.", "Write this as a JSON object with the fields {k}.",
    "Output JSON with keys {k}.", "Put it in JSON with {k}.",
)  # fmt: skip
_NEW_ASKS = ("I need {k} in a JSON object.", "Turn it into JSON having {k}.")


def extraction(d: Wording) -> tuple[str, dict[str, Any]]:
    """(question, the object that answers it)"""
    who, item, n, p = d.someone().name, plural_of(d.thing("goods")), d.number(2, 99), d.number(2, 60)
    city, age, paid = d.one(*_CITIES), d.number(5, 90), d.chance(0.5)
    facts: dict[str, Any]
    if d.chance(0.65):
        facts = {"name": who, "item": item, "count": n, "price": p, "total": n * p}
        text = d.say(f"{who} buys {n} {item} for ${p} each.", f"{who} ordered {n} {item} at ${p} each.", f"An order of {n} "
                     f"{item} by {who}, ${p} apiece.", f"{n} {item} at {p} dollars each were sold to {who}.",
                     f"{who} wants {n} {item}. Each costs ${p}.",
                     new=(f"We shipped {n} {item} to {who} at ${p} a piece.",))  # fmt: skip
        if d.chance(0.3):
            facts["paid"] = paid
            text += " It is already paid." if paid else " It is not paid yet."
        if n > 12 and p > 12:
            del facts["total"]
    else:
        facts = {"name": who, "age": age, "city": city}
        text = d.say(f"{who} is {age} years old and lives in {city}.", f"{who}, {age}, is from {city}.", f"In {city} lives "
                     f"{who}, who is {age}.", f"My friend {who} from {city} is {age}.",
                     new=(f"{city} is the home of {who}, aged {age}.",))  # fmt: skip
    wanted = [key for key in facts if d.chance(0.8)] or ["name"]
    if d.chance(0.3):
        wanted.sort(key=lambda _: d.rng.random())
    keys = {key: _key(d, key) for key in wanted}
    listed = _listed(d, keys)
    ask = d.say(*_ASKS, new=_NEW_ASKS).format(k=listed)
    question = f"{ask} {text}" if d.chance(0.4) else f"{text} {ask}"
    return question, {keys[key]: facts[key] for key in wanted}


def _key(d: Wording, key: str) -> str:
    return d.one(*(_NEW_KEYS[key] if d.unseen and key in _NEW_KEYS and d.chance(0.3) else _KEYS[key]))


def _listed(d: Wording, keys: dict[str, str]) -> str:
    names = list(keys.values())
    kind = d.number(0, 3)
    if kind == 0:
        schema = {new: {"type": _KINDS.get(old, "integer")} for old, new in keys.items()}
        return json.dumps({"type": "object", "properties": schema, "required": names})
    if kind == 1:
        return ", ".join(f"{new} ({_KINDS.get(old, 'integer')})" for old, new in keys.items())
    quote = d.one('"', "", "`")
    quoted = [f"{quote}{name}{quote}" for name in names]
    return " and ".join([", ".join(quoted[:-1]), quoted[-1]]) if len(quoted) > 1 else quoted[0]


_STEPS = (("steps", "answer"), ("work", "answer"), ("steps", "result"), ("working", "answer"))


def worked(d: Wording, story: Story) -> tuple[str, dict[str, Any]]:
    """A word problem whose working and answer are asked for as JSON."""
    steps, answer = d.one(*_STEPS)
    ask = d.say(*_ASKS, new=_NEW_ASKS).format(k=d.one(f"{steps} and {answer}", f'"{steps}" and "{answer}"',
                f"{steps} (array of strings), {answer} (integer)"))  # fmt: skip
    return f"{story.question} {ask}", {steps: list(story.steps), answer: int(story.answer)}
