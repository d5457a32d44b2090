"""Word problems put together from many small phrases, so that hardly two are told alike.

Each function draws a situation, says its facts in one of many ways and works it out in short steps. Phrasings given
as `new` are only used in held-out problems.
"""

from __future__ import annotations

from tools.demo.stories.arithmetic import Worked, divide, minus, percent, plus, times
from tools.demo.stories.draw import Story
from tools.demo.wording import ME, Told, Wording, cap, plural_of

_LARGEST = 3000
_BOXES = (
    "box bag basket crate jar packet carton case shelf tray bucket drawer row table team room pack".split()
)
_WHEN = ("", "", "", "Then ", "Later, ", "After that, ", "The next day, ", "Next, ", "On Monday, ", "In the morning, ",
         "In the evening, ", "A day later, ", "Yesterday, ", "At lunch, ")  # fmt: skip
_GAINS = (
    "{s} [buy] {n} more {a}", "{s} [get] {n} more", "{s} [find] {n} {a}", "{s} [pick] up {n} more {a}",
    "{f} [give] {o} {n} {a}", "{f} [give] {o} {n} more", "{s} [get] {n} {a} from {f}", "{s} [win] {n} {a}",
    "{s} [receive] {n} more {a} as a gift", "{s} [collect] {n} {a}", "{s} [make] {n} more", "{s} [add] {n} {a}",
    "{s} [take] {n} {a} from {f}", "{s} [order] {n} more {a}", "{s} [earn] {n} more {a}", "{f} [bring] {o} {n} {a}",
    "{n} more {a} [arrive]", "{s} [borrow] {n} {a} from {f}", "{f} [send] {o} {n} more {a}", "{s} [gather] {n} more",
)  # fmt: skip
_NEW_GAINS = (
    "{s} [come] home with {n} more",
    "{f} [hand] {o} {n} extra {a}",
    "another {n} {a} [be] delivered to {o}",
)
_LOSSES = (
    "{s} [give] {n} {a} to {f}", "{s} [give] away {n}", "{s} [lose] {n} of them", "{s} [sell] {n} {a}",
    "{s} [eat] {n}", "{s} [use] {n} {a}", "{s} [throw] away {n}", "{s} [break] {n} of them", "{f} [take] {n} {a}",
    "{s} [donate] {n} of the {a}", "{s} [give] {f} {n} of them", "{s} [drop] {n} {a}", "{f} [take] {n} of {his} {a}",
    "{s} [send] {n} {a} to {f}", "{s} [hand] out {n}", "{s} [lend] {f} {n} {a}", "{n} of them [get] lost",
    "{s} [return] {n} {a}", "{n} {a} [break]", "{s} [remove] {n} of them", "{s} [trade] away {n} {a}",
)  # fmt: skip
_NEW_LOSSES = ("{s} [part] with {n} {a}", "{s} [let] {f} have {n} of them", "{n} of the {a} [go] missing")
_ENDS = (
    "How many {a} {do} {s} have now?", "How many {a} {do} {N} have left?", "How many {do} {s} have now?",
    "How many {a} are left?", "How many {a} {do} {s} have in the end?", "How many {a} does that leave?",
    "How many are left?", "What is the number of {a} {N} [have] now?", "How many {a} remain?", "How many {a} {do} "
    "{s} end up with?", "Find the number of {a} {s} [have] left.", "Now how many {a} {do} {s} have?",
)  # fmt: skip
_NEW_ENDS = ("What number of {a} {do} {N} still have?", "How many {a} {do} {N} own at the end of the day?")
_STARTS = (
    "{S} [have] {n} {a}.", "{S} [start] with {n} {a}.", "{S} [own] {n} {a}.", "{S} [buy] {n} {a}.",
    "There [be] {n} {a} in {his} {box}.", "{S} [collect] {n} {a}.", "At first {N} [have] {n} {a}.",
    "{S} [bring] {n} {a}.", "{S} [pick] {n} {a}.", "{S} [make] {n} {a}.", "{S} [have] a collection of {n} {a}.",
    "In the beginning, {N} [have] {n} {a}.",
)  # fmt: skip
_NEW_STARTS = ("{S} [possess] {n} {a}.", "{S} [keep] {n} {a} at home.", "{S} [begin] the day with {n} {a}.")


