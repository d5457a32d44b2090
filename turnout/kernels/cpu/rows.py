"""The small steps between the matrix products of a decoder, each in one pass over its rows.

Composed by torch such a step is five to ten calls of a few microseconds each, and as many passes. Everything
is float32.

Legend: N rows, H hidden, G heads (queries, then keys), D head size; H and D / 2 are
multiples of 16.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from turnout.kernels.cpu.jit import kernel
from turnout.kernels.cpu.vectors import fma, load, splat, store, total, zeros

ONE = np.float32(1.0)


@kernel("void(int64, int64, int64, int64, int64, int64, int64, float32)")
def _norm(x, delta, weight, sums, out, N, H, eps):
    """out[n] = RMS norm of x[n], or of sums[n] = x[n] + delta[n], times weight [H]. delta: 0 for none."""
    for row in range(0, N * H * 4, H * 4):
        squares = zeros()
        if delta:
            for i in range(row, row + H * 4, 64):
                v = load(x + i) + load(delta + i)
                store(sums + i, v)
                squares = fma(v, v, squares)
        else:
            for i in range(row, row + H * 4, 64):
                v = load(x + i)
                squares = fma(v, v, squares)
        scale = splat(ONE / np.float32(math.sqrt(total(squares) / np.float32(H) + eps)))
        for i in range(0, H * 4, 64):
            store(out + row + i, load(sums + row + i) * scale * load(weight + i))


@kernel("void(" + "int64, " * 11 + "float32)")
def _rotate(heads, pitch, weight, cos, sin, q, k, N, num_q, num_k, D, eps):
    """q [N, num_q, D] and k [N, num_k, D]: the heads of each row, normed with weight [G, D] (or 0), rotated.

    heads: rows `pitch` bytes apart. cos, sin [N, D], sin with the rotation's sign.
    """
    half = D * 2
    for n in range(N):
        for g in range(num_q + num_k):
            head = heads + n * pitch + g * D * 4
            to = q + (n * num_q + g) * D * 4 if g < num_q else k + (n * num_k + g - num_q) * D * 4
            scale = splat(ONE)
            if weight:
                squares = zeros()
                for i in range(0, D * 4, 64):
                    v = load(head + i)
                    squares = fma(v, v, squares)
                scale = splat(ONE / np.float32(math.sqrt(total(squares) / np.float32(D) + eps)))
            for i in range(0, half, 64):
                low, high = load(head + i) * scale, load(head + half + i) * scale
                if weight:
                    low = low * load(weight + g * D * 4 + i)
                    high = high * load(weight + g * D * 4 + half + i)
                at = n * D * 4 + i
                store(to + i, fma(low, load(cos + at), high * load(sin + at)))
                store(to + half + i, fma(high, load(cos + at + half), low * load(sin + at + half)))


def norm(x_NH: Tensor, weight_H: Tensor, eps: float, delta_NH: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(x + delta, its RMS norm times weight), float32 [N, H]; without delta the sum is x itself."""
    x_NH = x_NH.contiguous()
    out_NH = torch.empty_like(x_NH)
    sum_NH, delta = x_NH, 0
    if delta_NH is not None:
        delta_NH = delta_NH.contiguous()
        sum_NH, delta = torch.empty_like(x_NH), delta_NH.data_ptr()
    _norm(
        x_NH.data_ptr(), delta, weight_H.data_ptr(), sum_NH.data_ptr(), out_NH.data_ptr(), *x_NH.shape, eps
    )  # fmt: skip
    return sum_NH, out_NH


def rotate(
    heads_NX: Tensor,
    num_q: int,
    num_k: int,
    cos_ND: Tensor,
    sin_ND: Tensor,
    weight_GD: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Queries [N, num_q, D] and keys [N, num_k, D], normed with `weight` if given, then rotated.

    heads [N, X], rows contiguous: queries, keys and whatever else, D values each. cos, sin: contiguous.
    """
    N, D = cos_ND.shape
    q_NHD, k_NHD = heads_NX.new_empty(N, num_q, D), heads_NX.new_empty(N, num_k, D)
    _rotate(
        heads_NX.data_ptr(), heads_NX.stride(0) * 4, 0 if weight_GD is None else weight_GD.data_ptr(),
        cos_ND.data_ptr(), sin_ND.data_ptr(), q_NHD.data_ptr(), k_NHD.data_ptr(), N, num_q, num_k, D, eps,
    )  # fmt: skip
    return q_NHD, k_NHD
