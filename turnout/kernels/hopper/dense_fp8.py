"""Products of many rows with dense FP8 weights: one warp loads, groups of four multiply (Gluon, Hopper).

multiply_rows (common/row_gemm.py) reaches 280 TFLOP/s with 128 rows. It reads the rows from the L2 cache for
every 128 outputs, 48 KB for each 4 million products, which that cache gives at some 470 TFLOP/s; and all its
warps decode, then all multiply. Here a program has up to 256 outputs, so that the cache's bound is 700, and
groups of warps have nothing between them but the barriers of the stages: while one decodes, another's
products keep the tensor cores at work. Decoded weights are the registers of an operand. All comes by the TMA;
weights of the first stages come before the program waits for the kernel that makes its rows.

Legend: N rows, K inputs, M outputs, P parts, G groups of 128 inputs that share a scale.
"""

from __future__ import annotations

from functools import cache
from operator import mul
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from turnout.kernels.common import row_gemm
from turnout.kernels.common.devices import on_hopper
from turnout.kernels.hopper.schedule import advance, stage_barriers

GROUP = 128  # inputs that share a scale, and of a step
ALIGNED = 16  # bytes, of rows of all matrices that the TMA reads
MOST_PARTS = 16
LARGE = 24 * 10**6  # weights; see `faster`


class Tile(NamedTuple):
    """Rows of a program; its groups of four warps, and of how many blocks of 64 outputs each has the sums;
    steps of 128 inputs that are loaded ahead."""

    rows: int
    groups: int
    blocks: int
    stages: int

    @property
    def outputs(self) -> int:
        return 64 * self.groups * self.blocks


# Of a program, us of a step of 128 inputs; then us of a program, of a MB of parts that is written and added
# up, and of a product; and how much more of a product by row_gemm.py, whose tile for few outputs is the last.
# As python -m tools.fit_dense_fp8 fits them to what tools/dense_fp8.py measured on an H200.
STEP_US: dict[Tile | row_gemm.Tile, float] = {
    Tile(64, 2, 2, 4): 1.446,
    Tile(64, 3, 2, 3): 1.848,
    Tile(128, 2, 1, 4): 0.948,
    Tile(128, 3, 1, 4): 1.275,
    Tile(128, 4, 1, 3): 1.703,
    Tile(256, 2, 1, 2): 1.396,
    row_gemm.FEW_OUTPUTS: 1.065,
}
PROGRAM_US, MB_US, PRODUCT_US, BY_ROWS_US = 1.048, 0.22, 2.429, 0.597


@gluon.jit
def load_weights(w_desc, w, bar, m, k, stage, GROUPS: gl.constexpr, HEIGHT: gl.constexpr):
    """Begin to load what each group of warps multiplies."""
    for i in gl.static_range(GROUPS):
        tma.async_copy_global_to_shared(w_desc, [m + i * HEIGHT, k], bar, w.index(stage * GROUPS + i))


