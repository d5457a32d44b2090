"""Grouped GEMM of the experts on Hopper (Gluon): MXFP4 weights by FP8 activations, rows sorted by expert.

The frame is that of expert_gemm_fp8_specialised.py with the operands changed over: one warp loads, two
groups of four multiply half of a tile's weight rows each, and a program goes from tile to tile. Weights stay
in 4 bits as far as the registers of the tensor cores' first operand, where each becomes a byte of e4m3
without rounding (fragments_fp8.py): 10 instructions for 8 of them, of which 3 make the tables that a byte
permute looks magnitudes up in. Block scales are in those tables, and a token has one scale for its whole row,
so that products of all columns add up in the tensor cores: a group decodes its next operand while they work
on the last, and multiplies by a weight row's factor and a token's scale once, at the end. A float needs no
finer scales, as only columns 2^-14 of a row's largest begin to lose bits. A layer's error is 4.5e-2 where
scales of 128 columns gave 4.3e-2; 5.8e-2, twice theirs, where a few columns are 3000 times larger than the
rest.

Two steps make a turn of the loop: a group waits for all its products once a turn, not once a step, and gives
the first stage back as the second's products begin.

Measured on an H200, for 1024, 4096 and 16384 tokens of GPT-OSS-20B, W4A16 taking 545, 1555 and 5688 us:
* Kept: 377, 1055 and 3914 us; 1.32 times W4A16's speed in the geometric mean over six shapes and these sizes.
* Turns of one step: 384, 1089 and 4097 us; 1.29 times.
* Four warps that gather tokens by cp.async for GEMM1, instead of a sorted copy and the TMA: 409, 1141 and
  4070 us. Of 4096 tokens' 38 us of quantising 30 go, but GEMM1 takes 60 more.
* Tiles of 128 weight rows by 256 tokens, which decode half as much: 431, 1083 and 3711 us. At 16384 tokens of
  the other shapes 0.80 to 1.02 times as fast, the worse the fewer columns: a tile's end costs twice as much.
* Replaced: scales of 128 columns, as FP8 weights have them, and so sums in other registers every 128 columns,
  with which the same registers left no room to decode ahead: 492, 1378 and 5238 us.
* Without decoding (wrong results) GEMM1 of 4096 tokens takes 497 us instead of about 600, GEMM2 of Qwen3-30B,
  768 columns deep, as long as with it: there the end of a tile counts.
* Compiled only: products carried in flight beyond a turn, or the decoded operand, make ptxas let each product
  end before the next (C7512).

Legend: R sorted rows (token, expert), K inner size, N weight rows, E local experts.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from turnout.kernels.expert_tile import finish, locate
from turnout.kernels.quantize import to_e4m3


@triton.jit(do_not_specialize=["rows", "top_k"])
def quantize_rows(
    x_ptr, order_ptr, tiles_ptr, q_ptr, scale_ptr, rows, K, x_stride, top_k,
    COLUMNS: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, SORTED: tl.constexpr,
    GATHER: tl.constexpr, PDL: tl.constexpr, INTERPRETED: tl.constexpr = False,
):  # fmt: skip
    """q e4m3 [., COLUMNS], zeros beyond K, and scale float32 [.], amax / 448 or 1, of rows of x [., K].

    GATHER: row r is that of token order[r] / top_k. SORTED: only the first tiles[1] of `rows` exist.
    PADDED: a power of two, no less than COLUMNS; ROWS at a time.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    total = rows
    if SORTED:
        total = tl.load(tiles_ptr + 1)
    column = tl.arange(0, PADDED)[None, :]
    first = tl.program_id(0) * ROWS
    while first < total:
        row = first + tl.arange(0, ROWS)
        exists = row < total
        source = row
        if GATHER:
            source = tl.load(order_ptr + row, mask=exists, other=0) // top_k
        at = x_ptr + source.to(tl.int64)[:, None] * x_stride + column
        x = tl.load(at, mask=exists[:, None] & (column < K), other=0.0).to(tl.float32)
        amax = tl.max(tl.abs(x), 1)
        scale = tl.where(amax > 0, amax * (1 / 448), 1.0)
        q = to_e4m3(x * (1 / scale)[:, None], INTERPRETED)
        to = q_ptr + row.to(tl.int64)[:, None] * COLUMNS + column
        tl.store(to, q, mask=exists[:, None] & (column < COLUMNS))
        tl.store(scale_ptr + row, scale, mask=exists)
        first += tl.num_programs(0) * ROWS


