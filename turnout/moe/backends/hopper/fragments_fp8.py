"""MXFP4 weights in the order in which Hopper's FP8 tensor cores take them, in plain torch.

An e2m1 value times a power of two is an e4m3 value, as long as that has room: 0.5 and 6 are 2^-6 and 384
with 12 binades between. So the block scales of a row, which mostly lie within that, go into the exponents of
the codes: a weight becomes one byte of e4m3, without rounding, and what is left is one factor per row. Scales
more than 11 binades below their row's largest take the lowest of the 12, and their codes are rounded to it:
by at most 2^-15 of the row's largest weight.

`wgmma` takes its first operand from registers: for a tile of 64 rows and 32 columns, lane l of warp w holds
rows 16 w + l / 4 and 8 below it, columns 4 (l % 4) to 3 further on, and the same four 16 further on, each
four in a register. A 32-bit word holds such a thread's eight codes of one row of a tile:

    bit   31 30-28 27 26-24 23 22-20 19 18-16 15 14-12 11 10-8  7  6-4  3  2-0
          sD  h    tD  g    sC  f    tC  e    sB  d    tB  c    sA  b   tA  a

a to d are three bits of magnitude each of columns 4 (l % 4) to 3 further on, e to h of those 16 further
on; sA to sD are the signs of the former, tA to tD of the latter. One byte permute looks up four magnitudes,
since its selectors are four bits apart; signs need a mask, and the second four a shift.

Four words in a row are two tiles and both rows of a thread, with the four scale bytes in one word: how
many binades above the lowest, 0 to 11. Blocks are 64 rows by 128 columns; those of the same columns lie
together, as a tile of several needs them.

Legend: E experts, N rows, K columns, padded to multiples of 64 and 128 with zero codes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from turnout.formats import e2m1
from turnout.formats.packed import PackedTensor
from turnout.formats.spec import FORMATS
from turnout.moe.backends.hopper.fragments import padded
from turnout.vocabulary import Format

ROWS, COLUMNS = 64, 128
GROUP = FORMATS[Format.MXFP4].group
BINADES = 11  # the largest scale byte
_TOP = BINADES - 5  # what the largest scale byte multiplies an e2m1 value by, as a power of two


@dataclass(frozen=True, kw_only=True)
class FragmentsFP8:
    """MXFP4 weights [E, N, K].

    codes: int32 [E, K/128, N/64, 1024]; scales: int32 [E, K/128, N/64, 64]; alpha: float32 [E, N padded],
    by which the products of a row are multiplied; rows, columns: N and K before padding.
    """

    codes: Tensor
    scales: Tensor
    alpha: Tensor
    rows: int
    columns: int


def to_fragments_fp8(weights: PackedTensor, *, paired: bool, device: torch.device | str) -> FragmentsFP8:
    """On `device`. paired: as of `fragments.to_fragments`."""
    E, N, K = weights.shape
    height = ROWS // (1 + paired)
    n, k = (1 + paired) * -(-N // (1 + paired) // height) * height // ROWS, -(-K // COLUMNS)
    fragments = FragmentsFP8(
        codes=torch.empty(E, k, n, ROWS * COLUMNS // 8, dtype=torch.int32, device=device),
        scales=torch.empty(E, k, n, ROWS, dtype=torch.int32, device=device),
        alpha=torch.empty(E, n * ROWS, device=device),
        rows=N,
        columns=K,
    )
    fill_fp8(fragments, weights, paired=paired)
    return fragments


def fill_fp8(fragments: FragmentsFP8, weights: PackedTensor, *, paired: bool) -> None:
    """Put `weights` into the storage of `fragments`, one expert at a time."""
    for e, into in enumerate(zip(fragments.codes, fragments.scales, fragments.alpha, strict=True)):
        for mine, new in zip(into, _expert(weights[e].to(fragments.codes.device), paired), strict=True):
            mine.copy_(new)


def _expert(weights: PackedTensor, paired: bool) -> tuple[Tensor, Tensor, Tensor]:
    assert weights.scale is not None, "mxfp4 weights carry scales"
    code_NK = e2m1.unpack(weights.data)
    exponent_NG = weights.scale.to(torch.int32)
    used_NG = (code_NK & 7).unflatten(1, (-1, GROUP)).amax(-1) > 0
    exponent_NG = exponent_NG.masked_fill(~used_NG, 0)
    top_N1 = exponent_NG.amax(1, keepdim=True)
    byte_NG = exponent_NG - top_N1 + BINADES
    low_NG = byte_NG < 0
    if bool(low_NG.any()):
        shrink_NK = torch.exp2(byte_NG.clamp(max=0).float()).repeat_interleave(GROUP, 1)
        rounded_NK = e2m1.encode(e2m1.decode(code_NK) * shrink_NK)
        code_NK = torch.where(low_NG.repeat_interleave(GROUP, 1), rounded_NK, code_NK)
    alpha_N1 = torch.exp2((top_N1 - 127 - _TOP).float())
    code_NK = padded(code_NK, COLUMNS, paired)
    byte_NG = padded(byte_NG.clamp(min=0).to(torch.uint8), COLUMNS // GROUP, paired)
    alpha_N = padded(alpha_N1, 1, paired)[:, 0]
    return _fold_codes(code_NK), _fold_scales(byte_NG), alpha_N


# Axes of a block. Rows: warp 4, lower 2, lane / 4 8. Columns: pair of tiles 2, tile 2, right 2, lane % 4 4,
# place 4. Words: pair, warp, lane / 4, lane % 4, tile, lower.


def _fold_codes(code_NK: Tensor) -> Tensor:
    """uint8 codes [N, K] -> int32 [K/128, N/64, 1024]."""
    n, k = code_NK.shape[0] // ROWS, code_NK.shape[1] // COLUMNS
    axes = code_NK.to(torch.int64).view(n, 4, 2, 8, k, 2, 2, 2, 4, 4)
    # -> k, n, pair, warp, lane / 4, lane % 4, tile, lower | right, place
    axes = axes.permute(4, 0, 5, 1, 3, 8, 6, 2, 7, 9)
    word = torch.zeros_like(axes[..., 0, 0])
    for right in range(2):
        for place in range(4):
            code = axes[..., right, place]
            word |= (code & 7) << 16 * right + 4 * place | (code >> 3) << 8 * place + (3 if right else 7)
    return _signed(word).reshape(k, n, 1024)


def _fold_scales(byte_NG: Tensor) -> Tensor:
    """uint8 [N, K/32] -> int32 [K/128, N/64, 64]: words by pair, warp, lane / 4; bytes by tile, lower."""
    n, k = byte_NG.shape[0] // ROWS, byte_NG.shape[1] // 4
    axes = byte_NG.view(n, 4, 2, 8, k, 2, 2).permute(4, 0, 5, 1, 3, 6, 2)
    return axes.reshape(k, n, 256).contiguous().view(torch.int32)


def _signed(word: Tensor) -> Tensor:
    """int64 below 2^32 -> int32 of the same bits."""
    return torch.where(word >= 1 << 31, word - (1 << 32), word).to(torch.int32)
