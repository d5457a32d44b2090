"""A product of one row or two with FP8 weights, without tensor cores (Triton).

split_gemm.py decodes each weight, times its scale, to the type of the rows and hands it to tensor cores by
way of shared memory: four instructions a weight and 4 bytes through shared memory, which take about as long
as reading the weight, and not at the same time, since all programs load at once. And it cuts the inner
dimension into up to 16 parts, each of which whoever comes next reads again. Here a thread multiplies the 16
weights that it loaded, in float32, and adds them up before it multiplies the sum by their scale; parts are
fewer, for programs have 16 outputs. Weights of the next step are on their way during each, those of the
first before the program waits for the kernel that makes its rows. Of four rows tensor cores are faster
(benchmarks/results/dense-fp8-few-nvidia-h100-2026-11-27.json); three were not measured.

Legend: N rows, K inputs, M outputs, P parts, G groups of 128 inputs that share a scale.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from turnout.kernels.common.dependent import launches_early
from turnout.kernels.common.row_gemm import PROCESSORS

MOST_ROWS = 2
OUTPUTS = 16  # of a program; with 32 no product took less, at its best number of parts
STEP, GROUP = 512, 128  # inputs of a step, 16 of each thread of a warp; and under one scale
REGISTERS, RESIDENT = 128, 4  # of a thread, few of which spill; programs that a multiprocessor has room for
BYTES_PER_US, ROUND_US = 4.2e6, 0.3  # of an H200


@triton.jit
def load_step(w_at, scale_at, held, OUTPUTS: tl.constexpr, SCALED: tl.constexpr):
    """Weights [OUTPUTS, 512] of a step, and their scales [OUTPUTS, 4]."""
    w = tl.load(w_at, mask=held, other=0.0)
    if SCALED:
        scale = tl.load(scale_at, mask=held, other=0.0)
    else:
        scale = tl.full([OUTPUTS, 4], 1.0, tl.float32)
    return w, scale


@triton.jit
def load_row(x_ptr, n, N, stride, c, held):
    """x[n] at c in float32, 0 where there is no such row."""
    return tl.load(x_ptr + n * stride + c, mask=held & (n < N), other=0.0).to(tl.float32)


@triton.jit
def thread_sums(w, scale, x, OUTPUTS: tl.constexpr):
    """[OUTPUTS, 4, 8]: of 16 products each, times their scale; w and x in float32."""
    products = tl.reshape(w * x[None, :], [OUTPUTS, 4, 8, 16])
    return tl.sum(products, 3) * scale[:, :, None]


@triton.jit
def store_row(acc, y_ptr, n, N, y_stride, m, held):
    tl.store(y_ptr + n * y_stride + m, tl.sum(tl.sum(acc, 2), 1), mask=held & (n < N))


@triton.jit
def multiply_tile(
    x_ptr, w_ptr, scale_ptr, y_ptr, N, M, K, m, first, x_stride, y_stride, steps,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, SCALED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y [N, M] at outputs m [OUTPUTS] = x @ w[m].T over `steps` x 512 inputs from `first` on. SCALED: w has
    scales [G, M]."""
    c = first + tl.arange(0, 512)
    w_at = w_ptr + m.to(tl.int64)[:, None] * K + c[None, :]
    groups = first // 128 + tl.arange(0, 4)
    scale_at = scale_ptr + groups.to(tl.int64)[None, :] * M + m[:, None]
    held = (m < M)[:, None]
    w_next, scale_next = load_step(w_at, scale_at, held, OUTPUTS, SCALED)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    known = c >= 0
    next0 = load_row(x_ptr, 0, N, x_stride, c, known)
    acc0 = tl.zeros([OUTPUTS, 4, 8], tl.float32)
    next1 = next0
    acc1 = acc0
    if ROWS > 1:
        next1 = load_row(x_ptr, 1, N, x_stride, c, known)
    for step in range(0, steps):
        more = step + 1 < steps
        w = w_next.to(tl.float32)
        scale = scale_next
        x0 = next0
        x1 = next1
        w_at += 512
        scale_at += 4 * M
        c += 512
        w_next, scale_next = load_step(w_at, scale_at, held & more, OUTPUTS, SCALED)
        next0 = load_row(x_ptr, 0, N, x_stride, c, known & more)
        acc0 += thread_sums(w, scale, x0, OUTPUTS)
        if ROWS > 1:
            next1 = load_row(x_ptr, 1, N, x_stride, c, known & more)
            acc1 += thread_sums(w, scale, x1, OUTPUTS)
    store_row(acc0, y_ptr, 0, N, y_stride, m, m < M)
    if ROWS > 1:
        store_row(acc1, y_ptr, 1, N, y_stride, m, m < M)


