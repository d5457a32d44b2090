"""Products of some rows with dense 16-bit weights: one warp loads, groups of four multiply (Gluon, Hopper).

Of up to 128 rows a decode step's products are bound by their weights, but parts as split_gemm.py makes them
are many bytes, and the library's kernels wait for the kernel in front before they load anything. Here a
program has few, long parts, and as many steps of weights as its shared memory holds are on their way before
it waits for the kernel that makes its rows (programmatic dependent launch). All comes by the TMA. What steps
took on an H200 is in docs/notes/serving.md.

Legend: N rows, K inputs, M outputs, P parts.
"""

from __future__ import annotations

from functools import cache
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

from turnout.kernels.common.devices import on_hopper
from turnout.kernels.common.row_gemm import PROCESSORS
from turnout.kernels.hopper.dense_fp8 import ALIGNED, store_sums
from turnout.kernels.hopper.schedule import advance, stage_barriers

STEP = 128  # inputs
LEAST_ROWS, MOST_ROWS = 9, 128
MOST_PARTS = 4  # whoever adds them up reads them all
# For steps that are loaded ahead: of up to SOME rows it leaves room for programs of the kernel in front.
SOME, SHARED_BYTES, MORE_BYTES = 64, 100 * 1024, 200 * 1024
# Steps of a program, which may be more than its share of all by UNEVEN, or few.
UNEVEN, FEW_STEPS = 1.4, 8
REGISTERS = 96  # of a thread: programs of the kernel in front may still hold others


class Tile(NamedTuple):
    """Rows of a program; its groups of four warps, each of which has 64 outputs; steps loaded ahead."""

    rows: int
    groups: int
    stages: int


@gluon.jit
def load_step(x_desc, w_desc, x, w, bar, m, n, k, stage, WEIGHTS: gl.constexpr, ROWS: gl.constexpr):
    """Begin to load a step's WEIGHTS, or its ROWS, or both."""
    for j in gl.static_range(2):
        if WEIGHTS:
            tma.async_copy_global_to_shared(w_desc, [m, k + j * 64], bar, w.index(stage * 2 + j))
        if ROWS:
            tma.async_copy_global_to_shared(x_desc, [n, k + j * 64], bar, x.index(stage * 2 + j))


@gluon.jit
def load_steps(
    given, ROWS: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr
):  # fmt: skip
    """Load 128 inputs of 64 GROUPS weight rows from m on, and of ROWS rows from n on, step by step, as stages
    become empty. One warp."""
    x_desc, w_desc, x, w, full, empty, m, n, first, steps = given
    BYTES: gl.constexpr = 256 * (64 * GROUPS + ROWS)
    ahead = gl.minimum(steps, STAGES)
    for stage in range(0, ahead):
        mbarrier.expect(full.index(stage), BYTES)
        load_step(x_desc, w_desc, x, w, full.index(stage), m, n, first + stage * 128, stage, True, False)
    if PDL:
        gdc_wait()
    for stage in range(0, ahead):
        load_step(x_desc, w_desc, x, w, full.index(stage), m, n, first + stage * 128, stage, False, True)
    stage = 0
    phase = 0
    for step in range(STAGES, steps):
        mbarrier.wait(empty.index(stage), phase)
        mbarrier.expect(full.index(stage), BYTES)
        load_step(x_desc, w_desc, x, w, full.index(stage), m, n, first + step * 128, stage, True, True)
        stage, phase = advance(stage, phase, STAGES)


