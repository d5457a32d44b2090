"""Numbers in words."""

from __future__ import annotations

_SMALL = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen"
).split()
_TENS = "zero ten twenty thirty forty fifty sixty seventy eighty ninety".split()


def spelled(n: int, hyphen: str = "-", link: str = " ") -> str:
    """345 -> `three hundred forty-five`; `link` is what follows `hundred`. n: 0..999 999"""
    if n < 20:
        return _SMALL[n]
    if n < 100:
        tens, ones = divmod(n, 10)
        return _TENS[tens] + (hyphen + _SMALL[ones] if ones else "")
    size, name, before = (1000, "thousand", " ") if n >= 1000 else (100, "hundred", link)
    head, rest = divmod(n, size)
    return f"{spelled(head, hyphen, link)} {name}" + (before + spelled(rest, hyphen, link) if rest else "")
