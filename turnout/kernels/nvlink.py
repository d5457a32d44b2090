"""Tokens to the ranks that hold their experts and results back, by stores into peers' memory (Triton).

Two launches a layer, no collective, no host. Every rank has the same region of symmetric memory
(parallel/symmetric.py) and knows the address of everyone's:

    counts    int64 [2, R]           epoch << 24 | tokens of source s
    flags     int64 [2, rows, P]     epoch << 1 | whether the row is wanted here, per piece of a row
    meta      int32 [2, rows, 2 k]   ids, then weights, of a row
    hidden    bytes [rows, .]        a token in its wire format; scales: [rows, .]
    returned  int64 [rows, P]        epoch, per piece of a result
    results   [rows, H]              a token's result from rank r

Token t of source s is row `t R + s` on every rank that holds one of its experts, and its result from rank r
comes back into row `t R + r` of s. Nobody allocates slots, so there are no atomics to race for them and no
sums over ranks, and the rows of a batch are a prefix of the buffer whatever its size: ranks may run graphs
of different batch sizes. `dispatch_rows` writes a token's row, then its flags; then waits for everyone's
counts and for the flags of the rows they announce, and leaves ids and weights with -1 for rows that nobody
sent or that are not wanted here. `combine_rows` writes results and flags, then sums, for each of its own
tokens, those of the ranks that the token went to: in float32, in the order of ranks, so the same bits
every time.

Why no barrier keeps a buffer from being overwritten too early: a rank leaves dispatch e when all ranks have
begun theirs, so they have left dispatch e - 1, whose counts, flags and meta lie in the other half. A row of
`hidden` is written again after its result came back, hence was used; one that was not wanted is not read.
A result is written again after its owner has begun the next dispatch. That holds as long as each dispatch
is followed by its combine before the next on the same region: batches under way together need a region
each.

Epochs live on the device: `epochs[0]` is the last that was combined, `epochs[1]` the one under way. Each
kernel writes the one that it does not read, so graphs replay without anyone counting.

Every warp of a program polls for itself, so all agree, in a barrier that counts, whether to look again:
without it, warps that saw a flag early met the others in the wrong barrier and called rows padding that had
arrived.

A program first pushes all it has and then waits, and no more programs are launched than fit on the device
together: none waits for another that cannot start. A wait that lasts longer than `limit` leaves a word in
`failed` and, where the host sees it, in `told` (see `failure`), and gives up; so do all later ones at once.

What was chosen without a clock, from counting bytes and round trips, and stands to be measured: results are
pushed, not pulled, since a load from a peer waits for a round trip and a store does not; a flag per piece of
a row, rather than one for a rank's whole step, spares the hop through a counter that all programs share, and
lets sums begin before the last row is there; rows of several results share a release, whose fence waits for
the acknowledgement of all stores before it. Waiting for 32 rows at once does not compile (Triton 3.6, layout
conversions of 32 x 8 flags); 8 and 16 do.

Legend: T tokens of this rank, R ranks, k top-k (KP, RP: the next power of two), H hidden, P pieces of PIECE
columns, rows = capacity * R, room: tokens per rank for which a batch has rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

from turnout.kernels.quantize import quantize_fp8, quantize_nvfp4, to_float

PIECE = 1024  # columns that share a flag
DISPATCH, COMBINE, CAPACITY = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)  # phases of a failure
WARPS = 8
RESIDENT = 2  # programs on a multiprocessor, which their registers are limited to allow
REGISTERS = 65536 // (32 * WARPS * RESIDENT)
POLLS = 1 << 20  # that the interpreter waits


@triton.jit
def failure(phase, peer, number):
    """What a rank says when it gives up: phase, the rank it waited for, and epoch (CAPACITY: tokens)."""
    return (phase.to(tl.int64) << 52) | (peer.to(tl.int64) << 40) | (number.to(tl.int64) & ((1 << 40) - 1))


@triton.jit
def fail(failed_ptr, told_ptr, word):
    if tl.atomic_cas(failed_ptr, tl.zeros([], tl.int64), word) == 0:
        tl.store(told_ptr, word)


@triton.jit
def at(address, offset, kind: tl.constexpr):
    """The pointer `offset` bytes after `address`."""
    return (address + offset).to(tl.pointer_type(kind))


@triton.jit
def at_word(address, offset, kind: tl.constexpr):
    """The same, where both are multiples of 16: what is stored there may be stored 16 bytes at a time."""
    pointer = (address + offset).to(tl.pointer_type(kind))
    return tl.multiple_of(pointer, [16] * len(pointer.shape) if len(pointer.shape) else 16)


@triton.jit
def now(INTERPRETED: tl.constexpr):
    """Nanoseconds."""
    if INTERPRETED:
        return tl.zeros([], tl.int64)
    else:
        return globaltimer()


@triton.jit
def anyone(flag, INTERPRETED: tl.constexpr):
    """How many threads have a positive `flag`. Warps read memory that changes each for itself; they must
    decide together whether to look again, for there are barriers ahead."""
    if INTERPRETED:
        return flag
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.gt.s32 p, $1, 0; bar.red.popc.u32 $0, 0, p; }", "=r,r", [flag],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def late(polls, began, limit, INTERPRETED: tl.constexpr):
    """Whether a wait has lasted longer than `limit` ns; interpreted, longer than `limit` polls."""
    over = False
    if INTERPRETED:
        over = polls > limit
    else:
        if (polls & 255) == 255:  # reading the clock takes longer than a poll
            over = anyone((globaltimer() - began > limit).to(tl.int32), INTERPRETED) > 0
    return over


@triton.jit
def acquire(INTERPRETED: tl.constexpr):
    """What peers wrote before the flags that this program has seen may be read."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            "fence.acq_rel.sys; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )
    tl.debug_barrier()


