"""Plain arithmetic in every spelling: `12*34`, `12 x 34`, `what is twelve plus 5?`."""

from __future__ import annotations

from tools.demo import calls
from tools.demo.numbers import spelled
from tools.demo.stories.arithmetic import divide, minus, percent, plus, times
from tools.demo.stories.draw import Story
from tools.demo.wording import Wording

_SIGNS = {
    "+": (
        (" + ", "+", " plus ", " and ", " added to ", " increased by ", " combined with "),
        (" together with ",),
    ),
    "-": (
        (
            " - ",
            "-",
            " minus ",
            " take away ",
            " less ",
            " − ",
            " decreased by ",
            " lowered by ",
            " without ",
        ),
        (" reduced by ",),
    ),
    "*": (
        (
            " * ",
            "*",
            " x ",
            "x",
            " × ",
            "×",
            " times ",
            " multiplied by ",
            " · ",
            " multiplied with ",
            " groups of ",
            " sets of ",
        ),
        (" lots of ",),
    ),
    "/": (
        (" / ", "/", " ÷ ", "÷", " divided by ", " over ", ":", " divided into ", " shared by "),
        (" split by ",),
    ),
}
_FRAMES = (
    "{e}", "{e}", "{e}", "{e}=", "{e} =", "{e} = ?", "{e}?", "What is {e}?", "what is {e}", "what's {e}?", "What's {e}?",
    "Calculate {e}.", "calculate {e}", "How much is {e}?", "how much is {e}", "Compute {e}", "Compute {e}.", "Work out "
    "{e}.", "Solve {e}", "Can you tell me what {e} is?", "Please calculate {e}.", "Find {e}.", "What does {e} equal?",
    "{e} equals what?", "Evaluate {e}.", "Tell me {e}", "What do you get for {e}?", "Give me the result of {e}.",
    "What is the value of {e}?", "{e} is what?", "I want to know {e}.", "What does {e} make?",
)  # fmt: skip
_NEW_FRAMES = (
    "Do you know {e}?",
    "Quickly, {e}!",
    "{e} comes to how much?",
    "Figure out {e} for me",
    "So {e} gives?",
)


def asked(d: Wording, expression: str) -> str:
    if not d.unseen and d.chance(0.5):
        return calls.sum_request(d, expression)
    return d.say(*_FRAMES, new=_NEW_FRAMES).format(e=expression)


def _number(d: Wording, n: int, words: bool) -> str:
    return spelled(n, d.one("-", " "), d.one(" ", " and ")) if words and n < 10_000 else str(n)


def _said(d: Wording, terms: tuple[int, ...], sign: str) -> str:
    known, new = _SIGNS[sign]
    words, numerals = d.one(known, new) if d.unseen else known, d.chance(0.15)
    mark = d.one(*words)
    if sign == "-" and any(t < 0 for t in terms):
        mark = " - "
    if sign == "+" and mark in (" and ", " added to ", " together with ") and not d.chance(0.5):
        mark = " + "
    if sign == "/" and mark == ":" and d.chance(0.5):
        mark = " / "
    both = (numerals and mark.strip().isalpha()) or (numerals and " " in mark.strip())
    return mark.join(_number(d, t, both or (mark.strip().isalpha() and d.chance(0.15))) for t in terms)


def pairs(d: Wording) -> Story:
    """Two numbers, or several terms of a sum."""
    sign = d.one("+", "-", "*", "*", "/")
    if sign == "+":
        terms = tuple(d.number(0, d.one(20, 99, 999, 5000)) for _ in range(d.one(2, 2, 2, 3, 4)))
        result = plus(*terms)
    elif sign == "-":
        b = d.number(0, d.one(20, 99, 999))
        terms = (b + d.number(0, d.one(20, 99, 999, 4000)), b)
        result = minus(*terms)
    elif sign == "*":
        terms = (d.number(1, d.one(12, 99, 99, 999)), d.number(1, d.one(12, 99)))
        if d.chance(0.5):
            terms = terms[::-1]
        result = times(*terms)
    else:
        b = d.number(1, d.one(12, 12, 25))
        terms = (b * d.number(1, d.one(12, 99)), b)
        result = divide(*terms)
    return Story(asked(d, _said(d, terms, sign)), (result.work,), result)


