"""Decode steps as CUDA graphs: one launch instead of hundreds, for batches padded to a captured size.

A row is a token. Drafts are rows of their own: each attends to the context before it, where the rows of its
request before it are stored by then.

Whatever a step brings is copied into tensors of fixed addresses, and the graph of the smallest size that
holds the largest rank's batch is replayed (cuda_graph_policy.py), so all ranks replay the same one. Rows
beyond a rank's own are padding: they have no context, write to a page of their own, and the MoE layers drop
them.

A graph goes from token ids to logits and the greedy choice. The table of pages stays on the device; each
step brings the page that it writes to, so that the table is copied for new requests only. Attention of some
ten requests cuts contexts into spans and joins them; while all contexts of all ranks are short, another graph
of the same size is replayed, which does not.

Graphs are captured at start-up, largest first, and share one memory pool; some sizes are left for steps in
which no rank has anything else to do. A capture cannot outlive its communicators: `DecodeGraphs` has to be
dropped before its ranks part.

Legend: B rows of a captured batch, F fields of a row, P pages of a row of a table, H hidden, V vocabulary.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from turnout.attention.caches import AttentionCaches
from turnout.attention.paged import PagedAttention
from turnout.attention.states import Rows
from turnout.engine.cuda_graph_policy import short_context
from turnout.engine.ranks.step_sync import SyncedStep
from turnout.engine.scheduler.scheduler import Chunk
from turnout.engine.step.rehearsal import Rehearsal, nothing
from turnout.engine.step.two_batch_overlap import split
from turnout.models.interface import Model, ProgressFn, Step
from turnout.vocabulary import Phase

# Of a row: token id, position, context length, row of the page tables, where its token stands; then a slot of
# each cache group.
FIELDS = 5
WARM_UPS = 2


# Of a micro-batch: int64 [F, B], and the page tables [B, P] of each group.
Part = tuple[Tensor, list[Tensor]]


@dataclass(frozen=True, kw_only=True)
class Computed:
    """What a forward left, for the N tokens of a step; of a graph, until its next replay.

    logits_NV: float32, where they were computed along with it.
    best_2N:   int64: the token of each row's largest logit, and whether that is finite.
    step:      what was computed, where that was one call or a draft layer comes next.
    """

    hidden_NH: Tensor
    logits_NV: Tensor | None = None
    best_2N: Tensor | None = None
    step: Step | None = None


@dataclass(frozen=True)
class Captured:
    """context: tokens that no request has more of. rows_FB: int64, what a step brings. hidden_BH, best_2B:
    what it leaves."""

    graph: torch.cuda.CUDAGraph
    context: int
    rows_FB: Tensor
    hidden_BH: Tensor
    best_2B: Tensor


class DecodeGraphs:
    """Replays decode steps of one model; built after its KV cache, before any request."""

    def __init__(
        self,
        model: Model,
        attention: AttentionCaches,
        *,
        sizes: Sequence[int],
        later: Sequence[int],
        num_drawn: int,
        dp_size: int,
        two_batches: bool,
        pool: Any,
        progress: ProgressFn | None,
        rehearse: Rehearsal = nothing,
    ):
        """Captures a graph for each of `sizes`, ascending; collective among the ranks of a model.

        later: smaller sizes that `capture_one_more` is to capture.

        two_batches: large ones as two micro-batches (two_batch_overlap.py). num_drawn: the most tokens that
        a step takes from `drawn_R`, which the step before drew; 0 if the host knows them all. pool: of
        graphs that are never replayed at the same time; None: one of its own.
        """
        self.sizes, self._later = list(sizes), list(later)
        self._model, self._attention = model, attention
        self._dp_size, self._two_batches = dp_size, two_batches
        self._device = attention.device
        self._num_fields, self._num_drawn = FIELDS + len(attention.groups), num_drawn
        # Of a fixed address: drawn tokens, then the fields of the largest size, token ids first.
        self._inputs_X = torch.zeros(
            num_drawn + self._num_fields * self.sizes[-1], dtype=torch.int64, device=self._device
        )
        self.drawn_R = self._inputs_X[:num_drawn]
        self._logits_BV = torch.zeros(self.sizes[-1], model.shape.vocab_size, device=self._device)
        self._graphs: dict[tuple[int, bool], Captured] = {}  # by size, and whether all contexts are short
        self._pool = pool
        with rehearse() as rehearsed:
            for size in self.sizes if rehearsed else ():
                for context in self._contexts(size):
                    self._forward(self._padding(size), context)
        for done, size in enumerate(reversed(self.sizes)):
            if progress is not None:
                progress("capturing graphs", done, len(self.sizes))
            self._add(size)

    def capture_one_more(self) -> bool:
        """Of the sizes left for later, the largest; False if there is none. Collective among the ranks of a
        model. No step may be in flight."""
        if not self._later:
            return False
        size = self._later.pop()
        self._add(size)
        insort(self.sizes, size)
        return True

    def graph_of(self, size: int, longest: int) -> Captured:
        """longest: tokens of the longest context of any rank, so that all ranks replay the same one."""
        short = self._graphs.get((size, True))
        return short if short and longest <= short.context else self._graphs[size, False]

    def run(self, chunks: Sequence[Chunk], size: int, longest: int) -> Computed:
        """Replay the graph of `size` for chunks that decode, of which there may be none. longest: as of
        `graph_of`."""
        captured, count = self.graph_of(size, longest), sum(chunk.length for chunk in chunks)
        rows = fields(chunks, self._attention, size, self._num_drawn)
        # Pinned each time: a rank without tokens comes here again before the last copy is done.
        pinned = torch.tensor(rows, pin_memory=self._device.type == "cuda")
        captured.rows_FB.copy_(pinned, non_blocking=True)
        captured.graph.replay()
        return Computed(
            hidden_NH=captured.hidden_BH[:count],
            logits_NV=self._logits_BV[:count],
            best_2N=captured.best_2B[:, :count],
        )

    def _add(self, size: int) -> None:
        """Capture the graphs of `size`."""
        for short, context in enumerate(self._contexts(size)):
            self._graphs[size, bool(short)] = self._capture(size, context)

    def _contexts(self, size: int) -> list[int]:
        """Of how many tokens contexts may be, in the one or two graphs of `size`."""
        groups = self._attention.groups
        longest = max(group.table.shape[1] * group.page_size for group in groups)
        spans = [group.spans(size, longest) for group in groups]
        short = min(longest, short_context(max(spans)))
        fewer = any(group.spans(size, short) < cut for group, cut in zip(groups, spans, strict=True))
        return [longest, short] if fewer else [longest]

    def _rows(self, size: int) -> Tensor:
        """int64 [F, size]: where a step of this size puts its fields; other sizes use the same memory."""
        F = self._num_fields
        return self._inputs_X[self._num_drawn :][: F * size].view(F, size)

    def _padding(self, size: int) -> Tensor:
        """`_rows`, of a step without tokens."""
        rows_FB = self._rows(size)
        rows_FB.copy_(torch.tensor(fields([], self._attention, size, self._num_drawn)))
        return rows_FB

    def _capture(self, size: int, context: int) -> Captured:
        """Of contexts of up to `context` tokens."""
        rows_FB = self._padding(size)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):  # compiles kernels, allocates their workspaces, connects ranks
                self._forward(rows_FB, context)
        torch.cuda.current_stream().wait_stream(side)
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as the one that watches NCCL, may call CUDA meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            hidden_BH, best_2B = self._forward(rows_FB, context)
        return Captured(graph, context, rows_FB, hidden_BH, best_2B)

    def _forward(self, rows_FB: Tensor, context: int) -> tuple[Tensor, Tensor]:
        size = rows_FB.shape[1]
        _, positions_B, _, rows_B, places_B = rows_FB[:FIELDS]
        if self._num_drawn:
            rows_FB = torch.cat((self._inputs_X[places_B][None], rows_FB[1:]))
        tables = [
            contexts(group, positions_B, slots_B, rows_B, context)
            for group, slots_B in zip(self._attention.groups, rows_FB[FIELDS:], strict=True)
        ]
        whole, tokens = (rows_FB, tables), (size,) * self._dp_size
        step = (
            split(tokens, 0, whole, cut=_cut, make=self._step)
            if self._two_batches
            else self._step(whole, tokens, None)
        )
        hidden_BH = self._model.forward(step)
        return hidden_BH, self._model.best(hidden_BH, self._logits_BV[:size])

    def _step(self, part: Part, tokens: tuple[int, ...], second: Step | None) -> Step:
        """tokens: of each data-parallel rank."""
        rows_FB, tables = part
        ids_B, positions_B, ends_B, states_B, *_ = rows_FB
        attentions = [
            group.rows(slots_B, table_BP, ends_B, states_B)
            for group, slots_B, table_BP in zip(self._attention.groups, rows_FB[FIELDS:], tables, strict=True)
        ]
        return Step(
            input_ids=ids_B,
            positions=positions_B,
            attention=self._attention.together(
                attentions, [Rows(states, states_B, positions_B) for states in self._attention.states]
            ),
            phase=Phase.DECODE,
            tokens=tokens,
            real=ends_B > 0,
            other=second,
        )


def graph_for(synced: SyncedStep, sizes: Sequence[int]) -> int | None:
    """The captured size that every rank replays in this step; None: it runs eagerly on every rank."""
    return _holding(synced, sizes) if synced.phase == Phase.DECODE else None


def prefill_graph_for(synced: SyncedStep, sizes: Sequence[int]) -> int | None:
    """As `graph_for`, of steps with prompt tokens on some rank."""
    return _holding(synced, sizes) if synced.phase == Phase.PREFILL else None


def _holding(synced: SyncedStep, sizes: Sequence[int]) -> int | None:
    return next((size for size in sizes if size >= max(synced.tokens)), None)


def _cut(whole: Part, count: int) -> tuple[Part, Part]:
    rows_FB, tables = whole
    return (
        (rows_FB[:, :count], [table_BP[:count] for table_BP in tables]),
        (rows_FB[:, count:], [table_BP[count:] for table_BP in tables]),
    )


def fields(
    chunks: Sequence[Chunk], attention: AttentionCaches, size: int, num_drawn: int = 0
) -> list[list[int]]:
    """[F, size]: a row for each token of the chunks, then padding; takes their slots in every group.

    A row's token stands among `num_drawn` drawn ones, or in the first field, which follows those.
    """
    ids: list[int] = []
    positions: list[int] = []
    rows: list[int] = []
    stands = list(range(num_drawn, num_drawn + size))
    for chunk in chunks:
        request, start, end, _ = chunk
        if end == start + 1:  # as almost all, which takes the host long enough with hundreds of them
            if end > len(request.tokens):
                stands[len(ids)] = request.drawn_row
                ids.append(0)
            else:
                ids.append(request.tokens[start])
            positions.append(start)
            rows.append(request.row)
        else:
            ids += chunk.tokens
            positions += range(start, end)
            rows += [request.row] * (end - start)
    padding = size - len(ids)
    return [
        ids + [0] * padding,
        positions + [0] * padding,
        [place + 1 for place in positions] + [0] * padding,
        rows + [attention.groups[0].spare_row] * padding,
        stands,
        *(group.place_singles(chunks) + [group.spare_slot] * padding for group in attention.groups),
    ]


def contexts(
    attention: PagedAttention, positions_B: Tensor, slots_B: Tensor, rows_B: Tensor, longest: int
) -> Tensor:
    """int64 [B, P]: the pages of rows, once the table has the ones that this step writes to. longest: tokens
    that no context has more of."""
    attention.table[rows_B, positions_B // attention.page_size] = slots_B // attention.page_size
    return attention.table[:, : -(-longest // attention.page_size)][rows_B]
