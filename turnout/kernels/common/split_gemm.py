"""A product of few rows, left in parts for whoever comes next to add up (Triton).

The dense products of a decode step read a matrix once and do nothing else: of Qwen3-30B's layer 21 MB, 17 MB
and 0.5 MB, 9 us in all at the rate of a copy. A program takes 64 outputs over a piece of the inner
dimension, loads its weights whole before it waits for the kernel that makes its rows (programmatic dependent
launch), and so streams them while that still runs. The pieces' results are float32 and are not added here:
norms, rotations and the choice of experts follow every such product, and add them as they read (rows.py,
route.py), which costs neither a launch nor atomics, so that the order of sums is fixed.

Legend: N rows, K inputs, M outputs, P parts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from turnout.kernels.common.dependent import launches_early
from turnout.kernels.common.fp8_weights import scaled

OUTPUTS = 64  # of a program: the rows of a tensor-core instruction
NARROW = 256  # outputs, of which even 64 rows make few parts
WIDTHS = (16, 32, 64)
COLUMNS = (256, 128)  # of a step, the only one of its part or one of several; 256 where the last is shorter
PROGRAMS = 512  # that keep an H200 loading weights
EXACT_OUTPUTS, EXACT_ROWS = 16, 32  # of a program, and of a product, in float32
ROW_OUTPUTS, ROW_INPUTS, ROW_WARPS = 8, 4096, 8  # of a program that has whole rows of weights
ROW_PROGRAMS = 264  # that an H200 holds at once: two a multiprocessor
ALIGNED = 16  # inputs, so that rows of weights begin where vector loads can


@triton.jit(do_not_specialize=["N"])
def multiply_part(
    x_ptr, w_ptr, scale_ptr, bias_ptr, y_ptr, N, M, K, x_stride, w_stride,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr, STEPS: tl.constexpr,
    SHORT: tl.constexpr, BIAS: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y[p] float32 [N, M] = x[:, piece p] @ w[:, piece p].T, pieces of STEPS x COLUMNS inputs.

    SHORT: the last piece has fewer; STEPS is 1. BIAS: y[0] has bias [M] in it. GROUP: w is e4m3, and has
    scales [G, M] for as many inputs each; 0: it is of x's type.
    """
    part = tl.program_id(1)
    m = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    n = tl.arange(0, ROWS)
    first = part * STEPS * COLUMNS
    c = first + tl.arange(0, COLUMNS)
    w_at = w_ptr + m.to(tl.int64)[:, None] * w_stride + c[None, :]
    kind: tl.constexpr = x_ptr.dtype.element_ty
    if SHORT:
        w = tl.load(w_at, mask=(m[:, None] < M) & (c[None, :] < K), other=0.0)
    else:
        w = tl.load(w_at, mask=m[:, None] < M, other=0.0)
    if GROUP:
        w = scaled(w, scale_ptr, m, first, M, K, M, GROUP, OUTPUTS, COLUMNS, kind)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x_at = x_ptr + n.to(tl.int64)[None, :] * x_stride + c[:, None]
    if SHORT:
        x = tl.load(x_at, mask=(n[None, :] < N) & (c[:, None] < K), other=0.0)
    else:
        x = tl.load(x_at, mask=n[None, :] < N, other=0.0)
    acc = tl.dot(w, x, input_precision="ieee")
    for step in range(1, STEPS):
        w = tl.load(w_at + step * COLUMNS, mask=m[:, None] < M, other=0.0)
        if GROUP:
            w = scaled(w, scale_ptr, m, first + step * COLUMNS, M, K, M, GROUP, OUTPUTS, COLUMNS, kind)
        x = tl.load(x_at + step * COLUMNS, mask=n[None, :] < N, other=0.0)
        acc = tl.dot(w, x, acc, input_precision="ieee")
    if BIAS:
        acc += tl.load(bias_ptr + m, mask=(m < M) & (part == 0), other=0.0).to(tl.float32)[:, None]
    y_at = y_ptr + (part.to(tl.int64) * N + n[None, :]) * M + m[:, None]
    tl.store(y_at, acc, mask=(m[:, None] < M) & (n[None, :] < N))


