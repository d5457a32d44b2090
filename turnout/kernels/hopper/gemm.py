"""Grouped GEMM of the experts on Hopper (Gluon), in bf16.

One program computes BLOCK_N weight rows of one expert for a tile of tokens that chose it. The operands are
swapped: weights are the first operand of `wgmma`, whose 64 rows are always full, and tokens the second,
whose width may be as small as 8. So one token per expert costs no padding. cp.async brings both to shared
memory STAGES - 2 steps ahead. 4-bit weights take the same tiles (gemm_packed.py).

* GEMM1's rows come as 8 of gate and 8 of up, so a thread holds both and the activation costs no exchange.
* Rejected: 1 to 8 tokens as gemm_few.py multiplies, straight from memory with columns in slices.
  Layers took 1.1 to 1.25 times as long on an H200, but for one token of Qwen3-30B-A3B (27 us for 29) and of
  DeepSeek-V3.

Legend: R sorted rows (token, expert), K inner size, N weight rows, E local experts.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from turnout.kernels.hopper.tile import finish, locate, tile_memory, token_rows


@gluon.jit
def copy_rows(ptr, tiles, slot, offset, exists, step, K, live, K_BLOCKS: gl.constexpr, ROWS: gl.constexpr):
    """Start copying columns of step `step` of rows of a row-major bf16 matrix; what is beyond K is zero."""
    c = gl.arange(0, 64, gl.SliceLayout(0, ROWS))[None, :]
    for j in gl.static_range(K_BLOCKS):
        k = (step * K_BLOCKS + j) * 64 + c
        async_copy.async_copy_global_to_shared(
            tiles.index(slot + j), ptr + offset[:, None] + k, mask=exists[:, None] & (k < K) & live
        )


@gluon.jit
def multiply_steps(
    w_ptr, x_ptr, w, x, w_offset, w_exists, offset, exists, steps, K,
    AHEAD: gl.constexpr, K_BLOCKS: gl.constexpr, ROWS: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """The sums [weight rows, tokens] of a tile, step after step; copies go on, AHEAD of the products."""
    STAGES: gl.constexpr = AHEAD + 2
    BLOCK_N: gl.constexpr = w.shape[1]
    TOKENS: gl.constexpr = x.shape[1]
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, TOKENS, 16])
    acc = gl.zeros([BLOCK_N, TOKENS], gl.float32, ACC)
    now = 0
    then = AHEAD
    UNROLL: gl.constexpr = 2 if K_BLOCKS == 1 else 1
    for turn in range(0, steps, UNROLL):
        for u in gl.static_range(UNROLL):
            step = turn + u + AHEAD
            async_copy.wait_group(AHEAD - 1)
            fence_async_shared()
            gl.thread_barrier()
            copy_rows(w_ptr, w, then * K_BLOCKS, w_offset, w_exists, step, K, step < steps, K_BLOCKS, ROWS)
            copy_rows(x_ptr, x, then * K_BLOCKS, offset, exists, step, K, step < steps, K_BLOCKS, ROWS)
            async_copy.commit_group()
            for j in gl.static_range(K_BLOCKS):
                slot = now * K_BLOCKS + j
                x_T = x.index(slot).permute((1, 0))
                token = warpgroup_mma(w.index(slot), x_T, warpgroup_mma_init(acc), is_async=True)
                acc = warpgroup_mma_wait(1, deps=[token])
            now = gl.where(now == STAGES - 1, 0, now + 1)
            then = gl.where(then == STAGES - 1, 0, then + 1)
    acc = warpgroup_mma_wait(0, deps=[acc])
    async_copy.wait_group(0)
    return acc


@gluon.jit
def expert_gemm(
    x_ptr, w_ptr, bias_ptr, out_ptr, order_ptr, tiles_ptr, weights_ptr,
    K, n_rows, out_columns, k_blocks, n_blocks, x_stride, out_stride, top_k, first_expert, num_experts,
    act_alpha, act_beta, act_limit,
    ACTIVATION: gl.constexpr, GATHER: gl.constexpr, SCATTER: gl.constexpr, DIRECT: gl.constexpr,
    BIAS: gl.constexpr, BLOCK_N: gl.constexpr, TOKENS: gl.constexpr, K_BLOCKS: gl.constexpr,
    STAGES: gl.constexpr, GROUP: gl.constexpr, PDL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """out[row] = act(w[expert] @ x[row] + bias[expert]), rows sorted by expert.

    x bf16 [., K]; w bf16 [E, n_rows, K]; bias float32 [E, n_rows]; out bf16 [., out_columns]. GATHER: row r
    of x is that of token order[r] / top_k. SCATTER: the result goes to row order[r], times
    weights[order[r]]. tiles: see sort.py; DIRECT: see `locate`. PDL: launched before the kernel it depends on
    has ended; GEMM2 then starts with its weights.
    """
    BLOCKS: gl.constexpr = BLOCK_N // 64
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [num_warps, 1], [1, 0])
    SLOTS: gl.constexpr = STAGES * K_BLOCKS
    AHEAD: gl.constexpr = STAGES - 2
    WEIGHTS_FIRST: gl.constexpr = PDL and not GATHER

    if PDL and GATHER:
        gdc_wait()
    n_tiles = gl.cdiv(n_blocks, BLOCKS)
    expert, n, row, end = locate(
        gl.program_id(0), tiles_ptr, n_tiles, first_expert, num_experts, DIRECT, GROUP
    )
    if expert < 0:
        return
    if WEIGHTS_FIRST:
        gdc_launch_dependents()

    x, w, _ = tile_memory("bf16", SLOTS, BLOCK_N, TOKENS)
    w_row = n * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(1, ROWS))
    w_offset = (expert * n_rows + w_row).to(gl.int64) * K
    w_exists = w_row < n_rows
    steps = gl.cdiv(k_blocks, K_BLOCKS)

    if WEIGHTS_FIRST:
        for i in gl.static_range(AHEAD):
            copy_rows(w_ptr, w, i * K_BLOCKS, w_offset, w_exists, i, K, i < steps, K_BLOCKS, ROWS)
        gdc_wait()
    offset, exists = token_rows(order_ptr, row, end, top_k, x_stride, TOKENS, GATHER, DIRECT, ROWS)
    for i in gl.static_range(AHEAD):
        if not WEIGHTS_FIRST:
            copy_rows(w_ptr, w, i * K_BLOCKS, w_offset, w_exists, i, K, i < steps, K_BLOCKS, ROWS)
        copy_rows(x_ptr, x, i * K_BLOCKS, offset, exists, i, K, i < steps, K_BLOCKS, ROWS)
        async_copy.commit_group()
    if PDL and GATHER:
        gdc_launch_dependents()

    acc = multiply_steps(
        w_ptr, x_ptr, w, x, w_offset, w_exists, offset, exists, steps, K, AHEAD, K_BLOCKS, ROWS, num_warps
    )
    ACC: gl.constexpr = acc.type.layout
    finish(
        acc, bias_ptr, bias_ptr, out_ptr, order_ptr, weights_ptr, expert, n, n_rows, row, end, out_columns,
        out_stride, act_alpha, act_beta, act_limit, ACTIVATION, SCATTER, DIRECT, BIAS, False, BLOCK_N,
        TOKENS, ACC, num_warps,
    )  # fmt: skip
