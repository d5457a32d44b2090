"""Grouped GEMM of the experts on Hopper (Gluon): MXFP4 weights by FP8 activations, rows sorted by expert.

One warp loads by the TMA, a ring of stages ahead; two groups of four multiply half of a tile's weight
rows each. A program goes from tile to tile, drawn from a counter and published in shared memory as in
gemm_specialised.py, widest first. Weights stay in 4 bits as far as the registers of the tensor
cores' first operand, where each becomes a byte of e4m3 without rounding (decode_fp8.py). Block
scales are in there, and a token has one scale for its whole row, so that products of all columns add up
in the tensor cores: a group decodes its next operand while they work on the last, and multiplies by a
weight row's factor and a token's scale once, at the end. A float needs no finer scales, as only columns
2^-14 of a row's largest begin to lose bits. A layer's error is 4.5e-2 where scales of 128 columns gave
4.3e-2; 5.8e-2, twice theirs, where a few columns are 3000 times larger than the rest.

Two steps make a turn of the loop: a group waits for all its products once a turn, not once a step, and
gives the first stage back as the second's products begin. A tile of fewer tokens takes as many quarters
of the width as it needs. Factors, biases, the tokens' scales and the rows that results go to are loaded
before a tile's products.

Legend: R sorted rows (token, expert), K inner size, N weight rows, E local experts.
"""

from __future__ import annotations

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

from turnout.kernels.hopper.decode_fp8 import decode_from
from turnout.kernels.hopper.schedule import draw, drawn_memory, publish, published, stage_barriers, tile_at
from turnout.kernels.hopper.tile import activate, store_rows


