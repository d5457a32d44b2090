"""Expert weights in the form that FlashInfer's `cutlass_fused_moe` takes.

W1 is up rows, then gate rows; W2 row by row. MXFP4 on Hopper wants both sizes in multiples of 128 and two
rearrangements, which make the library's kernels for FP4 weights read whole registers:

* codes: in every tile of 16 rows and 64 columns, a 32-bit word holds a byte (two codes) of row r, one of row
  r + 8, and those of both rows 4 bytes further along. Eight bytes of a row make four such words, alternately
  kept in row r and in row r + 8. Within a word signs and magnitudes are moved apart (SHIFTS).
* scales: 64 rows and 4 groups are folded into 16 rows of 16 bytes.

NVFP4 takes plain codes, as int64, and scales in tiles of 128 rows and 4 groups (layouts.py).

Legend: E experts, N rows, K columns, I intermediate, G groups of 32, R = N / 16.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

MULTIPLE = 128  # of both sizes of an MXFP4 matrix
ONE = 127  # the e8m0 scale 1

# Bits of a word before -> how far they move left (below 0: right).
SHIFTS = {
    0x00000080: 24, 0x00000070: 18, 0x00000008: 12, 0x00000007: 6,
    0x00008000: 13, 0x00007000: 7, 0x00000800: 1, 0x00000700: -5,
    0x00800000: 2, 0x00700000: -4, 0x00080000: -10, 0x00070000: -16,
    0x80000000: -1, 0x10000000: 1, 0x60000000: -3, 0x08000000: -13, 0x01000000: -11, 0x06000000: -15,
}  # fmt: skip


def padded(size: int) -> int:
    """Up to the next multiple of MULTIPLE."""
    return -(-size // MULTIPLE) * MULTIPLE


def up_gate(rows: Tensor, *, gated: bool, multiple: int = 1, fill: int = 0, dim: int = -2) -> Tensor:
    """Gate, up halves along `dim` to up, gate halves, each with rows of `fill` up to a `multiple`.

    Not gated: the rows as they are, padded.
    """
    halves = rows.unflatten(dim, (2 if gated else 1, -1)).flip(dim - 1)
    return _pad(halves, -(-halves.shape[dim] // multiple) * multiple, dim, fill).flatten(dim - 1, dim)


def pad(x: Tensor, rows: int, columns: int) -> Tensor:
    """[..., N, X] to [..., rows, columns], with zeros."""
    return _pad(_pad(x, columns, -1, 0), rows, -2, 0)


def interleave_mxfp4(codes: Tensor) -> Tensor:
    """uint8 [E, N, K/2], N % 16 == K % 64 == 0, as the library's kernel of this purpose leaves them.

    One expert at a time, which bounds what is needed next to the result.
    """
    if codes.dtype != torch.uint8 or codes.ndim != 3 or codes.shape[1] % 16 or codes.shape[2] % 32:
        raise ValueError(f"codes of 16 rows and 64 columns are interleaved, not {tuple(codes.shape)}")
    result = torch.empty_like(codes, memory_format=torch.contiguous_format)
    for expert, target in zip(codes, result, strict=True):
        target.copy_(_interleave(expert))
    return result


def _interleave(codes: Tensor) -> Tensor:
    N, bytes_of_row = codes.shape
    # row = 16 R + 8 half + r; byte = 32 P + 8 (2 high + low) + 4 late + c
    parts = codes.view(N // 16, 2, 8, bytes_of_row // 32, 2, 2, 2, 4).long()
    early, late = parts[..., 0, :], parts[..., 1, :]
    words = early[:, 0] | early[:, 1] << 8 | late[:, 0] << 16 | late[:, 1] << 24  # [R, r, P, high, low, c]
    moved = torch.zeros_like(words)
    for mask, shift in SHIFTS.items():
        bits = words & mask
        moved |= bits << shift if shift > 0 else bits >> -shift
    moved = moved.permute(0, 4, 1, 2, 3, 5).contiguous()  # [R, low, r, P, high, c]
    split = torch.stack([moved >> 8 * byte & 0xFF for byte in range(4)], dim=-1)
    return split.to(torch.uint8).view(N, bytes_of_row)


def fold_scales(scales: Tensor) -> Tensor:
    """e8m0 as uint8 [E, N, G], N % 64 == G % 4 == 0, to [E, N/64, G/4, 16, 16]."""
    E, N, G = scales.shape
    if N % 64 or G % 4:
        raise ValueError(f"scales of 64 rows and 4 groups are folded, not {tuple(scales.shape)}")
    blocks = scales.reshape(E, N // 64, 4, 16, G // 4, 4).permute(0, 1, 4, 3, 2, 5)
    return blocks.reshape(E, N // 64, G // 4, 16, 16)


def _pad(x: Tensor, size: int, dim: int, fill: int) -> Tensor:
    short = size - x.shape[dim]
    if not short:
        return x
    return F.pad(x, (*(0, 0) * (-1 - dim), 0, short), value=fill)
