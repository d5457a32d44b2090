"""Activations in bfloat16 that become e4m3 in the shared memory of the program that multiplies them (Gluon).

Bit for bit what `quantize_rows` (quantize_groups.py) writes, without a launch for it. A tile in shared memory
is [groups, TOKENS, 128], as `wgmma` takes its second operand: eight rows of 128 bytes, whose 16-byte parts
are swizzled by the row's number. Here a row's columns are swizzled as they are read, so that they are stored
one after the other; rows that do not exist are left as they are, for their products go nowhere.

A row at a time, for the rows that exist are few. More at once would not overlap, not in registers: ptxas lets
loads wait for those before them, whatever the order they are written in.

Legend: K columns, in groups of 128; HELD a power of two, at least as many as the groups.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from turnout.kernels.common import sizes

power_of_two = gluon.constexpr_function(sizes.power_of_two)


@gluon.jit
def _places(T: gl.constexpr, HELD: gl.constexpr, LAYOUT: gl.constexpr):
    """Groups [HELD, 1, 1], and where columns [HELD, 8, 16] of row T of a tile come from."""
    g = gl.arange(0, HELD, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))[:, None, None]
    part = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :, None]
    c = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]
    return g, (part ^ (T % 8)) * 16 + c


@gluon.jit
def load_row(x_at, T: gl.constexpr, GROUPS: gl.constexpr, HELD: gl.constexpr, num_warps: gl.constexpr):
    """A row of bf16 x, as row T of a tile will be swizzled: [HELD, 128], the last group again beyond K."""
    SPLIT: gl.constexpr = 1 if 4 * num_warps <= HELD else 2
    ROWS: gl.constexpr = gl.BlockedLayout(
        [1, 1, 16 // SPLIT], [4 // SPLIT, 8, SPLIT], [num_warps, 1, 1], [2, 1, 0]
    )
    g, columns = _places(T, HELD, ROWS)
    return gl.load(x_at + (gl.minimum(g, GROUPS - 1) * 128 + columns)).reshape([HELD, 128])


@gluon.jit
def stage_row(
    x_at, staged, exists, T: gl.constexpr, GROUPS: gl.constexpr, HELD: gl.constexpr, num_warps: gl.constexpr
):
    """Start copying the same to shared memory, bf16 [HELD, 8, 16]; zeros beyond K or if it does not exist."""
    COPY: gl.constexpr = gl.BlockedLayout([1, 1, 8], [2, 8, 2], [num_warps, 1, 1], [2, 1, 0])
    g, columns = _places(T, HELD, COPY)
    async_copy.async_copy_global_to_shared(staged, x_at + (g * 128 + columns), mask=exists & (g < GROUPS))


@gluon.jit
def load_staged(staged, HELD: gl.constexpr, num_warps: gl.constexpr):
    """What `stage_row` copied, as `load_row` gives it."""
    SPLIT: gl.constexpr = 1 if 4 * num_warps <= HELD else 2
    ROWS: gl.constexpr = gl.BlockedLayout([1, 16 // SPLIT], [4 // SPLIT, 8 * SPLIT], [num_warps, 1], [1, 0])
    LINES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    return staged._reinterpret(gl.bfloat16, [HELD, 128], LINES).load(ROWS)


@gluon.jit
def quantize_row(row, x, x_scale, T: gl.constexpr, HELD: gl.constexpr, TOKENS: gl.constexpr):
    """bf16 row [HELD, 128] becomes row T of the tile x, and column T of its scales [HELD, TOKENS]."""
    LINES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    row = row.to(gl.float32)
    amax = gl.max(gl.abs(row), 1)
    scale = gl.where(amax > 0, amax * (1 / 448), 1.0)
    codes = (row * (1 / scale)[:, None]).to(gl.float8e4nv)  # which saturates
    x._reinterpret(gl.float8e4nv, [HELD, TOKENS * 128], LINES).slice(T * 128, 128, 1).store(codes)
    x_scale._reinterpret(gl.float32, [HELD, TOKENS], LINES).slice(T, 1, 1).store(scale[:, None])
