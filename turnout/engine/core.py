"""The engine of one rank: requests in, tokens out, one forward per step.

    add / abort -> schedule -> sync ranks -> forward -> score prompts -> draw -> finish

Where steps overlap (overlap_policy.py), a step is finished after the next one's forward was launched: the
host schedules and draws while the device computes, and drawn tokens reach the next forward on the device.
Drafts follow from tokens that the host knows, and how many of them hold is known only with the tokens. So a
step with drafts is finished before the next one is scheduled, and so is one before a step that may have some;
steps overlap where drafts rest and where no request may have any.

Every rank of a model steps together (ranks/step_sync.py): one without work takes part with no tokens. A
single rank without work does nothing. builder.py makes an engine.

What one request asks for never changes what another gets: invalid requests are refused when added,
a request whose logits are not finite ends alone with an error, and rows of a step share nothing but
the batch.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import torch

from turnout import __version__
from turnout.attention.caches import AttentionCaches
from turnout.engine.engine_plan import EnginePlan
from turnout.engine.grammar_matcher import GrammarCompiler
from turnout.engine.messages import AddRequest, EngineStats, RequestOutput
from turnout.engine.overlap_policy import why_no_overlap
from turnout.engine.ranks.step_sync import StepSync, SyncedStep
from turnout.engine.sampling.prompt_logprobs import score_prompts
from turnout.engine.scheduler.request import Request
from turnout.engine.scheduler.scheduler import Chunk, Scheduler, with_rows
from turnout.engine.step.commit import Launched, StepCommit
from turnout.engine.step.draft_layer import LayerDrafter
from turnout.engine.step.forward import Forward
from turnout.errors import UserError
from turnout.models.interface import Model
from turnout.parallel import symmetric
from turnout.parallel.health import Progress
from turnout.vocabulary import Phase


class EngineCore:
    """Continuous batching over one model. Not thread-safe: one caller adds, aborts and steps."""

    def __init__(
        self,
        engine_plan: EnginePlan,
        *,
        model: Model,
        scheduler: Scheduler,
        attention: AttentionCaches,
        forward: Forward,
        commit: StepCommit,
        grammars: GrammarCompiler,
        step_sync: StepSync,
        watch: Progress,
        loaded: Mapping[str, Any],
        drafter: LayerDrafter | None,
        compilations: Callable[[], int],
        clock: Callable[[], float],
    ):
        """watch: told how far a step is. loaded: what `info` says beyond the plan, plain values.
        drafter: proposes tokens after each step.
        compilations: how many kernels were compiled since the engine could serve.
        clock: seconds, by which steps are timed."""
        self.engine_plan = engine_plan
        self._model, self._attention, self._loaded = model, attention, loaded
        self._scheduler, self._forward, self._commit = scheduler, forward, commit
        self._drafter = drafter
        self._grammars = grammars
        self._step_sync, self._watch, self._compilations = step_sync, watch, compilations
        self._clock = clock
        self._requests: dict[str, Request] = {}
        self._aborted: list[RequestOutput] = []
        self._added = 0
        self._steps = self._idle_steps = self._uneven_steps = self._overlapped_steps = 0
        self._computed_tokens = 0
        self._step_sizes = [0] * (scheduler.step_tokens.bit_length() + 2)
        self._sync_seconds = 0.0
        self._compiled_at_rest = 0
        self._seconds = dict.fromkeys(Phase, 0.0)
        self._synced: SyncedStep | None = None
        self._overlap = not why_no_overlap(engine_plan)
        self._launched: Launched | None = None  # and not finished yet
        self._decoded: tuple[int, bool, int] | None = None  # of a step that counts for `switch`, but for its
        self._decoded_from = 0.0  # time, from here to the next
        self._count_experts_at = 0.0
        self._watch.note(self._steps, "resting")

    @property
    def layers_begun(self) -> int:
        """In all forwards so far."""
        return self._model.layers_begun

    def has_work(self) -> bool:
        return bool(self._requests or self._aborted)

    def add(self, message: AddRequest) -> None:
        """Queue a request. Raises UserError, and changes nothing, if it can never run."""
        self.check(message)
        seed = (self.engine_plan.config.random_seed + self._added) % 2**63
        self._added += 1
        grammar = message.sampling.grammar
        request = Request.start(
            message,
            seed=seed,
            eos_token_ids=self._model.shape.eos_token_ids,
            matcher=self._grammars.compile(grammar) if grammar else None,
            drafts_by_layer=self._drafter is not None,
        )
        self._requests[request.id] = request
        self._scheduler.add(request)

    def abort(self, ids: Sequence[str]) -> None:
        """End these requests now and free their pages; the next step says so. Unknown ids are ignored."""
        for id in ids:
            if id in self._requests:
                self._forget(id)
                self._aborted.append(RequestOutput(id=id, finish_reason="abort"))

    def reset_prefix_cache(self) -> None:
        self._scheduler.kv.forget()

    @property
    def synced(self) -> SyncedStep | None:
        """What the ranks agreed on before the last step."""
        return self._synced

    @torch.inference_mode()
    def step(self) -> list[RequestOutput]:
        """One forward over whatever the scheduler chose; the new tokens of each request it advanced.

        Collective among the ranks of a model, with work or without.
        """
        outputs, self._aborted = self._aborted, []
        if self._drafter:
            self._drafter.read()
        # What runs ahead is read first where an abort since then lets the others draft.
        early = self._finish()[0] if self._overlap and self._scheduler.may_draft() else []
        outputs += early
        chunks = self._scheduler.schedule()
        chunks.sort(key=lambda chunk: not chunk.decodes)  # single tokens and their drafts first
        tokens = sum(chunk.length for chunk in chunks)
        decoding = sum(chunk.decodes for chunk in chunks)
        before, began = self._synced, self._clock()
        synced = self._sync(chunks, tokens, decoding)
        if not synced.phase:
            return outputs + self._rest(before, synced)
        self._watch.note(self._steps, synced.phase)
        agreed = self._clock()
        if known := self._launched is None:
            self._commit.begin(chunks)
        if self._scheduler.kv.snapshots is not None:
            self._attention.copy_states(self._scheduler.kv.snapshots.take_copies())
        computed = self._forward(chunks, synced)
        self._steps += 1
        self._idle_steps += not chunks
        self._overlapped_steps += not known
        advanced, open_ties = self._finish()
        # A chunk that was launched on a token that ended its request, or that changed, counts for nothing.
        rows = [
            (chunk, row)
            for chunk, row in with_rows(chunks)
            if not (chunk.request.ended or chunk.request.id in open_ties)
        ]
        if not known:
            self._commit.begin(chunk for chunk, _ in rows)
        self._scheduler.computed(chunk for chunk, _ in rows)
        score_prompts(chunks, computed.hidden_NH, self._model.logits)
        work = decoding, sum(chunk.length for chunk in chunks[decoding:])
        self._launched = self._commit.launch(rows, computed, work)
        if not self._runs_ahead(self._launched):
            advanced += self._finish()[0]
        switch, alone = self._scheduler.switch, synced.phase == Phase.DECODE
        if switch and alone and self._scheduler.only_decoding and self._requests:
            given = sum(len(output.token_ids) for output in early + advanced)
            self._decoded = self._scheduler.only_decoding, self._scheduler.drafting, given
            self._decoded_from = agreed
        if self._drafter:
            self._drafter.propose(list(with_rows(chunks)), computed, switch)
        self._computed_tokens += tokens
        self._step_sizes[(tokens - 1).bit_length() + 1 if tokens else 0] += 1
        self._sync_seconds += agreed - began
        self._seconds[synced.phase] += self._clock() - agreed
        symmetric.check_all()  # nothing leaves that rests on what a peer failed to send
        return outputs + advanced

    def _rest(self, before: SyncedStep | None, synced: SyncedStep) -> list[RequestOutput]:
        """The end of a step in which no rank has work; the tokens of the step that was launched last.

        before: the step before this one, None if this is the first."""
        outputs = self._finish()[0]
        if times := self._scheduler.times:
            times.rest(self._clock())
        # Ranks capture together, so what they agreed on decides; outputs do not wait for that.
        if before and not (before.phase or synced.pending or synced.leaving):
            compiled = self._compilations()
            self._forward.use_rest()
            self._compiled_at_rest += self._compilations() - compiled
        self._watch.note(self._steps, "resting")
        return outputs

    def _runs_ahead(self, launched: Launched) -> bool:
        """Whether the next step may be scheduled before the tokens of this one are known. If so, it takes
        those that it needs from the device."""
        if not self._overlap or any(chunk.drafts for chunk in launched.drawing):
            return False
        drawn_S = launched.leave_pending()
        if self._scheduler.may_draft():
            return False
        self._forward.keep(drawn_S)
        return True

    def _finish(self) -> tuple[list[RequestOutput], set[str]]:
        """Outputs of the step that was launched last, if it is not finished yet, and the ids of requests
        whose token was not decided by what was drawn. Collective where ranks decide near-ties."""
        launched, self._launched = self._launched, None
        if launched is None:
            return [], set()
        advanced, near_ties = self._commit.finish(launched)
        if (times := self._scheduler.times) is not None:
            times.launched(*launched.work)
            if launched.drawn is not None:
                times.read(self._clock())
        if self._commit.resolves_near_ties:
            self._watch.note(self._steps, "settling")
            advanced += self._commit.resolve(near_ties)
        for output in advanced:
            if output.finish_reason:
                self._forget(output.id)
        return advanced, {near_tie.request.id for near_tie in near_ties}

    def close(self) -> None:
        """Let go of what would keep the ranks from parting; no step may follow."""
        self._forward.drop_graphs()

    def stats(self) -> EngineStats:
        """Counters now; `expert_tokens` once a second, for reading them waits for the device."""
        now = time.monotonic()
        expert_tokens = None
        if now >= self._count_experts_at:
            self._count_experts_at = now + 1.0
            expert_tokens = self._model.expert_counts()
        own = EngineStats(
            rank=self._step_sync.topology.rank,
            pid=os.getpid(),
            steps=self._steps,
            idle_steps=self._idle_steps,
            uneven_steps=self._uneven_steps,
            step_sizes=self._step_sizes,
            computed_tokens=self._computed_tokens,
            graph_steps=self._forward.graph_steps,
            overlapped_steps=self._overlapped_steps,
            sync_seconds=self._sync_seconds,
            prefill_seconds=self._seconds[Phase.PREFILL],
            decode_seconds=self._seconds[Phase.DECODE],
            kernels_compiled=self._compilations() - self._compiled_at_rest,
        )
        if not self._step_sync.leads:  # its group's requests are counted once, by the rank that leads
            return own
        pools, tokens = self._scheduler.kv.pools, self._commit.counters
        return msgspec.structs.replace(
            own,
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            waiting_for=self._scheduler.lack,
            pages_total=sum(pool.num_pages for pool in pools),
            pages_used=sum(pool.num_live for pool in pools),
            pages_cached=sum(pool.num_cached for pool in pools),
            prompt_tokens=tokens.prompt,
            cached_prompt_tokens=tokens.cached_prompt,
            generation_tokens=tokens.generated,
            preemptions=self._scheduler.preemptions,
            held_steps=self._scheduler.delayer.held_steps if self._scheduler.delayer else 0,
            spec_draft_tokens=tokens.drafted,
            spec_accepted_tokens=tokens.accepted,
            expert_tokens=expert_tokens,
        )

    def info(self) -> dict[str, Any]:
        """The plan as run, and the versions that run it. Plain values for JSON."""
        engine_plan, graphs = self.engine_plan, self._forward.graphs
        prefill = self._forward.prefill_graphs
        return engine_plan.describe() | {
            "version": __version__,
            "torch": torch.__version__,
            "kv_cache_bytes": self._attention.cache_bytes,
            "state_bytes": self._attention.state_bytes,
            "decode_graphs": graphs.sizes if graphs else engine_plan.why_no_decode_graphs,
            "prefill_graphs": prefill.sizes if prefill else engine_plan.why_no_prefill_graphs,
            "prefill_delayer": engine_plan.why_no_prefill_delayer or "on",
            "overlap_schedule": why_no_overlap(engine_plan) or "on",
            **self._loaded,
        }

    def check(self, message: AddRequest) -> None:
        """Raise UserError saying why `message` can never run, if so."""
        prompt, sampling, vocab_size = message.prompt_ids, message.sampling, self._model.shape.vocab_size
        if message.id in self._requests:
            raise UserError(f"request id {message.id!r}: already in use")
        if not prompt:
            raise UserError("the prompt is empty: it must hold at least one token")
        for name, ids in (
            ("prompt", prompt),
            ("output_ids", message.output_ids),
            ("logit_bias", sampling.logit_bias),
            ("stop_token_ids", sampling.stop_token_ids),
            ("logprob_token_ids", sampling.logprob_token_ids),
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
        if message.output_ids and len(message.output_ids) >= sampling.max_tokens:
            raise UserError(
                f"output_ids: {len(message.output_ids)} tokens are there already, and max_tokens is "
                f"{sampling.max_tokens}: nothing is left to generate"
            )
        refusal = self._scheduler.refuse(len(prompt), sampling.max_tokens)
        if refusal is not None:
            raise UserError(refusal)

    def _sync(self, chunks: Sequence[Chunk], tokens: int, decoding: int) -> SyncedStep:
        phase = None
        if chunks:
            phase = Phase.DECODE if decoding == len(chunks) else Phase.PREFILL
        self._watch.note(self._steps, "agreeing")
        decoded, self._decoded = self._decoded, None
        step_us = max(1, round(1e6 * (self._clock() - self._decoded_from))) if decoded else 0
        prompts = self._scheduler.next_prompts(chunks)
        synced = self._synced = self._step_sync.sync(
            tokens, phase, prompts, step_us, longest=max((chunk.end for chunk in chunks), default=0)
        )
        if decoded and self._scheduler.switch:
            self._scheduler.switch.ran(*decoded, synced.step_us / 1e6)
        if (delayer := self._scheduler.delayer) is not None:
            delayer.heard(synced.prefill_due, synced.phases, self._step_sync.topology.dp_rank)
        self._uneven_steps += synced.uneven
        return synced

    def _forget(self, id: str) -> None:
        """Drop the request `id` and free its pages."""
        request = self._requests.pop(id)
        request.ended = True
        self._scheduler.remove(request)
