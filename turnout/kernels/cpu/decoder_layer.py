"""The two halves of a decoder layer, attention and experts, each one call for a step of few tokens.

They are made of the kernels of rows.py, attention.py, route.py and experts.py. A step of one token would
spend half of its time between those: each call takes microseconds of Python and two or three tensors, and
computes for as long. What does not change between steps is bound once, as addresses; whoever binds it keeps
the tensors, and a copy of it, as pickle makes, binds its own. Dense products read matrices as torch keeps
them, so that no copy is needed.

Everything is float32. Threads share each of a half's phases (phases.py). `in_one_call` says for which steps
a half is one call. recurrent_layer.py has the half of a layer that keeps a state in place of keys and values.

Legend: N tokens of the step, H hidden, Hq/Hkv query/KV heads, G = Hq + Hkv, D head size, X = (G + Hkv) D, E
experts, L those of this rank, K top-k, I intermediate, S that of the shared expert.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from turnout.kernels.cpu import attention, experts, route, rows
from turnout.kernels.cpu.jit import inline, kernel, part
from turnout.kernels.cpu.panels import WIDENED_ROWS
from turnout.kernels.cpu.phases import PHASE, ROWS, SECOND, begin, end, piece, shared_dots
from turnout.kernels.cpu.team import floats, integers, phased
from turnout.kernels.cpu.threads import threads_for
from turnout.kernels.cpu.tiles import dots, dots_between
from turnout.kernels.cpu.vectors import (
    LANES,
    exp,
    get_f32,
    get_i64,
    load,
    put_f32,
    splat,
    store,
    take,
    zeros,
)

# With more of both, a library's products gain more than one call saves.
FEW_TOKENS = 8
FEW_MULTIPLICATIONS = 2**25
ONE = np.float32(1.0)
COLUMNS = 16  # of the shared expert that are a piece

_norm, _rotate, _choose = rows._norm, rows._rotate, route._choose
_store, _attend = attention._store, attention._attend
_pairs, _up, _down = experts._pairs, experts._up, experts._down


def in_one_call(tokens: int, dense: float) -> bool:
    """Whether a half of a layer is one call for a step of so many tokens, for which it makes so many
    multiplications in dense products, which else a library makes. All others are by the same kernels."""
    return tokens > 0 and (tokens <= FEW_TOKENS or dense <= FEW_MULTIPLICATIONS)


@inline
def sigmoid(x):
    return splat(ONE) / (splat(ONE) + exp(zeros() - x))


@part
def norm_phase(phase, threads, x, delta, gain, sums, out, N, H, eps):
    """`_norm`."""
    begin(phase)
    size = piece(threads, ROWS, N)
    while True:
        first = take(phase) * size
        if first >= N:
            break
        at, added = first * H * 4, delta + first * H * 4 if delta else 0
        _norm(x + at, added, gain, sums + at, out + at, min(size, N - first), H, eps)
    end(phase)


@part
def dots_phase(phase, threads, x, N, weight, M, K, out):
    """`dots`."""
    begin(phase)
    shared_dots(phase, threads, x, N, weight, M, K, out)
    end(phase)


@part
def _rotate_and_store(
    phase, threads, heads, X, head_gain, cos, sin, q, k, N, Hq, Hkv, D, eps,
    chunks, C, table, P, page_blocks, cache, head,
):  # fmt: skip
    begin(phase)
    size = piece(threads, ROWS, N)
    v, kv_pitch = heads + (Hq + Hkv) * D * 4, Hkv * D * 4
    while True:
        first = take(phase) * size
        if first >= N:
            break
        count, angle = min(size, N - first), first * D * 4
        _rotate(
            heads + first * X * 4, X * 4, head_gain, cos + angle, sin + angle, q + angle * Hq,
            k + angle * Hkv, count, Hq, Hkv, D, eps,
        )  # fmt: skip
        _store(
            first, first + count, k, kv_pitch, v, X * 4, chunks, C, table, P, page_blocks, cache, head, Hkv, D
        )
    end(phase)


@part
def _gate_phase(phase, threads, x, gate, N, Y):
    """x [N, Y] times the sigmoid of gate [N, Y]."""
    begin(phase)
    size = piece(threads, ROWS, N)
    while True:
        first = take(phase) * size
        if first >= N:
            break
        for at in range(first * Y * 4, min(first + size, N) * Y * 4, 64):
            store(x + at, load(x + at) * sigmoid(load(gate + at)))
    end(phase)


@phased(28, 3)
def _attention_half(phases, threads, given):
    """sums [N, H] = x + delta (0: x is the sum); out [N, H] = attention of its norm, gated, projected.

    gate_weight: [Hq D, H], or 0. space: of (H + X + (3 Hq + Hkv) D) N float32. The rest: see `_norm`,
    `_rotate`, `_store` and `_attend`.
    """
    (
        x, delta, sums, out, space, N, cos, sin, chunks, C, groups, M, table, P, page_blocks, cache, head,
        window, gain, qkv, head_gain, gate_weight, out_weight, sinks, H, Hq, Hkv, D,
    ) = integers(given, 28)  # fmt: skip
    eps, head_eps, scale = floats(given + 28 * 8, 3)
    inner = Hq * D
    X = inner + 2 * Hkv * D
    heads = space + H * N * 4
    q = heads + X * N * 4
    k = q + inner * N * 4
    attended = k + Hkv * D * N * 4
    gate = attended + inner * N * 4
    norm_phase(phases, threads, x, delta, gain, sums, space, N, H, eps)
    phases += PHASE
    begin(phases)
    shared_dots(phases, threads, space, N, qkv, X, H, heads)
    if gate_weight:
        shared_dots(phases + SECOND, threads, space, N, gate_weight, inner, H, gate)
    end(phases)
    phases += PHASE
    _rotate_and_store(
        phases, threads, heads, X, head_gain, cos, sin, q, k, N, Hq, Hkv, D, head_eps,
        chunks, C, table, P, page_blocks, cache, head,
    )  # fmt: skip
    phases += PHASE
    begin(phases)
    _attend(
        phases, q, inner * 4, groups, M, table, P, page_blocks, cache, head, Hq, Hkv, D, window, sinks,
        attended, scale,
    )  # fmt: skip
    end(phases)
    phases += PHASE
    if gate_weight:
        _gate_phase(phases, threads, attended, gate, N, inner)
    phases += PHASE
    dots_phase(phases, threads, attended, N, out_weight, H, inner, out)


@part
def _shared_columns(first, x, N, gate_up, S, H, token_gate, raw, out):
    """Columns [first, first + COLUMNS) of out [N, S] = silu of a product with gate_up [2 S, H], gate rows
    first, times the other half, times token_gate [N] (or 0). raw: [N, 2 S], for the product."""
    half = S * H * 4
    dots_between(x, N, gate_up, first, first + COLUMNS, S, H, raw)
    dots_between(x, N, gate_up + half, first, first + COLUMNS, S, H, raw + N * S * 4)
    for n in range(N):
        by = splat(get_f32(token_gate + n * 4)) if token_gate else splat(ONE)
        at = (n * S + first) * 4
        gate = load(raw + at)
        store(out + at, gate * sigmoid(gate) * load(raw + N * S * 4 + at) * by)


@part
def _token_gates(phase, x, N, weight, H, out):
    """out [N] = sigmoid of x [N, H] times weight [1, H]."""
    begin(phase)
    if take(phase) == 0:
        dots(x, N, weight, 1, H, out)
        for n in range(N):
            put_f32(out + n * 4, ONE / (ONE + np.float32(np.exp(-get_f32(out + n * 4)))))
    end(phase)


@part
def _route_phase(
    phase, normed, N, router, E, H, logits, left, ids, chosen, counts, scaling, K, of_all, renormalize,
    first, L, starts, token, weight, shared, S, token_gate, raw, shared_a,
):  # fmt: skip
    """`_choose` and `_pairs`, and meanwhile `_shared_columns`."""
    begin(phase)
    while True:
        job = take(phase)
        if job > S // COLUMNS:
            break
        if job:
            at = (job - 1) * COLUMNS
            _shared_columns(at, normed, N, get_i64(shared), S, H, token_gate, raw, shared_a)
        else:
            dots(normed, N, router, E, H, logits)
            _choose(logits, left, 0, ids, chosen, counts, scaling, N, E, K, of_all, renormalize)
            _pairs(ids, chosen, N, K, first, L, starts, token, weight)
    end(phase)


@phased(26, 5)
def _experts_half(phases, threads, given):
    """sums [N, H] = x + delta (0: x is the sum); out [N, H] = experts [first, first + L) of its norm, as
    chosen by the product with router [E, H], and the shared expert.

    w13, w2: addresses of what `matrices` gives. shared: of three addresses: the shared expert's gate_up
    [2 S, H] and down [H, S], and its token_gate [1, H] or 0; S is 0 without one. space: as `ExpertsHalf`
    makes it; room: bytes of it for each thread. columns: see `_down`. The rest: see `_norm`, `_choose`,
    `_pairs`, `_up` and `_down`.
    """
    (
        x, delta, sums, out, space, room, N, gain, router, counts, H, E, K, of_all, renormalize,
        first, L, w13, w2, inner, activation, b13, b2, shared, S, columns,
    ) = integers(given, 26)  # fmt: skip
    eps, scaling, alpha, beta, limit = floats(given + 26 * 8, 5)
    starts = space
    token = starts + (L + 1) * 8
    normed = token + N * K * 8
    logits = normed + N * H * 4
    left = logits + N * E * 4
    ids = left + E * 4
    chosen = ids + N * K * 4
    weight = chosen + N * K * 4
    a = weight + N * K * 4
    raw = a + N * K * inner * 4
    shared_a = raw + 2 * N * S * 4
    by_token = shared_a + N * S * 4
    unpacked = by_token + N * 4
    norm_phase(phases, threads, x, delta, gain, sums, normed, N, H, eps)
    phases += PHASE
    gate = get_i64(shared + 16) if S else 0
    if gate:
        _token_gates(phases, normed, N, gate, H, by_token)
    phases += PHASE
    _route_phase(
        phases, normed, N, router, E, H, logits, left, ids, chosen, counts, scaling, K, of_all, renormalize,
        first, L, starts, token, weight, shared, S, by_token if gate else 0, raw, shared_a,
    )  # fmt: skip
    phases += PHASE
    begin(phases)
    _up(
        phases, normed, 4 * H, starts, token, L,
        get_i64(w13), get_i64(w13 + 8), get_i64(w13 + 16), get_i64(w13 + 24), get_i64(w13 + 32),
        get_i64(w13 + 40), H, inner // LANES, activation, alpha, beta, limit, b13, unpacked, room, a,
    )  # fmt: skip
    if S:
        shared_dots(phases + SECOND, threads, shared_a, N, get_i64(shared + 8), H, S, out)
    end(phases)
    phases += PHASE
    begin(phases)
    _down(
        phases, a, starts, token, weight, L, N,
        get_i64(w2), get_i64(w2 + 8), get_i64(w2 + 16), get_i64(w2 + 24), get_i64(w2 + 32),
        get_i64(w2 + 40), inner, H // LANES, columns, b2, unpacked, room, S, out,
    )  # fmt: skip
    end(phases)


@kernel("void(int64, int64, int64, int64, int64, int64)")
def _linear(x, N, weight, M, K, out):
    """See `dots`."""
    dots(x, N, weight, M, K, out)


def linear(x_NK: Tensor, weight_MK: Tensor) -> Tensor:
    """float32 [N, M]: x times the rows of weight, both float32 and contiguous; K is a multiple of 16."""
    (N, K), M = x_NK.shape, len(weight_MK)
    out_NM = torch.empty(N, M)
    _linear(x_NK.data_ptr(), N, weight_MK.data_ptr(), M, K, out_NM.data_ptr())
    return out_NM


class Bound:
    """A dataclass that binds addresses of its fields' tensors when it is made."""

    def __reduce__(self) -> tuple[Any, ...]:
        given = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        return _made_of, (type(self), given)


