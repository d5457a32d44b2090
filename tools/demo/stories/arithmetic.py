"""Integers that remember how they were worked out, in steps a small model can follow.

A multiplication of two longer numbers is split by the digits of one factor, and a sum of several
terms is added up from the left, so that every `=` is one thing to do in the head.
"""

from __future__ import annotations

from collections.abc import Sequence


class Worked(int):
    """A result; `work` is its derivation, such as `24 * 35 = 24 * 30 + 24 * 5 = 720 + 120 = 840`."""

    work: str

    def __new__(cls, value: int, work: str) -> Worked:
        self = super().__new__(cls, value)
        self.work = work
        return self


def plus(*terms: int) -> Worked:
    """The sum, added from the left: `3 + 4 + 5 = 7 + 5 = 12`."""
    return Worked(sum(terms), " = ".join(_sums(terms)))


def minus(a: int, b: int) -> Worked:
    return Worked(a - b, f"{a} - {b} = {a - b}")


def times(a: int, b: int) -> Worked:
    """The product; worked out in parts unless one factor has a single significant digit."""
    return Worked(a * b, " = ".join(_product(a, b)))


def divide(a: int, b: int) -> Worked:
    """The exact quotient; raises ValueError if there is a remainder."""
    if a % b:
        raise ValueError(f"{a} / {b} leaves a remainder")
    return Worked(a // b, f"{a} / {b} = {a // b}")


def percent(rate: int, whole: int) -> Worked:
    """`rate` percent of `whole`; raises ValueError if that is no integer."""
    *stages, product = _product(whole, rate)
    quotient = divide(int(product), 100)
    scaled = [f"({stage}) / 100" if "+" in stage else f"{stage} / 100" for stage in stages]
    return Worked(quotient, " = ".join([*scaled, quotient.work]))


def _product(a: int, b: int) -> list[str]:
    """Each stage of multiplying, the result last."""
    whole = f"{a} * {b}"
    if _easy(a, b):
        return [whole, str(a * b)]
    if len(_places(a)) > 1 and len(_places(b)) == 1:
        parts = [(place, b) for place in _places(a)]
    else:
        parts = [(a, place) for place in _places(b)]
    split = " + ".join(f"{x} * {y}" for x, y in parts)
    return [whole, split, *_sums([x * y for x, y in parts])]


def _sums(terms: Sequence[int]) -> list[str]:
    """Each stage of adding from the left, the total last."""
    stages = []
    while len(terms) > 1:
        stages.append(" + ".join(map(str, terms)))
        terms = [terms[0] + terms[1], *terms[2:]]
    return [*stages, str(terms[0])]


def _places(n: int) -> list[int]:
    """345 -> [300, 40, 5]; zeros are left out."""
    digits = str(n)
    return [int(c) * 10 ** (len(digits) - 1 - i) for i, c in enumerate(digits) if c != "0"]


def _easy(a: int, b: int) -> bool:
    """True if the product is known rather than worked out: at most two significant digits times one."""
    short, long = sorted((len(str(a).rstrip("0")), len(str(b).rstrip("0"))))
    return short == 1 and long <= 2