@triton.jit
def push_token(
    x_ptr, scale_ptr, addresses_ptr, slice_K, first, row, hidden_at, scales_at,
    RANKS: tl.constexpr, TP: tl.constexpr, H: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr,
    FORMAT: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Columns [first * PIECE, + PIECES * PIECE) of the token at x, to row `row` of all that want it."""
    if FORMAT == "bf16":
        size: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth // 8
        c = first * PIECE + tl.arange(0, PIECES * PIECE)
        x = tl.load(x_ptr + c, mask=c < H, other=0.0)
        for r in tl.static_range(RANKS):
            if tl.max((slice_K == r // TP).to(tl.int32), 0) > 0:
                to = tl.load(addresses_ptr + r)
                to_ptr = at_word(to, hidden_at + row * (H * size), x_ptr.dtype.element_ty)
                tl.store(to_ptr + c, x, mask=c < H)
    else:
        group: tl.constexpr = 128 if FORMAT == "fp8" else 16
        packed: tl.constexpr = group if FORMAT == "fp8" else group // 2  # bytes
        scale_type: tl.constexpr = tl.float32 if FORMAT == "fp8" else tl.uint8
        scale_size: tl.constexpr = 4 if FORMAT == "fp8" else 1
        g = first * (PIECE // group) + tl.arange(0, PIECES * PIECE // group)
        c = g[:, None] * group + tl.arange(0, group)[None, :]
        x = tl.load(x_ptr + c, mask=c < H, other=0.0).to(tl.float32)
        if FORMAT == "fp8":
            q, scale = quantize_fp8(x, INTERPRETED)
        else:
            q, scale = quantize_nvfp4(x, tl.load(scale_ptr), INTERPRETED)
        b = g[:, None] * packed + tl.arange(0, packed)[None, :]
        for r in tl.static_range(RANKS):
            if tl.max((slice_K == r // TP).to(tl.int32), 0) > 0:
                to = tl.load(addresses_ptr + r)
                q_ptr = at_word(to, hidden_at + row * (H // group * packed), tl.uint8)
                s_ptr = at(to, scales_at + row * (H // group * scale_size), scale_type)
                tl.store(q_ptr + b, q, mask=b < H // group * packed)
                tl.store(s_ptr + g, scale, mask=g < H // group)


@triton.jit(do_not_specialize=["tokens", "room", "limit"])
def dispatch_rows(
    x_ptr, ids_ptr, weights_ptr, scale_ptr, addresses_ptr, epochs_ptr, failed_ptr, told_ptr, out_ids_ptr,
    out_weights_ptr, tokens, room, rows, experts_per_slice, x_stride, limit, counts_at, flags_at, meta_at,
    hidden_at, scales_at,
    RANK: tl.constexpr, RANKS: tl.constexpr, RP: tl.constexpr, TP: tl.constexpr, K: tl.constexpr,
    KP: tl.constexpr, H: tl.constexpr, P: tl.constexpr, PP: tl.constexpr, PIECE: tl.constexpr,
    PIECES: tl.constexpr, BLOCK: tl.constexpr, FORMAT: tl.constexpr, PUSH: tl.constexpr,
    WAIT: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Send this rank's tokens, PIECES pieces at a time, and wait for everyone's, BLOCK rows at a time.

    x [T, H]; ids int32 and weights float32 [T, K]; out_ids and out_weights [room * R, K]. TP ranks in a row
    hold the same experts. PUSH, WAIT: halves that may also be launched one after the other.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    epoch = tl.load(epochs_ptr) + 1
    zero = epoch * 0  # places are counted in 64 bits
    half = (epoch & 1) * rows
    r, k, p = tl.arange(0, RP), tl.arange(0, KP), tl.arange(0, PP)
    address_R = tl.load(addresses_ptr + r, mask=r < RANKS, other=0)
    count_at = counts_at + (epoch & 1) * (RANKS * 8)
    if PUSH:
        if program == 0:
            tl.store(epochs_ptr + 1, epoch)
            word_R = tl.zeros([RP], tl.int64) + ((epoch << 24) | tokens)
            tl.atomic_xchg(
                at(address_R, count_at + RANK * 8, tl.int64), word_R, mask=r < RANKS, sem="relaxed",
                scope="sys",
            )  # fmt: skip
        parts: tl.constexpr = (P + PIECES - 1) // PIECES
        for item in range(program, tokens * parts, programs):
            t = zero + item // parts
            first = item % parts * PIECES
            row = t * RANKS + RANK
            id_K = tl.load(ids_ptr + t * K + k, mask=k < K, other=-1)
            slice_K = tl.where(id_K < 0, -1, id_K // experts_per_slice)
            push_token(
                x_ptr + t * x_stride, scale_ptr, addresses_ptr, slice_K, first, row, hidden_at,
                scales_at, RANKS, TP, H, PIECE, PIECES, FORMAT, INTERPRETED,
            )  # fmt: skip
            held_RK = (slice_K[None, :] == (r // TP)[:, None]) & (r < RANKS)[:, None]
            wanted_R = tl.max(held_RK.to(tl.int32), 1)
            if first == 0:
                weight_K = tl.load(weights_ptr + t * K + k, mask=k < K, other=0.0)
                to_RK = address_R[:, None] + meta_at + (half + row) * (8 * K) + (4 * k)[None, :]
                sent_RK = (wanted_R[:, None] > 0) & (k < K)[None, :]
                tl.store(at(to_RK, 0, tl.int32), tl.where(held_RK, id_K[None, :], -1), mask=sent_RK)
                tl.store(
                    at(to_RK, 4 * K, tl.float32), tl.where(held_RK, weight_K[None, :], 0.0), mask=sent_RK
                )
            tl.debug_barrier()
            own_P = (p >= first) & (p < tl.minimum(first + PIECES, P))
            flag_RP = tl.zeros([RP, PP], tl.int64) + ((epoch << 1) | wanted_R)[:, None]
            tl.atomic_xchg(
                at(address_R[:, None], flags_at + ((half + row) * P + p[None, :]) * 8, tl.int64), flag_RP,
                mask=(r < RANKS)[:, None] & own_P[None, :] & ((wanted_R[:, None] > 0) | (p == 0)[None, :]),
                sem="release", scope="sys",
            )  # fmt: skip
    if WAIT:
        here = tl.load(addresses_ptr + RANK)
        if tl.load(failed_ptr) != 0:
            limit = limit * 0
        began = now(INTERPRETED)
        if program == 0:
            polls = 0
            missing = 1
            word_R = tl.zeros([RP], tl.int64)
            while missing > 0:
                word_R = tl.load(at(here, count_at + r * 8, tl.int64), mask=r < RANKS, other=0, volatile=True)
                absent_R = ((word_R >> 24) != epoch) & (r < RANKS)
                missing = anyone(tl.max(absent_R.to(tl.int32), 0), INTERPRETED)
                if (missing > 0) & late(polls, began, limit, INTERPRETED):
                    peer = tl.min(tl.where(absent_R, r, RP), 0)
                    fail(failed_ptr, told_ptr, failure(zero + DISPATCH, peer, epoch))
                    missing = 0
                polls += 1
            excess_R = tl.where(((word_R >> 24) == epoch) & (r < RANKS), word_R & ((1 << 24) - 1), 0)
            most = tl.max(excess_R, 0)
            if most > room:
                peer = tl.min(tl.where(excess_R == most, r, RP), 0)
                fail(failed_ptr, told_ptr, failure(zero + CAPACITY, peer, most))
        for block in range(program, (room * RANKS + BLOCK - 1) // BLOCK, programs):
            row = zero + block * BLOCK + tl.arange(0, BLOCK)
            exists = row < room * RANKS
            source = row % RANKS
            t = row // RANKS
            flag_ptr = at(here, flags_at + (half + row)[:, None] * (P * 8) + (p * 8)[None, :], tl.int64)
            first_ptr = at(here, flags_at + (half + row) * (P * 8), tl.int64)
            piece = exists[:, None] & (p < P)[None, :]
            polls = 0
            missing = 1
            wanted = exists
            while missing > 0:
                word = tl.load(at(here, count_at + source * 8, tl.int64), mask=exists, other=0, volatile=True)
                flag = tl.load(flag_ptr, mask=piece, other=0, volatile=True)
                first_flag = tl.load(first_ptr, mask=exists, other=0, volatile=True)
                counted = (word >> 24) == epoch
                sent = counted & (t < (word & ((1 << 24) - 1)))
                arrived = (first_flag >> 1) == epoch
                wanted = sent & arrived & ((first_flag & 1) == 1)
                lacking = tl.max((piece & ((flag >> 1) != epoch)).to(tl.int32), 1) > 0
                absent = exists & ((counted == 0) | (sent & (arrived == 0)) | (wanted & lacking))
                missing = anyone(tl.max(absent.to(tl.int32), 0), INTERPRETED)
                if (missing > 0) & late(polls, began, limit, INTERPRETED):
                    peer = tl.min(tl.where(absent, source, RP), 0)
                    fail(failed_ptr, told_ptr, failure(zero + DISPATCH, peer, epoch))
                    wanted = wanted & (absent == 0)
                    missing = 0
                polls += 1
            acquire(INTERPRETED)
            meta = meta_at + (half + row)[:, None] * (8 * K) + (4 * k)[None, :]
            read = wanted[:, None] & (k < K)[None, :]
            id_BK = tl.load(at(here, meta, tl.int32), mask=read, other=-1)
            weight_BK = tl.load(at(here, meta + 4 * K, tl.float32), mask=read, other=0.0)
            to = row[:, None] * K + k[None, :]
            tl.store(out_ids_ptr + to, id_BK, mask=exists[:, None] & (k < K)[None, :])
            tl.store(out_weights_ptr + to, weight_BK, mask=exists[:, None] & (k < K)[None, :])


@triton.jit(do_not_specialize=["tokens", "room", "limit"])
def combine_rows(
    y_ptr, received_ptr, ids_ptr, out_ptr, addresses_ptr, epochs_ptr, failed_ptr, told_ptr, tokens, room,
    experts_per_slice, y_stride, limit, returned_at, results_at,
    RANK: tl.constexpr, RANKS: tl.constexpr, RP: tl.constexpr, TP: tl.constexpr, K: tl.constexpr,
    KP: tl.constexpr, H: tl.constexpr, P: tl.constexpr, PP: tl.constexpr, PIECE: tl.constexpr,
    ROWS: tl.constexpr, PIECES: tl.constexpr, SUM_PIECES: tl.constexpr, PUSH: tl.constexpr,
    WAIT: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Send results back, ROWS rows and PIECES pieces at a time, and sum those of this rank's own tokens.

    y [room * R, H]: the experts' output; received int32 [room * R, K]: ids as `dispatch_rows` left them;
    ids [T, K]: of this rank's tokens; out [T, H] in the dtype of the region's results.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    epoch = tl.load(epochs_ptr + 1)
    zero = epoch * 0
    r, k, p = tl.arange(0, RP), tl.arange(0, KP), tl.arange(0, PP)
    kind: tl.constexpr = out_ptr.dtype.element_ty
    size: tl.constexpr = kind.primitive_bitwidth // 8
    if PUSH:
        if program == 0:
            tl.store(epochs_ptr, epoch)
        parts: tl.constexpr = (P + PIECES - 1) // PIECES
        for item in range(program, (room * RANKS + ROWS - 1) // ROWS * parts, programs):
            row = zero + item // parts * ROWS + tl.arange(0, ROWS)
            first = item % parts * PIECES
            exists = row < room * RANKS
            id_BK = tl.load(
                received_ptr + row[:, None] * K + k[None, :],
                mask=exists[:, None] & (k < K)[None, :],
                other=-1,
            )
            wanted = tl.max(id_BK, 1) >= 0
            if tl.max(wanted.to(tl.int32), 0) > 0:
                address = tl.load(addresses_ptr + row % RANKS)
                back = row // RANKS * RANKS + RANK
                c = first * PIECE + tl.arange(0, PIECES * PIECE)
                read = wanted[:, None] & (c < H)[None, :]
                y = tl.load(y_ptr + row[:, None] * y_stride + c[None, :], mask=read, other=0.0)
                to_ptr = at_word(address[:, None], (results_at + back * (H * size))[:, None], kind)
                tl.store(to_ptr + c[None, :], to_float(y.to(tl.float32), kind, INTERPRETED), mask=read)
                tl.debug_barrier()
                own_P = (p >= first) & (p < tl.minimum(first + PIECES, P))
                tl.atomic_xchg(
                    at(address[:, None], returned_at + (back[:, None] * P + p[None, :]) * 8, tl.int64),
                    tl.zeros([ROWS, PP], tl.int64) + epoch, mask=wanted[:, None] & own_P[None, :],
                    sem="release", scope="sys",
                )  # fmt: skip
    if WAIT:
        here = tl.load(addresses_ptr + RANK)
        if tl.load(failed_ptr) != 0:
            limit = limit * 0
        began = now(INTERPRETED)
        sum_parts: tl.constexpr = (P + SUM_PIECES - 1) // SUM_PIECES
        for item in range(program, tokens * sum_parts, programs):
            t = zero + item // sum_parts
            first = item % sum_parts * SUM_PIECES
            id_K = tl.load(ids_ptr + t * K + k, mask=k < K, other=-1)
            slice_K = tl.where(id_K < 0, -1, id_K // experts_per_slice)
            held_RK = (slice_K[None, :] == (r // TP)[:, None]) & (r < RANKS)[:, None]
            own_P = (p >= first) & (p < tl.minimum(first + SUM_PIECES, P))
            due = (tl.max(held_RK.to(tl.int32), 1) > 0)[:, None] & own_P[None, :]
            flag_ptr = at(here, returned_at + ((t * RANKS + r)[:, None] * P + p[None, :]) * 8, tl.int64)
            polls = 0
            missing = 1
            while missing > 0:
                absent = due & (tl.load(flag_ptr, mask=due, other=0, volatile=True) < epoch)
                missing = anyone(tl.max(tl.max(absent.to(tl.int32), 1), 0), INTERPRETED)
                if (missing > 0) & late(polls, began, limit, INTERPRETED):
                    peer = tl.min(tl.where(tl.max(absent.to(tl.int32), 1) > 0, r, RP), 0)
                    fail(failed_ptr, told_ptr, failure(zero + COMBINE, peer, epoch))
                    missing = 0
                polls += 1
            acquire(INTERPRETED)
            c = first * PIECE + tl.arange(0, SUM_PIECES * PIECE)
            acc = tl.zeros([SUM_PIECES * PIECE], tl.float32)
            for rank in tl.static_range(RANKS):
                came = tl.max((slice_K == rank // TP).to(tl.int32), 0) > 0
                from_ptr = at_word(here, results_at + (t * RANKS + rank) * (H * size), kind)
                acc += tl.load(from_ptr + c, mask=(c < H) & came, other=0.0).to(tl.float32)
            tl.store(out_ptr + t * H + c, to_float(acc, kind, INTERPRETED), mask=c < H)


@dataclass(frozen=True, kw_only=True, eq=False)
class Links:
    """What the kernels need to know of a layer's exchanges; each call is one launch.

    addresses int64 [R], failed and told int64 [1]: of the symmetric memory. epochs int64 [2]. starts: where
    the parts of the region begin; rows: its capacity in all.
    """

    rank: int
    addresses: Tensor
    failed: Tensor
    told: Tensor
    epochs: Tensor
    starts: dict[str, int]
    rows: int
    hidden: int
    top_k: int
    experts_per_slice: int
    expert_tp: int
    limit_seconds: float

    def dispatch(
        self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, scale: Tensor | None, out_ids: Tensor,
        out_weights: Tensor, room: int, format: str,
    ) -> None:  # fmt: skip
        """x of the compute dtype, its rows at any 16-byte stride; ids int32, weights float32; out_ids and
        out_weights [room * R, k]. Afterwards `hidden` and `scales` hold the rows whose ids are not -1."""
        T, pieces = len(x_TH), triton.cdiv(self.hidden, PIECE)
        programs = self._programs()
        at_once = _fewest(lambda n: T * triton.cdiv(pieces, n) <= programs, self._sizes())
        rows = room * len(self.addresses)
        block = _fewest(lambda n: triton.cdiv(rows, n) <= programs, (8, 16))
        work = max(T * triton.cdiv(pieces, at_once), triton.cdiv(rows, block), 1)
        starts = self.starts
        dispatch_rows[self._grid(work)](
            x_TH, ids_TK, weights_TK, self.epochs if scale is None else scale, self.addresses,
            self.epochs, self.failed, self.told, out_ids, out_weights, T, room, self.rows,
            self.experts_per_slice, x_TH.stride(0), self._limit(), starts["counts"], starts["flags"],
            starts["meta"], starts["hidden"], starts["scales"], **self._constants(), PIECES=at_once,
            BLOCK=block, FORMAT=format, PUSH=True, WAIT=True, **OPTIONS,
        )  # fmt: skip

    def combine(self, y: Tensor, received_ids: Tensor, ids_TK: Tensor, out_TH: Tensor, room: int) -> None:
        """y [room * R, H]; received_ids as `dispatch` left them; out of the compute dtype, contiguous."""
        T, pieces, rows = len(out_TH), triton.cdiv(self.hidden, PIECE), room * len(self.addresses)
        programs = self._programs()
        at_once = _fewest(lambda n: rows * triton.cdiv(pieces, n) <= programs, self._sizes())
        parts = triton.cdiv(pieces, at_once)
        together = _fewest(lambda n: triton.cdiv(rows, n) * parts <= programs, (1, 4))
        summed = _fewest(lambda n: T * triton.cdiv(pieces, n) <= programs, self._sizes()[:2])
        work = max(triton.cdiv(rows, together) * parts, T * triton.cdiv(pieces, summed), 1)
        combine_rows[self._grid(work)](
            y, received_ids, ids_TK, out_TH, self.addresses, self.epochs, self.failed,
            self.told, T, room, self.experts_per_slice, y.stride(0), self._limit(),
            self.starts["returned"], self.starts["results"], **self._constants(), ROWS=together,
            PIECES=at_once, SUM_PIECES=summed, PUSH=True, WAIT=True, **OPTIONS,
        )  # fmt: skip

    def _constants(self) -> dict[str, int | bool]:
        R, pieces = len(self.addresses), triton.cdiv(self.hidden, PIECE)
        return {
            "RANK": self.rank, "RANKS": R, "RP": triton.next_power_of_2(R), "TP": self.expert_tp,
            "K": self.top_k, "KP": triton.next_power_of_2(self.top_k), "H": self.hidden, "P": pieces,
            "PP": triton.next_power_of_2(pieces), "PIECE": PIECE, "INTERPRETED": INTERPRETED,
        }  # fmt: skip

    def _sizes(self) -> tuple[int, ...]:
        """Pieces of a row that a program may move at once."""
        all_of_it = triton.next_power_of_2(triton.cdiv(self.hidden, PIECE))
        return tuple(sorted({1, max(1, all_of_it // 2), all_of_it}))

    def _limit(self) -> int:
        return POLLS if INTERPRETED else round(1e9 * self.limit_seconds)

    def _programs(self) -> int:
        """As many as run together."""
        if INTERPRETED:
            return 8
        device = self.epochs.device
        return RESIDENT * torch.cuda.get_device_properties(device).multi_processor_count

    def _grid(self, work: int) -> tuple[int]:
        """Interpreted, programs run one after another, so that none may wait for the next."""
        return (1 if INTERPRETED else min(work, self._programs()),)


INTERPRETED = not isinstance(dispatch_rows, triton.JITFunction)
OPTIONS = {} if INTERPRETED else {"num_warps": WARPS, "maxnreg": REGISTERS}


def _fewest(enough: Callable[[int], bool], sizes: tuple[int, ...]) -> int:
    """The first of `sizes` that is `enough`, or else the last: few, since each is compiled for itself."""
    return next((size for size in sizes if enough(size)), sizes[-1])