def _decode_word(j: int, left: int, right: int) -> str:
    """Code word j of four, whose scale is byte j of $12, to registers $left and $right."""
    return f"""
        prmt.b32 s, $12, 0, 0x444{j};
        mad.lo.u32 lo, s, 0x08080800, 0x14100800;
        mad.lo.u32 hi, s, 0x08080808, 0x24201C18;
        and.b32 m, ${8 + j}, 0x77777777;
        prmt.b32 v, lo, hi, m;
        lop3.b32 ${left}, ${8 + j}, 0x80808080, v, 0xEA;
        shr.u32 m, m, 16;
        prmt.b32 v, lo, hi, m;
        shl.b32 t, ${8 + j}, 4;
        lop3.b32 ${right}, t, 0x80808080, v, 0xEA;
    """


DECODE = gl.constexpr(
    "{ .reg .b32 s, lo, hi, m, v, t;"
    + _decode_word(0, 0, 2)
    + _decode_word(1, 1, 3)
    + _decode_word(2, 4, 6)
    + _decode_word(3, 5, 7)
    + "}"
)


@gluon.jit
def decode_words(words, scales):
    """Four words of codes and one of scales, repeated -> e4m3 registers by tile, right half and lower."""
    return gl.inline_asm_elementwise(
        DECODE,
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r",
        [words, scales],
        dtype=(gl.float8e4nv,) * 8,
        is_pure=True,
        pack=4,
    )


@gluon.jit
def decode_block(words, scales, OPERAND: gl.constexpr):
    """words int32 [32, 32], scales int32 [64] of a block -> e4m3 [64, 128]; every step renames registers."""
    AXES: gl.constexpr = gl.BlockedLayout([2, 1, 1, 1, 4], [1, 1, 8, 4, 1], [1, 4, 1, 1, 1], [4, 3, 2, 1, 0])
    SHAPE: gl.constexpr = [2, 4, 8, 4, 4]  # pair of tiles, warp, lane / 4, lane % 4, word or place
    words = gl.convert_layout(words.reshape(SHAPE), AXES, assert_trivial=True)
    scales = gl.convert_layout(scales.reshape([2, 4, 8, 1, 1]), AXES).broadcast_to(SHAPE)
    a, b, c, d, e, f, g, h = decode_words(words, scales)  # tile, right, lower
    left = gl.join(gl.join(a, b), gl.join(c, d))
    right = gl.join(gl.join(e, f), gl.join(g, h))
    w = gl.join(left, right)  # pair 0, warp 1, lane / 4 2, lane % 4 3, place 4, lower 5, right 6, tile 7
    w = w.permute([1, 5, 2, 0, 7, 6, 3, 4]).reshape([64, 128])
    return gl.convert_layout(w, OPERAND, assert_trivial=True)


