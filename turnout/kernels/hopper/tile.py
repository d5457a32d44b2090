"""What the experts' GEMMs for Hopper have in common: where a tile is, its memory, and its end (Gluon).

Legend: R sorted rows (token, expert), N weight rows, E local experts.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from turnout.kernels.hopper.decode import scale_words


@gluon.jit
def locate(program, tiles_ptr, n_tiles, first_expert, num_experts, DIRECT: gl.constexpr, GROUP: gl.constexpr):
    """This program's expert (-1: nothing to do), tile of weight rows, first sorted row and the end of them.

    DIRECT: without sorting, every (token, expert) pair is a tile of one row; `tiles_ptr` are the expert ids.
    Otherwise GROUP tiles of tokens take turns with the same weights, for the sake of the L2 cache.
    """
    if DIRECT:
        tile = program // n_tiles
        n = program % n_tiles
        expert = gl.load(tiles_ptr + tile) - first_expert
        expert = gl.where((expert < 0) | (expert >= num_experts), -1, expert)
        row = tile
        end = tile + 1
    else:
        num_tiles = gl.load(tiles_ptr)
        group = program // (n_tiles * GROUP)
        size = gl.maximum(gl.minimum(num_tiles - group * GROUP, GROUP), 1)
        rest = program - group * n_tiles * GROUP
        live = (group * GROUP < num_tiles) & (rest < size * n_tiles)
        tile = gl.where(live, group * GROUP + rest % size, 0)
        n = rest // size
        expert = gl.where(live, gl.load(tiles_ptr + 4 + tile * 4), -1)
        row = gl.load(tiles_ptr + 5 + tile * 4)
        end = gl.load(tiles_ptr + 6 + tile * 4)
    return expert, n, row, end


@gluon.jit
def gathered_tokens(order_ptr, row, end, top_k, TOKENS: gl.constexpr, ROWS: gl.constexpr):
    """Whose tokens a tile's rows from `row` on are, and which exist; some row does. Without predicates: with
    them, ptxas lets half of a thread's eight loads wait for one another.
    """
    r = row + gl.arange(0, TOKENS, gl.SliceLayout(1, ROWS))
    pair = gl.load(order_ptr + gl.minimum(r, end - 1))
    return pair // top_k, r < end


@gluon.jit
def token_rows(
    order_ptr, row, end, top_k, x_stride, TOKENS: gl.constexpr, GATHER: gl.constexpr, DIRECT: gl.constexpr,
    ROWS: gl.constexpr,
):  # fmt: skip
    """Where TOKENS rows of x begin, from sorted row `row` on, and which of them exist."""
    r = row + gl.arange(0, TOKENS, gl.SliceLayout(1, ROWS))
    exists = r < end
    if GATHER:
        if not DIRECT:
            r = gl.load(order_ptr + r, mask=exists, other=0)
        r = r // top_k
    return r.to(gl.int64) * x_stride, exists


@gluon.jit
def tile_memory(FORMAT: gl.constexpr, SLOTS: gl.constexpr, ROWS: gl.constexpr, TOKENS: gl.constexpr):
    """Shared memory for 64 columns of TOKENS rows of x, and of ROWS of weights and their scales, SLOTS times.

    bf16 weights have no scales: the weights stand in.
    """
    LINEAR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    x = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, TOKENS, 64], TILE)
    if FORMAT != "bf16":
        WORDS: gl.constexpr = scale_words(FORMAT)
        w = gl.allocate_shared_memory(gl.int32, [SLOTS, ROWS // 64, 512], LINEAR)
        scales = gl.allocate_shared_memory(gl.int32, [SLOTS, ROWS // 64, WORDS], LINEAR)
    else:
        w = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, ROWS, 64], TILE)
        scales = w
    return x, w, scales


@gluon.jit
def load_bias(bias_ptr, expert, n, n_rows, BLOCK_N: gl.constexpr, LAYOUT: gl.constexpr):
    """float32 [BLOCK_N] of an expert's nth tile of weight rows; zeros beyond the last row."""
    row = n * BLOCK_N + gl.arange(0, BLOCK_N, LAYOUT)
    return gl.load(bias_ptr + expert * n_rows + row, mask=row < n_rows, other=0.0)