@gluon.jit
def multiply_steps(given, MINE: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr):
    """Multiply and store 64 of a program's outputs. Four warps."""
    x, w, full, empty, y_ptr, m, n, steps, N, M = given
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    acc = gl.zeros([64, ROWS], gl.float32, ACC)
    stage = 0
    phase = 0
    for _ in range(0, steps):
        mbarrier.wait(full.index(stage), phase)
        for j in gl.static_range(2):
            weights = w.index(stage * 2 + j).slice(MINE * 64, 64, 0)
            rows = x.index(stage * 2 + j).permute((1, 0))
            acc = warpgroup_mma(weights, rows, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        gl.thread_barrier()
        mbarrier.arrive(empty.index(stage), count=1)
        stage, phase = advance(stage, phase, STAGES)
    store_sums(acc, y_ptr, m + MINE * 64, n, N, M)


@gluon.jit(do_not_specialize=["N", "parts", "steps_of_all"])
def multiply_some_rows(
    x_desc, w_desc, y_ptr, N, M, parts, steps_of_all,
    ROWS: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """y[p] float32 [N, M] = x[:, piece p] @ w[:, piece p].T, pieces of `steps_of_all` / `parts` steps.

    x [N, K] in boxes of [ROWS, 64], w [M, K] of [64 GROUPS, 64], both bfloat16. The grid is tiles of 64
    GROUPS outputs, of ROWS rows, and parts.
    """
    if PDL:
        gdc_launch_dependents()
    m = gl.program_id(0) * GROUPS * 64
    n = gl.program_id(1) * ROWS
    part = gl.program_id(2)
    first = part * steps_of_all // parts
    steps = (part + 1) * steps_of_all // parts - first
    BOX: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    x = gl.allocate_shared_memory(gl.bfloat16, [STAGES * 2, ROWS, 64], BOX)
    w = gl.allocate_shared_memory(gl.bfloat16, [STAGES * 2, GROUPS * 64, 64], BOX)
    full, empty = stage_barriers(STAGES, 1, GROUPS)
    y_ptr += part.to(gl.int64) * N * M
    given = (x, w, full, empty, y_ptr, m, n, steps, N, M)
    loaded = (x_desc, w_desc, x, w, full, empty, m, n, first * 128, steps)
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (multiply_steps, (given, 0, ROWS, STAGES)),
                (load_steps, (loaded, ROWS, GROUPS, STAGES, PDL)),
            ],
            [1], [40],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (multiply_steps, (given, 0, ROWS, STAGES)),
                (multiply_steps, (given, 1, ROWS, STAGES)),
                (load_steps, (loaded, ROWS, GROUPS, STAGES, PDL)),
            ],
            [4, 1], [96, 40],
        )  # fmt: skip


@cache
def plan(rows: int, outputs: int, inputs: int) -> tuple[Tile, int] | None:
    """The tile, and the number of parts, by which the busiest multiprocessor reads least weights, where all
    programs run at once; None if there are too many, or multiprocessors would wait for the busiest.

    Parts, and what adds them up, are the same for all rows; tiles for all up to the next power of two."""
    steps, width = -(-inputs // STEP), max(16, 1 << (rows - 1).bit_length())
    memory = SHARED_BYTES if width <= SOME else MORE_BYTES
    found = {}
    for groups in (1, 2):
        tiles = -(-outputs // (64 * groups))
        for parts in range(1, min(MOST_PARTS, steps) + 1):
            if tiles * parts <= PROCESSORS:
                held = min(-(-steps // parts), memory // (2 * STEP * (64 * groups + width)))
                found[Tile(width, groups, held), parts] = groups * -(-steps // parts)
    most = max(FEW_STEPS, UNEVEN * outputs / 64 * steps / PROCESSORS)
    way = min(found, key=found.__getitem__, default=None)
    return way if way and found[way] <= most else None


def runs(x_NK: Tensor, weight_MK: Tensor) -> bool:
    """Whether `parts` takes these on this GPU, and takes less than the library."""
    if not LEAST_ROWS <= len(x_NK) <= MOST_ROWS:  # first what prompts of most sizes end at
        return False
    if not on_hopper(x_NK) or plan(len(x_NK), *weight_MK.shape) is None:
        return False
    kinds = x_NK.dtype == weight_MK.dtype == torch.bfloat16 and x_NK.stride(1) == weight_MK.stride(1) == 1
    places = x_NK.data_ptr() | x_NK.stride(0) * 2 | weight_MK.data_ptr() | weight_MK.stride(0) * 2
    return kinds and places % ALIGNED == 0


def parts(x_NK: Tensor, weight_MK: Tensor, way: tuple[Tile, int] | None = None) -> Tensor:
    """float32 [P, N, M], whose sum over the first is x @ weight.T; see `runs`. way: instead of that of
    `plan`."""
    (N, K), M = x_NK.shape, len(weight_MK)
    chosen = way or plan(N, M, K)
    assert chosen is not None, "see `runs`"
    tile, count = chosen
    box = NVMMASharedLayout(128, 16, 2)
    y_PNM = torch.empty(count, N, M, dtype=torch.float32, device=x_NK.device)
    multiply_some_rows[(-(-M // (64 * tile.groups)), -(-N // tile.rows), count)](
        TensorDescriptor.from_tensor(x_NK, [tile.rows, 64], box),
        TensorDescriptor.from_tensor(weight_MK, [64 * tile.groups, 64], box),
        y_PNM, N, M, count, -(-K // STEP),
        tile.rows, tile.groups, tile.stages, True, num_warps=4, maxnreg=REGISTERS,
        launch_pdl=True,
    )  # fmt: skip
    return y_PNM
