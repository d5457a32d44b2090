"""Answers as JSON: what a sentence says, by the keys that are asked for."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tools.demo import toolbox, words
from tools.demo.stories.draw import Story
from tools.demo.stories.frames import expand
from tools.demo.wording import Wording, cap, plural_of

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


HELDOUT_KEYS = frozenset(key for keys in _NEW_KEYS.values() for key in keys)
# What a text says: its facts, each with the words that its key is made of, and their kinds; then the text's tellings.
_TEXT = """\
name = name person who customer client user guest recipient owner sender
item = thing item product thing object good ware
count = small count quantity number amount qty units how_many
price = small price cost unit_price price_per_item item_price each_cost rate
{name} [buys/ordered/wants/gets/purchased/takes/asks for/has bought/paid for/will take] {count} {item} [for/at] ${price} [each/apiece/per item/a unit]|{count} {item} at {price} dollars [each/per unit] [were sold to/go to/are for/for/were sent to] {name}|[An order/A sale/A delivery/A package] [of/with] {count} {item} [by/for/from/to] {name}, ${price} [each/apiece/per unit]|[Order/Invoice/Receipt]: {name}, {count} {item}, ${price}|We [sold/mailed/sent/brought/delivered] {name} {count} {item} at ${price} [each/apiece/per item]|Each of the {count} {item} that {name} [bought/wants/ordered/took] costs ${price}|{name}: {count} x {item} (${price})

name = name person who customer friend student member employee patient player
age = small age years age_in_years how_old
city = city place town home home_town lives_in hometown residence
{name} is {age} years old and [lives in/comes from/works in/was born in/moved to/stays in] {city}|{name}, {age}, [is from/lives in/comes from/of/works in] {city}|In {city} [lives/works/stays] {name}, who is {age}|[My friend/Our guest/The student/A player called/Our neighbor] {name} [from/in] {city} is {age}|{name} ({age}) [from/lives in/of] {city}|At {age}, {name} [moved to/lives in/went to] {city}|{city} is where {name}, who is {age}, [lives/works/stays]

title = title title event name meeting topic subject what
day = day day date when weekday on
city = city place city venue where town room
guests = small guests people count attendees visitors seats
[The meeting/The event/A talk/The party] {title} [is/takes place/happens/will be] on {day} in {city} with {guests} [guests/people/visitors]|On {day} {guests} people [meet/come/are invited/go] to {city} for {title}|{title}: {day}, {city}, {guests} [guests/seats/people]|{city} [hosts/has/expects] {guests} [guests/people/visitors] for {title} on {day}|[Save the day/Invitation/Program]: {title}, {day}, {city}. {guests} people [come/are expected]

name = name driver who person traveler passenger name
source = city from start origin departure start_city
target = city to end destination arrival goal end_city
distance = number distance km kilometers length miles
{name} [drives/travels/rides/flies/goes/walks] from {source} to {target}, [which is/a trip of/in all] {distance} km|[From/The way from] {source} to {target} [it is/is/are] {distance} km, [says/and] {name} [drives/takes/goes] [it/that way]|{distance} km [lie/are] between {source}, where {name} starts, and {target}|{name}: {source} - {target}, {distance} km|{name} leaves {source} and [reaches/arrives in/gets to] {target} after {distance} km

title = title title book movie film work name
author = name author writer by director creator maker
year = year year published released made_in date
{title} [was written/was made/was published/came out/is a book/is a film] [by/from] {author} in {year}|In {year} {author} [wrote/made/published/directed/finished] {title}|{author}'s {title} [came out/appeared/is from/was made] [in/] {year}|{title} ({author}, {year})|[The author/The maker] of {title} is {author}; it [is from/came out in] {year}

item = thing item product thing object animal goods kind
color = color color colour shade paint
weight = number weight grams mass kg
price = small price cost euros dollars value
[The/Our/These] {item} are {color}, weigh {weight} grams and cost ${price}|[For/At] ${price} you get {color} {item} of {weight} grams|{weight} grams of {color} {item} [are/cost/go for] ${price}|{item}: {color}, {weight} g, ${price}|{color} {item} that weigh {weight} grams [cost/are sold for/sell at] {price} dollars

