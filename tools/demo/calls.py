"""Dialogues with tools: a calculator and a unit converter, called once or twice, their results told."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tools.demo.wording import Wording

Tool = dict[str, Any]


@dataclass(frozen=True)
class Call:
    name: str
    arguments: dict[str, Any]

    def __str__(self) -> str:
        return json.dumps({"name": self.name, "arguments": self.arguments}, ensure_ascii=False)


_CALCULATORS = (
    ("calculator", "expression"), ("calculate", "expression"), ("calc", "expr"), ("evaluate", "expression"),
    ("compute", "formula"), ("math", "expression"), ("run_math", "input"), ("calculator", "input"), ("eval_math", "code"),
)  # fmt: skip
_NEW_CALCULATORS = (("arithmetic", "expression"), ("calculator", "formula"), ("do_sum", "expression"))
_CONVERTERS = (
    ("convert_units", "value", "from_unit", "to_unit"), ("unit_converter", "value", "from", "to"),
    ("convert", "amount", "from", "to"), ("convert_unit", "number", "source", "target"),
    ("units", "value", "from_unit", "to_unit"), ("measure_convert", "quantity", "from", "to"),
)  # fmt: skip
_NEW_CONVERTERS = (
    ("converter", "value", "from_unit", "to_unit"),
    ("unit_convert", "amount", "source", "target"),
)
_MEANS = (
    "Evaluate an arithmetic expression.", "Calculate the value of an expression.", "A calculator.",
    "Computes a mathematical expression and returns the number.", "Do arithmetic", "",
)  # fmt: skip
_CONVERTS = ("Convert a quantity between units.", "Converts a value from one unit to another.", "Unit conversion", "",
             "Change units of length, mass, volume or time.")  # fmt: skip
UNITS = (
    ("kilometers", "miles", "km"), ("miles", "kilometers", "mi"), ("inches", "centimeters", "in"), ("feet", "meters", "ft"),
    ("pounds", "kilograms", "lb"), ("kilograms", "pounds", "kg"), ("liters", "gallons", "l"), ("gallons", "liters", "gal"),
    ("ounces", "grams", "oz"), ("grams", "ounces", "g"), ("meters", "feet", "m"), ("centimeters", "inches", "cm"),
    ("yards", "meters", "yd"), ("celsius", "fahrenheit", "C"), ("hours", "minutes", "h"), ("days", "hours", "d"),
    ("cups", "milliliters", "cup"), ("tons", "kilograms", "t"),
)  # fmt: skip


@dataclass(frozen=True)
class Offered:
    """The tools of one dialogue and how each is called."""

    tools: list[Tool]
    calculator: tuple[str, str]
    converter: tuple[str, str, str, str]


def offer(d: Wording) -> Offered:
    calculator = d.one(*(_NEW_CALCULATORS if d.unseen and d.chance(0.5) else _CALCULATORS))
    converter = d.one(*(_NEW_CONVERTERS if d.unseen and d.chance(0.5) else _CONVERTERS))
    if d.chance(0.4):
        calculator, converter = _CALCULATORS[0], _CONVERTERS[0]
    name, key = calculator
    said = d.one("", "The expression", "such as 12 * 34")
    one = _tool(d, name, d.one(*_MEANS), {key: _field(d, "string", said)})
    name, value, source, target = converter
    fields = {
        value: _field(d, "number", ""),
        source: _field(d, "string", ""),
        target: _field(d, "string", ""),
    }
    two = _tool(d, name, d.one(*_CONVERTS), fields)
    return Offered(d.one([one, two], [two, one]), calculator, converter)


def _field(d: Wording, kind: str, said: str) -> dict[str, str]:
    return {"type": kind} | ({"description": said} if said else {})


def _tool(d: Wording, name: str, description: str, fields: dict[str, Any]) -> Tool:
    schema: dict[str, Any] = {"type": "object", "properties": fields}
    if d.chance(0.8):
        schema["required"] = list(fields)
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def _expression(d: Wording) -> tuple[str, str, int]:
    """(as it is asked, as it is called, value)"""
    a, b, c = d.number(2, d.one(99, 999, 9999)), d.number(2, d.one(20, 99, 999)), d.number(2, 99)
    kind = d.number(0, 5)
    if kind == 0:
        signs, call, value = (" + ", " plus ", "+"), f"{a} + {b}", a + b
    elif kind == 1:
        a, b = max(a, b), min(a, b)
        signs, call, value = (" - ", " minus ", "-", " take away "), f"{a} - {b}", a - b
    elif kind in (2, 3):
        signs, call, value = (" * ", " times ", " x ", "*", " × ", " multiplied by "), f"{a} * {b}", a * b
    elif kind == 4:
        a = a * b
        signs, call, value = (" / ", " divided by ", "/", " ÷ "), f"{a} / {b}", a // b
    else:
        call, value = f"({a} + {b}) * {c}", (a + b) * c
        return call, call, value
    return f"{a}{d.one(*signs)}{b}", call, value


_ASKS = (
    "What is {e}?", "Calculate {e}.", "How much is {e}?", "{e}", "{e} = ?", "Please compute {e}.", "Use the tool: {e}",
    "Can you work out {e}?", "Tell me {e}.", "what's {e}", "I need the result of {e}.", "Use the calculator for {e}.",
    "Find {e} with the calculator.", "Evaluate {e}", "What do I get for {e}?", "what is {e}",
)  # fmt: skip
_NEW_ASKS = (
    "Could you check {e} for me?",
    "Give me {e}, please.",
    "I wonder what {e} makes.",
    "Let the machine do {e}.",
)
_CONVERSIONS = (
    "Convert {n} {u} to {v}.", "How many {v} are {n} {u}?", "What is {n} {u} in {v}?", "{n} {u} in {v}", "How many {v} are "
    "there in {n} {u}?", "Please convert {n} {u} into {v}.", "Change {n} {u} to {v}.", "{n} {u} to {v}?", "How much is {n} "
    "{u} in {v}?", "Express {n} {u} in {v}.", "I have {n} {u}. How many {v} is that?", "Tell me {n} {u} in {v}",
)  # fmt: skip
_NEW_CONVERSIONS = (
    "{n} {u} would be how many {v}?",
    "Give me {n} {u} as {v}.",
    "What do {n} {u} come to in {v}?",
)
_TELLS = ("The result is {r}.", "{e} is {r}.", "{e} = {r}", "The answer is {r}.")


@dataclass(frozen=True)
class ToolDialogue:
    """`question`, the calls that answer it, each tool's result, and what is then said."""

    offered: Offered
    question: str
    calls: list[Call]
    results: list[str]
    answer: str