@gluon.jit
def load_tiles(
    x_desc, w_desc, w_scale_ptr, tiles_ptr, x, w, w_scale, full, empty, n_blocks, groups, first_expert,
    num_experts,
    BLOCKS: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr, TILES_GROUP: gl.constexpr,
):  # fmt: skip
    """Load every tile of this program, 128 columns at a time, as stages become empty; one warp."""
    WORDS: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    n_tiles = gl.cdiv(n_blocks, BLOCKS)
    total = gl.load(tiles_ptr) * n_tiles
    issued = 0
    for program in range(gl.program_id(0), total, gl.num_programs(0)):
        expert, n, row, _ = locate(program, tiles_ptr, n_tiles, first_expert, num_experts, False, TILES_GROUP)
        word = gl.arange(0, 64 * BLOCKS, WORDS)
        word_held = n * (64 * BLOCKS) + word < n_blocks * 64
        for step in range(0, groups):
            stage = issued % STAGES
            block = (expert * groups + step) * n_blocks + n * BLOCKS
            mbarrier.wait(empty.index(stage), ((issued // STAGES) & 1) ^ 1)
            bar = full.index(stage)
            async_copy.async_copy_global_to_shared(
                w_scale.index(stage), w_scale_ptr + block.to(gl.int64) * 64 + word, mask=word_held
            )
            async_copy.mbarrier_arrive(bar)
            mbarrier.expect(bar, 128 * (32 * BLOCKS + TOKENS))
            tma.async_copy_global_to_shared(w_desc, [block * 32, 0], bar, w.index(stage))
            tma.async_copy_global_to_shared(x_desc, [row, step * 128], bar, x.index(stage))
            issued += 1


@gluon.jit
def decode_from(w, w_scale, stage, BLOCK: gl.constexpr, OPERAND: gl.constexpr):
    """Block BLOCK of a stage as e4m3 [64, 128]."""
    CODES: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [16, 0]], [[0, 4], [0, 8], [0, 16], [1, 0], [2, 0]], [[4, 0], [8, 0]], [], [32, 32]
    )
    SCALES: gl.constexpr = gl.DistributedLinearLayout(
        [[32]], [[0], [0], [1], [2], [4]], [[8], [16]], [], [64]
    )
    words = w.index(stage).slice(BLOCK * 32, 32).load(CODES)
    return decode_block(words, w_scale.index(stage).slice(BLOCK * 64, 64).load(SCALES), OPERAND)


@gluon.jit
def store(
    acc, s_x, alpha_ptr, bias_ptr, out_ptr, order_ptr, weights_ptr, expert, block, n_rows, row, end,
    out_columns, out_stride, act_alpha, act_beta, act_limit,
    ACTIVATION: gl.constexpr, SCATTER: gl.constexpr, BIAS: gl.constexpr, TOKENS: gl.constexpr,
    ACC: gl.constexpr,
):  # fmt: skip
    """`finish` for the 64 rows of one block, times their factors and the tokens' scales."""
    r = block * 64 + gl.arange(0, 64, gl.SliceLayout(1, ACC))
    factor = gl.load(alpha_ptr + expert * n_rows + r, mask=r < n_rows, other=0.0)
    finish(
        acc * factor[:, None] * s_x[None, :], alpha_ptr, bias_ptr, out_ptr, order_ptr, weights_ptr, expert,
        block, n_rows, row, end, out_columns, out_stride, act_alpha, act_beta, act_limit, ACTIVATION, SCATTER,
        False, BIAS, False, 64, TOKENS, ACC, 4,
    )  # fmt: skip


@gluon.jit
def multiply_step(
    stage, before, acc0, acc1, x, w, w_scale, empty,
    HALF: gl.constexpr, BLOCKS: gl.constexpr, ACC: gl.constexpr, SECOND: gl.constexpr,
):  # fmt: skip
    """Sums with one stage's products added, of which the last are still under way.

    SECOND: of a turn, so the stage `before` is read no more, once this one's first products are next in line.
    """
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, ACC, 4)
    OWN: gl.constexpr = BLOCKS // 2
    x_T = x.index(stage).permute((1, 0))
    operand0 = decode_from(w, w_scale, stage, HALF * OWN, OPERAND)
    acc0 = warpgroup_mma_wait(1, deps=[warpgroup_mma(operand0, x_T, acc0, is_async=True)])
    if SECOND:
        gl.thread_barrier()
        mbarrier.arrive(empty.index(before), count=1)
    if OWN == 2:
        operand1 = decode_from(w, w_scale, stage, HALF * OWN + 1, OPERAND)
        acc1 = warpgroup_mma_wait(1, deps=[warpgroup_mma(operand1, x_T, acc1, is_async=True)])
    return acc0, acc1


