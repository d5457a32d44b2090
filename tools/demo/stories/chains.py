"""Stories of varying length: events that change a number, people compared with one another.

Their structure is drawn as well as their words, so that no two need be worked out alike.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from tools.demo.stories.arithmetic import Worked, divide, minus, plus, times
from tools.demo.stories.draw import Draw, Person, Story, plural

_PORTABLE = ("collected", "fruit", "baked", "goods", "flowers")
_LARGEST = 2000
_MULTIPLES = (("twice", 2), ("three times", 3), ("four times", 4), ("five times", 5))
_PARTS = (("half", 2), ("a third", 3), ("a quarter", 4))


class Chain:
    """A number that changes from event to event, told in sentences and worked out in steps."""

    def __init__(self, d: Draw, who: Person, unit: str):
        self.d, self.who, self.unit = d, who, unit
        self.sentences: list[str] = []
        self.steps: list[str] = []
        self.now = 0

    def start(self, sentence: str, value: int) -> None:
        self.sentences.append(sentence)
        self.now = value

    def change(self, sentence: str, result: Worked) -> None:
        self.sentences.append(sentence)
        self.reach(result)

    def reach(self, result: Worked) -> None:
        self.steps.append(f"Then {self.who.he} has {result.work} {self.unit}.")
        self.now = int(result)

    def story(self, question: str) -> Story:
        return Story(" ".join([*self.sentences, question]), tuple(self.steps), self.now)


Event = Callable[[Chain], None]


def collection(d: Draw) -> Story:
    who, a = d.person(), d.things(d.one(*_PORTABLE))
    chain = Chain(d, who, a)
    n, box, k, m = d.number(5, 300), d.thing("boxes"), d.number(2, 20), d.number(2, 40)
    if d.one(True, False):
        chain.start(f"{who} {d.one('has', 'owns', 'buys', 'starts with', 'collects')} {n} {a}.", n)
    else:
        first = times(k, m)
        chain.start(f"{who} has {k} {plural(box)} with {m} {a} in each{d.one('', f' {box}')}.", first)
        chain.steps.append(f"At first {who} has {first.work} {a}.")
    for _ in range(d.number(1, 4)):
        d.one(_gain, _loss, _loss, _gift, _containers, _multiply, _part)(chain)
    if chain.now < 2 or not chain.steps:
        _gain(chain)
    if d.number(1, 4) == 1 and (shares := [k for k in range(2, 10) if chain.now % k == 0 and chain.now > k]):
        return _shared(chain, d.one(*shares))
    end = d.one("have now", "have in the end", "have then", "have left", "have")
    return chain.story(f"How many {a} does {who} {end}?")


def money(d: Draw) -> Story:
    who = d.person()
    chain = Chain(d, who, "dollars")
    n, rate, hours = d.number(20, 500), d.number(5, 40), d.number(2, 30)
    if d.one(True, False):
        chain.start(f"{who} {d.one('has', 'has saved', 'starts with', 'gets')} ${n}.", n)
    else:
        first = times(rate, hours)
        job = d.one("babysitting", "gardening", "washing cars", "walking dogs", "painting", "teaching")
        chain.start(f"{who} earns ${rate} an hour for {job} and works {hours} hours.", first)
        chain.steps.append(f"{who} earns {first.work} dollars.")
    for _ in range(d.number(1, 4)):
        d.one(_spend, _spend, _purchase, _purchase, _earn, _present)(chain)
    if not chain.steps:
        _present(chain)
    question = d.one(
        f"How much money does {who} have {d.one('left', 'now', 'in the end')}?",
        f"How many dollars does {who.he} have {d.one('left', 'now', 'in the end')}?",
    )
    return chain.story(question)


def comparison(d: Draw) -> Story:
    """Several people, each compared with the one before; asked is the sum, the last, or a difference."""
    people = [d.person() for _ in range(d.number(2, 4))]
    a = d.things(d.one(*_PORTABLE))
    verb, do = d.one(("has", "have"), ("sold", "sell"), ("collected", "collect"), ("counted", "count"))
    values: list[int] = [d.number(4, 200)]
    told, steps = [f"{people[0]} {verb} {values[0]} {a}."], []
    for before, who in pairwise(people):
        phrase, value = _compared(d, values[-1], a)
        told.append(f"{who} {verb} {phrase} {before}.")
        steps.append(f"{who} {verb} {value.work} {a}.")
        values.append(int(value))
    total = plus(*values)
    auxiliary = "do" if verb == "has" else "did"
    question = f"How many {a} {auxiliary} they {do} {d.one('together', 'in total', 'altogether', 'in all')}?"
    if d.number(1, 3) == 1 and values[-1] != values[0]:
        (small, less), (large, more) = sorted(((values[0], people[0]), (values[-1], people[-1])), key=_first)
        total = minus(large, small)
        auxiliary = "does" if verb == "has" else "did"
        question = f"How many more {a} {auxiliary} {more} {do} than {less}?"
        steps.append(f"The difference is {total.work} {a}.")
    else:
        steps.append(f"Together that is {total.work} {a}.")
    return Story(" ".join([*told, question]), tuple(steps), total)


def _first(pair: tuple[int, Person]) -> int:
    return pair[0]


def _compared(d: Draw, before: int, a: str) -> tuple[str, Worked]:
    """("5 more apples than", the value it means)"""
    kind = d.number(1, 4)
    word, factor = d.one(*_MULTIPLES)
    part, divisor = d.one(*_PARTS)
    if kind == 1 and before * factor <= _LARGEST:
        return f"{word} as many {a} as", times(before, factor)
    if kind == 2 and before % divisor == 0 and before > divisor:
        phrase = "half as many" if divisor == 2 else f"{part} as many"
        return f"{phrase} {a} as", divide(before, divisor)
    if kind == 3 and before > 3:
        less = d.number(1, before - 1)
        return f"{less} fewer {a} than", minus(before, less)
    more = d.number(1, 150)
    return f"{more} more {a} than", plus(before, more)


def _gain(c: Chain) -> None:
    n = c.d.number(2, 200)
    verb = c.d.one("finds", "buys", "gets", "wins", "picks up", "makes")
    lead = c.d.one("Then", "Later", "The next day", "After that")
    c.change(f"{lead} {c.who.he} {verb} {n} {c.d.one('more', f'more {c.unit}', c.unit)}.", plus(c.now, n))


def _gift(c: Chain) -> None:
    friend, n = c.d.person(), c.d.number(2, 90)
    c.change(f"{friend} gives {c.who.him} {n} {c.d.one('more', c.unit)}.", plus(c.now, n))


def _loss(c: Chain) -> None:
    if c.now < 3:
        return _gain(c)
    n, friend = c.d.number(1, c.now - 1), c.d.person()
    said = c.d.one(
        f"{c.who.He} {c.d.one('loses', 'sells', 'gives away', 'uses')} {n} {c.d.one('of them', c.unit)}.",
        f"{c.who.He} gives {n} {c.d.one('of them', c.unit)} to {friend}.",
        f"Then {n} {c.unit} are {c.d.one('sold', 'lost', 'given away')}.",
    )
    return c.change(said, minus(c.now, n))


def _multiply(c: Chain) -> None:
    word, factor = c.d.one(*_MULTIPLES)
    if not 0 < c.now * factor <= _LARGEST:
        return _loss(c)
    when = c.d.one("A week later", "A year later", "In the end", "The next month")
    return c.change(f"{when} {c.who.he} has {word} as many.", times(c.now, factor))


def _part(c: Chain) -> None:
    word, divisor = c.d.one(*_PARTS)
    if c.now % divisor or c.now <= divisor:
        return _loss(c)
    given = divide(c.now, divisor)
    c.steps.append(f"That is {given.work} {c.unit} less.")
    verb = c.d.one("loses", "sells", "gives away")
    return c.change(f"{c.who.He} {verb} {word} of {c.d.one('them', f'the {c.unit}')}.", minus(c.now, given))


def _containers(c: Chain) -> None:
    box, k, m = c.d.thing("boxes"), c.d.number(2, 12), c.d.number(2, 30)
    held = times(k, m)
    c.steps.append(f"The {plural(box)} hold {held.work} {c.unit}.")
    verb = c.d.one("buys", "gets", "finds")
    c.change(f"{c.who.He} {verb} {k} {plural(box)} of {m} {c.unit} each.", plus(c.now, held))


def _spend(c: Chain) -> None:
    if c.now < 3:
        return _present(c)
    n, what = (
        c.d.number(1, c.now - 1),
        c.d.one("food", "a toy", "lunch", "a ticket", "a book", "clothes", "rent"),
    )
    return c.change(
        f"{c.who.He} {c.d.one('spends', 'pays')} ${n} {c.d.one('on', 'for')} {what}.", minus(c.now, n)
    )


def _purchase(c: Chain) -> None:
    a, k = c.d.things("goods"), c.d.number(2, 12)
    if c.now // k < 2:
        return _present(c)
    price = c.d.number(1, min(60, (c.now - 1) // k))
    cost = times(k, price)
    c.steps.append(f"The {a} cost {cost.work} dollars.")
    each = c.d.one(f"for ${price} each", f"at ${price} each", f"that cost ${price} each")
    return c.change(f"{c.who.He} buys {k} {a} {each}.", minus(c.now, cost))


def _earn(c: Chain) -> None:
    rate, hours = c.d.number(5, 30), c.d.number(2, 12)
    pay = times(rate, hours)
    c.steps.append(f"For the work {c.who.he} gets {pay.work} dollars.")
    c.change(f"{c.who.He} works {hours} hours for ${rate} an hour.", plus(c.now, pay))


def _present(c: Chain) -> None:
    n, friend = c.d.number(2, 150), c.d.person()
    said = c.d.one(
        f"{friend} gives {c.who.him} ${n}.",
        f"{c.who.He} {c.d.one('gets', 'finds', 'earns', 'wins')} ${n}{c.d.one('', ' more')}.",
    )
    c.change(said, plus(c.now, n))


def _shared(c: Chain, k: int) -> Story:
    c.sentences.append(
        f"{c.who.He} {c.d.one('shares', 'divides')} them equally among {k} {c.d.one('friends', 'children')}."
    )
    each = divide(c.now, k)
    c.steps.append(f"Each gets {each.work} {c.unit}.")
    c.now = int(each)
    return c.story(f"How many {c.unit} does each {c.d.one('get', 'of them get')}?")


STORIES = (collection, money, comparison)
