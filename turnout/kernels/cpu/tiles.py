"""Products of a few rows with panels of a matrix: the inner loop of every matrix product here.

A matrix [N, K] (outputs, inputs) lies in panels [K, 16] of 16 outputs each, so that a step along K takes one
vector of weights from where the last one ended, and multiplies it with one number of each row. Up to six rows
and a panel, or fewer rows and more panels, keep their 12 or so registers of sums for the whole of K. Rows are
read where they are, by address: nothing is gathered first.

A sum runs along K from the first to the last, one fused multiply-add each, whatever tile it is part of: a
row's bits do not depend on the rows next to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from llvmlite import binding, ir
from numba import types
from numba.extending import intrinsic

from turnout.kernels.cpu.jit import inline, part
from turnout.kernels.cpu.vectors import (
    F32,
    F32_V,
    I16_V,
    I64,
    LANES,
    call,
    constant,
    lanes_summed,
    load_as,
    number,
    put_i64,
    spread,
    stack,
    store_as,
    widened,
)

ROWS = 6  # the most of a tile
ROW_ADDRESSES = 8 * ROWS  # bytes
F32_PANEL, BF16_PANEL = 0, 1  # kinds of panels
ITEMSIZE = (4, 2)


# Panels of tiles, by rows, the widest first: as many chains of additions as hide their latency and stay in
# registers, of which AVX512 has twice as many, twice as long.
AVX512 = bool(binding.get_host_cpu_features().get("avx512f"))
WIDTHS = dict.fromkeys(range(1, ROWS + 1), (4, 2, 1)) if AVX512 else {1: (4, 1), 2: (2, 1), 3: (2, 1)}
# Of `dots`, the same in outputs.
OUTPUTS = {1: (8, 1), 2: (8, 1), 3: (8, 1)} | dict.fromkeys((4, 5, 6), (4, 1))
if not AVX512:
    OUTPUTS = {1: (4, 1), 2: (2, 1), 3: (2, 1)}


@dataclass(frozen=True)
class _Product:
    """LLVM's code for `products`. onto: sums are added to what is there."""

    widths: ClassVar[Mapping[int, tuple[int, ...]]] = WIDTHS
    sum_bytes: ClassVar[int] = 4 * LANES  # of a row of sums of one panel

    b: ir.IRBuilder
    x: ir.Value
    stride: ir.Value
    K: ir.Value
    pitch: ir.Value
    kind: int
    onto: bool

    def cases(self, rows: ir.Value, panel: ir.Value, panels: ir.Value, sums: ir.Value) -> None:
        """A tile for every number of rows."""
        b, end = self.b, self.b.append_basic_block("done")
        choice = b.switch(rows, end)
        for count in range(1, ROWS + 1):
            block = b.append_basic_block(f"rows_{count}")
            choice.add_case(number(count), block)
            b.position_at_end(block)
            row_at = [load_as(b, b.add(self.x, number(8 * r)), I64) for r in range(count)]
            done = number(0)
            for width in self.widths.get(count, (1,)):
                done = self._panels(row_at, width, done, panel, panels, sums)
            b.branch(end)
        b.position_at_end(end)

    def _panels(
        self, row_at: list, width: int, done: ir.Value, panel: ir.Value, panels: ir.Value, sums: ir.Value
    ) -> ir.Value:
        """Tiles of `width` panels, as long as there are so many; returns how many panels are done."""
        b, before = self.b, self.b.block
        test, body, after = (b.append_basic_block(name) for name in ("more", "tile", "enough"))
        b.branch(test)
        b.position_at_end(test)
        p = b.phi(I64)
        p.add_incoming(done, before)
        b.cbranch(b.icmp_signed("<=", b.add(p, number(width)), panels), body, after)
        b.position_at_end(body)
        to = b.add(sums, b.mul(p, number(self.sum_bytes)))
        self._tile(row_at, [b.add(panel, b.mul(self.stride, b.add(p, number(i)))) for i in range(width)], to)
        p.add_incoming(b.add(p, number(width)), b.block)
        b.branch(test)
        b.position_at_end(after)
        return p

    def _tile(self, row_at: list, panel_at: list, sums: ir.Value) -> None:
        """Rows at addresses `row_at` times panels at `panel_at`, all of whose sums stay in registers."""
        b, entry = self.b, self.b.block
        loop, end = b.append_basic_block("along_k"), b.append_basic_block("tile_done")
        tile = [(r, p) for r in range(len(row_at)) for p in range(len(panel_at))]
        places = [b.add(sums, b.add(b.mul(self.pitch, number(r)), number(4 * LANES * p))) for r, p in tile]
        first = [load_as(b, place, F32_V) if self.onto else constant(0.0) for place in places]
        b.branch(loop)
        b.position_at_end(loop)
        k = b.phi(I64)
        k.add_incoming(number(0), entry)
        held = [b.phi(F32_V) for _ in tile]
        step = b.mul(k, number(LANES * ITEMSIZE[self.kind]))
        weights = [_weights(b, b.add(at, step), self.kind) for at in panel_at]
        values = [spread(b, load_as(b, b.add(at, b.mul(k, number(4))), F32)) for at in row_at]
        after = [call(b, "fma", values[r], weights[p], old) for (r, p), old in zip(tile, held, strict=True)]
        for old, start, new in zip(held, first, after, strict=True):
            old.add_incoming(start, entry)
            old.add_incoming(new, loop)
        following = b.add(k, number(1))
        k.add_incoming(following, loop)
        b.cbranch(b.icmp_signed("<", following, self.K), loop, end)
        b.position_at_end(end)
        for place, new in zip(places, after, strict=True):
            store_as(b, place, new)


