"""Grouped GEMM of the experts on Hopper (Gluon): bf16 activations, weights of 4 bits.

The tiles are those of gemm.py: BLOCK_N weight rows of one expert by the tokens that chose it. 4-bit
weights, which `wgmma` may take from registers, are decoded once for all tokens of a tile.

* Weights lie in fragment order (fragments.py). cp.async brings them to shared memory STAGES - 2 steps of 64
  columns ahead; every thread reads back 16 bytes, which are its own operand fragments: no shuffles.
* Each stage is memory of its own, and as many steps as stages are unrolled. So addresses are constants, and
  the compiler, which could not tell stages of one array apart, leaves two of three barriers a step out.
  Requests of the last steps are left out rather than masked. A step takes 160 instructions for 208.
* Operands are decoded in halves of 32 columns, for 16 tokens in quarters. One part is decoded while the one
  before is multiplied, and its registers are freed by `wait(1)` after the next is issued. (Waiting for 0
  before issuing looks equivalent, but ptxas then moves the wait above the decoding. With a single part per
  turn of a loop, the next fragments would be decoded into registers that a product still reads: wrong
  results, seen as NaN.) That leaves room for three programs of 64 tokens on a multiprocessor, four of 32, six
  of 16 (`most_registers`), which take turns by themselves.
* A table of tiles of 64 tokens has, with about 32 tokens per expert, as many of at most 32. They are
  multiplied as such: 722 us for 818 (GPT-OSS-120B at 1024 tokens), 182 for 193 (GPT-OSS-20B at 256), 167 for
  172 (Qwen3-30B-A3B at 512). From 40 on this takes 1 to 4 % longer.
* What is needed before the first request is read at once where it can be: a tile's entry with the number
  of tiles, rows of x with the weights. What the end needs is read before the last steps.
* The 2^126 that decoding owes, and NVFP4's global scale, are one float per expert, applied at the end.

Legend: R sorted rows (token, expert), K inner size, N weight rows, E local experts.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from turnout.kernels.hopper.decode import (
    codes_layout,
    decode_halves,
    decode_quarters,
    packed_tile,
    scale_words,
    scales_layout,
)
from turnout.kernels.hopper.tile import activate, load_bias, locate, result_places, token_rows


@gluon.jit
def stage_memory(
    STAGES: gl.constexpr, BLOCKS: gl.constexpr, WORDS: gl.constexpr, TOKENS: gl.constexpr
):  # fmt: skip
    """Each stage's memory for 64 columns of TOKENS rows of x, and of BLOCKS blocks of codes and scales."""
    LINEAR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    x = gl.allocate_shared_memory(gl.bfloat16, [TOKENS, 64], TILE)
    w = gl.allocate_shared_memory(gl.int32, [BLOCKS, 512], LINEAR)
    scales = gl.allocate_shared_memory(gl.int32, [BLOCKS, WORDS], LINEAR)
    if STAGES == 1:
        return (x,), (w,), (scales,)
    else:  # the compiler looks into both branches otherwise
        xs, ws, more_scales = stage_memory(STAGES - 1, BLOCKS, WORDS, TOKENS)
        return (x,) + xs, (w,) + ws, (scales,) + more_scales


@gluon.jit
def find(program, tiles_ptr, n_tiles):
    """`locate` for sorted tiles that do not take turns: their number and the entry are read at once."""
    tile = program // n_tiles
    num_tiles = gl.load(tiles_ptr)
    expert = gl.load(tiles_ptr + 4 + tile * 4)
    row = gl.load(tiles_ptr + 5 + tile * 4)
    end = gl.load(tiles_ptr + 6 + tile * 4)
    return gl.where(tile < num_tiles, expert, -1), program % n_tiles, row, end


@gluon.jit
def copy_weights(w, scales, codes_at, scales_at, codes_exist, scales_exist, STEP: gl.constexpr):
    """Start copying what lies STEP blocks of columns beyond the pointers to one stage."""
    WORDS: gl.constexpr = scales.shape[1]
    async_copy.async_copy_global_to_shared(w, codes_at + STEP * 512, mask=codes_exist)
    async_copy.async_copy_global_to_shared(scales, scales_at + STEP * WORDS, mask=scales_exist)


