"""The grouped GEMM for many tokens per expert, 4 bits or bf16: four warps load, eight multiply (Gluon).

Tiles are 256 weight rows by 128 tokens, so that few bytes pass from the L2 cache per product. A program goes
from tile to tile. One group of four warps loads, a ring of stages ahead: gathered rows and 4-bit weights by
cp.async, sorted rows and bf16 weights by the TMA. Two groups multiply, each half of the weight rows, with
nothing between them but the barriers of the stages: while one decodes, waits or stores, the tensor cores work
for the other.

* Tiles are drawn from a counter, by the loading warps, which publish them in shared memory
  (schedule.py). 4-bit ones come widest first. With every 132nd tile instead, some programs got whole
  ones only, and the busiest had up to 1.5 times the mean.
* A tile of fewer tokens takes as many quarters (4 bits: eighths) of the width as it needs, in two products
  where their number is no power of two.
* A step takes two blocks of 64 columns of 4-bit weights; where their number is odd, the last takes one. They
  are decoded 32 columns at a time, and where results go is looked up in a tile's beginning: 2 % of a layer.
* Decoded weights are the registers of an operand, so a step ends with all its products done. With one in
  flight from step to step, ptxas keeps those registers through all the branches that the groups share, finds
  too few, and serialises every product (its warning C7512).
* Results go to memory as bf16 through stmatrix, 16 bytes a thread.
* With about 128 tokens per expert, half of them need a second tile for a few, whose weights are read and
  decoded again. 4-bit tiles of 144 tokens (EXTRA) spare that: 440 us instead of 447 at 1024 tokens of
  GPT-OSS-20B, before halves 677 instead of 760 at 4096 of DeepSeek-V3, 1647 instead of 1630 of GPT-OSS-120B.
  With 512 per expert they take 2 to 7 % longer: 16 tokens take the tensor cores longer than their share. So
  the rule leaves them out, and tables have them where they were best.

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

from turnout.kernels.hopper.decode import decode_half, halves_held, packed_tile
from turnout.kernels.hopper.schedule import (
    advance,
    draw,
    drawn_memory,
    publish,
    published,
    stage_barriers,
    tile_at,
)
from turnout.kernels.hopper.tile import finish_part, gathered_tokens, result_rows, tile_memory


@gluon.jit
def copy_packed(weights, w, scales, slot, k, k_blocks):
    """Start copying block k of columns of a tile's codes and scales. weights: of `packed_tile`."""
    codes_at, scales_at, codes_exist, scales_exist = weights
    WORDS: gl.constexpr = scales_at.shape[1]
    live = k < k_blocks
    async_copy.async_copy_global_to_shared(w.index(slot), codes_at + k * 512, mask=codes_exist & live)
    async_copy.async_copy_global_to_shared(
        scales.index(slot), scales_at + k * WORDS, mask=scales_exist & live
    )


@gluon.jit
def copy_gathered(x_from, x, slot, tokens, column, K, x_stride):
    """Start copying 64 columns of tokens; zeros of those that do not exist, and from column K on. tokens: of
    `gathered_tokens`."""
    token, exists = tokens
    rows = x_from + token.to(gl.int64)[:, None] * x_stride
    async_copy.async_copy_global_to_shared(x.index(slot), rows + column, mask=exists[:, None] & (column < K))


