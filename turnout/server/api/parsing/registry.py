"""The families by the names of --tool-call-parser and --reasoning-parser, and which of them a model is of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from turnout.engine.grammar import Reasoning
from turnout.errors import UserError
from turnout.server.api.parsing.calls import Schemas
from turnout.server.api.parsing.families import (
    deepseek_v3,
    deepseek_v4,
    deepseek_v31,
    deepseek_v32,
    glm45,
    gpt_oss,
    kimi_k2,
    minimax_m2,
    qwen3,
    qwen3_coder,
)
from turnout.server.api.parsing.family import Family
from turnout.server.api.parsing.harmony import FINAL, START, THOUGHT, TOKENS, HarmonyParser
from turnout.server.api.parsing.parts import Parser
from turnout.server.api.parsing.tagged import TaggedParser

# In the order in which `auto` looks for their signs.
FAMILIES = tuple(
    module.FAMILY
    for module in (
        gpt_oss,
        deepseek_v32,
        deepseek_v4,
        kimi_k2,
        deepseek_v3,
        deepseek_v31,
        minimax_m2,
        glm45,
        qwen3_coder,
        qwen3,
    )
)
CALL_PARSERS = {name: family for family in FAMILIES for name in family.names}
REASONING_PARSERS = {name: family for family in FAMILIES for name in family.reasoning_names}
# What templates write where the assistant's answer begins.
ANCHORS = (
    "<|im_start|>assistant",
    "<｜Assistant｜>",
    "<|assistant|>",
    "<|im_assistant|>assistant<|im_middle|>",
    "]~b]ai",
    "<|start|>assistant",
)


@dataclass(frozen=True)
class Parsers:
    """What is looked for in the answers of one model: calls and reasoning, each of a family or not at all."""

    calls: Family | None = None
    reasoning: Family | None = None

    @classmethod
    def chosen(
        cls, calls: str, reasoning: str, *, template: str | None = None, model_type: str | None = None
    ) -> Parsers:
        """By the flags --tool-call-parser and --reasoning-parser; `auto` by the chat template, or else by the
        `model_type` of config.json. Raises UserError for a name that is unknown, or names that do not go
        together."""
        own = family_of(template, model_type)
        thinks = own is not None and (own.harmony or own.reasoning.close in (template or ""))
        if own is None and template is not None and "</think>" in template:
            own, thinks = qwen3.FAMILY, True
            calls = "none" if calls == "auto" else calls
        found = cls(
            _named(calls, own, CALL_PARSERS, "--tool-call-parser"),
            _named(reasoning, own if thinks else None, REASONING_PARSERS, "--reasoning-parser"),
        )
        pair = (found.calls, found.reasoning)
        if None not in pair and len({family.harmony for family in pair if family}) == 2:
            raise UserError(
                f"--tool-call-parser {calls} and --reasoning-parser {reasoning}: one is GPT-OSS's, the other "
                "is not, but a model writes both in one format; give one of them, or none"
            )
        return found

    def marks(self) -> list[str]:
        """The texts that these parsers must see, also where they are special tokens."""
        marks: list[str] = []
        for family in (self.calls, self.reasoning):
            if family is not None and family.harmony:
                marks += TOKENS
        if self.reasoning is not None and not self.reasoning.harmony:
            marks += [self.reasoning.reasoning.open, self.reasoning.reasoning.close]
        if self.calls is not None and self.calls.calls is not None:
            written = self.calls.calls
            marks += [*(written.section or ()), written.begin, written.end, *written.separators]
            marks += [written.parameter or ""]
        return marks

    def thoughts(self, prompt: str, special: Mapping[str, int]) -> Reasoning | None:
        """What may come before an answer that follows a grammar; None if the answer begins at once.

        prompt: as in `parser`. special: tokens by their names.
        """
        if self.reasoning is None:
            return None
        marks, opening = self.reasoning.reasoning, answer_in(prompt)
        if self.reasoning.harmony:
            end = f"<|end|>{START}assistant{FINAL}"
            return None if opening else Reasoning(begin=THOUGHT, end=end, without=FINAL, special=special)
        if marks.close in opening:
            return None
        return Reasoning(begin=marks.open, end=marks.close, begun=marks.open in opening, special=special)

    def parser(self, schemas: Schemas, prompt: str, *, streams_arguments: bool = False) -> Parser | None:
        """One for one answer; None if there is nothing to look for.

        prompt: its end, which may hold the beginning of the answer. streams_arguments: of calls of the
        functions in `schemas`, where their format allows it; else calls come whole.
        """
        opening = answer_in(prompt)
        if self.calls is None and self.reasoning is None:
            return None
        if any(family is not None and family.harmony for family in (self.calls, self.reasoning)):
            return HarmonyParser(
                reasoning=self.reasoning is not None,
                calls=self.calls is not None,
                opening=opening,
                streamed_functions=schemas if streams_arguments else (),
            )
        return TaggedParser(
            self.reasoning.reasoning if self.reasoning else None,
            self.calls.calls if self.calls else None,
            schemas,
            opening=opening,
            streams_arguments=streams_arguments,
        )


def family_of(template: str | None, model_type: str | None = None) -> Family | None:
    """The family of a model by its chat template, or else its `model_type`."""
    for family in FAMILIES:
        if template is not None and all(sign in template for sign in family.signs):
            return family
    if template is None or "tools" not in template:
        return None
    return next((family for family in FAMILIES if model_type in family.model_types), None)


def _named(name: str, own: Family | None, known: dict[str, Family], flag: str) -> Family | None:
    if name == "auto":
        return own
    if name == "none":
        return None
    found = known.get(name.lower().replace("-", "_"))
    if found is None:
        raise UserError(f"{flag} {name!r}: unknown; known: auto, none, {', '.join(sorted(known))}")
    return found


def answer_in(opening: str) -> str:
    """The beginning of the answer in the end of a prompt: what stands behind the last mark of an assistant's
    turn, or the last line if there is no mark."""
    starts = [at + len(anchor) for anchor in ANCHORS if (at := opening.rfind(anchor)) >= 0]
    return opening[max(starts) :] if starts else opening.rstrip().rpartition("\n")[2]
