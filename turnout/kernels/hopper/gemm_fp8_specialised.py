"""The FP8 GEMM of gemm_fp8.py for many tokens per expert: one warp loads, two groups multiply.

With hundreds of tokens per expert the products are the bound, and what must reach every multiprocessor from
the L2 cache for them. So tiles are large, 128 tokens by 256 weight rows, and the warps of a program divide
the work: one lets data be loaded, two groups of four multiply and add, 64 tokens each, with nothing between
them but the barriers of the stages. While one scales and adds its products, the tensor cores work for the
other. A program draws tile after tile (schedule.py), so that loads run ahead while results are stored.
Where a tile holds 64 tokens or fewer, no others are loaded, and the second group only keeps step.

* Tokens are the first operand here: a thread's products then share two tokens and one block of weights (or
  one of gate and one of up), so a step's scales are four numbers, and adding is one instruction per product.
* All comes by the TMA. So `quantize_places` writes every token that this rank holds to the places of its
  pairs; the memory is that of GEMM2's output, which is not yet written.
* GEMM1 stores what GEMM2 loads: 256 rows, 8 of gate and 8 of up in turn, make 128 columns, the group that
  shares a scale, and one group of warps holds it whole. The bfloat16 between is only a rounding.
* GEMM1's end of a tile, whose exp and division wait for a slow unit, does without their scaling near the
  ends of float32's range, rounds to bfloat16 two at a time, and clamps nothing before a conversion that
  saturates: the kernel is 3480 instructions instead of 4696.
* GEMM2 stores sorted rows by the TMA, which works on while the next tile begins; `sum_places` finds them.

Legend: R sorted rows (token, expert), K inner size, N weight rows, E local experts, T tokens, H hidden.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from turnout.kernels.hopper.schedule import (
    advance,
    draw,
    drawn_memory,
    publish,
    published,
    stage_barriers,
    tile_at,
)


@gluon.jit
def load_tiles(
    x_desc, w_desc, tiles_ptr, x, w, drawn, full, empty, n_rows, groups,
    FIRST: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Draw tiles, publish each at its first stage, and load them, 128 columns at a time, as stages become
    empty; no expert: none is left. One warp.
    """
    n_tiles = n_rows // 256
    num_tiles = gl.load(tiles_ptr)
    total = num_tiles * n_tiles
    stage = 0
    phase = 1
    place = gl.program_id(0)
    while place < total:
        expert, n, row, end = tile_at(place, tiles_ptr, n_tiles, num_tiles, GROUP)
        place = draw(tiles_ptr, not FIRST)
        w_row = expert * n_rows + n * 256
        mbarrier.wait(empty.index(stage), phase)
        publish(drawn, stage, expert, n, row, end)
        for step in range(0, groups):
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), phase)
            if row + 64 < end:
                mbarrier.expect(bar, 128 * (256 + 128))
            else:
                mbarrier.expect(bar, 128 * (256 + 64))
            tma.async_copy_global_to_shared(w_desc, [w_row, step * 128], bar, w.index(stage))
            tma.async_copy_global_to_shared(x_desc, [row, step * 128], bar, x.index(stage).slice(0, 64))
            if row + 64 < end:
                tma.async_copy_global_to_shared(
                    x_desc, [row + 64, step * 128], bar, x.index(stage).slice(64, 64)
                )
            stage, phase = advance(stage, phase, STAGES)
    mbarrier.wait(empty.index(stage), phase)
    publish(drawn, stage, -1, 0, 0, 0)
    mbarrier.arrive(full.index(stage), count=1)


@gluon.jit
def multiply(x, w):
    """x [64, 128] @ w [128, 128].T."""
    zero = gl.zeros([64, 128], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32]))
    token = warpgroup_mma(x, w.permute((1, 0)), zero, use_acc=False, max_num_imprecise_acc=128, is_async=True)
    return warpgroup_mma_wait(0, deps=[token])


@gluon.jit
def keep_step(full, empty, stage, phase, groups, STAGES: gl.constexpr):
    """Let a tile's stages pass."""
    for _ in range(0, groups):
        mbarrier.wait(full.index(stage), phase)
        gl.thread_barrier()
        mbarrier.arrive(empty.index(stage), count=1)
        stage, phase = advance(stage, phase, STAGES)
    return stage, phase


