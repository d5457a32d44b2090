"""How the answer to a request is parsed: reasoning, calls of tools, and calls that it must consist of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from turnout.engine.grammar import Reasoning
from turnout.engine.tokenizer import Tokenizer
from turnout.server.api.errors import invalid
from turnout.server.api.parsing.calls import Schemas
from turnout.server.api.parsing.family import Family
from turnout.server.api.parsing.parts import Parser
from turnout.server.api.parsing.registry import Parsers
from turnout.server.api.protocol import ChatBody
from turnout.server.api.structured import Restrictions
from turnout.server.api.tools import restricted_calls

OPENING_TOKENS = 128  # of a prompt's end, which may open the answer: a mark and an empty thought


@dataclass(frozen=True, kw_only=True)
class Parsing:
    """How the answers to one request are parsed; by default not at all.

    kept:     tokens that the parsers must see, special or not
    thoughts: the family that says how the model reasons, whether or not answers hold it apart
    names:    ids of added tokens in the marks of reasoning and calls
    calls:    the form that calls must have, and whether the answer consists of them
    streams:  arguments of calls are handed out while the model writes them
    """

    parsers: Parsers = field(default_factory=Parsers)
    schemas: Schemas = field(default_factory=dict)
    kept: frozenset[int] = frozenset()
    one_call: bool = False
    thoughts: Family | None = None
    names: Mapping[str, int] = field(default_factory=dict)
    calls: Restrictions = field(default_factory=dict)
    streams: bool = False

    @classmethod
    def of(cls, body: ChatBody, model: Parsers, tokenizer: Tokenizer) -> Self:
        """For a chat. model: how it writes reasoning and calls. Raises ApiError for tools whose calls could
        not be read."""
        if body.offered and model.calls is None:
            raise invalid(
                "tools: it is not known how this model writes calls; start the server with "
                "--tool-call-parser and the name of its family, or leave tools out",
                "tools",
            )
        parsers = Parsers(
            model.calls if body.offered else None,
            model.reasoning if body.separate_reasoning is not False else None,
        )
        schemas = {tool.function.name: tool.schema_of_arguments for tool in body.offered}
        names = tokenizer.added_in(model.marks())
        return cls(
            parsers=parsers,
            schemas=schemas,
            kept=frozenset(tokenizer.added_in(parsers.marks()).values()),
            one_call=body.parallel_tool_calls is False,
            thoughts=model.reasoning,
            names=names,
            calls=restricted_calls(body, model.calls, names) if body.offered else {},
            streams=bool(body.stream),
        )

    def thinking(self, tokenizer: Tokenizer, prompt_ids: list[int]) -> Reasoning | None:
        """What may come before an answer that must have a form."""
        if self.calls and self.thoughts is not None and self.thoughts.harmony:
            return None  # thoughts are messages, of which the calls' grammar knows
        return Parsers(reasoning=self.thoughts).thoughts(_end(tokenizer, prompt_ids), self.names)

    def parser(self, tokenizer: Tokenizer, prompt_ids: list[int]) -> Parser | None:
        if self.parsers == Parsers():
            return None
        opening = _end(tokenizer, prompt_ids)
        return self.parsers.parser(self.schemas, opening, streams_arguments=self.streams)


def _end(tokenizer: Tokenizer, prompt_ids: list[int]) -> str:
    return tokenizer.decode(prompt_ids[-OPENING_TOKENS:], skip_special_tokens=False)