def _made_of(kind: type[Bound], given: dict[str, Any]) -> Bound:
    return kind(**given)


@dataclass(kw_only=True, eq=False)
class AttentionHalf(Bound):
    """Norm, projections, rotation, paged attention and output projection of a layer, without biases.

    Weights are contiguous float32. head_gain: of the norm of queries and keys, or None. gate: see
    `Attention` (models/attention.py).
    """

    qkv_XH: Tensor
    head_gain_GD: Tensor | None
    head_eps: float
    out_HY: Tensor
    sinks_H: Tensor | None
    num_q: int
    num_kv: int
    head_dim: int
    gate_YH: Tensor | None = None

    def __post_init__(self) -> None:
        X, H = self.qkv_XH.shape
        gates = self.num_q * self.head_dim if self.gate_YH is not None else 0
        self._dense, self._per_pair = (X + gates) * H + self.out_HY.numel(), 2 * self.num_q * self.head_dim
        self._room = H + X + (2 * self.num_q + self.num_kv) * self.head_dim + gates
        self._bound = (
            self.qkv_XH.data_ptr(), experts.address(self.head_gain_GD), experts.address(self.gate_YH),
            self.out_HY.data_ptr(), experts.address(self.sinks_H), H, self.num_q, self.num_kv, self.head_dim,
        )  # fmt: skip

    def __call__(
        self,
        x_NH: Tensor,
        delta_NH: Tensor | None,
        gain_H: Tensor,
        eps: float,
        cos: Tensor,
        sin: Tensor,
        chunks: attention.Chunks,
        cache: attention.Cache,
    ) -> tuple[Tensor, Tensor] | None:
        """(x + delta, attention of its norm), float32 [N, H]; None for a step that is not one call.

        gain: contiguous float32, the weight of the norm. cos, sin: contiguous, D values of each token. cache:
        this layer's.
        """
        N = len(x_NH)
        if not in_one_call(N, N * self._dense):
            return None
        x_NH, delta_NH, sums_NH, out_NH = residual(x_NH, delta_NH)
        space = torch.empty(N * self._room)
        _attention_half(
            threads_for(N * self._dense + chunks.pairs * self._per_pair), self,
            x_NH.data_ptr(), experts.address(delta_NH), sums_NH.data_ptr(), out_NH.data_ptr(),
            space.data_ptr(), N, cos.data_ptr(), sin.data_ptr(), *chunks.bound, *cache.pages, cache.window,
            gain_H.data_ptr(), *self._bound, eps, self.head_eps, cache.scale,
        )  # fmt: skip
        return sums_NH, out_NH