@gluon.jit
def load_steps(
    given,
    ROWS: gl.constexpr, GROUPS: gl.constexpr, HEIGHT: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Load 128 inputs of GROUPS times HEIGHT weight rows from m on, and of ROWS rows from n on, step by step,
    as stages become empty. One warp.
    """
    x_desc, w_desc, x, w, full, empty, m, n, first, steps = given
    BYTES: gl.constexpr = 128 * GROUPS * HEIGHT + 256 * ROWS
    ahead = gl.minimum(steps, STAGES)
    for stage in range(0, ahead):
        mbarrier.expect(full.index(stage), BYTES)
        load_weights(w_desc, w, full.index(stage), m, first + stage * 128, stage, GROUPS, HEIGHT)
    if PDL:
        gdc_wait()
    for stage in range(0, ahead):
        for j in gl.static_range(2):
            tma.async_copy_global_to_shared(
                x_desc, [n, first + stage * 128 + j * 64], full.index(stage), x.index(stage * 2 + j)
            )
    stage = 0
    phase = 0
    for step in range(STAGES, steps):
        mbarrier.wait(empty.index(stage), phase)
        bar = full.index(stage)
        k = first + step * 128
        mbarrier.expect(bar, BYTES)
        load_weights(w_desc, w, bar, m, k, stage, GROUPS, HEIGHT)
        for j in gl.static_range(2):
            tma.async_copy_global_to_shared(x_desc, [n, k + j * 64], bar, x.index(stage * 2 + j))
        stage, phase = advance(stage, phase, STAGES)


@gluon.jit
def decoded(w, scale, OPERAND: gl.constexpr):
    """w e4m3 [64, 32] in shared memory as bfloat16, times scale [64]."""
    return (w.load(OPERAND).to(gl.float32) * scale[:, None]).to(gl.bfloat16)


@gluon.jit
def store_sums(acc, y_ptr, m, n, N, M):
    """acc [64, ROWS] to columns m of rows n of y [N, M]."""
    LAYOUT: gl.constexpr = acc.type.layout
    at_m = m + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    at_n = n + gl.arange(0, acc.shape[1], gl.SliceLayout(0, LAYOUT))
    gl.store(y_ptr + (at_n[None, :] * M + at_m[:, None]), acc, mask=(at_m < M)[:, None] & (at_n < N)[None, :])


@gluon.jit
def multiply_steps(
    given,
    MINE: gl.constexpr, GROUPS: gl.constexpr, BLOCKS: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Multiply and store BLOCKS times 64 of a program's outputs. Four warps."""
    x, w, full, empty, scale_ptr, y_ptr, m, n, group, steps, N, M = given
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    acc0 = gl.zeros([64, ROWS], gl.float32, ACC)
    acc1 = gl.zeros([64, ROWS], gl.float32, ACC)
    m += MINE * BLOCKS * 64
    row = gl.arange(0, 64, gl.SliceLayout(1, OPERAND))
    scale_at = scale_ptr + group * M + m + row
    held0 = m + row < M
    held1 = m + 64 + row < M
    next0 = gl.load(scale_at, mask=held0, other=0.0)
    next1 = next0
    if BLOCKS == 2:
        next1 = gl.load(scale_at + 64, mask=held1, other=0.0)
    stage = 0
    phase = 0
    for step in range(0, steps):
        scale0 = next0
        scale1 = next1
        scale_at += M
        more = step + 1 < steps
        next0 = gl.load(scale_at, mask=held0 & more, other=0.0)
        if BLOCKS == 2:
            next1 = gl.load(scale_at + 64, mask=held1 & more, other=0.0)
        mbarrier.wait(full.index(stage), phase)
        mine = w.index(stage * GROUPS + MINE)
        for j in gl.static_range(4):
            rows = x.index(stage * 2 + j // 2).permute((1, 0)).slice(j % 2 * 32, 32, 0)
            a = decoded(mine.slice(0, 64).slice(j * 32, 32, 1), scale0, OPERAND)
            acc0 = warpgroup_mma_wait(1, deps=[warpgroup_mma(a, rows, acc0, is_async=True)])
            if BLOCKS == 2:
                a = decoded(mine.slice(64, 64).slice(j * 32, 32, 1), scale1, OPERAND)
                acc1 = warpgroup_mma_wait(1, deps=[warpgroup_mma(a, rows, acc1, is_async=True)])
        acc0, acc1 = warpgroup_mma_wait(0, deps=[acc0, acc1])
        gl.thread_barrier()
        mbarrier.arrive(empty.index(stage), count=1)
        stage, phase = advance(stage, phase, STAGES)
    store_sums(acc0, y_ptr, m, n, N, M)
    if BLOCKS == 2:
        store_sums(acc1, y_ptr, m + 64, n, N, M)


@gluon.jit(do_not_specialize=["N", "parts", "groups"])
def multiply_rows_specialised(
    x_desc, w_desc, scale_ptr, y_ptr, N, M, parts, groups,
    ROWS: gl.constexpr, GROUPS: gl.constexpr, BLOCKS: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """y[p] float32 [N, M] = x[:, piece p] @ w[:, piece p].T, pieces of `groups` / `parts` times 128 inputs.

    x bfloat16 [N, K] in boxes of [ROWS, 64]; w e4m3 [M, K] in boxes of [64 BLOCKS, 128]; scale float32
    [groups, M], of 128 inputs each. The grid is tiles of 64 GROUPS BLOCKS outputs, of ROWS rows, and parts.
    """
    HEIGHT: gl.constexpr = 64 * BLOCKS
    if PDL:
        gdc_launch_dependents()
    m = gl.program_id(0) * GROUPS * HEIGHT
    n = gl.program_id(1) * ROWS
    part = gl.program_id(2)
    first = part * groups // parts
    steps = (part + 1) * groups // parts - first
    x = gl.allocate_shared_memory(gl.bfloat16, [STAGES * 2, ROWS, 64], gl.NVMMASharedLayout(128, 16, 2))
    w = gl.allocate_shared_memory(
        gl.float8e4nv, [STAGES * GROUPS, HEIGHT, 128], gl.NVMMASharedLayout(128, 8, 2)
    )
    full, empty = stage_barriers(STAGES, 1, GROUPS)
    y_ptr += part.to(gl.int64) * N * M
    given = (x, w, full, empty, scale_ptr, y_ptr, m, n, first, steps, N, M)
    loaded = (x_desc, w_desc, x, w, full, empty, m, n, first * 128, steps)
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (multiply_steps, (given, 0, GROUPS, BLOCKS, ROWS, STAGES)),
                (multiply_steps, (given, 1, GROUPS, BLOCKS, ROWS, STAGES)),
                (load_steps, (loaded, ROWS, GROUPS, HEIGHT, STAGES, PDL)),
            ],
            [4, 1], [216, 40],
        )  # fmt: skip
    elif GROUPS == 3:
        gl.warp_specialize(
            [
                (multiply_steps, (given, 0, GROUPS, BLOCKS, ROWS, STAGES)),
                (multiply_steps, (given, 1, GROUPS, BLOCKS, ROWS, STAGES)),
                (multiply_steps, (given, 2, GROUPS, BLOCKS, ROWS, STAGES)),
                (load_steps, (loaded, ROWS, GROUPS, HEIGHT, STAGES, PDL)),
            ],
            [4, 4, 1], [152, 152, 40],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (multiply_steps, (given, 0, GROUPS, BLOCKS, ROWS, STAGES)),
                (multiply_steps, (given, 1, GROUPS, BLOCKS, ROWS, STAGES)),
                (multiply_steps, (given, 2, GROUPS, BLOCKS, ROWS, STAGES)),
                (multiply_steps, (given, 3, GROUPS, BLOCKS, ROWS, STAGES)),
                (load_steps, (loaded, ROWS, GROUPS, HEIGHT, STAGES, PDL)),
            ],
            [4, 4, 4, 1], [112, 112, 112, 40],
        )  # fmt: skip