@gluon.jit
def accumulate(
    x, w, full, empty, x_at, left_at, right_at, stage, phase, groups,
    HALF: gl.constexpr, PAIRED: gl.constexpr, STAGES: gl.constexpr, ACC: gl.constexpr,
):  # fmt: skip
    """[64, 128] twice: half of a tile's tokens by the first 128 and the other weight rows.

    x_at: where the tokens' scales begin; left_at, right_at: those of the two blocks of weight rows, or,
    PAIRED, of gate and up.
    """
    is_gate = gl.arange(0, 128, gl.SliceLayout(0, ACC)) % 16 < 8
    s_x = gl.load(x_at)
    s_left = gl.load(left_at)
    s_right = gl.load(right_at)
    acc0 = gl.zeros([64, 128], gl.float32, ACC)
    acc1 = gl.zeros([64, 128], gl.float32, ACC)
    for step in range(0, groups):
        if PAIRED:
            scale0 = s_x[:, None] * gl.where(is_gate, s_left, s_right)[None, :]
            scale1 = scale0
        else:
            scale0 = (s_x * s_left)[:, None]
            scale1 = (s_x * s_right)[:, None]
        after = gl.minimum(step + 1, groups - 1)
        s_x = gl.load(x_at + after)
        s_left = gl.load(left_at + after)
        s_right = gl.load(right_at + after)
        mbarrier.wait(full.index(stage), phase)
        tokens = x.index(stage).slice(HALF * 64, 64)
        acc0 += multiply(tokens, w.index(stage).slice(0, 128)) * scale0
        products = multiply(tokens, w.index(stage).slice(128, 128))
        gl.thread_barrier()
        mbarrier.arrive(empty.index(stage), count=1)
        acc1 += products * scale1
        stage, phase = advance(stage, phase, STAGES)
    return acc0, acc1, stage, phase


@gluon.jit
def gated(gate, alpha):
    """gate / (1 + exp(-alpha gate)), a denominator above 2^126 taken for infinity."""
    e = gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=r,r", [-alpha * gate * 1.4426950408889634],
        dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip
    return gate * gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=r,r", [1.0 + e], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def activated(acc, alpha, beta, limit, ACTIVATION: gl.constexpr):
    """[64, 128], 8 columns of gate, 8 of up in turn -> [64, 64]."""
    gate, up = gl.split(acc.reshape([64, 8, 2, 8]).permute([0, 1, 3, 2]))
    if ACTIVATION == "swiglu":
        gate = gl.minimum(gate, limit)
        up = gl.minimum(gl.maximum(up, -limit), limit) + beta
        h = gated(gate, alpha) * up
    else:
        h = gated(gate, 1.0) * up
    return h.reshape([64, 64])