@triton.jit
def multiply_row(
    x_ptr, w_ptr, bias_ptr, y_ptr, w_stride,
    OUTPUTS: tl.constexpr, K: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y float32 [M] = x [K] @ w.T + bias: a program has OUTPUTS whole rows of weights, a divisor of M."""
    m = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    c = tl.arange(0, K)
    w = tl.load(w_ptr + m[:, None] * w_stride + c[None, :])
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(x_ptr + c).to(tl.float32)
    y = tl.sum(w.to(tl.float32) * x[None, :], 1)
    if BIAS:
        y += tl.load(bias_ptr + m).to(tl.float32)
    tl.store(y_ptr + m, y)


@triton.jit(do_not_specialize=["N"])
def multiply_exactly(
    x_ptr, w_ptr, y_ptr, N, M, K, x_stride, w_stride,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As `multiply_part`, with a float32 w and in float32: pieces of COLUMNS inputs, ROWS of a program."""
    part = tl.program_id(1)
    m = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    c = part * COLUMNS + tl.arange(0, COLUMNS)
    held = (m[:, None] < M) & (c[None, :] < K)
    w = tl.load(w_ptr + m.to(tl.int64)[:, None] * w_stride + c[None, :], mask=held, other=0.0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    for i in tl.static_range(ROWS):
        n = tl.program_id(2) * ROWS + i
        x = tl.load(x_ptr + n.to(tl.int64) * x_stride + c, mask=(c < K) & (n < N), other=0.0)
        y = tl.sum(w * x.to(tl.float32)[None, :], 1)
        tl.store(y_ptr + (part.to(tl.int64) * N + n) * M + m, y, mask=(m < M) & (n < N))


def pieces(rows: int, outputs: int, inner: int) -> tuple[int, int]:
    """(inputs of a step, steps of a part) of a product of so many rows; (0, 0): it is none of ours.

    Parts are as few as leave PROGRAMS: whoever adds them up reads them all.
    """
    most = WIDTHS[-1] if outputs <= NARROW else WIDTHS[-2]
    if not 0 < rows <= most or inner < COLUMNS[0] or inner % ALIGNED:
        return 0, 0
    width = next((c for c in COLUMNS if inner % c == 0), 0)
    if not width:
        return COLUMNS[0], 1
    tiles, count = -(-outputs // OUTPUTS), inner // width
    enough = [s for s in range(2, count + 1) if count % s == 0 and tiles * count // s >= PROGRAMS]
    # Steps after the first wait in shared memory, where narrow ones leave room for more programs.
    return (COLUMNS[-1], max(enough) * width // COLUMNS[-1]) if enough else (width, 1)


def whole_rows(outputs: int, inner: int) -> bool:
    """Whether programs of one row's product have whole rows of weights, so that nothing need be added up.

    Of Qwen3-30B's layer, one request on an H200, 4,096 by 2,048 and the router's 2,048 by 128 so took 0.1 ms
    less a step; 2,048 by 5,120, more programs than fit at once, 35 us more.
    """
    whole = not outputs % ROW_OUTPUTS and not inner & (inner - 1)
    return whole and outputs <= ROW_PROGRAMS * ROW_OUTPUTS and COLUMNS[0] <= inner <= ROW_INPUTS


def parts(
    x_NK: Tensor,
    weight_MK: Tensor,
    bias_M: Tensor | None = None,
    *,
    scale_GM: Tensor | None = None,
    group: int = 0,
) -> Tensor | None:
    """float32 [P, N, M], whose sum over P is x @ weight.T + bias; None where another kernel does better.

    All of one 16-bit type, but for a weight that is e4m3 with contiguous scales for groups of as many
    columns, or float32 and without a bias; None for other types. Inner dimensions are contiguous.
    """
    if weight_MK.dtype == torch.float32 and bias_M is None:
        return _exact_parts(x_NK, weight_MK)
    (N, K), M = x_NK.shape, len(weight_MK)
    width, steps = pieces(N, M, K)
    if not steps or x_NK.dtype not in (torch.bfloat16, torch.float16):
        return None
    if not group and weight_MK.dtype != x_NK.dtype:  # a float32 router with a bias
        return None
    early = launches_early(x_NK.device)
    if N == 1 and not group and whole_rows(M, K):
        y_PNM = torch.empty(1, 1, M, dtype=torch.float32, device=x_NK.device)
        multiply_row[(M // ROW_OUTPUTS,)](
            x_NK, weight_MK, weight_MK if bias_M is None else bias_M, y_PNM, weight_MK.stride(0),
            ROW_OUTPUTS, K, bias_M is not None, early, num_warps=ROW_WARPS, launch_pdl=early,
        )  # fmt: skip
        return y_PNM
    count = -(-K // (width * steps))
    y_PNM = torch.empty(count, N, M, dtype=torch.float32, device=x_NK.device)
    multiply_part[(-(-M // OUTPUTS), count)](
        x_NK, weight_MK, weight_MK if scale_GM is None else scale_GM,
        weight_MK if bias_M is None else bias_M, y_PNM,
        N, M, K, x_NK.stride(0), weight_MK.stride(0),
        next(w for w in WIDTHS if w >= N), OUTPUTS, width, steps, K % width != 0, bias_M is not None, group,
        early, num_warps=4, launch_pdl=early,
    )  # fmt: skip
    return y_PNM


def _exact_parts(x_NK: Tensor, weight_MK: Tensor) -> Tensor | None:
    (N, K), M = x_NK.shape, len(weight_MK)
    if not 0 < N <= EXACT_ROWS:
        return None
    count, rows, early = -(-K // COLUMNS[0]), 1 if N == 1 else 4, launches_early(x_NK.device)
    y_PNM = torch.empty(count, N, M, dtype=torch.float32, device=x_NK.device)
    multiply_exactly[(-(-M // EXACT_OUTPUTS), count, -(-N // rows))](
        x_NK, weight_MK, y_PNM, N, M, K, x_NK.stride(0), weight_MK.stride(0),
        rows, EXACT_OUTPUTS, COLUMNS[0], early, num_warps=4, launch_pdl=early,
    )  # fmt: skip
    return y_PNM
