"""The two halves of a decoder layer, attention and experts, each one call for a step of few tokens.

They are made of the kernels of rows.py, attention.py, route.py and experts.py. A step of one token would
spend half of its time between those: each call takes microseconds of Python and two or three tensors, and
computes for as long. What does not change between steps is bound once, as addresses; whoever binds it keeps
the tensors, and a copy of it, as pickle makes, binds its own. Dense products read matrices as torch keeps
them, so that no copy is needed.

Everything is float32, on the calling thread. `in_one_call` says for which steps.

Legend: N tokens of the step, H hidden, Hq/Hkv query/KV heads, G = Hq + Hkv, D head size, X = (G + Hkv) D, E
experts, L those of this rank, K top-k, I intermediate.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from turnout.kernels.cpu import attention, experts, route, rows
from turnout.kernels.cpu.jit import kernel
from turnout.kernels.cpu.panels import WIDENED_ROWS
from turnout.kernels.cpu.threads import threads_for
from turnout.kernels.cpu.tiles import dots
from turnout.kernels.cpu.vectors import LANES, get_i64, put_i64, stack

# With more of both, a library's products gain more than one call saves.
FEW_TOKENS = 8
FEW_MULTIPLICATIONS = 2**24

_norm, _rotate, _choose = rows._norm, rows._rotate, route._choose
_store, _attend = attention._store, attention._attend
_pairs, _up, _down = experts._pairs, experts._up, experts._down


def in_one_call(tokens: int, dense: float, others: float) -> bool:
    """Whether a half of a layer is one call for a step of so many tokens, for which it makes so many
    multiplications: in dense products, which else a library makes, and in others, by the same kernels."""
    few = tokens <= FEW_TOKENS or dense <= FEW_MULTIPLICATIONS
    return tokens > 0 and few and threads_for(dense + others) == 1


@kernel("void(" + "int64, " * 27 + "float32, float32, float32)")
def _attention_half(
    x, delta, sums, out, space, N, cos, sin,
    chunks, C, groups, M, table, P, page_blocks, cache, head, window,
    gain, qkv, head_gain, out_weight, sinks, H, Hq, Hkv, D, eps, head_eps, scale,
):  # fmt: skip
    """sums [N, H] = x + delta (0: x is the sum); out [N, H] = attention of its norm, projected.

    space: of (H + X + (2 Hq + Hkv) D) N float32. The rest: see `_norm`, `_rotate`, `_store` and `_attend`.
    """
    inner = Hq * D
    X = inner + 2 * Hkv * D
    heads = space + H * N * 4
    q = heads + X * N * 4
    k = q + inner * N * 4
    attended = k + Hkv * D * N * 4
    counter = stack(8)
    put_i64(counter, 0)
    _norm(x, delta, gain, sums, space, N, H, eps)
    dots(space, N, qkv, X, H, heads)
    _rotate(heads, X * 4, head_gain, cos, sin, q, k, N, Hq, Hkv, D, head_eps)
    v, kv_pitch = heads + (Hq + Hkv) * D * 4, Hkv * D * 4
    _store(k, kv_pitch, v, X * 4, chunks, C, table, P, page_blocks, cache, head, Hkv, D)
    _attend(
        counter, q, inner * 4, groups, M, table, P, page_blocks, cache, head, Hq, Hkv, D, window, sinks,
        attended, scale,
    )  # fmt: skip
    dots(attended, N, out_weight, H, inner, out)


@kernel("void(" + "int64, " * 22 + "float32, float32, float32, float32, float32)")
def _experts_half(
    x, delta, sums, out, space, N, gain, router, counts, H, E, K, of_all, renormalize,
    first, L, w13, w2, inner, activation, b13, b2, eps, scaling, alpha, beta, limit,
):  # fmt: skip
    """sums [N, H] = x + delta (0: x is the sum); out [N, H] = experts [first, first + L) of its norm, as
    chosen by the product with router [E, H].

    w13, w2: addresses of what `matrices` gives. space: as `ExpertsHalf` makes it. The rest: see `_norm`,
    `_choose`, `_pairs`, `_up` and `_down`.
    """
    counters = stack(16)
    starts = space
    token = starts + (L + 1) * 8
    normed = token + N * K * 8
    logits = normed + N * H * 4
    left = logits + N * E * 4
    ids = left + E * 4
    chosen = ids + N * K * 4
    weight = chosen + N * K * 4
    a = weight + N * K * 4
    unpacked = a + N * K * inner * 4
    _norm(x, delta, gain, sums, normed, N, H, eps)
    dots(normed, N, router, E, H, logits)
    _choose(logits, left, 0, ids, chosen, counts, scaling, N, E, K, of_all, renormalize)
    _pairs(ids, chosen, N, K, first, L, starts, token, weight)
    put_i64(counters, 0)
    put_i64(counters + 8, 0)
    _up(
        counters, normed, 4 * H, starts, token, L,
        get_i64(w13), get_i64(w13 + 8), get_i64(w13 + 16), get_i64(w13 + 24), get_i64(w13 + 32),
        get_i64(w13 + 40), H, inner // LANES, activation, alpha, beta, limit, b13, unpacked, 0, a,
    )  # fmt: skip
    put_i64(counters, 0)
    put_i64(counters + 8, 0)
    _down(
        counters, a, starts, token, weight, L, N,
        get_i64(w2), get_i64(w2 + 8), get_i64(w2 + 16), get_i64(w2 + 24), get_i64(w2 + 32),
        get_i64(w2 + 40), inner, H // LANES, H // LANES, b2, unpacked, 0, out,
    )  # fmt: skip


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


class _Bound:
    """A dataclass that binds addresses of its fields' tensors when it is made."""

    def __reduce__(self) -> tuple[Any, ...]:
        given = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        return _made_of, (type(self), given)