def _story(parts: list[str], ask: str, steps: list[str], answer: int) -> Story:
    return Story(" ".join([*map(cap, parts), cap(ask)]), tuple(steps), answer)


def _grouped(d: Wording, a: str) -> tuple[str, Worked | None, int]:
    """A quantity of `a` in words: a number, or groups of equal size with the product that they mean."""
    if not d.chance(0.3):
        n = d.amount(3, 400)
        return f"{n} {a}", None, n
    k, m = d.number(2, 12), d.number(2, 30)
    box = plural_of(d.one(*_BOXES))
    said = d.say(
        f"{k} {box} of {m} {a} each", f"{k} {box} with {m} {a} in each", f"{k} {box}, each with {m} {a},",
        f"{k} {box} that hold {m} {a} each", f"{m} {a} in each of {k} {box}", f"{k} {box} containing {m} {a} each",
        f"{k} {box} of {m} {a}",
        new=(f"{k} {box}, every one with {m} {a} inside,",),
    )  # fmt: skip
    product = times(k, m)
    return said, product, product


def changes(d: Wording) -> Story:
    """A number that grows and shrinks."""
    t, a = d.told(), d.noun()
    said, product, now = _grouped(d, a)
    steps = []
    if product is not None:
        parts = [t(d.say("{S} [have] {n}.", "{S} [buy] {n}.", "{S} [start] with {n}."), n=said)]
        steps.append(f"{product.work} {a}")
    else:
        box = d.one("room", "house", "shop", "box", "bag", "garden")
        start = d.say(*_STARTS, new=_NEW_STARTS)
        parts = [t(start, n=now, a=a, box=box)]
    for _ in range(d.one(1, 1, 2, 2, 3, 4)):
        now = _event(d, t, a, now, parts, steps)
    ask = t(d.say(*_ENDS, new=_NEW_ENDS), a=a)
    if now % 2 == 0 and now > 4 and d.chance(0.12):
        k = d.one(*[k for k in range(2, 11) if now % k == 0])
        parts.append(_sharing(d, t, k))
        result = divide(now, k)
        steps.append(f"{result.work} {a} each")
        return _story(parts, _each(d, a), steps, result)
    return _story(parts, ask, steps, now)


def _event(d: Wording, t: Told, a: str, now: int, parts: list[str], steps: list[str]) -> int:
    when, friend = d.one(*_WHEN), d.someone().name
    kind = d.rng.random()
    if kind < 0.1 and now * 5 < _LARGEST:
        word, k = d.one(("twice", 2), ("three times", 3), ("double", 2), ("four times", 4), ("triple", 3))
        verb = d.say("{s} [have] {w} as many", "the number of {a} becomes {w} as large")
        if word in ("double", "triple"):
            verb = d.say("{s} [{w}] {his} {a}", "the number of {a} [{w}]").replace("{w}", word)
        parts.append(when + t(verb, w=word, a=a) + ".")
        result = times(now, k)
    elif kind < 0.2 and now > 3 and (found := [p for p in _PARTS if now % p[1] == 0]):
        word, k = d.one(*found)
        gone = divide(now, k)
        parts.append(when + t(d.say(
            "{s} [give] {w} of them to {f}", "{s} [sell] {w} of them", "{s} [lose] {w} of the {a}", "{s} [use] {w} of "
            "the {a}", "{s} [eat] {w} of them", "{w} of the {a} [get] lost", "{s} [give] away {w} of {his} {a}",
            new=("{s} [part] with {w} of {his} {a}",)), w=word, f=friend, a=a) + ".")  # fmt: skip
        steps.append(f"{gone.work} {a}")
        result = minus(now, gone)
    elif kind < 0.6 and now > 2:
        n = d.number(1, now - 1) if d.chance(0.6) else d.number(1, min(now - 1, 12))
        parts.append(when + t(d.say(*_LOSSES, new=_NEW_LOSSES), n=n, a=a, f=friend) + ".")
        result = minus(now, n)
    elif kind < 0.7:
        k, m = d.number(2, 12), d.number(2, 25)
        box, product = plural_of(d.one(*_BOXES[:8])), times(k, m)
        parts.append(when + t(d.say("{s} [buy] {k} {box} of {m} {a}", "{s} [get] {k} {box} with {m} {a} in each",
                                    "{f} [give] {o} {k} {box}, each with {m} {a}"), k=k, m=m, box=box, a=a, f=friend)
                     + ".")  # fmt: skip
        steps.append(f"{product.work} {a}")
        result = plus(now, product)
    else:
        n = d.amount(2, 300)
        parts.append(when + t(d.say(*_GAINS, new=_NEW_GAINS), n=n, a=a, f=friend) + ".")
        result = plus(now, n)
    if d.chance(0.25) and len(parts) > 1 and not when:
        joined = parts.pop()
        before = parts.pop().rstrip(".")
        parts.append(f"{before}{d.one(' and ', ', and ', ', then ', ' and then ', ', but ')}{joined}")
    steps.append(f"{result.work} {a}")
    return result


