"""The experts' GEMMs on Hopper for so few pairs (token, expert) that none is sorted (Gluon): 4 bits or bf16.

At one token everything waits: for a launch, for ids, for weights, for results. So this takes two launches
and no table. A program of GEMM1 finds its pair among the ids itself, or chooses one token's experts by its
logits, which saves the launch that would; a program of GEMM2 all pairs of a token, and adds up what they
give, so that no third kernel need sum rows. Warps share nothing but sums: each has strips of 16 weight rows
and a slice of the columns of one pair, loads its weights in fragment order right into registers, chunks ahead
of what it multiplies, and `mma` gets the token in all eight columns of its second operand, so that shared
memory holds one row, not eight of which seven are zero.

bf16 weights lie as they came, [N, K]; a thread loads 16 bytes of a row. `mma` wants columns 2q, 2q + 1,
2q + 8, 2q + 9 from lane q of four, and adds up columns in any order: both operands are permuted alike.

Legend: K inner size, N weight rows, S slots: a group of pairs times slices of columns.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from turnout.kernels.hopper.decode import bits, scale_words
from turnout.kernels.hopper.find import count_chosen, of_number, pairs_layout, pairs_of
from turnout.kernels.hopper.gemm_few import VARYING, axes4, decode, strips_layout
from turnout.kernels.hopper.rows_fp8 import power_of_two
from turnout.kernels.hopper.tile import activate, load_bias


@gluon.constexpr_function
def copy_layout(slots: int, columns: int, across: int) -> gl.DistributedLinearLayout:
    """[slots, 1, columns]: each slot's warps have its columns, 8 in a row of a thread."""
    steps = bits(columns // 8, 2, 3, 8)
    steps += [[0, 0, 0]] * (5 - len(steps))
    warps = [[0, 0, 0]] * (across.bit_length() - 1) + bits(slots, 0, 3)
    shape = [slots, 1, columns]
    return gl.DistributedLinearLayout(bits(8, 2, 3) + steps[5:], steps[:5], warps, [], shape)


@gluon.constexpr_function
def rows_layout(rows: int, warps: int) -> gl.DistributedLinearLayout:
    """[1, rows], in the lanes of each warp alike."""
    steps = bits(rows, 1, 2)
    steps += [[0, 0]] * (5 - len(steps))
    alike = [[0, 0]] * (warps.bit_length() - 1)
    return gl.DistributedLinearLayout(steps[5:], steps[:5], alike, [], [1, rows])


@gluon.constexpr_function
def plain_layout(slots: int, strips: int, columns: int, across: int) -> gl.DistributedLinearLayout:
    """bf16 [slots, rows, columns]: lane l has 8 columns in a row of rows l / 4 and l / 4 + 8 of a strip."""
    registers = bits(8, 2, 3) + [[0, 8, 0]] + bits(columns // 32, 2, 3, 32)
    registers += bits(strips // across, 1, 3, 16 * across)
    lanes, warps = bits(4, 2, 3, 8) + bits(8, 1, 3), bits(across, 1, 3, 16) + bits(slots, 0, 3)
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [slots, strips * 16, columns])


@gluon.constexpr_function
def plain_token_layout(slots: int, columns: int, across: int) -> gl.DistributedLinearLayout:
    """bf16 [slots, columns, 1], alike."""
    lanes = bits(4, 1, 3, 8) + [[0, 0, 0]] * 3
    warps = [[0, 0, 0]] * (across.bit_length() - 1) + bits(slots, 0, 3)
    registers = bits(8, 1, 3) + bits(columns // 32, 1, 3, 32)
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [slots, columns, 1])


@gluon.jit
def again(x):
    """x, as if it were another value in each turn of a loop: what depends on it is not kept across turns."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def packed_at(
    expert, exists, tile, slice_blocks, k_blocks, n_blocks, SLICES: gl.constexpr, WORDS: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Where 4-bit codes or scales of a tile's first chunk are, int64 as LAYOUT. WORDS: of a block of 64 rows.

    Slots without a pair read the same few bytes, whatever the tile. Columns beyond a slice are the next
    slice's, the next rows' or the slack behind all: tokens have zeros there.
    """
    S: gl.constexpr = LAYOUT.shape[0]
    STRIPS: gl.constexpr = LAYOUT.shape[1]
    OF_SLOT: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT)))
    s, strip, j, word = axes4(LAYOUT, S, STRIPS, LAYOUT.shape[2], WORDS // 4)
    strip += tile * STRIPS
    row = gl.minimum(strip // 4, n_blocks - 1) * k_blocks + (s % SLICES) * slice_blocks
    within = (row + j) * WORDS + (strip % 4) * (WORDS // 4)
    block = (gl.convert_layout(expert, OF_SLOT, assert_trivial=True) * n_blocks).to(gl.int64) * k_blocks
    here = gl.convert_layout(exists, OF_SLOT, assert_trivial=True)
    at = (block * WORDS)[:, None, None, None] + within
    return gl.where(here[:, None, None, None], at, 0) + word


@gluon.jit
def plain_at(expert, exists, tile, slice_blocks, n_rows, K, SLICES: gl.constexpr, LAYOUT: gl.constexpr):
    """Of bf16 where rows begin, int64, the columns of the first chunk, and the end of a slice's."""
    S: gl.constexpr = LAYOUT.shape[0]
    ROWS: gl.constexpr = LAYOUT.shape[1]
    OF_SLOT: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))
    row = tile * ROWS + gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    row = gl.minimum(row, n_rows - 1)[None, :, None]
    e = gl.convert_layout(expert, OF_SLOT, assert_trivial=True)[:, None, None]
    here = gl.convert_layout(exists, OF_SLOT, assert_trivial=True)[:, None, None]
    at = gl.where(here, (e * n_rows + row).to(gl.int64) * K, 0)
    begin = (gl.arange(0, S, OF_SLOT) % SLICES * slice_blocks * 64)[:, None, None]
    column = gl.arange(0, LAYOUT.shape[2], gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    return at, begin + column[None, None, :], gl.minimum(begin + slice_blocks * 64, K)


@gluon.jit
def weights_at(
    expert, exists, tile, slice_blocks, K, n_rows, k_blocks, n_blocks,
    STRIPS: gl.constexpr, K_BLOCKS: gl.constexpr, SLICES: gl.constexpr, WORDS: gl.constexpr,
    ACROSS: gl.constexpr,
):  # fmt: skip
    """What `load_chunk` takes of each slot's expert [S]: `plain_at` of bf16 (WORDS 0), otherwise where codes
    and scales are."""
    S: gl.constexpr = expert.shape[0]
    if WORDS == 0:
        LAYOUT: gl.constexpr = plain_layout(S, STRIPS, K_BLOCKS * 64, ACROSS)
        return plain_at(expert, exists, tile, slice_blocks, n_rows, K, SLICES, LAYOUT)
    else:
        CODES: gl.constexpr = strips_layout(S, STRIPS, K_BLOCKS, 128, ACROSS)
        SCALES: gl.constexpr = strips_layout(S, STRIPS, K_BLOCKS, WORDS // 4, ACROSS)
        at = packed_at(expert, exists, tile, slice_blocks, k_blocks, n_blocks, SLICES, 512, CODES)
        second_at = packed_at(expert, exists, tile, slice_blocks, k_blocks, n_blocks, SLICES, WORDS, SCALES)
        return at, second_at, K


@gluon.jit
def load_chunk(
    w_ptr, scales_ptr, at, second_at, end, CHUNK: gl.constexpr, K_BLOCKS: gl.constexpr, WORDS: gl.constexpr,
    WHOLE: gl.constexpr,
):  # fmt: skip
    """The chunk CHUNK of weights: (codes, scales); of bf16 (WORDS 0), whose rows begin `at` and whose columns
    are second_at, one value twice. WHOLE: all its columns are before `end`.
    """
    if WORDS > 0:
        codes = gl.load(w_ptr + (at + CHUNK * K_BLOCKS * 512), eviction_policy="evict_first")
        return codes, gl.load(scales_ptr + (second_at + CHUNK * K_BLOCKS * WORDS))
    else:
        if WHOLE:
            w = gl.load(w_ptr + (at + second_at + CHUNK * K_BLOCKS * 64), eviction_policy="evict_first")
        else:
            eight = second_at // 8 * 8 + CHUNK * K_BLOCKS * 64
            column = gl.where(eight < end, eight, 0) + second_at % 8
            w = gl.load(w_ptr + (at + column), eviction_policy="evict_first")
        return w, w


@gluon.jit
def plain_operand(w, OPERAND: gl.constexpr):
    """bf16 [S, rows, columns] of `plain_layout`, its columns permuted for `mma`."""
    S: gl.constexpr = w.shape[0]
    R: gl.constexpr = w.shape[1]
    K: gl.constexpr = w.shape[2]
    w = w.reshape([S, R, K // 32, 4, 2, 2, 2]).permute([0, 1, 2, 4, 5, 3, 6]).reshape([S, R, K])
    return gl.convert_layout(w, OPERAND, assert_trivial=True)


@gluon.jit
def token_operand(x, OPERAND: gl.constexpr, PLAIN: gl.constexpr, ACROSS: gl.constexpr):
    """Shared bf16 [S, 1, columns] -> [S, columns, 8], eight times the same. PLAIN: permuted as weights."""
    S: gl.constexpr = x.shape[0]
    K: gl.constexpr = x.shape[2]
    if PLAIN:
        one = x.permute((0, 2, 1)).load(plain_token_layout(S, K, ACROSS))
        one = one.reshape([S, K // 32, 4, 2, 2, 2, 1]).permute([0, 1, 3, 4, 2, 5, 6]).reshape([S, K, 1])
        one = gl.convert_layout(one, OPERAND, assert_trivial=True)
    else:
        one = x.permute((0, 2, 1)).load(OPERAND)
    return one.broadcast_to([S, K, 8])


@gluon.jit
def copy_rows(x_ptr, x, x_row, exists, slice_blocks, K, x_stride, SLICES: gl.constexpr, ACROSS: gl.constexpr):
    """Start copying each slot's slice of row x_row [S] to x [S, 1, columns]; zeros where there are none."""
    S: gl.constexpr = x.shape[0]
    ALL: gl.constexpr = x.shape[2]
    COPY: gl.constexpr = copy_layout(S, ALL, ACROSS)
    COPY_S: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, COPY))
    c = gl.arange(0, ALL, gl.SliceLayout(0, gl.SliceLayout(1, COPY)))[None, None, :]
    k = (gl.arange(0, S, COPY_S) % SLICES * slice_blocks * 64)[:, None, None] + c
    x_row = gl.convert_layout(x_row, COPY_S, assert_trivial=True)[:, None, None]
    held = gl.convert_layout(exists, COPY_S, assert_trivial=True)[:, None, None]
    held = held & (c < slice_blocks * 64) & (k < K)
    async_copy.async_copy_global_to_shared(x, x_ptr + x_row.to(gl.int64) * x_stride + k, mask=held)


@gluon.jit
def rows_memory(SLOTS: gl.constexpr, CHUNKS: gl.constexpr, K_BLOCKS: gl.constexpr):
    """What `multiply` takes for rows of x."""
    ALL: gl.constexpr = power_of_two(CHUNKS) * K_BLOCKS * 64
    MEMORY: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    return gl.allocate_shared_memory(gl.bfloat16, [1, SLOTS, 1, ALL], MEMORY)


@gluon.jit
def multiply(
    x_memory, x_ptr, w_ptr, scales_ptr, expert, x_row, exists, n, K, n_rows, k_blocks, n_blocks, x_stride,
    FORMAT: gl.constexpr, BLOCK_N: gl.constexpr, K_BLOCKS: gl.constexpr, CHUNKS: gl.constexpr,
    WHOLE: gl.constexpr, SLICES: gl.constexpr, AHEAD: gl.constexpr, WEIGHTS_FIRST: gl.constexpr,
    ACROSS: gl.constexpr, LAUNCH: gl.constexpr,
):  # fmt: skip
    """Sums float32 [S, BLOCK_N, 8], eight times the same, of each slot's expert [S] and row of x [S].

    x_memory: bf16 [1, S, 1, columns]. n: tile of rows. Chunks of K_BLOCKS blocks of 64 columns are loaded
    AHEAD of that multiplied; the first WHOLE chunks of bf16 need no bounds. WEIGHTS_FIRST: x is not there
    before `gdc_wait`, weights are. LAUNCH: the next kernel may start once x is on its way.
    """
    PLAIN: gl.constexpr = FORMAT == "bf16"
    S: gl.constexpr = expert.shape[0]
    STRIPS: gl.constexpr = BLOCK_N // 16
    COLUMNS: gl.constexpr = K_BLOCKS * 64
    ACC: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [S, ACROSS, 1], [1, 16, 8])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    TOKEN_OPERAND: gl.constexpr = gl.DotOperandLayout(1, ACC, 2)
    WORDS: gl.constexpr = 0 if PLAIN else scale_words(FORMAT)

    tile = again(n)
    x = x_memory.index(again(0 * n))
    slice_blocks = gl.cdiv(k_blocks, SLICES)
    at, second_at, end = weights_at(
        expert, exists, tile, slice_blocks, K, n_rows, k_blocks, n_blocks, STRIPS, K_BLOCKS, SLICES, WORDS,
        ACROSS,
    )  # fmt: skip
    loaded = gl.tuple([])
    for chunk in gl.static_range(AHEAD):
        if chunk < CHUNKS:
            one = load_chunk(w_ptr, scales_ptr, at, second_at, end, chunk, K_BLOCKS, WORDS, chunk < WHOLE)
            loaded = loaded + (one,)
    if WEIGHTS_FIRST:
        gdc_wait()
    copy_rows(x_ptr, x, x_row, exists, slice_blocks, K, x_stride, SLICES, ACROSS)
    async_copy.commit_group()
    if LAUNCH:
        gdc_launch_dependents()
    async_copy.wait_group(0)
    gl.thread_barrier()

    acc = gl.zeros([S, BLOCK_N, 8], gl.float32, ACC)
    for chunk in gl.static_range(CHUNKS):
        codes, scales = loaded[0]
        loaded = loaded[1:]
        if chunk + AHEAD < CHUNKS:
            one = load_chunk(
                w_ptr, scales_ptr, at, second_at, end, chunk + AHEAD, K_BLOCKS, WORDS, chunk + AHEAD < WHOLE
            )
            loaded = loaded + (one,)
        if PLAIN:
            w = plain_operand(codes, OPERAND)
        else:
            w = decode(codes, scales, FORMAT, OPERAND, ACROSS)
        token = token_operand(x.slice(chunk * COLUMNS, COLUMNS, 2), TOKEN_OPERAND, PLAIN, ACROSS)
        acc = mma_v2(w, token, acc)
    return acc


@gluon.jit(do_not_specialize=[*VARYING, "n_pairs", "num_logits"])
def gemm_of_pairs(
    x_ptr, w_ptr, scales_ptr, alpha_ptr, bias_ptr, out_ptr, ids_ptr, logits_ptr, real_ptr, counts_ptr,
    K, n_pairs, n_rows, out_columns, k_blocks, n_blocks, x_stride, out_stride, top_k, first_expert,
    num_experts, num_logits, act_alpha, act_beta, act_limit,
    FORMAT: gl.constexpr, ACTIVATION: gl.constexpr, BIAS: gl.constexpr, PAIRS: gl.constexpr,
    BLOCK_N: gl.constexpr, K_BLOCKS: gl.constexpr, CHUNKS: gl.constexpr, WHOLE: gl.constexpr,
    SLICES: gl.constexpr, AHEAD: gl.constexpr, LATE: gl.constexpr, TOP_K: gl.constexpr,
    PARTS: gl.constexpr, PADDED: gl.constexpr, LOGITS: gl.constexpr, PDL: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """out[i] = act(w[expert] @ x[i // top_k] * alpha[expert] + bias[expert]) of every pair i that is held.

    ids int32 [n_pairs], PAIRS: 32 or 64, no fewer; out bf16 [n_pairs, out_columns]; weights and the rest as
    of `expert_gemm`. A program for each pair and tile of rows; those beyond the pairs held end at once.
    TOP_K: of one token, whose experts are those that `chosen_pairs` gives, LOGITS being the power of two of
    num_logits; counts int64 [num_logits] += choices. 0: ids hold them.
    """
    PLAIN: gl.constexpr = FORMAT == "bf16"
    ACROSS: gl.constexpr = num_warps // SLICES
    FOUND: gl.constexpr = pairs_layout(SLICES, PAIRS, ACROSS)
    n_tiles = gl.cdiv(n_rows, BLOCK_N)
    program = gl.program_id(0)
    number = 1 + program // n_tiles
    n = program % n_tiles
    if PDL:
        gdc_wait()
    i, expert, numbers, _ = pairs_of(
        ids_ptr, logits_ptr, real_ptr, n_pairs, first_expert, num_experts, num_logits, 1.0, TOP_K, PARTS,
        False, PADDED, pairs_layout(SLICES, LOGITS, ACROSS), FOUND,
    )  # fmt: skip
    if TOP_K > 0:
        count_chosen(counts_ptr, expert, (numbers > 0) & (program == 0))
    if number > gl.max(numbers, 0):
        return
    pair = gl.sum(gl.where(numbers == number, i, 0), 0)
    e = gl.sum(gl.where(numbers == number, expert, 0), 0)
    zeros = gl.zeros([SLICES], gl.int32, gl.SliceLayout(1, FOUND))
    x = rows_memory(SLICES, CHUNKS, K_BLOCKS)
    ACC: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [SLICES, ACROSS, 1], [1, 16, 8])
    if not PLAIN:
        alpha = gl.load(alpha_ptr + e)
    if BIAS:
        bias = load_bias(bias_ptr, e, n, n_rows, BLOCK_N, gl.SliceLayout(1, gl.SliceLayout(0, ACC)))
    acc = multiply(
        x, x_ptr, w_ptr, scales_ptr, zeros + e, zeros + pair // top_k, zeros == 0, n, K, n_rows, k_blocks,
        n_blocks, x_stride, FORMAT, BLOCK_N, K_BLOCKS, CHUNKS, WHOLE, SLICES, AHEAD, False, ACROSS,
        PDL and not LATE,
    )  # fmt: skip
    if PDL and LATE:
        gdc_launch_dependents()
    y = gl.sum(acc, 0)
    if not PLAIN:
        y = y * alpha
    if BIAS:
        y += bias[:, None]
    y = gl.max(activate(y, act_alpha, act_beta, act_limit, ACTIVATION), 1)
    column = n * y.shape[0] + gl.arange(0, y.shape[0], y.type.layout)
    at = out_ptr + pair.to(gl.int64) * out_stride + column
    gl.store(at, y.to(gl.bfloat16), mask=column < out_columns)


@gluon.jit
def bias_of(
    bias_ptr, expert, n, n_rows, S: gl.constexpr, BLOCK_N: gl.constexpr, SLICES: gl.constexpr,
    ROWS: gl.constexpr,
):  # fmt: skip
    """Bias float32 [S, BLOCK_N] of each slot's expert, in the first of its slices; zeros in others."""
    OF_SUMS: gl.constexpr = gl.SliceLayout(1, ROWS)
    row = n * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, ROWS))
    once = gl.arange(0, S, OF_SUMS) % SLICES == 0
    from_row = gl.convert_layout(expert, OF_SUMS, assert_trivial=True) * n_rows
    at = bias_ptr + from_row[:, None] + row[None, :]
    return gl.load(at, mask=once[:, None] & (row < n_rows)[None, :], other=0.0)


@gluon.jit
def weights_of(at, weights, numbers, wanted, LAYOUT: gl.constexpr, TOP_K: gl.constexpr):
    """float32 [S] of the pairs wanted: those at `at` [S], or of chosen pairs their own."""
    if TOP_K > 0:
        found = of_number(weights, numbers, wanted)
    else:
        found = gl.load(at)
    return gl.convert_layout(found, LAYOUT, assert_trivial=True)


@gluon.jit
def store_sums(row_ptr, total, n, out_columns, LAYOUT: gl.constexpr):
    """Tile n of a token's sums [1, BLOCK_N]."""
    BLOCK_N: gl.constexpr = total.shape[1]
    column = n * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT))[None, :]
    gl.store(row_ptr + column, total.to(row_ptr.dtype.element_ty), mask=column < out_columns)


