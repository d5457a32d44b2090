"""Grouped GEMM of the experts on Hopper (Gluon) for FP8 in blocks of 128: weights and activations in e4m3.

Tiles, operands and the order of programs are those of gemm.py: weights are the first operand of
`wgmma`, tokens the second. Both are read from shared memory. Every 128 columns have scales of their own, so
the products of a block start from zero and are added to the sum in float32, times a token's scale and a
weight block's. That also keeps the sums of the tensor cores, which carry only 14 bits of FP8 products,
as short as the format's authors mean them to be (DeepSeek-V3 technical report, section 3.3).

Activations are quantised per token and 128 columns: by `sort_and_quantize` or `quantize_rows` before the GEMM
(quantize_groups.py), or, INSIDE, by every program for its own tokens (rows_fp8.py) while its first
weights are on their way. The bits are the same. GEMM2's programs then ask for weights before GEMM1 has ended,
as nothing lies between.

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

from turnout.kernels.hopper.rows_fp8 import load_row, load_staged, power_of_two, quantize_row, stage_row
from turnout.kernels.hopper.tile import finish, locate, token_rows


@gluon.jit
def copy_weights(w_desc, w, full, slot, w_row, column, BLOCK_N: gl.constexpr, K_BLOCKS: gl.constexpr):
    """Start copying K_BLOCKS groups of columns of a tile of weights to stage `slot`."""
    bar = full.index(slot)
    mbarrier.expect(bar, K_BLOCKS * BLOCK_N * 128)
    for j in gl.static_range(K_BLOCKS):
        tma.async_copy_global_to_shared(w_desc, [w_row, column + j * 128], bar, w.index(slot * K_BLOCKS + j))


@gluon.jit
def copy_tokens(
    x_ptr, x_scale_ptr, x, x_scale, slot, step, places,
    GROUPS: gl.constexpr, K_BLOCKS: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Start copying the columns of step `step` of the tile's tokens, already quantised; places: of
    `begin_tokens`."""
    ROWS: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [num_warps, 1], [1, 0])
    x_offset, x_exists, s_offset, s_exists = places
    c = gl.arange(0, 128, gl.SliceLayout(0, ROWS))[None, :]
    for j in gl.static_range(K_BLOCKS):
        group = step * K_BLOCKS + j
        live = group < GROUPS
        async_copy.async_copy_global_to_shared(
            x.index(slot * K_BLOCKS + j), x_ptr + x_offset[:, None] + (group * 128 + c),
            mask=x_exists[:, None] & live,
        )  # fmt: skip
        async_copy.async_copy_global_to_shared(
            x_scale.index(slot * K_BLOCKS + j), x_scale_ptr + s_offset + group, mask=s_exists & live
        )


