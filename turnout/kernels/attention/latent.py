"""Absorbed latent attention (MLA) of one query token per sequence over its paged context (Triton).

As decode.py, whose second kernel joins the spans of a context, but a token of the context is one vector [LC |
DR] for all heads: all of it is a key, and its first LC columns are the value. A program has some of the
heads; they read a tile of the context once, for both products.

Legend: B sequences, H query heads, HB of a program, LC/DR sizes of the latent vector and of the rotated part
of a key, C = LC + DR, CP/RP powers of two of LC and DR, S slots of the cache, P pages of a row of the table,
N splits.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from turnout.kernels.attention.decode import ROWS, join_spans
from turnout.kernels.common.dependent import launches_early
from turnout.kernels.common.devices import on_hopper

MOST_SPANS = 64


class Tiles(NamedTuple):
    """How the work is cut up.

    heads: of a program, a power of two of at least 16, which tensor cores take at a time; at least 64 for
    those of Hopper. tokens: of a context at a time. stages: of loading them. programs: of a multiprocessor,
    for which contexts are cut. shortest: tokens of a span, of the longest context. ahead: as the kernel's.
    narrow: spans leave results in q's dtype, half of float32's bytes. parts: programs that join the spans of
    a head, with `joining` warps in all. specialised: by the kernel of latent_specialised.py, which has 64
    heads and tokens and 12 warps; see `can_specialise`.
    """

    heads: int = 16
    tokens: int = 64
    warps: int = 4
    stages: int = 2
    programs: int = 2
    shortest: int = 128
    ahead: bool = False
    narrow: bool = False
    parts: int = 1
    joining: int = 8
    specialised: bool = False


SPECIALISED = Tiles(64, 64, 12, 2, 1, shortest=128, ahead=True, narrow=True, joining=2, specialised=True)
_FEW_HEADS = Tiles(16, 32, 4, 3, 2, shortest=64, ahead=True, narrow=True, parts=4)

# Least heads, most rows of a step, and the tiles of these: the first that holds. Lines of it are what
# tools/latent_attention.py prints.
CHOICES: tuple[tuple[int, int, Tiles], ...] = (
    (64, 4, SPECIALISED._replace(parts=8, joining=8)),
    (16, 4, _FEW_HEADS._replace(tokens=64, warps=8)),
    (16, 1 << 30, SPECIALISED),
)


def tiles_for(rows: int, num_heads: int) -> Tiles:
    return next((tiles for least, most, tiles in CHOICES if num_heads >= least and rows <= most), Tiles())


def can_specialise(q_BHC: Tensor, latent_dim: int) -> bool:
    """Whether there are tiles `specialised` for these queries: of DeepSeek's sizes, on Hopper."""
    sizes = (latent_dim, q_BHC.shape[2]) == (512, 576) and q_BHC.dtype == torch.bfloat16
    return sizes and on_hopper(q_BHC)


