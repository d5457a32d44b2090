"""Layouts that some kernels want instead of plain row-major weights and scales, and their inverses.

Legend: R rows, G groups along K, M = ceil(R/128) row tiles, K = ceil(G/4) group tiles, E experts,
I intermediate size, X whatever follows a row (codes, scales).

Block scales. Tensor cores of Blackwell read the scales of 128 rows and 4 groups as one tile of 512
bytes (PTX ISA, "scale factor layout"; cuBLAS, "1D block scaling factors layout"), in which row r and
group g lie at byte `(r % 32) * 16 + (r // 32) * 4 + g`:

* swizzled: [..., M, K, 32, 4, 4], tiles one after the other, rows and groups padded with zeros
* MMA view: [32, 4, M, 4, K, E], the same storage with the indices in the order CuTe kernels take them:
  scale (r, g) of expert e is at `[r % 32, r % 128 // 32, r // 128, g % 4, g // 4, e]`

Rows of W1. Checkpoints and Turnout hold all gate rows, then all up rows ("gate, up halves"):

* up/gate blocks: 64 up rows, 64 gate rows, ... so that one tile of GEMM1 holds both factors of a
  product (FlashInfer's CuTe DSL kernels); weights and block scales alike
* gate/up rows: gate, up, gate, up, ... (GPT-OSS checkpoints; weights, scales and biases alike)
* shuffled rows: of every 32, rows 0, 4, ..., 28, then 1, 5, ..., 29, and so on (TensorRT-LLM's batched GEMMs)
"""

from __future__ import annotations

import torch
from torch import Tensor

TILE_ROWS = 128
TILE_GROUPS = 4
BLOCK_ROWS = 64
SHUFFLE_ROWS = 32


def swizzle(scale: Tensor) -> Tensor:
    """One-byte scales [..., R, G] to [..., M, K, 32, 4, 4], padded with zero bytes."""
    _require_bytes(scale)
    *lead, rows, groups = scale.shape
    row_tiles, group_tiles = -(-rows // TILE_ROWS), -(-groups // TILE_GROUPS)
    padded = scale.new_zeros((*lead, row_tiles * TILE_ROWS, group_tiles * TILE_GROUPS), dtype=torch.uint8)
    padded[..., :rows, :groups] = scale.view(torch.uint8)
    tiles = padded.view(*lead, row_tiles, 4, 32, group_tiles, TILE_GROUPS)
    return tiles.movedim((-2, -3), (-4, -3)).contiguous().view(scale.dtype)


def unswizzle(swizzled: Tensor, rows: int, groups: int) -> Tensor:
    """[..., M, K, 32, 4, 4] back to scales [..., rows, groups], without the padding."""
    _require_bytes(swizzled)
    expected = (-(-rows // TILE_ROWS), -(-groups // TILE_GROUPS), 32, 4, TILE_GROUPS)
    if swizzled.shape[-5:] != expected:
        raise ValueError(
            f"swizzled scales of {rows} rows and {groups} groups have shape (..., {expected}), "
            f"not {tuple(swizzled.shape)}"
        )
    tiles = swizzled.view(torch.uint8).movedim((-4, -3), (-2, -3))
    plain = tiles.flatten(-2).flatten(-4, -2)
    return plain[..., :rows, :groups].contiguous().view(swizzled.dtype)


def mma_view(swizzled: Tensor) -> Tensor:
    """[E, M, K, 32, 4, 4] as a view [32, 4, M, 4, K, E] of the same storage."""
    if swizzled.ndim != 6 or swizzled.shape[-3:] != (32, 4, TILE_GROUPS):
        raise ValueError(f"expected swizzled scales (E, M, K, 32, 4, 4), not {tuple(swizzled.shape)}")
    return swizzled.permute(3, 4, 1, 5, 2, 0)


def from_mma_view(view: Tensor) -> Tensor:
    """[32, 4, M, 4, K, E] back to contiguous swizzled scales [E, M, K, 32, 4, 4]."""
    if view.ndim != 6 or (*view.shape[:2], view.shape[3]) != (32, 4, TILE_GROUPS):
        raise ValueError(f"expected an MMA view (32, 4, M, 4, K, E), not {tuple(view.shape)}")
    return view.permute(5, 2, 4, 0, 1, 3).contiguous()


def interleave_up_gate(w13: Tensor, block: int = BLOCK_ROWS) -> Tensor:
    """Gate, up halves [..., 2I, X] to alternating blocks: `block` up rows, `block` gate rows, ..."""
    intermediate = _half(w13, -2)
    if intermediate % block:
        raise ValueError(
            f"interleaving in blocks of {block} rows needs an intermediate size divisible by {block}, "
            f"not {intermediate}"
        )
    halves = w13.unflatten(-2, (2, intermediate // block, block)).flip(-4)
    return halves.transpose(-4, -3).flatten(-4, -2)


def interleave_gate_up_rows(w13: Tensor, dim: int = -2) -> Tensor:
    """Gate, up halves along `dim` to gate, up, gate, up, ... (`dim=-1` for a bias [..., 2I])."""
    dim %= w13.ndim
    return w13.unflatten(dim, (2, _half(w13, dim))).transpose(dim, dim + 1).flatten(dim, dim + 1)


def deinterleave_gate_up_rows(rows: Tensor, dim: int = -2) -> Tensor:
    """Gate, up, gate, up, ... along `dim` (GPT-OSS) to gate, up halves."""
    dim %= rows.ndim
    return rows.unflatten(dim, (_half(rows, dim), 2)).transpose(dim, dim + 1).flatten(dim, dim + 1)


def swap_halves(w13: Tensor) -> Tensor:
    """Gate, up halves [..., 2I, X] to up, gate halves."""
    return w13.roll(_half(w13, -2), -2)


def shuffle_rows(x: Tensor) -> Tensor:
    """Rows [..., R, X] as TensorRT-LLM's kernels take them: every 32, as [8, 4], transposed.

    Raises ValueError unless R is a multiple of 32.
    """
    if x.shape[-2] % SHUFFLE_ROWS:
        raise ValueError(f"{x.shape[-2]} rows are not blocks of {SHUFFLE_ROWS}")
    return x.unflatten(-2, (-1, 8, 4)).transpose(-3, -2).flatten(-4, -2)


def _half(w13: Tensor, dim: int) -> int:
    rows = w13.shape[dim]
    if rows % 2:
        raise ValueError(f"gate and up rows come in pairs; {tuple(w13.shape)} has {rows} of them")
    return rows // 2


def _require_bytes(scale: Tensor) -> None:
    if scale.ndim < 2 or scale.element_size() != 1:
        raise ValueError(
            f"block scales are one-byte tensors [..., R, G], not {scale.dtype} {tuple(scale.shape)}"
        )