name = name player team winner who student runner
points = number points score result total marks
rank = small rank place position level round
{name} [has/scored/got/made/reached/finished with] {points} points [and is/, which is/and came in at] [place/rank/number] {rank}|[Place/Rank/Number] {rank} [goes to/is/was] {name} with {points} points|With {points} points {name} [takes/gets/ends on/is on] [place/rank] {rank}|{rank}. {name} {points}

city = city city place town where station
degrees = small degrees temperature temp celsius heat
wind = small wind wind_speed km_h speed
state = word weather sky state condition summary
[In/Today in] {city} it is {degrees} degrees and {state}, wind {wind} km/h|{city}: {state}, {degrees} degrees, wind {wind}|[The weather in/Weather for] {city}: {degrees} degrees, {state}, and a wind of {wind} km/h|{state} weather in {city} [with/at] {degrees} degrees. The wind [blows at/has/reaches] {wind} km/h
"""
_COLORS = "red blue green yellow white black purple orange brown gray pink".split()
_ASK = (
    "[Answer/Reply/Respond/Write/Output/Return/Print/Give/Give me/Show/Provide/Extract/Produce/Deliver/Send/Format/Make/Create/"
    "Write down/Say it/Put this/State it/Express it/Summarize this/Fill in/Report it] [as/in/with/using] [/valid /plain /a "
    "]JSON[/ object/ format/ form] [with/with the keys/with the fields/with keys/with exactly/by the keys/for/containing/"
    "holding/made of/listing/using the keys/from the fields/that has] {k}[./, please./ only./]|[JSON/Json/json/As JSON/In JSON/"
    "Output/Keys/Fields/Schema/Format/JSON keys/Object]: {k}[./]|[Which/What] JSON object with {k} [is this/says this/fits/"
    "describes this/results]?|[Extract/Collect/Find/Read off/Pull out/Get/List/Take] {k}[./ as JSON./ in JSON./ and write JSON./ "
    "into a JSON object.]"
)


@dataclass(frozen=True)
class Facts:
    """kinds: of each fact; keys: what it may be called; tellings: apart by `|`."""

    kinds: dict[str, str]
    keys: dict[str, tuple[str, ...]]
    tellings: str


def _parse(text: str) -> Facts:
    *lines, tellings = text.strip().split("\n")
    parsed = [(name, *rest.split(" ")) for name, rest in (line.split(" = ") for line in lines)]
    return Facts(
        {name: kind for name, kind, *_ in parsed}, {name: tuple(keys) for name, _, *keys in parsed}, tellings
    )


_FACTS = tuple(map(_parse, _TEXT.split("\n\n")))


def varied(d: Wording) -> tuple[str, dict[str, Any]]:
    """As `extraction`: texts of many kinds, asked for in any words, by keys that may be made up."""
    text, facts = (_labelled if d.chance(0.25) else _told)(d)
    wanted = [key for key in facts if d.chance(0.75)] or [d.one(*facts)]
    if d.chance(0.4):
        wanted.sort(key=lambda _: d.rng.random())
    kinds = {key: _type(facts[key]) for key in wanted}
    ask = (
        expand(d, _ASK)
        if d.chance(0.7)
        else f"{cap(words.phrase(d, 4))} JSON {words.phrase(d, 3)} {{k}}{d.one('', '.', '?')}"
    )
    ask = " ".join(ask.split()).replace("{k}", _keys_listed(d, kinds))
    if d.chance(0.15):
        text = _with_other_sentence(d, text)
    return d.one(f"{ask} {text}", f"{text} {ask}", f"{text}\n{ask}", f"{ask}\n{text}"), {
        key: facts[key] for key in wanted
    }


def _type(value: Any) -> str:
    return "boolean" if isinstance(value, bool) else "integer" if isinstance(value, int) else "string"


def _told(d: Wording) -> tuple[str, dict[str, Any]]:
    """(a sentence, what it says by the keys to use). A key that says nothing is only used for the one fact of its type that
    has no other."""
    about = d.one(*_FACTS)
    values = {name: _value(d, kind) for name, kind in about.kinds.items()}
    # A fact at the beginning keeps its small letter, as the answer repeats it.
    text = cap(expand(d, about.tellings)).format(**values) + d.one(".", ".", "")
    taken: dict[str, Any] = {}
    odd = d.one(*values) if d.chance(0.3) else ""
    for name, value in values.items():
        key = words.identifier(d) if name == odd else d.one(*about.keys[name])
        if name != odd and d.chance(0.3):
            key = words.identifier(
                d,
                *d.one([name, words.any_word(d)], [words.any_word(d), name], [name, "of", words.any_word(d)]),
            )
        if key in taken or key in HELDOUT_KEYS:
            return _told(d)
        taken[key] = value
    if d.chance(0.15):
        paid = d.chance(0.5)
        word = d.one("paid", "done", "ready", "new", "sent", "open", "late", words.any_word(d))
        text = text.rstrip(".") + d.one(
            f". It is {'' if paid else 'not '}{word}.", f", {'' if paid else 'not '}{word}."
        )
        taken[word] = paid
    return text, taken


def _labelled(d: Wording) -> tuple[str, dict[str, Any]]:
    """Facts each next to the very key that they are asked by."""
    facts: dict[str, Any] = {}
    for _ in range(d.number(1, 5)):
        key = d.one(words.any_word(d), words.any_word(d), words.identifier(d))
        kind = d.one("small", "number", "number", "name", "city", "word", "title", "state", "year")
        facts[key] = d.one(True, False) if kind == "state" else _value(d, kind)
    said = {True: "true", False: "false"}
    pairs = [(key, said[v] if isinstance(v, bool) else v) for key, v in facts.items()]
    mark, between, before = d.one(
        (": ", ", ", ""), (" is ", ", ", "the "), (" = ", "; ", ""), (": ", "\n", ""), (": ", "\n", "- "), (" is ", ". The ", "The "),
        ("=", " ", ""), (" - ", ", ", ""), (" ", ", ", ""),
    )  # fmt: skip
    text = before + (between + (before if before == "- " else "")).join(
        f"{key}{mark}{value}" for key, value in pairs
    )
    return text, facts


def _value(d: Wording, kind: str) -> Any:
    if kind in ("small", "number"):
        return d.number(1, 99 if kind == "small" else d.one(99, 999, 9999))
    if kind == "year":
        return d.number(1800, 2030)
    if kind in ("word", "color"):
        return words.any_word(d) if kind == "word" or d.chance(0.2) else d.one(*_COLORS)
    return toolbox.value_of(d, kind)


def _with_other_sentence(d: Wording, text: str) -> str:
    other = cap(" ".join(words.any_word(d) for _ in range(d.number(3, 7)))) + "."
    return f"{text} {other}" if text.endswith(".") else text


def _keys_listed(d: Wording, kinds: dict[str, str]) -> str:
    names = list(kinds)
    kind = d.number(0, 5)
    if kind == 0:
        schema: dict[str, Any] = {
            "type": "object",
            "properties": {name: {"type": type_} for name, type_ in kinds.items()},
            "required": names,
        }
        if d.chance(0.4):
            schema["additionalProperties"] = False
        if d.chance(0.2):
            del schema["type"]
        return json.dumps(schema)
    if kind == 1:
        return ", ".join(f"{name} ({type_})" for name, type_ in kinds.items())
    if kind == 2:
        return "{" + ", ".join(f'"{name}": {d.one("...", type_)}' for name, type_ in kinds.items()) + "}"
    quote = d.one('"', "", "`", "'")
    quoted = [f"{quote}{name}{quote}" for name in names]
    if kind == 3 or len(quoted) < 2:
        return d.one(", ", ",", " ", "; ").join(quoted)
    return d.one(" and ", ", and ", " & ").join([", ".join(quoted[:-1]), quoted[-1]])


_STEPS = (("steps", "answer"), ("work", "answer"), ("steps", "result"), ("working", "answer"))


def worked(d: Wording, story: Story) -> tuple[str, dict[str, Any]]:
    """A word problem whose working and answer are asked for as JSON."""
    steps, answer = d.one(*_STEPS)
    asks = _ASKS if d.unseen or d.chance(0.5) else (" ".join(expand(d, _ASK).split()),)
    ask = d.say(*asks, new=_NEW_ASKS).format(k=d.one(f"{steps} and {answer}", f'"{steps}" and "{answer}"',
                f"{steps} (array of strings), {answer} (integer)"))  # fmt: skip
    return f"{story.question} {ask}", {steps: list(story.steps), answer: int(story.answer)}