@gluon.jit
def copy_tokens(x, x_at, exists, left, STEP: gl.constexpr, WHOLE: gl.constexpr):
    """The same of rows of x, of which `left` columns lie beyond the pointers; WHOLE: a multiple of 64 do."""
    mask = exists
    if not WHOLE:
        ROWS: gl.constexpr = x_at.type.layout
        mask = exists & (STEP * 64 + gl.arange(0, 64, gl.SliceLayout(0, ROWS))[None, :] < left)
    async_copy.async_copy_global_to_shared(x, x_at + STEP * 64, mask=mask)


@gluon.jit
def multiply(xs, ws, scales, acc, STAGE: gl.constexpr, FORMAT: gl.constexpr):
    """acc += w @ x.T of one stage: a part of the columns is decoded while the one before is multiplied."""
    WIDTH: gl.constexpr = acc.shape[1]
    PARTS: gl.constexpr = 4 if WIDTH == 16 else 2
    PART: gl.constexpr = 64 // PARTS
    BLOCKS: gl.constexpr = ws[STAGE].shape[0]
    CODES: gl.constexpr = codes_layout(BLOCKS, 1)
    SCALES: gl.constexpr = scales_layout(BLOCKS, 1, scale_words(FORMAT))
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    codes = ws[STAGE].load(CODES)
    scale = scales[STAGE].load(SCALES)
    if PARTS == 4:
        parts = decode_quarters(codes, scale, FORMAT, OPERAND)
    else:
        parts = decode_halves(codes, scale, FORMAT, OPERAND)
    x_T = xs[STAGE].slice(0, WIDTH).permute((1, 0))
    for i in gl.static_range(PARTS):
        token = warpgroup_mma(parts[i], x_T.slice(i * PART, PART), acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[token])
    return acc


@gluon.jit
def request_and_multiply(
    xs, ws, scales, acc, x_at, codes_at, scales_at, rows_exist, codes_exist, scales_exist, left,
    STEP: gl.constexpr, AHEAD: gl.constexpr, WHOLE: gl.constexpr, FORMAT: gl.constexpr,
):  # fmt: skip
    """Step STEP beyond the pointers, with the requests of the one AHEAD of it."""
    STAGES: gl.constexpr = len(xs)
    THEN: gl.constexpr = (STEP + AHEAD) % STAGES
    async_copy.wait_group(AHEAD - 1)
    fence_async_shared()
    copy_weights(ws[THEN], scales[THEN], codes_at, scales_at, codes_exist, scales_exist, STEP + AHEAD)
    copy_tokens(xs[THEN].slice(0, acc.shape[1]), x_at, rows_exist, left, STEP + AHEAD, WHOLE)
    async_copy.commit_group()
    return multiply(xs, ws, scales, acc, STEP, FORMAT)


@gluon.jit
def multiply_steps(
    xs, ws, scales, codes_at, scales_at, codes_exist, scales_exist, x_at, rows_exist, left, acc, k_blocks,
    AHEAD: gl.constexpr, REST: gl.constexpr, WHOLE: gl.constexpr, FORMAT: gl.constexpr,
):  # fmt: skip
    """acc and the products of all steps but the last AHEAD, whose data are requested: whole turns of all
    stages, then REST steps."""
    STAGES: gl.constexpr = len(xs)
    WORDS: gl.constexpr = scale_words(FORMAT)
    for _ in range(0, gl.maximum(k_blocks - AHEAD, 0) // STAGES):
        for u in gl.static_range(STAGES):
            acc = request_and_multiply(
                xs, ws, scales, acc, x_at, codes_at, scales_at, rows_exist, codes_exist, scales_exist, left,
                u, AHEAD, WHOLE, FORMAT,
            )  # fmt: skip
        codes_at += STAGES * 512
        scales_at += STAGES * WORDS
        x_at += STAGES * 64
        left -= STAGES * 64
    for u in gl.static_range(REST):
        acc = request_and_multiply(
            xs, ws, scales, acc, x_at, codes_at, scales_at, rows_exist, codes_exist, scales_exist, left,
            u, AHEAD, WHOLE, FORMAT,
        )  # fmt: skip
    return acc


@gluon.jit
def end_tile(
    acc, alpha, bias, weight, out_ptr, at, exists, n, out_columns, act_alpha, act_beta, act_limit,
    ACTIVATION: gl.constexpr, SCATTER: gl.constexpr, BIAS: gl.constexpr, STORE: gl.constexpr,
):  # fmt: skip
    """Scale, bias, activation, routing weight; store to the rows that begin `at`."""
    GATED: gl.constexpr = ACTIVATION != "none" and ACTIVATION != "relu2"
    COLUMNS: gl.constexpr = acc.shape[0] // 2 if GATED else acc.shape[0]
    y = acc * alpha
    if BIAS:
        y += bias[:, None]
    y = activate(y, act_alpha, act_beta, act_limit, ACTIVATION)
    if SCATTER:
        y = y * gl.convert_layout(weight, gl.SliceLayout(0, y.type.layout))[None, :]
    y = gl.convert_layout(y.to(gl.bfloat16), STORE)
    c = n * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(1, STORE))
    mask = exists[None, :] & (c[:, None] < out_columns)
    gl.store(out_ptr + at[None, :] + c[:, None], y, mask=mask)