def _made_of(kind: type[_Bound], given: dict[str, Any]) -> _Bound:
    return kind(**given)


@dataclass(kw_only=True, eq=False)
class AttentionHalf(_Bound):
    """Norm, projections, rotation, paged attention and output projection of a layer, without biases.

    Weights are contiguous float32. head_gain: of the norm of queries and keys, or None.
    """

    qkv_XH: Tensor
    head_gain_GD: Tensor | None
    head_eps: float
    out_HY: Tensor
    sinks_H: Tensor | None
    num_q: int
    num_kv: int
    head_dim: int

    def __post_init__(self) -> None:
        X, H = self.qkv_XH.shape
        self._dense, self._per_pair = X * H + self.out_HY.numel(), 2 * self.num_q * self.head_dim
        self._room = H + X + (2 * self.num_q + self.num_kv) * self.head_dim
        self._bound = (
            self.qkv_XH.data_ptr(), experts.address(self.head_gain_GD), self.out_HY.data_ptr(),
            experts.address(self.sinks_H), H, self.num_q, self.num_kv, self.head_dim,
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
        if not in_one_call(N, N * self._dense, chunks.pairs * self._per_pair):
            return None
        x_NH, delta_NH, sums_NH, out_NH = _residual(x_NH, delta_NH)
        space = torch.empty(N * self._room)
        _attention_half(
            x_NH.data_ptr(), experts.address(delta_NH), sums_NH.data_ptr(), out_NH.data_ptr(),
            space.data_ptr(), N, cos.data_ptr(), sin.data_ptr(), *chunks.bound, *cache.pages, cache.window,
            gain_H.data_ptr(), *self._bound, eps, self.head_eps, cache.scale,
        )  # fmt: skip
        return sums_NH, out_NH


@dataclass(eq=False)
class ExpertsHalf(_Bound):
    """Norm, router and experts of a layer whose experts are all on this rank, without a shared one.

    router: contiguous float32. counts: int64, grows by the choices. The rest: see `route.choose` and
    `experts.sort_pairs`.
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

    def __post_init__(self) -> None:
        layer, (E, H) = self.layer, self.router_EH.shape
        L, inner = layer.w13.experts, layer.w2.inputs
        self._matrices = [torch.tensor(experts.matrices(w)) for w in (layer.w13, layer.w2)]
        self._dense, self._others = E * H, self.top_k * 3 * inner * H
        self._scratch = layer.scratch(1), layer.scratch(WIDENED_ROWS)
        self._once, self._each = 2 * (L + 1) + E, H + E + self.top_k * (5 + inner)
        self._bound = (
            self.router_EH.data_ptr(), self.counts_E.data_ptr(), H, E, self.top_k, self.of_all,
            self.renormalize, self.first, L, *(w.data_ptr() for w in self._matrices), inner,
            experts.ACTIVATIONS[layer.activation], experts.address(layer.b13), experts.address(layer.b2),
        )  # fmt: skip
        self._numbers = self.scaling, layer.alpha, layer.beta, layer.limit

    def __call__(
        self, x_NH: Tensor, delta_NH: Tensor | None, gain_H: Tensor, eps: float
    ) -> tuple[Tensor, Tensor] | None:
        """(x + delta, experts of its norm), float32 [N, H]; None for a step that is not one call.

        gain: contiguous float32, the weight of the norm.
        """
        N = len(x_NH)
        if not in_one_call(N, N * self._dense, N * self._others):
            return None
        x_NH, delta_NH, sums_NH, out_NH = _residual(x_NH, delta_NH)
        space = torch.empty(self._once + N * self._each + self._scratch[N >= WIDENED_ROWS])
        _experts_half(
            x_NH.data_ptr(), experts.address(delta_NH), sums_NH.data_ptr(), out_NH.data_ptr(),
            space.data_ptr(), N, gain_H.data_ptr(), *self._bound, eps, *self._numbers,
        )  # fmt: skip
        return sums_NH, out_NH


def _residual(x_NH: Tensor, delta_NH: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Both, contiguous, and room for their sum, x itself without a delta, and for what follows."""
    x_NH = x_NH.contiguous()
    out_NH = torch.empty_like(x_NH)
    if delta_NH is None:
        return x_NH, None, x_NH, out_NH
    return x_NH, delta_NH.contiguous(), torch.empty_like(x_NH), out_NH
