"""The product of rowwise.py on CUDA, also in parts that whoever comes next adds up (Triton).

Legend: N rows, K inputs, M outputs, P parts, G groups of inputs that share a scale.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from turnout.kernels.common.dependent import launches_early
from turnout.kernels.common.fp8_weights import scaled

PROCESSORS = 132  # of an H100 and of an H200


class Tile(NamedTuple):
    """Rows and outputs of a program, inputs of a step. Outputs are a multiple of the 64 that one warp group's
    tensor-core instruction holds."""

    rows: int
    outputs: int = 64
    columns: int = 64
    warps: int = 4
    stages: int = 4


TILES = (Tile(16), Tile(32), Tile(64), Tile(128))
# Of parts of more rows than the last but one: programs of more outputs read them from the L2 cache less
# often, which bounds such products.
MANY_ROWS = Tile(128, 128, 128, 8, 3)
# Of parts of 33 to 64 rows, where programs of 64 outputs would not be more than multiprocessors: those of 128
# leave room for more parts.
FEW_OUTPUTS = Tile(64, 128, 128, 4, 3)


@triton.jit(do_not_specialize=["N"])
def multiply_rows(
    x_ptr, w_ptr, scale_ptr, bias_ptr, y_ptr, N, M, K, piece, x_stride, w_stride,
    BIAS: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y[p] [N, M] = x[:, piece p] @ w[:, piece p].T + bias [M], pieces of `piece` inputs.

    WHOLE: `piece` is a multiple of COLUMNS. GROUP: w is e4m3, and has scales [G, M] for as many inputs each;
    0: it is of x's type.
    """
    m = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    n = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    part = tl.program_id(2)
    first = part * piece
    c = first + tl.arange(0, COLUMNS)
    w_at = w_ptr + m.to(tl.int64)[:, None] * w_stride + c[None, :]
    x_at = x_ptr + n.to(tl.int64)[None, :] * x_stride + c[:, None]
    m_held, n_held = m[:, None] < M, n[None, :] < N
    kind: tl.constexpr = x_ptr.dtype.element_ty
    acc = tl.zeros([OUTPUTS, ROWS], tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    for k in range(0, piece, COLUMNS):
        if WHOLE:
            w = tl.load(w_at, mask=m_held, other=0.0)
            x = tl.load(x_at, mask=n_held, other=0.0)
        else:
            w = tl.load(w_at, mask=m_held & (k + c[None, :] < K), other=0.0)
            x = tl.load(x_at, mask=n_held & (k + c[:, None] < K), other=0.0)
        if GROUP:
            w = scaled(w, scale_ptr, m, first + k, M, K, M, GROUP, OUTPUTS, COLUMNS, kind)
        acc = tl.dot(w, x, acc, input_precision="ieee")
        w_at += COLUMNS
        x_at += COLUMNS
    if BIAS:
        acc += tl.load(bias_ptr + m, mask=m < M, other=0.0).to(tl.float32)[:, None]
    y_at = y_ptr + (part.to(tl.int64) * N + n[None, :]) * M + m[:, None]
    tl.store(y_at, acc.to(y_ptr.dtype.element_ty), mask=m_held & n_held)


def tile_of(rows: int) -> Tile:
    """Of a product of so many rows."""
    return next((tile for tile in TILES if rows <= tile.rows), TILES[-1])


def tile_of_parts(rows: int, outputs: int) -> Tile:
    """Of a product in parts, with so many outputs."""
    if rows > FEW_OUTPUTS.rows:
        return MANY_ROWS
    tile = tile_of(rows)
    return FEW_OUTPUTS if tile.rows == FEW_OUTPUTS.rows and outputs <= PROCESSORS * tile.outputs else tile


def part_count(tile: Tile, rows: int, outputs: int, inputs: int) -> int:
    """Into how many pieces a product in parts cuts its inputs: as many as keep multiprocessors at work."""
    most = PROCESSORS // max(1, -(-outputs // tile.outputs) * -(-rows // tile.rows))
    return max((c for c in range(2, most + 1) if inputs % (c * tile.columns) == 0), default=1)


def linear(
    x_NK: Tensor,
    weight_MK: Tensor,
    bias_M: Tensor | None,
    rows: int | None = None,
    *,
    scale_GM: Tensor | None = None,
    group: int = 0,
) -> Tensor:
    """See rowwise.linear. rows: of a tile, instead of what suits N.

    scale: float32, contiguous, of a weight that is e4m3, for groups of as many columns.
    """
    y_NM = x_NK.new_empty(len(x_NK), len(weight_MK))
    tile = tile_of(rows or len(x_NK))
    return _multiply(x_NK, weight_MK, scale_GM, group, bias_M, y_NM[None], tile)[0]


def parts(x_NK: Tensor, weight_MK: Tensor, scale_GM: Tensor, group: int, tile: Tile | None = None) -> Tensor:
    """float32 [P, N, M], whose sum over the first is x @ weight.T; of as many pieces of the inputs as keep
    multiprocessors at work. weight, scale, group: as in `linear`. tile: instead of what suits N."""
    (N, K), M = x_NK.shape, len(weight_MK)
    tile = tile or tile_of_parts(N, M)
    y_PNM = torch.empty(part_count(tile, N, M, K), N, M, dtype=torch.float32, device=x_NK.device)
    return _multiply(x_NK, weight_MK, scale_GM, group, None, y_PNM, tile)


def _multiply(
    x_NK: Tensor,
    weight_MK: Tensor,
    scale_GM: Tensor | None,
    group: int,
    bias_M: Tensor | None,
    y_PNM: Tensor,
    tile: Tile,
) -> Tensor:
    P, N, M = y_PNM.shape
    K = x_NK.shape[1]
    if N and M:
        piece, early = K // P, launches_early(x_NK.device)
        multiply_rows[(-(-M // tile.outputs), -(-N // tile.rows), P)](
            x_NK, weight_MK, weight_MK if scale_GM is None else scale_GM,
            weight_MK if bias_M is None else bias_M, y_PNM,
            N, M, K, piece, x_NK.stride(0), weight_MK.stride(0),
            bias_M is not None, piece % tile.columns == 0, tile.rows, tile.outputs, tile.columns, group,
            early, num_warps=tile.warps, num_stages=tile.stages, launch_pdl=early,
        )  # fmt: skip
    return y_PNM
