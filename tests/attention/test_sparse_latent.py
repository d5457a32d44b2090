"""Sparse latent attention equals a softmax over what is chosen, written out, however tokens arrive."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tests.attention.test_latent import BOUND, Allocated, Chunk, Drawn, Sequence, drawn, sequence
from turnout.attention.capability import Chosen
from turnout.attention.indexing import Index, rounded
from turnout.attention.kinds import SparseLatentSpec, cache_groups
from turnout.attention.paged import paged_attention
from turnout.attention.sparse_latent import SparseLatentAttention
from turnout.attention.up_projection import UpProjection
from turnout.attention.workspace import workspace_bytes

TOPK = 12
FULL = SparseLatentSpec(
    num_heads=4,
    num_kv_heads=1,
    head_dim=24,
    value_dim=12,
    scale=24**-0.5 * 1.3,  # as test_latent.py
    latent_dim=32,
    rope_dim=8,
    index_heads=2,  # few, so that many scores are 0 and tie
    index_dim=8,
    index_topk=TOPK,
)
SHARED = SparseLatentSpec(**{**vars(FULL), "shares_choice": True})


def paged(page_size: int = 4, backend: str = "torch", *, fp8: bool = False) -> SparseLatentAttention:
    (group,) = cache_groups([replace(spec, index_fp8=fp8) for spec in (FULL, SHARED, FULL)])
    assert group.sharing == (1,)
    attention = paged_attention(
        group,
        num_pages=64,
        page_size=page_size,
        max_running=4,
        max_context=256,
        device=torch.device("cpu"),
        dtype=torch.float32,
        chosen=Chosen(backend=backend, prompts=backend),
    )
    assert isinstance(attention, SparseLatentAttention)
    assert attention.cache_bytes == 65 * page_size * group.token_bytes(4)
    for cache in (attention.cache, attention.index_scales if fp8 else attention.index_keys):
        cache.fill_(torch.nan)  # what is not written is never read
    return attention


def drawn_index(length: int, seed: int) -> Index:
    draw = torch.Generator().manual_seed(100 + seed)
    q, key = torch.randn(length, 2, 8, generator=draw), torch.randn(length, 8, generator=draw)
    return Index(q, key, torch.rand(length, 2, generator=draw))


def expected(one: Drawn, index: Index) -> Tensor:
    """[L, H, Dv] in float64, token by token: at most TOPK of the largest scores, ties by place."""
    out = []
    for t in range(len(one.q_LHD)):
        products = (index.key_ND[: t + 1] @ index.q_NHD[t].T).clamp(min=0)
        scores = (products @ index.weights_NH[t]).tolist()
        chosen = sorted(sorted(range(t + 1), key=lambda i, scores=scores: (-scores[i], i))[:TOPK])
        part = Drawn(one.q_LHD[[t] * len(chosen)], one.latent_LC[chosen], one.up)
        out.append(part.expected()[-1])  # the last of them sees all of them
    return torch.stack(out)


def run(
    attention: SparseLatentAttention, requests: list[Sequence], all_drawn: list[Drawn], cuts: tuple[int, ...]
) -> list[Tensor]:
    """Of layers 0, which chooses, and 1, which shares the choice: the latter's output of each sequence."""
    indices = [drawn_index(len(one.q_LHD), i) for i, one in enumerate(all_drawn)]
    found: list[list[Tensor]] = [[] for _ in requests]
    for start, end in pairwise(cuts):
        chunks = [Chunk(request, start, end) for request in requests]
        step = attention.laid_out(chunks, []) if end - start < 3 else attention.laid_out([], chunks)
        q, latent = (
            torch.cat([getattr(one, name)[start:end] for one in all_drawn]) for name in ("q_LHD", "latent_LC")
        )
        parts = [index.rows(slice(start, end)) for index in indices]
        index = Index(*(torch.cat(x) for x in zip(*(vars(part).values() for part in parts), strict=True)))
        first = step.latent(0, q, latent, all_drawn[0].up, index)
        again = step.latent(1, q, latent, all_drawn[0].up)
        assert torch.equal(first, again)
        other = Index(index.q_NHD, -index.key_ND, index.weights_NH)
        step.latent(2, q, -latent, all_drawn[0].up, other)  # layers share pages, not what is in them
        for parts_of, out in zip(found, again.split(end - start), strict=True):
            parts_of.append(out)
    return [torch.cat(parts_of) for parts_of in found]


