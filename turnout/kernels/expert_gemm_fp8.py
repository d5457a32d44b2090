"""Grouped GEMM of the experts on Hopper (Gluon) for FP8 in blocks of 128: weights and activations in e4m3.

Tiles, operands and the order of programs are those of expert_gemm.py: weights are the first operand of
`wgmma`, tokens the second. Both are read from shared memory. Every 128 columns have scales of their own, so
the products of a block start from zero and are added to the sum in float32, times a token's scale and a
weight block's. That also keeps the sums of the tensor cores, which carry only 14 bits of FP8 products,
as short as the format's authors mean them to be (DeepSeek-V3 technical report, section 3.3).

Activations are quantised by `quantize_rows`, per token and 128 columns, before each GEMM.

Legend: R sorted rows (token, expert), K inner size, N weight rows, E local experts.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from turnout.kernels.expert_tile import finish, locate, token_rows

GROUP = 128  # columns that share a scale


@triton.jit
def quantize_groups(x):
    """x float32 [., 128] -> e4m3 [., 128], and amax / 448, or 1 where x is zero.

    By reciprocals, so most scales are an ulp off `formats.fp8`'s. Rows in bfloat16 have so many ties that
    this alone takes 0.2 % of their codes to the other neighbour, and a layer 1.5e-2 away from one that is
    emulated by division; both are as far from exact products, 4.2e-2.
    """
    amax = tl.max(tl.abs(x), 1)
    scale = tl.where(amax > 0, amax * (1 / 448), 1.0)
    q = tl.minimum(tl.maximum(x * (1 / scale)[:, None], -448.0), 448.0)
    return q.to(tl.float8e4nv), scale


@triton.jit
def quantize_rows(
    x_ptr, q_ptr, scale_ptr, rows, K, x_stride, GROUPS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """q e4m3 [rows, 128 GROUPS], scale float32 [rows, GROUPS] of x [rows, K]; beyond K there are zeros."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    g = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = (g // GROUPS).to(tl.int64)
    column = (g % GROUPS)[:, None] * 128 + tl.arange(0, 128)[None, :]
    exists = row < rows
    at = x_ptr + row[:, None] * x_stride + column
    q, scale = quantize_groups(tl.load(at, mask=exists[:, None] & (column < K), other=0.0).to(tl.float32))
    tl.store(q_ptr + row[:, None] * (GROUPS * 128) + column, q, mask=exists[:, None])
    tl.store(scale_ptr + row * GROUPS + g % GROUPS, scale, mask=exists)