def suits(tile: Tile | row_gemm.Tile, rows: int) -> bool:
    """Whether less than half of its rows would be empty, or it is of the fewest; of row_gemm.py's, whether it
    has so many."""
    fits = tile.rows <= 64 or tile.rows < 2 * rows
    return rows <= tile.rows if isinstance(tile, row_gemm.Tile) else fits


def counts(tile: Tile | row_gemm.Tile, rows: int, outputs: int, inputs: int) -> list[int]:
    """Numbers of parts to choose among: as many as there are programs for in one wave, in two, and in three.
    Of a tile of row_gemm.py, the one that it takes."""
    if isinstance(tile, row_gemm.Tile):
        return [row_gemm.part_count(tile, rows, outputs, inputs)]
    tiles = -(-outputs // tile.outputs) * -(-rows // tile.rows)
    most = min(-(-inputs // GROUP), MOST_PARTS)
    return sorted({max(1, min(most, waves * row_gemm.PROCESSORS // tiles)) for waves in (1, 2, 3)})


def terms(tile: Tile | row_gemm.Tile, count: int, rows: int, outputs: int, inputs: int) -> list[float]:
    """How many steps, programs in turn, MB of parts, products, and products by row_gemm.py."""
    programs = -(-outputs // tile.outputs) * -(-rows // tile.rows) * count
    waves, groups = -(-programs // row_gemm.PROCESSORS), -(-inputs // GROUP)
    by_rows = isinstance(tile, row_gemm.Tile)
    return [waves * -(-groups // count), waves, count * rows * outputs * 8e-6, 1, by_rows]


def faster(rows: int, outputs: int, inputs: int) -> bool:
    """Whether models take `parts` instead of row_gemm.py's.

    In benchmarks/results/dense-fp8-nvidia-h100-2026-11-27.json what is planned here took 2 to 40 % less of
    128 and of 256 rows by each of 20 matrices; of 64 rows 35 % less to 2 % more by those of LARGE weights and
    more, but 9 to 39 % more by five smaller ones. An H200 took 5 to 49 % less of 128 to 256 rows by 14.
    """
    return 64 < rows <= 256 or (32 < rows <= 64 and outputs * inputs >= LARGE)


@cache
def plan(rows: int, outputs: int, inputs: int) -> tuple[Tile | row_gemm.Tile, int]:
    """The tile, and the number of parts, that should take least of the next power of two of rows: so prompts
    of powers of two (`engine.warmup`) compile all that steps of other sizes need, the sums of parts too."""
    rows = 1 << (rows - 1).bit_length()
    shape, us = (rows, outputs, inputs), {}
    for tile, step in STEP_US.items():
        for count in counts(tile, *shape) if suits(tile, rows) else ():
            constants = step, PROGRAM_US, MB_US, PRODUCT_US, BY_ROWS_US
            us[tile, count] = sum(map(mul, terms(tile, count, *shape), constants))
    return min(us, key=us.__getitem__)


def runs(x_NK: Tensor, weight_MK: Tensor, group: int) -> bool:
    """Whether `parts` takes these on this GPU: rows in bfloat16, scales of 128 inputs each, and places that
    the TMA reads from."""
    if not on_hopper(x_NK):
        return False
    kinds = x_NK.dtype == torch.bfloat16 and x_NK.stride(1) == 1 and group == GROUP
    places = x_NK.data_ptr() | x_NK.stride(0) * 2 | weight_MK.data_ptr() | weight_MK.shape[1]
    return kinds and places % ALIGNED == 0


def parts(
    x_NK: Tensor,
    weight_MK: Tensor,
    scale_GM: Tensor,
    tile: Tile | row_gemm.Tile | None = None,
    count: int | None = None,
) -> Tensor:
    """float32 [P, N, M], whose sum over the first is x @ weight.T; see `runs`.

    weight: e4m3; scale: float32, of 128 inputs each; both contiguous. tile, count: None: those of `plan`;
    count alone None: as many parts as keep multiprocessors at work.
    """
    (N, K), M = x_NK.shape, len(weight_MK)
    if tile is None:
        tile, count = plan(N, M, K)
    if isinstance(tile, row_gemm.Tile):
        return row_gemm.parts(x_NK, weight_MK, scale_GM, GROUP, tile)
    tiles = -(-M // tile.outputs), -(-N // tile.rows)
    groups = -(-K // GROUP)
    count = count or min(groups, max(1, row_gemm.PROCESSORS // (tiles[0] * tiles[1])))
    y_PNM = torch.empty(count, N, M, dtype=torch.float32, device=x_NK.device)
    multiply_rows_specialised[(*tiles, count)](
        TensorDescriptor.from_tensor(x_NK, [tile.rows, 64], NVMMASharedLayout(128, 16, 2)),
        TensorDescriptor.from_tensor(weight_MK, [64 * tile.blocks, GROUP], NVMMASharedLayout(128, 8, 2)),
        scale_GM, y_PNM, N, M, count, groups,
        tile.rows, tile.groups, tile.blocks, tile.stages, True, num_warps=4, launch_pdl=True,
    )  # fmt: skip
    return y_PNM
