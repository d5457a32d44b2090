"""Grouped GEMM of the experts on Hopper (Gluon): bf16 activations, weights in bf16, MXFP4 or NVFP4.

One program computes BLOCK_N weight rows of one expert for a tile of tokens that chose it. The operands are
swapped: weights are the first operand of `wgmma`, whose 64 rows are always full, and tokens the second,
whose width may be as small as 8. So one token per expert costs no padding, and 4-bit weights, which the
first operand may take from registers, are decoded once for all tokens of a tile.

* Weights lie in fragment order (fragments.py). cp.async brings them to shared memory STAGES - 2 steps ahead;
  every thread reads back 16 bytes, which are its own operand fragments: no shuffles, no second pass.
* Decoding block k + 1 may overlap with the products of block k: `wait(1)` after issuing k + 1 frees the
  registers of k. Waiting for 0 before issuing looks equivalent, but ptxas then moves the wait above the
  decoding and serialises the two. Both measured the same (454 us at 4096 tokens), as if a warp were held
  while its products run. Two blocks at least per turn of the loop, or the next fragments would be decoded
  into registers that a product still reads: wrong results, seen as NaN.
* The 2^126 that decoding owes, and NVFP4's global scale, are one float per expert, applied at the end.
* GEMM1's rows come as 8 of gate and 8 of up, so a thread holds both and the activation costs no exchange.

Measured on an H200 (us, GEMM1 of Qwen3-30B-A3B in MXFP4 at 64, 256 and 4096 tokens): 69, 84, 454; all in
benchmarks/results/expert-gemm-nvidia-h200-2026-11-21.json. Rejected:

* Weights straight from memory to registers, without shared memory: fewer instructions, but too few loads in
  flight, 75 at 64 tokens.
* Eight warps on 256 rows: 77, 111, 512. They decode at the same time and then wait at the same time;
  independent programs on one multiprocessor take turns by themselves.
* Tiles of two widths together (32 + 16, 64 + 32), to waste less of a half-empty tile: 108 at 256 tokens.
* bf16 at 1 to 8 tokens as expert_gemm_few.py multiplies, straight from memory with columns in slices: layers
  took 1.1 to 1.25 times as long, but for one token of Qwen3-30B-A3B (27 us for 29) and of DeepSeek-V3.

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

from turnout.kernels.expert_decode import codes_layout, decode_block, scales_layout
from turnout.kernels.expert_tile import finish, locate, tile_memory, token_rows


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
def copy_weights(
    w_ptr, scales_ptr, w, scales, slot, step, steps, block, blocks_left, k_blocks, offset, exists, K,
    PACKED: gl.constexpr, BLOCKS: gl.constexpr, K_BLOCKS: gl.constexpr, WORDS: gl.constexpr,
    CODES: gl.constexpr, SCALES: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Start copying step `step`, K_BLOCKS columns of blocks, of one tile of weights."""
    if not PACKED:
        copy_rows(w_ptr, w, slot, offset, exists, step, K, step < steps, K_BLOCKS, ROWS)
    else:
        b = gl.arange(0, BLOCKS, gl.SliceLayout(1, CODES))[:, None]
        c = gl.arange(0, 512, gl.SliceLayout(0, CODES))[None, :]
        bs = gl.arange(0, BLOCKS, gl.SliceLayout(1, SCALES))[:, None]
        cs = gl.arange(0, WORDS, gl.SliceLayout(0, SCALES))[None, :]
        for j in gl.static_range(K_BLOCKS):
            k = step * K_BLOCKS + j
            live = k < k_blocks
            codes_at = w_ptr + (b * k_blocks + block + k).to(gl.int64) * 512 + c
            scales_at = scales_ptr + (bs * k_blocks + block + k).to(gl.int64) * WORDS + cs
            async_copy.async_copy_global_to_shared(
                w.index(slot + j), codes_at, mask=live & (b < blocks_left) & (c >= 0)
            )
            async_copy.async_copy_global_to_shared(
                scales.index(slot + j), scales_at, mask=live & (bs < blocks_left) & (cs >= 0)
            )