@triton.jit(do_not_specialize=["N", "more", "steps"])
def multiply_few_rows(
    x_ptr, w_ptr, scale_ptr, more_ptr, y_ptr, N, M, more, K, x_stride, steps,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, MORE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y[p] float32 [N, M + more] = x[:, piece p] @ w[:, piece p].T, pieces of `steps` x 512 inputs.

    x [N, K] of ROWS, 1 or 2; w e4m3 [M, K], with scales float32 [G, M], and behind it, if
    MORE, that many rows [more, K] that are not e4m3. The grid is tiles of OUTPUTS outputs of either, and
    pieces.
    """
    part = tl.program_id(1)
    tile = tl.program_id(0)
    i = tl.arange(0, OUTPUTS)
    first = part * steps * 512
    width = M + more
    y_ptr += part.to(tl.int64) * N * width
    if MORE:
        tiles = tl.cdiv(M, OUTPUTS)
        if tile < tiles:
            multiply_tile(
                x_ptr, w_ptr, scale_ptr, y_ptr, N, M, K, tile * OUTPUTS + i, first, x_stride, width, steps,
                ROWS, OUTPUTS, True, PDL,
            )  # fmt: skip
        else:
            multiply_tile(
                x_ptr, more_ptr, scale_ptr, y_ptr + M, N, more, K, (tile - tiles) * OUTPUTS + i, first,
                x_stride, width, steps, ROWS, OUTPUTS, False, PDL,
            )  # fmt: skip
    else:
        multiply_tile(
            x_ptr, w_ptr, scale_ptr, y_ptr, N, M, K, tile * OUTPUTS + i, first, x_stride, width, steps,
            ROWS, OUTPUTS, True, PDL,
        )  # fmt: skip


def counts(outputs: int, inputs: int) -> list[int]:
    """Numbers of parts of whole steps, but for those of far more programs than a GPU holds."""
    steps, most = inputs // STEP, 4 * PROCESSORS * RESIDENT
    found = [count for count in range(1, steps + 1) if steps % count == 0]
    return [count for count in found if count == 1 or -(-outputs // OUTPUTS) * count <= most]


def expected_us(count: int, outputs: int, inputs: int) -> float:
    """What so many parts should take on an H200, counted and not measured: rounds of resident programs at the
    rate of a copy, the beginning of each, and parts that are written and read."""
    rounds = -(-(-(-outputs // OUTPUTS) * count) // (PROCESSORS * RESIDENT))
    read = rounds * RESIDENT * OUTPUTS * (inputs // count)
    return read / BYTES_PER_US * PROCESSORS + ROUND_US * rounds + count * outputs * 8 / BYTES_PER_US


@cache
def part_count(outputs: int, inputs: int) -> int:
    """The one that should take least."""
    return min(counts(outputs, inputs), key=lambda count: expected_us(count, outputs, inputs))


def runs(x_NK: Tensor, weight_MK: Tensor, group: int) -> bool:
    """Whether `parts` takes these: one row or two, e4m3 weights with scales of 128 inputs each, and whole
    steps of inputs."""
    kinds = weight_MK.dtype == torch.float8_e4m3fn and group == GROUP and weight_MK.is_contiguous()
    return kinds and 0 < len(x_NK) <= MOST_ROWS and x_NK.shape[1] % STEP == 0 and x_NK.stride(1) == 1


def parts(
    x_NK: Tensor,
    weight_MK: Tensor,
    scale_GM: Tensor,
    count: int | None = None,
    more_RK: Tensor | None = None,
) -> Tensor:
    """float32 [P, N, M], whose sum over P is x @ weight.T; see `runs`. scale: float32, contiguous. count: of
    parts; None: what `part_count` says. more: contiguous, of x's type, whose products follow: [P, N, M + R].
    """
    (N, K), M = x_NK.shape, len(weight_MK)
    count = count or part_count(M, K)
    more = 0 if more_RK is None else len(more_RK)
    y_PNM = torch.empty(count, N, M + more, dtype=torch.float32, device=x_NK.device)
    early = launches_early(x_NK.device)
    multiply_few_rows[(-(-M // OUTPUTS) + -(-more // OUTPUTS), count)](
        x_NK, weight_MK, scale_GM, x_NK if more_RK is None else more_RK, y_PNM,
        N, M, more, K, x_NK.stride(0), K // STEP // count,
        N, OUTPUTS, more > 0, early, num_warps=4, num_stages=1, launch_pdl=early, maxnreg=REGISTERS,
    )  # fmt: skip
    return y_PNM