@gluon.jit
def add_pairs(total, sums, y, first, live, GROUP: gl.constexpr, SLICES: gl.constexpr):
    """total and the rounded results of GROUP pairs from the pair `first` on, of which `live` are held, each
    the sum of its SLICES of y, by way of the shared memory `sums`."""
    OUT: gl.constexpr = total.type.layout
    sums.store(y)
    gl.thread_barrier()
    for g in gl.static_range(GROUP):
        one = sums.slice(g * SLICES, 1).load(OUT)
        for part in gl.static_range(1, SLICES):
            one += sums.slice(g * SLICES + part, 1).load(OUT)
        total += gl.where(first + g < live, one.to(gl.bfloat16).to(gl.float32), 0.0)
    return total


@gluon.jit(do_not_specialize=[*VARYING, "num_logits"])
def gemm_of_tokens(
    x_ptr, w_ptr, scales_ptr, alpha_ptr, bias_ptr, out_ptr, ids_ptr, weights_ptr, logits_ptr, real_ptr,
    K, n_rows, out_columns, k_blocks, n_blocks, x_stride, out_stride, top_k, first_expert, num_experts,
    num_logits, scaling,
    FORMAT: gl.constexpr, BIAS: gl.constexpr, PAIRS: gl.constexpr, BLOCK_N: gl.constexpr,
    K_BLOCKS: gl.constexpr, CHUNKS: gl.constexpr, WHOLE: gl.constexpr, GROUP: gl.constexpr,
    SLICES: gl.constexpr, AHEAD: gl.constexpr, ONCE: gl.constexpr, TOP_K: gl.constexpr,
    PARTS: gl.constexpr, OF_ALL: gl.constexpr, PADDED: gl.constexpr, LOGITS: gl.constexpr,
    PDL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """out[t] = sum of bf16((w[expert] @ x[i] * alpha[expert] + bias[expert]) * weights[i]), of pairs i held.

    In the order of pairs, in float32, as `sum_pairs` adds. x bf16 [T * top_k, K]; ids int32, weights float32
    [T, top_k]; PAIRS: 32 or 64, no fewer than top_k. A program for each token and tile of rows, whose warps
    GROUP pairs share at a time. ONCE: they are all of a token. TOP_K: as of `gemm_of_pairs`, weights too.
    """
    PLAIN: gl.constexpr = FORMAT == "bf16"
    S: gl.constexpr = GROUP * SLICES
    ACROSS: gl.constexpr = num_warps // S
    FOUND: gl.constexpr = pairs_layout(S, PAIRS, ACROSS)
    SLOT: gl.constexpr = gl.SliceLayout(1, FOUND)
    OUT: gl.constexpr = rows_layout(BLOCK_N, num_warps)
    n_tiles = gl.cdiv(n_rows, BLOCK_N)
    token = gl.program_id(0) // n_tiles
    n = gl.program_id(0) % n_tiles
    first_pair = token * top_k
    i, expert, numbers, weights = pairs_of(
        ids_ptr + first_pair, logits_ptr, real_ptr, top_k, first_expert, num_experts, num_logits, scaling,
        TOP_K, PARTS, OF_ALL, PADDED, pairs_layout(S, LOGITS, ACROSS), FOUND,
    )  # fmt: skip
    live = gl.max(numbers, 0)
    if PDL:
        gdc_launch_dependents()
    x = rows_memory(S, CHUNKS, K_BLOCKS)
    sums = gl.allocate_shared_memory(gl.float32, [S, BLOCK_N], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    total = gl.zeros([1, BLOCK_N], gl.float32, OUT)
    for first in range(0, 1 if ONCE else live, GROUP):
        wanted = first + 1 + gl.arange(0, S, SLOT) // SLICES
        e = of_number(expert, numbers, wanted)
        pair = of_number(i, numbers, wanted) + first_pair
        ROWS: gl.constexpr = gl.SliceLayout(2, gl.NVMMADistributedLayout([2, 0], [S, ACROSS, 1], [1, 16, 8]))
        OF_SUMS: gl.constexpr = gl.SliceLayout(1, ROWS)
        weight = weights_of(weights_ptr + pair, weights, numbers, wanted, OF_SUMS, TOP_K)
        if not PLAIN:
            alpha = gl.convert_layout(gl.load(alpha_ptr + e), OF_SUMS, assert_trivial=True)
        if BIAS:
            bias = bias_of(bias_ptr, e, n, n_rows, S, BLOCK_N, SLICES, ROWS)
        acc = multiply(
            x, x_ptr, w_ptr, scales_ptr, e, pair, wanted <= live, n, K, n_rows, k_blocks, n_blocks, x_stride,
            FORMAT, BLOCK_N, K_BLOCKS, CHUNKS, WHOLE, SLICES, AHEAD, PDL, ACROSS, False,
        )  # fmt: skip
        y = gl.max(acc, 2)
        if not PLAIN:
            y = y * alpha[:, None]
        if BIAS:
            y += bias
        total = add_pairs(total, sums, y * weight[:, None], first, live, GROUP, SLICES)
    if PDL:
        gdc_wait()
    store_sums(out_ptr + token.to(gl.int64) * out_stride, total, n, out_columns, OUT)
