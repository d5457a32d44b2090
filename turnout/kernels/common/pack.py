"""Tokens to rows of words for the wire, and the sums of what comes back, in one launch each (Triton)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from turnout.kernels.common.quantize import quantize_fp8, quantize_nvfp4

BLOCK = 1024  # words or values at a time


@triton.jit
def pack_rows(
    x_ptr, ids_ptr, weights_ptr, source_ptr, global_scale_ptr, words_ptr, bytes_ptr, ints_ptr, floats_ptr, T,
    row_words, scales_at, ids_at, weights_at,
    GATHER: tl.constexpr, H: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, BLOCK: tl.constexpr,
    FORMAT: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Row r of `words` int64 [., row_words]: token r (GATHER: source[r]) in FORMAT, its K ids and weights.

    H: of x, words where it goes as it is, else values. `bytes`, `ints` and `floats` are the memory of `words`
    in units of 1, 4 and 4 bytes; `*_at` are places of parts in a row, in words. Rows from T on are padding:
    zeros, with ids -1.
    """
    row = tl.program_id(0).to(tl.int64)
    start = row * row_words
    real = row < T
    token = row
    if GATHER:
        token = tl.load(source_ptr + row)
        real = token >= 0
    for at in range(0, H, BLOCK):
        if FORMAT == "bf16":
            c = at + tl.arange(0, BLOCK)
            word = tl.load(x_ptr + token * H + c, mask=real & (c < H), other=0)
            tl.store(words_ptr + start + c, word, mask=c < H)
        else:
            group: tl.constexpr = 128 if FORMAT == "fp8" else 16
            packed: tl.constexpr = group if FORMAT == "fp8" else group // 2  # bytes
            g = at // group + tl.arange(0, BLOCK // group)
            c = g[:, None] * group + tl.arange(0, group)[None, :]
            x = tl.load(x_ptr + token * H + c, mask=real & (c < H), other=0.0).to(tl.float32)
            b = g[:, None] * packed + tl.arange(0, packed)[None, :]
            if FORMAT == "fp8":
                q, scale = quantize_fp8(x, INTERPRETED)
                tl.store(bytes_ptr + start * 8 + b, q, mask=b < H)
                scale = tl.where(real, scale, 0.0)
                tl.store(floats_ptr + (start + scales_at) * 2 + g, scale, mask=g < H // group)
            else:
                q, scale = quantize_nvfp4(x, tl.load(global_scale_ptr), INTERPRETED)
                tl.store(bytes_ptr + start * 8 + b, q, mask=b < H // 2)
                tl.store(bytes_ptr + (start + scales_at) * 8 + g, scale, mask=g < H // group)
    k = tl.arange(0, KP)
    ids = tl.load(ids_ptr + token * K + k, mask=real & (k < K), other=-1)
    weights = tl.load(weights_ptr + token * K + k, mask=real & (k < K), other=0.0)
    tl.store(ints_ptr + (start + ids_at) * 2 + k, ids, mask=k < K)
    tl.store(floats_ptr + (start + weights_at) * 2 + k, weights, mask=k < K)


INTERPRETED = not isinstance(pack_rows, triton.JITFunction)


def pack(
    x_TH: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    out_RW: Tensor,
    at: Sequence[int],
    *,
    format: str = "bf16",
    global_scale: Tensor | None = None,
    source_R: Tensor | None = None,
) -> None:
    """Fill out int64 [R, W] with tokens: x [T, H], ids int32 and weights float32 [T, k], all contiguous.

    at: in which words of a row scales (if `format` has them), ids and weights begin; x begins it. "bf16" is x
    as it is, of any float dtype, H * itemsize divisible by 8; "fp8" and "nvfp4" as `formats` encode
    activations, the latter with `global_scale` float32. Row r is token r, beyond T padding; or, with `source`
    int64 [R], token source[r].
    """
    if not len(out_RW):
        return
    *scales_at, ids_at, weights_at = at
    if format == "bf16":
        x_TH = x_TH.view(torch.int64)
    (T, H), K = x_TH.shape, ids_TK.shape[1]
    views = [out_RW.view(dtype) for dtype in (torch.uint8, torch.int32, torch.float32)]
    pack_rows[(len(out_RW),)](
        x_TH, ids_TK, weights_TK, ids_TK if source_R is None else source_R,
        weights_TK if global_scale is None else global_scale, out_RW, *views, T, out_RW.shape[1],
        scales_at[0] if scales_at else 0, ids_at, weights_at, source_R is not None, H, K,
        triton.next_power_of_2(K), BLOCK, format, INTERPRETED,
    )  # fmt: skip


@triton.jit
def sum_rows_kernel(back_ptr, order_ptr, bags_ptr, out_ptr, H, BLOCK: tl.constexpr):
    """out[t] = the sum of back[order[i]] for i in [bags[t], bags[t + 1]), in this order, in float32."""
    t = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    i = tl.load(bags_ptr + t)
    end = tl.load(bags_ptr + t + 1)
    acc = tl.zeros([BLOCK], tl.float32)
    while i < end:
        row = tl.load(order_ptr + i)
        acc += tl.load(back_ptr + row * H + c, mask=c < H, other=0.0).to(tl.float32)
        i += 1
    tl.store(out_ptr + t * H + c, acc.to(out_ptr.dtype.element_ty), mask=c < H)


def sum_rows(back_SH: Tensor, order_S: Tensor, bags_T1: Tensor) -> Tensor:
    """[T, H] in back's dtype; order and bags int64, contiguous."""
    T, H = len(bags_T1) - 1, back_SH.shape[1]
    out_TH = torch.empty(T, H, dtype=back_SH.dtype, device=back_SH.device)
    if T:
        sum_rows_kernel[(T, triton.cdiv(H, BLOCK))](back_SH, order_S, bags_T1, out_TH, H, BLOCK)
    return out_TH


@triton.jit
def sum_parts_kernel(parts_ptr, out_ptr, N, R: tl.constexpr, BLOCK: tl.constexpr):
    """out[n] = the sum of parts[r, n] for r in [0, R), in this order, in float32."""
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    for r in tl.static_range(R):
        acc += tl.load(parts_ptr + r * N + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out_ptr + n, acc.to(out_ptr.dtype.element_ty), mask=n < N)


def sum_parts(parts_RTH: Tensor) -> Tensor:
    """[T, H] in the dtype of parts, which are contiguous."""
    R, T, H = parts_RTH.shape
    out_TH = torch.empty(T, H, dtype=parts_RTH.dtype, device=parts_RTH.device)
    if T:
        sum_parts_kernel[(triton.cdiv(T * H, BLOCK),)](parts_RTH, out_TH, T * H, R, BLOCK)
    return out_TH
