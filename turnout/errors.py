"""The one family of errors that a user can correct.

`UserError` carries a message that names what was wrong and what to do. The command line prints it
without a traceback and exits with code 2; the server answers it as a 4xx. Everything else is a bug
and keeps its traceback.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


class UserError(Exception):
    """Something the user asked for or supplied is wrong; the message says what and how to correct it."""


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """`who` cannot do what was `asked`, because of `limit`; `remedy` says what to change."""

    who: str
    asked: str
    limit: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.who}: {self.asked}: {self.limit}. Remedy: {self.remedy}"


def standing(who: str, obstacles: Iterable[tuple[bool, str, str, str]]) -> list[Refusal]:
    """Those of the obstacles (stands, asked, limit, remedy) that stand."""
    return [Refusal(who=who, asked=a, limit=limit, remedy=r) for stands, a, limit, r in obstacles if stands]


class PlanRefused(UserError):
    """Nothing allowed can run what was asked; carries every refusal found."""

    def __init__(self, headline: str, refusals: Sequence[Refusal]):
        self.headline = headline
        self.refusals = tuple(refusals)
        super().__init__("\n".join([headline, *(f"  - {r}" for r in self.refusals)]))


def listed(names: Iterable[str]) -> str:
    """In the order of the alphabet, for messages."""
    return ", ".join(sorted(names))
