"""Products of rows with panels, both in bfloat16, on the units that processors have for them.

A matrix [N, K] (outputs, inputs) lies in panels [K / 2, 16, 2] of 16 outputs: what one step along K needs,
the pair of inputs k and k + 1 of 16 outputs, is one vector of 64 bytes. Rows lie in tiles [K / 32, 16, 32] of
16 rows. So 32 inputs of 16 outputs, or of 16 rows, are 1024 bytes in a row, which is what AMX loads as a
tile. K is padded with zeros to a multiple of 32.

Products are exact and added up in float32, on either kind of units in one order for any number of rows: what
a row gets does not depend, to the bit, on the other rows. The two kinds differ in the last bits.

Measured on one core of a shared Intel Xeon (Emerald Rapids), 32 rows of 1024 x 1024, TFLOP/s: AMX 0.76,
oneDNN's product by AMX 0.33; of 256 rows 1.07 and 1.1 at best.

AVX512 waits for panels and rows that come from memory, so those that come next, the next expert's too, are
fetched while these are multiplied. Of the layer in docs/notes/cpu-kernels.md, 1024 tokens, two cores of an
AMD EPYC, least of alternating turns: `down` 24.7 ms where only panels of the same expert are fetched, 20.6
with all; the whole 67.6 and 61.1. Part of that are tiles of 8 rows and not of 6: 16 rows are two of them and
not three, of which the last waited for its own sums.
"""

from __future__ import annotations

from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from turnout.kernels import cpu
from turnout.kernels.cpu.jit import part
from turnout.kernels.cpu.vectors import (
    F32_V,
    I8,
    I16_V,
    I32,
    I32_V,
    I64,
    LANES,
    constant,
    fetch_line,
    load_as,
    number,
    spread,
    store_as,
    vector,
)

STEP = 32  # inputs of a tile
TILE = 1024  # bytes of one
TILE_ROWS = 16
AMX, AVX512 = 0, 1  # kinds of units
UNITS = {"amx_bf16": AMX, "avx512_bf16": AVX512}
SUMS_PITCH = 256  # bytes between rows of sums of four panels

# Code for units that this processor has not cannot be generated: there the function does nothing.
_FEATURES = binding.get_host_cpu_features()
HAS_AMX = bool(_FEATURES.get("amx-bf16"))
HAS_AVX512 = bool(_FEATURES.get("avx512bf16"))

# What AMX is told of its eight tiles: palette 1, 64 bytes and 16 rows of each.
CONFIG = bytes([1, *[0] * 15, *[64, 0] * 8, *[0] * 16, *[TILE_ROWS] * 8, *[0] * 8])

if HAS_AMX:
    cpu.allow_tiles()


class _BFloats(ir.Type):
    """A vector of bfloat16, a type that llvmlite does not know."""

    def __init__(self, count: int) -> None:
        self._count = count

    def _to_string(self) -> str:
        return f"<{self._count} x bfloat>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloats) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))


BF16_V, BF16_PAIRS_V = _BFloats(LANES), _BFloats(2 * LANES)


def _tile(index: int) -> ir.Constant:
    return ir.Constant(I8, index)


def _amx(b: ir.IRBuilder, name: str, *args: ir.Value) -> None:
    kind = ir.FunctionType(ir.VoidType(), [arg.type for arg in args])
    b.call(cgutils.get_or_insert_function(b.module, kind, f"llvm.x86.{name}"), args)


