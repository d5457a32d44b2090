"""docs/interface.md: the server's routes, fields and flags next to those of vLLM and SGLang.

Ours are read from the code. The others' are in peers.json: the fields of `ChatCompletionRequest` at the
commits named there, and of their routes those that also exist here.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path

from tools.tables import table
from turnout.commands import other_engines
from turnout.config import ServerConfig
from turnout.flags import flag_name
from turnout.server.api.anthropic.body import MessagesBody
from turnout.server.api.body import IGNORED, UNSUPPORTED, Body
from turnout.server.api.openai_responses.body import ResponsesBody
from turnout.server.api.openapi import OPERATIONS
from turnout.server.api.profiling import ProfileBody
from turnout.server.api.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from turnout.server.api.scoring import ScoreBody

PEERS = json.loads(Path(__file__).with_name("peers.json").read_text(encoding="utf-8"))
OTHERS = (
    ("`/v1/rerank`, `/classify`, `/pooling`", "both", "for models that do not generate"),
    ("`/v1/load_lora_adapter`", "both", "there are no adapters"),
    (
        "`/sleep`, `/wake_up`",
        "vLLM",
        "SGLang's are `/release_memory_occupation` and `/resume_memory_occupation`",
    ),
    ("updates of weights", "both", "`POST /restart` loads those that are on disk then"),
)
BODIES: dict[str, type[Body]] = {
    "POST /v1/completions": CompletionBody,
    "POST /v1/responses": ResponsesBody,
    "POST /v1/messages": MessagesBody,
    "POST /v1/score": ScoreBody,
    "POST /tokenize": TokenizeBody,
    "POST /detokenize": DetokenizeBody,
    "POST /start_profile": ProfileBody,
}


def page(notice: str) -> str:
    """docs/interface.md."""
    heads = [f"{name} ({peer['commit']})" for name, peer in PEERS.items()]
    routes = [
        (f"`{operation.method.upper()} {operation.path}`", *_has("routes", operation.path), operation.does)
        for operation in OPERATIONS
    ]
    theirs = {name for peer in PEERS.values() for name in peer["fields"]}
    names = [*ChatBody.model_fields, *sorted(theirs - ChatBody.model_fields.keys())]
    fields = [(f"`{name}`", *_has("fields", name), _here(ChatBody, name)) for name in names]
    own = [(f"`{where}`", _listed(_names(body))) for where, body in BODIES.items()]
    parts = [
        "# Routes, fields and flags, next to vLLM's and SGLang's",
        notice,
        "What each route takes and answers in full: `GET /openapi.json`. How it behaves: "
        "[operations.md](operations.md#routes). The others' fields are those of `ChatCompletionRequest` at "
        "the commits named.",
        "## Routes",
        table(("route", *heads, "what it does here"), routes),
        "What they have and Turnout does not:",
        table(("route", "whose", "note"), OTHERS),
        "## Fields of `POST /v1/chat/completions`",
        "A field that is neither here nor ignored gets 400 with its name. `null` always stands for leaving a "
        "field out.",
        table(("field", *heads, "here"), fields),
        f"Ignored in every body, as they cannot change an answer: {_listed(IGNORED)}.",
        "## Fields of other routes",
        table(("route", "fields"), own),
        "## Flags of `turnout serve`",
        "Most are spelt as SGLang's. These have other spellings, which variables (`TURNOUT_TP`), the file of "
        "`--config` and arguments of `LLM` take, too, but for those with `no`:",
        table(("flag", "also"), _aliases()),
        "What else is typed from habit is refused with an error that says what to do:",
        table(("theirs", "here"), [(_listed(flags), remedy) for flags, remedy in other_engines.ROWS]),
    ]
    return "\n\n".join(parts) + "\n"


def _has(kind: str, name: str) -> list[str]:
    return ["yes" if name in peer[kind] else "" for peer in PEERS.values()]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _aliases() -> list[tuple[str, str]]:
    fields = [f for f in dataclasses.fields(ServerConfig) if f.metadata["alias"]]
    return [
        (f"`{flag_name(f.name)}`", _listed(alias.split("/")[0] for alias in f.metadata["alias"]))
        for f in fields
    ]


def _names(body: type[Body]) -> list[str]:
    return [field.alias or name for name, field in body.model_fields.items()]


def _here(body: type[Body], name: str) -> str:
    if name in body.model_fields:
        return "yes"
    if name in IGNORED:
        return "ignored"
    if name not in UNSUPPORTED:
        return "400"
    neutral = ", ".join(f"`{json.dumps(value)}`" for value in UNSUPPORTED[name])
    return f"only {neutral}" if neutral else "400"