@gluon.jit
def copy_step(
    x_from, extra_from, w_from, x, extra, w, scales, bar, stage, step, weights, tokens, more, row, wide, K,
    k_blocks, x_stride,
    PACKED: gl.constexpr, GATHER: gl.constexpr, TOKENS: gl.constexpr, EXTRA: gl.constexpr,
    K_BLOCKS: gl.constexpr, COPY_ROWS: gl.constexpr,
):  # fmt: skip
    """Start copying K_BLOCKS blocks of 64 columns of a tile to a stage, whose barrier is `bar`.

    weights: PACKED: of `packed_tile`; else the first row. tokens, and those of EXTRA more: GATHER: of
    `gathered_tokens`; else they are the rows from `row` on, and more exist where `wide`.
    """
    for j in gl.static_range(K_BLOCKS):
        slot = stage * K_BLOCKS + j
        k = step * K_BLOCKS + j
        if not PACKED:
            tma.async_copy_global_to_shared(w_from, [weights, k * 64], bar, w.index(slot))
        if not GATHER:
            tma.async_copy_global_to_shared(x_from, [row, k * 64], bar, x.index(slot))
            if EXTRA > 0:
                tma.async_copy_global_to_shared(
                    extra_from, [row + TOKENS, k * 64], bar, extra.index(slot), pred=wide
                )
        if PACKED:
            copy_packed(weights, w, scales, slot, k, k_blocks)
        if GATHER:
            column = k * 64 + gl.arange(0, 64, gl.SliceLayout(0, COPY_ROWS))[None, :]
            copy_gathered(x_from, x, slot, tokens, column, K, x_stride)
            if EXTRA > 0:
                copy_gathered(x_from, extra, slot, more, column, K, x_stride)


