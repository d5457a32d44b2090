"""The text of one call -> its function's name and arguments, or None if it is not written as it should be."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from turnout.server.api.parsing.family import CallFormat
from turnout.server.api.parsing.parts import Call, new_call_id

Schemas = Mapping[str, Mapping[str, Any]]  # function -> its JSON schema, for the types of arguments in tags


def read_call(written: CallFormat, body: str, schemas: Schemas) -> Call | None:
    """body: what stood between the marks `begin` and `end`."""
    head = _compiled(written.head).match(body)
    if head is None:
        return None
    rest = body[head.end() :].strip()
    if not rest.endswith(written.tail):
        return None
    rest = rest[: len(rest) - len(written.tail)].rstrip()
    found = head.groupdict()
    if "name" not in found:
        return _object_call(rest)
    name, call_id = found["name"], found.get("id") or new_call_id()
    if written.parameter is None:
        return json_call(name, rest, call_id)
    arguments = _tagged_arguments(_compiled(written.parameter), rest, schemas.get(name, {}))
    return None if arguments is None else _call(name, arguments, call_id)


def arguments_begin(written: CallFormat | None) -> re.Pattern[str] | None:
    """What comes before the JSON object of a call's arguments, with the groups of `CallFormat.head`; None for
    arguments in tags, whose types only the whole shows. written: None where nothing comes before them."""
    if written is None:
        return _compiled(r"\s*(?=\{)")
    if written.parameter is not None:
        return None
    head = written.head if "(?P<name>" in written.head else written.head + _OBJECT_HEAD
    return _compiled(head + r"\s*(?=\{)")


_OBJECT_HEAD = r'\s*\{\s*"name"\s*:\s*"(?P<name>[^"\\]+)"\s*,\s*"arguments"\s*:'


def same_arguments(one: str, other: str) -> bool:
    """Whether two texts are the same JSON value."""
    value = _decoded(one)
    return value is not _BROKEN and value == _decoded(other)


def json_call(name: str, arguments: str, call_id: str | None = None) -> Call | None:
    """A call with the arguments as the model wrote them, if they are a JSON object."""
    if not isinstance(_decoded(arguments), dict):
        return None
    return Call(name, arguments, call_id or new_call_id())


def _object_call(text: str) -> Call | None:
    """Of an object that holds name and arguments; these as an object, or as the text of one."""
    call = _decoded(text)
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        return None
    arguments = call.get("arguments", {})
    if isinstance(arguments, str):
        return json_call(call["name"], arguments)
    return _call(call["name"], arguments, new_call_id()) if isinstance(arguments, dict) else None


def _call(name: str, arguments: dict[str, Any], call_id: str) -> Call | None:
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        try:
            text.encode()
        except UnicodeEncodeError:  # half a surrogate pair, which a model may write as \ud83d
            text = json.dumps(arguments, allow_nan=False)
        name.encode()
    except (ValueError, RecursionError):  # infinity, which JSON writes as 1e999; very deep
        return None
    return Call(name, text, call_id)


def _tagged_arguments(
    parameter: re.Pattern[str], text: str, schema: Mapping[str, Any]
) -> dict[str, Any] | None:
    properties = schema.get("properties")
    arguments: dict[str, Any] = {}
    at = 0
    while at < len(text):
        found = parameter.match(text, at)
        if found is None:
            return None
        key, value, is_text = found["key"], found["value"], found.groupdict().get("is_text")
        if is_text is not None:
            arguments[key] = value if is_text == "true" else _json_or_text(value)
        else:
            own = properties.get(key) if isinstance(properties, Mapping) else None
            arguments[key] = _typed(value, _types(own))
        space = _SPACE.match(text, found.end())
        assert space is not None
        at = space.end()
    return arguments


def is_text(schema: Any) -> bool:
    """Whether an argument in tags by this schema stands there as it is, and not as JSON."""
    return _types(schema) == {"string"}


def _types(schema: Any) -> set[str]:
    """The JSON types that a schema names; none if it does not say."""
    if not isinstance(schema, Mapping):
        return set()
    declared = schema.get("type")
    types = {declared} if isinstance(declared, str) else set()
    if isinstance(declared, list):
        types |= {name for name in declared if isinstance(name, str)}
    for several in ("anyOf", "oneOf"):
        choices = schema.get(several)
        for choice in choices if isinstance(choices, list) else ():
            types |= _types(choice)
    enum = schema.get("enum")
    if not types and isinstance(enum, list) and enum and all(isinstance(value, str) for value in enum):
        types.add("string")
    return types


def _typed(raw: str, types: set[str]) -> Any:
    """An argument in tags as its schema wants it; as text if it cannot be read so."""
    if types == {"string"}:
        return raw
    if raw.strip() in _PYTHON and (not types or types & {"boolean", "null"}):  # templates print Python's
        return _PYTHON[raw.strip()]
    value = _json_or_text(raw)
    if isinstance(value, float) and value.is_integer() and "integer" in types and "number" not in types:
        return int(value)
    return value if not types or _is_one_of(value, types) else raw


_PYTHON = {"True": True, "False": False, "None": None}
_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "null": (type(None),),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "object": (dict,),
    "array": (list,),
}


def _is_one_of(value: Any, types: set[str]) -> bool:
    return any(
        isinstance(value, _JSON_TYPES.get(name, ())) and (name == "boolean" or not isinstance(value, bool))
        for name in types
    )


def _json_or_text(raw: str) -> Any:
    value = _decoded(raw)
    return raw if value is _BROKEN else value


_BROKEN = object()
_SPACE = re.compile(r"\s*")


def _decoded(text: str) -> Any:
    """The JSON value `text`, or _BROKEN."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return _BROKEN


def _refuse(name: str) -> NoReturn:
    raise ValueError(name)  # NaN and Infinity, which Python takes for JSON


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.DOTALL)