_PARTS = (("half", 2), ("a third", 3), ("a quarter", 4), ("one third", 3), ("one fifth", 5), ("one half", 2))


def _sharing(d: Wording, t: Told, k: int) -> str:
    friends = d.one("friends", "children", "people", "students", "boxes", "groups")
    return t(
        d.say(
            "{s} [share] them equally among {k} {g}.", "{s} [divide] them equally between {k} {g}.", "{s} [split] them "
            "evenly among {k} {g}.", "{s} [put] the same number in each of {k} {g}.", "{k} {g} get equal shares.",
            new=("{s} [hand] them out fairly to {k} {g}.",),
        ),
        k=k, g=friends,
    )  # fmt: skip


def _each(d: Wording, a: str) -> str:
    return d.say(f"How many {a} does each get?", f"How many {a} are in each?", "How many does each one get?",
                 f"How many {a} per group is that?", f"How many {a} go to each?",
                 new=(f"What is each share of {a}?",))  # fmt: skip


def groups(d: Wording) -> Story:
    t, a = d.told(), d.noun()
    k, m = d.number(2, 40), d.amount(2, 60)
    box = d.one(*_BOXES)
    product = times(k, m)
    steps = [f"{product.work} {a}"]
    parts = [t(d.say(
        "{S} [have] {k} {bs}. Each {b} has {m} {a}.", "There are {k} {bs} with {m} {a} in each.", "Each {b} holds {m} "
        "{a}. {S} [have] {k} {bs}.", "A {b} contains {m} {a}. There are {k} {bs}.", "{S} [put] {m} {a} in each of {k} "
        "{bs}.", "{S} [fill] {k} {bs} with {m} {a} each.", "{S} [buy] {k} {bs} of {a}. Every {b} has {m} {a} in it.",
        "{k} {bs} hold {m} {a} each.", "There are {m} {a} per {b} and {k} {bs}.", "{S} [arrange] {a} in {k} {bs} of "
        "{m}.",
        new=("{S} [stack] {k} {bs}, and in every single {b} there are {m} {a}.", "With {m} {a} to a {b}, {N} [fill] "
             "{k} {bs}."),
    ), k=k, m=m, b=box, bs=plural_of(box), a=a)]  # fmt: skip
    ask = d.say(f"How many {a} are there?", f"How many {a} are there in total?", f"How many {a} is that altogether?",
                t("How many {a} {do} {s} have in all?", a=a), f"What is the total number of {a}?",
                f"How many {a} in all?", new=(f"Work out how many {a} that makes.",))  # fmt: skip
    kind = d.rng.random()
    if kind < 0.25:
        n = d.amount(2, 200)
        parts.append(t(d.say("{H} also [have] {n} {a} outside.", "There are {n} more {a} on the floor.", "{H} [get] {n} "
                             "more {a}.", "{n} extra {a} are left over."), n=n, a=a))  # fmt: skip
        product = plus(product, n)
        steps.append(f"{product.work} {a}")
    elif kind < 0.5:
        n = d.number(1, product - 1)
        parts.append(t(d.say(*_LOSSES), n=n, a=a, f=d.someone().name).strip() + ".")
        product = minus(product, n)
        steps.append(f"{product.work} {a}")
        ask = t(d.say(*_ENDS, new=_NEW_ENDS), a=a)
    return _story(parts, ask, steps, product)