class _Dots(_Product):
    """LLVM's code for `dots`: "panels" are rows of the matrix, and each sum ends as one number."""

    widths = OUTPUTS
    sum_bytes = 4

    def _tile(self, row_at: list, panel_at: list, sums: ir.Value) -> None:
        b, entry = self.b, self.b.block
        loop, end = b.append_basic_block("along_k"), b.append_basic_block("tile_done")
        tile = [(r, p) for r in range(len(row_at)) for p in range(len(panel_at))]
        b.branch(loop)
        b.position_at_end(loop)
        k = b.phi(I64)
        k.add_incoming(number(0), entry)
        held = [b.phi(F32_V) for _ in tile]
        step = b.mul(k, number(4))
        weights = [load_as(b, b.add(at, step), F32_V) for at in panel_at]
        values = [load_as(b, b.add(at, step), F32_V) for at in row_at]
        after = [call(b, "fma", values[r], weights[p], old) for (r, p), old in zip(tile, held, strict=True)]
        for old, new in zip(held, after, strict=True):
            old.add_incoming(constant(0.0), entry)
            old.add_incoming(new, loop)
        following = b.add(k, number(LANES))
        k.add_incoming(following, loop)
        b.cbranch(b.icmp_signed("<", following, self.K), loop, end)
        b.position_at_end(end)
        for r in range(len(row_at)):
            of_row = after[r * len(panel_at) : (r + 1) * len(panel_at)]
            store_as(b, b.add(sums, b.mul(self.pitch, number(r))), lanes_summed(b, of_row))


def _weights(b: ir.IRBuilder, address: ir.Value, kind: int) -> ir.Value:
    if kind == BF16_PANEL:
        return widened(b, load_as(b, address, I16_V))
    return load_as(b, address, F32_V)


def _products(kind: int, onto: bool, code_of: type[_Product] = _Product) -> Any:
    """One compiled function, which kernels call; in LLVM's own terms, since numba takes a second for as much
    Python."""

    @intrinsic
    def build(
        _: Any, rows: Any, x: Any, panel: Any, stride: Any, panels: Any, K: Any, sums: Any, pitch: Any
    ) -> Any:
        def code(context: Any, b: ir.IRBuilder, sig: Any, args: Any) -> Any:
            rows, x, panel, stride, panels, K, sums, pitch = args
            code_of(b, x, stride, K, pitch, kind, onto).cases(rows, panel, panels, sums)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), code

    def products(rows, x, panel, stride, panels, K, sums, pitch):
        build(rows, x, panel, stride, panels, K, sums, pitch)

    products.__qualname__ = f"products{code_of.__name__}_{kind}_{onto}"  # see jit.py
    return part(products)


products_f32, products_bf16 = _products(F32_PANEL, False), _products(BF16_PANEL, False)
products_onto = _products(F32_PANEL, True)  # added to the sums
_dots = _products(F32_PANEL, False, _Dots)


@part
def dots_between(x, N, weight, begin, end, M, K, out):
    """Columns [begin, end) of what `dots` makes."""
    rows = stack(ROW_ADDRESSES)
    block = end - begin if N <= ROWS else 16
    for m in range(begin, end, block):
        outputs = min(block, end - m)
        for first in range(0, N, ROWS):
            count = min(ROWS, N - first)
            for r in range(count):
                put_i64(rows + 8 * r, x + (first + r) * K * 4)
            _dots(count, rows, weight + m * K * 4, K * 4, outputs, K, out + (first * M + m) * 4, M * 4)


@part
def dots(x, N, weight, M, K, out):
    """out [N, M] = x [N, K] times the rows of weight [M, K], all float32; K is a multiple of 16.

    For a matrix as torch keeps it: no copy in panels is needed. A sum runs along K in 16 lanes, which are
    then added up as a tree: again a row's bits do not depend on other rows. Weights are read once, a block of
    them for all rows.
    """
    dots_between(x, N, weight, 0, M, M, K, out)


@part
def products(kind, rows, x, panel, stride, panels, K, sums, pitch):
    """sums[r, :] = x[r] @ panels, for `rows` rows, 1 to 6, whose addresses are at x.

    panel: address of the first of `panels` panels [K, 16], `stride` bytes apart, of float32 or (kind
    BF16_PANEL) bfloat16. sums: rows of float32 `pitch` bytes apart.
    """
    if kind == BF16_PANEL:
        products_bf16(rows, x, panel, stride, panels, K, sums, pitch)
    else:
        products_f32(rows, x, panel, stride, panels, K, sums, pitch)


@inline
def groups(rows):
    """Into how many tiles `rows` rows are cut; tile i of n begins at row i * rows // n."""
    return (rows + ROWS - 1) // ROWS
