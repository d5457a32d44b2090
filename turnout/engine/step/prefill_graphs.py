"""Steps with prompt tokens as CUDA graphs: all but attention, in pieces that end and begin at its calls.

A step of 2,048 tokens or fewer is some 600 launches, which take the host longer than the GPU computes. What
attention launches depends on lengths and contexts, which latent attention also makes keys and values of and
compressed attention entries, and what recurrent layers do with states, on where prompts begin and end;
everything else depends on the number of tokens alone, so it is captured for a few sizes, and steps are padded
to the next one. The model is not cut up for that: it calls attention (attention/interface.py), and the
attention that it is given at capture ends one graph there and begins the next. A step then replays piece
after piece, and between them attends eagerly to the tokens that are there, or takes the states of their
requests over them.

Rows beyond a rank's tokens are padding: they write to a page of their own, the MoE layers drop them, and
attention and states leave what stood there.

Pieces of all sizes follow one another on one stream and share one memory pool, so what a piece hands to
attention stands in tensors of their own: the next piece may reuse its memory. As decode graphs
(cuda_graphs.py), these have to be dropped before the ranks part.

Legend: N tokens of a step, B of them and padding, H hidden, Hq/Hkv query/KV heads, D head size, C what latent
attention keeps of a token, X what a recurrent layer computed of a token.
"""

from __future__ import annotations

import gc
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from turnout.attention.caches import AttentionCaches
from turnout.attention.delta_rule import DeltaCell
from turnout.attention.entries import Compressible
from turnout.attention.indexing import Index
from turnout.attention.interface import Attention
from turnout.attention.kinds import AttentionSpec, most_handed_bytes
from turnout.attention.up_projection import UpProjection
from turnout.engine.step.cuda_graphs import WARM_UPS
from turnout.engine.step.rehearsal import Rehearsal, nothing
from turnout.models.interface import Model, ProgressFn, Step
from turnout.vocabulary import Phase


class Replayable(Protocol):
    """A piece: what was launched between two calls of attention, with the tensors of then."""

    def replay(self) -> None: ...


class Recorder(Protocol):
    """Turns what runs between `begin` and `end` into a piece."""

    def begin(self) -> None: ...

    def end(self) -> Replayable: ...


