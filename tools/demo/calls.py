"""Dialogues with tools: a calculator and a unit converter, called once or twice, their results told."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tools.demo import toolbox, words
from tools.demo.numbers import spelled
from tools.demo.stories.frames import expand
from tools.demo.wording import Wording, cap

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


HELDOUT_TOOLS = frozenset(name for name, *_ in (*_NEW_CALCULATORS[::2], *_NEW_CONVERTERS))
_SUM_NAMES = ("calc calculate compute evaluate eval math solve run process reckon work count add get do number expression "
              "formula result value term sums algebra figure python tool simple quick").split()  # fmt: skip
_UNIT_NAMES = ("convert change turn unit units measure metric scale switch transform get quantity amount size "
               "conversion tool physical quick").split()  # fmt: skip
_SUM_KEYS = "expression expr formula input code e text math term q query value sum exp calculation s body equation".split()
_VALUE_KEYS = "value amount number quantity n x val size count magnitude v".split()
_FROM_TO = (("from", "to"), ("from_unit", "to_unit"), ("source", "target"), ("unit_from", "unit_to"), ("fromUnit", "toUnit"),
            ("unit", "new_unit"), ("input_unit", "output_unit"), ("old", "new"), ("given", "wanted"), ("a", "b"),
            ("source_unit", "target_unit"), ("start", "end"), ("src", "dst"), ("unit_a", "unit_b"))  # fmt: skip
_MORE_MEANS = (
    "[Evaluates/Computes/Calculates/Solves/Works out/Returns/Gives/Finds] [an expression/a formula/a sum/arithmetic/a term/"
    "the value of an expression/math/numbers/plain math/the result of a calculation][./ exactly./, and nothing else./]"
)
_MORE_CONVERTS = (
    "[Converts/Changes/Turns/Translates/Transforms] [units/a value/an amount/a quantity/measures/a size/numbers with units] "
    "[to other units/into another unit/from one unit to another/between units/to a new unit][./ exactly./]"
)
_OPENINGS = (
    "||||Please |Hi! |Hello, |Now |OK, |Next, |Quick question: |For my homework, |For the report, |Good morning. |Can you |Could "
    "you |Would you |I want you to |You should |Let us |I'd like you to |Help me |My boss says: |Go and |Hey, |Then |Also "
)
_VERBS = (
    "compute|work out|calculate|evaluate|determine|find|find out|get|solve|show|print|return|say|tell me|do|run|figure|derive|"
    "state|name|report|answer|process|crunch|obtain|produce|write down|learn|look up|estimate|see|know|take|try|use the tool "
    "for|use the calculator on|call the tool with|ask the computer for|resolve"
)
_WHATS = (
    "{e}|{e}|{e}|the value of {e}|the result of {e}|what {e} is|what {e} gives|the answer to {e}|this: {e}|{e} exactly|the sum "
    "{e}|the expression {e}|the term {e}|how much {e} is|how much {e} gives|our {e}|the following: {e}"
)
_CLOSINGS = "||.|.|?|!| please.| now.| for my homework.| with the tool.| using a tool.| right away.| for us.| today.| at once!| if you can."
_SUM_QUESTIONS = (
    "[What is/What's/What does/How much is/How much does/What will/Is it true that/What number is/What would] {e} [/equal/"
    "give/be/yield/amount to/result in/add up to][?/]|{e} [is what/equals/gives what/is how much/equals what/=/is/yields][?/]|"
    "[Result/Value/Answer/Question/Task/Problem/Sum/Input/To do]: {e}"
)
_INTO = "in|into|to|expressed in|given in|measured in|written in|in units of|over to|using"
_UNIT_QUESTIONS = (
    "How many {v} [are/are there in/make/make up/equal/is/do I get for/do I get from/fit in/does one get for/are in/are "
    "equal to/correspond to/match] {n} {u}[?/]|{n} {u} [is/are/equals/=/makes/gives/corresponds to/means/equal/is the same "
    "as] how many {v}[?/]|[What is/What's/What are/How much is/How much are] {n} {u} [in/expressed in/measured in/if given "
    "in/when put in/counted in] {v}[?/]|[I have/We have/There are/It says/The recipe says/The sign says/I bought/I see] {n} "
    "{u}. [How many {v}/What is it in {v}/And in {v}/{v}/In {v}][?/]|{v} [from/for/out of/in] {n} {u}[?/]"
)
_MORE_UNITS = (
    "seconds minutes weeks months years quarts pints teaspoons tablespoons stones grains acres hectares knots joules calories "
    "watts volts bytes bits kilobytes megabytes gigabytes pixels points dozens degrees radians kelvin pascals bars euros "
    "dollars pesos millimeters nanometers microns furlongs fathoms carats barrels kg lb mi ft cm mm ml oz mph kph"
).split()


def varied(d: Wording) -> ToolDialogue:
    """One call to three, of tools with any names, keys and descriptions, asked for in any words."""
    sums, units = _any_calculator(d), _any_converter(d)
    domains = dict.fromkeys(d.one(*toolbox.DOMAINS) for _ in range(d.one(0, 0, 1, 1, 2, 3)))
    others = [toolbox.handy(d, domain) for domain in domains]
    if len({sums[0], units[0], *(tool.name for tool in others)}) < 2 + len(others):
        return varied(d)
    kinds = [*["sum"] * 3, *["units"] * 3, *(["other"] * 4 if others else [])]
    asked, calls, results, told = [], [], [], []
    for _ in range(d.one(1, 1, 1, 1, 1, 2, 2, 3)):
        kind = d.one(*kinds)
        if kind == "other":
            tool = d.one(*others)
            text, arguments = tool.request(d)
            call, result, said = Call(tool.name, arguments), *_outcome(d)
        elif kind == "sum":
            spoken, expression, value = _expression(d)
            if d.chance(0.08) and " " in spoken and "(" not in spoken:
                spoken = " ".join(spelled(int(p)) if p.isdigit() else p for p in spoken.split())
            text = sum_request(d, spoken)
            call, result, said = Call(sums[0], {sums[1]: expression}), str(value), f"{expression} = {value}"
            result = d.one(result, f'{{"result": {value}}}', f'{{"{words.identifier(d)}": {value}}}')
        else:
            text, n, u, v = _unit_request(d)
            shown = d.one(
                f"{d.number(2, 90000) / 100:.2f}", str(d.number(1, 900)), f"{d.number(10, 9999) / 10}"
            )
            call, said = (
                Call(units[0], dict(zip(units[1:], (n, u, v), strict=True))),
                f"{n} {u} = {shown} {v}",
            )
            result = d.one(
                shown, f'{{"result": {shown}}}', f"{shown} {v}", f'{{"{words.identifier(d)}": {shown}}}'
            )
        asked.append(text)
        calls.append(call)
        results.append(result)
        told.append(said)
    tools = _listed_tools(d, sums, units, others, {call.name for call in calls})
    offered = Offered(tools, sums, units)
    return ToolDialogue(offered, _joined(d, asked), calls, results, "\n".join(told))


def _any_name(d: Wording, parts: list[str]) -> str:
    known = dict.fromkeys(d.one(*parts) for _ in range(d.one(1, 2, 2))) if d.chance(0.6) else ()
    name = words.identifier(d, *known)
    return _any_name(d, parts) if name in HELDOUT_TOOLS else name


def _any_calculator(d: Wording) -> tuple[str, str]:
    return _any_name(d, _SUM_NAMES), d.one(*_SUM_KEYS) if d.chance(0.8) else words.identifier(d)


def _any_converter(d: Wording) -> tuple[str, str, str, str]:
    keys = (d.one(*_VALUE_KEYS), *d.one(*_FROM_TO))
    if d.chance(0.15):
        keys = tuple(f"{key}_{words.any_word(d)}" for key in keys)
    return (_any_name(d, _UNIT_NAMES), *keys) if len({*keys}) == 3 else _any_converter(d)


def _listed_tools(d: Wording, sums: tuple[str, str], units: tuple[str, str, str, str], others: list[toolbox.Handy],
                  called: set[str]) -> list[Tool]:  # fmt: skip
    """The tools called and some that are not, in any order."""
    tools = []
    if sums[0] in called or d.chance(0.7):
        means = d.one(*_MEANS) if d.chance(0.4) else expand(d, _MORE_MEANS)
        said = d.one("", "", "The expression", "such as 12 * 34", words.phrase(d, 4))
        tools.append(_tool(d, sums[0], means, {sums[1]: _field(d, "string", said)}))
    if units[0] in called or d.chance(0.7):
        means = d.one(*_CONVERTS) if d.chance(0.4) else expand(d, _MORE_CONVERTS)
        kinds = ("number", "string", "string")
        fields = {key: _field(d, kind, "") for key, kind in zip(units[1:], kinds, strict=True)}
        tools.append(_tool(d, units[0], means, fields))
    for other in others:
        fields = {key: _field(d, field.type, words.phrase(d, 3) if d.chance(0.2) else "")
                  for key, field in zip(other.keys, other.domain.fields, strict=True)}  # fmt: skip
        tools.append(_tool(d, other.name, other.means, fields))
    tools.sort(key=lambda _: d.rng.random())
    return tools


def sum_request(d: Wording, e: str) -> str:
    """A request for the value of `e`, in many ways, also in words that mean nothing."""
    kind = d.rng.random()
    if kind < 0.25:
        return d.one(*_ASKS).format(e=e)
    if kind < 0.5:
        return expand(d, _SUM_QUESTIONS).format(e=e)
    if kind < 0.75:
        return cap(d.one(*_OPENINGS.split("|")) + d.one(*_VERBS.split("|")) + " " + d.one(*_WHATS.split("|")).format(e=e)
                   + d.one(*_CLOSINGS.split("|")))  # fmt: skip
    return _any_words(d, e)


def _unit_request(d: Wording) -> tuple[str, int | float, str, str]:
    """(what is asked, number, unit, other unit)"""
    u, v, _ = d.one(*UNITS)
    if d.chance(0.35):
        u, v = (d.one(*_MORE_UNITS) if d.chance(0.7) else words.made_up(d) + "s" for _ in "uv")
    n: int | float = d.number(1, d.one(20, 100, 900, 9000))
    n = d.one(n + 0.5, n / 100, n / 10) if d.chance(0.15) else n
    kind = d.rng.random()
    if kind < 0.25:
        text = d.one(*_CONVERSIONS).format(n=n, u=u, v=v)
    elif kind < 0.5:
        text = expand(d, _UNIT_QUESTIONS).format(n=n, u=u, v=v)
    elif kind < 0.75:
        text = d.one(*_OPENINGS.split("|")) + d.one(
            *_VERBS.split("|"), "convert", "change", "turn", "express", "put", "rewrite"
        )
        text = cap(f"{text} {n} {u} {d.one(*_INTO.split('|'))} {v}{d.one(*_CLOSINGS.split('|'))}")
    else:
        between = words.phrase(d, 3) or words.any_word(d)
        text = _any_words(
            d, d.one(f"{n} {u} {between} {v}", f"{n} {u} {between} {v}", f"{v} {between} {n} {u}")
        )
    return text, n, u, v


def _any_words(d: Wording, middle: str) -> str:
    return cap(f"{words.phrase(d, 4)} {middle} {words.phrase(d, 3)}".strip()) + d.one("", ".", "?", "!")


def _outcome(d: Wording) -> tuple[str, str]:
    """(what any other tool returns, what is said of it)"""
    kind = d.number(0, 3)
    if kind == 0:
        return d.one("ok", '{"status": "ok"}', '{"ok": true}', "done", '{"done": true}'), "Done."
    if kind == 1:
        why = words.phrase(d, 3) or "not found"
        return d.one(f'{{"error": "{why}"}}', f"error: {why}"), f"That failed: {why}."
    key, value = words.any_word(d), d.one(str(d.number(1, 999)), words.any_word(d))
    written = value if value.isdigit() else f'"{value}"'
    return f'{{"{key}": {written}}}', f"The {key} is {value}."


def _joined(d: Wording, asked: list[str]) -> str:
    """Several requests as one message."""
    if len(asked) == 1:
        return asked[0]
    kind = d.number(0, 7)
    if kind == 0:
        return "\n".join(f"{i}. {text}" for i, text in enumerate(asked, 1))
    if kind == 1:
        return "\n".join(f"{mark}{text}" for mark, text in zip(("a) ", "b) ", "c) "), asked, strict=False))
    if kind == 2:
        return "\n".join(asked)
    if kind == 3:
        link = d.one(", and ", " and ", ", then ", "; ", ", also ", " plus ")
        return link.join([asked[0].rstrip(".?!"), *(lower(text).rstrip(".?!") for text in asked[1:])])
    link = d.one(" ", " ", " And ", " Also: ", " Then: ", " After that: ", " Next: ")
    opening = d.one("", "", f"{cap(words.phrase(d, 3) or 'both')}: ", "Please do all of this. ", "I have some questions. ",
                    "Several tasks: ", "First: ")  # fmt: skip
    return opening + link.join(asked)


def lower(text: str) -> str:
    return text[:1].lower() + text[1:]
