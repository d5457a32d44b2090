"""Varied JSON schemas, drawn from a seed: every keyword that grammars follow, in many combinations."""

from __future__ import annotations

import random
from typing import Any

WORDS = ["id", "name", "größe", "a b", "x-1", 'say "hi"', "back\\slash", "tags", "kind", "next", "値"]
PATTERNS = ["^[a-z]{1,4}$", "^(yes|no)$", "^\\d{2}-\\d{2}$", "[aeiou]", "^x", "^[A-Z][a-z]{0,3}( [A-Z])?$"]
FORMATS = ["date", "time", "date-time", "uuid", "ipv4", "ipv6", "email", "hostname", "uri"]


def draw_schema(seed: int) -> dict[str, Any]:
    """A schema whose values end soon even if every choice in them is random."""
    draw = random.Random(seed)
    schema = _object(draw, 2) if draw.random() < 0.6 else _any(draw, 2)
    if draw.random() < 0.2:
        name = draw.choice(["item", "node"])
        place = draw.choice(["$defs", "definitions"])
        schema = {
            "type": "object",
            "properties": {"first": {"$ref": f"#/{place}/{name}"}, "second": {"$ref": f"#/{place}/{name}"}},
            "required": ["first"],
            "additionalProperties": False,
            place: {name: schema},
        }
    if draw.random() < 0.3:
        schema |= {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "title": "T",
            "description": "d",
        }
    return schema


def _any(draw: random.Random, depth: int) -> dict[str, Any]:
    leaves = [_string, _string, _integer, _number, _one_value, _enum, _types]
    inner = [_object, _array, _tuple, _any_of, _one_of, _all_of]
    return draw.choice(leaves + inner * bool(depth))(draw, depth - 1)


def _string(draw: random.Random, depth: int) -> dict[str, Any]:
    match draw.randrange(3):
        case 0:
            low = draw.randrange(4)
            return {"type": "string", "minLength": low, "maxLength": low + draw.randrange(5)}
        case 1:
            return {"type": "string", "pattern": draw.choice(PATTERNS), "maxLength": 40}
        case _:
            return {"type": "string", "format": draw.choice(FORMATS)}


def _integer(draw: random.Random, depth: int) -> dict[str, Any]:
    low = draw.randint(-1000, 1000)
    schema: dict[str, Any] = {"type": "integer", "minimum": low, "maximum": low + draw.randrange(3000)}
    if draw.random() < 0.2:
        return {"type": "integer", "multipleOf": draw.choice([2, 5, 10]), "minimum": 0, "maximum": 1000}
    if draw.random() < 0.3:
        schema["exclusiveMinimum"] = schema.pop("minimum") - 1
    return schema


def _number(draw: random.Random, depth: int) -> dict[str, Any]:
    low = draw.randint(-100, 100)
    bounds = draw.choice([("minimum", "maximum"), ("exclusiveMinimum", "exclusiveMaximum")])
    return {"type": "number", bounds[0]: low, bounds[1]: low + draw.choice([1, 2.5, 1000])}


def _one_value(draw: random.Random, depth: int) -> dict[str, Any]:
    return {"const": draw.choice([None, True, 0, -1.5, "text", [1, {"a": None}], {"k": ["v"]}])}


def _enum(draw: random.Random, depth: int) -> dict[str, Any]:
    return {"enum": draw.sample([None, False, 1, 2.5, "", "a", "ab", "ü", [], {"x": 1}], draw.randint(1, 5))}


def _types(draw: random.Random, depth: int) -> dict[str, Any]:
    return {"type": draw.sample(["null", "boolean"], 2)} if draw.random() < 0.5 else {"type": "boolean"}


def _object(draw: random.Random, depth: int) -> dict[str, Any]:
    names = draw.sample(WORDS, draw.randint(0, 4))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: _any(draw, depth) for name in names},
        "required": draw.sample(names, draw.randint(0, len(names))),
        "additionalProperties": False,
    }
    if draw.random() < 0.15:
        low = draw.randrange(2)
        return {
            "type": "object",
            "patternProperties": {"^[ab]{1,3}$": _any(draw, 0)},
            "additionalProperties": False,
            "minProperties": low,
            "maxProperties": low + 1,
        }
    return schema


def _array(draw: random.Random, depth: int) -> dict[str, Any]:
    low = draw.randrange(3)
    return {"type": "array", "items": _any(draw, depth), "minItems": low, "maxItems": low + draw.randrange(3)}


def _tuple(draw: random.Random, depth: int) -> dict[str, Any]:
    first = [_any(draw, depth) for _ in range(draw.randint(1, 3))]
    return {"type": "array", "prefixItems": first, "items": False, "minItems": draw.randint(0, len(first))}


def _any_of(draw: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_any(draw, depth) for _ in range(draw.randint(1, 3))]}


def _one_of(draw: random.Random, depth: int) -> dict[str, Any]:
    """Of different types, so that no value is two of them."""
    return {"oneOf": draw.sample([_string(draw, 0), _integer(draw, 0), {"type": "null"}], 2)}


def _all_of(draw: random.Random, depth: int) -> dict[str, Any]:
    low = draw.randrange(3)
    return {"allOf": [{"type": "string", "minLength": low}, {"maxLength": low + 4}]}