@triton.jit
def quantize_places(
    x_ptr, place_ptr, q_ptr, scale_ptr, K, x_stride,
    TOP_K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """q e4m3 [P, K], scale float32 [P, K / 128]: x [T, K], a row to every place of its token (sort.py).

    K, a multiple of 128, is at most BLOCK; a program takes a token, and none that has no place.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0)
    last = -1
    for j in tl.static_range(TOP_K):
        last = tl.maximum(last, tl.load(place_ptr + token * TOP_K + j))
    if last >= 0:
        g = tl.arange(0, BLOCK // 128)
        c = g[:, None] * 128 + tl.arange(0, 128)[None, :]
        q, scale = quantize_groups(
            tl.load(x_ptr + token.to(tl.int64) * x_stride + c, mask=c < K, other=0.0).to(tl.float32)
        )
        for j in tl.static_range(TOP_K):
            row = tl.load(place_ptr + token * TOP_K + j).to(tl.int64)
            if row >= 0:
                tl.store(q_ptr + row * K + c, q, mask=c < K)
                tl.store(scale_ptr + row * (K // 128) + g, scale, mask=g < K // 128)


@gluon.jit
def copy_step(
    x_ptr, x_scale_ptr, w_ptr, x, x_scale, w, slot, step, steps, groups, x_offset, x_exists, s_offset,
    s_exists, w_offset, w_exists,
    K_BLOCKS: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Start copying step `step`, K_BLOCKS groups of columns, of one tile of weights and one of tokens."""
    c = gl.arange(0, 128, gl.SliceLayout(0, ROWS))[None, :]
    for j in gl.static_range(K_BLOCKS):
        group = step * K_BLOCKS + j
        live = group < groups
        at = group * 128 + c
        async_copy.async_copy_global_to_shared(
            w.index(slot + j), w_ptr + w_offset[:, None] + at, mask=w_exists[:, None] & live
        )
        async_copy.async_copy_global_to_shared(
            x.index(slot + j), x_ptr + x_offset[:, None] + at, mask=x_exists[:, None] & live
        )
        async_copy.async_copy_global_to_shared(
            x_scale.index(slot + j), x_scale_ptr + s_offset + group, mask=s_exists & live
        )


@gluon.jit
def expert_gemm_fp8(
    x_ptr, x_scale_ptr, w_ptr, w_scale_ptr, bias_ptr, out_ptr, order_ptr, tiles_ptr, weights_ptr,
    K, n_rows, out_columns, groups, x_stride, out_stride, top_k, first_expert, num_experts,
    act_alpha, act_beta, act_limit,
    ACTIVATION: gl.constexpr, GATHER: gl.constexpr, SCATTER: gl.constexpr, DIRECT: gl.constexpr,
    PAIRED: gl.constexpr, BIAS: gl.constexpr, BLOCK_N: gl.constexpr, TOKENS: gl.constexpr,
    K_BLOCKS: gl.constexpr, STAGES: gl.constexpr, TILES_GROUP: gl.constexpr, PDL: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """out[row] = act(w[expert] @ x[row] + bias[expert]), rows sorted by expert; as `expert_gemm` takes them.

    x e4m3 [., K], x_scale float32 [., K / 128]; w e4m3 [E, n_rows, K], w_scale float32 [E, n_rows / 128,
    K / 128]. PAIRED: rows are 8 of gate, 8 of up in turn, while the scale's rows are gate's, then up's.
    """
    ROWS: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [num_warps, 1], [1, 0])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, TOKENS, 32])
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    SINGLES: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
    SLOTS: gl.constexpr = STAGES * K_BLOCKS
    AHEAD: gl.constexpr = STAGES - 2

    if PDL:
        gdc_wait()
    n_tiles = gl.cdiv(n_rows, BLOCK_N)
    expert, n, row, end = locate(
        gl.program_id(0), tiles_ptr, n_tiles, first_expert, num_experts, DIRECT, TILES_GROUP
    )
    if expert < 0:
        return

    x = gl.allocate_shared_memory(gl.float8e4nv, [SLOTS, TOKENS, 128], TILE)
    w = gl.allocate_shared_memory(gl.float8e4nv, [SLOTS, BLOCK_N, 128], TILE)
    x_scale = gl.allocate_shared_memory(gl.float32, [SLOTS, TOKENS], LINE)
    w_row = n * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(1, ROWS))
    w_offset = (expert * n_rows + w_row).to(gl.int64) * K
    w_exists = w_row < n_rows
    x_offset, x_exists = token_rows(order_ptr, row, end, top_k, x_stride, TOKENS, GATHER, DIRECT, ROWS)
    s = row + gl.arange(0, TOKENS, SINGLES)
    s_exists = s < end
    if GATHER:
        if not DIRECT:
            s = gl.load(order_ptr + s, mask=s_exists, other=0)
        s = s // top_k
    s_offset = s.to(gl.int64) * groups
    r = n * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(1, ACC))
    if PAIRED:
        scale_row = (r // 16 * 8) // 128 + gl.where(r % 16 < 8, 0, n_rows // 256)
    else:
        scale_row = r // 128
    w_scale_at = w_scale_ptr + (expert * (n_rows // 128) + scale_row).to(gl.int64) * groups
    r_exists = r < n_rows
    steps = gl.cdiv(groups, K_BLOCKS)

    for i in gl.static_range(AHEAD):
        copy_step(
            x_ptr, x_scale_ptr, w_ptr, x, x_scale, w, i * K_BLOCKS, i, steps, groups, x_offset, x_exists,
            s_offset, s_exists, w_offset, w_exists, K_BLOCKS, ROWS,
        )  # fmt: skip
        async_copy.commit_group()
    if PDL:
        gdc_launch_dependents()

    acc = gl.zeros([BLOCK_N, TOKENS], gl.float32, ACC)
    zero = gl.zeros([BLOCK_N, TOKENS], gl.float32, ACC)
    now = 0
    then = AHEAD
    for step in range(0, steps):
        async_copy.wait_group(AHEAD - 1)
        fence_async_shared()
        gl.thread_barrier()
        copy_step(
            x_ptr, x_scale_ptr, w_ptr, x, x_scale, w, then * K_BLOCKS, step + AHEAD, steps, groups, x_offset,
            x_exists, s_offset, s_exists, w_offset, w_exists, K_BLOCKS, ROWS,
        )  # fmt: skip
        async_copy.commit_group()
        for j in gl.static_range(K_BLOCKS):
            slot = now * K_BLOCKS + j
            group = step * K_BLOCKS + j
            token = warpgroup_mma(
                w.index(slot), x.index(slot).permute((1, 0)), zero, use_acc=False, max_num_imprecise_acc=128,
                is_async=True,
            )  # fmt: skip
            s_w = gl.load(w_scale_at + group, mask=r_exists & (group < groups), other=0.0)
            s_x = x_scale.index(slot).load(gl.SliceLayout(0, ACC))
            products = warpgroup_mma_wait(0, deps=[token])
            acc += products * (s_x[None, :] * s_w[:, None])  # as expert_gemm_fp8_specialised.py: equal bits
        now = gl.where(now == STAGES - 1, 0, now + 1)
        then = gl.where(then == STAGES - 1, 0, then + 1)
    async_copy.wait_group(0)

    finish(
        acc, w_scale_ptr, bias_ptr, out_ptr, order_ptr, weights_ptr, expert, n, n_rows, row, end,
        out_columns, out_stride, act_alpha, act_beta, act_limit, ACTIVATION, SCATTER, DIRECT, BIAS, False,
        BLOCK_N, TOKENS, ACC, num_warps,
    )  # fmt: skip
