"""Quantising groups of columns inside a kernel, bit for bit as `formats` does on the host (Triton)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def nearest_even(x):
    """x rounded to an integer, for magnitudes below 2^22."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def magnitude(x):
    """The largest magnitude along dimension 1 of float32 x; NaN if there is one."""
    return tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1).to(tl.float32, bitcast=True)


@triton.jit
def to_float(x, kind: tl.constexpr, INTERPRETED: tl.constexpr):
    """float32 to another float, rounded to nearest even."""
    if INTERPRETED and kind == tl.bfloat16:  # its own conversion rounds to zero
        bits = x.to(tl.int32, bitcast=True)
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    return x.to(kind)


@triton.jit
def to_e4m3(x, INTERPRETED: tl.constexpr):
    """float32 to e4m3, saturating; NaN stays NaN."""
    x = tl.where(x == x, tl.minimum(tl.maximum(x, -448.0), 448.0), x)
    if INTERPRETED:  # its own conversion loses carries: give it values that are e4m3 already
        step = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        step = tl.maximum(step, 0.015625) * 0.125
        x = nearest_even(x / step) * step
    return x.to(tl.float8e4nv)


@triton.jit
def quantize_fp8(x, INTERPRETED: tl.constexpr):
    """x float32 [., 128] -> its bytes as e4m3, and float32 scales [.]; as formats/fp8.py."""
    scale = magnitude(x)
    scale = tl.where(scale == scale, tl.minimum(scale, 3.4028234663852886e38), scale)
    scale = tl.div_rn(scale, tl.full(scale.shape, 448.0, tl.float32))
    scale = tl.where(scale == 0, 1.0, scale)
    q = to_e4m3(tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape)), INTERPRETED)
    return q.to(tl.uint8, bitcast=True), scale


@triton.jit
def quantize_nvfp4(x, global_scale, INTERPRETED: tl.constexpr):
    """x float32 [., 16] -> two e2m1 codes a byte [., 8], e4m3 scales [.] as bytes; as formats/nvfp4.py."""
    one = tl.full([1], 1.0, tl.float32)
    scale = to_e4m3(tl.div_rn(one, one * global_scale) * (magnitude(x) * 0.16666667163372040), INTERPRETED)
    unit = scale.to(tl.float32) * global_scale
    inverse = tl.div_rn(tl.full(unit.shape, 1.0, tl.float32), unit)
    inverse = tl.where(scale.to(tl.float32) == 0, 0.0, inverse)
    value = x * inverse[:, None]
    value = tl.where(value == value, tl.minimum(tl.maximum(value, -6.0), 6.0), 6.0)
    step = (value.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    step = 0.5 * tl.minimum(tl.maximum(step, 1.0), 4.0)
    m = tl.abs(nearest_even(value / step) * step)
    code = tl.minimum(tl.minimum(2 * m, m + 2), 0.5 * m + 4).to(tl.int32)
    code += (value.to(tl.int32, bitcast=True) >> 28) & 8
    low, high = tl.split(tl.reshape(code, (x.shape[0], x.shape[1] // 2, 2)))
    return (low | (high << 4)).to(tl.uint8), scale.to(tl.uint8, bitcast=True)
