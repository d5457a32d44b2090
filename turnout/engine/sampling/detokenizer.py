"""Tokens -> text, as they come: whole characters only, nothing that might belong to a stop string.

Torch-free: the server and `LLM` share it. A `TextStream` follows one request; the texts it hands out
add up to the whole answer, cut before the first stop string.

Why not `tokenizers.decoders.DecodeStream`: it has no end, so that a character which is cut off there is lost
rather than shown as U+FFFD (26 of 300 sequences of 40 random tokens of the demo's vocabulary ended otherwise
than `decode` has them; here all are equal), and it is no faster (7.8 us a token, as here).
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from turnout.engine.messages import RequestOutput, TokenLogprobs
from turnout.engine.sampling_params import SamplingParams
from turnout.engine.tokenizer import Tokenizer

# A UTF-8 character has at most four bytes, so more tokens than that cannot all belong to one.
_LONGEST_CHARACTER = 4


@dataclass(slots=True)
class TextDelta:
    """What one request gained. `text` is final; what may still change is held back.

    `stopped`: a stop string ended the request here, and the engine must be told to abort it.
    `stop_reason`: the stop string or stop token id, if one ended it.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    cached_tokens: int = 0
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    stopped: bool = False
    error: str | None = None


class TextStream:
    """The text of one request, from its `RequestOutput`s in order."""

    def __init__(self, tokenizer: Tokenizer, sampling: SamplingParams, *, keep: frozenset[int] = frozenset()):
        """keep: special tokens that are text even if special tokens are skipped."""
        self._sampling = sampling
        kind = ByteDecoder if tokenizer.byte_level else PieceDecoder
        skipped = tokenizer.special_ids - keep if sampling.skip_special_tokens else frozenset()
        self._decoder: Decoder = kind(tokenizer, skipped)
        self._stops = StopStrings(sampling.stop, keep=sampling.include_stop_str_in_output)
        self._num_tokens = 0
        self._finished = False

    def push(self, output: RequestOutput) -> TextDelta:
        """What `output` adds. Outputs that arrive after the end (an abort crossed them) add nothing."""
        if self._finished:
            return TextDelta()
        delta = TextDelta(
            prompt_logprobs=output.prompt_logprobs,
            cached_tokens=output.cached_tokens,
            finish_reason=output.finish_reason,
            stop_reason=output.stop_token,
            error=output.error,
        )
        if self._sampling.stop:
            self._push_until_stopped(delta, output)
        else:
            self._push_all(delta, output)
        if delta.finish_reason is not None:
            if not delta.stopped:
                self._end(delta)
            self._finished = True
        return delta

    def _push_all(self, delta: TextDelta, output: RequestOutput) -> None:
        """Where there are no stop strings to look for."""
        delta.token_ids, delta.logprobs = list(output.token_ids), list(output.logprobs or ())
        hidden = output.stop_token is not None and not self._sampling.include_stop_str_in_output
        delta.text = self._decoder.push(output.token_ids[:-1] if hidden else output.token_ids)

    def _push_until_stopped(self, delta: TextDelta, output: RequestOutput) -> None:
        for i, token in enumerate(output.token_ids):
            delta.token_ids.append(token)
            if output.logprobs is not None:
                delta.logprobs.append(output.logprobs[i])
            is_stop_token = output.stop_token is not None and i == len(output.token_ids) - 1
            self._push_token(delta, token, hidden=is_stop_token)
            if delta.stopped:
                break

    def _push_token(self, delta: TextDelta, token: int, *, hidden: bool) -> None:
        self._num_tokens += 1
        if hidden and not self._sampling.include_stop_str_in_output:
            return
        delta.text += self._stops.push(
            self._decoder.push((token,)), search=self._num_tokens > self._sampling.min_tokens
        )
        self._check_stopped(delta)

    def _end(self, delta: TextDelta) -> None:
        """Hand out what was held back: nothing more can complete it."""
        delta.text += self._stops.push(self._decoder.flush(), search=True)
        self._check_stopped(delta)
        if not delta.stopped:
            delta.text += self._stops.flush()

    def _check_stopped(self, delta: TextDelta) -> None:
        if self._stops.found is not None:
            delta.finish_reason, delta.stop_reason, delta.stopped = "stop", self._stops.found, True


class StopStrings:
    """Cuts a stream of text before the first of several strings (or after it, with `keep`)."""

    def __init__(self, stops: Sequence[str], *, keep: bool = False):
        self.found: str | None = None
        self._stops, self._keep = tuple(stops), keep
        self._held = ""

    def push(self, text: str, *, search: bool = True) -> str:
        """The text that is certain now. `search` False: `text` neither ends the stream nor begins a stop."""
        if not self._stops or not text:
            return text
        if not search:
            return self.flush() + text
        held = self._held + text
        places = [(at, -len(stop), stop) for stop in self._stops if (at := held.find(stop)) >= 0]
        if places:
            at, _, self.found = min(places)  # the first; of several at one place the longest
            self._held = ""
            return held[: at + (len(self.found) if self._keep else 0)]
        keep_back = self._longest_beginning(held)
        self._held = held[len(held) - keep_back :]
        return held[: len(held) - keep_back]

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    def _longest_beginning(self, text: str) -> int:
        """Length of the longest end of `text` with which some stop string begins."""
        longest = min(len(text), max(map(len, self._stops)) - 1)
        for length in range(longest, 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0


class Decoder(Protocol):
    """Turns tokens into text piece by piece."""

    def push(self, tokens: Sequence[int]) -> str:
        """Text that is complete with `tokens`."""
        ...

    def flush(self) -> str:
        """What is left at the end."""
        ...


class ByteDecoder:
    """For byte-level vocabularies: every token is known bytes, so decoding is exact and takes one look."""

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int]):
        self._token_bytes = tokenizer.token_bytes
        self._skipped = skipped
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._in_character = False

    def push(self, tokens: Sequence[int]) -> str:
        token_bytes, skipped = self._token_bytes, self._skipped
        raw = b"".join([token_bytes(token) for token in tokens if token not in skipped])
        if raw.isascii() and not self._in_character:  # the rest of a decoder's work takes 1 us
            return raw.decode("ascii")
        text = self._utf8.decode(raw)
        self._in_character = self._utf8.getstate()[0] != b""
        return text

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class PieceDecoder:
    """For any other vocabulary: a token's text may depend on the one before it (spaces, byte pieces).

    Decodes the last finished piece together with the new tokens; what that adds is new text. Text that
    ends in U+FFFD may be part of a character and waits for the next tokens.
    """

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int]):
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._ids: list[int] = []
        self._finished = 0  # ids before this are the context
        self._context = ""  # their text

    def push(self, tokens: Sequence[int]) -> str:
        return "".join([self._push_one(token) for token in tokens])

    def _push_one(self, token: int) -> str:
        if token in self._skipped:
            return ""
        self._ids.append(token)
        text = self._decode()
        waiting = len(self._ids) - self._finished
        if text.endswith("\ufffd") and waiting < _LONGEST_CHARACTER:
            return ""
        return self._take(text)

    def flush(self) -> str:
        return self._take(self._decode())

    def _take(self, text: str) -> str:
        new = text[len(self._context) :]
        self._ids = self._ids[self._finished :]
        self._finished = len(self._ids)
        self._context = self._decode()
        return new

    def _decode(self) -> str:
        return self._tokenizer.decode(self._ids, skip_special_tokens=False)
