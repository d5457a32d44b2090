"""What a step leaves its requests: tokens sampled from its logits, and why a request ends.

A request whose sequence is complete in this step samples one token, or, with drafts, one more than the drafts
that hold. A greedy choice between two logits that rounding could turn (a near-tie, near_ties.py) is left open
at first and decided afterwards by a computation of its own.

Legend: N tokens of a step, H hidden.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from turnout.engine.messages import RequestOutput
from turnout.engine.ranks.step_sync import StepSync
from turnout.engine.sampling.sampler import Drawn, Sampled, Sampler
from turnout.engine.sampling.token_masks import TokenMaskFiller
from turnout.engine.scheduler.request import Request
from turnout.engine.scheduler.scheduler import Chunk, Scheduler
from turnout.engine.step.cuda_graphs import Computed
from turnout.engine.step.forward import Forward
from turnout.engine.step.near_ties import join_recomputation, recomputed_logits
from turnout.models.interface import Model


@dataclass(kw_only=True)
class TokenCounters:
    """Since the engine started, in tokens."""

    prompt: int = 0
    cached_prompt: int = 0  # found in the prefix cache
    generated: int = 0
    drafted: int = 0  # proposed by speculative decoding
    accepted: int = 0  # those of them that became output


@dataclass(frozen=True, kw_only=True)
class NearTie:
    """A request whose last token of this step is open, and its output so far."""

    request: Request
    output: RequestOutput


@dataclass(frozen=True, kw_only=True)
class Launched:
    """What a step draws. scored: requests for no token. drawn: one row for each token of `drawing`, drafts
    included; None if nothing is drawn. work: requests that decode in the step, and its prompt tokens."""

    scored: list[Request]
    drawing: list[Chunk]
    drawn: Drawn | None
    work: tuple[int, int]

    def leave_pending(self) -> Tensor | None:
        """Let the next step take what is drawn from the device: int64 [S], by `Request.drawn_row`."""
        for row, chunk in enumerate(self.drawing):
            chunk.request.pending, chunk.request.drawn_row = 1, row
        return None if self.drawn is None else self.drawn.ids_S


class StepCommit:
    """Extends requests by what is sampled for them. An output with a `finish_reason` is a request's last:
    the caller frees what the request holds."""

    def __init__(
        self,
        model: Model,
        forward: Forward,
        sampler: Sampler,
        token_masks: TokenMaskFiller,
        scheduler: Scheduler,
        step_sync: StepSync,
        device: torch.device,
        *,
        resolves_near_ties: bool,
    ):
        self.counters = TokenCounters()
        self.resolves_near_ties = resolves_near_ties
        self._model, self._forward = model, forward
        self._sampler, self._token_masks = sampler, token_masks
        self._scheduler, self._step_sync, self._device = scheduler, step_sync, device

    def begin(self, chunks: Iterable[Chunk]) -> None:
        """Find out, in the background, which tokens grammars permit after the forward of `chunks`. All tokens
        before it must be known."""
        chunks = list(chunks)
        if any(chunk.request.matcher is not None for chunk in chunks):
            self._token_masks.begin([(chunk.request, chunk.drafts) for chunk in chunks if _draws(chunk)])

    def launch(
        self, rows: Sequence[tuple[Chunk, int]], computed: Computed, work: tuple[int, int]
    ) -> Launched:
        """Draw for every request whose last token was computed, without waiting for what is drawn.

        rows: chunks of a step with the row of their first token in `computed`. work: as of `Launched`.
        """
        scored: list[Request] = []
        drawing: list[Chunk] = []
        indices: list[int] = []
        for chunk, first_row in rows:
            if not _draws(chunk):
                if chunk.samples:
                    scored.append(chunk.request)
                continue
            drawing.append(chunk)
            end = first_row + chunk.length
            indices += range(end - len(chunk.drafts) - 1, end) if chunk.drafts else (end - 1,)
        drawn = self._draw(drawing, computed, indices) if drawing else None
        return Launched(scored=scored, drawing=drawing, drawn=drawn, work=work)

    def finish(self, launched: Launched) -> tuple[list[RequestOutput], list[NearTie]]:
        """Give requests what was drawn for them, waiting for it. Returns the outputs of those that have all
        their tokens of this step, and the requests that lack the last one."""
        outputs: list[RequestOutput] = []
        near_ties: list[NearTie] = []
        for request in launched.scored:
            if not request.ended:
                outputs.append(output := self._output(request))
                output.finish_reason = "length"
        if launched.drawn is not None:
            sampled = launched.drawn.read()
            self._step_sync.sampled(sampled.token_ids)
            row = 0
            for chunk in launched.drawing:
                chunk.request.pending = 0
                if not chunk.request.ended:
                    output, complete = self._accept(chunk, sampled, row)
                    if complete:
                        self._conclude(chunk.request, output, drafted=bool(chunk.drafts))
                        outputs.append(output)
                    else:
                        near_ties.append(NearTie(request=chunk.request, output=output))
                row += len(chunk.drafts) + 1
        return outputs, near_ties

    def resolve(self, near_ties: Sequence[NearTie]) -> list[RequestOutput]:
        """Decide the near-ties of all ranks, one after the other, each with all ranks' experts. Collective,
        also for a rank that has none."""
        outputs: list[RequestOutput] = []
        pending = deque(near_ties)
        topology = self._step_sync.topology
        while True:
            length = len(pending[0].request.tokens) if pending else 0
            rank, length = self._step_sync.next_near_tie(length)
            if not length:
                return outputs
            place = rank, topology.dp_size
            if rank != topology.dp_rank:
                join_recomputation(self._model, length, self._device, place)
                continue
            open_tie = pending.popleft()
            request, output = open_tie.request, open_tie.output
            logits_1V = recomputed_logits(self._model, request.tokens, self._device, place)
            self._token_masks.begin([(request, ())])
            sampled = self._sampler(logits_1V, [request], allowed_SW=self._token_masks.finish()).read()
            self._step_sync.sampled(sampled.token_ids)
            self._append(request, output, sampled, 0)
            self._conclude(request, output, drafted=True)
            outputs.append(output)

    def _draw(self, drawing: Sequence[Chunk], computed: Computed, rows: Sequence[int]) -> Drawn:
        """A token for each of `rows`: those of the chunks' last tokens and of their drafts."""
        logits_SV, best_2S = self._forward.logits(computed, rows)
        requests, drafted = [chunk.request for chunk in drawing], None
        if any(chunk.drafts for chunk in drawing):
            drafted = [i for chunk in drawing for i in range(len(chunk.drafts) + 1)]
            requests = [chunk.request for chunk in drawing for _ in (*chunk.drafts, None)]
        return self._sampler(logits_SV, requests, drafted, best_2S, self._token_masks.finish())

    def _accept(self, chunk: Chunk, sampled: Sampled, row: int) -> tuple[RequestOutput, bool]:
        """Give a request what was sampled from `row` on, one token more than its drafts foretold.

        Returns (its output, False if the last token is open: a near-tie).
        """
        request = chunk.request
        output = RequestOutput(id=request.id) if request.timed else self._output(request)
        self.counters.drafted += len(chunk.drafts)
        for i, draft in enumerate((*chunk.drafts, None)):
            if sampled.near_ties[row + i]:
                return output, False
            self._append(request, output, sampled, row + i)
            if output.finish_reason or request.tokens[-1] != draft:
                break
            self.counters.accepted += 1
        return output, True

    def _append(self, request: Request, output: RequestOutput, sampled: Sampled, row: int) -> None:
        """Give `request` the token of one row; a `finish_reason` says that it was the last."""
        matcher = request.matcher
        if matcher is not None and matcher.error:
            output.error, output.user_error, output.finish_reason = matcher.error, True, "error"
            return
        if not sampled.valid[row]:
            output.error = "the model's logits are not finite for this request"
            output.finish_reason = "error"
            return
        token, logprobs = sampled.token_ids[row], sampled.logprobs[row]
        request.tokens.append(token)
        self.counters.generated += 1
        output.token_ids = [*output.token_ids, token]
        if logprobs is not None:
            output.logprobs = [*(output.logprobs or []), logprobs]
        if token in request.stop_ids:
            output.stop_token = token
            output.finish_reason = "stop"
        elif matcher is not None and matcher.advance(request.tokens, request.num_prompt) and matcher.ended:
            output.finish_reason = "stop"
        elif request.num_output >= request.sampling.max_tokens:
            output.finish_reason = "length"
        if output.finish_reason:
            output.preempted = request.preempted

    def _conclude(self, request: Request, output: RequestOutput, *, drafted: bool) -> None:
        """`request` has its tokens of this step; drafted: KV pages may be there for more than it kept."""
        if drafted and output.token_ids:
            self._scheduler.extended(request)

    def _output(self, request: Request) -> RequestOutput:
        """The first output of this engine for `request`, which another one may have begun."""
        request.timed = True
        waited = request.admitted_at - request.added_at, time.monotonic() - request.admitted_at
        if request.num_output:
            return RequestOutput(id=request.id, waited=waited)
        self.counters.prompt += request.num_prompt
        self.counters.cached_prompt += request.cached_tokens
        return RequestOutput(
            id=request.id,
            prompt_logprobs=request.prompt_logprobs,
            cached_tokens=request.cached_tokens,
            waited=waited,
        )


def _draws(chunk: Chunk) -> bool:
    """Whether the request gets tokens from this chunk's rows."""
    return chunk.samples and chunk.request.sampling.max_tokens > 0
