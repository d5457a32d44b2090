"""Drawing what is said, with ways of saying it that are kept out of training.

`Wording.say` takes phrasings and, as `new`, phrasings that only held-out problems use. What is measured with them
is whether the model understands words it was not trained on, rather than numbers it was not trained on.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from tools.demo.stories.draw import PEOPLE, Draw, Person

NOUNS = (
    "apple orange pear banana lemon mango peach plum melon kiwi cherry grape berry olive onion potato carrot tomato "
    "pepper egg cookie muffin bagel cupcake pie roll waffle donut pretzel biscuit cake sandwich pizza taco candy "
    "sweet lollipop chocolate marble stamp sticker button coin shell card bead postcard badge crayon magnet pebble "
    "toy puzzle comic pen pencil notebook ruler eraser marker folder candle cup plate bowl spoon fork towel lamp "
    "book shirt hat ball sock glove scarf shoe ring necklace bracelet balloon kite doll robot car truck boat train "
    "rose tulip lily daisy orchid sunflower violet tree bush plant seed leaf flower chicken goat sheep cow duck "
    "horse rabbit pig cat dog fish bird bee frog chair table window door brick tile nail screw bolt bottle can "
    "photo picture letter stone rock feather ticket token key battery cable phone tablet game block bean nut "
    "bucket blanket pillow poster magazine newspaper song video page question point"
).split()
HELDOUT_NOUNS = "turnip dumpling lantern acorn teapot whistle trophy mug cushion snail radish keyring".split()
COLORS = "red blue green yellow white black purple small large old new fresh wooden golden".split()
_PLURALS = {
    "sheep": "sheep", "fish": "fish", "leaf": "leaves", "potato": "potatoes", "tomato": "tomatoes", "mango": "mangos",
    "battery": "batteries", "cherry": "cherries", "berry": "berries", "candy": "candies", "lily": "lilies",
    "daisy": "daisies", "photo": "photos", "person": "people", "child": "children", "shelf": "shelves",
}  # fmt: skip
MORE_NAMES = (
    "Aisha/she Alice/she Clara/she Elena/she Eva/she Fiona/she Gina/she Helen/she Iris/she Jane/she Kim/she Lena/she "
    "Lucy/she Mary/she Nora/she Paula/she Rachel/she Ruth/she Susan/she Wendy/she Yuki/she Betty/she Janet/she "
    "Alex/he Andrew/he Bob/he Brian/he Chris/he Dan/he Eric/he Frank/he Greg/he Ian/he John/he Ken/he Luis/he "
    "Mark/he Mike/he Nick/he Peter/he Robert/he Steve/he Tim/he Will/he Hiro/he Pablo/he Bill/he Josh/he"
).split()
NAMES = (
    *PEOPLE,
    *(
        Person(name, he, *(("her", "her") if he == "she" else ("him", "his")))
        for name, he in (entry.split("/") for entry in MORE_NAMES)
    ),
)
FAMILY = (
    Person("my sister", "she", "her", "her"), Person("my brother", "he", "him", "his"),
    Person("a farmer", "he", "him", "his"), Person("a baker", "she", "her", "her"),
    Person("the teacher", "she", "her", "her"), Person("my uncle", "he", "him", "his"),
    Person("my mom", "she", "her", "her"), Person("a boy", "he", "him", "his"), Person("a girl", "she", "her", "her"),
    Person("a shopkeeper", "he", "him", "his"), Person("our neighbor", "he", "him", "his"),
)  # fmt: skip
ME = Person("I", "I", "me", "my")

# Base form -> third person, past.
_VERBS = {
    "have": ("has", "had"), "be": ("is", "was"), "buy": ("buys", "bought"), "get": ("gets", "got"),
    "give": ("gives", "gave"), "sell": ("sells", "sold"), "lose": ("loses", "lost"), "find": ("finds", "found"),
    "eat": ("eats", "ate"), "make": ("makes", "made"), "take": ("takes", "took"), "throw": ("throws", "threw"),
    "break": ("breaks", "broke"), "win": ("wins", "won"), "put": ("puts", "put"), "bring": ("brings", "brought"),
    "spend": ("spends", "spent"), "pay": ("pays", "paid"), "read": ("reads", "read"), "run": ("runs", "ran"),
    "drive": ("drives", "drove"), "ride": ("rides", "rode"), "write": ("writes", "wrote"), "keep": ("keeps", "kept"),
    "leave": ("leaves", "left"), "lend": ("lends", "lent"), "go": ("goes", "went"), "do": ("does", "did"),
    "catch": ("catches", "caught"), "grow": ("grows", "grew"), "swim": ("swims", "swam"), "send": ("sends", "sent"),
    "cost": ("costs", "cost"), "hold": ("holds", "held"), "fill": ("fills", "filled"), "see": ("sees", "saw"),
    "drop": ("drops", "dropped"), "carry": ("carries", "carried"), "plan": ("plans", "planned"),
    "come": ("comes", "came"), "begin": ("begins", "began"), "let": ("lets", "let"), "split": ("splits", "split"),
    "set": ("sets", "set"), "share": ("shares", "shared"), "fly": ("flies", "flew"), "build": ("builds", "built"),
}  # fmt: skip
_MARK = re.compile(
    r"((?:\{f\}|\{w\}|\{W\}|\{a\}|\{n\}|them|more|There|friends|children|people|students) )?\[(\w+)\]"
)


def plural_of(noun: str) -> str:
    if noun in _PLURALS:
        return _PLURALS[noun]
    return noun + "es" if noun.endswith(("s", "x", "ch", "sh")) else noun + "s"


@dataclass
class Told:
    """Who acts and when, from which verbs get their form."""

    who: Person
    past: bool

    def _mark(self, match: re.Match[str]) -> str:
        """A verb after somebody else's name is in the third person, after several things in the plural."""
        before = match[1] or ""
        other = before in ("{f} ", "{w} ", "{W} ")
        told = Told(NAMES[0], self.past) if other else self
        return before + told.verb(match[2], plural=bool(before) and not other)

    def verb(self, base: str, plural: bool = False) -> str:
        third, past = _VERBS.get(base) or (_third(base), base + ("d" if base.endswith("e") else "ed"))
        if self.past:
            return "were" if base == "be" and plural else past
        if base == "be":
            return "am" if self.who is ME else "are" if plural else third
        return base if self.who is ME or plural else third

    @property
    def do(self) -> str:
        return "did" if self.past else "do" if self.who is ME else "does"

    def __call__(self, text: str, **values: object) -> str:
        """`[buy]` becomes the verb's form; {S}, {s}, {o}, {his}: the person; the rest as in str.format."""
        text = _MARK.sub(self._mark, text)
        who = self.who
        return text.format(
            S=cap(who.name), N=who.name, s=who.he, H=cap(who.he), o=who.him, his=who.his, do=self.do, **values
        )


