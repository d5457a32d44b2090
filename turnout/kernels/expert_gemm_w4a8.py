"""Grouped GEMM of the experts on Hopper (Gluon): MXFP4 weights by FP8 activations, rows sorted by expert.

The frame is that of expert_gemm_fp8_specialised.py with the operands changed over: one warp loads, two
groups of four multiply 128 of a tile's 256 weight rows each, and a program goes from tile to tile. Weights
stay in 4 bits as far as the registers of the tensor cores' first operand, where each becomes a byte of e4m3
without rounding (fragments_fp8.py): 10 instructions for 8 of them, of which 3 make the tables that a byte
permute looks magnitudes up in. Block scales are in those tables, so that sums need the scale of a token and
128 columns only, and a row's factor at the end. One group decodes while the tensor cores work for the other.

Against W4A16 the products cost half, and what a tile reads from the L2 cache for them less than half.

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

from turnout.kernels.expert_tile import finish, locate

ROWS = 256  # of a tile of weights


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
    x_desc, x_scale_ptr, w_desc, w_scale_ptr, tiles_ptr, x, x_scale, w, w_scale, full, empty, n_blocks,
    groups, scale_row, scale_group, rows, first_expert, num_experts,
    TOKENS: gl.constexpr, STAGES: gl.constexpr, TILES_GROUP: gl.constexpr,
):  # fmt: skip
    """Load every tile of this program, 128 columns at a time, as stages become empty; one warp."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    WORDS: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    n_tiles = gl.cdiv(n_blocks, 4)
    total = gl.load(tiles_ptr) * n_tiles
    issued = 0
    for program in range(gl.program_id(0), total, gl.num_programs(0)):
        expert, n, row, _ = locate(program, tiles_ptr, n_tiles, first_expert, num_experts, False, TILES_GROUP)
        column = row + gl.arange(0, TOKENS, LANES)
        scale_at = x_scale_ptr + column.to(gl.int64) * scale_row
        word = gl.arange(0, 256, WORDS)
        word_held = n * 256 + word < n_blocks * 64
        for step in range(0, groups):
            stage = issued % STAGES
            block = (expert * groups + step) * n_blocks + n * 4
            mbarrier.wait(empty.index(stage), ((issued // STAGES) & 1) ^ 1)
            bar = full.index(stage)
            # Not by the TMA, which takes only multiples of four for the column of float32.
            async_copy.async_copy_global_to_shared(
                x_scale.index(stage), scale_at + step * scale_group, mask=column < rows
            )
            async_copy.async_copy_global_to_shared(
                w_scale.index(stage), w_scale_ptr + block.to(gl.int64) * 64 + word, mask=word_held
            )
            async_copy.mbarrier_arrive(bar)
            mbarrier.expect(bar, 128 * (128 + TOKENS))
            tma.async_copy_global_to_shared(w_desc, [block * 32, 0], bar, w.index(stage))
            tma.async_copy_global_to_shared(x_desc, [row, step * 128], bar, x.index(stage))
            issued += 1


@gluon.jit
def multiply(operand, x, x_scale, acc, ACC: gl.constexpr):
    """acc + operand @ x times the scales, for one block of 128 columns."""
    token = warpgroup_mma(
        operand, x.permute((1, 0)), gl.zeros_like(acc), use_acc=False, max_num_imprecise_acc=128,
        is_async=True,
    )  # fmt: skip
    products = warpgroup_mma_wait(0, deps=[token])
    s_x = x_scale.load(gl.SliceLayout(0, ACC))  # only now, for lack of registers
    return acc + products * s_x[None, :]


@gluon.jit
def store(
    acc, alpha_ptr, bias_ptr, out_ptr, order_ptr, weights_ptr, expert, block, n_rows, row, end, out_columns,
    out_stride, act_alpha, act_beta, act_limit,
    ACTIVATION: gl.constexpr, SCATTER: gl.constexpr, BIAS: gl.constexpr, TOKENS: gl.constexpr,
    ACC: gl.constexpr,
):  # fmt: skip
    """`finish` for the 64 rows of one block, times their factors."""
    r = block * 64 + gl.arange(0, 64, gl.SliceLayout(1, ACC))
    factor = gl.load(alpha_ptr + expert * n_rows + r, mask=r < n_rows, other=0.0)
    finish(
        acc * factor[:, None], alpha_ptr, bias_ptr, out_ptr, order_ptr, weights_ptr, expert, block, n_rows,
        row, end, out_columns, out_stride, act_alpha, act_beta, act_limit, ACTIVATION, SCATTER, False, BIAS,
        False, 64, TOKENS, ACC, 4,
    )  # fmt: skip


@gluon.jit
def multiply_tiles(
    x, x_scale, w, w_scale, full, empty, tiles_ptr, alpha_ptr, bias_ptr, out_ptr, order_ptr, weights_ptr,
    n_blocks, out_columns, groups, out_stride, first_expert, num_experts, act_alpha, act_beta, act_limit,
    HALF: gl.constexpr, ACTIVATION: gl.constexpr, SCATTER: gl.constexpr, BIAS: gl.constexpr,
    TOKENS: gl.constexpr, STAGES: gl.constexpr, TILES_GROUP: gl.constexpr,
):  # fmt: skip
    """Multiply and store 128 of the 256 weight rows of every tile of this program; four warps."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 32])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, ACC, 4)
    CODES: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [16, 0]], [[0, 4], [0, 8], [0, 16], [1, 0], [2, 0]], [[4, 0], [8, 0]], [], [32, 32]
    )
    SCALES: gl.constexpr = gl.DistributedLinearLayout(
        [[32]], [[0], [0], [1], [2], [4]], [[8], [16]], [], [64]
    )
    n_tiles = gl.cdiv(n_blocks, 4)
    total = gl.load(tiles_ptr) * n_tiles
    used = 0
    for program in range(gl.program_id(0), total, gl.num_programs(0)):
        expert, n, row, end = locate(
            program, tiles_ptr, n_tiles, first_expert, num_experts, False, TILES_GROUP
        )
        acc0 = gl.zeros([64, TOKENS], gl.float32, ACC)
        acc1 = gl.zeros([64, TOKENS], gl.float32, ACC)
        for _ in range(0, groups):
            stage = used % STAGES
            mbarrier.wait(full.index(stage), (used // STAGES) & 1)
            codes, scales = w.index(stage), w_scale.index(stage)
            operand0 = decode_block(
                codes.slice(HALF * 64, 32).load(CODES), scales.slice(HALF * 128, 64).load(SCALES), OPERAND
            )
            acc0 = multiply(operand0, x.index(stage), x_scale.index(stage), acc0, ACC)
            operand1 = decode_block(
                codes.slice(HALF * 64 + 32, 32).load(CODES), scales.slice(HALF * 128 + 64, 64).load(SCALES),
                OPERAND,
            )  # fmt: skip
            acc1 = multiply(operand1, x.index(stage), x_scale.index(stage), acc1, ACC)
            gl.thread_barrier()
            mbarrier.arrive(empty.index(stage), count=1)
            used += 1
        block = n * 4 + HALF * 2
        n_rows = n_blocks * 64
        store(
            acc0, alpha_ptr, bias_ptr, out_ptr, order_ptr, weights_ptr, expert, block, n_rows, row, end,
            out_columns, out_stride, act_alpha, act_beta, act_limit, ACTIVATION, SCATTER, BIAS, TOKENS, ACC,
        )  # fmt: skip
        store(
            acc1, alpha_ptr, bias_ptr, out_ptr, order_ptr, weights_ptr, expert, block + 1, n_rows, row, end,
            out_columns, out_stride, act_alpha, act_beta, act_limit, ACTIVATION, SCATTER, BIAS, TOKENS, ACC,
        )  # fmt: skip


@gluon.jit
def expert_gemm_w4a8(
    x_desc, x_scale_ptr, w_desc, w_scale_ptr, alpha_ptr, bias_ptr, out_ptr, order_ptr, tiles_ptr,
    weights_ptr,
    n_blocks, out_columns, groups, scale_row, scale_group, rows, out_stride, first_expert, num_experts,
    act_alpha, act_beta, act_limit,
    ACTIVATION: gl.constexpr, SCATTER: gl.constexpr, BIAS: gl.constexpr, TOKENS: gl.constexpr,
    STAGES: gl.constexpr, TILES_GROUP: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """out[row] = act(w[expert] @ x[row] + bias[expert]), rows sorted by expert; as `expert_gemm` takes them.

    x e4m3 [rows, 128 groups], sorted, with float32 scales of those strides; w int32 [E * groups * n_blocks
    * 32, 32], w_scale and alpha of FragmentsFP8; bias float32 [E, 64 n_blocks]. As many programs as
    multiprocessors; four warps.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x = gl.allocate_shared_memory(x_desc.dtype, [STAGES, TOKENS, 128], x_desc.layout)
    w = gl.allocate_shared_memory(w_desc.dtype, [STAGES, 128, 32], w_desc.layout)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    x_scale = gl.allocate_shared_memory(gl.float32, [STAGES, TOKENS], LINE)
    w_scale = gl.allocate_shared_memory(gl.int32, [STAGES, 256], LINE)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    gl.warp_specialize(
        [
            (multiply_tiles, (
                x, x_scale, w, w_scale, full, empty, tiles_ptr, alpha_ptr, bias_ptr, out_ptr, order_ptr,
                weights_ptr, n_blocks, out_columns, groups, out_stride, first_expert, num_experts, act_alpha,
                act_beta, act_limit,
                0, ACTIVATION, SCATTER, BIAS, TOKENS, STAGES, TILES_GROUP,
            )),
            (multiply_tiles, (
                x, x_scale, w, w_scale, full, empty, tiles_ptr, alpha_ptr, bias_ptr, out_ptr, order_ptr,
                weights_ptr, n_blocks, out_columns, groups, out_stride, first_expert, num_experts, act_alpha,
                act_beta, act_limit,
                1, ACTIVATION, SCATTER, BIAS, TOKENS, STAGES, TILES_GROUP,
            )),
            (load_tiles, (
                x_desc, x_scale_ptr, w_desc, w_scale_ptr, tiles_ptr, x, x_scale, w, w_scale, full, empty,
                n_blocks, groups, scale_row, scale_group, rows, first_expert, num_experts,
                TOKENS, STAGES, TILES_GROUP,
            )),
        ],
        [4, 1], [232, 24],
    )  # fmt: skip
