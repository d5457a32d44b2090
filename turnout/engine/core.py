"""The engine of one rank: requests in, tokens out, one forward per step.

    add / abort -> schedule -> sync ranks -> forward -> score prompts -> sample -> finish

Every rank of a model steps together (step_sync.py): one without work takes part with no tokens. A single
rank without work does nothing.

What one request asks for never changes what another gets: invalid requests are refused when added,
a request whose logits are not finite ends alone with an error, and rows of a step share nothing but
the batch.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from turnout import __version__
from turnout.attention.cpu import paged_attention
from turnout.checkpoint import open_checkpoint
from turnout.engine.engine_plan import EnginePlan
from turnout.engine.messages import AddRequest, EngineStats, RequestOutput
from turnout.engine.ranks.rendezvous import share_plan
from turnout.engine.ranks.step_sync import StepSync, SyncedStep
from turnout.engine.sampling.sampler import Sampled, Sampler, token_logprobs
from turnout.engine.scheduler.block_pool import KVBlockPool
from turnout.engine.scheduler.request import Request
from turnout.engine.scheduler.scheduler import Chunk, Scheduler, with_rows
from turnout.engine.selfcheck import SelfCheck
from turnout.engine.step import batch_invariant
from turnout.engine.step.cuda_graph_policy import why_no_graphs
from turnout.engine.step.cuda_graphs import Computed
from turnout.engine.step.forward import Forward
from turnout.engine.step.near_ties import join_recomputation, recomputed_logits
from turnout.engine.threads import default_threads
from turnout.engine.warmup import Tuner, first_prompts
from turnout.errors import UserError
from turnout.models import load_model
from turnout.models.interface import Model, ProgressFn
from turnout.parallel import symmetric
from turnout.parallel.groups import ALONE, Groups
from turnout.parallel.health import Progress, Unwatched
from turnout.vocabulary import Phase

# Prompt tokens scored at once: bounds the float32 logits of a long chunk with a large vocabulary.
SCORED_ROWS = 128


class EngineCore:
    """Continuous batching over one model. Not thread-safe: one caller adds, aborts and steps."""

    def __init__(
        self,
        engine_plan: EnginePlan,
        *,
        model: Model | None = None,
        groups: Groups = ALONE,
        step_sync: StepSync | None = None,
        watch: Progress | None = None,
        progress: ProgressFn | None = None,
        verify: str = "off",
    ):
        """Loads the weights that `engine_plan` names, unless `model` brings them.

        groups and step_sync: how this rank meets the others; by default there are none. watch: where to say
        how far a step is. progress: of loading. verify: "quick" or "full" checks what was loaded
        (selfcheck.py).

        Raises UserError (CheckpointError) for weights that are missing or wrong, and for a check that fails.
        """
        self.engine_plan = engine_plan = share_plan(engine_plan, groups)
        self._groups, self._step_sync = groups, step_sync or StepSync()
        self._watch = watch or Unwatched()
        self._device = torch.device(engine_plan.hardware.device)
        self._threads = _use_threads(
            engine_plan.config.num_threads, engine_plan.topology.ranks_per_node, self._device
        )
        check = None if model or verify == "off" else SelfCheck(engine_plan, verify, self._device)
        tuner = Tuner(engine_plan, self._device, check.make_runner if check else None)
        self._model = model or self._load(progress, tuner)
        tuner.tune(groups, progress)
        self._verified = check.run(self._model) if check else {"extent": "off"}
        config, shape = engine_plan.config, self._model.shape
        self._pool = KVBlockPool(engine_plan.num_pages, reuse=not config.disable_prefix_cache)
        self._scheduler = Scheduler(
            self._pool,
            page_size=engine_plan.page_size,
            max_running=config.max_running_requests,
            chunk_tokens=engine_plan.chunk_tokens,
            prefill_tokens=config.max_prefill_tokens,
            max_context=engine_plan.max_context,
            tokens_per_request=engine_plan.budget.tokens_per_request,
        )
        self._attention = paged_attention(
            shape,
            num_pages=engine_plan.num_pages,
            page_size=engine_plan.page_size,
            max_running=config.max_running_requests,
            max_context=engine_plan.max_context,
            device=self._device,
            dtype=getattr(torch, engine_plan.compute_dtype),
            fixed_spans=batch_invariant.SPANS if config.deterministic else 0,
        )
        self._forward = Forward(engine_plan, self._model, self._attention, progress)
        if self._device.type == "cuda":
            with torch.inference_mode():
                first_prompts(engine_plan, self._forward, self._model, self._pool, progress)
        self._resolves_near_ties = engine_plan.compute_dtype == "float32" and not config.deterministic
        self._sampler = Sampler(
            shape.vocab_size,
            config.max_running_requests,
            self._device,
            report_near_ties=self._resolves_near_ties,
            one_by_one=config.deterministic,
        )
        self._requests: dict[str, Request] = {}
        self._aborted: list[RequestOutput] = []
        self._added = 0
        self._steps = self._idle_steps = 0
        self._synced: SyncedStep | None = None
        self._count_experts_at = 0.0
        self._prompt_tokens = 0
        self._cached_prompt_tokens = 0
        self._generation_tokens = 0
        self._drafted = self._accepted = 0
        self._watch.note(self._steps, "resting")

    def has_work(self) -> bool:
        return bool(self._requests or self._aborted)

    def add(self, message: AddRequest) -> None:
        """Queue a request. Raises UserError, and changes nothing, if it can never run."""
        self.check(message)
        seed = (self.engine_plan.config.random_seed + self._added) % 2**63
        self._added += 1
        request = Request.start(message, seed=seed, eos_token_ids=self._model.shape.eos_token_ids)
        self._requests[request.id] = request
        self._scheduler.add(request)

    def abort(self, ids: Sequence[str]) -> None:
        """End these requests now and free their pages; the next step says so. Unknown ids are ignored."""
        for id in ids:
            request = self._requests.get(id)
            if request is not None:
                self._aborted.append(self._finish(request, RequestOutput(id=id), "abort"))

    @property
    def synced(self) -> SyncedStep | None:
        """What the ranks settled before the last step."""
        return self._synced

    @torch.inference_mode()
    def step(self) -> list[RequestOutput]:
        """One forward over whatever the scheduler chose; the new tokens of each request it advanced.

        Collective among the ranks of a model, with work or without.
        """
        outputs, self._aborted = self._aborted, []
        chunks = self._scheduler.schedule()
        chunks.sort(key=lambda chunk: not chunk.decodes)  # single tokens and their drafts first
        synced = self._sync(chunks)
        if not synced.phase:
            self._watch.note(self._steps, "resting")
            return outputs
        self._watch.note(self._steps, synced.phase)
        computed = self._forward(chunks, synced)
        self._scheduler.computed(chunks)
        self._steps += 1
        self._idle_steps += not chunks
        self._score_prompts(chunks, computed.hidden_NH)
        outputs += self._advance(chunks, computed)
        symmetric.check_all()  # nothing leaves that rests on what a peer failed to send
        return outputs

    def close(self) -> None:
        """Let go of what would keep the ranks from parting; no step may follow."""
        self._forward.graphs = None

    def stats(self) -> EngineStats:
        """Counters now; `expert_tokens` once a second, for reading them waits for the device."""
        now = time.monotonic()
        expert_tokens = None
        if now >= self._count_experts_at:
            self._count_experts_at = now + 1.0
            expert_tokens = self._model.expert_counts()
        topology = self._step_sync.topology
        if not self._step_sync.leads:  # its group's requests are counted once, by the rank that leads
            return EngineStats(
                rank=topology.rank, pid=os.getpid(), steps=self._steps, idle_steps=self._idle_steps
            )
        return EngineStats(
            rank=topology.rank,
            pid=os.getpid(),
            steps=self._steps,
            idle_steps=self._idle_steps,
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            pages_total=self._pool.num_pages,
            pages_used=self._pool.num_live,
            pages_cached=self._pool.num_cached,
            prompt_tokens=self._prompt_tokens,
            cached_prompt_tokens=self._cached_prompt_tokens,
            generation_tokens=self._generation_tokens,
            preemptions=self._scheduler.preemptions,
            spec_draft_tokens=self._drafted,
            spec_accepted_tokens=self._accepted,
            expert_tokens=expert_tokens,
        )

    def info(self) -> dict[str, Any]:
        """The engine plan as run, and the versions that run it. Plain values for JSON."""
        engine_plan, graphs = self.engine_plan, self._forward.graphs
        return engine_plan.describe() | {
            "version": __version__,
            "torch": torch.__version__,
            "num_threads": self._threads,
            "kv_cache_bytes": self._attention.cache_bytes,
            "verify": self._verified,
            "decode_graphs": graphs.sizes if graphs else why_no_graphs(engine_plan),
        }

    def check(self, message: AddRequest) -> None:
        """Raise UserError saying why `message` can never run, if so."""
        prompt, sampling, vocab_size = message.prompt_ids, message.sampling, self._model.shape.vocab_size
        if message.id in self._requests:
            raise UserError(f"request id {message.id!r}: already in use")
        if not prompt:
            raise UserError("the prompt is empty: it must hold at least one token")
        sampling.check()
        for name, ids in (
            ("prompt", prompt),
            ("logit_bias", sampling.logit_bias),
            ("stop_token_ids", sampling.stop_token_ids),
        ):
            if ids and (min(ids) < 0 or max(ids) >= vocab_size):
                wrong = next(i for i in ids if not 0 <= i < vocab_size)
                raise UserError(f"{name}: token id {wrong} is not in [0, {vocab_size})")
        eos = () if sampling.ignore_eos else self._model.shape.eos_token_ids
        if sampling.min_tokens and len({*eos, *sampling.stop_token_ids}) >= vocab_size:
            raise UserError(
                f"min_tokens={sampling.min_tokens}: stop_token_ids and the end-of-sequence ids cover all "
                f"{vocab_size} token ids, so that no token may come before the minimum; drop one of the two"
            )
        refusal = self._scheduler.refuse(len(prompt), sampling.max_tokens)
        if refusal is not None:
            raise UserError(refusal)

    def _load(self, progress: ProgressFn | None, tuner: Tuner) -> Model:
        engine_plan = self.engine_plan
        return load_model(
            open_checkpoint(engine_plan.folder),
            engine_plan.plan,
            groups=self._groups,
            device=self._device,
            dtype=getattr(torch, engine_plan.compute_dtype),
            progress=progress,
            make_runner=tuner.make_runner,
        )

    def _sync(self, chunks: Sequence[Chunk]) -> SyncedStep:
        phase = None
        if chunks:
            phase = Phase.DECODE if all(chunk.decodes for chunk in chunks) else Phase.PREFILL
        self._watch.note(self._steps, "agreeing")
        self._synced = self._step_sync.sync(sum(chunk.length for chunk in chunks), phase)
        return self._synced

    def _score_prompts(self, chunks: Sequence[Chunk], hidden_NH: Tensor) -> None:
        """Log-probabilities of the prompt tokens that this step's rows predict, where asked for."""
        for chunk, first_row in with_rows(chunks):
            request = chunk.request
            if not request.scores_missing:
                continue
            assert request.prompt_logprobs is not None
            # The row of token p predicts token p + 1; rows scored before a preemption are not scored again.
            start = max(chunk.start, len(request.prompt_logprobs) - 1)
            end = min(chunk.end, request.num_prompt - 1)
            for at in range(start, end, SCORED_ROWS):
                until = min(at + SCORED_ROWS, end)
                rows = hidden_NH[first_row + at - chunk.start : first_row + until - chunk.start]
                scores_SV = torch.log_softmax(self._model.logits(rows), dim=-1)
                counts = [request.sampling.prompt_logprobs or 0] * (until - at)
                request.prompt_logprobs += token_logprobs(
                    scores_SV, request.tokens[at + 1 : until + 1], counts
                )

    def _advance(self, chunks: Sequence[Chunk], computed: Computed) -> list[RequestOutput]:
        """Sample for every request whose last known token was computed; finish those that are done."""
        outputs: list[RequestOutput] = []
        rows: list[int] = []
        sampling: list[Chunk] = []
        for chunk, first_row in with_rows(chunks):
            if not chunk.samples:
                continue
            if chunk.request.sampling.max_tokens == 0:
                outputs.append(self._finish(chunk.request, self._first_output(chunk.request), "length"))
                continue
            sampling.append(chunk)
            rows += range(first_row + chunk.length - len(chunk.drafts) - 1, first_row + chunk.length)
        close: list[tuple[Request, RequestOutput]] = []
        if sampling:
            logits_SV, best_2S = self._forward.logits(computed, rows)
            drafted = [i for chunk in sampling for i in range(len(chunk.drafts) + 1)]
            requests = [chunk.request for chunk in sampling for _ in (*chunk.drafts, None)]
            sampled = self._sampler(logits_SV, requests, drafted, best_2S)
            self._step_sync.sampled(sampled.token_ids)
            row = 0
            for chunk in sampling:
                output, settled = self._accept(chunk, sampled, row)
                if settled:
                    outputs.append(self._conclude(chunk.request, output, drafted=bool(chunk.drafts)))
                else:
                    close.append((chunk.request, output))
                row += len(chunk.drafts) + 1
        return outputs + self._resolve_near_ties(close) if self._resolves_near_ties else outputs

    def _accept(self, chunk: Chunk, sampled: Sampled, row: int) -> tuple[RequestOutput, bool]:
        """Give a request what was sampled from `row` on, one token more than its drafts foretold.

        Returns (its output, False if the last token is missing: a close call, to be settled).
        """
        request = chunk.request
        output = self._first_output(request) if request.num_output == 0 else RequestOutput(id=request.id)
        self._drafted += len(chunk.drafts)
        for i, draft in enumerate((*chunk.drafts, None)):
            if sampled.near_ties[row + i]:
                return output, False
            self._append(request, output, sampled, row + i)
            if output.finish_reason or request.tokens[-1] != draft:
                break
            self._accepted += 1
        return output, True

    def _resolve_near_ties(self, close: Sequence[tuple[Request, RequestOutput]]) -> list[RequestOutput]:
        """Settle the close calls of all ranks, one after the other, each with all ranks' experts."""
        outputs: list[RequestOutput] = []
        self._watch.note(self._steps, "settling")
        pending = deque(close)
        topology = self._step_sync.topology
        while True:
            rank, length = self._step_sync.next_near_tie(len(pending[0][0].tokens) if pending else 0)
            if not length:
                return outputs
            place = rank, topology.dp_size
            if rank != topology.dp_rank:
                join_recomputation(self._model, length, self._device, place)
                continue
            request, output = pending.popleft()
            settled = self._sampler(
                recomputed_logits(self._model, request.tokens, self._device, place), [request]
            )
            self._step_sync.sampled(settled.token_ids)
            self._append(request, output, settled, 0)
            outputs.append(self._conclude(request, output, drafted=True))

    def _append(self, request: Request, output: RequestOutput, sampled: Sampled, row: int) -> None:
        """Give `request` the token of one row; a `finish_reason` says that it was the last."""
        if not sampled.valid[row]:
            output.error = "the model's logits are not finite for this request"
            output.finish_reason = "error"
            return
        token, logprobs = sampled.token_ids[row], sampled.logprobs[row]
        request.tokens.append(token)
        self._generation_tokens += 1
        output.token_ids = [*output.token_ids, token]
        if logprobs is not None:
            output.logprobs = [*(output.logprobs or []), logprobs]
        if token in request.stop_ids:
            output.stop_token = token
            output.finish_reason = "stop"
        elif request.num_output >= request.sampling.max_tokens:
            output.finish_reason = "length"

    def _conclude(self, request: Request, output: RequestOutput, *, drafted: bool) -> RequestOutput:
        """The step is over for `request`, which it may have brought drafts to, and perhaps more than that."""
        if drafted and output.token_ids:
            self._scheduler.extended(request)
        return self._finish(request, output, output.finish_reason) if output.finish_reason else output

    def _first_output(self, request: Request) -> RequestOutput:
        self._prompt_tokens += request.num_prompt
        self._cached_prompt_tokens += request.cached_tokens
        return RequestOutput(
            id=request.id, prompt_logprobs=request.prompt_logprobs, cached_tokens=request.cached_tokens
        )

    def _finish(self, request: Request, output: RequestOutput, reason: str) -> RequestOutput:
        """Forget `request` and free its pages; `output` is its last."""
        self._scheduler.remove(request)
        del self._requests[request.id]
        output.finish_reason = reason
        return output


def _use_threads(wanted: int, ranks: int, device: torch.device) -> int:
    """Set torch's CPU threads: as wanted, or the default but no more than OMP_NUM_THREADS grants."""
    threads = wanted or min(torch.get_num_threads(), default_threads(ranks, beside_gpu=device.type != "cpu"))
    if threads != torch.get_num_threads():
        torch.set_num_threads(threads)
    return threads
