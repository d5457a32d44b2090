"""Weights that stay e4m3 in memory and are decoded where they are multiplied (Triton).

A weight is decoded to the type of the rows that it meets, times its scale in float32 and rounded once: the
very values of a matrix decoded when it was loaded, of half the bytes. Scales belong to a row and a group of
columns: blocks of rows are spread out over theirs (3 % more bytes of groups of 128), so that rows can be
divided, put together and ordered like those of any matrix.

Legend: N rows, K inputs, M outputs, G groups of inputs that share a scale.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from turnout.kernels.common.dependent import launches_early

ROWS, COLUMNS = 16, 256  # of a tile that is decoded alone


@triton.jit
def scaled(
    w, scale_ptr, m, first, M, K, scale_stride, GROUP: tl.constexpr, OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """w e4m3 [OUTPUTS, COLUMNS], rows m and columns from `first` on of [M, K], decoded to KIND.

    scale: float32 [G, M], groups `scale_stride` apart. `first` is a multiple of COLUMNS, which divides GROUP
    or is divided by it.
    """
    if GROUP >= COLUMNS:
        scale = tl.load(scale_ptr + (first // GROUP) * scale_stride + m, mask=m < M, other=0.0)[:, None]
    else:
        g = first // GROUP + tl.arange(0, COLUMNS // GROUP)
        held = (m < M)[:, None] & (g * GROUP < K)[None, :]
        scale = tl.load(scale_ptr + g[None, :] * scale_stride + m[:, None], mask=held, other=0.0)
        scale = tl.broadcast_to(scale[:, :, None], [OUTPUTS, COLUMNS // GROUP, GROUP])
        scale = tl.reshape(scale, [OUTPUTS, COLUMNS])
    return (w.to(tl.float32) * scale).to(KIND)


@triton.jit
def decode_tile(
    w_ptr, scale_ptr, out_ptr, M, K, scale_stride, GROUP: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [M, K] = w e4m3 [M, K] times scales [G, M]."""
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(1) * COLUMNS
    c = first + tl.arange(0, COLUMNS)
    at = m.to(tl.int64)[:, None] * K + c[None, :]
    held = (m < M)[:, None] & (c < K)[None, :]
    w = tl.load(w_ptr + at, mask=held, other=0.0)
    w = scaled(w, scale_ptr, m, first, M, K, scale_stride, GROUP, ROWS, COLUMNS, out_ptr.dtype.element_ty)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    tl.store(out_ptr + at, w, mask=held)


def decode(weight_MK: Tensor, scale_GM: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    """[M, K] in `dtype`. weight: contiguous. scale: of groups of so many columns, its rows contiguous."""
    M, K = weight_MK.shape
    out_MK = torch.empty(M, K, dtype=dtype, device=weight_MK.device)
    early = launches_early(weight_MK.device)
    decode_tile[(-(-M // ROWS), -(-K // COLUMNS))](
        weight_MK, scale_GM, out_MK, M, K, scale_GM.stride(0), group, ROWS, COLUMNS, early,
        num_warps=4, launch_pdl=early,
    )  # fmt: skip
    return out_MK
