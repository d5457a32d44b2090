"""The spans of latent.py and what joins them in one launch, for few requests (Triton).

One request of 4,096 tokens takes a program 64 tokens at a time, so that 64 heads of 128 and 64 spans are 128
programs of one tile: every multiprocessor has one. What two launches would wait for in turn, the end of the
first, the beginning of the second and its reads, becomes a counter in the L2 cache. Spans of a block of heads
count themselves as they end. Either each of them waits for the others and joins its share of the results
(`each`), or the last to arrive joins all of them.

Programs that wait must all be on the GPU at once, so `each` needs no more programs than there are
multiprocessors. The counter is 0 again before the launch ends: a captured graph can be replayed. Tiles of a
context are dealt out in turn, so that a program looks its first pages up before it knows the length of the
context.

Legend: as latent.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

BLOCKS = 1024  # of heads, of all requests of a launch; each has two counters
STREAMS = 80  # torch has 32 of each of two priorities, and the default one

_counters: dict[torch.device, Tensor] = {}
_places: dict[torch.device, dict[int, int]] = {}


@triton.jit
def join_share(
    out_ptr, partial_ptr, lse_ptr, row, part, heads, end, SPLITS: tl.constexpr, HB: tl.constexpr,
    LC: tl.constexpr, CP: tl.constexpr, TOKENS: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    """Share `part` of SHARES of the results of HB heads, of which there are `heads`; the first has index
    `row` among those of all requests. A share is whole heads or some columns of one."""
    SIZE: tl.constexpr = HB * CP // SHARES
    WIDTH: tl.constexpr = SIZE if SIZE < CP else CP
    HEADS: tl.constexpr = SIZE // WIDTH
    ACROSS: tl.constexpr = CP // WIDTH
    n = tl.arange(0, SPLITS)
    d = part % ACROSS * WIDTH + tl.arange(0, WIDTH)
    seen = n * TOKENS < end
    for i in tl.static_range(HEADS):
        head = part // ACROSS * HEADS + i
        at = (row + head) * SPLITS + n
        known = seen & (head < heads)
        lse = tl.load(lse_ptr + at, mask=known, other=float("-inf"), cache_modifier=".cg")
        held = known[:, None] & (d < LC)[None, :]
        spans = tl.load(
            partial_ptr + at[:, None] * LC + d[None, :], mask=held, other=0.0, cache_modifier=".cg"
        )
        best = tl.max(lse, 0)
        weight = tl.exp2(lse - tl.where(best > float("-inf"), best, 0.0))
        total = tl.sum(weight, 0)
        out = tl.sum(spans.to(tl.float32) * weight[:, None], 0) / tl.where(total > 0, total, 1.0)
        to = out_ptr + (row + head) * LC + d
        tl.store(to, out.to(out_ptr.dtype.element_ty), mask=(d < LC) & (head < heads))


@triton.jit
def count_and_join(
    counter, out_ptr, partial_ptr, lse_ptr, row, split, heads, end, SPLITS: tl.constexpr, HB: tl.constexpr,
    LC: tl.constexpr, CP: tl.constexpr, TOKENS: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """Count this program, whose results are stored, and join its share when all are there, or all if it is
    the last. row, heads: as of `join_share`. Both counters are 0 when the last program ends."""
    if EACH:
        tl.atomic_add(counter, 1, sem="release", scope="gpu")
        while tl.atomic_add(counter, 0, sem="acquire", scope="gpu") < SPLITS:
            pass
        join_share(
            out_ptr, partial_ptr, lse_ptr, row, split, heads, end, SPLITS, HB, LC, CP, TOKENS, SPLITS
        )  # fmt: skip
        if tl.atomic_add(counter + 1, 1, sem="acq_rel", scope="gpu") == SPLITS - 1:
            tl.store(counter, 0)  # all have seen that all have arrived
            tl.store(counter + 1, 0)
    else:
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == SPLITS - 1:
            for head in range(0, tl.minimum(heads, HB)):
                join_share(
                    out_ptr, partial_ptr, lse_ptr, row, head, heads, end, SPLITS, HB, LC, CP, TOKENS, HB
                )  # fmt: skip
            tl.store(counter, 0)


@triton.jit(do_not_specialize=["P"])
def attend_latent_joined(
    q_ptr, cache_ptr, table_ptr, ends_ptr, out_ptr, partial_ptr, lse_ptr, counter_ptr, scale, P, H,
    SPLITS: tl.constexpr, HB: tl.constexpr, LC: tl.constexpr, DR: tl.constexpr, CP: tl.constexpr,
    RP: tl.constexpr, PAGE: tl.constexpr, TOKENS: tl.constexpr, EACH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [B, H, LC] of contexts cut into SPLITS spans; partial [B, H, N, LC] and lse float32 [B, H, N] are
    between. counter: int32, two of each block of HB heads, which are 0 before and after.

    Others as `attend_latent_span`. The grid is B, blocks of heads, spans.
    """
    b = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    split = tl.program_id(2)
    h = block * HB + tl.arange(0, HB)
    c = tl.arange(0, CP)
    r = tl.arange(0, RP)
    rows = b * H + h
    held = (h[:, None] < H) & (c[None, :] < LC)
    place = split * TOKENS + tl.arange(0, TOKENS)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    page = tl.load(table_ptr + b * P + place // PAGE, mask=place // PAGE < P, other=0)
    end = tl.load(ends_ptr + b).to(tl.int32)
    at_q = q_ptr + rows[:, None] * (LC + DR)
    q = tl.load(at_q + c[None, :], mask=held, other=0.0)
    q_rope = tl.load(at_q + LC + r[None, :], mask=(h[:, None] < H) & (r[None, :] < DR), other=0.0)
    best = tl.full([HB], float("-inf"), tl.float32)
    total = tl.zeros([HB], tl.float32)
    acc = tl.zeros([HB, CP], tl.float32)
    for at in range(split * TOKENS, end, SPLITS * TOKENS):
        place = at + tl.arange(0, TOKENS)
        known = place < end
        slot = page.to(tl.int64) * PAGE + place % PAGE
        later = place + SPLITS * TOKENS
        page = tl.load(table_ptr + b * P + later // PAGE, mask=later < end, other=0)
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
    if split * TOKENS < end:
        to = rows * SPLITS + split
        tl.store(lse_ptr + to, best + tl.log2(total), mask=h < H)
        mean = acc / total[:, None]
        at_partial = partial_ptr + to[:, None] * LC + c[None, :]
        tl.store(at_partial, mean.to(partial_ptr.dtype.element_ty), mask=held)
    tl.debug_barrier()  # one thread counts for all, whose results are stored by then
    count_and_join(
        counter_ptr + (b * tl.num_programs(1) + block) * 2, out_ptr, partial_ptr, lse_ptr, b * H + block * HB,
        split, H - block * HB, end, SPLITS, HB, LC, CP, TOKENS, EACH,
    )  # fmt: skip


def counters(device: torch.device) -> Tensor | None:
    """int32 [2 BLOCKS] for the stream that launches now: two streams may have a launch each at a time.

    None where there are none: more than STREAMS streams, or a graph is captured before any launch, and what
    is allocated then belongs to the graph.
    """
    stream = 0
    if device.type == "cuda":
        stream = torch.cuda.current_stream(device).cuda_stream
        if device not in _counters and torch.cuda.is_current_stream_capturing():
            return None
    if device not in _counters:
        _counters[device] = torch.zeros(STREAMS, 2 * BLOCKS, dtype=torch.int32, device=device)
    places = _places.setdefault(device, {})
    place = places.setdefault(stream, len(places))
    return _counters[device][place] if place < STREAMS else None


def attend_spans(
    q: Tensor, cache: Tensor, table: Tensor, ends: Tensor, out: Tensor, partial: Tensor, lse: Tensor,
    counter: Tensor, scale: float, page_size: int, *, heads: int, tokens: int, warps: int, stages: int,
    each: bool, resident: bool, early: bool,
) -> None:  # fmt: skip
    """Launch `attend_latent_joined`, which says what the tensors are. each: see above. resident: as a
    cooperative launch, which begins once there is room for all programs. early: before its predecessor has
    ended (programmatic dependent launch)."""
    B, H, C = q.shape
    splits, latent_dim = lse.shape[-1], partial.shape[-1]
    powers = [max(16, triton.next_power_of_2(size)) for size in (latent_dim, C - latent_dim)]
    attend_latent_joined[(B, -(-H // heads), splits)](
        q, cache, table, ends, out, partial, lse, counter, scale, table.shape[1], H, splits,
        heads, latent_dim, C - latent_dim, *powers, page_size, tokens, each, early,
        num_warps=warps, num_stages=stages, launch_pdl=early, launch_cooperative_grid=resident,
    )  # fmt: skip