@triton.jit(do_not_specialize=["P", "SPLITS"])
def attend_latent_span(
    q_ptr, cache_ptr, table_ptr, ends_ptr, partial_ptr, lse_ptr,
    scale, P, H, SPLITS,
    HB: tl.constexpr, LC: tl.constexpr, DR: tl.constexpr, CP: tl.constexpr, RP: tl.constexpr,
    PAGE: tl.constexpr, TOKENS: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """partial [B, H, N, LC] and lse float32 [B, H, N] (base 2) of one span and HB heads.

    q [B, H, C]; cache [S, C]; table [B, P] pages; ends [B] context lengths, 0 for rows that are padding.
    `scale` includes log2(e). An empty span has lse -inf. AHEAD: pages are looked up a tile before they are
    read, so that reading waits for one access to memory, not for two in turn.
    """
    b = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * HB + tl.arange(0, HB)
    split = tl.program_id(2)
    c = tl.arange(0, CP)
    r = tl.arange(0, RP)
    rows = b * H + h
    held = (h[:, None] < H) & (c[None, :] < LC)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    at_q = q_ptr + rows[:, None] * (LC + DR)
    q = tl.load(at_q + c[None, :], mask=held, other=0.0)
    q_rope = tl.load(at_q + LC + r[None, :], mask=(h[:, None] < H) & (r[None, :] < DR), other=0.0)
    end = tl.load(ends_ptr + b)
    span = tl.cdiv(tl.cdiv(end, SPLITS), TOKENS) * TOKENS
    start = split * span
    stop = tl.minimum(start + span, end)
    best = tl.full([HB], float("-inf"), tl.float32)
    total = tl.zeros([HB], tl.float32)
    acc = tl.zeros([HB, CP], tl.float32)
    place = start + tl.arange(0, TOKENS)
    page = tl.load(table_ptr + b * P + place // PAGE, mask=place < stop, other=0) if AHEAD else place
    for at in range(start, stop, TOKENS):
        place = at + tl.arange(0, TOKENS)
        known = place < stop
        if AHEAD:
            slot = page.to(tl.int64) * PAGE + place % PAGE
            later = place + TOKENS
            page = tl.load(table_ptr + b * P + later // PAGE, mask=later < stop, other=0)
        else:
            page_here = tl.load(table_ptr + b * P + place // PAGE, mask=known, other=0)
            slot = page_here.to(tl.int64) * PAGE + place % PAGE
        base = cache_ptr + slot[:, None] * (LC + DR)
        kept = tl.load(base + c[None, :], mask=known[:, None] & (c[None, :] < LC), other=0.0)
        rope = tl.load(base + LC + r[None, :], mask=known[:, None] & (r[None, :] < DR), other=0.0)
        scores = tl.dot(q, tl.trans(kept), input_precision="ieee")
        scores = tl.dot(q_rope, tl.trans(rope), scores, input_precision="ieee") * scale
        scores = tl.where(known[None, :], scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        shrink = tl.exp2(best - higher)
        p = tl.exp2(scores - higher[:, None])
        acc = acc * shrink[:, None] + tl.dot(p.to(kept.dtype), kept, input_precision="ieee")
        total = total * shrink + tl.sum(p, 1)
        best = higher
    lse = tl.where(total > 0, best + tl.log2(total), float("-inf"))
    mean = acc / tl.where(total > 0, total, 1.0)[:, None]
    to = rows * SPLITS + split
    tl.store(lse_ptr + to, lse, mask=h < H)
    tl.store(partial_ptr + to[:, None] * LC + c[None, :], mean.to(partial_ptr.dtype.element_ty), mask=held)


def spans(batch: int, num_heads: int, max_context: int, processors: int, tiles: Tiles | None = None) -> int:
    """How many spans to cut contexts into: a power of two that gives every processor the programs that
    `tiles` wants, where contexts can be that long."""
    tiles = tiles or tiles_for(batch, num_heads)
    wanted = max(1, tiles.programs * processors // (batch * -(-num_heads // tiles.heads)))
    return 1 << (min(wanted, max(1, max_context // tiles.shortest), MOST_SPANS).bit_length() - 1)


def attend(
    q_BHC: Tensor,
    cache_SC: Tensor,
    table_BP: Tensor,
    ends_B: Tensor,
    *,
    latent_dim: int,
    page_size: int,
    splits: int,
    scale: float,
    tiles: Tiles | None = None,
) -> Tensor:
    """[B, H, LC] in q's dtype: mixtures of the first ends[b] latent vectors in the pages of each row.

    All contiguous. table int32 or int64 [B, P]; ends int32 or int64 [B], 0 for a row that is padding: it
    gives 0. splits: a power of two. tiles: None: what CHOICES says.
    """
    B, H, _ = q_BHC.shape
    out_BHL = torch.empty(B, H, latent_dim, dtype=q_BHC.dtype, device=q_BHC.device)
    early = launches_early(q_BHC.device)
    tiles = tiles or tiles_for(B, H)
    if tiles.specialised and not can_specialise(q_BHC, latent_dim):
        tiles = Tiles()
    whole = splits == 1 and (tiles.narrow or q_BHC.dtype == torch.float32)  # nothing is left to join
    parts = (x.split(ROWS) for x in (q_BHC, table_BP, ends_B, out_BHL))
    for q, table, ends, out in zip(*parts, strict=True) if B else ():
        kept_as = q.dtype if tiles.narrow else torch.float32
        partial = out if whole else out.new_empty(len(q), H, splits, latent_dim, dtype=kept_as)
        lse = out.new_empty(len(q), H, splits, dtype=torch.float32)
        _attend_spans(q, cache_SC, table, ends, partial, lse, scale * math.log2(math.e), page_size, tiles)
        if whole:
            continue
        width = triton.next_power_of_2(latent_dim) // tiles.parts
        join_spans[(len(q) * H, tiles.parts)](
            partial, lse, lse, lse, out, H, latent_dim, width, splits, False, 0, 0, early,
            num_warps=max(1, tiles.joining // tiles.parts), launch_pdl=early,
        )  # fmt: skip
    return out_BHL


def _attend_spans(
    q: Tensor, cache: Tensor, table: Tensor, ends: Tensor, partial: Tensor, lse: Tensor, scale: float,
    page_size: int, tiles: Tiles,
) -> None:  # fmt: skip
    """Launch the kernel of `tiles`; partial [B, H, N, LC] or, of one span, [B, H, LC]."""
    B, H, C = q.shape
    splits, latent_dim = lse.shape[-1], partial.shape[-1]
    if tiles.specialised:
        from turnout.kernels.attention import latent_specialised

        latent_specialised.attend_spans(q, cache, table, ends, partial, lse, scale, page_size)
        return
    early = launches_early(q.device)
    powers = [max(16, triton.next_power_of_2(size)) for size in (latent_dim, C - latent_dim)]
    attend_latent_span[(B, -(-H // tiles.heads), splits)](
        q, cache, table, ends, partial, lse, scale, table.shape[1], H, splits,
        tiles.heads, latent_dim, C - latent_dim, *powers, page_size, tiles.tokens, tiles.ahead, early,
        num_warps=tiles.warps, num_stages=tiles.stages, launch_pdl=early,
    )  # fmt: skip