@gluon.jit
def load_tiles(
    x_from, extra_from, w_from, scales_ptr, order_ptr, tiles_ptr, x, extra, w, scales, drawn, full, empty,
    K, n_rows, k_blocks, n_blocks, x_stride, top_k,
    FORMAT: gl.constexpr, GATHER: gl.constexpr, ROWS: gl.constexpr, TOKENS: gl.constexpr,
    EXTRA: gl.constexpr, K_BLOCKS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Draw tiles, publish each at its first stage, and load them, 64 columns at a time, as stages become
    empty; no expert: none is left. Four warps.
    """
    PACKED: gl.constexpr = FORMAT != "bf16"
    BLOCKS: gl.constexpr = ROWS // 64
    COPY_ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    COPY_CODES: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [1, 4], [1, 0])
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
        tokens, more = row, row  # of no use where rows are not gathered
        if GATHER:
            tokens = gathered_tokens(order_ptr, row, end, top_k, TOKENS, COPY_ROWS)
            if EXTRA > 0:
                more = gathered_tokens(order_ptr, row + TOKENS, end, top_k, EXTRA, COPY_ROWS)
        place = draw(tiles_ptr, not GATHER)
        if PACKED:
            weights = packed_tile(
                w_from, scales_ptr, expert, n, k_blocks, n_blocks, BLOCKS, FORMAT, COPY_CODES
            )
        else:
            weights = expert * n_rows + n * ROWS
        wide = end - row > TOKENS
        mbarrier.wait(empty.index(stage), phase)
        publish(drawn, stage, expert, n, row, end)
        for step in range(0, steps):
            mbarrier.wait(empty.index(stage), phase)
            bar = full.index(stage)
            if EXTRA > 0 and not GATHER:
                mbarrier.expect(bar, K_BLOCKS * BYTES, pred=not wide)
                mbarrier.expect(bar, K_BLOCKS * (BYTES + EXTRA * 128), pred=wide)
            elif BYTES > 0:
                mbarrier.expect(bar, K_BLOCKS * BYTES)
            copy_step(
                x_from, extra_from, w_from, x, extra, w, scales, bar, stage, step, weights, tokens, more, row,
                wide, K, k_blocks, x_stride, PACKED, GATHER, TOKENS, EXTRA, K_BLOCKS, COPY_ROWS,
            )  # fmt: skip
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
def add_products(a, tokens, last, acc, more, FLIGHT: gl.constexpr, MORE: gl.constexpr):
    """acc += a @ tokens, more += a @ last; then all but FLIGHT or 2 products are awaited."""
    acc = warpgroup_mma_wait(FLIGHT, deps=[warpgroup_mma(a, tokens, acc, is_async=True)])
    if MORE > 0:
        if isinstance(a, gl.tensor):
            a = gl.convert_layout(a, gl.DotOperandLayout(0, more.type.layout, 2), assert_trivial=True)
        more = warpgroup_mma_wait(2, deps=[warpgroup_mma(a, last, more, is_async=True)])
    return acc, more


@gluon.jit
def multiply_step(
    stage, phase, step, x, extra, w, scales, full, empty, acc0, acc1, more0, more1,
    HALF: gl.constexpr, FORMAT: gl.constexpr, GATHER: gl.constexpr, HELD: gl.constexpr, WIDTH: gl.constexpr,
    MORE: gl.constexpr, K_BLOCKS: gl.constexpr, BLOCKS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Add the products of a stage's first BLOCKS blocks of columns; 4-bit weights: none stays in flight."""
    PACKED: gl.constexpr = FORMAT != "bf16"
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, acc0.type.layout, 2)
    SECOND: gl.constexpr = 2 if MORE else 1  # products that may be under way while the second block's begin
    mbarrier.wait(full.index(stage), phase)
    if GATHER:
        fence_async_shared()
    for j in gl.static_range(BLOCKS):
        slot = stage * K_BLOCKS + j
        tokens = x.index(slot).slice(0, WIDTH).permute((1, 0))
        last = tokens
        if MORE > 0:
            if x.shape[1] < WIDTH + MORE:
                last = extra.index(slot).permute((1, 0))
            else:
                last = x.index(slot).slice(WIDTH, MORE).permute((1, 0))
        if PACKED:
            block0 = halves_held(w, scales, slot, HALF * HELD, FORMAT)
            block1 = halves_held(w, scales, slot, HALF * HELD + HELD - 1, FORMAT)
            for half in gl.static_range(2):
                b = tokens.slice(32 * half, 32, 0)
                b_last = last.slice(32 * half, 32, 0)
                a = decode_half(block0[half], FORMAT, OPERAND)
                acc0, more0 = add_products(a, b, b_last, acc0, more0, 1, MORE)
                if HELD == 2:
                    a = decode_half(block1[half], FORMAT, OPERAND)
                    acc1, more1 = add_products(a, b, b_last, acc1, more1, SECOND, MORE)
        else:
            a = w.index(slot).slice(HALF * HELD * 64, 64)
            acc0, more0 = add_products(a, tokens, last, acc0, more0, 1, MORE)
            if HELD == 2:
                a = w.index(slot).slice(HALF * HELD * 64 + 64, 64)
                acc1, more1 = add_products(a, tokens, last, acc1, more1, SECOND, MORE)
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
    stage, phase, x, extra, w, scales, full, empty, alpha_ptr, bias_ptr, out_ptr, order_ptr, weights_ptr,
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
    to = result_rows(order_ptr, row, end, WIDTH, SCATTER)
    to_more = result_rows(order_ptr, row + WIDTH, end, max(MORE, 8), SCATTER)
    whole = k_blocks // K_BLOCKS if RAGGED else gl.cdiv(k_blocks, K_BLOCKS)
    for step in range(0, whole):
        acc0, acc1, more0, more1 = multiply_step(
            stage, phase, step, x, extra, w, scales, full, empty, acc0, acc1, more0, more1,
            HALF, FORMAT, GATHER, HELD, WIDTH, MORE, K_BLOCKS, K_BLOCKS, STAGES,
        )  # fmt: skip
        stage, phase = advance(stage, phase, STAGES)
    if RAGGED:
        acc0, acc1, more0, more1 = multiply_step(
            stage, phase, whole, x, extra, w, scales, full, empty, acc0, acc1, more0, more1,
            HALF, FORMAT, GATHER, HELD, WIDTH, MORE, K_BLOCKS, 1, STAGES,
        )  # fmt: skip
        stage, phase = advance(stage, phase, STAGES)
    if not PACKED:
        acc0, acc1, more0, more1 = warpgroup_mma_wait(0, deps=[acc0, acc1, more0, more1])
        gl.thread_barrier()
        mbarrier.arrive(empty.index(gl.where(stage == 0, STAGES, stage) - 1), count=1)
    finish_part(
        acc0, acc1, alpha, bias0, bias1, to, out_ptr, weights_ptr, block, out_columns, out_stride, act_alpha,
        act_beta, act_limit, HELD, PACKED, ACTIVATION, SCATTER, BIAS,
    )  # fmt: skip
    if MORE > 0:
        finish_part(
            more0, more1, alpha, bias0, bias1, to_more, out_ptr, weights_ptr, block, out_columns, out_stride,
            act_alpha, act_beta, act_limit, HELD, PACKED, ACTIVATION, SCATTER, BIAS,
        )  # fmt: skip
    return stage, phase


