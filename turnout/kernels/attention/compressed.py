"""Compressed attention (DeepSeek-V4) of one token per sequence, whose length the device knows (Triton).

Three steps of a layer, each of fixed shapes, so that CUDA graphs may hold them: what is kept of a token goes
into the rings of its request; where the token ends a window, an entry is made of what they hold; and all
heads attend to the last tokens and to entries. A program of the last has some of the heads and a span of
what they see, which join_spans (decode.py) puts together with the sinks.

Legend: N tokens, H query heads, HB of a program, D head size, DP a power of two above it, R its rotated end,
X of what is kept of a token until its entries are made, P pages of a row of the table, Y channels of entries.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from turnout.kernels.attention.decode import join_spans
from turnout.kernels.attention.latent import Tiles, spans
from turnout.kernels.common.dependent import launches_early
from turnout.kernels.common.devices import on_hopper

COPIED = 1024  # channels of a program that stores
MADE_OF = 16  # tokens that an entry is made of, at a time
PLAIN = Tiles(tokens=32, stages=3, shortest=64, narrow=True, parts=4)
# Of compressed_specialised.py; see `can_specialise`.
SPECIALISED = Tiles(64, 64, 12, 2, 1, shortest=128, narrow=True, parts=4, specialised=True)
MANY = 4  # rows that decode; see `tiles_for`


def tiles_for(rows: int, *, decoding: bool) -> Tiles:
    """Where both are possible. Four rows that decode took SPECIALISED 0.91 to 0.97 of PLAIN's time, 8 rows
    0.8, 128 rows and prompts 0.2; two rows 0.97 to 1.04 and one 1.01 to 1.04
    (benchmarks/results/compressed-layers-nvidia-h200-2026-11-27.json)."""
    return PLAIN if decoding and rows < MANY else SPECIALISED


def can_specialise(q_NHD: Tensor) -> bool:
    """Whether there are tiles `specialised` for these queries: of DeepSeek-V4's sizes, on Hopper."""
    fits = q_NHD.shape[2] == 512 and q_NHD.dtype == torch.bfloat16
    return fits and on_hopper(q_NHD)