@gluon.jit
def load_tiles(
    x_desc, w_desc, w_scale_ptr, tiles_ptr, x, w, w_scale, drawn, full, empty, n_blocks, groups,
    SECOND: gl.constexpr, BLOCKS: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr,
):  # fmt: skip
    """Draw tiles, publish each at its first stage, and load them, 128 columns at a time, as stages become
    empty; no expert: none is left. One warp.
    """
    WORDS: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    n_tiles = gl.cdiv(n_blocks, BLOCKS)
    num_tiles = gl.load(tiles_ptr)
    total = num_tiles * n_tiles
    issued = 0
    place = gl.program_id(0)
    while place < total:
        expert, n, row, end = tile_at(place, tiles_ptr, n_tiles, num_tiles, GROUP)
        place = draw(tiles_ptr, SECOND)
        mbarrier.wait(empty.index(issued % STAGES), ((issued // STAGES) & 1) ^ 1)
        publish(drawn, issued % STAGES, expert, n, row, end)
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
    mbarrier.wait(empty.index(issued % STAGES), ((issued // STAGES) & 1) ^ 1)
    publish(drawn, issued % STAGES, -1, 0, 0, 0)
    mbarrier.arrive(full.index(issued % STAGES), count=1)


@gluon.jit
def multiply_step(
    stage, before, acc0, acc1, more0, more1, x, w, w_scale, empty,
    HALF: gl.constexpr, BLOCKS: gl.constexpr, MORE: gl.constexpr, SECOND: gl.constexpr,
):  # fmt: skip
    """Sums with one stage's products added, of which the last are still under way.

    SECOND: of a turn, so the stage `before` is read no more, once this one's first products are next in line.
    """
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, acc0.type.layout, 4)
    LAST: gl.constexpr = gl.DotOperandLayout(0, more0.type.layout, 4)
    OWN: gl.constexpr = BLOCKS // 2
    x_T = x.index(stage).slice(0, acc0.shape[1]).permute((1, 0))
    operand0 = decode_from(w, w_scale, stage, HALF * OWN, OPERAND)
    token0 = warpgroup_mma(operand0, x_T, acc0, is_async=True)
    if MORE:
        last_T = x.index(stage).slice(acc0.shape[1], MORE).permute((1, 0))
        last0 = gl.convert_layout(operand0, LAST, assert_trivial=True)
        token2 = warpgroup_mma(last0, last_T, more0, is_async=True)
        acc0, more0 = warpgroup_mma_wait(2, deps=[token0, token2])
    else:
        acc0 = warpgroup_mma_wait(1, deps=[token0])
    if SECOND:
        gl.thread_barrier()
        mbarrier.arrive(empty.index(before), count=1)
    if OWN == 2:
        operand1 = decode_from(w, w_scale, stage, HALF * OWN + 1, OPERAND)
        token1 = warpgroup_mma(operand1, x_T, acc1, is_async=True)
        if MORE:
            last1 = gl.convert_layout(operand1, LAST, assert_trivial=True)
            token3 = warpgroup_mma(last1, last_T, more1, is_async=True)
            acc1, more1 = warpgroup_mma_wait(2, deps=[token1, token3])
        else:
            acc1 = warpgroup_mma_wait(1, deps=[token1])
    return acc0, acc1, more0, more1


@gluon.jit
def finish_part(
    acc0, acc1, factor0, factor1, bias0, bias1, to, s_x, out_ptr, weights_ptr, block, out_columns, out_stride,
    act_alpha, act_beta, act_limit,
    OWN: gl.constexpr, ACTIVATION: gl.constexpr, SCATTER: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    """Scales, bias, activation, routing weight; sums of OWN blocks of 64 weight rows go to rows `to`."""
    ACC: gl.constexpr = acc0.type.layout
    ROWS: gl.constexpr = gl.SliceLayout(1, ACC)
    TOKENS: gl.constexpr = gl.SliceLayout(0, ACC)
    COLUMNS: gl.constexpr = 64 if ACTIVATION == "none" or ACTIVATION == "relu2" else 32
    STORE: gl.constexpr = gl.BlockedLayout([8, 1], [COLUMNS // 8, 256 // COLUMNS], [1, 4], [0, 1])
    if SCATTER:
        weight = gl.load(weights_ptr + gl.maximum(to, 0))
    r = gl.convert_layout(to, gl.SliceLayout(0, STORE))
    for own in gl.static_range(OWN):
        y = acc0 if own == 0 else acc1
        factor = gl.convert_layout(factor0 if own == 0 else factor1, ROWS, assert_trivial=True)
        y = y * factor[:, None] * gl.convert_layout(s_x, TOKENS)[None, :]
        if BIAS:
            y += gl.convert_layout(bias0 if own == 0 else bias1, ROWS, assert_trivial=True)[:, None]
        y = activate(y, act_alpha, act_beta, act_limit, ACTIVATION)
        if SCATTER:
            y = y * gl.convert_layout(weight, gl.SliceLayout(0, y.type.layout))[None, :]
        store_rows(y.to(gl.bfloat16), r, out_ptr, (block + own) * COLUMNS, out_columns, out_stride)


@gluon.jit
def of_tokens(order_ptr, x_scale_ptr, row, end, WIDTH: gl.constexpr, SCATTER: gl.constexpr):
    """Where results of sorted rows from `row` on go, -1 from `end` on, and the rows' scales."""
    mine = row + gl.arange(0, WIDTH, gl.BlockedLayout([1], [32], [4], [0]))
    held = gl.minimum(mine, end - 1)
    to = mine
    if SCATTER:
        to = gl.load(order_ptr + held)
    return gl.where(mine < end, to, -1), gl.load(x_scale_ptr + held)


@gluon.jit
def multiply_tile(
    used, x, w, w_scale, full, empty, x_scale_ptr, alpha_ptr, bias_ptr, out_ptr, order_ptr, weights_ptr,
    expert, n, row, end, n_blocks, out_columns, groups, out_stride, act_alpha, act_beta, act_limit,
    HALF: gl.constexpr, ACTIVATION: gl.constexpr, SCATTER: gl.constexpr, BIAS: gl.constexpr,
    BLOCKS: gl.constexpr, WIDTH: gl.constexpr, MORE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Multiply and store this group's half of one tile, of which at most WIDTH + MORE tokens exist."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 32])
    ACC_MORE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, max(MORE, 8), 32])
    OWN: gl.constexpr = BLOCKS // 2
    acc0 = gl.zeros([64, WIDTH], gl.float32, ACC)
    acc1 = gl.zeros([64, WIDTH], gl.float32, ACC)
    more0 = gl.zeros([64, max(MORE, 8)], gl.float32, ACC_MORE)
    more1 = gl.zeros([64, max(MORE, 8)], gl.float32, ACC_MORE)
    block = n * BLOCKS + HALF * OWN
    factor0, factor1, bias0, bias1 = of_rows(alpha_ptr, bias_ptr, expert, block, n_blocks, ACC, BIAS)
    to, s_x = of_tokens(order_ptr, x_scale_ptr, row, end, WIDTH, SCATTER)
    if MORE:
        to_more, s_x_more = of_tokens(order_ptr, x_scale_ptr, row + WIDTH, end, MORE, SCATTER)
    for _ in range(0, groups // 2):
        stage = used % STAGES
        after = (used + 1) % STAGES
        mbarrier.wait(full.index(stage), (used // STAGES) & 1)
        acc0, acc1, more0, more1 = multiply_step(
            stage, stage, acc0, acc1, more0, more1, x, w, w_scale, empty, HALF, BLOCKS, MORE, False
        )
        mbarrier.wait(full.index(after), ((used + 1) // STAGES) & 1)
        acc0, acc1, more0, more1 = multiply_step(
            after, stage, acc0, acc1, more0, more1, x, w, w_scale, empty, HALF, BLOCKS, MORE, True
        )
        acc0, acc1, more0, more1 = warpgroup_mma_wait(0, deps=[acc0, acc1, more0, more1])
        gl.thread_barrier()
        mbarrier.arrive(empty.index(after), count=1)
        used += 2
    for _ in range(0, groups % 2):
        stage = used % STAGES
        mbarrier.wait(full.index(stage), (used // STAGES) & 1)
        acc0, acc1, more0, more1 = multiply_step(
            stage, stage, acc0, acc1, more0, more1, x, w, w_scale, empty, HALF, BLOCKS, MORE, False
        )
        acc0, acc1, more0, more1 = warpgroup_mma_wait(0, deps=[acc0, acc1, more0, more1])
        gl.thread_barrier()
        mbarrier.arrive(empty.index(stage), count=1)
        used += 1
    finish_part(
        acc0, acc1, factor0, factor1, bias0, bias1, to, s_x, out_ptr, weights_ptr, block, out_columns,
        out_stride, act_alpha, act_beta, act_limit, OWN, ACTIVATION, SCATTER, BIAS,
    )  # fmt: skip
    if MORE:
        finish_part(
            more0, more1, factor0, factor1, bias0, bias1, to_more, s_x_more, out_ptr, weights_ptr, block,
            out_columns, out_stride, act_alpha, act_beta, act_limit, OWN, ACTIVATION, SCATTER, BIAS,
        )  # fmt: skip
    return used


@gluon.jit
def of_rows(alpha_ptr, bias_ptr, expert, block, n_blocks, ACC: gl.constexpr, BIAS: gl.constexpr):
    """Factors and biases of two blocks of weight rows."""
    n_rows = n_blocks * 64
    at = block * 64 + gl.arange(0, 64, gl.SliceLayout(1, ACC))
    factor0 = gl.load(alpha_ptr + expert * n_rows + at, mask=at < n_rows, other=0.0)
    factor1 = gl.load(alpha_ptr + expert * n_rows + at + 64, mask=at + 64 < n_rows, other=0.0)
    bias0 = factor0
    bias1 = factor1
    if BIAS:
        bias0 = gl.load(bias_ptr + expert * n_rows + at, mask=at < n_rows, other=0.0)
        bias1 = gl.load(bias_ptr + expert * n_rows + at + 64, mask=at + 64 < n_rows, other=0.0)
    return factor0, factor1, bias0, bias1


@gluon.jit
def multiply_narrow(
    used, x, w, w_scale, full, empty, x_scale_ptr, alpha_ptr, bias_ptr, out_ptr, order_ptr, weights_ptr,
    expert, n, row, end, n_blocks, out_columns, groups, out_stride, act_alpha, act_beta, act_limit,
    HALF: gl.constexpr, ACTIVATION: gl.constexpr, SCATTER: gl.constexpr, BIAS: gl.constexpr,
    BLOCKS: gl.constexpr, TOKENS: gl.constexpr, WIDTHS: gl.constexpr, STAGES: gl.constexpr,
    PARTS: gl.constexpr,
):  # fmt: skip
    """`multiply_tile` as wide as the tile's tokens need, from PARTS / WIDTHS of TOKENS on."""
    PART: gl.constexpr = TOKENS // WIDTHS
    NEXT: gl.constexpr = 8 if PARTS == 6 else PARTS + 1
    POWER: gl.constexpr = 8 if PARTS == 8 else 4 if PARTS >= 4 else 2 if PARTS >= 2 else 1
    if PARTS == WIDTHS or end - row <= PARTS * PART:
        used = multiply_tile(
            used, x, w, w_scale, full, empty, x_scale_ptr, alpha_ptr, bias_ptr, out_ptr, order_ptr,
            weights_ptr, expert, n, row, end, n_blocks, out_columns, groups, out_stride, act_alpha, act_beta,
            act_limit,
            HALF, ACTIVATION, SCATTER, BIAS, BLOCKS, POWER * PART, (PARTS - POWER) * PART, STAGES,
        )  # fmt: skip
    else:
        used = multiply_narrow(
            used, x, w, w_scale, full, empty, x_scale_ptr, alpha_ptr, bias_ptr, out_ptr, order_ptr,
            weights_ptr, expert, n, row, end, n_blocks, out_columns, groups, out_stride, act_alpha, act_beta,
            act_limit,
            HALF, ACTIVATION, SCATTER, BIAS, BLOCKS, TOKENS, WIDTHS, STAGES, NEXT,
        )  # fmt: skip
    return used


@gluon.jit
def multiply_tiles(
    x, w, w_scale, drawn, full, empty, x_scale_ptr, alpha_ptr, bias_ptr, out_ptr, order_ptr, weights_ptr,
    n_blocks, out_columns, groups, out_stride, act_alpha, act_beta, act_limit,
    HALF: gl.constexpr, ACTIVATION: gl.constexpr, SCATTER: gl.constexpr, BIAS: gl.constexpr,
    BLOCKS: gl.constexpr, TOKENS: gl.constexpr, WIDTHS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Multiply and store half of the BLOCKS weight blocks of every tile of this program; four warps."""
    used = 0
    mbarrier.wait(full.index(0), 0)
    expert, n, row, end = published(drawn, 0)
    while expert >= 0:
        used = multiply_narrow(
            used, x, w, w_scale, full, empty, x_scale_ptr, alpha_ptr, bias_ptr, out_ptr, order_ptr,
            weights_ptr, expert, n, row, end, n_blocks, out_columns, groups, out_stride, act_alpha, act_beta,
            act_limit,
            HALF, ACTIVATION, SCATTER, BIAS, BLOCKS, TOKENS, WIDTHS, STAGES, 1,
        )  # fmt: skip
        mbarrier.wait(full.index(used % STAGES), (used // STAGES) & 1)
        expert, n, row, end = published(drawn, used % STAGES)


@gluon.jit(do_not_specialize=["n_blocks", "groups"])
def expert_gemm_w4a8(
    x_desc, x_scale_ptr, w_desc, w_scale_ptr, alpha_ptr, bias_ptr, out_ptr, order_ptr, tiles_ptr,
    weights_ptr,
    n_blocks, out_columns, groups, out_stride, act_alpha, act_beta, act_limit,
    ACTIVATION: gl.constexpr, SECOND: gl.constexpr, SCATTER: gl.constexpr, BIAS: gl.constexpr,
    BLOCKS: gl.constexpr, TOKENS: gl.constexpr, WIDTHS: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """out[row] = act(w[expert] @ x[row] + bias[expert]), rows sorted by expert; as `expert_gemm` takes them.

    x e4m3 [rows, 128 groups], sorted, and float32 x_scale [rows]; w int32 [E * groups * n_blocks * 32, 32],
    w_scale and alpha of FragmentsFP8; bias float32 [E, 64 n_blocks]. Tiles are of 2 or 4 BLOCKS of 64 weight
    rows by TOKENS; WIDTHS: 4, or 1 for that width alone. SECOND: which counter tiles are drawn from. As many
    programs as multiprocessors; four warps.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x = gl.allocate_shared_memory(x_desc.dtype, [STAGES, TOKENS, 128], x_desc.layout)
    w = gl.allocate_shared_memory(w_desc.dtype, [STAGES, 32 * BLOCKS, 32], w_desc.layout)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    w_scale = gl.allocate_shared_memory(gl.int32, [STAGES, 64 * BLOCKS], LINE)
    drawn = drawn_memory(STAGES)
    full, empty = stage_barriers(STAGES, 1, 2)
    gl.warp_specialize(
        [
            (multiply_tiles, (
                x, w, w_scale, drawn, full, empty, x_scale_ptr, alpha_ptr, bias_ptr, out_ptr, order_ptr,
                weights_ptr, n_blocks, out_columns, groups, out_stride, act_alpha, act_beta, act_limit,
                0, ACTIVATION, SCATTER, BIAS, BLOCKS, TOKENS, WIDTHS, STAGES,
            )),
            (multiply_tiles, (
                x, w, w_scale, drawn, full, empty, x_scale_ptr, alpha_ptr, bias_ptr, out_ptr, order_ptr,
                weights_ptr, n_blocks, out_columns, groups, out_stride, act_alpha, act_beta, act_limit,
                1, ACTIVATION, SCATTER, BIAS, BLOCKS, TOKENS, WIDTHS, STAGES,
            )),
            (load_tiles, (
                x_desc, w_desc, w_scale_ptr, tiles_ptr, x, w, w_scale, drawn, full, empty, n_blocks, groups,
                SECOND, BLOCKS, TOKENS, STAGES, GROUP,
            )),
        ],
        [4, 1], [232, 24],
    )  # fmt: skip
