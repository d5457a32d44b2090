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


@gluon.jit
def decode_codes(word, scale, scale_below):
    """Eight e2m1 codes and the scales of their two rows -> A, B, C, D of fragments.py, two bf16 each."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 t, u, a;
        and.b32 a, $8, 0x81C081C0;
        mul.bf16x2 a, a, $9;
        mov.b32 {$0, $1}, a;
        shl.b32 t, $8, 6;
        and.b32 a, t, 0x81C081C0;
        mul.bf16x2 a, a, $10;
        mov.b32 {$2, $3}, a;
        shf.l.wrap.b32 t, $8, $8, 10;
        and.b32 a, t, 0x81C081C0;
        mul.bf16x2 a, a, $9;
        mov.b32 {$4, $5}, a;
        shr.u32 u, $8, 4;
        and.b32 u, u, 0x00400040;
        shl.b32 t, $8, 4;
        lop3.b32 a, t, 0x81808180, u, 0xEA;
        mul.bf16x2 a, a, $10;
        mov.b32 {$6, $7}, a;
        }
        """,
        "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r",
        [word, scale, scale_below],
        dtype=(gl.bfloat16,) * 8,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def decode_scales(word, NVFP4: gl.constexpr):
    """Four scale bytes -> four words that hold each scale twice, in bf16 with the factor 2^126."""
    TO_BF16: gl.constexpr = "16, 0x75807580" if NVFP4 else "128, 0"
    return gl.inline_asm_elementwise(
        f"""
        {{
        .reg .b32 t, u;
        .reg .b16 a, b, c, d;
        prmt.b32 t, $4, 0, 0x4240;
        prmt.b32 u, $4, 0, 0x4341;
        mad.lo.u32 t, t, {TO_BF16};
        mad.lo.u32 u, u, {TO_BF16};
        mov.b32 {{a, c}}, t;
        mov.b32 {{b, d}}, u;
        mov.b32 $0, {{a, a}};
        mov.b32 $1, {{b, b}};
        mov.b32 $2, {{c, c}};
        mov.b32 $3, {{d, d}};
        }}
        """,
        "=r,=r,=r,=r,r",
        [word],
        dtype=(gl.int32,) * 4,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def decode_block(
    codes, scales, BLOCKS: gl.constexpr, HELD: gl.constexpr, NVFP4: gl.constexpr, OPERAND: gl.constexpr
):
    """codes int32 [BLOCKS, 512], scales int32 [BLOCKS, 32 or 64] -> bf16 [64 * BLOCKS, 64] as OPERAND.

    Every step is a renaming of registers. HELD of the BLOCKS lie in one thread's registers.
    """
    AXES: gl.constexpr = gl.BlockedLayout(
        [1, 1, 1, 1, 2, 2], [1, 1, 8, 4, 1, 1], [BLOCKS // HELD, 4, 1, 1, 1, 1], [5, 4, 3, 2, 1, 0]
    )
    SHAPE: gl.constexpr = [BLOCKS, 4, 8, 4, 2, 2]  # block, warp, lane / 4, lane % 4, column / 32, column / 16
    PER: gl.constexpr = 2 if NVFP4 else 1
    upper0, upper1, lower0, lower1 = decode_scales(scales, NVFP4)
    upper = gl.join(upper0, upper1).reshape([BLOCKS, 4, 8, 1, 2, PER])
    lower = gl.join(lower0, lower1).reshape([BLOCKS, 4, 8, 1, 2, PER])
    upper = gl.convert_layout(upper, AXES).broadcast_to(SHAPE)
    lower = gl.convert_layout(lower, AXES).broadcast_to(SHAPE)
    word = gl.convert_layout(codes.reshape(SHAPE), AXES)
    a0, a1, b0, b1, c0, c1, d0, d1 = decode_codes(word, upper, lower)
    left = gl.join(gl.join(a0, a1), gl.join(b0, b1))  # ..., odd, lower
    right = gl.join(gl.join(c0, c1), gl.join(d0, d1))
    w = gl.join(left, right)  # block 0, warp 1, lane / 4 2, lane % 4 3, step 4 5, odd 6, lower 7, right 8
    w = w.permute([0, 1, 7, 2, 4, 5, 8, 3, 6]).reshape([BLOCKS * 64, 64])
    return gl.convert_layout(w, OPERAND, assert_trivial=True)


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
def token_rows(
    order_ptr, row, end, top_k, x_stride, TOKENS: gl.constexpr, GATHER: gl.constexpr, DIRECT: gl.constexpr,
    ROWS: gl.constexpr,
):  # fmt: skip
    """Where TOKENS rows of x begin, from sorted row `row` on, and which of them exist."""
    r = row + gl.arange(0, TOKENS, gl.SliceLayout(1, ROWS))
    exists = r < end
    if GATHER:
        if not DIRECT:
            r = gl.load(order_ptr + r, mask=exists, other=0)
        r = r // top_k
    return r.to(gl.int64) * x_stride, exists


@gluon.jit
def locate(program, tiles_ptr, n_tiles, first_expert, num_experts, DIRECT: gl.constexpr, GROUP: gl.constexpr):
    """This program's expert (-1: nothing to do), tile of weight rows, first sorted row and the end of them.

    DIRECT: without sorting, every (token, expert) pair is a tile of one row; `tiles_ptr` are the expert ids.
    Otherwise GROUP tiles of tokens take turns with the same weights, for the sake of the L2 cache.
    """
    if DIRECT:
        tile = program // n_tiles
        n = program % n_tiles
        expert = gl.load(tiles_ptr + tile) - first_expert
        expert = gl.where((expert < 0) | (expert >= num_experts), -1, expert)
        row = tile
        end = tile + 1
    else:
        num_tiles = gl.load(tiles_ptr)
        group = program // (n_tiles * GROUP)
        size = gl.maximum(gl.minimum(num_tiles - group * GROUP, GROUP), 1)
        rest = program - group * n_tiles * GROUP
        live = (group * GROUP < num_tiles) & (rest < size * n_tiles)
        tile = gl.where(live, group * GROUP + rest % size, 0)
        n = rest // size
        expert = gl.where(live, gl.load(tiles_ptr + 4 + tile * 4), -1)
        row = gl.load(tiles_ptr + 5 + tile * 4)
        end = gl.load(tiles_ptr + 6 + tile * 4)
    return expert, n, row, end


@gluon.jit
def finish(
    acc, alpha_ptr, bias_ptr, out_ptr, order_ptr, weights_ptr, expert, n, n_rows, row, end, out_columns,
    out_stride,
    act_alpha, act_beta, act_limit,
    ACTIVATION: gl.constexpr, SCATTER: gl.constexpr, DIRECT: gl.constexpr, BIAS: gl.constexpr, ALPHA:
    gl.constexpr,
    BLOCK_N: gl.constexpr, TOKENS: gl.constexpr, ACC: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Scale, bias, activation; SCATTER: routing weight, and the row of the pair instead of the sorted row."""
    y = acc
    if ALPHA:
        y = y * gl.load(alpha_ptr + expert)
    if BIAS:
        at = n * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(1, ACC))
        y += gl.load(bias_ptr + expert * n_rows + at, mask=at < n_rows, other=0.0)[:, None]
    COLUMNS: gl.constexpr = BLOCK_N if ACTIVATION == "none" or ACTIVATION == "relu2" else BLOCK_N // 2
    if ACTIVATION == "relu2":
        y = gl.maximum(y, 0.0)
        y = y * y
    elif ACTIVATION != "none":
        gate, up = gl.split(y.reshape([BLOCK_N // 16, 2, 8, TOKENS]).permute([0, 2, 3, 1]))
        if ACTIVATION == "swiglu":
            gate = gl.minimum(gate, act_limit)
            up = gl.minimum(gl.maximum(up, -act_limit), act_limit) + act_beta
            y = gate / (1.0 + gl.exp(-act_alpha * gate)) * up
        else:
            y = gate / (1.0 + gl.exp(-gate)) * up
        y = y.reshape([COLUMNS, TOKENS])
    STORE: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, num_warps], [0, 1])
    y = gl.convert_layout(y, STORE)
    r = row + gl.arange(0, TOKENS, gl.SliceLayout(0, STORE))
    c = n * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(1, STORE))
    exists = r < end
    if SCATTER:
        if not DIRECT:
            r = gl.load(order_ptr + r, mask=exists, other=0)
        y = y * gl.load(weights_ptr + r, mask=exists, other=0.0)[None, :]
    at = out_ptr + r.to(gl.int64)[None, :] * out_stride + c[:, None]
    gl.store(at, y.to(gl.bfloat16), mask=exists[None, :] & (c[:, None] < out_columns))


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
    # `wgmma` deals 64-row blocks to the warp groups in turn.
    held: gl.constexpr = [] if HELD == 1 else ([[GROUPS, 0]] if HELD == 2 else [[GROUPS, 0], [2 * GROUPS, 0]])
    apart: gl.constexpr = [] if GROUPS == 1 else [[1, 0]]
    CODES: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2]] + held,
        [[0, 4], [0, 8], [0, 16], [0, 32], [0, 64]],
        [[0, 128], [0, 256]] + apart, [], [BLOCKS, 512],
    )  # fmt: skip
    SCALES: gl.constexpr = gl.DistributedLinearLayout(
        ([[0, 1]] if NVFP4 else []) + held,
        [[0, 0], [0, 0], [0, WORDS // 32], [0, WORDS // 16], [0, WORDS // 8]],
        [[0, WORDS // 4], [0, WORDS // 2]] + apart, [], [BLOCKS, WORDS],
    )  # fmt: skip
    COPY_SCALES: gl.constexpr = gl.BlockedLayout([1, 4], [128 // WORDS, WORDS // 4], [num_warps, 1], [1, 0])
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [num_warps, 1], [1, 0])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, TOKENS, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    LINEAR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
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

    x = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, TOKENS, 64], TILE)
    if PACKED:
        w = gl.allocate_shared_memory(gl.int32, [SLOTS, BLOCKS, 512], LINEAR)
        scales = gl.allocate_shared_memory(gl.int32, [SLOTS, BLOCKS, WORDS], LINEAR)
    else:
        w = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, BLOCK_N, 64], TILE)
        scales = w
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