class GraphRecorder:
    """Captures CUDA graphs into one memory pool, on the current stream."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._graph: torch.cuda.CUDAGraph | None = None

    def begin(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        # Other threads, such as the one that watches NCCL, may call CUDA meanwhile.
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> torch.cuda.CUDAGraph:
        graph, self._graph = self._graph, None
        assert graph is not None, "nothing began"
        graph.capture_end()
        return graph


class Attend(Protocol):
    """Fills `out` with what attention makes of these tensors in a layer."""

    def __call__(self, attention: Attention, out: Tensor, *given: Tensor) -> None: ...


@dataclass(frozen=True)
class Call:
    """Of attention, or of states. given: what a piece leaves for it; out: where the next piece finds the
    result."""

    attend: Attend
    given: Sequence[Tensor]
    out: Tensor

    def run(self, attention: Attention, count: int) -> None:
        """Of the first `count` rows."""
        self.attend(attention, self.out[:count], *(x[:count] for x in self.given))


@dataclass(frozen=True)
class Handed:
    """What a piece hands to attention or states, and these to the next piece: bytes, for the largest size;
    each layer takes as much as it needs (`AttentionSpec.handed_bytes`).

    dtype: of results. stored: whether keys and values are in the cache already, and not here.
    """

    given_X: Sequence[Tensor]
    out_X: Tensor
    dtype: torch.dtype
    stored: bool

    @classmethod
    def for_rows(
        cls, rows: int, layers: Sequence[AttentionSpec], attention: AttentionCaches, *, stored: bool
    ) -> Handed:
        dtype = attention.groups[0].dtype
        last = max(spec.output_size for spec in layers) * dtype.itemsize
        *given, out = (
            torch.zeros(rows * size, dtype=torch.uint8, device=attention.device)
            for size in (*most_handed_bytes(layers, dtype.itemsize, stored=stored), last)
        )
        return cls(given, out, dtype, stored)


def rows_of(flat_X: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """A tensor of this shape in the bytes at the beginning of `flat_X`."""
    return flat_X[: prod(shape) * dtype.itemsize].view(dtype).view(*shape)


class Cut(Attention):
    """The attention of a capture. A call leaves its input in `handed`, ends a piece and begins the next,
    which goes on with what attention or states will have left there. recorder: None runs through, for a
    warm-up."""

    def __init__(
        self, attention: AttentionCaches, handed: Handed, slots_GB: Tensor, recorder: Recorder | None
    ):
        """slots: int64, of each token's keys and values in each cache group."""
        self._caches = {layer: group for group in attention.groups for layer in group.index}
        self._handed, self._slots_GB, self._recorder = handed, slots_GB, recorder
        self.pieces: list[tuple[Replayable, Call]] = []

    def place(self, layer: int) -> tuple[Tensor, Tensor] | None:
        paged = self._caches[layer]
        return (paged.layer_cache(layer), self._slots_GB[paged.number]) if self._handed.stored else None

    def queries(self, shape: Sequence[int]) -> Tensor:
        """What is written here need not be copied for the call."""
        return rows_of(self._handed.given_X[0], self._handed.dtype, shape)

    def __call__(
        self, layer: int, q_NHD: Tensor, k_NHD: Tensor, v_NHD: Tensor, sinks_H: Tensor | None = None
    ) -> Tensor:
        if self._handed.stored:
            paged, stacked_NH2D = self._caches[layer], torch.stack((k_NHD, v_NHD), dim=2)
            paged.layer_cache(layer).index_copy_(
                1, self._slots_GB[paged.number], stacked_NH2D.transpose(0, 1)
            )
            return self.attend(layer, q_NHD, sinks_H)

        def attend(attention: Attention, out: Tensor, *given: Tensor) -> None:
            q, k, v = given
            out.copy_(attention(layer, q, k, v, sinks_H))

        return self._cut(attend, (q_NHD, k_NHD, v_NHD), q_NHD.shape)

    def attend(
        self, layer: int, q_NHD: Tensor, sinks_H: Tensor | None = None, out_NHD: Tensor | None = None
    ) -> Tensor:
        def attend(attention: Attention, out: Tensor, *given: Tensor) -> None:
            attention.attend(layer, given[0], sinks_H, out)

        return self._cut(attend, (q_NHD,), q_NHD.shape)

    def recur(self, layer: int, mixed_NX: Tensor, cell: DeltaCell) -> Tensor:
        def attend(attention: Attention, out: Tensor, *given: Tensor) -> None:
            out.copy_(attention.recur(layer, given[0], cell))

        return self._cut(attend, (mixed_NX,), (len(mixed_NX), cell.spec.output_size))

    def latent(
        self, layer: int, q_NHD: Tensor, latent_NC: Tensor, up: UpProjection, index: Index | None = None
    ) -> Tensor:
        def attend(attention: Attention, out: Tensor, *given: Tensor) -> None:
            q, latent, *of_index = given
            out.copy_(attention.latent(layer, q, latent, up, Index(*of_index) if of_index else None))

        chosen = () if index is None else (index.q_NHD, index.key_ND)
        weights = None if index is None else index.weights_NH
        return self._cut(attend, (q_NHD, latent_NC, *chosen), (len(q_NHD), *up.values_size), weights)

    def compressed(
        self, layer: int, q_NHD: Tensor, kv_ND: Tensor, sinks_H: Tensor, rest: Compressible | None
    ) -> Tensor:
        def attend(attention: Attention, out: Tensor, *given: Tensor) -> None:
            q, kv, *made_of = given
            out.copy_(attention.compressed(layer, q, kv, sinks_H, _of_rows(rest, *made_of)))

        given, weights = [q_NHD, kv_ND], None
        if rest is not None:
            given.append(rest.raw_NX)
            if rest.index_queries is not None:
                given.append(rest.index_queries)
                weights = rest.index_weights
        return self._cut(attend, given, q_NHD.shape, weights)

    def _cut(
        self,
        attend: Attend,
        given: Sequence[Tensor],
        result: Sequence[int],
        weights: Tensor | None = None,
    ) -> Tensor:
        """What `attend` makes of `given`, and of an index's float32 weights behind them, of this shape."""
        handed, last = self._handed, len(given)
        kept = [_kept(x, rows_of(handed.given_X[i], handed.dtype, x.shape)) for i, x in enumerate(given)]
        if weights is not None:
            kept.append(rows_of(handed.given_X[last], torch.float32, weights.shape).copy_(weights))
        out = rows_of(handed.out_X, handed.dtype, result)
        if self._recorder is not None:
            self.pieces.append((self._recorder.end(), Call(attend, kept, out)))
            self._recorder.begin()
        return out


def _kept(x: Tensor, to: Tensor) -> Tensor:
    """x in the memory of `to`, where it may lie already."""
    return to if x.data_ptr() == to.data_ptr() else to.copy_(x)


def _of_rows(rest: Compressible | None, *given: Tensor) -> Compressible | None:
    """The same of other tokens: what entries are made of, and where there is an index its queries and
    weights."""
    if rest is None:
        return None
    raw, queries, weights = (*given, None, None)[:3]
    assert raw is not None
    return replace(rest, raw_NX=raw, index_queries=queries, index_weights=weights)