@gluon.jit
def multiply_narrow(
    stage, phase, x, extra, w, scales, full, empty, alpha_ptr, bias_ptr, out_ptr, order_ptr, weights_ptr,
    expert, n, row, end, n_rows, k_blocks, out_columns, out_stride, act_alpha, act_beta, act_limit,
    HALF: gl.constexpr, FORMAT: gl.constexpr, ACTIVATION: gl.constexpr, GATHER: gl.constexpr,
    SCATTER: gl.constexpr, BIAS: gl.constexpr, ROWS: gl.constexpr, TOKENS: gl.constexpr,
    EXTRA: gl.constexpr, WIDTHS: gl.constexpr, K_BLOCKS: gl.constexpr, STAGES: gl.constexpr,
    RAGGED: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """`multiply_tile` as wide as the tile's tokens need, from PARTS / WIDTHS of TOKENS on."""
    PART: gl.constexpr = TOKENS // WIDTHS
    NEXT: gl.constexpr = WIDTHS + 1 if PARTS == WIDTHS else 8 if PARTS == 6 else PARTS + 1
    POWER: gl.constexpr = 8 if PARTS == 8 else 4 if PARTS >= 4 else 2 if PARTS >= 2 else 1
    WIDE: gl.constexpr = PARTS > WIDTHS
    WIDTH: gl.constexpr = TOKENS if WIDE else POWER * PART
    MORE: gl.constexpr = EXTRA if WIDE else (PARTS - POWER) * PART
    if WIDE or (PARTS == WIDTHS and EXTRA == 0) or end - row <= PARTS * PART:
        stage, phase = multiply_tile(
            stage, phase, x, extra, w, scales, full, empty, alpha_ptr, bias_ptr, out_ptr, order_ptr,
            weights_ptr, expert, n, row, end, n_rows, k_blocks, out_columns, out_stride, act_alpha, act_beta,
            act_limit,
            HALF, FORMAT, ACTIVATION, GATHER, SCATTER, BIAS, ROWS, WIDTH, MORE, K_BLOCKS, STAGES, RAGGED,
        )  # fmt: skip
    else:
        stage, phase = multiply_narrow(
            stage, phase, x, extra, w, scales, full, empty, alpha_ptr, bias_ptr, out_ptr, order_ptr,
            weights_ptr, expert, n, row, end, n_rows, k_blocks, out_columns, out_stride, act_alpha, act_beta,
            act_limit,
            HALF, FORMAT, ACTIVATION, GATHER, SCATTER, BIAS, ROWS, TOKENS, EXTRA, WIDTHS, K_BLOCKS, STAGES,
            RAGGED, NEXT,
        )  # fmt: skip
    return stage, phase


@gluon.jit
def multiply_tiles(
    x, extra, w, scales, drawn, full, empty, alpha_ptr, bias_ptr, out_ptr, order_ptr, weights_ptr,
    n_rows, k_blocks, out_columns, out_stride, act_alpha, act_beta, act_limit,
    HALF: gl.constexpr, FORMAT: gl.constexpr, ACTIVATION: gl.constexpr, GATHER: gl.constexpr,
    SCATTER: gl.constexpr, BIAS: gl.constexpr, ROWS: gl.constexpr, TOKENS: gl.constexpr,
    EXTRA: gl.constexpr, WIDTHS: gl.constexpr, K_BLOCKS: gl.constexpr, STAGES: gl.constexpr,
    RAGGED: gl.constexpr,
):  # fmt: skip
    """Multiply and store half of the weight rows of every tile of this program; four warps."""
    stage = 0
    phase = 0
    mbarrier.wait(full.index(stage), phase)
    expert, n, row, end = published(drawn, stage)
    while expert >= 0:
        stage, phase = multiply_narrow(
            stage, phase, x, extra, w, scales, full, empty, alpha_ptr, bias_ptr, out_ptr, order_ptr,
            weights_ptr, expert, n, row, end, n_rows, k_blocks, out_columns, out_stride, act_alpha, act_beta,
            act_limit,
            HALF, FORMAT, ACTIVATION, GATHER, SCATTER, BIAS, ROWS, TOKENS, EXTRA, WIDTHS, K_BLOCKS, STAGES,
            RAGGED, 1,
        )  # fmt: skip
        mbarrier.wait(full.index(stage), phase)
        expert, n, row, end = published(drawn, stage)


@gluon.jit(do_not_specialize=["n_rows", "k_blocks", "n_blocks", "top_k"])
def expert_gemm_specialised(
    x_from, extra_from, w_from, scales_ptr, alpha_ptr, bias_ptr, out_ptr, order_ptr, tiles_ptr, weights_ptr,
    K, n_rows, out_columns, k_blocks, n_blocks, x_stride, out_stride, top_k, act_alpha, act_beta, act_limit,
    FORMAT: gl.constexpr, ACTIVATION: gl.constexpr, GATHER: gl.constexpr, SCATTER: gl.constexpr,
    BIAS: gl.constexpr, ROWS: gl.constexpr, TOKENS: gl.constexpr, EXTRA: gl.constexpr, WIDTHS: gl.constexpr,
    K_BLOCKS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, RAGGED: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """out[row] = act(w[expert] @ x[row] * alpha[expert] + bias[expert]), rows sorted by expert.

    As `expert_gemm`, but: x_from where rows are not gathered, and bf16 weights [E * n_rows, K] as w_from, are
    descriptors of tiles of 64 columns. Tiles are of TOKENS + EXTRA tokens; extra_from is a descriptor for the
    latter. WIDTHS: parts of TOKENS that narrower tiles take, 8, 4, or 1 for none. RAGGED: k_blocks is odd
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
    extra = x
    if EXTRA > 0:
        extra = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, EXTRA, 64], gl.NVMMASharedLayout(128, 16, 2))
    drawn = drawn_memory(STAGES)
    full, empty = stage_barriers(STAGES, COUNT, 2)
    gl.warp_specialize(
        [
            (load_tiles, (
                x_from, extra_from, w_from, scales_ptr, order_ptr, tiles_ptr, x, extra, w, scales, drawn,
                full, empty,
                K, n_rows, k_blocks, n_blocks, x_stride, top_k,
                FORMAT, GATHER, ROWS, TOKENS, EXTRA, K_BLOCKS, STAGES, GROUP,
            )),
            (multiply_tiles, (
                x, extra, w, scales, drawn, full, empty, alpha_ptr, bias_ptr, out_ptr, order_ptr, weights_ptr,
                n_rows, k_blocks, out_columns, out_stride, act_alpha, act_beta, act_limit,
                0, FORMAT, ACTIVATION, GATHER, SCATTER, BIAS, ROWS, TOKENS, EXTRA, WIDTHS, K_BLOCKS, STAGES,
                RAGGED,
            )),
            (multiply_tiles, (
                x, extra, w, scales, drawn, full, empty, alpha_ptr, bias_ptr, out_ptr, order_ptr, weights_ptr,
                n_rows, k_blocks, out_columns, out_stride, act_alpha, act_beta, act_limit,
                1, FORMAT, ACTIVATION, GATHER, SCATTER, BIAS, ROWS, TOKENS, EXTRA, WIDTHS, K_BLOCKS, STAGES,
                RAGGED,
            )),
        ],
        [4, 4], [216, 216],
    )  # fmt: skip