@gluon.jit
def as_bfloat16(x):
    """float32 rounded to bfloat16, two at a time: one alone waits for the unit that `gated` keeps busy."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 t; cvt.rn.bf16x2.f32 t, $3, $2; shl.b32 $0, t, 16; and.b32 $1, t, 0xffff0000; }",
        "=r,=r,r,r", [x], dtype=gl.float32, is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def store_hidden(h, h_ptr, scale_ptr, first, end, column, columns):
    """h [64, 128] as `quantize_rows` has it: e4m3, and a float32 scale for each row."""
    h = as_bfloat16(h)
    amax = gl.max(gl.abs(h), 1)
    scale = gl.where(amax > 0, amax * (1 / 448), 1.0)
    codes = (h * (1 / scale)[:, None]).to(gl.float8e4nv)  # which saturates
    r = first + gl.arange(0, 64, scale.type.layout)
    gl.store(scale_ptr + r.to(gl.int64) * (columns // 128) + column // 128, scale, mask=r < end)
    STORE: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    codes = gl.convert_layout(codes, STORE)
    r = first + gl.arange(0, 64, gl.SliceLayout(1, STORE))
    at = r.to(gl.int64)[:, None] * columns + column + gl.arange(0, 128, gl.SliceLayout(0, STORE))[None, :]
    gl.store(h_ptr + at, codes, mask=(r < end)[:, None])


@gluon.jit
def store_sums(y, y_desc, y_ptr, first, end, column, columns):
    """Rows y [64, 128], in shared memory, begin to be stored; those of the next expert are left alone."""
    if first + 64 <= end:
        tma.async_copy_shared_to_global(y_desc, [first, column], y)
    else:
        STORE: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
        r = first + gl.arange(0, 64, gl.SliceLayout(1, STORE))
        at = r.to(gl.int64)[:, None] * columns + column + gl.arange(0, 128, gl.SliceLayout(0, STORE))[None, :]
        gl.store(y_ptr + at, y.load(STORE), mask=(r < end)[:, None])


@gluon.jit
def multiply_tiles(
    x, x_scale_ptr, w, w_scale_ptr, y, drawn, full, empty, bias_ptr, out_ptr, out_desc, out_scale_ptr,
    order_ptr, weights_ptr, n_rows, out_columns, groups, act_alpha, act_beta, act_limit,
    HALF: gl.constexpr, FIRST: gl.constexpr, ACTIVATION: gl.constexpr, BIAS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Multiply and store 64 of the 128 tokens of every tile of this program; four warps."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    PAIRED: gl.constexpr = FIRST and ACTIVATION != "relu2"
    n_tiles = n_rows // 256
    stage = 0
    phase = 0
    mbarrier.wait(full.index(stage), phase)
    expert, n, row, end = published(drawn, stage)
    while expert >= 0:
        first = row + HALF * 64
        if first >= end:
            stage, phase = keep_step(full, empty, stage, phase, groups, STAGES)
        else:
            r = gl.minimum(first + gl.arange(0, 64, gl.SliceLayout(1, ACC)), end - 1)
            if not FIRST:
                weight = gl.load(weights_ptr + gl.load(order_ptr + r))
            # 32 bits reach every scale: 2^31 of them would belong to 256 GiB of codes.
            x_at = x_scale_ptr + r * groups
            block = expert * (n_rows // 128)
            left_at = w_scale_ptr + (block + (n if PAIRED else 2 * n)) * groups
            right_at = w_scale_ptr + (block + (n + n_tiles if PAIRED else 2 * n + 1)) * groups
            acc0, acc1, stage, phase = accumulate(
                x, w, full, empty, x_at, left_at, right_at, stage, phase, groups, HALF, PAIRED, STAGES, ACC
            )
            if BIAS:
                at = bias_ptr + expert * n_rows + n * 256 + gl.arange(0, 128, gl.SliceLayout(0, ACC))
                acc0 += gl.load(at)[None, :]
                acc1 += gl.load(at + 128)[None, :]
            if not FIRST:
                tma.store_wait(0)  # of the tile before
                gl.thread_barrier()
                left, right = y.index(2 * HALF), y.index(2 * HALF + 1)
                left.store((acc0 * weight[:, None]).to(gl.bfloat16))
                right.store((acc1 * weight[:, None]).to(gl.bfloat16))
                fence_async_shared()
                gl.thread_barrier()
                store_sums(left, out_desc, out_ptr, first, end, n * 256, out_columns)
                store_sums(right, out_desc, out_ptr, first, end, n * 256 + 128, out_columns)
            elif ACTIVATION == "relu2":
                acc0 = gl.maximum(acc0, 0.0)
                acc1 = gl.maximum(acc1, 0.0)
                store_hidden(acc0 * acc0, out_ptr, out_scale_ptr, first, end, n * 256, out_columns)
                store_hidden(acc1 * acc1, out_ptr, out_scale_ptr, first, end, n * 256 + 128, out_columns)
            else:
                left = activated(acc0, act_alpha, act_beta, act_limit, ACTIVATION)
                right = activated(acc1, act_alpha, act_beta, act_limit, ACTIVATION)
                h = gl.join(left, right).permute([0, 2, 1]).reshape([64, 128])
                store_hidden(h, out_ptr, out_scale_ptr, first, end, n * 128, out_columns)
        mbarrier.wait(full.index(stage), phase)
        expert, n, row, end = published(drawn, stage)
    if not FIRST:
        tma.store_wait(0)


@gluon.jit
def expert_gemm_fp8_specialised(
    x_desc, x_scale_ptr, w_desc, w_scale_ptr, bias_ptr, out_ptr, out_desc, out_scale_ptr, order_ptr,
    tiles_ptr, weights_ptr, n_rows, out_columns, groups, act_alpha, act_beta, act_limit,
    FIRST: gl.constexpr, ACTIVATION: gl.constexpr, BIAS: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """One of a layer's two GEMMs, rows sorted by expert; K = 128 groups. w e4m3 [E * n_rows, K], n_rows a
    multiple of 256, w_scale float32 [E * n_rows / 128, groups]. As many programs as multiprocessors; four
    warps; tiles of 128 tokens.

    x e4m3 [R, K], by x_desc in boxes of [64, 128], x_scale [R, groups].
    FIRST: out[r] = act(w[expert] @ x[r] + bias[expert]) as e4m3 [R, out_columns], and out_scale float32
    [R, out_columns / 128]; out_desc is unused. Otherwise out[r] = (w[expert] @ x[r] + bias[expert]) *
    weights[order[r]] as bf16 [R, out_columns], also reached by out_desc, in boxes of [64, 128].
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    x = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 128, 128], TILE)
    w = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 256, 128], TILE)
    full, empty = stage_barriers(STAGES, 1, 2)
    drawn = drawn_memory(STAGES)
    y = x
    if not FIRST:
        y = gl.allocate_shared_memory(gl.bfloat16, [4, 64, 128], out_desc.layout)
    gl.warp_specialize(
        [
            (multiply_tiles, (
                x, x_scale_ptr, w, w_scale_ptr, y, drawn, full, empty, bias_ptr, out_ptr, out_desc,
                out_scale_ptr, order_ptr, weights_ptr, n_rows, out_columns, groups, act_alpha, act_beta,
                act_limit, 0, FIRST, ACTIVATION, BIAS, STAGES,
            )),
            (multiply_tiles, (
                x, x_scale_ptr, w, w_scale_ptr, y, drawn, full, empty, bias_ptr, out_ptr, out_desc,
                out_scale_ptr, order_ptr, weights_ptr, n_rows, out_columns, groups, act_alpha, act_beta,
                act_limit, 1, FIRST, ACTIVATION, BIAS, STAGES,
            )),
            (load_tiles, (
                x_desc, w_desc, tiles_ptr, x, w, drawn, full, empty, n_rows, groups, FIRST, STAGES, GROUP,
            )),
        ],
        [4, 1], [216, 72],
    )  # fmt: skip


