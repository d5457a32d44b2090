"""4-bit weights to fragment order in one launch, as they come to the GPU (Triton).

`moe/backends/hopper/fragments.py` says what the order is, and makes the same, bit by bit, with torch: there
that takes tens of bytes a weight and a dozen passes over memory, which loading a model waited for. Here each
output word is made of the four bytes that hold its eight codes. A program makes a block of 64 rows and 64
columns.

Shapes are numbers that kernels are not compiled again for: one kernel for each format.

Legend: E experts, N rows, K columns, G groups of columns that share a scale.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 64


@triton.jit
def spread_nibbles(byte):
    """The low four bits at 0 to 3, the high four at 16 to 19."""
    return (byte & 15) | (byte >> 4) << 16


@triton.jit
def load_scale(scale_ptr, at, held, top, FORMAT: tl.constexpr):
    """A block scale as fragments hold it, 0 where there is none: of "int4" the 16 bits as they are."""
    scale = tl.load(scale_ptr + at, mask=held, other=0).to(tl.int32)
    if FORMAT == "int4":
        return scale & 0xFFFF
    elif FORMAT == "nvfp4":
        exponent = scale >> 3 & 15
        mantissa = scale & 7
        lead = (mantissa >= 2).to(tl.int32) + (mantissa >= 4).to(tl.int32)  # of the subnormal m * 2^-9
        small = (lead + 1) << 3 | ((mantissa << (3 - lead)) & 7)
        normal = (exponent + 3) << 3 | mantissa
        return tl.where(exponent > 0, normal, tl.where(mantissa > 0, small, 0))
    else:
        return tl.where(held, tl.maximum(scale - top + 253, 0), 0)


@triton.jit
def load_codes(
    packed_ptr, scale_ptr, row, row_held, byte, row_bytes, row_scales, top,
    FORMAT: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Two codes of each row, one in each half of a word; 0 where their scale is."""
    held = row_held & (byte < row_bytes)
    code = spread_nibbles(tl.load(packed_ptr + row * row_bytes + byte, mask=held, other=0).to(tl.int32))
    if FORMAT != "int4":
        scale = load_scale(scale_ptr, row * row_scales + byte // (GROUP // 2), held, top, FORMAT)
        code = tl.where(scale > 0, code, 0)
    return code


@triton.jit
def fold_codes(a, b, c, d, FORMAT: tl.constexpr):
    """A word of rows r (a, c) and r + 8 (b, d), where c and d are 8 columns further on."""
    if FORMAT == "int4":
        return a | b << 4 | c << 8 | d << 12
    else:
        sign = (a & 0x80008) << 12 | (b & 0x80008) << 6 | (c & 0x80008) << 2 | (d & 0x80008) << 8
        c = c & 0x70007
        turned = (c >> 16 | c << 16) << 12
        low = (d & 0x60006) << 2 | (d & 0x10001) << 10
        return sign | (a & 0x70007) << 6 | (b & 0x70007) | turned | low


@triton.jit(
    do_not_specialize=[
        "blocks_n", "blocks_k", "row_bytes", "row_scales", "expert_rows", "rows", "warp_rows", "below",
        "half",
    ],
    do_not_specialize_on_alignment=["packed_ptr", "scale_ptr", "top_ptr"],
)  # fmt: skip
def fold_block(
    packed_ptr, scale_ptr, top_ptr, codes_ptr, scales_ptr, blocks_n, blocks_k, row_bytes, row_scales,
    expert_rows, rows, warp_rows, below, half,
    FORMAT: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """codes int32 [E, N/64, K/64, 512] and scales int32 [E, N/64, K/64, .] of packed uint8 [E, N, K/2] and
    scale [E, N, G], uint8 or, of "int4", int16. top int32 [E], of "mxfp4": each expert's largest.

    The program is a block. In its 16 rows of warp w, row i < 8 and the one 8 below it are rows
    m = w * warp_rows + i and m + below, which there are if these are less than `rows`, the latter `half`
    further down.
    """
    block = tl.program_id(0)
    column = block % blocks_k
    warps = block // blocks_k % blocks_n * 4
    expert = (block // blocks_k // blocks_n).to(tl.int64)
    packed_ptr += expert * expert_rows * row_bytes
    scale_ptr += expert * expert_rows * row_scales
    top = 0
    if FORMAT == "mxfp4":
        top = tl.load(top_ptr + expert)
    word = tl.arange(0, 512)  # warp 4, lane / 4 8, lane % 4 4, step 4
    row = (warps + word // 128) * warp_rows + word // 16 % 8
    byte = column * 32 + word % 4 * 8 + word // 4 % 4
    held = row < rows
    held8 = row + below < rows
    row8 = row + below + half
    a = load_codes(packed_ptr, scale_ptr, row, held, byte, row_bytes, row_scales, top, FORMAT, GROUP)
    b = load_codes(packed_ptr, scale_ptr, row8, held8, byte, row_bytes, row_scales, top, FORMAT, GROUP)
    byte += 4
    c = load_codes(packed_ptr, scale_ptr, row, held, byte, row_bytes, row_scales, top, FORMAT, GROUP)
    d = load_codes(packed_ptr, scale_ptr, row8, held8, byte, row_bytes, row_scales, top, FORMAT, GROUP)
    tl.store(codes_ptr + block.to(tl.int64) * 512 + word, fold_codes(a, b, c, d, FORMAT))

    each: tl.constexpr = 1 if FORMAT == "int4" else 2  # scales of a row in a word
    across: tl.constexpr = 64 // GROUP // each  # words of a row
    word = tl.arange(0, 32 * across)  # warp 4, lane / 4 8, word of a row
    row = (warps + word // across // 8) * warp_rows + word // across % 8
    group = (column * across + word % across) * each
    held = row < rows
    held8 = row + below < rows
    at = row * row_scales + group
    at8 = (row + below + half) * row_scales + group
    inside = group < row_scales
    folded = load_scale(scale_ptr, at, held & inside, top, FORMAT)
    folded |= load_scale(scale_ptr, at8, held8 & inside, top, FORMAT) << 16
    if each == 2:
        inside = group + 1 < row_scales
        folded |= load_scale(scale_ptr, at + 1, held & inside, top, FORMAT) << 8
        folded |= load_scale(scale_ptr, at8 + 1, held8 & inside, top, FORMAT) << 24
    tl.store(scales_ptr + block.to(tl.int64) * (32 * across) + word, folded)


def fold(
    packed_ENB: Tensor, scale_ENG: Tensor, top_E: Tensor, codes: Tensor, scales: Tensor,
    *, format: str, group: int, paired: bool,
) -> None:  # fmt: skip
    """Fill codes int32 [E, N/64, K/64, 512] and scales int32 [E, N/64, K/64, .] as `Fragments` has them.

    packed uint8 [E, N, K/2]; scale [E, N, G] of whole groups: uint8, or int16 of "int4"; top int32 [E], of
    "mxfp4": each expert's largest scale. All contiguous; packed weights of one expert take less than 2^31
    bytes, and what is filled begins at a multiple of 16.
    paired: rows are gate then up, which are to become 8 of gate, 8 of up in turn.
    """
    E, N, row_bytes = packed_ENB.shape
    _, blocks_n, blocks_k, _ = codes.shape
    rows, warp_rows, below, half = (N // 2, 8, 0, N // 2) if paired else (N, 16, 8, 0)
    fold_block[(E * blocks_n * blocks_k,)](
        packed_ENB, scale_ENG, top_E, codes, scales, blocks_n, blocks_k, row_bytes, scale_ENG.shape[2], N,
        rows, warp_rows, below, half, format, group,
    )  # fmt: skip
