"""Grouped GEMM of the experts on Hopper for few tokens per expert (Gluon): weights of 4 bits.

What a decode step waits for is weights. So this kernel is made of warps that need nothing of each other: each
loads the fragments of 16 weight rows (fragments.py) into its own registers, a chunk of columns ahead of the
chunk it decodes, and multiplies them with `mma`, not `wgmma`, which four warps would have to enter together.
Weights see no shared memory and no barrier; tokens do, of which a program keeps all columns, if they fit, or
the next few chunks. Where programs are few, SLICES of a program's warps share the columns of its rows, and
their sums are added last: so few tokens keep a GPU busy without partial sums in memory. Pairs that are too
few to be sorted take gemm_pairs.py. What a program's end multiplies with is loaded in the beginning,
and eight columns of a result stored at once: 1 to 2 % with 16 and 64 tokens.

Legend: R sorted rows (token, expert), K inner size, N weight rows, E local experts, S slices.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from turnout.kernels.hopper.decode import bits, decode_codes, decode_scales, scale_words
from turnout.kernels.hopper.tile import activate, load_bias, locate, result_places

VARYING = ["n_rows", "out_columns", "k_blocks", "n_blocks", "top_k", "first_expert", "num_experts"]


@gluon.constexpr_function
def strips_layout(
    slices: int, strips: int, chunk: int, words: int, across: int
) -> gl.DistributedLinearLayout:
    """Who holds [slices, strips, chunk, words]; a strip is 16 rows of one warp of `across`.

    128 words are codes, four in a row of a thread; fewer are scales, which four threads share.
    """
    if words == 128:
        of_thread, lanes = bits(4, 3, 4), bits(32, 3, 4, 4)
    else:
        of_thread, lanes = bits(words // 8, 3, 4), [[0, 0, 0, 0]] * 2 + bits(8, 3, 4, words // 8)
    registers = of_thread + bits(chunk, 2, 4) + bits(strips // across, 1, 4, across)
    warps = bits(across, 1, 4) + bits(slices, 0, 4)
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [slices, strips, chunk, words])


@gluon.constexpr_function
def copy_layout(num_warps: int) -> gl.BlockedLayout:
    """Who copies [slices, tokens, columns]."""
    return gl.BlockedLayout([1, 1, 8], [1, 4, 8], [1, num_warps, 1], [2, 1, 0])


@gluon.jit
def decode(codes, scales, FORMAT: gl.constexpr, OPERAND: gl.constexpr, ACROSS: gl.constexpr):
    """codes int32 [S, STRIPS, CHUNK, 128], scales int32 [S, STRIPS, CHUNK, 8 or 16] -> [S, rows, columns]."""
    S: gl.constexpr = codes.shape[0]
    STRIPS: gl.constexpr = codes.shape[1]
    CHUNK: gl.constexpr = codes.shape[2]
    PER: gl.constexpr = 2 if FORMAT == "nvfp4" else 1
    SHAPE: gl.constexpr = [S, STRIPS, CHUNK, 8, 4, 2, 2]  # lane / 4, lane % 4, column / 32, column / 16
    AXES: gl.constexpr = gl.BlockedLayout(
        [1, 1, CHUNK, 1, 1, 2, 2], [1, 1, 1, 8, 4, 1, 1], [S, ACROSS, 1, 1, 1, 1, 1], [6, 5, 4, 3, 2, 1, 0]
    )
    word = gl.convert_layout(codes.reshape(SHAPE), AXES, assert_trivial=True)
    upper, lower = decode_scales(scales, FORMAT)
    upper = upper.reshape([S, STRIPS, CHUNK, 8, 1, 2, PER])
    lower = lower.reshape([S, STRIPS, CHUNK, 8, 1, 2, PER])
    upper = gl.convert_layout(upper, AXES).broadcast_to(SHAPE)
    lower = gl.convert_layout(lower, AXES).broadcast_to(SHAPE)
    a0, a1, b0, b1, c0, c1, d0, d1 = decode_codes(word, upper, lower, FORMAT)
    left = gl.join(gl.join(a0, a1), gl.join(b0, b1))  # ..., odd, lower
    right = gl.join(gl.join(c0, c1), gl.join(d0, d1))
    # slice 0, strip 1, chunk 2, lane / 4 3, lane % 4 4, step 5 6, odd 7, lower 8, right 9
    w = gl.join(left, right).permute([0, 1, 8, 3, 2, 5, 6, 9, 4, 7])
    return gl.convert_layout(w.reshape([S, STRIPS * 16, CHUNK * 64]), OPERAND, assert_trivial=True)


@gluon.jit
def places(
    slice_blocks, k_blocks, last_block, strip,
    WORDS: gl.constexpr, LAYOUT: gl.constexpr, S: gl.constexpr, STRIPS: gl.constexpr, CHUNK: gl.constexpr,
):  # fmt: skip
    """Offsets int64 [S, STRIPS, CHUNK, WORDS / 4] of a tile's first chunk. WORDS: of a block of 64 rows.

    Rows beyond the last block repeat it. Columns beyond a slice are the next slice's, the next rows' or the
    slack behind all: tokens have zeros there.
    """
    s, i, j, word = axes4(LAYOUT, S, STRIPS, CHUNK, WORDS // 4)
    i += strip
    row = gl.minimum(i // 4, last_block) * k_blocks + s * slice_blocks
    return (row * WORDS + (i % 4) * (WORDS // 4) + word).to(gl.int64) + j.to(gl.int64) * WORDS


@gluon.jit
def axes4(LAYOUT: gl.constexpr, A: gl.constexpr, B: gl.constexpr, C: gl.constexpr, D: gl.constexpr):
    """0, 1, 2, ... along each of four axes of LAYOUT."""
    a = gl.arange(0, A, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT))))[:, None, None, None]
    b = gl.arange(0, B, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT))))[None, :, None, None]
    c = gl.arange(0, C, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, LAYOUT))))[None, None, :, None]
    d = gl.arange(0, D, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))))[None, None, None, :]
    return a, b, c, d


@gluon.jit
def copy_tokens(x_ptr, x, slot, offset, exists, chunk, slice_blocks, K,
                S: gl.constexpr, CHUNK: gl.constexpr, COPY: gl.constexpr):  # fmt: skip
    """Start copying chunk `chunk` of every slice of rows that begin at `offset`."""
    s = gl.arange(0, S, gl.SliceLayout(1, gl.SliceLayout(2, COPY)))[:, None, None]
    column = gl.arange(0, CHUNK * 64, gl.SliceLayout(0, gl.SliceLayout(1, COPY)))[None, None, :]
    c = chunk * CHUNK * 64 + column
    k = s * slice_blocks * 64 + c
    at = x_ptr + offset[None, :, None] + k
    held = exists[None, :, None] & (c < slice_blocks * 64) & (k < K)
    async_copy.async_copy_global_to_shared(x.index(slot), at, mask=held)


@gluon.jit
def first_chunk(
    w_ptr, scales_ptr, expert, n, k_blocks, n_blocks, slice_blocks,
    FORMAT: gl.constexpr, STRIPS: gl.constexpr, S: gl.constexpr, CHUNK: gl.constexpr, ACROSS: gl.constexpr,
):  # fmt: skip
    """Where the expert's codes and scales begin, offsets of the nth tile's first chunk, and its values."""
    WORDS: gl.constexpr = scale_words(FORMAT)
    CODES: gl.constexpr = strips_layout(S, STRIPS, CHUNK, 128, ACROSS)
    SCALES: gl.constexpr = strips_layout(S, STRIPS, CHUNK, WORDS // 4, ACROSS)
    strip = n * STRIPS
    block = (expert * n_blocks).to(gl.int64) * k_blocks
    w_tile = w_ptr + block * 512
    scales_tile = scales_ptr + block * WORDS
    codes_at = places(slice_blocks, k_blocks, n_blocks - 1, strip, 512, CODES, S, STRIPS, CHUNK)
    scales_at = places(slice_blocks, k_blocks, n_blocks - 1, strip, WORDS, SCALES, S, STRIPS, CHUNK)
    codes = gl.load(w_tile + codes_at, eviction_policy="evict_first")
    scales = gl.load(scales_tile + scales_at)
    return w_tile, scales_tile, codes_at, scales_at, codes, scales


@gluon.jit
def begin_tokens(
    x_ptr, order_ptr, x, row, end, top_k, x_stride, chunks, slice_blocks, K,
    GATHER: gl.constexpr, WHOLE: gl.constexpr, PDL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Where a tile's rows of x begin, and which exist; their first chunks begin to be copied, WHOLE: all are
    there."""
    COPY: gl.constexpr = copy_layout(num_warps)
    STAGES: gl.constexpr = x.shape[0]
    S: gl.constexpr = x.shape[1]
    TOKENS: gl.constexpr = x.shape[2]
    C: gl.constexpr = x.shape[3] // 64
    r = row + gl.arange(0, TOKENS, gl.SliceLayout(0, gl.SliceLayout(2, COPY)))
    exists = r < end
    if GATHER:
        r = gl.load(order_ptr + r, mask=exists, other=0) // top_k
    offset = r.to(gl.int64) * x_stride
    if WHOLE:
        for i in range(0, chunks):
            copy_tokens(x_ptr, x, i, offset, exists, i, slice_blocks, K, S, C, COPY)
        async_copy.commit_group()
    else:
        for i in gl.static_range(STAGES - 1):
            copy_tokens(x_ptr, x, i, offset, exists, i, slice_blocks, K, S, C, COPY)
            async_copy.commit_group()
    if PDL and GATHER:
        gdc_launch_dependents()
    if WHOLE:
        async_copy.wait_group(0)
        gl.thread_barrier()
    return offset, exists