@dataclass(eq=False)
class ExpertsHalf(Bound):
    """Norm, router and experts of a layer whose experts are all on this rank, a shared one too.

    router: contiguous float32. counts: int64, grows by the choices. shared: of the shared expert, contiguous
    float32: gate_up [2 S, H], gate rows first, down [H, S], and the token gate [1, H] if it has one; S is a
    multiple of COLUMNS. The rest: see `route.choose` and `experts.sort_pairs`.
    """

    layer: experts.Layer
    _: KW_ONLY
    router_EH: Tensor
    counts_E: Tensor
    top_k: int
    of_all: bool
    renormalize: bool
    scaling: float
    first: int
    shared: tuple[Tensor, Tensor, Tensor | None] | None = None

    def __post_init__(self) -> None:
        layer, (E, H) = self.layer, self.router_EH.shape
        L, inner = layer.w13.experts, layer.w2.inputs
        self._matrices = [torch.tensor(experts.matrices(w)) for w in (layer.w13, layer.w2)]
        gate_up, down, token_gate = self.shared or (None, None, None)
        S = 0 if down is None else down.shape[1]
        self._shared = torch.tensor([experts.address(weight) for weight in (gate_up, down, token_gate)])
        self._dense, self._others = (E + 3 * S) * H, self.top_k * 3 * inner * H
        self._scratch = layer.scratch(1), layer.scratch(WIDENED_ROWS)
        self._once, self._each = 2 * (L + 1) + E, H + E + self.top_k * (5 + inner) + 3 * S + 1
        self._bound = (
            self.router_EH.data_ptr(), self.counts_E.data_ptr(), H, E, self.top_k, self.of_all,
            self.renormalize, self.first, L, *(w.data_ptr() for w in self._matrices), inner,
            experts.ACTIVATIONS[layer.activation], experts.address(layer.b13), experts.address(layer.b2),
            self._shared.data_ptr(), S,
        )  # fmt: skip
        self._numbers = self.scaling, layer.alpha, layer.beta, layer.limit

    def __call__(
        self, x_NH: Tensor, delta_NH: Tensor | None, gain_H: Tensor, eps: float
    ) -> tuple[Tensor, Tensor] | None:
        """(x + delta, experts of its norm), float32 [N, H]; None for a step that is not one call.

        gain: contiguous float32, the weight of the norm.
        """
        N = len(x_NH)
        if not in_one_call(N, N * self._dense):
            return None
        x_NH, delta_NH, sums_NH, out_NH = residual(x_NH, delta_NH)
        threads, room = threads_for(N * (self._dense + self._others)), self._scratch[N >= WIDENED_ROWS]
        space = torch.empty(self._once + N * self._each + threads * room)
        _experts_half(
            threads, self, x_NH.data_ptr(), experts.address(delta_NH), sums_NH.data_ptr(),
            out_NH.data_ptr(), space.data_ptr(), 4 * room, N, gain_H.data_ptr(), *self._bound,
            self.layer.columns(threads), eps, *self._numbers,
        )  # fmt: skip
        return sums_NH, out_NH


def residual(x_NH: Tensor, delta_NH: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Both, contiguous, and room for their sum, x itself without a delta, and for what follows."""
    x_NH = x_NH.contiguous()
    out_NH = torch.empty_like(x_NH)
    if delta_NH is None:
        return x_NH, None, x_NH, out_NH
    return x_NH, delta_NH.contiguous(), torch.empty_like(x_NH), out_NH