@gluon.jit
def copy_weight_scales(
    w_scale_ptr, expert, n, n_rows, GROUPS: gl.constexpr, PAIRED: gl.constexpr, BLOCK_N: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """Start copying a tile's scales, two of each group: of gate and of up, or of the first 128 and the other
    rows. In global memory eight groups share a sector, for which the tile would wait every eighth time.
    """
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    SIZE: gl.constexpr = power_of_two(2 * GROUPS)
    scales = gl.allocate_shared_memory(gl.float32, [SIZE], LINE)
    i = gl.arange(0, SIZE, gl.BlockedLayout([1], [32], [num_warps], [0]))
    blocks = n_rows // 128
    if PAIRED:
        block = n * (BLOCK_N // 2) // 128 + (i % 2) * (blocks // 2)
    else:
        block = gl.minimum(n * BLOCK_N // 128 + i % 2, blocks - 1)
    at = (expert * blocks + block).to(gl.int64) * GROUPS + i // 2
    async_copy.async_copy_global_to_shared(scales, w_scale_ptr + at, mask=i < 2 * GROUPS)
    return scales._reinterpret(gl.float32, [SIZE, 1], LINE)


@gluon.jit
def begin_weights(
    w_desc, expert, n, n_rows,
    BLOCK_N: gl.constexpr, K_BLOCKS: gl.constexpr, STAGES: gl.constexpr, STEPS: gl.constexpr,
):  # fmt: skip
    """The memory of STAGES stages of weights, and their barriers; copies to all but the last begin."""
    AHEAD: gl.constexpr = STAGES - 1
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    w = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * K_BLOCKS, BLOCK_N, 128], TILE)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    w_row = expert * n_rows + n * BLOCK_N
    for i in gl.static_range(AHEAD if AHEAD < STEPS else STEPS):
        copy_weights(w_desc, w, full, i, w_row, i * K_BLOCKS * 128, BLOCK_N, K_BLOCKS)
    return w, full


@gluon.jit
def begin_tokens(
    x_ptr, x_scale_ptr, order_ptr, row, end, top_k, x_stride,
    GROUPS: gl.constexpr, TOKENS: gl.constexpr, K_BLOCKS: gl.constexpr, STAGES: gl.constexpr,
    GATHER: gl.constexpr, DIRECT: gl.constexpr, PDL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """The memory of STAGES stages of tokens that are quantised, and of their scales, and where they lie in x;
    copies to all but the last begin."""
    ROWS: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [num_warps, 1], [1, 0])
    LINES: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [num_warps, 1], [0, 1])
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    x = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * K_BLOCKS, TOKENS, 128], TILE)
    x_scale = gl.allocate_shared_memory(gl.float32, [STAGES * K_BLOCKS, TOKENS], LINE)
    x_offset, x_exists = token_rows(order_ptr, row, end, top_k, x_stride, TOKENS, GATHER, DIRECT, ROWS)
    s_offset, s_exists = token_rows(order_ptr, row, end, top_k, GROUPS, TOKENS, GATHER, DIRECT, LINES)
    s_offset = gl.convert_layout(s_offset, gl.BlockedLayout([1], [32], [num_warps], [0]))
    s_exists = gl.convert_layout(s_exists, gl.BlockedLayout([1], [32], [num_warps], [0]))
    places = (x_offset, x_exists, s_offset, s_exists)
    for i in gl.static_range(STAGES - 1):
        copy_tokens(x_ptr, x_scale_ptr, x, x_scale, i, i, places, GROUPS, K_BLOCKS, num_warps)
        async_copy.commit_group()
    if PDL:
        gdc_launch_dependents()
    return x, x_scale, places


