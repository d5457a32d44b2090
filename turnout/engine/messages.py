"""What crosses the wire between the server process and the engine processes, one per rank. Torch-free.

msgspec structs, msgpack-encoded, over two ZeroMQ sockets: commands go down to the rank that is named, a
DEALER of the server's ROUTER; events come up through PUSH and PULL.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from turnout.engine.sampling_params import SamplingParams


class AddRequest(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Generate from `prompt_ids`; `id` is chosen by the sender and unique.

    output_ids: what another engine generated before it was lost. The output goes on after them as if they had
    been generated here. They are not sent again, nor is what came with the first of them.
    """

    id: str
    prompt_ids: list[int]
    sampling: SamplingParams
    output_ids: list[int] = []
    cache_salt: str = ""  # prefixes are shared only with requests that bring the same
    priority: int = 0  # under --scheduling-policy priority: lower ones first
    arrival: float = 0.0  # time.time() at the server
    stream_interval: int = 1  # tokens after the first that are sent together, see stream_intervals.py


class Abort(msgspec.Struct, tag=True, frozen=True):
    """Free the request's slot and pages before the next step; unknown ids are ignored."""

    ids: list[str]


class ResetPrefixCache(msgspec.Struct, tag=True, frozen=True):
    """Forget all prefixes that could be reused; requests go on."""


class StartProfile(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Record what this rank does in its next `steps` steps with a forward, see `engine.profiling`."""

    steps: int
    began: float = 0.0  # time.time() at the server: times in the trace count from it
    record_shapes: bool = False
    with_stack: bool = False


class StopProfile(msgspec.Struct, tag=True, frozen=True):
    """Record no more and send what was recorded."""


class Wake(msgspec.Struct, tag=True, frozen=True):
    """Step now: another rank has work. Asks for nothing, so ranks that share requests need not all get it."""


class Shutdown(msgspec.Struct, tag=True, frozen=True):
    """Abort whatever still runs and leave the loop."""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of one token and of the most likely alternatives, best first."""

    token_id: int
    logprob: float
    rank: int  # 1: the most likely
    top: list[tuple[int, float]]


class RequestOutput(msgspec.Struct, kw_only=True, omit_defaults=True):
    """New tokens of one request after a step, several if drafts held. The last one has a `finish_reason`.

    finish_reason: "stop" (end-of-sequence or stop token), "length", "abort", "error".
    A request with max_tokens 0 gets one output without tokens (and its prompt log-probabilities).
    `prompt_logprobs` comes once, with the first output; its first entry is None.
    `waited`, in seconds, comes with the first output of every engine that computes the request: from when the
    engine got it until it was scheduled, and from then until this output.
    """

    id: str
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    cached_tokens: int = 0
    waited: tuple[float, float] | None = None
    preempted: list[float] = []  # with the last output: when it lost its KV pages, each time.time()
    finish_reason: str | None = None
    stop_token: int | None = None  # the stop token id that ended it, if one did
    error: str | None = None
    user_error: bool = False  # `error` tells the user what to change; else it is the engine's fault


def as_one(run: Sequence[RequestOutput]) -> RequestOutput:
    """Successive outputs of a request, of which only the first may be its first and the last its last."""
    first, last = run[0], run[-1]
    return RequestOutput(
        id=first.id,
        token_ids=[token for output in run for token in output.token_ids],
        logprobs=None if first.logprobs is None else [one for output in run for one in output.logprobs or ()],
        prompt_logprobs=first.prompt_logprobs,
        cached_tokens=first.cached_tokens,
        waited=first.waited,
        preempted=last.preempted,
        finish_reason=last.finish_reason,
        stop_token=last.stop_token,
    )


def apart(output: RequestOutput) -> list[RequestOutput]:
    """Each of its tokens as an output of its own: `as_one` the other way round."""
    if len(output.token_ids) < 2:
        return [output]
    logprobs = output.logprobs
    singles = [
        RequestOutput(
            id=output.id,
            token_ids=[token],
            logprobs=None if logprobs is None else logprobs[i : i + 1],
            cached_tokens=output.cached_tokens,
        )
        for i, token in enumerate(output.token_ids)
    ]
    first, last = singles[0], singles[-1]
    first.prompt_logprobs, first.waited = output.prompt_logprobs, output.waited
    last.preempted, last.finish_reason = output.preempted, output.finish_reason
    last.stop_token = output.stop_token
    return singles


class EngineStats(msgspec.Struct, kw_only=True, frozen=True, array_like=True):
    """Counters of one rank, sent with every batch of outputs and at least once a second.

    waiting_for: what the first request in the queue lacks, one of `scheduler.Lack`; "" if nothing.
    step_sizes:  [b] counts the steps with more than 2^(b-2) and at most 2^(b-1) tokens of this rank, [0]
                 those without any.
    uneven_steps: in which some data-parallel ranks computed prompts while others only decoded.
    held_steps:  in which prompts that had room to run were held back for other ranks.
    *_seconds:   of steps: waiting for the other ranks before a forward, and in it and what follows.
    """

    rank: int = 0
    pid: int = 0
    state: str = "running"
    steps: int = 0
    idle_steps: int = 0
    num_running: int = 0
    num_waiting: int = 0
    waiting_for: str = ""
    step_sizes: list[int] = []
    computed_tokens: int = 0  # by forwards, padding and rejected drafts included
    graph_steps: int = 0  # that a CUDA graph computed
    overlapped_steps: int = 0  # launched before the tokens of the one before were read
    sync_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    pages_total: int = 0  # of all cache groups
    pages_used: int = 0  # held by live requests
    pages_cached: int = 0  # free, but still holding a reusable prefix
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    spec_draft_tokens: int = 0  # proposed by speculative decoding
    spec_accepted_tokens: int = 0  # those of them that became output
    kernels_compiled: int = 0  # since this rank could serve: each kept its requests waiting
    uneven_steps: int = 0
    held_steps: int = 0
    expert_tokens: list[list[int]] | None = None  # [layer][expert], cumulative


class Ready(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """`rank` has loaded its weights and can serve."""

    rank: int = 0
    info: dict[str, Any]  # resolved configuration, plan, memory, model shape
    max_context: int  # the longest prompt + output in tokens
    vocab_size: int  # token ids lie in [0, vocab_size)


class Outputs(msgspec.Struct, tag=True, kw_only=True):
    """number: of this rank's since its start, so that one that was lost on its way is missed."""

    number: int = 0
    outputs: list[RequestOutput]
    stats: EngineStats


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The engine of `rank` cannot go on. `user_error` tells a wrong input from a bug."""

    message: str
    rank: int = 0
    user_error: bool = False


class Profiled(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """trace: compressed (zlib) events of a Chrome trace, as JSON, apart by commas."""

    rank: int
    trace: bytes


Command = AddRequest | Abort | ResetPrefixCache | StartProfile | StopProfile | Wake | Shutdown
Event = Ready | Outputs | Profiled | Failed

encoder = msgspec.msgpack.Encoder()
command_decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
event_decoder: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)