def shares(d: Wording) -> Story:
    t, a = d.told(), d.noun()
    k, m = d.number(2, 12), d.amount(2, 60)
    whole = divide(k * m, k)
    box = d.one(*_BOXES, "friend", "child", "student")
    bs = plural_of(box)
    if d.chance(0.5):
        parts = [t(d.say("{S} [have] {w} {a}.", "There are {w} {a}.", "{S} [bake] {w} {a}.", "{S} [buy] {w} {a}."),
                   w=k * m, a=a), _sharing(d, t, k)]  # fmt: skip
        return _story(parts, _each(d, a), [f"{whole.work} {a}"], whole)
    parts = [t(d.say(
        "{S} [have] {w} {a} and [put] {k} in each {b}.", "{w} {a} are packed {k} to a {b}.", "{S} [pack] {w} {a} into "
        "{bs} of {k}.", "Each {b} gets {k} {a}. There are {w} {a}.", "A {b} holds {k} {a}. {S} [have] {w} {a}.",
        new=("{w} {a} are to go into {bs}, {k} at a time.",)), w=k * m, a=a, b=box, bs=bs, k=k)]  # fmt: skip
    ask = d.say(f"How many {bs} are needed?", t("How many {b} {do} {s} need?", b=bs), f"How many {bs} are there?",
                f"How many {bs} is that?", new=(f"Find how many {bs} it takes.",))  # fmt: skip
    return _story(parts, ask, [f"{whole.work} {bs}"], whole)


def shopping(d: Wording) -> Story:
    """Prices of one to three things; the cost, the change, or what is left of the money."""
    t = d.told()
    steps, costs, told = [], [], []
    for _ in range(d.one(1, 1, 2, 2, 3)):
        a, n, p = d.noun(), d.number(2, 15), d.number(2, 40)
        if d.chance(0.2):
            told.append(d.say(f"{a} for ${p}", f"some {a} for ${p}", f"{a} that cost ${p} in total"))
            costs.append(p)
            continue
        cost = times(n, p)
        told.append(d.say(f"{n} {a} for ${p} each", f"{n} {a} at ${p} each", f"{n} {a} that cost ${p} each",
                          f"{n} {a} at {p} dollars apiece", f"{n} {a}, each costing ${p}", f"{n} {a} (${p} each)",
                          new=(f"{n} {a} priced at ${p} per piece",)))  # fmt: skip
        steps.append(f"{cost.work} dollars for the {a}")
        costs.append(cost)
    listed = " and ".join([", ".join(told[:-1]), told[-1]]) if len(told) > 1 else told[0]
    parts = [t(d.say("{S} [buy] {l}.", "{S} [purchase] {l}.", "{S} [go] to the store and [get] {l}.", "At the market, "
                     "{N} [buy] {l}.", "{S} [order] {l}.", "{S} [want] to buy {l}.",
                     new=("{S} [pick] out {l}.",)), l=listed)]  # fmt: skip
    total: int = costs[0]
    if len(costs) > 1:
        total = plus(*costs)
        steps.append(f"{total.work} dollars")
    ask = t(d.say("How much {do} {s} pay?", "How much {do} {s} spend in total?", "What is the total cost?", "How many "
                  "dollars {do} {s} pay altogether?", "How much is that?", "How much money {do} {N} spend?", "What "
                  "{do} it cost?".replace("{do}", t.do if t.past else "does"),
                  new=("What is the bill?", "How much will {N} have to pay?")))  # fmt: skip
    if d.chance(0.4) or not steps:
        has = total + d.amount(1, 200)
        paid = d.chance(0.5)
        if paid:
            parts.append(t(d.say("{H} [pay] with ${w}.", "{H} [give] the cashier ${w}.", "{H} [hand] over {w} dollars."),
                           w=has))  # fmt: skip
            ask = t(d.say("How much change {do} {s} get?", "What is {his} change?", "How much money {do} {s} get back?",
                          new=("How many dollars come back to {o}?",)))  # fmt: skip
        else:
            fact = t(d.say("{S} [have] ${w}.", "{S} [start] with {w} dollars.", "{S} [go] shopping with ${w}.", "{S} "
                           "[take] ${w} to the shop."), w=has)  # fmt: skip
            parts.insert(0, fact)
            ask = t(d.say("How much money {do} {s} have left?", "How much is left?", "How many dollars {do} {N} have "
                          "now?", "How much money remains?", new=("What is left in {his} wallet?",)))  # fmt: skip
        total = minus(has, total)
        steps.append(f"{total.work} dollars")
    return _story(parts, ask, steps, total)


