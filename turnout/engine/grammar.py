"""Grammars that an output must follow, in llguidance's dialect of Lark. Torch-free.

The right side of a rule is called an expression: `json_value`, `matching`, `literal` and `lark` make some
from what requests say, `sequence`, `one_of` and `repeated` join them, and `grammar` makes one the whole of an
output. What `lark`, `among_text` and `in_channels` make goes on over several lines and must stand last in its
rule. `SamplingParams.grammar` takes the result; `check` says beforehand whether it can be compiled.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from turnout.errors import UserError

MAX_DEPTH = 64  # of schemas inside each other
MAX_BYTES = 64 * 2**10  # of a grammar
LIMITS = LLParserLimits(max_grammar_size=20_000, verbose_errors=False)  # to compile more takes over 0.2 s
# Between JSON's tokens: a space, or a new line and its indentation. Models that are unsure write blanks
# without end where they may.
WHITESPACE = r" |\n[ \t]{0,32}"

ANY_OBJECT: dict[str, Any] = {"type": "object"}
SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions")
SCHEMA_LISTS = ("anyOf", "allOf", "oneOf", "prefixItems")
SCHEMAS = ("additionalProperties", "additionalItems", "items")
RULES = (
    *("type", "enum", "const", "$ref", "required", "minProperties", "maxProperties", "minItems", "maxItems"),
    *("minLength", "maxLength", "pattern", "format", "minimum", "maximum", "exclusiveMinimum"),
    *("exclusiveMaximum", "multipleOf"),
)
ANNOTATIONS = (
    *("$schema", "$id", "id", "$comment", "$anchor", "title", "description", "default", "example"),
    *("examples", "deprecated", "readOnly", "writeOnly", "discriminator", "xml", "externalDocs"),
)
KNOWN = frozenset((*SCHEMA_MAPS, *SCHEMA_LISTS, *SCHEMAS, *RULES, *ANNOTATIONS))


@dataclass(frozen=True, kw_only=True)
class Reasoning:
    """What a model may think before an answer that follows a grammar: the texts around it, and whether the
    prompt ended after the first. without: the text before an answer that no thought precedes. special: tokens
    (to their ids) whose names stand for them in these texts."""

    begin: str
    end: str
    begun: bool = False
    without: str = ""
    special: Mapping[str, int] = field(default_factory=dict)


def grammar(answer: str, *, after: Reasoning | None = None) -> str:
    """Of outputs that are `answer`, an expression, after reasoning that nothing restricts."""
    if after is None:
        return f"start: answer\nanswer: {answer}\n"
    if any(after.end.startswith(name) for name in after.special):
        thought, end = "thought: /(?s:.*)/", literal(after.end, after.special)
    else:
        thought, end = f"thought[suffix={json.dumps(after.end)}]: /(?s:.*)/", ""
    thinks = f"thought {end} /[ \\n]{{0,8}}/ answer"
    direct = f"({literal(after.without, after.special)}) answer" if after.without else "answer"
    start = thinks if after.begun else f"{direct} | ({literal(after.begin, after.special)}) {thinks}"
    return f"start: {start}\n{thought}\nanswer: {answer}\n"


def json_value(schema: Any, *, whitespace: str | None = WHITESPACE) -> str:
    """JSON that is valid by `schema`. whitespace: a regular expression of what may stand between its tokens;
    None: nothing may. Raises UserError naming the keyword that cannot be followed."""
    _check_schema(schema)
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    style: dict[str, Any] = {"whitespace_flexible": whitespace is not None}
    if whitespace is not None:
        style["whitespace_pattern"] = whitespace
    return "%json " + json.dumps({**schema, "x-guidance": style})


def matching(pattern: str) -> str:
    """Text that a regular expression matches as a whole; \\d is a digit of ASCII."""
    return f"/{regex_to_lark(pattern, use_ascii='d')}/"


def literal(text: str, special: Mapping[str, int] | None = None) -> str:
    """`text`, in which each name of a `special` token (to its id) stands for that token or is spelled."""
    if not special:
        return json.dumps(text)
    names = re.compile("(" + "|".join(map(re.escape, sorted(special, key=len, reverse=True))) + ")")
    parts = [part for part in names.split(text) if part]
    return sequence(
        *(
            f"<[{special[part]}]> | {json.dumps(part)}" if part in special else json.dumps(part)
            for part in parts
        )
    )


def lark(text: str) -> str:
    """What a grammar in llguidance's Lark or in GBNF describes. Must stand last in its rule.

    Raises UserError.
    """
    try:
        return f"%lark {{\n{any_to_lark(text)}\n}}"
    except Exception as error:  # the converter has several kinds, and none in common
        raise UserError(f"neither Lark nor GBNF: {error}") from None


def sequence(*parts: str) -> str:
    return " ".join(f"({part})" for part in parts)


def one_of(parts: Iterable[str]) -> str:
    return " | ".join(f"({part})" for part in parts)


def repeated(part: str, *, between: str = "") -> str:
    """Once or more, with `between` in between."""
    return f"({part}) ({f'({between})' if between else ''} ({part}))*"


def tool_calls(
    tools: Sequence[tuple[str, Any]],
    call: str,
    *,
    special: Mapping[str, int] | None = None,
    arguments: Callable[[Any], str] | None = None,
) -> str:
    """A call of one of `tools` (name, JSON schema of its arguments; None: any object).

    call: how the model writes one, as a format string of `name`, `arguments` and perhaps `number`, which
    counts calls; braces doubled, as in
    '<tool_call>\\n{{"name": "{name}", "arguments": {arguments}}}\\n</tool_call>'. arguments: of a schema,
    where they are not a JSON object. Raises UserError naming the tool and the keyword of a schema that cannot
    be followed.
    """
    calls = []
    for name, parameters in tools:
        before, after = call.format(name=name, arguments=_PLACE, number=_NUMBER).split(_PLACE)
        try:
            given = (arguments or json_value)(ANY_OBJECT if parameters is None else parameters)
        except UserError as error:
            raise UserError(f"tool {name!r}: {error}") from None
        head = " /[0-9]{1,3}/ ".join(literal(text, special) for text in before.split(_NUMBER))
        calls.append(sequence(head, given, *([literal(after, special)] if after else [])))
    return one_of(calls)


def among_text(calls: str, begin: str, special: Mapping[str, int]) -> str:
    """Any text, in which each `begin` is followed by what `calls` describes."""
    text, rule = until("before_calls", begin, special)
    return f"(({text}) ({calls}))* rest\n{rule}{_REST}"


def in_channels(calls: str, special: Mapping[str, int], *, only_calls: bool) -> str:
    """An answer of GPT-OSS from behind `<|start|>assistant`: messages, the last of which is one of `calls`
    or, unless `only_calls`, a text. A message that is not a call cannot name a recipient."""
    thought, said, final = (
        literal(f"<|channel|>{channel}<|message|>", special)
        for channel in ("analysis", "commentary", "final")
    )
    message, rule = until("message", "<|end|>", special)
    earlier = sequence(one_of([thought, said]), message, literal("<|start|>assistant", special))
    if only_calls:
        return f"({earlier})* ({calls})\n{rule}"
    return f"({earlier})* (({calls}) | ({one_of([thought, said, final])}) rest)\n{rule}{_REST}"


def until(name: str, mark: str, special: Mapping[str, int]) -> tuple[str, str]:
    """Any text up to and with the first `mark`: an expression, and the rule `name` that it uses.

    Of a mark with tokens in it both spellings count: whether the tokeniser's file calls a token special
    decides which of them llguidance sees.
    """
    rule = f"{name}[suffix={json.dumps(mark)}]: /(?s:.*)/\n"
    at = min((place for token in special if (place := mark.find(token)) >= 0), default=None)
    if at is None:
        return name, rule
    before = re.escape(mark[:at]).replace("/", "\\/").replace("\\\n", "\\n")
    return f"{name} | /(?s:.*){before}/ {literal(mark[at:], special)}", rule


_REST = "rest: /(?s:.*)/\n"
_PLACE, _NUMBER = "\0", "\1"  # stand in no template
_TAGLESS = r"([^<]|<+[^<\/])*"  # text in which no tag ends
_OF_TEXTS = {"type", "enum", "const", "title", "description", "default", "examples"}


def tagged_arguments(
    schema: Mapping[str, Any],
    argument: str,
    *,
    is_text: Callable[[Any], bool],
    special: Mapping[str, int] | None = None,
) -> str:
    """The properties of an object, each in tags, in their order; those that are not required may be missing.

    argument: how one is written, as a format string of `key`, `value` and `is_text`. is_text: whether values
    of a schema stand there as they are; others as JSON. Raises UserError naming what cannot be written so.
    """
    properties, required = schema.get("properties", {}), set(schema.get("required", ()))
    if unknown := required - properties.keys():
        raise UserError(f"required: {min(unknown)!r} is not one of the properties")
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    parts = ['""']
    for key, own in properties.items():
        if not key or re.search(r'[<>"\s]', key):
            raise UserError(f"properties: {key!r} cannot be the name of an argument in tags")
        text = is_text(own)
        written = argument.format(key=key, value=_PLACE, is_text=str(text).lower())
        before, after = written.split(_PLACE)
        if text:
            rest = _text(key, own, after, special)
        else:
            value = json_value({**shared, **own} if isinstance(own, dict) else own)
            rest = sequence(value, literal(after, special))
        part = sequence(literal(before, special), rest)
        parts.append(part if key in required else f"({part})?")
    return sequence(*parts)


def _text(key: str, schema: Mapping[str, Any], after: str, special: Mapping[str, int] | None) -> str:
    """A text by a schema, up to the first `</`, and the tag `after` it."""
    if further := schema.keys() - _OF_TEXTS:
        raise UserError(f"{min(further)}: cannot be followed in {key!r}, whose text stands in tags")
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    if choices is not None:
        texts = [choice for choice in choices if isinstance(choice, str)]
        return sequence(one_of(map(json.dumps, texts)), literal(after, special))
    if any(mark in after for mark in special or ()):
        return sequence(f"/{_TAGLESS}/", literal(after.lstrip("\n"), special))
    # One lexeme: alone, the text would take the beginning of the tag, and then there is no way back.
    tag = re.escape(after).replace("\\\n", "\\n").replace("/", "\\/")
    return f"/{_TAGLESS}{tag}/"


def check(grammar: str) -> None:
    """Raise UserError with llguidance's reason if `grammar` cannot be compiled.

    Takes about a millisecond, and some tenths of a second for what is made for that; other threads run
    meanwhile.
    """
    if len(grammar) > MAX_BYTES:
        raise UserError(
            f"the grammar has {len(grammar)} bytes, at most {MAX_BYTES} are compiled; make it smaller"
        )
    if reason := _why_not(grammar):
        raise UserError(reason)


@lru_cache(maxsize=64)
def _why_not(grammar: str) -> str:
    matcher = LLMatcher(_bytes_only(), grammar, log_level=0, limits=LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()  # some limits are met only here
    if not matcher.is_error():
        return ""
    reason = _without_source(matcher.get_error())
    keyword = next((name for start, name in _KEYWORDS.items() if reason.startswith(start)), "")
    return f"{keyword}: {reason}" if keyword and "%json" in grammar else reason


_KEYWORDS = {"regex parse error": "pattern", "Pointer ": "$ref"}  # of schemas, where the library omits them


def _without_source(message: str) -> str:
    """The library shows its state, and the grammar around a mistake in a form that the user never wrote."""
    lines = re.split(r"<(?:backtrace|state|grammar)>", message)[0].splitlines()
    text = " ".join(" ".join(line for line in lines if not re.match(r"\s*(\d+ \||\^$)", line)).split())
    return re.sub(r"^(at \d+\(\d+\): |failed to compile JSON schema: )+", "", text)


@cache
def _bytes_only() -> LLTokenizer:
    """A vocabulary of all bytes: whether a grammar compiles does not depend on the model's."""

    class Bytes:
        eos_token_id, bos_token_id, special_token_ids = 256, None, [256]
        tokens = [*(bytes([byte]) for byte in range(256)), b"<|end|>"]

        def __call__(self, text: bytes) -> list[int]:
            return list(text)

    return LLTokenizer(TokenizerWrapper(Bytes()))