@gluon.jit
def result_places(
    order_ptr, weights_ptr, row, end,
    TOKENS: gl.constexpr, SCATTER: gl.constexpr, DIRECT: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Where results of TOKENS rows from sorted row `row` on go, which exist, and, SCATTER, their routing
    weights."""
    to = row + gl.arange(0, TOKENS, LAYOUT)
    exists = to < end
    weight = exists
    if SCATTER:
        if not DIRECT:
            to = gl.load(order_ptr + to, mask=exists, other=0)
        weight = gl.load(weights_ptr + to, mask=exists, other=0.0)
    return to, exists, weight


@gluon.jit
def activate(y, act_alpha, act_beta, act_limit, ACTIVATION: gl.constexpr):
    """The activation of y [rows, tokens], of which 8 rows of gate and 8 of up take turns, if it is gated."""
    if ACTIVATION == "relu2":
        y = gl.maximum(y, 0.0)
        y = y * y
    elif ACTIVATION != "none":
        ROWS: gl.constexpr = y.shape[0]
        TOKENS: gl.constexpr = y.shape[1]
        gate, up = gl.split(y.reshape([ROWS // 16, 2, 8, TOKENS]).permute([0, 2, 3, 1]))
        if ACTIVATION == "swiglu":
            gate = gl.minimum(gate, act_limit)
            up = gl.minimum(gl.maximum(up, -act_limit), act_limit) + act_beta
            y = gate / (1.0 + gl.exp(-act_alpha * gate)) * up
        else:
            y = gate / (1.0 + gl.exp(-gate)) * up
        y = y.reshape([ROWS // 2, TOKENS])
    return y


@gluon.jit
def finish(
    acc, alpha_ptr, bias_ptr, out_ptr, order_ptr, weights_ptr, expert, n, n_rows, row, end, out_columns,
    out_stride,
    act_alpha, act_beta, act_limit,
    ACTIVATION: gl.constexpr, SCATTER: gl.constexpr, DIRECT: gl.constexpr, BIAS: gl.constexpr, ALPHA:
    gl.constexpr,
    BLOCK_N: gl.constexpr, TOKENS: gl.constexpr, ACC: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Scale, bias, activation; SCATTER: routing weight, and the row of the pair instead of the sorted row."""
    y = acc
    if ALPHA:
        y = y * gl.load(alpha_ptr + expert)
    if BIAS:
        y += load_bias(bias_ptr, expert, n, n_rows, BLOCK_N, gl.SliceLayout(1, ACC))[:, None]
    COLUMNS: gl.constexpr = BLOCK_N if ACTIVATION == "none" or ACTIVATION == "relu2" else BLOCK_N // 2
    y = activate(y, act_alpha, act_beta, act_limit, ACTIVATION)
    STORE: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, num_warps], [0, 1])
    y = gl.convert_layout(y, STORE)
    r = row + gl.arange(0, TOKENS, gl.SliceLayout(0, STORE))
    c = n * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(1, STORE))
    exists = r < end
    if SCATTER:
        if not DIRECT:
            r = gl.load(order_ptr + r, mask=exists, other=0)
        y = y * gl.load(weights_ptr + r, mask=exists, other=0.0)[None, :]
    at = out_ptr + r.to(gl.int64)[None, :] * out_stride + c[:, None]
    gl.store(at, y.to(gl.bfloat16), mask=exists[None, :] & (c[:, None] < out_columns))


@gluon.jit
def result_rows(order_ptr, row, end, WIDTH: gl.constexpr, SCATTER: gl.constexpr):
    """Where results of sorted rows from `row` on go, -1 from `end` on; SCATTER: to their pairs' rows."""
    mine = row + gl.arange(0, WIDTH, gl.BlockedLayout([1], [32], [4], [0]))
    to = mine
    if SCATTER:
        to = gl.load(order_ptr + gl.minimum(mine, end - 1))
    return gl.where(mine < end, to, -1)


@gluon.jit
def store_rows(y, r, out_ptr, column, out_columns, out_stride):
    """bf16 y [columns, tokens] to rows r of out, none below 0; 64 at a time, for lack of shared memory."""
    COLUMNS: gl.constexpr = y.shape[0]
    TOKENS: gl.constexpr = y.shape[1]
    STORE: gl.constexpr = gl.BlockedLayout([8, 1], [COLUMNS // 8, 256 // COLUMNS], [1, 4], [0, 1])
    if TOKENS > 64:
        left, right = gl.split(y.reshape([COLUMNS, 2, TOKENS // 2]).permute([0, 2, 1]))
        r_left, r_right = gl.split(r.reshape([2, TOKENS // 2]).permute([1, 0]))
        store_rows(left, r_left, out_ptr, column, out_columns, out_stride)
        store_rows(right, r_right, out_ptr, column, out_columns, out_stride)
    else:
        y = gl.convert_layout(y, STORE)
        r = gl.convert_layout(r, gl.SliceLayout(0, STORE), assert_trivial=True)
        c = column + gl.arange(0, COLUMNS, gl.SliceLayout(1, STORE))
        at = out_ptr + r.to(gl.int64)[None, :] * out_stride + c[:, None]
        gl.store(at, y, mask=(r >= 0)[None, :] & (c[:, None] < out_columns))


@gluon.jit
def finish_part(
    acc0, acc1, alpha, bias0, bias1, to, out_ptr, weights_ptr, block, out_columns, out_stride,
    act_alpha, act_beta, act_limit,
    HELD: gl.constexpr, PACKED: gl.constexpr, ACTIVATION: gl.constexpr, SCATTER: gl.constexpr,
    BIAS: gl.constexpr,
):  # fmt: skip
    """Scale, bias, activation, routing weight; sums of HELD blocks of 64 weight rows go to rows `to`."""
    ACC: gl.constexpr = acc0.type.layout
    COLUMNS: gl.constexpr = 64 if ACTIVATION == "none" or ACTIVATION == "relu2" else 32
    STORE: gl.constexpr = gl.BlockedLayout([8, 1], [COLUMNS // 8, 256 // COLUMNS], [1, 4], [0, 1])
    if SCATTER:
        weight = gl.load(weights_ptr + gl.maximum(to, 0))
    r = gl.convert_layout(to, gl.SliceLayout(0, STORE))
    for held in gl.static_range(HELD):
        y = acc0 if held == 0 else acc1
        if PACKED:
            y = y * alpha
        if BIAS:
            bias = bias0 if held == 0 else bias1
            y += gl.convert_layout(bias, gl.SliceLayout(1, ACC), assert_trivial=True)[:, None]
        y = activate(y, act_alpha, act_beta, act_limit, ACTIVATION)
        if SCATTER:
            y = y * gl.convert_layout(weight, gl.SliceLayout(0, y.type.layout))[None, :]
        store_rows(y.to(gl.bfloat16), r, out_ptr, (block + held) * COLUMNS, out_columns, out_stride)