@gluon.jit
def multiply_tiles(
    x, w, w_scale, full, empty, tiles_ptr, x_scale_ptr, alpha_ptr, bias_ptr, out_ptr, order_ptr, weights_ptr,
    n_blocks, out_columns, groups, out_stride, first_expert, num_experts, act_alpha, act_beta, act_limit,
    HALF: gl.constexpr, ACTIVATION: gl.constexpr, SCATTER: gl.constexpr, BIAS: gl.constexpr,
    BLOCKS: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr, TILES_GROUP: gl.constexpr,
):  # fmt: skip
    """Multiply and store half of the BLOCKS weight blocks of every tile of this program; four warps."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 32])
    n_tiles = gl.cdiv(n_blocks, BLOCKS)
    n_rows = n_blocks * 64
    total = gl.load(tiles_ptr) * n_tiles
    used = 0
    for program in range(gl.program_id(0), total, gl.num_programs(0)):
        expert, n, row, end = locate(
            program, tiles_ptr, n_tiles, first_expert, num_experts, False, TILES_GROUP
        )
        acc0 = gl.zeros([64, TOKENS], gl.float32, ACC)
        acc1 = gl.zeros([64, TOKENS], gl.float32, ACC)
        for _ in range(0, groups // 2):
            stage = used % STAGES
            after = (used + 1) % STAGES
            mbarrier.wait(full.index(stage), (used // STAGES) & 1)
            acc0, acc1 = multiply_step(
                stage, stage, acc0, acc1, x, w, w_scale, empty, HALF, BLOCKS, ACC, False
            )
            mbarrier.wait(full.index(after), ((used + 1) // STAGES) & 1)
            acc0, acc1 = multiply_step(
                after, stage, acc0, acc1, x, w, w_scale, empty, HALF, BLOCKS, ACC, True
            )
            acc0, acc1 = warpgroup_mma_wait(0, deps=[acc0, acc1])
            gl.thread_barrier()
            mbarrier.arrive(empty.index(after), count=1)
            used += 2
        for _ in range(0, groups % 2):
            stage = used % STAGES
            mbarrier.wait(full.index(stage), (used // STAGES) & 1)
            acc0, acc1 = multiply_step(
                stage, stage, acc0, acc1, x, w, w_scale, empty, HALF, BLOCKS, ACC, False
            )
            acc0, acc1 = warpgroup_mma_wait(0, deps=[acc0, acc1])
            gl.thread_barrier()
            mbarrier.arrive(empty.index(stage), count=1)
            used += 1
        at = row + gl.arange(0, TOKENS, gl.SliceLayout(0, ACC))
        s_x = gl.load(x_scale_ptr + at, mask=at < end, other=0.0)
        block = n * BLOCKS + HALF * (BLOCKS // 2)
        store(
            acc0, s_x, alpha_ptr, bias_ptr, out_ptr, order_ptr, weights_ptr, expert, block, n_rows, row, end,
            out_columns, out_stride, act_alpha, act_beta, act_limit, ACTIVATION, SCATTER, BIAS, TOKENS, ACC,
        )  # fmt: skip
        if BLOCKS == 4:
            store(
                acc1, s_x, alpha_ptr, bias_ptr, out_ptr, order_ptr, weights_ptr, expert, block + 1, n_rows,
                row, end, out_columns, out_stride, act_alpha, act_beta, act_limit, ACTIVATION, SCATTER, BIAS,
                TOKENS, ACC,
            )  # fmt: skip


@gluon.jit(do_not_specialize=["n_blocks", "groups", "first_expert", "num_experts"])
def expert_gemm_w4a8(
    x_desc, x_scale_ptr, w_desc, w_scale_ptr, alpha_ptr, bias_ptr, out_ptr, order_ptr, tiles_ptr,
    weights_ptr,
    n_blocks, out_columns, groups, out_stride, first_expert, num_experts,
    act_alpha, act_beta, act_limit,
    ACTIVATION: gl.constexpr, SCATTER: gl.constexpr, BIAS: gl.constexpr, BLOCKS: gl.constexpr,
    TOKENS: gl.constexpr, STAGES: gl.constexpr, TILES_GROUP: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """out[row] = act(w[expert] @ x[row] + bias[expert]), rows sorted by expert; as `expert_gemm` takes them.

    x e4m3 [rows, 128 groups], sorted, and float32 x_scale [rows]; w int32 [E * groups * n_blocks * 32, 32],
    w_scale and alpha of FragmentsFP8; bias float32 [E, 64 n_blocks]. Tiles are of 2 or 4 BLOCKS of 64 weight
    rows. As many programs as multiprocessors; four warps.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x = gl.allocate_shared_memory(x_desc.dtype, [STAGES, TOKENS, 128], x_desc.layout)
    w = gl.allocate_shared_memory(w_desc.dtype, [STAGES, 32 * BLOCKS, 32], w_desc.layout)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    w_scale = gl.allocate_shared_memory(gl.int32, [STAGES, 64 * BLOCKS], LINE)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    gl.warp_specialize(
        [
            (multiply_tiles, (
                x, w, w_scale, full, empty, tiles_ptr, x_scale_ptr, alpha_ptr, bias_ptr, out_ptr, order_ptr,
                weights_ptr, n_blocks, out_columns, groups, out_stride, first_expert, num_experts, act_alpha,
                act_beta, act_limit,
                0, ACTIVATION, SCATTER, BIAS, BLOCKS, TOKENS, STAGES, TILES_GROUP,
            )),
            (multiply_tiles, (
                x, w, w_scale, full, empty, tiles_ptr, x_scale_ptr, alpha_ptr, bias_ptr, out_ptr, order_ptr,
                weights_ptr, n_blocks, out_columns, groups, out_stride, first_expert, num_experts, act_alpha,
                act_beta, act_limit,
                1, ACTIVATION, SCATTER, BIAS, BLOCKS, TOKENS, STAGES, TILES_GROUP,
            )),
            (load_tiles, (
                x_desc, w_desc, w_scale_ptr, tiles_ptr, x, w, w_scale, full, empty, n_blocks, groups,
                first_expert, num_experts, BLOCKS, TOKENS, STAGES, TILES_GROUP,
            )),
        ],
        [4, 1], [232, 24],
    )  # fmt: skip