@gluon.jit
def multiply_chunks(
    x_ptr, x, weights, offset, exists, chunks, slice_blocks, K,
    FORMAT: gl.constexpr, BLOCK_N: gl.constexpr, WHOLE: gl.constexpr, ACROSS: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """Sums [S, BLOCK_N, TOKENS] of all chunks of columns; each is loaded before the one in front of it is
    decoded. weights: of `first_chunk`."""
    COPY: gl.constexpr = copy_layout(num_warps)
    STAGES: gl.constexpr = x.shape[0]
    S: gl.constexpr = x.shape[1]
    TOKENS: gl.constexpr = x.shape[2]
    C: gl.constexpr = x.shape[3] // 64
    WORDS: gl.constexpr = scale_words(FORMAT)
    ACC: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [S, ACROSS, 1], [1, 16, 8])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    TOKENS_OPERAND: gl.constexpr = gl.DotOperandLayout(1, ACC, 2)
    w_tile, scales_tile, codes_at, scales_at, codes, scales = weights
    acc = gl.zeros([S, BLOCK_N, TOKENS], gl.float32, ACC)
    for chunk in range(0, chunks - 1):
        if not WHOLE:
            async_copy.wait_group(STAGES - 2)
            gl.thread_barrier()
        slot = chunk if WHOLE else chunk % STAGES
        w_tile += C * 512
        scales_tile += C * WORDS
        next_codes = gl.load(w_tile + codes_at, eviction_policy="evict_first")
        next_scales = gl.load(scales_tile + scales_at)
        w = decode(codes, scales, FORMAT, OPERAND, ACROSS)
        tokens = x.index(slot).permute((0, 2, 1)).load(TOKENS_OPERAND)
        codes, scales = next_codes, next_scales
        acc = mma_v2(w, tokens, acc)
        if not WHOLE:
            copy_tokens(
                x_ptr, x, (chunk + STAGES - 1) % STAGES, offset, exists, chunk + STAGES - 1, slice_blocks, K,
                S, C, COPY,
            )  # fmt: skip
            async_copy.commit_group()
    if not WHOLE:
        async_copy.wait_group(0)
        gl.thread_barrier()
    slot = chunks - 1 if WHOLE else (chunks - 1) % STAGES
    w = decode(codes, scales, FORMAT, OPERAND, ACROSS)
    tokens = x.index(slot).permute((0, 2, 1)).load(TOKENS_OPERAND)
    return mma_v2(w, tokens, acc)


