"""What a connection between residual streams does to a token, in one pass: how streams are summed and mixed.

Composed by torch, Sinkhorn's iterations alone are eighty calls on a few numbers each.

Legend: N tokens, S streams, C = S (S + 2).
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from turnout.kernels.cpu.jit import kernel, part
from turnout.kernels.cpu.vectors import get_f32, put_f32

ONE = np.float32(1.0)


@part
def _sigmoid(x):
    return ONE / (ONE + np.float32(math.exp(-x)))


@part
def _normalise(first, step, count, eps):
    """Divide the float32 at `count` addresses from `first` on, `step` bytes apart, by their sum + eps."""
    whole = np.float32(0.0)
    for i in range(count):
        whole += get_f32(first + i * step)
    whole += eps
    for i in range(count):
        put_f32(first + i * step, get_f32(first + i * step) / whole)


@kernel("void(int64, int64, int64, int64, int64, int64, int64, int64, int64, float32)")
def _weights(products, base, scale, pre, post, mix, N, S, iterations, eps):
    """pre, post float32 [N, S] and mix float32 [N, S, S], of products float32 [N, C], base [C], scale [3].

    A row of mix is a softmax, whose exponents are taken less the largest.
    """
    for n in range(N):
        row, scaled = products + n * S * (S + 2) * 4, get_f32(scale)
        for s in range(S):
            x = get_f32(row + 4 * s) * scaled + get_f32(base + 4 * s)
            put_f32(pre + (n * S + s) * 4, _sigmoid(x) + eps)
        scaled = get_f32(scale + 4)
        for s in range(S):
            x = get_f32(row + 4 * (S + s)) * scaled + get_f32(base + 4 * (S + s))
            put_f32(post + (n * S + s) * 4, np.float32(2.0) * _sigmoid(x))
        scaled, own = get_f32(scale + 8), mix + n * S * S * 4
        for i in range(S):
            at, largest, whole = own + i * S * 4, np.float32(-np.inf), np.float32(0.0)
            for j in range(S):
                place = 4 * (2 * S + i * S + j)
                x = get_f32(row + place) * scaled + get_f32(base + place)
                put_f32(at + 4 * j, x)
                largest = max(largest, x)
            for j in range(S):
                x = np.float32(math.exp(get_f32(at + 4 * j) - largest))
                put_f32(at + 4 * j, x)
                whole += x
            for j in range(S):
                put_f32(at + 4 * j, get_f32(at + 4 * j) / whole + eps)
        for iteration in range(iterations):
            if iteration:
                for i in range(S):
                    _normalise(own + i * S * 4, 4, S, eps)
            for j in range(S):
                _normalise(own + j * 4, 4 * S, S, eps)


def weights(
    products_NC: Tensor, base_C: Tensor, scale: Tensor, *, count: int, iterations: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """float32 (pre [N, S], post [N, S], M [N, S, S]) of `count` streams, of float32 products [N, C], base [C]
    and scale [3]; see turnout/models/streams.py. iterations: of Sinkhorn, 1 or more. eps: added to pre, to M
    before the first, and to sums before they divide."""
    products_NC = products_NC.contiguous()
    N, S = products_NC.shape[0], count
    pre_NS, post_NS, mix_NSS = torch.empty(N, S), torch.empty(N, S), torch.empty(N, S, S)
    _weights(
        products_NC.data_ptr(), base_C.data_ptr(), scale.data_ptr(), pre_NS.data_ptr(), post_NS.data_ptr(),
        mix_NSS.data_ptr(), N, S, iterations, eps,
    )  # fmt: skip
    return pre_NS, post_NS, mix_NSS
