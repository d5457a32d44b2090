"""Run by test_paged_attention.py with TRITON_INTERPRET=1: attention and products by rows; prints JSON.

In float32: the interpreter's products of bfloat16 are wrong.
"""

from __future__ import annotations

import json

import torch
import torch.nn.functional as F

from tests.kernels import interpreter
from turnout.attention.capability import Chosen
from turnout.attention.interface import ProjectedHeads
from turnout.attention.kinds import AttentionSpec, CacheGroup
from turnout.attention.paged import paged_attention
from turnout.kernels.attention import decode_heads, prefill
from turnout.kernels.attention.decode import BLOCK, WIDE, Cut, attend
from turnout.kernels.attention.decode_heads import Programs
from turnout.kernels.common.row_gemm import linear
from turnout.kernels.common.rows import rotate
from turnout.kernels.common.split_gemm import multiply_part

results = {}
interpreter.prepare()


def shares(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """The softmax of scores [Hq, ..., L] and, of each head, a sink [Hq] that gets a share of it."""
    if sinks is None:
        return scores.softmax(-1)
    column = sinks.view(-1, *[1] * (scores.dim() - 1)).expand(*scores.shape[:-1], 1)
    return torch.cat((scores, column), dim=-1).softmax(-1)[..., :-1]


def error(
    ends: list[int], *, heads=(4, 2), size=16, page=16, splits=1, block=BLOCK, window=0, sinks=False
) -> float:
    """The largest difference from a softmax written out; every slot that no row sees is NaN."""
    draw, scale = torch.Generator().manual_seed(len(ends)), 0.3
    (Hq, Hkv), P = heads, 1 + -(-max(ends) // page)
    B = len(ends)
    pages = torch.randperm(B * P, generator=draw).view(B, P)
    cache = torch.randn(Hkv, B * P * page, 2, size, generator=draw)
    q = torch.randn(B, Hq, size, generator=draw)
    logits = torch.randn(Hq, generator=draw) if sinks else None
    wanted = torch.zeros(B, Hq, size)
    used = torch.zeros(B * P * page, dtype=torch.bool)
    for b, end in enumerate(ends):
        slots = (pages[b, :, None] * page + torch.arange(page)).flatten()[max(0, end - (window or end)) : end]
        used[slots] = True
        k, v = (x.float().repeat_interleave(Hq // Hkv, 0) for x in cache[:, slots].unbind(2))
        scores = torch.einsum("hd,hld->hl", q[b].float(), k) * scale
        wanted[b] = torch.einsum("hl,hld->hd", shares(scores, logits), v) if end else 0
    cache[:, ~used] = torch.nan
    rest = {"page_size": page, "scale": scale, "window": window, "sinks_H": logits}
    found = attend(q, cache, pages, torch.tensor(ends), cut=Cut(splits, block), **rest)
    return float((found.float() - wanted).abs().max())


def prompts(
    spans: list[tuple[int, int]], *, heads=(4, 2), size=16, page=16, window=0, sinks=False, scale=0.3
) -> float:
    """As `error`, of chunks [start, end) of as many sequences, each of whose tokens sees what precedes it."""
    draw = torch.Generator().manual_seed(len(spans))
    (Hq, Hkv), B, P = heads, len(spans), 1 + -(-max(end for _, end in spans) // page)
    pages = torch.randperm(B * P, generator=draw).view(B, P)
    cache = torch.randn(Hkv, B * P * page, 2, size, generator=draw)
    N = sum(end - start for start, end in spans)
    q, out = torch.randn(N, Hq, size, generator=draw), torch.full((N, Hq, size), torch.nan)
    logits = torch.randn(Hq, generator=draw) if sinks else None
    wanted, chunks, used = [], [], torch.zeros(B * P * page, dtype=torch.bool)
    for b, (start, end) in enumerate(spans):
        rows = slice(len(wanted), len(wanted) + end - start)
        chunks.append((rows.start, start, end, b))
        slots = (pages[b, :, None] * page + torch.arange(page)).flatten()[:end]
        used[slots[max(0, start + 1 - (window or end)) :]] = True
        k, v = (x.repeat_interleave(Hq // Hkv, 0) for x in cache[:, slots].unbind(2))
        scores = torch.einsum("thd,hld->htl", q[rows], k) * scale
        ages = torch.arange(start, end)[:, None] - torch.arange(end)
        scores = scores.masked_fill((ages < 0) | (ages >= (window or end)), -torch.inf)
        wanted += torch.einsum("htl,hld->thd", shares(scores, logits), v)
    cache[:, ~used] = torch.nan
    tiles = prefill.tiles(chunks, prefill.tile_tokens(Hq // Hkv))
    rest = {"page_size": page, "scale": scale, "window": window, "sinks_H": logits}
    prefill.attend(q, cache, tiles, pages, out, **rest)
    return float((out - torch.stack(wanted)).abs().max())


def projected(
    ends: list[int], *, heads=(4, 2), size=16, page=16, splits=1, window=0, sinks=False, normed=True, parts=2
) -> bool:
    """As `error`, of heads that are still to be normed and rotated; NaN also where the newest tokens are to
    be stored. Nothing else in the cache may change."""
    draw, scale = torch.Generator().manual_seed(len(ends)), 0.3
    (Hq, Hkv), B, P = heads, len(ends), 1 + -(-max(ends) // page)
    pages = torch.randperm(B * P, generator=draw).view(B, P)
    cache = torch.randn(Hkv, B * P * page, 2, size, generator=draw)
    x_PBX = torch.randn(parts, B, (Hq + 2 * Hkv) * size, generator=draw)
    turn = torch.randn(B, size // 2, generator=draw)
    cos, sin = turn.cos().repeat(1, 2), torch.cat((-turn.sin(), turn.sin()), 1)
    weight = torch.randn(Hq + Hkv, size, generator=draw) if normed else None
    logits = torch.randn(Hq, generator=draw) if sinks else None
    q, k, v = x_PBX.sum(0).view(B, -1, size).split((Hq, Hkv, Hkv), dim=1)
    qk = torch.cat((q, k), 1)
    if weight is not None:
        qk = F.rms_norm(qk, (size,), eps=1e-6) * weight
    qk = qk * cos[:, None] + qk.roll(size // 2, -1) * sin[:, None]
    wanted, filled = torch.zeros(B, Hq, size), torch.full_like(cache, torch.nan)
    newest = pages[:, -1] * page  # of padding: a page that nothing uses
    for b, end in enumerate(ends):
        slots = (pages[b, :, None] * page + torch.arange(page)).flatten()[max(0, end - (window or end)) : end]
        if not end:
            continue
        newest[b] = slots[-1]
        filled[:, slots] = cache[:, slots]
        filled[:, slots[-1]] = torch.stack((qk[b, Hq:], v[b]), dim=1)
        keys, values = (x.repeat_interleave(Hq // Hkv, 0) for x in filled[:, slots].unbind(2))
        scores = torch.einsum("hd,hld->hl", qk[b, :Hq], keys) * scale
        wanted[b] = torch.einsum("hl,hld->hd", shares(scores, logits), values)
    cache = filled.clone()
    cache[:, newest] = torch.nan
    given = x_PBX if parts > 1 else x_PBX[0], Hq, Hkv, cos, sin, weight, 1e-6
    rest = {"page_size": page, "scale": scale, "window": window, "sinks_H": logits}
    found = decode_heads.attend(
        *given, cache, newest, pages, torch.tensor(ends), programs=Programs(Cut(splits, BLOCK)), **rest
    )
    return torch.allclose(found, wanted, atol=1e-5) and torch.allclose(
        cache, filled, rtol=1e-5, atol=1e-5, equal_nan=True
    )


def rows_of_requests(rows: int = 3, **given: int) -> bool | None:
    """Whether attention of rows gives of projected heads what it gives of rotated ones; None: nothing."""
    draw = torch.Generator().manual_seed(rows)
    spec = AttentionSpec.full(num_heads=4, num_kv_heads=2, head_dim=16)
    group = CacheGroup(layers=(0,), spec=spec, sharing=())
    sizes = {"num_pages": 2 * rows, "page_size": 16, "max_running": rows, "max_context": 32}
    chosen = Chosen(backend="triton", prompts="triton")
    paged = paged_attention(
        group, **sizes, device=torch.device("cpu"), dtype=torch.float32, chosen=chosen, **given
    )
    paged.cache.normal_(generator=draw)
    ends, table = torch.randint(1, 33, (rows,), generator=draw), torch.arange(2 * rows).view(rows, 2)
    attention = paged.rows(table[:, 0] * 16 + ends - 1, table, ends)
    x = torch.randn(rows, 8 * 16, generator=draw)
    cos, sin = torch.randn(2, rows, 16, generator=draw)
    found = attention.attend_projected(0, ProjectedHeads(x, 4, 2, cos, sin, None, 0.0))
    if found is None:
        return None
    cache = paged.cache.clone()
    paged.cache.normal_(generator=draw.manual_seed(rows))
    q, _ = rotate(x, 4, 2, cos, sin, None, 0.0, store=attention.place(0))
    wanted = attention.attend(0, q)
    return torch.allclose(found, wanted, atol=1e-5) and torch.allclose(cache, paged.cache, atol=1e-5)


def parts(N: int, M: int, K: int, piece: int, *, biased: bool = False) -> bool:
    """Whether the parts of a product of a wider matrix add up to it."""
    draw = torch.Generator().manual_seed(N)
    x, w = torch.randn(N, 2 * K, generator=draw)[:, :K], torch.randn(M, K, generator=draw)
    bias = torch.randn(M, generator=draw)
    y = torch.full((-(-K // piece), N, M), torch.nan)
    multiply_part[(-(-M // 64), len(y))](
        x, w, w, bias, y, N, M, K, x.stride(0), K, 16, 64, piece, 1, K % piece != 0, biased, 0, False
    )
    return torch.allclose(y.sum(0), F.linear(x, w, bias if biased else None), atol=1e-4)


def product(N: int, M: int, K: int, *, bias: bool = False, rows: int | None = None) -> bool:
    """Whether `linear` is right for x [N, K] of a wider matrix."""
    draw = torch.Generator().manual_seed(N)
    x, w = torch.randn(N, 2 * K, generator=draw)[:, :K], torch.randn(M, K, generator=draw)
    b = torch.randn(M, generator=draw) if bias else None
    return torch.allclose(linear(x, w, b, rows), torch.nn.functional.linear(x, w, b), atol=1e-4)


results["short"] = error([1, 5, 17]) < 1e-5
results["pages"] = error([130, 64, 65, 200]) < 1e-5
results["splits"] = error([300, 7, 129], splits=4) < 1e-5
results["many-splits"] = error([300, 7], size=64, splits=128) < 1e-5
results["wide"] = all(
    error([1, 127, 128, 129, 0, 300], heads=heads, size=size, page=page, splits=splits, block=WIDE) < 1e-5
    for heads, size, page, splits in (((8, 1), 64, 16, 1), ((4, 2), 128, 1, 2), ((4, 2), 64, 128, 4))
)
results["wide-window-sinks"] = all(
    error([1, 5, 129, 300], heads=(8, 1), size=64, sinks=True, block=WIDE, **cut) < 1e-5
    for cut in ({"splits": 1}, {"splits": 4}, {"window": 128}, {"splits": 2, "window": 100})
)
results["padding"] = error([40, 0, 3, 0], splits=2) < 1e-5
results["odd-heads"] = error([90, 33], heads=(6, 2), size=24, page=4) < 1e-5
results["one-kv-head"] = error([70], heads=(20, 1), size=32) < 1e-5
results["prompts"] = prompts([(0, 40), (64, 70), (63, 200), (5, 6)]) < 1e-5
results["prompts-odd"] = prompts([(0, 150), (130, 131)], heads=(6, 2), size=24, page=4) < 1e-5
results["window"] = error([1, 5, 17, 130, 300], window=70, splits=2) < 1e-5
results["sinks"] = all(error([1, 0, 77, 130], sinks=True, splits=splits) < 1e-5 for splits in (1, 2))
results["window-sinks"] = error([1, 5, 200], heads=(16, 2), size=64, window=8, sinks=True, splits=4) < 1e-5
results["large-heads"] = error([90], heads=(2, 1), size=256, splits=2) < 1e-5
spans = [(0, 40), (64, 70), (63, 200), (5, 6), (190, 210), (130, 131)]
results["prompts-window"] = all(
    prompts(spans, heads=(2, 1), window=size) < 1e-5 for size in (1, 17, 64, 128, 300)
)
results["prompts-sinks"] = prompts(spans, sinks=True) < 1e-5
results["prompts-window-sinks"] = (
    prompts(spans, heads=(6, 2), size=24, page=4, window=30, sinks=True) < 1e-5
    and prompts(spans, heads=(8, 1), size=64, window=128, sinks=True) < 1e-5
)
results["prompts-large-heads"] = prompts([(0, 70), (60, 80)], heads=(2, 1), size=256, window=20) < 1e-5
results["projected"] = all(
    projected([1, 5, 17, 0, 64, 65, 66, 130], parts=parts, normed=normed)
    for parts, normed in ((1, True), (2, False), (3, True))
)
results["projected-splits"] = projected([300, 7, 129, 0, 257, 256], splits=4) and projected([70], splits=2)
results["projected-heads"] = (
    projected([90, 33], heads=(6, 2), size=24, page=4)
    and projected([70, 3], heads=(20, 1), size=32)
    and projected([40], heads=(2, 2), size=8)
)
results["projected-window-sinks"] = all(
    projected([1, 5, 17, 130, 0, 300], heads=(8, 1), size=64, sinks=sinks, window=window, splits=splits)
    for sinks, window, splits in ((True, 0, 1), (True, 70, 2), (False, 8, 1), (True, 1, 1))
)
results["projected-rows"] = rows_of_requests() is True and all(
    rows_of_requests(**given) is None for given in ({"drafts": 1}, {"fixed_spans": 8}, {"rows": 129})
)
results["parts"] = all(parts(3, 70, K, 32, biased=biased) for K in (128, 144, 40) for biased in (False, True))
results["product"] = product(1, 70, 128, bias=True) and product(0, 8, 64)
results["product-odd"] = product(37, 5, 72) and product(37, 64, 72, bias=True, rows=16)

print(json.dumps(results))