@gluon.jit
def compute_tile(
    x_ptr, w_ptr, scales_ptr, alpha_ptr, bias_ptr, out_ptr, order_ptr, weights_ptr, xs, ws, scales,
    expert, n, row, end, K, n_rows, out_columns, k_blocks, n_blocks, x_stride, out_stride, top_k,
    act_alpha, act_beta, act_limit,
    WIDTH: gl.constexpr, FORMAT: gl.constexpr, ACTIVATION: gl.constexpr, GATHER: gl.constexpr,
    SCATTER: gl.constexpr, DIRECT: gl.constexpr, BIAS: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, REST: gl.constexpr, WHOLE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """One tile of at most WIDTH tokens, from the first request to the last store."""
    BLOCKS: gl.constexpr = BLOCK_N // 64
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    STORE: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    AHEAD: gl.constexpr = STAGES - 2
    WEIGHTS_FIRST: gl.constexpr = PDL and not GATHER

    codes_at, scales_at, codes_exist, scales_exist = packed_tile(
        w_ptr, scales_ptr, expert, n, k_blocks, n_blocks, BLOCKS, FORMAT, codes_layout(BLOCKS, 1)
    )
    if not WEIGHTS_FIRST:
        offset, exists = token_rows(order_ptr, row, end, top_k, x_stride, WIDTH, GATHER, DIRECT, ROWS)
    for i in gl.static_range(AHEAD):
        live = i < k_blocks
        copy_weights(ws[i], scales[i], codes_at, scales_at, codes_exist & live, scales_exist & live, i)
    if WEIGHTS_FIRST:
        gdc_wait()
        offset, exists = token_rows(order_ptr, row, end, top_k, x_stride, WIDTH, GATHER, DIRECT, ROWS)
    columns = gl.arange(0, 64, gl.SliceLayout(0, ROWS))[None, :]
    x_at = x_ptr + offset[:, None] + columns
    rows_exist = exists[:, None] & (columns >= 0)
    for i in gl.static_range(AHEAD):
        copy_tokens(xs[i].slice(0, WIDTH), x_at, rows_exist & (i < k_blocks), K, i, WHOLE)
        async_copy.commit_group()
    if PDL and GATHER:
        gdc_launch_dependents()

    acc = gl.zeros([BLOCK_N, WIDTH], gl.float32, ACC)
    acc = multiply_steps(
        xs, ws, scales, codes_at, scales_at, codes_exist, scales_exist, x_at, rows_exist, K, acc, k_blocks,
        AHEAD, REST, WHOLE, FORMAT,
    )  # fmt: skip

    # What the end needs arrives during the last steps.
    to, stored, weight = result_places(
        order_ptr, weights_ptr, row, end, WIDTH, SCATTER, DIRECT, gl.SliceLayout(0, STORE)
    )
    alpha = gl.load(alpha_ptr + expert)
    bias = 0.0
    if BIAS:
        bias = load_bias(bias_ptr, expert, n, n_rows, BLOCK_N, gl.SliceLayout(1, ACC))
    for u in gl.static_range(AHEAD):
        async_copy.wait_group(AHEAD - 1 - u)
        fence_async_shared()
        acc = multiply(xs, ws, scales, acc, (REST + u) % STAGES, FORMAT)
    acc = warpgroup_mma_wait(0, deps=[acc])
    end_tile(
        acc, alpha, bias, weight, out_ptr, to.to(gl.int64) * out_stride, stored, n, out_columns,
        act_alpha, act_beta, act_limit, ACTIVATION, SCATTER, BIAS, STORE,
    )  # fmt: skip


@gluon.jit
def expert_gemm_packed(
    x_ptr, w_ptr, scales_ptr, alpha_ptr, bias_ptr, out_ptr, order_ptr, tiles_ptr, weights_ptr,
    K, n_rows, out_columns, k_blocks, n_blocks, x_stride, out_stride, top_k, first_expert, num_experts,
    act_alpha, act_beta, act_limit,
    FORMAT: gl.constexpr, ACTIVATION: gl.constexpr, GATHER: gl.constexpr, SCATTER: gl.constexpr,
    DIRECT: gl.constexpr, BIAS: gl.constexpr, BLOCK_N: gl.constexpr, TOKENS: gl.constexpr,
    STAGES: gl.constexpr, REST: gl.constexpr, WHOLE: gl.constexpr, GROUP: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """As `expert_gemm`, times alpha[expert], of codes and scales of Fragments. Four warps.

    WHOLE: K is a multiple of 64. REST: what `rest_of` says. GROUP: see `locate`; tiles of 64 tokens that do
    not take turns are multiplied as 32 where they have no more.
    """
    BLOCKS: gl.constexpr = BLOCK_N // 64
    WORDS: gl.constexpr = scale_words(FORMAT)
    if PDL and GATHER:
        gdc_wait()
    n_tiles = gl.cdiv(n_blocks, BLOCKS)
    if GROUP == 1 and not DIRECT:
        expert, n, row, end = find(gl.program_id(0), tiles_ptr, n_tiles)
    else:
        expert, n, row, end = locate(
            gl.program_id(0), tiles_ptr, n_tiles, first_expert, num_experts, DIRECT, GROUP
        )
    if expert < 0:
        return
    if PDL and not GATHER:
        gdc_launch_dependents()
    xs, ws, scales = stage_memory(STAGES, BLOCKS, WORDS, TOKENS)
    NARROW: gl.constexpr = TOKENS == 64 and GROUP == 1
    if NARROW and end - row <= 32:
        compute_tile(
            x_ptr, w_ptr, scales_ptr, alpha_ptr, bias_ptr, out_ptr, order_ptr, weights_ptr, xs, ws, scales,
            expert, n, row, end, K, n_rows, out_columns, k_blocks, n_blocks, x_stride, out_stride, top_k,
            act_alpha, act_beta, act_limit, 32, FORMAT, ACTIVATION, GATHER, SCATTER, DIRECT, BIAS,
            BLOCK_N, STAGES, REST, WHOLE, PDL,
        )  # fmt: skip
    else:
        compute_tile(
            x_ptr, w_ptr, scales_ptr, alpha_ptr, bias_ptr, out_ptr, order_ptr, weights_ptr, xs, ws, scales,
            expert, n, row, end, K, n_rows, out_columns, k_blocks, n_blocks, x_stride, out_stride, top_k,
            act_alpha, act_beta, act_limit, TOKENS, FORMAT, ACTIVATION, GATHER, SCATTER, DIRECT, BIAS,
            BLOCK_N, STAGES, REST, WHOLE, PDL,
        )  # fmt: skip


def rest_of(k_blocks: int, stages: int) -> int:
    """Steps with requests that are left when whole turns of all stages are done."""
    return max(0, k_blocks - (stages - 2)) % stages


def most_registers(rows: int, tokens: int) -> int | None:
    """Of a thread, so that as many programs fit on a multiprocessor as should; None: any."""
    return {8: 96, 16: 80, 64: 168}.get(tokens) if rows == 128 else None