@gluon.jit
def quantize_tokens(
    x_ptr, row, end, top_k, x_stride,
    GROUPS: gl.constexpr, TOKENS: gl.constexpr, GATHER: gl.constexpr, DIRECT: gl.constexpr,
    WAIT: gl.constexpr, PDL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """All columns of the tile's tokens, which are bf16 in x, and their scales, in shared memory. WAIT: x is
    there after `gdc_wait`."""
    HELD: gl.constexpr = power_of_two(GROUPS)
    LINEAR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    x = gl.allocate_shared_memory(gl.float8e4nv, [HELD, TOKENS, 128], gl.NVMMASharedLayout(128, 8, 2))
    x_scale = gl.allocate_shared_memory(gl.float32, [HELD, TOKENS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    if WAIT:
        gdc_wait()
    if PDL:
        gdc_launch_dependents()
    if DIRECT:
        token = row // top_k if GATHER else row
        staged = gl.allocate_shared_memory(gl.bfloat16, [HELD, 8, 16], LINEAR)
        stage_row(x_ptr + token.to(gl.int64) * x_stride, staged, True, 0, GROUPS, HELD, num_warps)
    async_copy.commit_group()
    if DIRECT:
        async_copy.wait_group(0)
        gl.thread_barrier()
        quantize_row(load_staged(staged, HELD, num_warps), x, x_scale, 0, HELD, TOKENS)
    else:
        for t in gl.static_range(TOKENS):
            if row + t < end:
                x_at = x_ptr + (row + t).to(gl.int64) * x_stride
                quantize_row(load_row(x_at, t, GROUPS, HELD, num_warps), x, x_scale, t, HELD, TOKENS)
    async_copy.wait_group(0)
    fence_async_shared()
    return x, x_scale


@gluon.jit
def products_of(
    w, x, w_scale, x_scale, slot, held, group, is_left, zero, TWO: gl.constexpr, ACC: gl.constexpr
):
    """Start multiplying one group of columns, and what its products are to be scaled by."""
    token = warpgroup_mma(
        w.index(slot), x.index(held).permute((1, 0)), zero, use_acc=False, max_num_imprecise_acc=128,
        is_async=True,
    )  # fmt: skip
    s_w = w_scale.index(2 * group).load(gl.SliceLayout(1, ACC))
    if TWO:
        s_w = gl.where(is_left, s_w, w_scale.index(2 * group + 1).load(gl.SliceLayout(1, ACC)))
    return token, x_scale.index(held).load(gl.SliceLayout(0, ACC))[None, :] * s_w[:, None]


@gluon.jit
def multiply_stage(
    acc, w, x, w_scale, x_scale, stage, step, is_left, zero,
    GROUPS: gl.constexpr, INSIDE: gl.constexpr, TWO: gl.constexpr, K_BLOCKS: gl.constexpr,
):  # fmt: skip
    """acc and the products of a stage's groups of columns, two at a time, if there are as many. One too many
    has weights of zero."""
    ACC: gl.constexpr = acc.type.layout
    BOTH: gl.constexpr = 2 if K_BLOCKS > 1 else 1
    for j in gl.static_range(0, K_BLOCKS, BOTH):
        slot = stage * K_BLOCKS + j
        group = gl.minimum(step * K_BLOCKS + j, GROUPS - 1)
        held = group if INSIDE else slot
        first, scale = products_of(w, x, w_scale, x_scale, slot, held, group, is_left, zero, TWO, ACC)
        if BOTH > 1:
            group = gl.minimum(step * K_BLOCKS + j + 1, GROUPS - 1)
            held = group if INSIDE else slot + 1
            second, other = products_of(
                w, x, w_scale, x_scale, slot + 1, held, group, is_left, zero, TWO, ACC
            )
        acc += warpgroup_mma_wait(BOTH - 1, deps=[first]) * scale
        if BOTH > 1:  # one after the other, as gemm_fp8_specialised.py: equal bits
            acc += warpgroup_mma_wait(0, deps=[second]) * other
    return acc


@gluon.jit
def multiply_steps(
    x_ptr, x_scale_ptr, w_desc, x, x_scale, w, w_scale, full, places, expert, n, n_rows,
    GROUPS: gl.constexpr, INSIDE: gl.constexpr, PAIRED: gl.constexpr, BLOCK_N: gl.constexpr,
    TOKENS: gl.constexpr, K_BLOCKS: gl.constexpr, STAGES: gl.constexpr, STEPS: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """The sums [BLOCK_N, TOKENS] of a tile, stage after stage; copies go on."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, TOKENS, 32])
    AHEAD: gl.constexpr = STAGES - 1
    TWO: gl.constexpr = PAIRED or BLOCK_N > 128
    w_row = expert * n_rows + n * BLOCK_N
    is_left = gl.arange(0, BLOCK_N, gl.SliceLayout(1, ACC))
    is_left = is_left % 16 < 8 if PAIRED else is_left < 128
    acc = gl.zeros([BLOCK_N, TOKENS], gl.float32, ACC)
    zero = gl.zeros([BLOCK_N, TOKENS], gl.float32, ACC)
    now = 0
    then = AHEAD
    phase = 0
    for step in range(0, STEPS):
        if not INSIDE:
            async_copy.wait_group(AHEAD - 1)
            fence_async_shared()
        gl.thread_barrier()
        ahead = step + AHEAD
        if ahead < STEPS:
            copy_weights(w_desc, w, full, then, w_row, ahead * K_BLOCKS * 128, BLOCK_N, K_BLOCKS)
        if not INSIDE:
            copy_tokens(x_ptr, x_scale_ptr, x, x_scale, then, ahead, places, GROUPS, K_BLOCKS, num_warps)
            async_copy.commit_group()
        mbarrier.wait(full.index(now), phase)
        acc = multiply_stage(
            acc, w, x, w_scale, x_scale, now, step, is_left, zero, GROUPS, INSIDE, TWO, K_BLOCKS
        )
        then = now
        phase = gl.where(now == STAGES - 1, phase ^ 1, phase)
        now = gl.where(now == STAGES - 1, 0, now + 1)
    async_copy.wait_group(0)
    return acc


@gluon.jit
def expert_gemm_fp8(
    x_ptr, x_scale_ptr, w_desc, w_scale_ptr, bias_ptr, out_ptr, order_ptr, tiles_ptr, weights_ptr,
    n_rows, out_columns, x_stride, out_stride, top_k, first_expert, num_experts,
    act_alpha, act_beta, act_limit,
    GROUPS: gl.constexpr, INSIDE: gl.constexpr, ACTIVATION: gl.constexpr, GATHER: gl.constexpr,
    SCATTER: gl.constexpr, DIRECT: gl.constexpr, PAIRED: gl.constexpr, BIAS: gl.constexpr,
    BLOCK_N: gl.constexpr, TOKENS: gl.constexpr, K_BLOCKS: gl.constexpr, STAGES: gl.constexpr,
    TILES_GROUP: gl.constexpr, PDL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """out[row] = act(w[expert] @ x[row] + bias[expert]), rows sorted by expert; as `expert_gemm` takes them.

    x e4m3 [., K], x_scale float32 [., K / 128]; or, INSIDE, x bf16, which GATHER demands to be DIRECT. w e4m3
    [E * n_rows, K], by w_desc in boxes of [BLOCK_N, 128]; w_scale float32 [E, n_rows / 128, K / 128].
    K = 128 GROUPS. PAIRED: rows are 8 of gate, 8 of up in turn, while the scale's rows are gate's, then up's.
    """
    STEPS: gl.constexpr = (GROUPS + K_BLOCKS - 1) // K_BLOCKS
    WEIGHTS_FIRST: gl.constexpr = PDL and INSIDE and not GATHER
    gl.static_assert(DIRECT or not (INSIDE and GATHER))

    if PDL and not WEIGHTS_FIRST:
        gdc_wait()
    n_tiles = gl.cdiv(n_rows, BLOCK_N)
    expert, n, row, end = locate(
        gl.program_id(0), tiles_ptr, n_tiles, first_expert, num_experts, DIRECT, TILES_GROUP
    )
    if expert < 0:
        return

    w, full = begin_weights(w_desc, expert, n, n_rows, BLOCK_N, K_BLOCKS, STAGES, STEPS)
    w_scale = copy_weight_scales(w_scale_ptr, expert, n, n_rows, GROUPS, PAIRED, BLOCK_N, num_warps)
    places = ()
    if INSIDE:
        x, x_scale = quantize_tokens(
            x_ptr, row, end, top_k, x_stride, GROUPS, TOKENS, GATHER, DIRECT, WEIGHTS_FIRST, PDL, num_warps
        )
    else:
        x, x_scale, places = begin_tokens(
            x_ptr, x_scale_ptr, order_ptr, row, end, top_k, x_stride,
            GROUPS, TOKENS, K_BLOCKS, STAGES, GATHER, DIRECT, PDL, num_warps,
        )  # fmt: skip
    acc = multiply_steps(
        x_ptr, x_scale_ptr, w_desc, x, x_scale, w, w_scale, full, places, expert, n, n_rows,
        GROUPS, INSIDE, PAIRED, BLOCK_N, TOKENS, K_BLOCKS, STAGES, STEPS, num_warps,
    )  # fmt: skip
    ACC: gl.constexpr = acc.type.layout
    finish(
        acc, w_scale_ptr, bias_ptr, out_ptr, order_ptr, weights_ptr, expert, n, n_rows, row, end,
        out_columns, out_stride, act_alpha, act_beta, act_limit, ACTIVATION, SCATTER, DIRECT, BIAS, False,
        BLOCK_N, TOKENS, ACC, num_warps,
    )  # fmt: skip
