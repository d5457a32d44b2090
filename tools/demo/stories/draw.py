"""What stories are made of: people, things, places, numbers, and the turn of a phrase."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Person:
    name: str
    he: str
    him: str
    his: str

    def __str__(self) -> str:
        return self.name

    @property
    def He(self) -> str:
        return self.he.capitalize()

    @property
    def His(self) -> str:
        return self.his.capitalize()


@dataclass(frozen=True)
class Story:
    """A question, the sentences that work it out (one calculation each), and the result."""

    question: str
    steps: tuple[str, ...]
    answer: int


_WOMEN = (
    "Amy Anna Bella Carla Chloe Diana Ella Emma Fatima Grace Hannah Ines Julia Kate Laura Lily Maria "
    "Mei Nina Olivia Priya Rosa Sara Sofia Tina Zoe"
)
_MEN = (
    "Adam Ali Ben Carlos Daniel David Ethan Felix George Henry Ivan Jack James Kofi Leo Liam Marco Max "
    "Noah Omar Oscar Paul Raj Sam Tom Victor"
)
PEOPLE = (
    *(Person(name, "she", "her", "her") for name in _WOMEN.split()),
    *(Person(name, "he", "him", "his") for name in _MEN.split()),
)

# One thing, several things: what a person can own, count, buy and give away.
COLLECTED = (
    "marble stamp sticker button coin shell card bead postcard badge crayon magnet pebble toy puzzle comic"
)
FRUIT = "apple orange pear banana lemon mango peach plum melon kiwi"
BAKED = "cookie muffin bagel cupcake pie roll waffle donut pretzel biscuit"
GOODS = "pen pencil notebook ruler eraser marker folder candle cup plate towel lamp book shirt hat ball"
FLOWERS = "rose tulip lily daisy orchid sunflower violet"
ANIMALS = "chicken goat sheep cow duck horse rabbit pig"
BOXES = "box bag basket crate jar packet carton case"
SHOPS = "a store|a market|a small shop|the corner shop|the supermarket|a fair"
_IRREGULAR = {"sheep": "sheep", "box": "boxes", "lily": "lilies", "daisy": "daisies"}
_GROUPS = {
    group: tuple(words.split())
    for group, words in {
        "collected": COLLECTED,
        "fruit": FRUIT,
        "baked": BAKED,
        "goods": GOODS,
        "flowers": FLOWERS,
        "animals": ANIMALS,
        "boxes": BOXES,
    }.items()
}


def plural(noun: str) -> str:
    return _IRREGULAR.get(noun) or (noun + "es" if noun.endswith(("s", "x", "ch")) else noun + "s")


class Draw:
    """Random choices for one story; people and things within a story are all different."""

    def __init__(self, rng: random.Random):
        self._rng = rng
        self._used: set[object] = set()

    def number(self, low: int, high: int, step: int = 1) -> int:
        """A number in `low..high` inclusive, `low` plus a multiple of `step`."""
        return low + step * int(self._rng.random() * ((high - low) // step + 1))

    def one(self, *options: T) -> T:
        return options[int(self._rng.random() * len(options))]

    def person(self) -> Person:
        return self._fresh(PEOPLE)

    def thing(self, group: str) -> str:
        """A noun in the singular from `group`, one of the lists above."""
        return self._fresh(_GROUPS[group])

    def things(self, group: str) -> str:
        return plural(self.thing(group))

    def shop(self) -> str:
        return self.one(*SHOPS.split("|"))

    def _fresh(self, options: tuple[T, ...]) -> T:
        while (choice := self.one(*options)) in self._used:
            pass
        self._used.add(choice)
        return choice