def _check_schema(schema: Any) -> None:
    """Raise UserError unless every keyword in `schema` is one that llguidance follows, or an annotation. It
    passes over those that it has never heard of, so that a misspelt one would be ignored."""
    pending: list[tuple[str, Any, int]] = [("schema", schema, 0)]
    while pending:
        where, part, depth = pending.pop()
        if depth > MAX_DEPTH:
            raise UserError(
                f"schemas stand more than {MAX_DEPTH} levels deep in each other; flatten them with $ref"
            )
        if isinstance(part, bool):
            continue
        if not isinstance(part, dict):
            raise UserError(f"{where}: must be a JSON schema, which is an object, true or false")
        for keyword, value in part.items():
            _check_keyword(where, keyword, value)
        _check_repeats(where, part)
        pending += ((inner, value, depth + 1) for inner, value in _subschemas(where, part))


def _check_keyword(where: str, keyword: str, value: Any) -> None:
    if keyword not in KNOWN and (not keyword.startswith("x-") or keyword == "x-guidance"):
        close = difflib.get_close_matches(keyword, KNOWN, n=1)
        remedy = f"did you mean {close[0]!r}?" if close else "leave it out, or say it with other keywords"
        raise UserError(f"{where}: keyword {keyword!r} is not supported; {remedy}")
    if keyword in ("exclusiveMinimum", "exclusiveMaximum") and isinstance(value, bool):
        raise UserError(
            f"{where}: {keyword} must be the limit itself, a number; true and false are of draft 4"
        )


def _check_repeats(where: str, schema: Mapping[str, Any]) -> None:
    """Keys without a name of their own may come twice, which the library counts as two and JSON as one."""
    least, required = schema.get("minProperties"), schema.get("required")
    named = len(required) if isinstance(required, list) else 0
    unnamed = schema.get("additionalProperties", True) is not False or schema.get("patternProperties")
    if isinstance(least, int) and least > max(named, 1) and unnamed:
        raise UserError(
            f"{where}: minProperties {least} cannot be kept where keys are free: one may come twice; name "
            f"{least} of them in required, or allow none but `properties`"
        )


def _subschemas(where: str, schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for keyword, value in schema.items():
        if keyword in SCHEMA_MAPS and isinstance(value, dict):
            yield from ((f"{where}.{keyword}.{name}", inner) for name, inner in value.items())
        elif (keyword in SCHEMA_LISTS or keyword == "items") and isinstance(value, list):
            yield from ((f"{where}.{keyword}.{i}", inner) for i, inner in enumerate(value))
        elif keyword in SCHEMAS:
            yield f"{where}.{keyword}", value