def cap(text: str) -> str:
    return text[:1].upper() + text[1:]


def _third(base: str) -> str:
    if base.endswith("y") and base[-2] not in "aeiou":
        return base[:-1] + "ies"
    return base + ("es" if base.endswith(("s", "x", "ch", "sh")) else "s")


class Wording(Draw):
    """unseen: take held-out phrasings and words wherever there are any."""

    def __init__(self, rng: random.Random, unseen: bool):
        super().__init__(rng)
        self.rng, self.unseen = rng, unseen

    def say(self, *options: str, new: tuple[str, ...] = ()) -> str:
        return self.one(*(new if self.unseen and new else options))

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def noun(self) -> str:
        """A thing in the plural, perhaps with an adjective."""
        held_out = self.unseen and self.chance(0.5)
        name = plural_of(self._fresh(tuple(HELDOUT_NOUNS if held_out else NOUNS)))
        return f"{self.one(*COLORS)} {name}" if self.chance(0.1) else name

    def someone(self) -> Person:
        if self.chance(0.12):
            return self._fresh(FAMILY)
        return self._fresh(NAMES)

    def told(self) -> Told:
        who = ME if self.chance(0.1) else self.someone()
        return Told(who, past=self.chance(0.5))

    def amount(self, low: int = 2, high: int = 99) -> int:
        """Small numbers more often than large ones."""
        return self.number(low, max(low, min(high, self.one(12, 30, high, high))))