@gluon.jit(do_not_specialize=VARYING)
def expert_gemm_few(
    x_ptr, w_ptr, scales_ptr, alpha_ptr, bias_ptr, out_ptr, order_ptr, tiles_ptr, weights_ptr,
    K, n_rows, out_columns, k_blocks, n_blocks, x_stride, out_stride, top_k, first_expert, num_experts,
    act_alpha, act_beta, act_limit,
    FORMAT: gl.constexpr, ACTIVATION: gl.constexpr, GATHER: gl.constexpr, SCATTER: gl.constexpr,
    BIAS: gl.constexpr, BLOCK_N: gl.constexpr, TOKENS: gl.constexpr,
    K_BLOCKS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, SLICES: gl.constexpr,
    WHOLE: gl.constexpr, PDL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """out[row] = act(w[expert] @ x[row] * alpha[expert] + bias[expert]); arguments as of `expert_gemm`.

    SLICES: the inner dimension is shared out among so many warps, whose sums are added last. K_BLOCKS: blocks
    of 64 columns that a warp takes at once. WHOLE: STAGES hold all chunks of a slice, and all of x is copied
    first.
    """
    ACROSS: gl.constexpr = num_warps // SLICES
    ACC: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [SLICES, ACROSS, 1], [1, 16, 8])
    STORE: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, num_warps], [0, 1])
    TILE: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
    WEIGHTS_FIRST: gl.constexpr = PDL and not GATHER

    n_tiles = gl.cdiv(n_blocks * 64, BLOCK_N)
    if PDL and GATHER:
        gdc_wait()
    expert, n, row, end = locate(
        gl.program_id(0), tiles_ptr, n_tiles, first_expert, num_experts, False, GROUP
    )
    if expert < 0:
        return
    if WEIGHTS_FIRST:
        gdc_launch_dependents()

    x = gl.allocate_shared_memory(gl.bfloat16, [STAGES, SLICES, TOKENS, K_BLOCKS * 64], TILE)
    slice_blocks = gl.cdiv(k_blocks, SLICES)
    chunks = gl.cdiv(slice_blocks, K_BLOCKS)
    weights = first_chunk(
        w_ptr, scales_ptr, expert, n, k_blocks, n_blocks, slice_blocks,
        FORMAT, BLOCK_N // 16, SLICES, K_BLOCKS, ACROSS,
    )  # fmt: skip
    alpha = gl.load(alpha_ptr + expert)
    bias = alpha
    if BIAS:
        bias = load_bias(bias_ptr, expert, n, n_rows, BLOCK_N, gl.SliceLayout(1, gl.SliceLayout(0, ACC)))
    to, stored, weight = result_places(
        order_ptr, weights_ptr, row, end, TOKENS, SCATTER, False, gl.SliceLayout(0, STORE)
    )
    if WEIGHTS_FIRST:
        gdc_wait()
    offset, exists = begin_tokens(
        x_ptr, order_ptr, x, row, end, top_k, x_stride, chunks, slice_blocks, K, GATHER, WHOLE, PDL, num_warps
    )
    acc = multiply_chunks(
        x_ptr, x, weights, offset, exists, chunks, slice_blocks, K, FORMAT, BLOCK_N, WHOLE, ACROSS, num_warps
    )
    end_tile(
        acc, alpha, bias, weight, out_ptr, to, stored, n, out_columns, out_stride, act_alpha, act_beta,
        act_limit, ACTIVATION, SCATTER, BIAS, STORE,
    )  # fmt: skip


@gluon.jit
def end_tile(
    acc, alpha, bias, weight, out_ptr, to, stored, n, out_columns, out_stride, act_alpha, act_beta, act_limit,
    ACTIVATION: gl.constexpr, SCATTER: gl.constexpr, BIAS: gl.constexpr, STORE: gl.constexpr,
):  # fmt: skip
    """Add up slices; scale, bias, activation, routing weight; store to rows `to`."""
    y = gl.sum(acc, 0) * alpha
    if BIAS:
        y += bias[:, None]
    y = gl.convert_layout(activate(y, act_alpha, act_beta, act_limit, ACTIVATION), STORE)
    if SCATTER:
        y = y * weight[None, :]
    column = n * y.shape[0] + gl.arange(0, y.shape[0], gl.SliceLayout(1, STORE))
    at = out_ptr + to.to(gl.int64)[None, :] * out_stride + column[:, None]
    gl.store(at, y.to(gl.bfloat16), mask=stored[None, :] & (column // 8 * 8 < out_columns)[:, None])
