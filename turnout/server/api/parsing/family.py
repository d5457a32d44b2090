"""How a family of models writes reasoning and calls of tools: data that `tagged` and `calls` interpret."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ReasoningMarks:
    open: str = "<think>"
    close: str = "</think>"


@dataclass(frozen=True, kw_only=True)
class CallFormat:
    """begin, end:      literal text before and after one call
    section:        the same around all calls, where there is such
    head:           regular expression for what comes first within a call; its group `name` is the function's,
                    `id` the call's. Without the group `name`, the call is a JSON object of name and arguments
    tail:           literal text that comes last within a call
    parameter:      regular expression of one argument: groups `key`, `value`, and perhaps `is_text` ("true":
                    the value is text, "false": it is JSON). None: all arguments are one JSON object
    separators:     literal marks in `head`
    in_strings:     whether `end` may stand in a JSON string, where it ends nothing
    ends_reasoning: the first mark also ends reasoning that was not closed
    written:        one call with its marks, a format string of grammar.tool_calls
    written_argument: one argument in tags, as a format string of `key`, `value` and `is_text`
    """

    begin: str
    end: str
    section: tuple[str, str] | None = None
    head: str = ""
    tail: str = ""
    parameter: str | None = None
    separators: tuple[str, ...] = ()
    in_strings: bool = False
    ends_reasoning: bool = False
    written: str
    written_argument: str | None = None


@dataclass(frozen=True, kw_only=True)
class Family:
    """names:       of --tool-call-parser, ours first, then those of SGLang and vLLM, with _ for -
    reasoning_names: of --reasoning-parser, in the same way
    signs:       texts that a chat template of this family holds, all of them; of families that match, the
                 first in `registry.FAMILIES` is taken
    model_types: of config.json, for models whose folder has no chat template or one without signs
    harmony:     the answer is a sequence of messages in channels, see `harmony`; no other field counts then
    """

    names: tuple[str, ...]
    reasoning_names: tuple[str, ...] = ()
    signs: tuple[str, ...]
    model_types: tuple[str, ...] = ()
    calls: CallFormat | None = None
    reasoning: ReasoningMarks = ReasoningMarks()
    harmony: bool = False