def compared(d: Wording) -> Story:
    """Two or three people, each compared with another one."""
    t, a = Told(d.someone(), d.chance(0.4)), d.noun()
    first, n = t.who, d.amount(4, 200)
    parts = [t(d.say("{S} [have] {n} {a}.", "{S} [collect] {n} {a}.", "{S} [own] {n} {a}.", "{S} [pick] {n} {a}."),
               n=n, a=a)]  # fmt: skip
    values, people, steps = [n], [first], []
    for _ in range(d.one(1, 1, 2)):
        other = d.someone()
        t2 = Told(other, t.past)
        base, whose = values[-1], people[-1]
        kind, k = d.number(1, 4), d.number(2, 5)
        if kind == 1:
            m = d.amount(1, 100)
            value = plus(base, m)
            said = d.say("{S} [have] {m} more than {w}", "{S} [have] {m} more {a} than {w}", "{S} [have] {m} {a} more "
                         "than {w} [do]", "{W} [have] {m} fewer {a} than {N}",
                         new=("{S} [be] ahead of {w} by {m} {a}",))  # fmt: skip
        elif kind == 2 and base > 2:
            m = d.number(1, base - 1)
            value = minus(base, m)
            said = d.say("{S} [have] {m} fewer than {w}", "{S} [have] {m} less {a} than {w}", "{S} [have] {m} fewer {a} "
                         "than {w}", "{W} [have] {m} more {a} than {N}",
                         new=("{S} [be] {m} {a} short of what {w} [have]",))  # fmt: skip
        elif kind == 3 and base % k == 0:
            m, value = k, divide(base, k)
            word = {2: "half", 3: "a third", 4: "a quarter", 5: "a fifth"}[k]
            said = d.say(f"{{S}} [have] {word} as many as {{w}}", f"{{S}} [have] {word} as many {{a}} as {{w}}",
                         f"{{W}} [have] {k} times as many {{a}} as {{N}}",
                         new=(f"{{S}} [have] only {word} of what {{w}} [have]",))  # fmt: skip
        else:
            m, value = k, times(base, k)
            word = d.one(f"{k} times", {2: "twice", 3: "three times", 4: "four times", 5: "five times"}[k])
            said = d.say(f"{{S}} [have] {word} as many as {{w}}", f"{{S}} [have] {word} as many {{a}} as {{w}}",
                         f"{{S}} [have] {word} the number of {{a}} that {{w}} [have]",
                         new=(f"For each of {{w}}'s {{a}}, {{N}} [have] {k}",))  # fmt: skip
        parts.append(t2(said, m=m, a=a, w=whose.name, W=cap(whose.name)) + ".")
        steps.append(f"{value.work} {a} for {other.name}")
        values.append(value)
        people.append(other)
    kind = d.rng.random()
    do, have = ("did", "have") if t.past else ("do", "have")
    if kind < 0.45:
        total = plus(*values)
        steps.append(f"{total.work} {a}")
        ask = d.say(f"How many {a} {do} they {have} together?", f"How many {a} {do} they {have} in total?",
                    f"How many {a} are there in all?", f"What is their total number of {a}?", f"How many {a} {do} they "
                    f"{have} altogether?", f"How many {a} {do} all of them {have}?",
                    new=(f"Taken together, how many {a} {do} they {have}?",))  # fmt: skip
        return _story(parts, ask, steps, total)
    last, does = people[-1].name, "did" if t.past else "does"
    if kind < 0.8 or values[-1] == values[0]:
        return _story(parts, d.say(f"How many {a} {does} {last} have?", f"How many {does} {last} have?",
                                   f"Find the number of {a} {last} has.",
                                   new=(f"What is {last}'s number of {a}?",)), steps, values[-1])  # fmt: skip
    (low, less), (high, more) = sorted(((values[0], first.name), (values[-1], last)))
    result = minus(high, low)
    steps.append(f"{result.work} {a}")
    return _story(parts, d.say(f"How many more {a} {does} {more} have than {less}?", f"How many fewer {a} {does} {less} "
                               f"have than {more}?", f"What is the difference between {more} and {less}?",
                               new=(f"By how many {a} is {more} ahead of {less}?",)), steps, result)  # fmt: skip