def _address(b: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return b.inttoptr(address, I8.as_pointer())


@intrinsic
def begin_tiles(_: Any) -> Any:
    """Set this thread's tiles up as CONFIG says."""

    def build(context: Any, b: ir.IRBuilder, sig: Any, args: Any) -> Any:
        if HAS_AMX:
            config = ir.Constant(ir.ArrayType(I8, len(CONFIG)), bytearray(CONFIG))
            space = cgutils.alloca_once(b, config.type)
            b.store(config, space)
            _amx(b, "ldtilecfg", b.bitcast(space, I8.as_pointer()))
        return context.get_dummy_value()

    return types.void(), build


@intrinsic
def end_tiles(_: Any) -> Any:
    """Give this thread's tiles back, whose contents the operating system else saves at each switch."""

    def build(context: Any, b: ir.IRBuilder, sig: Any, args: Any) -> Any:
        if HAS_AMX:
            _amx(b, "tilerelease")
        return context.get_dummy_value()

    return types.void(), build


def _tiles_code(b: ir.IRBuilder, rows_at: list, panels: list, steps: ir.Value, sums: ir.Value) -> None:
    """Sums of one or two tiles of rows with as many panels as leave tiles free for what is multiplied."""
    places = [(r, p) for r in range(len(rows_at)) for p in range(len(panels))]
    row_tiles = [len(places) + r for r in range(len(rows_at))]
    panel_tiles = [
        len(places) + len(rows_at) + p % (8 - len(places) - len(rows_at)) for p in range(len(panels))
    ]
    for place in range(len(places)):
        _amx(b, "tilezero", _tile(place))
    before, loop, end = b.block, b.append_basic_block("along_k"), b.append_basic_block("tiles_done")
    b.branch(loop)
    b.position_at_end(loop)
    k = b.phi(I64)
    k.add_incoming(number(0), before)
    step = b.mul(k, number(TILE))
    for tile, at in zip(row_tiles, rows_at, strict=True):
        _amx(b, "tileloadd64", _tile(tile), _address(b, b.add(at, step)), number(64))
    for p, (tile, at) in enumerate(zip(panel_tiles, panels, strict=True)):
        _amx(b, "tileloadd64", _tile(tile), _address(b, b.add(at, step)), number(64))
        for r, row_tile in enumerate(row_tiles):
            _amx(b, "tdpbf16ps", _tile(places.index((r, p))), _tile(row_tile), _tile(tile))
    following = b.add(k, number(1))
    k.add_incoming(following, loop)
    b.cbranch(b.icmp_signed("<", following, steps), loop, end)
    b.position_at_end(end)
    for place, (r, p) in enumerate(places):
        to = b.add(sums, number(r * TILE_ROWS * SUMS_PITCH + p * 64))
        _amx(b, "tilestored64", _tile(place), _address(b, to), number(SUMS_PITCH))


@intrinsic
def _tiles(
    _: Any, rows: Any, pitch: Any, tiles: Any, one: Any, two: Any, three: Any, four: Any, panels: Any,
    steps: Any, sums: Any,
) -> Any:  # fmt: skip
    def build(context: Any, b: ir.IRBuilder, sig: Any, args: Any) -> Any:
        if not HAS_AMX:
            return context.get_dummy_value()
        rows, pitch, tiles, *panel_at, panels, steps, sums = args
        done = b.append_basic_block("done")
        which = b.add(b.mul(tiles, number(8)), panels)
        choice = b.switch(which, done)
        for row_tiles, most in ((1, 4), (2, 2)):
            for count in range(1, most + 1):
                block = b.append_basic_block(f"tiles_{row_tiles}_{count}")
                choice.add_case(number(8 * row_tiles + count), block)
                b.position_at_end(block)
                at = [b.add(rows, b.mul(pitch, number(r))) for r in range(row_tiles)]
                _tiles_code(b, at, panel_at[:count], steps, sums)
                b.branch(done)
        b.position_at_end(done)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 10), build


def _dot(b: ir.IRBuilder, total: ir.Value, x: ir.Value, w: ir.Value) -> ir.Value:
    """total + x[2 i] w[2 i] + x[2 i + 1] w[2 i + 1] of each lane i; x and w: pairs as int32."""
    kind = ir.FunctionType(F32_V, [F32_V, BF16_PAIRS_V, BF16_PAIRS_V])
    name = "llvm.x86.avx512bf16.dpbf16ps.512"
    function = cgutils.get_or_insert_function(b.module, kind, name)
    return b.call(function, [total, b.bitcast(x, BF16_PAIRS_V), b.bitcast(w, BF16_PAIRS_V)])


