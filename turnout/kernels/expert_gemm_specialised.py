"""The grouped GEMM of expert_gemm.py for many tokens per expert: four warps load, eight multiply (Gluon).

Tiles are 256 weight rows by 128 tokens, or 64 where experts of 4 bits get about 32, or 128 by 256, so that
few bytes pass from the L2 cache per product. A program goes from tile to tile. One group of four warps loads,
a ring of stages ahead: gathered rows and 4-bit weights by cp.async, sorted rows and bf16 weights by the TMA.
Two groups multiply, each half of the weight rows, with nothing between them but the barriers of the stages:
while one decodes, waits or stores, the tensor cores work for the other.

* Tiles are drawn from a counter, by the loading warps, which publish them in shared memory
  (expert_schedule.py). 4-bit ones come widest first. With every 132nd tile instead, some programs got whole
  ones only, and the busiest had up to 1.5 times the mean.
* A tile of fewer tokens takes as many quarters (4 bits, 128 tokens: eighths) of the width as it needs, in two
  products where their number is no power of two.
* A step takes two blocks of 64 columns of 4-bit weights; where their number is odd, the last takes one.
* Decoded weights are the registers of an operand, so a step ends with all its products done. With one in
  flight from step to step, ptxas keeps those registers through all the branches that the groups share, finds
  too few, and serialises every product (its warning C7512).
* Results go to memory as bf16 through stmatrix, 16 bytes a thread.

Measured on an H200, us of a layer at 1024, 4096 and 16384 tokens, in brackets with every 132nd tile, in
quarters, in the same run (expert-gemm-schedule-nvidia-h200-2026-11-21.json in benchmarks/results; beside
expert_gemm.py: expert-gemm-specialised-...). MXFP4: Qwen3-30B-A3B 237 (249), 643 (677), 2289 (2309);
GPT-OSS-20B 457 (538), 1442 (1607), 5412 (5732); GPT-OSS-120B 807 (890), 1675 (1896), 5716 (6264); DeepSeek-V3
on one of eight ranks 355 (393), 761 (799), 2454 (2579). bf16 at 4096 and 16384: Qwen3-30B-A3B 667 (742), 2173
(2344); GPT-OSS-20B 1488 (1638), 5534 (5797); GPT-OSS-120B 2205 (2496), 6300 (7267); DeepSeek-V3 1003 (1025),
2791 (2978). That is 500 to 650 TFLOP/s of 790 with hundreds of tokens per expert. bf16 tiles load 6 TB/s for
it, and more than 7 was never seen; loading into two multiprocessors at once (multicast) is nothing that Gluon
of Triton 3.6 can say. Of 4-bit ones, decoding costs 8 %, storing 2 % (left out, at 4096 tokens of
GPT-OSS-20B). Rejected:

* Other schedules: 4-bit tiles in the order of experts 2 to 7 % slower, but 1 % faster with hundreds of tokens
  per expert and small ones (Qwen3-30B-A3B); bf16 ones widest first 4 to 25 %, for then an expert's narrow
  tile reads its weights from memory again. A program for each tile: 4 bits 3 to 12 % slower; bf16 2 to 3 %
  faster at 128 tokens per expert, 2 to 11 % slower above. Every 132nd, widest first: 0 to 5 % slower.
* The two groups taking strict turns with the tensor cores, one block a step: as fast as two blocks that
  multiply half a step of nothing (K 2880), so 1 % faster to 4 % slower than this.
* 4-bit tiles of 128 x 256, in eighths: 2 to 90 % slower. For bf16 in GEMM2 alone, cut from one table: 2 to
  8 % slower. Groups of 16 tiles for bf16: 0 to 5 % slower. 64 tokens to a 4-bit tile: 3 to 6 % faster at 32
  tokens per expert, 5 to 20 % slower from 64 on; 128 x 64 slower still.
* One block of 64 columns a step for 4-bit weights: 1 to 4 % slower than two. Two steps between two waits: 0
  to 2 % faster, for twice the code.
* Rows gathered beforehand, so that the TMA loads them: GEMM1 gains less than that takes.
* Decoding a step's first block while the last products of the step before run: no faster, for ptxas puts
  the wait first.

Legend: R sorted rows (token, expert), K inner size, N weight rows, E local experts.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from turnout.kernels.expert_decode import codes_layout, decode_block, scales_layout
from turnout.kernels.expert_schedule import advance, draw, drawn_memory, publish, published, tile_at
from turnout.kernels.expert_tile import finish_part, gathered_rows, tile_memory


@gluon.jit
def load_tiles(
    x_from, w_from, scales_ptr, order_ptr, tiles_ptr, x, w, scales, drawn, full, empty,
    K, n_rows, k_blocks, n_blocks, x_stride, top_k,
    FORMAT: gl.constexpr, GATHER: gl.constexpr, ROWS: gl.constexpr, TOKENS: gl.constexpr,
    K_BLOCKS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Draw tiles, publish each at its first stage, and load them, 64 columns at a time, as stages become
    empty; no expert: none is left. Four warps.
    """
    PACKED: gl.constexpr = FORMAT != "bf16"
    WORDS: gl.constexpr = 64 if FORMAT == "nvfp4" else 32
    BLOCKS: gl.constexpr = ROWS // 64
    COPY_ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    COPY_CODES: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [1, 4], [1, 0])
    COPY_SCALES: gl.constexpr = gl.BlockedLayout([1, 4], [128 // WORDS, WORDS // 4], [4, 1], [1, 0])
    BYTES: gl.constexpr = (0 if PACKED else ROWS * 128) + (0 if GATHER else TOKENS * 128)
    n_tiles = gl.cdiv(n_blocks, BLOCKS)
    num_tiles = gl.load(tiles_ptr)
    total = num_tiles * n_tiles
    steps = gl.cdiv(k_blocks, K_BLOCKS)
    stage = 0
    phase = 1
    place = gl.program_id(0)
    while place < total:
        expert, n, row, end = tile_at(place, tiles_ptr, n_tiles, num_tiles, GROUP)
        if GATHER:
            offset, exists = gathered_rows(order_ptr, row, end, top_k, x_stride, TOKENS, COPY_ROWS)
        place = draw(tiles_ptr, not GATHER)
        if PACKED:
            block = (expert * n_blocks + n * BLOCKS) * k_blocks
            b = gl.arange(0, BLOCKS, gl.SliceLayout(1, COPY_CODES))[:, None]
            c = gl.arange(0, 512, gl.SliceLayout(0, COPY_CODES))[None, :]
            bs = gl.arange(0, BLOCKS, gl.SliceLayout(1, COPY_SCALES))[:, None]
            cs = gl.arange(0, WORDS, gl.SliceLayout(0, COPY_SCALES))[None, :]
            codes_at = w_from + (b * k_blocks + block).to(gl.int64) * 512 + c
            scales_at = scales_ptr + (bs * k_blocks + block).to(gl.int64) * WORDS + cs
            codes_exist = (b < n_blocks - n * BLOCKS) & (c >= 0)
            scales_exist = (bs < n_blocks - n * BLOCKS) & (cs >= 0)
        w_row = expert * n_rows + n * ROWS
        mbarrier.wait(empty.index(stage), phase)
        publish(drawn, stage, expert, n, row, end)
        for step in range(0, steps):
            mbarrier.wait(empty.index(stage), phase)
            bar = full.index(stage)
            if BYTES > 0:
                mbarrier.expect(bar, K_BLOCKS * BYTES)
            for j in gl.static_range(K_BLOCKS):
                slot = stage * K_BLOCKS + j
                k = step * K_BLOCKS + j
                if not PACKED:
                    tma.async_copy_global_to_shared(w_from, [w_row, k * 64], bar, w.index(slot))
                if not GATHER:
                    tma.async_copy_global_to_shared(x_from, [row, k * 64], bar, x.index(slot))
                if PACKED:
                    live = k < k_blocks
                    async_copy.async_copy_global_to_shared(
                        w.index(slot), codes_at + k * 512, mask=codes_exist & live
                    )
                    async_copy.async_copy_global_to_shared(
                        scales.index(slot), scales_at + k * WORDS, mask=scales_exist & live
                    )
                if GATHER:
                    at = k * 64 + gl.arange(0, 64, gl.SliceLayout(0, COPY_ROWS))[None, :]
                    async_copy.async_copy_global_to_shared(
                        x.index(slot), x_from + offset[:, None] + at, mask=exists[:, None] & (at < K)
                    )
            if PACKED or GATHER:
                async_copy.mbarrier_arrive(bar, increment_count=False)
            stage, phase = advance(stage, phase, STAGES)
    mbarrier.wait(empty.index(stage), phase)
    publish(drawn, stage, -1, 0, 0, 0)
    if BYTES > 0:
        mbarrier.arrive(full.index(stage), count=1)
    if PACKED or GATHER:
        async_copy.mbarrier_arrive(full.index(stage), increment_count=False)


@gluon.jit
def fragments(w, scales, slot, BLOCK: gl.constexpr, NVFP4: gl.constexpr, OPERAND: gl.constexpr):
    """Row block BLOCK of a slot, decoded."""
    WORDS: gl.constexpr = 64 if NVFP4 else 32
    CODES: gl.constexpr = codes_layout(1, 1)
    SCALES: gl.constexpr = scales_layout(1, 1, WORDS)
    return decode_block(
        w.index(slot).slice(BLOCK, 1).load(CODES), scales.index(slot).slice(BLOCK, 1).load(SCALES),
        1, 1, NVFP4, OPERAND,
    )  # fmt: skip


@gluon.jit
def multiply_step(
    stage, phase, step, x, w, scales, full, empty, acc0, acc1, more0, more1,
    HALF: gl.constexpr, FORMAT: gl.constexpr, GATHER: gl.constexpr, HELD: gl.constexpr, WIDTH: gl.constexpr,
    MORE: gl.constexpr, K_BLOCKS: gl.constexpr, BLOCKS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Add the products of a stage's first BLOCKS blocks of columns; 4-bit weights: none stays in flight."""
    PACKED: gl.constexpr = FORMAT != "bf16"
    NVFP4: gl.constexpr = FORMAT == "nvfp4"
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, acc0.type.layout, 2)
    OPERAND_MORE: gl.constexpr = gl.DotOperandLayout(0, more0.type.layout, 2)
    mbarrier.wait(full.index(stage), phase)
    if GATHER:
        fence_async_shared()
    for j in gl.static_range(BLOCKS):
        slot = stage * K_BLOCKS + j
        tokens = x.index(slot).slice(0, WIDTH).permute((1, 0))
        if PACKED:
            a0 = fragments(w, scales, slot, HALF * HELD, NVFP4, OPERAND)
        else:
            a0 = w.index(slot).slice(HALF * HELD * 64, 64)
        acc0 = warpgroup_mma_wait(1, deps=[warpgroup_mma(a0, tokens, acc0, is_async=True)])
        if MORE > 0:
            last = x.index(slot).slice(WIDTH, MORE).permute((1, 0))
            if PACKED:
                a0 = gl.convert_layout(a0, OPERAND_MORE, assert_trivial=True)
            more0 = warpgroup_mma_wait(2, deps=[warpgroup_mma(a0, last, more0, is_async=True)])
        if HELD == 2:
            if PACKED:
                a1 = fragments(w, scales, slot, HALF * HELD + 1, NVFP4, OPERAND)
            else:
                a1 = w.index(slot).slice(HALF * HELD * 64 + 64, 64)
            token1 = warpgroup_mma(a1, tokens, acc1, is_async=True)
            acc1 = warpgroup_mma_wait(2 if MORE else 1, deps=[token1])
            if MORE > 0:
                if PACKED:
                    a1 = gl.convert_layout(a1, OPERAND_MORE, assert_trivial=True)
                more1 = warpgroup_mma_wait(2, deps=[warpgroup_mma(a1, last, more1, is_async=True)])
    if PACKED:
        acc0, acc1, more0, more1 = warpgroup_mma_wait(0, deps=[acc0, acc1, more0, more1])
        gl.thread_barrier()
        mbarrier.arrive(empty.index(stage), count=1)
    else:
        gl.thread_barrier()
        # Not carried by a variable that begins as `stage`: the compiler would take it for unchanged.
        mbarrier.arrive(empty.index(gl.where(stage == 0, STAGES, stage) - 1), count=1, pred=step > 0)
    return acc0, acc1, more0, more1


@gluon.jit
def multiply_tile(
    stage, phase, x, w, scales, full, empty, alpha_ptr, bias_ptr, out_ptr, order_ptr, weights_ptr,
    expert, n, row, end, n_rows, k_blocks, out_columns, out_stride, act_alpha, act_beta, act_limit,
    HALF: gl.constexpr, FORMAT: gl.constexpr, ACTIVATION: gl.constexpr, GATHER: gl.constexpr,
    SCATTER: gl.constexpr, BIAS: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr, MORE: gl.constexpr,
    K_BLOCKS: gl.constexpr, STAGES: gl.constexpr, RAGGED: gl.constexpr,
):  # fmt: skip
    """Multiply and store this group's half of one tile, of which at most WIDTH + MORE tokens exist."""
    PACKED: gl.constexpr = FORMAT != "bf16"
    HELD: gl.constexpr = ROWS // 128  # blocks of 64 rows
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    ACC_MORE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, max(MORE, 8), 16])
    acc0 = gl.zeros([64, WIDTH], gl.float32, ACC)
    acc1 = gl.zeros([64, WIDTH], gl.float32, ACC)
    more0 = gl.zeros([64, max(MORE, 8)], gl.float32, ACC_MORE)
    more1 = gl.zeros([64, max(MORE, 8)], gl.float32, ACC_MORE)
    block = n * (ROWS // 64) + HALF * HELD
    alpha = gl.load(alpha_ptr + expert) if PACKED else 1.0
    bias0 = 0.0
    bias1 = 0.0
    if BIAS:
        at = block * 64 + gl.arange(0, 64, gl.SliceLayout(1, ACC))
        bias0 = gl.load(bias_ptr + expert * n_rows + at, mask=at < n_rows, other=0.0)
        bias1 = gl.load(bias_ptr + expert * n_rows + at + 64, mask=at + 64 < n_rows, other=0.0)
    whole = k_blocks // K_BLOCKS if RAGGED else gl.cdiv(k_blocks, K_BLOCKS)
    for step in range(0, whole):
        acc0, acc1, more0, more1 = multiply_step(
            stage, phase, step, x, w, scales, full, empty, acc0, acc1, more0, more1,
            HALF, FORMAT, GATHER, HELD, WIDTH, MORE, K_BLOCKS, K_BLOCKS, STAGES,
        )  # fmt: skip
        stage, phase = advance(stage, phase, STAGES)
    if RAGGED:
        acc0, acc1, more0, more1 = multiply_step(
            stage, phase, whole, x, w, scales, full, empty, acc0, acc1, more0, more1,
            HALF, FORMAT, GATHER, HELD, WIDTH, MORE, K_BLOCKS, 1, STAGES,
        )  # fmt: skip
        stage, phase = advance(stage, phase, STAGES)
    if not PACKED:
        acc0, acc1, more0, more1 = warpgroup_mma_wait(0, deps=[acc0, acc1, more0, more1])
        gl.thread_barrier()
        mbarrier.arrive(empty.index(gl.where(stage == 0, STAGES, stage) - 1), count=1)
    finish_part(
        acc0, acc1, alpha, bias0, bias1, out_ptr, order_ptr, weights_ptr, block, row, end, out_columns,
        out_stride, act_alpha, act_beta, act_limit, HELD, PACKED, ACTIVATION, SCATTER, BIAS,
    )  # fmt: skip
    if MORE > 0:
        finish_part(
            more0, more1, alpha, bias0, bias1, out_ptr, order_ptr, weights_ptr, block, row + WIDTH, end,
            out_columns, out_stride, act_alpha, act_beta, act_limit, HELD, PACKED, ACTIVATION, SCATTER, BIAS,
        )  # fmt: skip
    return stage, phase


@gluon.jit
def multiply_narrow(
    stage, phase, x, w, scales, full, empty, alpha_ptr, bias_ptr, out_ptr, order_ptr, weights_ptr,
    expert, n, row, end, n_rows, k_blocks, out_columns, out_stride, act_alpha, act_beta, act_limit,
    HALF: gl.constexpr, FORMAT: gl.constexpr, ACTIVATION: gl.constexpr, GATHER: gl.constexpr,
    SCATTER: gl.constexpr, BIAS: gl.constexpr, ROWS: gl.constexpr, TOKENS: gl.constexpr,
    WIDTHS: gl.constexpr, K_BLOCKS: gl.constexpr, STAGES: gl.constexpr, RAGGED: gl.constexpr,
    PARTS: gl.constexpr,
):  # fmt: skip
    """`multiply_tile` as wide as the tile's tokens need, from PARTS / WIDTHS of TOKENS on."""
    PART: gl.constexpr = TOKENS // WIDTHS
    NEXT: gl.constexpr = 8 if PARTS == 6 else PARTS + 1
    POWER: gl.constexpr = 8 if PARTS == 8 else 4 if PARTS >= 4 else 2 if PARTS >= 2 else 1
    if PARTS == WIDTHS or end - row <= PARTS * PART:
        stage, phase = multiply_tile(
            stage, phase, x, w, scales, full, empty, alpha_ptr, bias_ptr, out_ptr, order_ptr, weights_ptr,
            expert, n, row, end, n_rows, k_blocks, out_columns, out_stride, act_alpha, act_beta, act_limit,
            HALF, FORMAT, ACTIVATION, GATHER, SCATTER, BIAS, ROWS, POWER * PART, (PARTS - POWER) * PART,
            K_BLOCKS, STAGES, RAGGED,
        )  # fmt: skip
    else:
        stage, phase = multiply_narrow(
            stage, phase, x, w, scales, full, empty, alpha_ptr, bias_ptr, out_ptr, order_ptr, weights_ptr,
            expert, n, row, end, n_rows, k_blocks, out_columns, out_stride, act_alpha, act_beta, act_limit,
            HALF, FORMAT, ACTIVATION, GATHER, SCATTER, BIAS, ROWS, TOKENS, WIDTHS, K_BLOCKS, STAGES, RAGGED,
            NEXT,
        )  # fmt: skip
    return stage, phase


@gluon.jit
def multiply_tiles(
    x, w, scales, drawn, full, empty, alpha_ptr, bias_ptr, out_ptr, order_ptr, weights_ptr,
    n_rows, k_blocks, out_columns, out_stride, act_alpha, act_beta, act_limit,
    HALF: gl.constexpr, FORMAT: gl.constexpr, ACTIVATION: gl.constexpr, GATHER: gl.constexpr,
    SCATTER: gl.constexpr, BIAS: gl.constexpr, ROWS: gl.constexpr, TOKENS: gl.constexpr,
    WIDTHS: gl.constexpr, K_BLOCKS: gl.constexpr, STAGES: gl.constexpr, RAGGED: gl.constexpr,
):  # fmt: skip
    """Multiply and store half of the weight rows of every tile of this program; four warps."""
    stage = 0
    phase = 0
    mbarrier.wait(full.index(stage), phase)
    expert, n, row, end = published(drawn, stage)
    while expert >= 0:
        stage, phase = multiply_narrow(
            stage, phase, x, w, scales, full, empty, alpha_ptr, bias_ptr, out_ptr, order_ptr, weights_ptr,
            expert, n, row, end, n_rows, k_blocks, out_columns, out_stride, act_alpha, act_beta, act_limit,
            HALF, FORMAT, ACTIVATION, GATHER, SCATTER, BIAS, ROWS, TOKENS, WIDTHS, K_BLOCKS, STAGES, RAGGED,
            1,
        )  # fmt: skip
        mbarrier.wait(full.index(stage), phase)
        expert, n, row, end = published(drawn, stage)


@gluon.jit(do_not_specialize=["n_rows", "k_blocks", "n_blocks", "top_k"])
def expert_gemm_specialised(
    x_from, w_from, scales_ptr, alpha_ptr, bias_ptr, out_ptr, order_ptr, tiles_ptr, weights_ptr,
    K, n_rows, out_columns, k_blocks, n_blocks, x_stride, out_stride, top_k, act_alpha, act_beta, act_limit,
    FORMAT: gl.constexpr, ACTIVATION: gl.constexpr, GATHER: gl.constexpr, SCATTER: gl.constexpr,
    BIAS: gl.constexpr, ROWS: gl.constexpr, TOKENS: gl.constexpr, WIDTHS: gl.constexpr,
    K_BLOCKS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, RAGGED: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """out[row] = act(w[expert] @ x[row] * alpha[expert] + bias[expert]), rows sorted by expert.

    As `expert_gemm`, but: x_from where rows are not gathered, and bf16 weights [E * n_rows, K] as w_from, are
    descriptors of tiles of 64 columns. WIDTHS: 8, 4, or 1 for tiles of TOKENS alone. RAGGED: k_blocks is odd
    where K_BLOCKS is 2. As many programs as multiprocessors; sort.py leaves their counters in the table of
    tiles.
    """
    PACKED: gl.constexpr = FORMAT != "bf16"
    SLOTS: gl.constexpr = STAGES * K_BLOCKS
    COUNT: gl.constexpr = (128 if PACKED or GATHER else 0) + (0 if PACKED and GATHER else 1)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x, w, scales = tile_memory(FORMAT, SLOTS, ROWS, TOKENS)
    drawn = drawn_memory(STAGES)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=COUNT)
        mbarrier.init(empty.index(i), count=2)
    gl.warp_specialize(
        [
            (load_tiles, (
                x_from, w_from, scales_ptr, order_ptr, tiles_ptr, x, w, scales, drawn, full, empty,
                K, n_rows, k_blocks, n_blocks, x_stride, top_k,
                FORMAT, GATHER, ROWS, TOKENS, K_BLOCKS, STAGES, GROUP,
            )),
            (multiply_tiles, (
                x, w, scales, drawn, full, empty, alpha_ptr, bias_ptr, out_ptr, order_ptr, weights_ptr,
                n_rows, k_blocks, out_columns, out_stride, act_alpha, act_beta, act_limit,
                0, FORMAT, ACTIVATION, GATHER, SCATTER, BIAS, ROWS, TOKENS, WIDTHS, K_BLOCKS, STAGES,
                RAGGED,
            )),
            (multiply_tiles, (
                x, w, scales, drawn, full, empty, alpha_ptr, bias_ptr, out_ptr, order_ptr, weights_ptr,
                n_rows, k_blocks, out_columns, out_stride, act_alpha, act_beta, act_limit,
                1, FORMAT, ACTIVATION, GATHER, SCATTER, BIAS, ROWS, TOKENS, WIDTHS, K_BLOCKS, STAGES,
                RAGGED,
            )),
        ],
        [4, 4], [216, 216],
    )  # fmt: skip