_WORK = (
    ("read", "pages"), ("walk", "miles"), ("run", "km"), ("write", "letters"), ("make", "chairs"), ("earn", "dollars"),
    ("save", "dollars"), ("bake", "cakes"), ("paint", "pictures"), ("drive", "miles"), ("solve", "puzzles"),
    ("plant", "trees"), ("drink", "glasses of water"), ("pick", "apples"), ("ride", "km"), ("wash", "cars"),
    ("collect", "stamps"), ("swim", "laps"), ("learn", "words"), ("sell", "tickets"),
)  # fmt: skip


def rates(d: Wording) -> Story:
    t = d.told()
    verb, unit = d.one(*_WORK)
    per = d.one("day", "hour", "week", "minute", "month") if unit != "miles" else "hour"
    n, k = d.amount(2, 60), d.number(2, 30)
    total = times(n, k)
    pers = per + "s"
    steps = [f"{total.work} {unit}"]
    rate = d.say(f"{{S}} [{verb}] {{n}} {unit} {d.one('a', 'per', 'every', 'each')} {per}",
                 f"{{S}} can {verb} {{n}} {unit} in one {per}", f"Every {per} {{N}} [{verb}] {{n}} {unit}",
                 f"Each {per}, {{N}} [{verb}] {{n}} {unit}")  # fmt: skip
    kind = d.rng.random()
    if kind < 0.4:
        parts = [t(rate, n=n) + "."]
        ask = t(d.say(f"How many {unit} {{do}} {{s}} {verb} in {k} {pers}?", f"How many {unit} is that in {k} {pers}?",
                      f"What is the total after {k} {pers}?", f"How many {unit} will it be after {k} {pers}?",
                      new=(f"Over {k} {pers}, how many {unit} does that come to?",)))  # fmt: skip
        return _story(parts, ask, steps, total)
    if kind < 0.6:
        parts = [
            t(rate + d.say(f" for {k} {pers}.", f", and does so for {k} {pers}.", f" over {k} {pers}."), n=n)
        ]
        ask = d.say(
            f"How many {unit} is that?", f"How many {unit} in total?", f"What is the total number of {unit}?"
        )
        return _story(parts, ask, steps, total)
    if kind < 0.8:
        result = divide(int(total), n)
        parts = [t(rate, n=n) + "."]
        ask = t(d.say(f"How many {pers} {{do}} {{s}} need for {total} {unit}?", f"How many {pers} does it take to {verb} "
                      f"{total} {unit}?", f"How long does it take to {verb} {total} {unit}?",
                      new=(f"After how many {pers} will it be {total} {unit}?",)))  # fmt: skip
        return _story(parts, ask, [f"{result.work} {pers}"], result)
    more = d.amount(2, 150)
    goal = total + more
    result = minus(goal, total)
    parts = [t(d.say("{S} [want] to {v} {g} {u}.", "{his} goal is {g} {u}.", "{S} [need] {g} {u}.", "{S} [plan] to {v} "
                     "{g} {u}."), v=verb, g=goal, u=unit), t(rate + f" for {k} {pers}.", n=n)]  # fmt: skip
    steps.append(f"{result.work} {unit}")
    ask = t(d.say("How many {u} are still missing?", "How many more {u} {do} {s} need?", "How many {u} are left?",
                  "How far is {s} from the goal?".replace("is", "am" if t.who is ME else "is")), u=unit)  # fmt: skip
    return _story(parts, ask, steps, result)