@gluon.jit
def expert_gemm(
    x_ptr, w_ptr, scales_ptr, alpha_ptr, bias_ptr, out_ptr, order_ptr, tiles_ptr, weights_ptr,
    K, n_rows, out_columns, k_blocks, n_blocks, x_stride, out_stride, top_k, first_expert, num_experts,
    act_alpha, act_beta, act_limit,
    FORMAT: gl.constexpr, ACTIVATION: gl.constexpr, GATHER: gl.constexpr, SCATTER: gl.constexpr,
    DIRECT: gl.constexpr, BIAS: gl.constexpr, BLOCK_N: gl.constexpr, TOKENS: gl.constexpr,
    K_BLOCKS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, PDL: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """out[row] = act(w[expert] @ x[row] * alpha[expert] + bias[expert]), rows sorted by expert.

    x bf16 [., K]; w: codes and scales of Fragments, or bf16 [E, n_rows, K] (scales unused); bias float32
    [E, n_rows]; out bf16 [., out_columns]. GATHER: row r of x is that of token order[r] / top_k. SCATTER: the
    result goes to row order[r], times weights[order[r]]. tiles: see sort.py; DIRECT: see `locate`.
    PDL: launched before the kernel it depends on has ended; GEMM2 then starts with its weights.
    """
    PACKED: gl.constexpr = FORMAT != "bf16"
    NVFP4: gl.constexpr = FORMAT == "nvfp4"
    BLOCKS: gl.constexpr = BLOCK_N // 64
    GROUPS: gl.constexpr = num_warps // 4
    HELD: gl.constexpr = BLOCKS // GROUPS
    WORDS: gl.constexpr = 64 if NVFP4 else 32
    CODES: gl.constexpr = codes_layout(BLOCKS, GROUPS)
    SCALES: gl.constexpr = scales_layout(BLOCKS, GROUPS, WORDS)
    COPY_SCALES: gl.constexpr = gl.BlockedLayout([1, 4], [128 // WORDS, WORDS // 4], [num_warps, 1], [1, 0])
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [num_warps, 1], [1, 0])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, TOKENS, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
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

    x, w, scales = tile_memory(FORMAT, SLOTS, BLOCK_N, TOKENS)
    w_row = n * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(1, ROWS))
    w_offset = (expert * n_rows + w_row).to(gl.int64) * K
    w_exists = w_row < n_rows
    block = (expert * n_blocks + n * BLOCKS) * k_blocks
    blocks_left = n_blocks - n * BLOCKS
    steps = gl.cdiv(k_blocks, K_BLOCKS)

    if WEIGHTS_FIRST:
        for i in gl.static_range(AHEAD):
            copy_weights(
                w_ptr, scales_ptr, w, scales, i * K_BLOCKS, i, steps, block, blocks_left, k_blocks, w_offset,
                w_exists, K, PACKED, BLOCKS, K_BLOCKS, WORDS, CODES, COPY_SCALES, ROWS,
            )  # fmt: skip
        gdc_wait()
    offset, exists = token_rows(order_ptr, row, end, top_k, x_stride, TOKENS, GATHER, DIRECT, ROWS)
    for i in gl.static_range(AHEAD):
        if not WEIGHTS_FIRST:
            copy_weights(
                w_ptr, scales_ptr, w, scales, i * K_BLOCKS, i, steps, block, blocks_left, k_blocks, w_offset,
                w_exists, K, PACKED, BLOCKS, K_BLOCKS, WORDS, CODES, COPY_SCALES, ROWS,
            )  # fmt: skip
        copy_rows(x_ptr, x, i * K_BLOCKS, offset, exists, i, K, i < steps, K_BLOCKS, ROWS)
        async_copy.commit_group()
    if PDL and GATHER:
        gdc_launch_dependents()

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
            copy_weights(
                w_ptr, scales_ptr, w, scales, then * K_BLOCKS, step, steps, block, blocks_left, k_blocks,
                w_offset, w_exists, K, PACKED, BLOCKS, K_BLOCKS, WORDS, CODES, COPY_SCALES, ROWS,
            )  # fmt: skip
            copy_rows(x_ptr, x, then * K_BLOCKS, offset, exists, step, K, step < steps, K_BLOCKS, ROWS)
            async_copy.commit_group()
            for j in gl.static_range(K_BLOCKS):
                slot = now * K_BLOCKS + j
                if PACKED:
                    operand = decode_block(
                        w.index(slot).load(CODES), scales.index(slot).load(SCALES),
                        BLOCKS, HELD, NVFP4, OPERAND,
                    )  # fmt: skip
                else:
                    operand = w.index(slot)
                x_T = x.index(slot).permute((1, 0))
                token = warpgroup_mma(operand, x_T, warpgroup_mma_init(acc), is_async=True)
                acc = warpgroup_mma_wait(1, deps=[token])
            now = gl.where(now == STAGES - 1, 0, now + 1)
            then = gl.where(then == STAGES - 1, 0, then + 1)
    acc = warpgroup_mma_wait(0, deps=[acc])
    async_copy.wait_group(0)

    finish(
        acc, alpha_ptr, bias_ptr, out_ptr, order_ptr, weights_ptr, expert, n, n_rows, row, end, out_columns,
        out_stride, act_alpha, act_beta, act_limit, ACTIVATION, SCATTER, DIRECT, BIAS, PACKED, BLOCK_N,
        TOKENS, ACC, num_warps,
    )  # fmt: skip