def stages_of(stages: int, *, first: bool) -> int:
    """How many of a tiling's stages there is room for: GEMM2 gives one to the rows it stores."""
    return stages if first else stages - 1


def gemm(
    x: Tensor, x_scale: Tensor, w: Tensor, w_scale: Tensor, bias: Tensor | None, out: Tensor,
    out_scale: Tensor, order: Tensor, tiles: Tensor, weights: Tensor, *, first: bool,
    activation: tuple[str, float, float, float], stages: int, group: int, programs: int,
) -> None:  # fmt: skip
    """Launch `expert_gemm_fp8_specialised`, which says what the tensors are; w [E, N, K].

    activation: kind, alpha, beta, limit. programs: how many multiprocessors there are.
    """
    _, N, K = w.shape
    kind, *constants = activation
    tile = NVMMASharedLayout(128, 8, 2)
    box = TensorDescriptor.from_tensor(out, [64, 128], tile if first else NVMMASharedLayout(128, 16, 2))
    expert_gemm_fp8_specialised[(programs,)](
        TensorDescriptor.from_tensor(x, [64, 128], tile), x_scale,
        TensorDescriptor.from_tensor(w.view(-1, K), [256, 128], tile), w_scale,
        w_scale if bias is None else bias, out, box, out_scale, order, tiles, weights, N, out.shape[1],
        K // 128, *constants, first, kind if first else "none", bias is not None,
        stages_of(stages, first=first), group, True, num_warps=4, launch_pdl=True,
    )  # fmt: skip
