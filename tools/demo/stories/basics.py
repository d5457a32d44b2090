"""Plain sums and stories of a single step, asked in many ways."""

from __future__ import annotations

from tools.demo.stories.arithmetic import divide, minus, plus, times
from tools.demo.stories.draw import Draw, Story, plural

_PORTABLE = ("collected", "fruit", "baked", "goods", "flowers")


def _asked(d: Draw, expression: str) -> str:
    return d.one(
        f"What is {expression}?",
        f"Calculate {expression}.",
        f"How much is {expression}?",
        f"{expression} = ?",
    )


def sum_of_numbers(d: Draw) -> Story:
    terms = [d.number(2, 999) for _ in range(d.number(2, 4))]
    total = plus(*terms)
    return Story(_asked(d, " + ".join(map(str, terms))), (f"{total.work}",), total)


def difference_of_numbers(d: Draw) -> Story:
    b = d.number(2, 900)
    result = minus(b + d.number(1, 900), b)
    return Story(_asked(d, result.work.split(" = ")[0]), (f"{result.work}",), result)


def product_of_numbers(d: Draw) -> Story:
    result = times(d.number(2, 99), d.number(2, 99))
    return Story(_asked(d, result.work.split(" = ")[0]), (f"{result.work}",), result)


def quotient_of_numbers(d: Draw) -> Story:
    b = d.number(2, 12)
    result = divide(b * d.number(2, 99), b)
    return Story(_asked(d, result.work.split(" = ")[0]), (f"{result.work}",), result)


def containers(d: Draw) -> Story:
    who, a, box = d.person(), d.things(d.one(*_PORTABLE)), d.thing("boxes")
    k, m = d.number(2, 40), d.number(2, 40)
    total = times(k, m)
    told = d.one(
        f"{who} has {k} {plural(box)} with {m} {a} in each.",
        f"There are {k} {plural(box)} with {m} {a} in each {box}.",
        f"Each {box} holds {m} {a}, and {who} has {k} {plural(box)}.",
        f"{who} buys {k} {plural(box)} of {m} {a} each.",
    )
    asked = d.one(f"How many {a} are there?", f"How many {a} is that?", f"How many {a} are there in total?")
    return Story(f"{told} {asked}", (f"There are {total.work} {a}.",), total)


def speed(d: Draw) -> Story:
    what, unit = d.one("train", "car", "bus", "ship", "truck"), d.one("km", "miles")
    rate, hours = d.number(12, 99), d.number(2, 12)
    far = times(rate, hours)
    asked = d.one("How far does it go?", f"How many {unit} does it travel?", f"How many {unit} is that?")
    told = d.one(
        f"A {what} travels {rate} {unit} per hour for {hours} hours.",
        f"A {what} goes at {rate} {unit} per hour for {hours} hours.",
        f"A {what} is on the way for {hours} hours at {rate} {unit} an hour.",
    )
    return Story(f"{told} {asked}", (f"It goes {far.work} {unit}.",), far)


def pay(d: Draw) -> Story:
    who, rate, hours = d.person(), d.number(5, 60), d.number(2, 40)
    total = times(rate, hours)
    told = d.one(
        f"{who} earns ${rate} an hour and works {hours} hours.",
        f"{who} works {hours} hours for ${rate} an hour.",
        f"For each hour of work {who} gets ${rate}. Last week {who.he} worked {hours} hours.",
    )
    asked = d.one(f"How much does {who.he} earn?", f"How many dollars does {who.he} get?")
    return Story(f"{told} {asked}", (f"{who} earns {total.work} dollars.",), total)


def fair_shares(d: Draw) -> Story:
    who, a, k, each = d.person(), d.things(d.one(*_PORTABLE)), d.number(2, 12), d.number(2, 60)
    share = divide(k * each, k)
    told = d.one(
        f"{who} shares {k * each} {a} equally among {k} {d.one('friends', 'children', 'people')}.",
        f"{k * each} {a} are shared equally among {k} {d.one('friends', 'children', 'people')}.",
    )
    asked = d.one(f"How many {a} does each get?", f"How many {a} does everyone get?")
    return Story(f"{told} {asked}", (f"Each gets {share.work} {a}.",), share)


STORIES = (
    sum_of_numbers, difference_of_numbers, product_of_numbers, quotient_of_numbers, containers, speed, pay,
    fair_shares,
)  # fmt: skip
