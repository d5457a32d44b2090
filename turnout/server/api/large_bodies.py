"""The process that parses and tokenises large request bodies: `python -m turnout.server.api.large_bodies`.

Decoding JSON, validating it and rendering chat templates hold the interpreter's lock, for seconds where a
body is made for that; in the server's process all streams would wait. This one has lower priority, takes one
body at a time, and ends when its memory has grown, for the server to start the next.

Standard input brings one line of JSON, the arguments of `Start`, and then bodies; its end means that the
server is gone. Standard output takes the answers.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import pickle
import struct
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import psutil

from turnout.engine.ranks.local_launcher import leave_signals_to_launcher
from turnout.engine.tokenizer import Tokenizer
from turnout.malloc import map_large_blocks, release_freed_memory
from turnout.server.api.anthropic.body import CountBody, MessagesBody
from turnout.server.api.body import Body
from turnout.server.api.errors import ApiError
from turnout.server.api.openai_responses.body import ResponsesBody
from turnout.server.api.preparation import prepare
from turnout.server.api.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from turnout.server.api.scoring import ScoreBody
from turnout.server.api.sizes import Limits

BODIES: tuple[type[Body], ...] = (
    CompletionBody,
    ChatBody,
    TokenizeBody,
    DetokenizeBody,
    ScoreBody,
    ResponsesBody,
    MessagesBody,
    CountBody,
)
REQUEST = struct.Struct("<BQ")  # index into BODIES, bytes that follow
REPLY = struct.Struct("<?Q")  # whether it is this process's last, bytes of a pickled `Reply` that follow
NICENESS = 5  # streams come first
MAX_GROWTH = 64 * 2**20  # bytes of resident memory that the process may keep after a body

Refusal = tuple[int, str, str | None, str | None]  # status, message, param and code of an ApiError
Reply = tuple[tuple[Body, Any] | None, Refusal | None]  # what `prepare` returned, or refused the body with

log = logging.getLogger("turnout.server")


@dataclass(frozen=True, kw_only=True)
class Start:
    """folder: the tokenizer's. The rest: fields of `Limits`."""

    folder: str
    trust_remote_code: bool
    model: str
    max_context: int
    vocab_size: int

    @property
    def limits(self) -> Limits:
        return Limits(model=self.model, max_context=self.max_context, vocab_size=self.vocab_size)


def serve(bodies: BinaryIO, replies: BinaryIO) -> None:
    """Answer until the input ends or memory has grown."""
    start = Start(**json.loads(bodies.readline()))
    tokenizer = Tokenizer.load(Path(start.folder), trust_remote_code=start.trust_remote_code)
    me = psutil.Process()
    most = 0
    while head := bodies.read(REQUEST.size):
        kind, size = REQUEST.unpack(head)
        content = pickle.dumps(_answer(BODIES[kind], bodies.read(size), tokenizer, start.limits))
        gc.collect()
        release_freed_memory()
        resident = me.memory_info().rss
        most = most or resident + MAX_GROWTH
        replies.write(REPLY.pack(resident > most, len(content)))
        replies.write(content)
        replies.flush()
        if resident > most:
            return


def _answer(cls: type[Body], raw: bytes, tokenizer: Tokenizer, limits: Limits) -> Reply:
    try:
        return prepare(cls, raw, tokenizer, limits), None
    except ApiError as error:
        return None, (error.status, error.message, error.param, error.code)
    except Exception:
        log.exception("a large request body could not be prepared")
        return None, (500, "internal server error; the server's log has the details", None, None)


def main() -> None:
    leave_signals_to_launcher()
    map_large_blocks()
    gc.disable()  # it would look at a million small lists again and again while they are decoded
    os.nice(NICENESS)
    with suppress(OSError):  # where memory runs out this process goes, and not the server
        Path("/proc/self/oom_score_adj").write_text("1000")
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints, prints elsewhere
    with suppress(BrokenPipeError):
        serve(sys.stdin.buffer, replies)


if __name__ == "__main__":
    main()