def portions(d: Wording) -> Story:
    """A percentage or a part of a whole, or the rest."""
    a, t = d.one(d.noun(), "students", "people", "cars", "dollars"), d.told()
    if d.chance(0.5):
        rate = d.number(5, 95, 5)
        whole = 20 * d.number(1, 40)
        part, word = percent(rate, whole), d.one(f"{rate}%", f"{rate} percent", f"{rate} %")
    else:
        name, k = d.one(*_PARTS, ("one tenth", 10), ("a fifth", 5))
        whole = k * d.amount(2, 90)
        part, word = divide(whole, k), name
    what = d.one("red", "broken", "new", "blue", "gone", "sold", "old", "ready", "wet")
    parts = [d.say(f"There are {whole} {a}. {cap(word)} of them are {what}.", f"Of {whole} {a}, {word} are {what}.",
                   f"{cap(word)} of the {whole} {a} are {what}.", t(f"{{S}} [have] {whole} {a} and {word} of them are "
                   f"{what}."), f"In a group of {whole} {a}, {word} are {what}.",
                   new=(f"Out of {whole} {a}, exactly {word} turn out to be {what}.",))]  # fmt: skip
    steps = [f"{part.work} {a}"]
    if d.chance(0.5):
        return _story(parts, d.say(f"How many {a} are {what}?", f"How many are {what}?", f"How many {what} ones are "
                                   "there?"), steps, part)  # fmt: skip
    rest = minus(whole, part)
    return _story(parts, d.say(f"How many {a} are not {what}?", f"How many are not {what}?", f"How many {a} are left "
                               f"that are not {what}?"), [*steps, f"{rest.work} {a}"], rest)  # fmt: skip


def ages(d: Wording) -> Story:
    one, two = d.someone(), d.someone()
    n, m, k = d.number(4, 60), d.number(1, 30), d.number(2, 20)
    older = d.chance(0.6)
    value = plus(n, m) if older or m >= n else minus(n, m)
    more = value > n
    parts = [d.say(f"{one} is {n} years old.", f"{one} is {n}.", f"{one}'s age is {n}."),
             d.say(f"{two} is {m} years {'older' if more else 'younger'} than {one}.",
                   f"{one} is {m} years {'younger' if more else 'older'} than {two}.",
                   new=(f"{two} was born {m} years {'before' if more else 'after'} {one}.",))]  # fmt: skip
    steps = [f"{two.name} is {value.work} years old"]
    kind = d.rng.random()
    if kind < 0.4:
        return _story(parts, d.say(f"How old is {two}?", f"What is {two}'s age?", f"How many years old is {two}?"),
                      steps, value)  # fmt: skip
    if kind < 0.7:
        later = plus(value, k)
        return _story(parts, d.say(f"How old will {two} be in {k} years?", f"What will be {two}'s age in {k} years?",
                                   f"In {k} years, how old will {two} be?"), [*steps, later.work], later)  # fmt: skip
    total = plus(n, value)
    return _story(parts, d.say("What is the sum of their ages?", "How old are they together?"), [*steps, total.work],
                  total)  # fmt: skip


def kinds(d: Wording) -> Story:
    """Several kinds that add up, or one that is the rest of a total."""
    t = d.told()
    names = [d.noun() for _ in range(d.number(2, 4))]
    values = [d.amount(2, 150) for _ in names]
    place = d.one(
        "in a box", "in the garden", "at the shop", "on the table", "in the basket", "at school", "on a farm"
    )
    total = plus(*values)
    if d.chance(0.6):
        listed = [f"{n} {a}" for n, a in zip(values, names, strict=True)]
        joined = ", ".join(listed[:-1]) + " and " + listed[-1]
        parts = [t(d.say("{S} [have] {l}.", "There are {l} {p}.", "{S} [buy] {l}.", "{S} [see] {l} {p}.", "{S} [pack] "
                         "{l}.", "{S} [count] {l}.", new=("{S} [notice] {l} {p}.",)), l=joined, p=place)]  # fmt: skip
        ask = d.say("How many things is that in total?", "How many items are there altogether?", "What is the total?",
                    "How many are there in all?", "How many pieces are that together?", t("How many things {do} {s} "
                    "have?"), new=("Counting everything, how many is that?",))  # fmt: skip
        return _story(parts, ask, [total.work], total)
    known = values[:-1]
    parts = [d.say(f"There are {total} things {place}.", f"A bag holds {total} things.", f"{total} things are {place}.",
                   f"Altogether there are {total} pieces {place}.")]  # fmt: skip
    listed = [f"{n} are {a}" for n, a in zip(known, names, strict=False)]
    parts.append(
        ", ".join(listed) + d.say(f" and the rest are {names[-1]}.", f", the others are {names[-1]}.")
    )
    steps = []
    now = int(total)
    for n in known:
        result = minus(now, n)
        steps.append(result.work)
        now = result
    return _story(parts, d.say(f"How many {names[-1]} are there?", f"How many are {names[-1]}?", f"Find the number of "
                               f"{names[-1]}."), steps, now)  # fmt: skip