@pytest.mark.parametrize(
    "cuts",
    [(0, 60), (0, TOPK, 60), (0, TOPK + 1, 60), (0, 5, 6, 60), (0, 30, 31, 33, 60), (0, *range(8, 61))],
    ids=str,
)
def test_chunks_of_any_length_equal_the_definition(cuts: tuple[int, ...]) -> None:
    one, two = drawn(60), drawn(60, seed=1)
    two.up = one.up
    found = run(paged(), [sequence(0, 0, 15), sequence(1, 30, 15)], [one, two], cuts)
    for i, (out, drawn_from) in enumerate(zip(found, (one, two), strict=True)):
        assert float((out - expected(drawn_from, drawn_index(60, i))).abs().max()) < BOUND


def test_index_keys_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is chosen by rounded keys, which is not what others would choose."""
    plain, drew = [drawn_index(60, i) for i in (0, 1)], drawn_index
    fp8 = [Index(index.q_NHD, rounded(index.key_ND), index.weights_NH) for index in plain]
    monkeypatch.setattr(
        "tests.attention.test_sparse_latent.drawn_index",
        lambda length, seed: fp8[seed].rows(slice(0, length)),
    )
    one, two = drawn(60), drawn(60, seed=1)
    two.up = one.up
    cuts = (0, TOPK + 1, 30, 31, 33, 60)
    found = run(paged(fp8=True), [sequence(0, 0, 15), sequence(1, 30, 15)], [one, two], cuts)
    for i, (out, drawn_from) in enumerate(zip(found, (one, two), strict=True)):
        assert float((out - expected(drawn_from, fp8[i])).abs().max()) < BOUND
        assert float((out - expected(drawn_from, drew(60, i))).abs().max()) > 10 * BOUND


def test_sequences_of_unequal_length_decode_with_drafts() -> None:
    """One of them sees fewer tokens than it may choose."""
    one, two = drawn(30), drawn(6, seed=1)
    two.up = one.up
    attention, requests = paged(), [sequence(0, 0, 8), sequence(1, 10, 8)]
    indices = [drawn_index(30, 0), drawn_index(6, 1)]
    step = attention.laid_out([], [Chunk(requests[0], 0, 27), Chunk(requests[1], 0, 5)])
    step.latent(0, *both(one, two, slice(0, 27), slice(0, 5), indices))
    step = attention.laid_out([Chunk(requests[0], 27, 30), Chunk(requests[1], 5, 6)], [])
    out = step.latent(0, *both(one, two, slice(27, 30), slice(5, 6), indices))
    wanted = torch.cat((expected(one, indices[0])[27:], expected(two, indices[1])[5:]))
    assert float((out - wanted).abs().max()) < BOUND


def both(
    one: Drawn, two: Drawn, a: slice, b: slice, indices: list[Index]
) -> tuple[Tensor, Tensor, UpProjection, Index]:
    parts = [vars(indices[0].rows(a)).values(), vars(indices[1].rows(b)).values()]
    index = Index(*(torch.cat(x) for x in zip(*parts, strict=True)))
    q, latent = torch.cat((one.q_LHD[a], two.q_LHD[b])), torch.cat((one.latent_LC[a], two.latent_LC[b]))
    return q, latent, one.up, index


def test_no_tokens_attend_to_nothing() -> None:
    one = drawn(0)
    step = paged().laid_out([], [])
    assert step.latent(0, one.q_LHD, one.latent_LC, one.up, drawn_index(0, 0)).shape == (0, 4, 12)


@pytest.mark.more
def test_the_workspace_bounds_what_a_chunk_allocates() -> None:
    """Of DeepSeek-V3.2's sizes, with fewer heads."""
    spec = SparseLatentSpec(
        num_heads=8,
        num_kv_heads=1,
        head_dim=192,
        value_dim=128,
        scale=1.0,
        latent_dim=512,
        rope_dim=64,
        index_heads=64,
        index_dim=128,
        index_topk=2048,
    )
    context, tokens = 8192, 32
    attention = paged_attention(
        *cache_groups([spec]),
        num_pages=context // 16,
        page_size=16,
        max_running=1,
        max_context=context,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    step = attention.laid_out([], [Chunk(sequence(0, 0, context // 16), context - tokens, context)])
    index = Index(torch.randn(tokens, 64, 128), torch.randn(tokens, 128), torch.rand(tokens, 64))
    q, latent = torch.randn(tokens, 8, 192), torch.randn(tokens, 576)
    up = UpProjection(torch.randn(8, 256, 512) * 0.05, 128)
    with Allocated() as allocated:
        step.latent(0, q, latent, up, index)
    planned = workspace_bytes(cache_groups([spec]), tokens, 4, context)
    assert planned / 4 < allocated.most <= planned