def dialogue(d: Wording) -> ToolDialogue:
    """One call, or two that do not depend on one another."""
    offered = offer(d)
    asked, calls, results, told = [], [], [], []
    for kind in d.one(*(["sum"],) * 4, *(["units"],) * 4, ["sum", "units"], ["units", "sum"], ["sum", "sum"],
                      ["units", "units"]):  # fmt: skip
        if kind == "sum":
            text, call, value = _expression(d)
            name, key = offered.calculator
            calls.append(Call(name, {key: call}))
            asked.append(d.say(*_ASKS, new=_NEW_ASKS).format(e=text))
            results.append(d.one(str(value), f'{{"result": {value}}}'))
            told.append(f"{call} = {value}")
        else:
            source, target, _ = d.one(*UNITS)
            n: int | float = d.number(1, d.one(20, 100, 900))
            n = n + 0.5 if d.chance(0.15) else n
            name, value_key, from_key, to_key = offered.converter
            calls.append(Call(name, {value_key: n, from_key: source, to_key: target}))
            asked.append(d.say(*_CONVERSIONS, new=_NEW_CONVERSIONS).format(n=n, u=source, v=target))
            shown = d.one(
                f"{n * d.number(2, 900) / 100:.2f}", str(d.number(1, 900)), f"{d.number(10, 9999) / 10}"
            )
            results.append(d.one(shown, f'{{"result": {shown}}}', f"{shown} {target}"))
            told.append(f"{n} {source} = {shown} {target}")
    question = asked[0]
    if len(asked) > 1:
        first = question.rstrip(".?")
        question = d.say(f"{asked[0]} {asked[1]}", f"{first}, and {lower(asked[1])}", f"{asked[0]} And {lower(asked[1])}",
                         f"{asked[0]} Also: {asked[1]}", f"1. {asked[0]}\n2. {asked[1]}",
                         new=(f"Two things: {asked[0]} {asked[1]}",))  # fmt: skip
    return ToolDialogue(offered, question, calls, results, "\n".join(told))


def lower(text: str) -> str:
    return text[:1].lower() + text[1:]