def in_words(d: Wording) -> Story:
    """`the sum of 3 and 4`, `add 3 to 4`, `half of 24`, `15% of 60`."""
    a, b = d.amount(1, 400), d.amount(1, 400)
    big, small = max(a, b) + 1, min(a, b)
    k, m = d.number(2, 12), d.amount(2, 99)
    kind = d.number(0, 5)
    if kind == 0:
        result = plus(a, b)
        e = d.say(f"the sum of {a} and {b}", f"the total of {a} and {b}", f"{b} more than {a}")
        imperative = d.say(
            f"Add {b} to {a}", f"Add {a} and {b}", f"Increase {a} by {b}", new=(f"Put {a} and {b} together",)
        )
    elif kind == 1:
        result = minus(big, small)
        e = d.say(f"the difference between {big} and {small}", f"the difference of {big} and {small}",
                  f"{small} less than {big}")  # fmt: skip
        imperative = d.say(f"Subtract {small} from {big}", f"Take {small} away from {big}", f"Decrease {big} by {small}",
                           new=(f"Remove {small} from {big}",))  # fmt: skip
    elif kind == 2:
        result = times(m, k)
        e = d.say(f"the product of {m} and {k}")
        imperative = d.say(f"Multiply {m} by {k}", f"Multiply {m} and {k}", new=(f"Scale {m} by {k}",))
    elif kind == 3:
        result = divide(m * k, k)
        e = d.say(
            f"the quotient of {m * k} and {k}", f"one {k}th of {m * k}" if k > 3 else f"{m * k} over {k}"
        )
        imperative = d.say(
            f"Divide {m * k} by {k}", f"Split {m * k} into {k} equal parts", new=(f"Cut {m * k} into {k}",)
        )
    elif kind == 4:
        rate, whole = d.number(5, 95, 5), 20 * d.number(1, 60)
        result = percent(rate, whole)
        e = d.say(f"{rate}% of {whole}", f"{rate} percent of {whole}")
        imperative = f"Take {e}"
    else:
        word, factor = d.one(("half", 2), ("a third", 3), ("a quarter", 4))
        if d.chance(0.5):
            result, e = divide(m * factor, factor), f"{word} of {m * factor}"
        else:
            word, factor = d.one(("double", 2), ("twice", 2), ("triple", 3), ("three times", 3))
            result, e = times(m, factor), f"{word} {m}"
        imperative = f"Work out {e}"
    text = imperative + d.one("", ".", "!") if d.chance(0.4) else asked(d, e)
    return Story(text, (result.work,), result)


def nested(d: Wording) -> Story:
    """Two operations, with and without brackets."""
    a, b, c = d.number(2, 30), d.number(2, 20), d.amount(1, 60)
    product = times(a, b)
    kind = d.number(0, 3)
    star = d.one(" * ", "*", " x ", " × ", " times ")
    if kind == 0:
        result = plus(product, c)
        text = f"{a}{star}{b} + {c}" if d.chance(0.5) else f"({a}{star}{b}) + {c}"
    elif kind == 1:
        c = min(c, product)
        result = minus(product, c)
        text = f"{a}{star}{b} - {c}"
    elif kind == 2:
        total = plus(a, b)
        result = times(total, d.number(2, 9))
        text = f"({a} + {b}){star}{result // total}"
        return Story(asked(d, text), (total.work, result.work), result)
    else:
        result = plus(c, product)
        text = f"{c} + {a}{star}{b}"
    return Story(asked(d, text), (product.work, result.work), result)


STORIES = (pairs, pairs, pairs, in_words, nested)