@dataclass(frozen=True)
class Captured:
    """pieces: each with the call that follows. last: the piece behind them."""

    pieces: list[tuple[Replayable, Call]]
    last: Replayable


class PrefillGraphs:
    """Replays steps of one model; built after its KV cache, before any request. pool: its graphs' memory."""

    def __init__(
        self,
        model: Model,
        attention: AttentionCaches,
        *,
        sizes: Sequence[int],
        later: Sequence[int] = (),
        stored: bool,
        dp_size: int,
        progress: ProgressFn | None,
        rehearse: Rehearsal = nothing,
    ):
        """Captures each of `sizes`, ascending, in tokens; collective among the ranks of a model.

        later: smaller sizes that `capture_one_more` is to capture. stored: attention lets kernels of the
        model store keys and values (`Attention.place`).
        """
        self.sizes, self._later = list(sizes), list(later)
        self._model, self._attention, self._dp_size = model, attention, dp_size
        most, device = self.sizes[-1], attention.device
        groups = attention.groups
        self._handed = Handed.for_rows(most, model.shape.attention, attention, stored=stored)
        self._ids_B = torch.zeros(most, dtype=torch.int64, device=device)
        self._positions_B = torch.zeros_like(self._ids_B)
        self._rows_B = torch.arange(most, device=device)
        self._real_B = torch.zeros(most, dtype=torch.bool, device=device)
        self._spare_G1 = torch.tensor([[group.spare_slot] for group in groups], device=device)
        self._slots_GB = self._spare_G1.repeat(1, most)
        self._hidden_BH = torch.zeros(most, model.shape.hidden_size, dtype=groups[0].dtype, device=device)
        self.pool: Any = None
        self._stream: torch.cuda.Stream | None = None
        self._captured: dict[int, Captured] = {}
        with rehearse() as rehearsed:
            for size in self.sizes if rehearsed else ():
                self._forward(size, self._cut(size, None))
        for done, size in enumerate(reversed(self.sizes)):
            if progress is not None:
                progress("capturing prefill graphs", done, len(self.sizes))
            self._captured[size] = self._capture(size)

    def capture_one_more(self) -> bool:
        """Of the sizes left for later, the largest; False if there is none. Collective among the ranks of a
        model. No step may be in flight."""
        if not self._later:
            return False
        size = self._later.pop()
        self._captured[size] = self._capture(size)
        insort(self.sizes, size)
        return True

    def run(self, step: Step, size: int) -> Tensor:
        """Final hidden states [N, H] of an eager step of at most `size` tokens; until the next step."""
        count, attention = len(step.input_ids), step.attention
        self._ids_B[:count].copy_(step.input_ids)
        self._positions_B[:count].copy_(step.positions)
        torch.lt(self._rows_B[:size], count, out=self._real_B[:size])
        self._slots_GB[:, count:size].copy_(self._spare_G1.expand(-1, size - count))
        for group in self._attention.groups:
            place = attention.place(next(iter(group.index)))
            if place is not None:
                self._slots_GB[group.number, :count].copy_(place[1])
        captured = self._captured[size]
        for piece, call in captured.pieces:
            piece.replay()
            call.run(attention, count)
        captured.last.replay()
        return self._hidden_BH[:count]

    def _capture(self, size: int) -> Captured:
        self._warm_up(size)
        if self.pool is None:
            self.pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
            gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        with torch.cuda.stream(self._stream):
            return self._record(size, GraphRecorder(self.pool))

    def _warm_up(self, size: int) -> None:
        """Steps without tokens: those of the last prompts stay here, whose pages others may share by now."""
        self._slots_GB.copy_(self._spare_G1.expand_as(self._slots_GB))
        self._real_B.zero_()
        for _ in range(WARM_UPS):  # compiles kernels, allocates their workspaces, connects ranks
            self._forward(size, self._cut(size, None))

    def _record(self, size: int, recorder: Recorder) -> Captured:
        cut = self._cut(size, recorder)
        recorder.begin()
        self._forward(size, cut)
        return Captured(cut.pieces, recorder.end())

    def _cut(self, size: int, recorder: Recorder | None) -> Cut:
        return Cut(self._attention, self._handed, self._slots_GB[:, :size], recorder)

    def _forward(self, size: int, attention: Attention) -> None:
        step = Step(
            input_ids=self._ids_B[:size],
            positions=self._positions_B[:size],
            attention=attention,
            phase=Phase.PREFILL,
            tokens=(size,) * self._dp_size,
            real=self._real_B[:size],
        )
        self._hidden_BH[:size].copy_(self._model.forward(step))
