"""The forward of one step on this rank.

As a CUDA graph where there is one, else eagerly; in one micro-batch or two; or, under --deterministic, as
batch_invariant.py splits it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from turnout.attention.caches import AttentionCaches
from turnout.attention.interface import Attention
from turnout.attention.paged import to_device
from turnout.engine.cuda_graph_policy import (
    first_prefill_sizes,
    first_sizes,
    graph_sizes,
    prefill_graph_sizes,
)
from turnout.engine.engine_plan import EnginePlan
from turnout.engine.overlap_policy import why_no_overlap
from turnout.engine.ranks.step_sync import SyncedStep
from turnout.engine.scheduler.scheduler import Chunk
from turnout.engine.step import batch_invariant
from turnout.engine.step.cuda_graphs import Computed, DecodeGraphs, graph_for, prefill_graph_for
from turnout.engine.step.prefill_graphs import PrefillGraphs
from turnout.engine.step.rehearsal import rehearsal
from turnout.engine.step.two_batch_overlap import split, split_chunks
from turnout.models.interface import Model, ProgressFn, Step
from turnout.parallel.transfers import on_device
from turnout.vocabulary import Phase

logger = logging.getLogger(__name__)

Chunks = tuple[Sequence[Chunk], Sequence[Chunk]]  # those that decode, and the others


class Forward:
    """graphs: of decode steps; prefill_graphs: of steps with prompt tokens; None where these run eagerly."""

    def __init__(
        self,
        engine_plan: EnginePlan,
        model: Model,
        attention: AttentionCaches,
        progress: ProgressFn | None = None,
        waiting: int = 0,
    ):
        """Captures graphs, if there are to be any; collective among the ranks of a model. waiting: requests
        that are there already."""
        self._model, self._attention = model, attention
        self._deterministic = engine_plan.config.deterministic
        self._drafts_by_layer = engine_plan.config.drafts_by_layer
        self._two_batches = engine_plan.plan.two_batches
        self._dp_rank, self._dp_size = engine_plan.topology.dp_rank, engine_plan.topology.dp_size
        self._most_decoding = engine_plan.config.max_running_requests * engine_plan.budget.tokens_per_request
        self._most = engine_plan.budget.local
        drawn = 0 if why_no_overlap(engine_plan) else engine_plan.config.max_running_requests
        self._drawn_R = torch.zeros(drawn, dtype=torch.int64, device=attention.device)
        self.graphs: DecodeGraphs | None = None
        self.prefill_graphs: PrefillGraphs | None = None
        self.graph_steps = 0  # that graphs computed
        rehearse = rehearsal(engine_plan, model)
        if not engine_plan.why_no_prefill_graphs:
            sizes = prefill_graph_sizes(engine_plan.budget)
            first = first_prefill_sizes(sizes, waiting)
            with torch.inference_mode():
                self.prefill_graphs = PrefillGraphs(
                    model,
                    attention,
                    sizes=first,
                    later=sorted(set(sizes) - set(first)),
                    stored=engine_plan.stores_in_place,
                    dp_size=engine_plan.topology.dp_size,
                    progress=progress,
                    rehearse=rehearse,
                )
        if not engine_plan.why_no_decode_graphs:
            sizes = graph_sizes(engine_plan.config)
            of_rank = -(-waiting // engine_plan.topology.dp_size)
            first = first_sizes(sizes, of_rank * engine_plan.budget.tokens_per_request)
            with torch.inference_mode():
                self.graphs = DecodeGraphs(
                    model,
                    attention,
                    sizes=first,
                    later=sorted(set(sizes) - set(first)),
                    num_drawn=drawn,
                    dp_size=engine_plan.topology.dp_size,
                    two_batches=self._two_batches,
                    pool=self.prefill_graphs.pool if self.prefill_graphs else None,
                    progress=progress,
                    rehearse=rehearse,
                )
            self._drawn_R = self.graphs.drawn_R

    def __call__(self, chunks: Sequence[Chunk], synced: SyncedStep) -> Computed:
        """Compute the tokens of `chunks`, in their order, decoding ones first; keys and values are stored."""
        size = graph_for(synced, self.graphs.sizes) if self.graphs else None
        if self.graphs and size:
            self.graph_steps += 1
            # Laid out before requests end, and with them what their pages hold.
            step = self._whole_step(chunks, synced) if self._drafts_by_layer else None
            return replace(self.graphs.run(chunks, size, synced.longest), step=step)
        size = prefill_graph_for(synced, self.prefill_graphs.sizes) if self.prefill_graphs else None
        if self.prefill_graphs and size:
            self.graph_steps += 1
            step = self._whole_step(chunks, synced)
            return Computed(hidden_NH=self.prefill_graphs.run(step, size), step=step)
        return self.eagerly(chunks, synced)

    def ways(self, tokens: int) -> tuple[bool, bool]:
        """How steps of so many tokens may be computed: eagerly, and as graphs if they have prompt tokens. A
        rank next to one whose tokens no graph holds computes its own eagerly, however few."""
        prefill = self.prefill_graphs
        if prefill is None or tokens > prefill.sizes[-1]:
            return True, False
        most_in_graphs = self.graphs.sizes[-1] if self.graphs else 0
        if self._dp_size > 1:
            return self._most > prefill.sizes[-1] or self._most_decoding > most_in_graphs, True
        return most_in_graphs < tokens <= self._most_decoding, True

    def eagerly(self, chunks: Sequence[Chunk], synced: SyncedStep) -> Computed:
        """As a call, without graphs; all ranks alike."""
        if self._deterministic:
            return Computed(hidden_NH=batch_invariant.forward(self._model, self._attention, chunks, synced))
        step = self._whole_step(chunks, synced)
        return Computed(hidden_NH=self._model.forward(step), step=step)

    def draft_step(self, chunks: Sequence[Chunk], ids_N: Tensor, tokens: tuple[int, ...]) -> Step:
        """One token of each chunk, `ids`, for a draft layer. tokens: of each data-parallel rank."""
        places_N, attention = self._laid_out(chunks, [])
        return Step(
            input_ids=ids_N, positions=places_N, attention=attention, phase=Phase.DECODE, tokens=tokens
        )

    def use_rest(self) -> None:
        """Capture one of the sizes left for later, in up to a second; collective among the ranks of a model.
        No step may be in flight."""
        for kind, graphs in (("prefill", self.prefill_graphs), ("decode", self.graphs)):
            if graphs is not None and graphs.capture_one_more():
                logger.info("captured %s graphs of %d sizes", kind, len(graphs.sizes))
                return

    def drop_graphs(self) -> None:
        """They hold the ranks' communicators, and cannot outlive them."""
        self.graphs = self.prefill_graphs = None

    def _whole_step(self, chunks: Sequence[Chunk], synced: SyncedStep) -> Step:
        """In two micro-batches where the plan has them and there are tokens enough."""
        num_decoding = sum(chunk.decodes for chunk in chunks)
        whole = chunks[:num_decoding], chunks[num_decoding:]
        make = partial(self._step, synced.step_phase)
        if self._two_batches:
            return split(synced.tokens, self._dp_rank, whole, cut=_cut, make=make)
        return make(whole, synced.tokens, None)

    def keep(self, drawn_S: Tensor | None) -> None:
        """Take pending tokens of the next step from here: int64 [S], by `Request.drawn_row`."""
        if drawn_S is not None:
            self._drawn_R[: len(drawn_S)].copy_(drawn_S)

    def logits(self, computed: Computed, rows: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        """Of rows [S] of a forward: logits [S, V], and what is best among them, if that is known."""
        hidden_NH, logits_NV, best_2N = computed.hidden_NH, computed.logits_NV, computed.best_2N
        if len(rows) < len(hidden_NH):
            rows_S = on_device(rows, torch.int64, hidden_NH.device)  # a list as an index waits for the device
            hidden_NH = hidden_NH[rows_S]
            if logits_NV is not None and best_2N is not None:
                return logits_NV[rows_S], best_2N[:, rows_S]
        if logits_NV is None or best_2N is None:
            return self._model.logits(hidden_NH), None
        return logits_NV, best_2N

    def _step(self, phase: Phase, part: Chunks, tokens: tuple[int, ...], second: Step | None) -> Step:
        """A micro-batch of these chunks; tokens: of each data-parallel rank."""
        decoding, others = part
        ids: list[int] = []
        pending: list[
            tuple[int, int]
        ] = []  # row of a token that only the device knows, and where that has it
        for chunk in (*decoding, *others):
            ids += chunk.tokens
            if chunk.awaits:
                pending.append((len(ids) - 1, chunk.request.drawn_row))
        places_N, attention = self._laid_out(decoding, others)
        (ids_N,) = to_device([_integers(ids)], self._attention.device)
        if pending:
            (pending_2S,) = to_device([_integers(pending).T], self._attention.device)
            ids_N[pending_2S[0]] = self._drawn_R[pending_2S[1]]
        return Step(
            input_ids=ids_N,
            positions=places_N,
            attention=attention,
            phase=phase,
            tokens=tokens,
            other=second,
        )

    def _laid_out(self, decoding: Sequence[Chunk], others: Sequence[Chunk]) -> tuple[Tensor, Attention]:
        """The positions of the chunks' tokens on the device, and attention for them."""
        attention = self._attention.laid_out(decoding, others)
        places_N = attention.places_N
        if places_N is None:
            places = [place for chunk in (*decoding, *others) for place in range(chunk.start, chunk.end)]
            (places_N,) = to_device([_integers(places)], self._attention.device)
        return places_N, attention


def _cut(whole: Chunks, count: int) -> tuple[Chunks, Chunks]:
    """After `count` tokens, of which the decoding chunks come first."""
    decoding, others = whole
    now, then = split_chunks(decoding, count)
    others_now, others_then = split_chunks(others, count - len(now))
    return (now, others_now), (then, others_then)


def _integers(values: Sequence[int] | Sequence[tuple[int, int]]) -> Tensor:
    return torch.from_numpy(np.array(values, dtype=np.int64))  # in a third of torch.tensor's time