def jobs(d: Wording) -> Story:
    """Pay for hours of work, with a bonus or an expense."""
    t = d.told()
    rate, hours, days = d.number(5, 40), d.number(2, 12), d.number(2, 7)
    job = d.one(
        "in a shop", "as a cook", "at a farm", "as a driver", "in the garden", "at the library", "as a tutor"
    )
    pay = times(rate, hours)
    steps = [f"{pay.work} dollars"]
    parts = [t(d.say(f"{{S}} [work] {job} for ${rate} an hour.", f"{{S}} [earn] ${rate} per hour {job}.", f"{{S}} [make] "
                     f"{rate} dollars each hour {job}.", f"{{S}} [get] ${rate} for every hour of work.",
                     new=(f"An hour of {{N}}'s work pays ${rate}.".replace("{N}'s", t.who.his if t.who is ME else
                          f"{t.who.name}'s"),))),
             t(d.say(f"{{H}} [work] {hours} hours.", f"{{H}} [work] for {hours} hours.", f"{{H}} [do] {hours} hours of "
                     "work."))]  # fmt: skip
    if d.chance(0.35):
        parts[-1] = t(d.say(f"{{H}} [work] {hours} hours a day for {days} days.", f"{{H}} [work] {hours} hours on each of "
                            f"{days} days."))  # fmt: skip
        pay = times(pay, days)
        steps.append(f"{pay.work} dollars")
    ask = t(d.say("How much {do} {s} earn?", "How much money {do} {s} make?", "How many dollars {do} {s} get?", "How much "
                  "is {s} paid?".replace("is", "am" if t.who is ME else "is"), "What is {his} pay?"))  # fmt: skip
    kind, n = d.rng.random(), d.number(1, max(2, pay - 1))
    if kind < 0.25:
        parts.append(t(d.say(f"{{H}} [get] a bonus of ${n}.", f"{{H}} also [get] ${n} in tips.")))
        pay = plus(pay, n)
        steps.append(f"{pay.work} dollars")
    elif kind < 0.5 and n < pay:
        parts.append(t(d.say(f"{{H}} [spend] ${n} of it.", f"{{H}} [pay] ${n} for food.", f"{{H}} [give] {n} dollars to "
                             f"{d.someone().name}.")))  # fmt: skip
        pay = minus(pay, n)
        steps.append(f"{pay.work} dollars")
        ask = t(d.say("How much {do} {s} have left?", "How much money is left?", "How much {do} {s} keep?"))
    return _story(parts, ask, steps, pay)


_EQUAL = (("dozen", "dozen", 12), ("week", "days", 7), ("hour", "minutes", 60), ("minute", "seconds", 60),
          ("year", "months", 12), ("day", "hours", 24), ("meter", "centimeters", 100), ("kilometer", "meters", 1000),
          ("foot", "inches", 12), ("yard", "feet", 3), ("pair", "pieces", 2), ("decade", "years", 10),
          ("century", "years", 100), ("dollar", "cents", 100))  # fmt: skip


def units(d: Wording) -> Story:
    one, many, factor = d.one(*_EQUAL)
    n = d.number(2, 40)
    result = times(n, factor)
    several = {"foot": "feet", "dozen": "dozen", "century": "centuries"}.get(one, one + "s")
    if one == "dozen":
        a = d.noun()
        said = (
            f"How many {a} are {n} dozen {a}?" if d.chance(0.5) else f"How many {a} are there in {n} dozen?"
        )
        return Story(said, (f"{result.work} {a}",), result)
    ask = d.say(f"How many {many} are {n} {several}?", f"How many {many} are there in {n} {several}?", f"{n} {several} "
                f"are how many {many}?", f"Convert {n} {several} to {many}.",
                new=(f"What do you get if you turn {n} {several} into {many}?",))  # fmt: skip
    return Story(ask, (f"{result.work} {many}",), result)


STORIES = (
    changes, changes, changes, groups, groups, shares, shopping, shopping, compared, compared, rates, rates, portions,
    ages, kinds, jobs, units,
)  # fmt: skip
