"""Tools of many kinds with requests for them: what a model learns to call any tool from, by its schema.

A domain is written as lines: verbs and nouns that names are made of; what the tool does; its parameters, each as its
possible keys, what kind of value it takes and (behind `?`) that it may be left out; requests, with {0}, {1} for the
values. `[a/b]` chooses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tools.demo import words
from tools.demo.stories.frames import expand
from tools.demo.wording import Wording, cap

_TEXT = """\
get fetch show read lookup : weather forecast temperature climate
Get the weather of a city.|Weather today|Current weather for a place|The forecast
city town place = city
[What is/What's/How is/Tell me/Show me/Check/Look up/I'd like to know] the [weather/forecast/temperature] [like /]in {0} [today/now/]|Will it [rain/snow/be hot/be cold] in {0} [today/tomorrow/]|[Weather/Forecast] [for/in] {0}|Do I need [an umbrella/a coat] in {0}

set start create add make : timer alarm countdown reminder
Start a timer.|Set an alarm after some minutes|Counts down
minutes duration length time = number
[Set/Start/Create/Make/Run] [a timer/an alarm/a countdown] [for/of] {0} minutes|[Wake me/Remind me/Call me/Beep/Ring] in {0} minutes|{0} minutes on the [timer/clock]

send write post mail deliver : message text note mail
Send a message to a person.|Messages|Write to somebody
to recipient person contact = name
text body message content = words
[Send/Write/Text/Mail/Post] {0} [the message/this/a note/the words]: {1}|[Tell/Let] {0} [know/this/that]: {1}|[A message/A note/Mail] [to/for] {0}: {1}

play start queue stream : song music track audio
Play a song.|Music player|Start a track
title song name track = words
[Play/Start/Put on/Queue/I want to hear/Let me hear] {0} [please/now/]|[Can you/Could you/Would you] [play/put on/start] {0} [for us/now/]

book reserve get order : table seat room desk
Book a table.|Reservations|Reserve seats at a place
place restaurant venue where = title
people guests seats persons = number
[Book/Reserve/Get/Order] a [table/room] [for/with] {1} [people/guests/persons/seats] at {0}|[Book/Reserve] {1} [seats/places] at {0}|We are {1} [people/guests] and want to [eat/sit/meet] at {0}

search find lookup query : web docs files news
Search the web.|Find documents|Full text search|Look something up
query q text terms = words
[Search for/Find/Look up/Look for/Google/Search] {0}|[What is there/What do we have/What can you find] [on/about] {0}

translate render turn say : text word phrase
Translate a word.|Translation|Put text into another language
text word phrase source = words
language lang target to = language
[Translate/Put/Render/Say] {0} [into/in/to] {1}|[What is/How do I say/How does one say] {0} in {1}

add put append insert : item entry product list
Add something to the shopping list.|Put an item on a list|New entry
item name product what = thing
amount quantity qty n = number
[Add/Put/Write/Note/Append] {1} {0} [to/on] [the/my/our] list|We [need/are out of] {0}, [get/add/put down/note] {1}|[List/Cart]: {1} {0}

switch turn set change : light lamp device heater
Switch a device.|Home control|Turn a light on or off in a room
room area zone = room
state mode status = state
[Turn/Switch/Set] {1} the [light/lamp/heater/fan] in the {0}|[Turn/Switch] the [light/lamp/heater/fan] in the {0} {1}|{0}: [light/lamp/heater/fan] {1}

get fetch quote lookup : price stock rate cost
Price of a product.|Look up what something costs|Current price
item product symbol name = thing
[What is the price of/What do we pay for/How expensive are/Find the price of/Price of/Get the price of] {0}|[Look up/Check/Tell me] what {0} cost

open create file raise : ticket issue report task
Open a ticket.|Report a problem|Create a task with a priority
title subject summary name = words
priority level severity = number
[Open/Create/File/Raise] a [ticket/task/report] [about/on/for] {0} [with priority/at level/, priority] {1}|[Priority/Level] {1} [ticket/task/issue]: {0}

get show list find : route way directions path
Directions between two places.|Route planner|Find the way
from start origin source = city
to end destination goal target = city
[How do I get/Which way is it/Show me the way/The route/Directions/Find the way/Take me] from {0} to {1}|[I am in/We are in/Starting in] {0} [and want to go/and must get/, going] to {1}

create add make schedule : event meeting appointment call
Create a calendar event.|Schedule a meeting with a person|Calendar
person guest with who = name
day date on when = day
[Schedule/Plan/Set up/Create/Arrange] a [meeting/call/talk] with {0} on {1}|[Meet/Call/See/Put] {0} [in my calendar/] on {1}|On {1} I [meet/see/call] {0}