@triton.jit
def keep_tokens(
    kv_ptr, raw_ptr, ends_ptr, states_ptr, recent_ptr, open_ptr, raw_stride, D, X, RECENT, OPEN,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """recent [slots, RECENT, D] and open [slots, OPEN, X] at the places of tokens ends - 1 become kv [N, D]
    and raw [N, X]; where OPEN is 0, only the first."""
    n = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    place = tl.maximum(tl.load(ends_ptr + n) - 1, 0)
    slot = tl.load(states_ptr + n).to(tl.int64)
    kv = tl.load(kv_ptr + n * D + c, mask=c < D, other=0.0)
    tl.store(recent_ptr + (slot * RECENT + place % RECENT) * D + c, kv, mask=c < D)
    if OPEN > 0:
        raw = tl.load(raw_ptr + n * raw_stride + c, mask=c < X, other=0.0)
        tl.store(open_ptr + (slot * OPEN + place % OPEN) * X + c, raw, mask=c < X)


@triton.jit(do_not_specialize=["P"])
def keep_tokens_entry(
    open_ptr, ends_ptr, states_ptr, table_ptr, bias_ptr, weight_ptr, cos_ptr, sin_ptr, cache_ptr,
    P, OPEN, X, Y, AT, TO, D, R, eps,
    SERIES: tl.constexpr, RATE: tl.constexpr, PAGE: tl.constexpr, DP: tl.constexpr, TOKENS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Where token ends - 1 ends a window of RATE: its entry, at cache[slot, TO:], of open [slots, OPEN, X],
    whose content and then gates [SERIES D] begin at AT. table [N, P]: pages of PAGE entries. bias [RATE,
    SERIES D]; weight [D] of the norm; cos, sin [N, R] of halves, of the position where the window begins."""
    n = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, DP)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    end = tl.load(ends_ptr + n).to(tl.int32)
    if (end > 0) & (end % RATE == 0):
        slot = tl.load(states_ptr + n).to(tl.int64)
        best = tl.full([DP], float("-inf"), tl.float32)
        total = tl.zeros([DP], tl.float32)
        made = tl.zeros([DP], tl.float32)
        own = end - RATE
        for at in range(0, SERIES * RATE, TOKENS):  # unrolled, windows of 128 take seconds to compile
            i = at + tl.arange(0, TOKENS)
            t = end - SERIES * RATE + i
            held = ((i < SERIES * RATE) & (t >= 0))[:, None] & (d < D)[None, :]
            column = tl.where(t >= own, SERIES - 1, 0)[:, None] * D + d[None, :]
            row = open_ptr + (slot * OPEN + tl.maximum(t, 0) % OPEN)[:, None] * X + AT
            content = tl.load(row + column, mask=held, other=0.0).to(tl.float32)
            gate = tl.load(row + SERIES * D + column, mask=held, other=0.0).to(tl.float32)
            in_window = (tl.maximum(t, 0) % RATE)[:, None] * (SERIES * D)
            gate += tl.load(bias_ptr + in_window + column, mask=held, other=0.0).to(tl.float32)
            gate = tl.where(held, gate, float("-inf"))
            higher = tl.maximum(best, tl.max(gate, 0))
            least = tl.where(higher > float("-inf"), higher, 0.0)
            shrink = tl.exp(best - least)
            p = tl.exp(gate - least[None, :])
            made = made * shrink + tl.sum(p * content, 0)
            total = total * shrink + tl.sum(p, 0)
            best = higher
        made = made / tl.where(total > 0, total, 1.0)
        made = made.to(cache_ptr.dtype.element_ty).to(tl.float32)
        weight = tl.load(weight_ptr + d, mask=d < D, other=0.0).to(tl.float32)
        made = made * tl.rsqrt(tl.sum(made * made, 0) / D + eps) * weight
        first, second = tl.split(tl.reshape(made, [DP // 2, 2]))
        pair = tl.arange(0, DP // 2) - (D - R) // 2
        turned = (pair >= 0) & (pair < R // 2)
        cos = tl.load(cos_ptr + n * R + pair, mask=turned, other=1.0).to(tl.float32)
        sin = tl.load(sin_ptr + n * R + R // 2 + pair, mask=turned, other=0.0).to(tl.float32)
        out = tl.reshape(tl.join(first * cos - second * sin, second * cos + first * sin), [DP])
        w = end // RATE - 1
        entry = tl.load(table_ptr + n * P + w // PAGE).to(tl.int64) * PAGE + w % PAGE
        tl.store(cache_ptr + entry * Y + TO + d, out.to(cache_ptr.dtype.element_ty), mask=d < D)


@triton.jit
def _attend_tile(q, keys, known, scale, best, total, acc):
    """Online softmax over one more tile of keys [TOKENS, DP], which are values too."""
    scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
    scores = tl.where(known[None, :], scores, float("-inf"))
    higher = tl.maximum(best, tl.max(scores, 1))
    least = tl.where(higher > float("-inf"), higher, 0.0)
    shrink = tl.exp2(best - least)
    p = tl.exp2(scores - least[:, None])
    acc = acc * shrink[:, None] + tl.dot(p.to(keys.dtype), keys, input_precision="ieee")
    return higher, total * shrink + tl.sum(p, 1), acc


@triton.jit(do_not_specialize=["SPLITS", "FIRST"])
def attend_compressed_span(
    q_ptr, recent_ptr, ends_ptr, states_ptr, cache_ptr, table_ptr, counts_ptr, partial_ptr, lse_ptr,
    scale, table_stride, H, SPLITS, Y, SEEN, D, FIRST,
    RING: tl.constexpr, RECENT: tl.constexpr, HB: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr,
    TOKENS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """partial [N, H, SPLITS, D] and lse float32 [N, H, SPLITS] (base 2) of one span and HB heads.

    q [N, H, D]; recent [slots, RECENT, D], of which the last SEEN tokens are seen, up to ends - 1, or,
    without RING, [tokens, D] from position FIRST on; cache [entries, Y], whose first D are key and value;
    table, rows `table_stride` apart, of pages of PAGE entries, of which counts [N] are seen. `scale` includes
    log2(e). An end of 0 makes a row padding, whose lse are -inf.
    """
    n = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * HB + tl.arange(0, HB)
    split = tl.program_id(2)
    d = tl.arange(0, DP)
    rows = n * H + h
    held = (h[:, None] < H) & (d[None, :] < D)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    q = tl.load(q_ptr + rows[:, None] * D + d[None, :], mask=held, other=0.0)
    end = tl.load(ends_ptr + n).to(tl.int32)
    count = tl.load(counts_ptr + n).to(tl.int32)
    ring = recent_ptr
    if RING:
        ring += tl.load(states_ptr + n).to(tl.int64) * RECENT * D
    WIDTH: tl.constexpr = (RECENT + TOKENS - 1) // TOKENS * TOKENS
    span = tl.cdiv(tl.cdiv(WIDTH + count, SPLITS), TOKENS) * TOKENS
    start = split * span
    stop = tl.minimum(start + span, WIDTH + count)
    best = tl.full([HB], float("-inf"), tl.float32)
    total = tl.zeros([HB], tl.float32)
    acc = tl.zeros([HB, DP], tl.float32)
    for at in range(start, tl.minimum(stop, WIDTH), TOKENS):
        i = at + tl.arange(0, TOKENS)
        if RING:
            age = (end - 1 - i + 2 * RECENT) % RECENT
            known = (i < RECENT) & (age < SEEN) & (age < end)
        else:
            known = (i < SEEN) & (end - SEEN + i >= 0)
            i += end - SEEN - FIRST
        read = known[:, None] & (d < D)[None, :]
        keys = tl.load(ring + i[:, None] * D + d[None, :], mask=read, other=0.0)
        best, total, acc = _attend_tile(q, keys, known, scale, best, total, acc)
    for at in range(tl.maximum(start, WIDTH), stop, TOKENS):
        place = at - WIDTH + tl.arange(0, TOKENS)
        known = place < count
        page = tl.load(table_ptr + n * table_stride + place // PAGE, mask=known, other=0)
        entry = page.to(tl.int64) * PAGE + place % PAGE
        read = known[:, None] & (d < D)[None, :]
        keys = tl.load(cache_ptr + entry[:, None] * Y + d[None, :], mask=read, other=0.0)
        best, total, acc = _attend_tile(q, keys, known, scale, best, total, acc)
    lse = tl.where(total > 0, best + tl.log2(total), float("-inf"))
    mean = acc / tl.where(total > 0, total, 1.0)[:, None]
    to = rows * SPLITS + split
    tl.store(lse_ptr + to, lse, mask=h < H)
    tl.store(partial_ptr + to[:, None] * D + d[None, :], mean.to(partial_ptr.dtype.element_ty), mask=held)


def keep(
    kv_ND: Tensor,
    raw_NX: Tensor | None,
    ends_N: Tensor,
    states_N: Tensor,
    recent_SPD: Tensor,
    open_SPX: Tensor,
) -> None:
    """Store token ends - 1 of each row in rings [slots, places, channels] of its slot, by position.

    ends, states: int64. raw: rows anyhow; None where open has no places. An end of 0 stores at place 0.
    """
    N, D = kv_ND.shape
    X = 0 if raw_NX is None else raw_NX.shape[1]
    early, raw = launches_early(kv_ND.device), kv_ND if raw_NX is None else raw_NX
    if N:
        keep_tokens[(N, triton.cdiv(max(D, X), COPIED))](
            kv_ND.contiguous(), raw, ends_N, states_N, recent_SPD, open_SPX, raw.stride(0), D, X,
            recent_SPD.shape[1], open_SPX.shape[1], COPIED, early, num_warps=4, launch_pdl=early,
        )  # fmt: skip


def make_entries(
    open_SPX: Tensor,
    ends_N: Tensor,
    states_N: Tensor,
    table_NP: Tensor,
    cache_EY: Tensor,
    bias_RX: Tensor,
    weight_D: Tensor,
    cos_NR: Tensor,
    sin_NR: Tensor,
    *,
    series: int,
    page: int,
    at: int,
    to: int,
    eps: float,
) -> None:
    """The entry of each row whose token ends a window, of the tokens in open, as `Compressor` makes it.

    All contiguous; bias [rate, series D]; ends, states, table int64: pages of `page` entries each. at: where
    this kind's channels of a token begin; to: its channels of an entry. D and R are even.
    """
    N, D, rate = len(ends_N), len(weight_D), len(bias_RX)
    early = launches_early(ends_N.device)
    if N:
        keep_tokens_entry[(N,)](
            open_SPX, ends_N, states_N, table_NP, bias_RX, weight_D, cos_NR, sin_NR, cache_EY,
            table_NP.shape[1], *open_SPX.shape[1:], cache_EY.shape[1], at, to, D, cos_NR.shape[1], eps,
            series, rate, page, triton.next_power_of_2(D), min(MADE_OF, series * rate), early,
            num_warps=4, launch_pdl=early,
        )  # fmt: skip


def attend(
    q_NHD: Tensor,
    recent: Tensor,
    ends_N: Tensor,
    states_N: Tensor | None,
    cache_EY: Tensor,
    table_NP: Tensor,
    counts_N: Tensor,
    sinks_H: Tensor,
    *,
    seen: int,
    page: int,
    longest: int,
    scale: float,
    processors: int,
    first: int = 0,
    tiles: Tiles | None = None,
) -> Tensor:
    """[N, H, D] in q's dtype, over the last `seen` tokens and counts [N] entries.

    recent: rings [slots, places, D] and states, the slots of rows; or, without states, [tokens, D] from
    position `first` on. Contiguous, but for rows of the table, int32 or int64: pages of `page` entries.
    longest: the most entries that a row may see. sinks: float32 [H]. An end of 0 makes a row padding, which
    gives 0 and whose count must be 0. tiles: None: those of `tiles_for`.
    """
    N, H, D = q_NHD.shape
    tiles = tiles or tiles_for(N, decoding=states_N is not None)
    out_NHD, DP = torch.empty_like(q_NHD), max(16, triton.next_power_of_2(D))
    early = launches_early(q_NHD.device)
    if not N:
        return out_NHD
    places = seen if states_N is None else recent.shape[1]
    if tiles.specialised and not can_specialise(q_NHD):
        tiles = PLAIN
    # Prompts have rows for all processors, or are short.
    one = tiles.specialised and states_N is None
    splits = 1 if one else spans(N, H, places + longest, processors, tiles)
    kept_as = q_NHD.dtype if tiles.narrow else torch.float32
    whole = tiles.specialised and splits == 1  # nothing is left to join
    partial = out_NHD if whole else torch.empty(N, H, splits, D, dtype=kept_as, device=q_NHD.device)
    lse = torch.empty(N, H, splits, dtype=torch.float32, device=q_NHD.device)
    table_stride = table_NP.stride(0) if N > 1 else 0  # of one row it would be any number to compile for
    if tiles.specialised:
        from turnout.kernels.attention import compressed_specialised

        compressed_specialised.attend_spans(
            q_NHD, recent, ends_N, states_N, cache_EY, table_NP, counts_N, sinks_H, partial, lse,
            scale=scale * math.log2(math.e), table_stride=table_stride, seen=seen, first=first, page=page,
        )  # fmt: skip
        if not whole:
            _join(partial, lse, sinks_H, out_NHD, tiles, early)
        return out_NHD
    attend_compressed_span[(N, -(-H // tiles.heads), splits)](
        q_NHD, recent, ends_N, ends_N if states_N is None else states_N, cache_EY, table_NP, counts_N,
        partial, lse, scale * math.log2(math.e), table_stride, H, splits, cache_EY.shape[1], seen, D,
        first, states_N is not None, places, tiles.heads, DP, page, tiles.tokens, early,
        num_warps=tiles.warps, num_stages=tiles.stages, launch_pdl=early,
    )  # fmt: skip
    _join(partial, lse, sinks_H, out_NHD, tiles, early)
    return out_NHD


def _join(partial: Tensor, lse: Tensor, sinks_H: Tensor, out_NHD: Tensor, tiles: Tiles, early: bool) -> None:
    N, H, D = out_NHD.shape
    join_spans[(N * H, tiles.parts)](
        partial, lse, sinks_H, lse, out_NHD, H, D, max(16, triton.next_power_of_2(D)) // tiles.parts,
        lse.shape[2], True, 0, 0, early, num_warps=max(1, 8 // tiles.parts), launch_pdl=early,
    )  # fmt: skip