def _dots_code(
    b: ir.IRBuilder,
    row_at: list,
    panels: list,
    steps: ir.Value,
    sums: ir.Value,
    panels_ahead: ir.Value,
    rows_ahead: ir.Value,
) -> None:
    """Sums of a few rows of a tile with panels, all of which stay in registers for the whole of K.

    panels_ahead, rows_ahead: bytes from these panels, and this tile, to those that come next, which are
    fetched meanwhile.
    """
    before, loop, end = b.block, b.append_basic_block("along_k"), b.append_basic_block("dots_done")
    pairs = b.mul(steps, number(STEP // 2))
    b.branch(loop)
    b.position_at_end(loop)
    k = b.phi(I64)
    k.add_incoming(number(0), before)
    places = [(r, p) for r in range(len(row_at)) for p in range(len(panels))]
    held = [b.phi(F32_V) for _ in places]
    weights = [load_as(b, b.add(at, b.mul(k, number(64))), I32_V) for at in panels]
    for at in [*(b.add(at, panels_ahead) for at in panels), b.add(row_at[0], rows_ahead)]:
        fetch_line(b, b.add(at, b.mul(k, number(64))))
    inside = b.add(b.mul(b.lshr(k, number(4)), number(TILE)), b.mul(b.and_(k, number(15)), number(4)))
    values = [spread(b, load_as(b, b.add(at, inside), I32)) for at in row_at]
    after = [_dot(b, old, values[r], weights[p]) for (r, p), old in zip(places, held, strict=True)]
    for old, new in zip(held, after, strict=True):
        old.add_incoming(constant(0.0), before)
        old.add_incoming(new, loop)
    following = b.add(k, number(1))
    k.add_incoming(following, loop)
    b.cbranch(b.icmp_signed("<", following, pairs), loop, end)
    b.position_at_end(end)
    for (r, p), new in zip(places, after, strict=True):
        store_as(b, b.add(sums, number(r * SUMS_PITCH + p * 64)), new)


DOT_ROWS = 8  # the most rows at a time, with two panels


@intrinsic
def _dots(
    _: Any, rows: Any, count: Any, one: Any, two: Any, panels: Any, steps: Any, sums: Any,
    panels_ahead: Any, rows_ahead: Any,
) -> Any:  # fmt: skip
    """Up to DOT_ROWS rows, the first at `rows`, with one or two panels."""

    def build(context: Any, b: ir.IRBuilder, sig: Any, args: Any) -> Any:
        if not HAS_AVX512:
            return context.get_dummy_value()
        rows, count, one, two, panels, steps, sums, *ahead = args
        done = b.append_basic_block("done")
        choice = b.switch(b.add(b.mul(count, number(2)), panels), done)
        for height in range(1, DOT_ROWS + 1):
            for width in (1, 2):
                block = b.append_basic_block(f"dots_{height}_{width}")
                choice.add_case(number(2 * height + width), block)
                b.position_at_end(block)
                row_at = [b.add(rows, number(64 * r)) for r in range(height)]
                _dots_code(b, row_at, [one, two][:width], steps, sums, *ahead)
                b.branch(done)
        b.position_at_end(done)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 9), build


@intrinsic
def store_bf16(_: Any, address: Any, v: Any) -> Any:
    """16 float32, rounded to the nearest bfloat16, ties to even; subnormal ones become zero."""

    def build(context: Any, b: ir.IRBuilder, sig: Any, args: Any) -> Any:
        if HAS_AVX512:
            kind = ir.FunctionType(BF16_V, [F32_V])
            name = "llvm.x86.avx512bf16.cvtneps2bf16.512"
            rounded = b.call(cgutils.get_or_insert_function(b.module, kind, name), [args[1]])
            store_as(b, args[0], b.bitcast(rounded, I16_V))
        return context.get_dummy_value()

    return types.void(types.int64, vector), build


@part
def products(
    units, rows, pitch, count, one, two, three, four, panels, steps, sums, panels_ahead, rows_ahead
):  # fmt: skip
    """sums[r, 16 p : 16 p + 16] = row r @ panel p, for `count` rows in one or two tiles, `pitch` bytes apart.

    one to four: addresses of `panels` panels, at most two for more than 16 rows. steps: K / 32. sums: rows of
    float32 SUMS_PITCH bytes apart, 16 or 32 of them, of which those past `count` may be overwritten.
    panels_ahead: bytes from each panel to the one that takes its place next; rows_ahead: from each tile to
    one of the next expert, or 0. AVX512 fetches both.
    """
    if units == AMX:
        _tiles(rows, pitch, 1 if count <= TILE_ROWS else 2, one, two, three, four, panels, steps, sums)
        return
    for tile in range(0, count, TILE_ROWS):
        until = min(count, tile + TILE_ROWS)
        groups = (until - tile + DOT_ROWS - 1) // DOT_ROWS
        for group in range(groups):
            first = tile + group * (until - tile) // groups
            height = tile + (group + 1) * (until - tile) // groups - first
            at, to = rows + (first - tile) * 64, sums + first * SUMS_PITCH
            _dots(at, height, one, two, min(panels, 2), steps, to, panels_ahead, rows_ahead)
            if panels > 2:
                _dots(at, height, three, four, panels - 2, steps, to + 128, panels_ahead, rows_ahead)
        rows += pitch
