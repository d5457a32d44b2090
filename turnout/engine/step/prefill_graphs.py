"""Steps with prompt tokens as CUDA graphs: all but attention, in pieces that end and begin at its calls.

A step of 2,048 tokens or fewer is some 600 launches, which take the host longer than the GPU computes. What
attention launches depends on lengths and contexts, and what recurrent layers do with states, on where prompts
begin and end; everything else depends on the number of tokens alone, so it is captured for a few sizes, and
steps are padded to the next one. The model is not cut up for that: it calls attention
(attention/interface.py), and the attention that it is given at capture ends one graph there and begins the
next. A step then replays piece after piece, and between them attends eagerly to the tokens that are there, or
takes the states of their requests over them.

Rows beyond a rank's tokens are padding: they write to a page of their own, the MoE layers drop them, and
attention and states leave what stood there.

Pieces of all sizes follow one another on one stream and share one memory pool, so what a piece hands to
attention stands in tensors of their own: the next piece may reuse its memory. As decode graphs
(cuda_graphs.py), these have to be dropped before the ranks part.

Legend: N tokens of a step, B of them and padding, H hidden, Hq/Hkv query/KV heads, D head size, X what a
recurrent layer computed of a token.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from turnout.attention.caches import AttentionCaches
from turnout.attention.delta_rule import DeltaCell
from turnout.attention.interface import Attention
from turnout.attention.kinds import AttentionSpec
from turnout.engine.step.cuda_graphs import WARM_UPS
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


@dataclass(frozen=True)
class Call:
    """Of attention, by a layer; or of states, by one that has a cell."""

    layer: int
    sinks_H: Tensor | None = None
    cell: DeltaCell | None = None


@dataclass(frozen=True)
class Handed:
    """What a piece hands to attention or states, and these to the next piece: flat, for the largest size;
    each layer takes as much as it has heads. in: queries, or what goes into a state."""

    in_X: Tensor
    k_X: Tensor
    v_X: Tensor
    out_X: Tensor

    @property
    def stored(self) -> bool:
        """Whether keys and values are in the cache already, and not here."""
        return not len(self.k_X)

    @classmethod
    def for_rows(
        cls, rows: int, layers: Sequence[AttentionSpec], attention: AttentionCaches, *, stored: bool
    ) -> Handed:
        specs, group = [group.spec for group in attention.groups], attention.groups[0]
        first, last = max(spec.input_size for spec in layers), max(spec.output_size for spec in layers)
        kv = 0 if stored else max(spec.num_kv_heads * spec.head_dim for spec in specs)
        widths = first, kv, kv, last
        return cls(*(torch.zeros(rows * width, dtype=group.dtype, device=group.device) for width in widths))


def rows_of(flat_X: Tensor, rows: int, *sizes: int) -> Tensor:
    """[rows, *sizes] at the beginning of `flat_X`."""
    return flat_X[: rows * prod(sizes)].view(rows, *sizes)


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

    def __call__(
        self, layer: int, q_NHD: Tensor, k_NHD: Tensor, v_NHD: Tensor, sinks_H: Tensor | None = None
    ) -> Tensor:
        if self._handed.stored:
            paged, stacked_NH2D = self._caches[layer], torch.stack((k_NHD, v_NHD), dim=2)
            paged.layer_cache(layer).index_copy_(
                1, self._slots_GB[paged.number], stacked_NH2D.transpose(0, 1)
            )
        else:
            rows_of(self._handed.k_X, *k_NHD.shape).copy_(k_NHD)
            rows_of(self._handed.v_X, *v_NHD.shape).copy_(v_NHD)
        return self._cut(Call(layer, sinks_H), q_NHD, q_NHD.shape)

    def attend(
        self, layer: int, q_NHD: Tensor, sinks_H: Tensor | None = None, out_NHD: Tensor | None = None
    ) -> Tensor:
        return self._cut(Call(layer, sinks_H), q_NHD, q_NHD.shape)

    def recur(self, layer: int, mixed_NX: Tensor, cell: DeltaCell) -> Tensor:
        return self._cut(Call(layer, cell=cell), mixed_NX, (len(mixed_NX), cell.spec.output_size))

    def _cut(self, call: Call, given: Tensor, result: Sequence[int]) -> Tensor:
        """What comes of `given`, of this shape."""
        rows_of(self._handed.in_X, *given.shape).copy_(given)
        if self._recorder is not None:
            self.pieces.append((self._recorder.end(), call))
            self._recorder.begin()
        return rows_of(self._handed.out_X, *result)


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
        stored: bool,
        dp_size: int,
        progress: ProgressFn | None,
    ):
        """Captures each of `sizes`, ascending, in tokens; collective among the ranks of a model.

        stored: attention lets kernels of the model store keys and values (`Attention.place`).
        """
        self.sizes = list(sizes)
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
        for done, size in enumerate(reversed(self.sizes)):
            if progress is not None:
                progress("capturing prefill graphs", done, len(self.sizes))
            self._captured[size] = self._capture(size)

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
            self._call(attention, call, count)
        captured.last.replay()
        return self._hidden_BH[:count]

    def _call(self, attention: Attention, call: Call, count: int) -> None:
        """Fill the first `count` rows of what the next piece reads."""
        spec, handed = self._model.shape.attention[call.layer], self._handed
        if call.cell is not None:
            mixed_NX = rows_of(handed.in_X, count, spec.input_size)
            out_NY = rows_of(handed.out_X, count, spec.output_size)
            out_NY.copy_(attention.recur(call.layer, mixed_NX, call.cell))
            return
        q_NHD = rows_of(handed.in_X, count, spec.num_heads, spec.head_dim)
        out_NHD = rows_of(handed.out_X, count, spec.num_heads, spec.head_dim)
        if handed.stored:
            attention.attend(call.layer, q_NHD, call.sinks_H, out_NHD)
        else:
            k_NHD = rows_of(handed.k_X, count, spec.num_kv_heads, spec.head_dim)
            v_NHD = rows_of(handed.v_X, count, spec.num_kv_heads, spec.head_dim)
            out_NHD.copy_(attention(call.layer, q_NHD, k_NHD, v_NHD, call.sinks_H))

    def _capture(self, size: int) -> Captured:
        for _ in range(WARM_UPS):  # compiles kernels, allocates their workspaces, connects ranks
            self._forward(size, self._cut(size, None))
        if self.pool is None:
            self.pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
            gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        with torch.cuda.stream(self._stream):
            return self._record(size, GraphRecorder(self.pool))

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
