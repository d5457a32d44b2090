"""Causal latent attention of prompts in its expanded form, all chunks of a step in one launch (Triton).

Keys and values of all heads are made of latent vectors by one product, and read from there: a key is its
part made for the head, then the rotated part, which all heads share and which stands with the latent vector.
So nothing is joined or padded. A program has a tile of queries of one head; it goes through the context that
the first of them sees with no mask, then through what is left with one. What others' tokens hold is never
multiplied. Tensor descriptors (TMA) load keys and values.

Legend: N rows of the step, L tokens of all contexts, H heads, Dn/Dr sizes of a key's part made from the
latent vector and of its rotated part, D = Dn + Dr, Dv of a value, Lc of the latent vector, C = Lc + Dr.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

SMALLEST = 16  # columns of a product
MOST_VALUES = 2**31 - 1  # of keys and values, which are counted in int32


class Tiles(NamedTuple):
    """rows: queries of a program. tokens: keys of a step. stages: of these loaded ahead."""

    rows: int = 128
    tokens: int = 64
    warps: int = 8
    stages: int = 2


@triton.jit
def attend_keys(
    q, more_q, turned_q, best, total, acc, made_desc, more_desc, rope_desc, value_desc,
    begin, at, column, rope_column, end, place_M, scale,
    FIRST: tl.constexpr, MORE: tl.constexpr, TOKENS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The online softmax's state after TOKENS more keys of a context that begins at token `begin`, from its
    place `at` on. MASKED: not all rows see all of them, and the context ends at `end`."""
    token = begin + at
    scores = tl.dot(q, tl.trans(made_desc.load([token, column])), input_precision="ieee")
    if MORE:
        scores = tl.dot(
            more_q, tl.trans(more_desc.load([token, column + FIRST])), scores, input_precision="ieee"
        )
    scores = tl.dot(turned_q, tl.trans(rope_desc.load([token, rope_column])), scores, input_precision="ieee")
    if MASKED:
        place = at + tl.arange(0, TOKENS)
        scores = tl.where(place[None, :] <= place_M[:, None], scores, float("-inf"))
    higher = tl.maximum(best, tl.max(scores, 1) * scale)
    shrink = tl.exp2(best - higher)
    p = tl.exp2(scores * scale - higher[:, None])
    v = value_desc.load([token, column + FIRST + MORE])
    if MASKED:
        v = tl.where((place < end)[:, None], v, 0.0)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return higher, total * shrink + tl.sum(p, 1), acc


@triton.jit
def attend_expanded_tiles(
    q_ptr, made_desc, more_desc, rope_desc, value_desc, tiles_ptr, out_ptr, scale, H, rope_column,
    FIRST: tl.constexpr, MORE: tl.constexpr, R: tl.constexpr, DV: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """out [N, H, DV] of the rows of each tile; `scale` includes log2(e).

    Of q [N, H, FIRST + MORE + R] the first FIRST and MORE meet as many columns of keys, and the last R what
    stands at `rope_column` of the latent vectors. Of made [L, H (FIRST + MORE + DV)] a head's last are its
    values.
    """
    tile = tiles_ptr + tl.program_id(0) * 4
    h = tl.program_id(1)
    first, count = tl.load(tile), tl.load(tile + 1).to(tl.int32)
    start, begin = tl.load(tile + 2).to(tl.int32), tl.load(tile + 3).to(tl.int32)
    m = tl.arange(0, ROWS)
    held = (m < count)[:, None]
    row = (first + m) * H + h
    q_at = q_ptr + row[:, None] * (FIRST + MORE + R)
    q = tl.load(q_at + tl.arange(0, FIRST)[None, :], mask=held, other=0.0)
    turned_q = tl.load(q_at + FIRST + MORE + tl.arange(0, R)[None, :], mask=held, other=0.0)
    more_q = turned_q
    if MORE:
        more_q = tl.load(q_at + FIRST + tl.arange(0, MORE)[None, :], mask=held, other=0.0)
    place_M = start + m
    end = start + count
    seen = (start + 1) // TOKENS * TOKENS
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DV], tl.float32)
    column = h * (FIRST + MORE + DV)
    for at in range(0, seen, TOKENS):
        best, total, acc = attend_keys(
            q, more_q, turned_q, best, total, acc, made_desc, more_desc, rope_desc, value_desc,
            begin, at, column, rope_column, end, place_M, scale, FIRST, MORE, TOKENS, False,
        )  # fmt: skip
    for at in range(seen, end, TOKENS):
        best, total, acc = attend_keys(
            q, more_q, turned_q, best, total, acc, made_desc, more_desc, rope_desc, value_desc,
            begin, at, column, rope_column, end, place_M, scale, FIRST, MORE, TOKENS, True,
        )  # fmt: skip
    out = acc / total[:, None]
    tl.store(
        out_ptr + row[:, None] * DV + tl.arange(0, DV)[None, :], out.to(out_ptr.dtype.element_ty), mask=held
    )


def key_parts(nope_dim: int, rope_dim: int, value_dim: int) -> tuple[int, int] | None:
    """(FIRST, MORE) of keys made for heads of these sizes; None: the kernel does not take them."""
    first = 1 << (nope_dim.bit_length() - 1)
    more = nope_dim - first
    sizes = [first, rope_dim, value_dim] + ([more] if more else [])
    if any(size < SMALLEST or size & (size - 1) for size in sizes):
        return None
    return first, more


def tiles_for(value_dim: int, itemsize: int) -> Tiles:
    """By what fits into a multiprocessor's memory."""
    if itemsize > 2:
        return Tiles(rows=32, tokens=32)
    return Tiles(rows=128, tokens=64, warps=8, stages=3 if value_dim <= 128 else 2)


def attend(
    q_NHD: Tensor,
    made_LHX: Tensor,
    latent_LC: Tensor,
    tiles_TF: Tensor,
    out_NHV: Tensor,
    *,
    scale: float,
    parts: tuple[int, int],
    sizes: Tiles,
) -> None:
    """Fill the rows of `out` that the tiles cover: each attends to its context up to itself.

    made [L, H, Dn + Dv]: keys, then values, of the tokens whose latent vectors are `latent` [L, C], which end
    with Dr rotated values; q [N, H, D], out [N, H, Dv]; all contiguous, of one type. tiles: as of
    `prefill.tiles`, for `sizes`, a chunk's number being the first token of its context. scale: of scores,
    positive. parts: of `key_parts`.
    """
    (L, H, X), (first, more), C = made_LHX.shape, parts, latent_LC.shape[1]
    if not len(tiles_TF):
        return
    if made_LHX.numel() > MOST_VALUES:
        raise ValueError(f"{L} tokens of {H} heads are more than the kernel counts")
    R = q_NHD.shape[2] - first - more
    made_LX = made_LHX.view(L, H * X)

    def loaded(x: Tensor, columns: int) -> TensorDescriptor:
        return TensorDescriptor.from_tensor(x, [sizes.tokens, columns])

    attend_expanded_tiles[(len(tiles_TF), H)](
        q_NHD, loaded(made_LX, first), loaded(made_LX, more or first), loaded(latent_LC, R),
        loaded(made_LX, X - first - more), tiles_TF, out_NHV, scale * math.log2(math.e), H, C - R,
        first, more, R, X - first - more, sizes.rows, sizes.tokens,
        num_warps=sizes.warps, num_stages=sizes.stages,
    )  # fmt: skip