delete remove drop erase : file entry record row
Delete a record.|Remove an entry by its number|Erases a row
id number key row = number
[Delete/Remove/Drop/Erase/Throw out/Get rid of] [entry/record/row/number/file/line] {0}|[Entry/Record/Row/File] {0} [can go/must go/is not needed/should be removed]

roll throw draw pick : dice number random die
Roll a die with so many sides.|Random number|Throw a die
sides max faces n = number
[Roll/Throw/Pick/Draw] [a die/a number/one] [with/of/up to] {0} [sides/faces/]|[A random number/Something] up to {0}

get read load show : user customer profile account
Look up a customer.|User data by name|Account of a person
name user customer who = name
[Show/Find/Get/Load/Look up/Read/Open] [the account of/the profile of/the data of/customer/user/what we know about] {0}|[Who is/What do we know about] {0}
"""
_CITIES = (
    "Paris London Berlin Rome Madrid Oslo Tokyo Cairo Lima Boston Chicago Delhi Lagos Prague Vienna Dublin Athens Bern Hanoi "
    "Kiev Miami Milan Munich Nairobi Quito Seoul Sofia Sydney Toronto Warsaw Zurich Denver Dallas Lisbon Lyon Porto Riga"
).split()
_LANGUAGES = "German French Spanish Italian Dutch Polish Greek Latin Turkish Hindi Korean Swedish Arabic Danish".split()
_ROOMS = "kitchen bedroom bathroom hall garage cellar garden office attic nursery".split()
_DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()


@dataclass(frozen=True)
class Field:
    keys: tuple[str, ...]
    kind: str

    @property
    def type(self) -> str:
        return "number" if self.kind == "number" else "string"


@dataclass(frozen=True)
class Domain:
    verbs: tuple[str, ...]
    nouns: tuple[str, ...]
    means: tuple[str, ...]
    fields: tuple[Field, ...]
    asks: str


def _parse(text: str) -> Domain:
    names, means, *fields, asks = text.strip().split("\n")
    verbs, nouns = (part.split() for part in names.split(" : "))
    parsed = [(keys.split(), kind) for keys, kind in (line.split(" = ") for line in fields)]
    return Domain(
        tuple(verbs),
        tuple(nouns),
        tuple(means.split("|")),
        tuple(Field(tuple(k), kind) for k, kind in parsed),
        asks,
    )


DOMAINS = tuple(map(_parse, _TEXT.split("\n\n")))


@dataclass(frozen=True)
class Handy:
    """A tool that can be called: its name, what it does and its parameters' keys, from a domain."""

    domain: Domain
    name: str
    means: str
    keys: tuple[str, ...]

    def request(self, d: Wording) -> tuple[str, dict[str, Any]]:
        """(what is asked, the arguments that answer it)"""
        values = [value_of(d, field.kind) for field in self.domain.fields]
        text = expand(d, self.domain.asks).format(*values)
        text = cap(" ".join(text.split()).replace(" ,", ","))
        return text + d.one(".", "", "!", "?"), dict(zip(self.keys, values, strict=True))


def handy(d: Wording, domain: Domain) -> Handy:
    """A tool of this domain by a name and keys of its own, which may say nothing."""
    speaks = d.chance(0.7)
    parts = [d.one(*domain.verbs), d.one(*domain.nouns)] if d.chance(0.7) else [d.one(*domain.nouns)]
    name = words.identifier(d, *parts) if speaks else words.identifier(d)
    keys: list[str] = []
    for field in domain.fields:
        key = d.one(*field.keys) if d.chance(0.8) else words.identifier(d)
        keys.append(key if key not in keys else words.identifier(d, key, words.any_word(d)))
    means = "" if speaks and d.chance(0.3) else d.one(*domain.means)
    return Handy(domain, name, means, tuple(keys))


def value_of(d: Wording, kind: str) -> Any:
    if kind == "number":
        return d.number(1, d.one(12, 90, 900))
    if kind == "words":
        return (words.phrase(d, 4) or words.any_word(d)).replace("-", " ")
    if kind == "title":
        return " ".join(cap(words.any_word(d)) for _ in range(d.one(1, 2)))
    if kind == "name":
        return words.name_of(d)
    if kind == "city":
        return city(d)
    if kind == "thing":
        return words.thing(d)
    if kind == "day" and d.chance(0.2):
        return f"{d.one('May', 'June', 'July', 'March', 'August')} {d.number(1, 28)}"
    return d.one(*{"language": _LANGUAGES, "room": _ROOMS, "state": ("on", "off"), "day": _DAYS}[kind])


def city(d: Wording) -> str:
    return d.one(*_CITIES) if d.chance(0.6) else cap(words.made_up(d))
