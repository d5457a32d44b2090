"""The FP8 GEMM of expert_gemm_fp8.py for many tokens per expert: sorted rows, loaded by the TMA.

With hundreds of tokens per expert the products are the bound, and what must reach every multiprocessor from
the L2 cache for them. So tiles are large, 256 weight rows by 128 tokens, and the warps of a program divide
the work: one lets the TMA load, two groups of four multiply and add, each half of the weight rows, with
nothing between them but the barriers of the stages. While one scales and adds its products, the tensor cores
work for the other. A program goes from tile to tile, so that loads run ahead while results are stored.

Rows lie sorted by expert, put there by the quantisation that reads them anyway, since the TMA loads rows
that follow each other.

Rejected: the same tiles of 128 x 128 with loads and products in the same eight warps, where six barriers a
step cost more than the TMA saves: 2924 us against 3233 of expert_gemm_fp8.py at 16384 tokens of DeepSeek-V3
on one of eight ranks, 2929 against 2856 for Qwen3-30B-A3B.

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

from turnout.kernels.expert_gemm import finish, locate
from turnout.kernels.expert_gemm_fp8 import quantize_groups

ROWS, TOKENS = 256, 128  # of a tile


@triton.jit
def gather_sorted(
    q_ptr, scale_ptr, order_ptr, tiles_ptr, to_ptr, to_scale_ptr, scale_stride, top_k,
    WORDS: tl.constexpr, GROUPS: tl.constexpr, GROUPS_PADDED: tl.constexpr, ROWS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Rows of q, WORDS int64 each, and their scales [., GROUPS] in the order of experts: sorted row r is that
    of token order[r] / top_k. Scales are turned to [GROUPS, scale_stride]. tiles[1]: how many rows.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    total = tl.load(tiles_ptr + 1)
    first = tl.program_id(0) * ROWS
    while first < total:
        row = first + tl.arange(0, ROWS)
        exists = row < total
        source = (tl.load(order_ptr + row, mask=exists, other=0) // top_k).to(tl.int64)
        for at in range(0, WORDS, 128):
            c = at + tl.arange(0, 128)[None, :]
            held = exists[:, None] & (c < WORDS)
            word = tl.load(q_ptr + source[:, None] * WORDS + c, mask=held)
            tl.store(to_ptr + row.to(tl.int64)[:, None] * WORDS + c, word, mask=held)
        g = tl.arange(0, GROUPS_PADDED)[None, :]
        held = exists[:, None] & (g < GROUPS)
        scale = tl.load(scale_ptr + source[:, None] * GROUPS + g, mask=held)
        tl.store(to_scale_ptr + g.to(tl.int64) * scale_stride + row[:, None], scale, mask=held)
        first += tl.num_programs(0) * ROWS


@triton.jit
def quantize_sorted(
    x_ptr, tiles_ptr, q_ptr, scale_ptr, K, x_stride, scale_stride,
    GROUPS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As `quantize_rows`, of the first tiles[1] rows, with scales [GROUPS, scale_stride]."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    total = tl.load(tiles_ptr + 1) * GROUPS
    first = tl.program_id(0) * BLOCK
    while first < total:
        g = first + tl.arange(0, BLOCK)
        row = g // GROUPS
        group = g % GROUPS
        column = group[:, None] * 128 + tl.arange(0, 128)[None, :]
        exists = g < total
        at = x_ptr + row.to(tl.int64)[:, None] * x_stride + column
        held = exists[:, None] & (column < K)
        q, scale = quantize_groups(tl.load(at, mask=held, other=0.0).to(tl.float32))
        tl.store(q_ptr + row.to(tl.int64)[:, None] * (GROUPS * 128) + column, q, mask=exists[:, None])
        tl.store(scale_ptr + group.to(tl.int64) * scale_stride + row, scale, mask=exists)
        first += tl.num_programs(0) * BLOCK


@gluon.jit
def load_tiles(
    x_desc, x_scale_ptr, w_desc, tiles_ptr, x, x_scale, w, full, empty, n_rows, groups, scale_stride,
    first_expert, num_experts,
    STAGES: gl.constexpr, TILES_GROUP: gl.constexpr,
):  # fmt: skip
    """Load every tile of this program, 128 columns at a time, as stages become empty; one warp."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    n_tiles = n_rows // 256
    total = gl.load(tiles_ptr) * n_tiles
    issued = 0
    for program in range(gl.program_id(0), total, gl.num_programs(0)):
        expert, n, row, _ = locate(program, tiles_ptr, n_tiles, first_expert, num_experts, False, TILES_GROUP)
        w_row = expert * n_rows + n * 256
        column = row + gl.arange(0, 128, LANES)
        for step in range(0, groups):
            stage = issued % STAGES
            mbarrier.wait(empty.index(stage), ((issued // STAGES) & 1) ^ 1)
            bar = full.index(stage)
            # Not by the TMA, which takes only multiples of four for the column of float32.
            async_copy.async_copy_global_to_shared(
                x_scale.index(stage), x_scale_ptr + step * scale_stride + column, mask=column < scale_stride
            )
            async_copy.mbarrier_arrive(bar)
            mbarrier.expect(bar, 128 * (256 + 128))
            tma.async_copy_global_to_shared(w_desc, [w_row, step * 128], bar, w.index(stage))
            tma.async_copy_global_to_shared(x_desc, [row, step * 128], bar, x.index(stage))
            issued += 1


@gluon.jit
def multiply(w, x, x_scale, s_w, acc, ACC: gl.constexpr):
    """acc + w @ x times the scales, for one block of 128 columns."""
    token = warpgroup_mma(
        w, x.permute((1, 0)), gl.zeros_like(acc), use_acc=False, max_num_imprecise_acc=128, is_async=True
    )
    products = warpgroup_mma_wait(0, deps=[token])
    s_x = x_scale.load(gl.SliceLayout(0, ACC))  # only now, for lack of registers
    return acc + products * s_x[None, :] * s_w[:, None]


@gluon.jit
def multiply_tiles(
    x, x_scale, w, full, empty, tiles_ptr, w_scale_ptr, bias_ptr, out_ptr, order_ptr, weights_ptr,
    n_rows, out_columns, groups, out_stride, first_expert, num_experts, act_alpha, act_beta, act_limit,
    HALF: gl.constexpr, ACTIVATION: gl.constexpr, SCATTER: gl.constexpr, PAIRED: gl.constexpr,
    BIAS: gl.constexpr, STAGES: gl.constexpr, TILES_GROUP: gl.constexpr,
):  # fmt: skip
    """Multiply and store 128 of the 256 weight rows of every tile of this program; four warps."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    n_tiles = n_rows // 256
    total = gl.load(tiles_ptr) * n_tiles
    used = 0
    for program in range(gl.program_id(0), total, gl.num_programs(0)):
        expert, n, row, end = locate(
            program, tiles_ptr, n_tiles, first_expert, num_experts, False, TILES_GROUP
        )
        block = n * 4 + HALF * 2  # of 64 rows
        is_gate = gl.arange(0, 64, gl.SliceLayout(1, ACC)) % 16 < 8
        # The 128 rows lie within one block of scales, or one of gate and one of up.
        gate_row = block // 4 if PAIRED else block // 2
        up_row = gate_row + n_rows // 256 if PAIRED else gate_row
        scales = w_scale_ptr + (expert * (n_rows // 128)).to(gl.int64) * groups
        acc0 = gl.zeros([64, 128], gl.float32, ACC)
        acc1 = gl.zeros([64, 128], gl.float32, ACC)
        for step in range(0, groups):
            stage = used % STAGES
            s_gate = gl.load(scales + gate_row * groups + step)
            s_up = gl.load(scales + up_row * groups + step)
            s_w = gl.where(is_gate, s_gate, s_up)
            mbarrier.wait(full.index(stage), (used // STAGES) & 1)
            tokens, s_x = x.index(stage), x_scale.index(stage)
            acc0 = multiply(w.index(stage).slice(HALF * 128, 64), tokens, s_x, s_w, acc0, ACC)
            acc1 = multiply(w.index(stage).slice(HALF * 128 + 64, 64), tokens, s_x, s_w, acc1, ACC)
            gl.thread_barrier()
            mbarrier.arrive(empty.index(stage), count=1)
            used += 1
        finish(
            acc0, w_scale_ptr, bias_ptr, out_ptr, order_ptr, weights_ptr, expert, block, n_rows, row, end,
            out_columns, out_stride, act_alpha, act_beta, act_limit, ACTIVATION, SCATTER, False, BIAS, False,
            64, 128, ACC, 4,
        )  # fmt: skip
        finish(
            acc1, w_scale_ptr, bias_ptr, out_ptr, order_ptr, weights_ptr, expert, block + 1, n_rows, row,
            end, out_columns, out_stride, act_alpha, act_beta, act_limit, ACTIVATION, SCATTER, False, BIAS,
            False, 64, 128, ACC, 4,
        )  # fmt: skip


@gluon.jit
def expert_gemm_fp8_tma(
    x_desc, x_scale_ptr, w_desc, w_scale_ptr, bias_ptr, out_ptr, order_ptr, tiles_ptr, weights_ptr,
    n_rows, out_columns, groups, scale_stride, out_stride, first_expert, num_experts,
    act_alpha, act_beta, act_limit,
    ACTIVATION: gl.constexpr, SCATTER: gl.constexpr, PAIRED: gl.constexpr, BIAS: gl.constexpr,
    STAGES: gl.constexpr, TILES_GROUP: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """out[row] = act(w[expert] @ x[row] + bias[expert]), rows sorted by expert; as of `expert_gemm_fp8`.

    x e4m3 [R, K] and x_scale float32 [K / 128, scale_stride], sorted; w e4m3 [E * n_rows, K], n_rows a
    multiple of 256; tiles of 128 tokens. As many programs as multiprocessors; four warps.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x = gl.allocate_shared_memory(x_desc.dtype, [STAGES, 128, 128], x_desc.layout)
    w = gl.allocate_shared_memory(w_desc.dtype, [STAGES, 256, 128], w_desc.layout)
    x_scale = gl.allocate_shared_memory(gl.float32, [STAGES, 128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    gl.warp_specialize(
        [
            (multiply_tiles, (
                x, x_scale, w, full, empty, tiles_ptr, w_scale_ptr, bias_ptr, out_ptr, order_ptr, weights_ptr,
                n_rows, out_columns, groups, out_stride, first_expert, num_experts, act_alpha, act_beta,
                act_limit,
                0, ACTIVATION, SCATTER, PAIRED, BIAS, STAGES, TILES_GROUP,
            )),
            (multiply_tiles, (
                x, x_scale, w, full, empty, tiles_ptr, w_scale_ptr, bias_ptr, out_ptr, order_ptr, weights_ptr,
                n_rows, out_columns, groups, out_stride, first_expert, num_experts, act_alpha, act_beta,
                act_limit,
                1, ACTIVATION, SCATTER, PAIRED, BIAS, STAGES, TILES_GROUP,
            )),
            (load_tiles, (
                x_desc, x_scale_ptr, w_desc, tiles_ptr, x, x_scale, w, full, empty, n_rows, groups,
                scale_stride, first_expert, num_experts, STAGES, TILES_GROUP,
            )),
        ],
        [4, 1], [232, 24],
    )  # fmt: skip
