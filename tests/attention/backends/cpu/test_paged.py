"""Paged attention by compiled kernels on requests' pages, whatever the steps, against torch's SDPA."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.attention.test_latent import Chunk, Sequence
from turnout.attention.backends.cpu.paged import CompiledAttention
from turnout.attention.kinds import AttentionSpec, cache_groups
from turnout.engine.scheduler.request import GroupPages

LENGTH, PAGE = 70, 16


def spec(window: int = 0) -> AttentionSpec:
    plain = AttentionSpec.full(num_heads=4, num_kv_heads=2, head_dim=32)
    return replace(plain, kind="sliding_window", window=window) if window else plain


def expected(q_NHD: Tensor, k_NHD: Tensor, v_NHD: Tensor, window: int) -> Tensor:
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    seen = (distance >= 0) & (distance < (window or LENGTH))
    q, k, v = (
        x.transpose(0, 1) for x in (q_NHD, k_NHD.repeat_interleave(2, 1), v_NHD.repeat_interleave(2, 1))
    )
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(0, 1)


@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("cuts", [(0, 70), (0, 33, 34, 35, 70), (0, 1, 2, 69, 70)], ids=str)
def test_steps_of_two_requests_equal_whole_contexts(cuts: tuple[int, ...], window: int):
    """The second request takes the lengths of the first backwards: chunks and single tokens in one step."""
    layers = 2
    draw = torch.Generator().manual_seed(0)
    paged = CompiledAttention(
        *cache_groups([spec(window)] * layers),
        num_pages=10,
        page_size=PAGE,
        max_running=2,
        max_context=LENGTH + 10,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    pages = torch.randperm(10, generator=draw).tolist()
    requests = [Sequence(row, [GroupPages(pages=pages[row::2], freed=0)]) for row in range(2)]
    drawn = torch.randn(layers, 2, 3, LENGTH, 4, 32, generator=draw)
    got = torch.zeros(layers, 2, LENGTH, 4, 32)
    lengths = [end - start for start, end in pairwise(cuts)]
    backwards = tuple(accumulate(reversed(lengths), initial=0))
    for spans in zip(pairwise(cuts), pairwise(backwards), strict=True):
        step = [Chunk(request, *span) for request, span in zip(requests, spans, strict=True)]
        step.sort(key=lambda chunk: chunk.length > 1)  # single tokens first
        attention = paged.laid_out([c for c in step if c.length == 1], [c for c in step if c.length > 1])
        for layer in range(layers):
            rows = [(chunk.request.row, slice(chunk.start, chunk.end)) for chunk in step]
            q, k, v = (torch.cat([drawn[layer, row, i, span] for row, span in rows]) for i in range(3))
            out = attention(layer, q, k[:, :2], v[:, :2])
            for (row, span), part in zip(rows, out.split([c.length for c in step]), strict=True):
                got[layer, row, span] = part
    for layer in range(layers):
        for row in range(2):
            q, k, v = drawn[layer, row]
            torch.testing.assert_close(
                got[layer, row], expected(q, k[:, :2], v[:, :2], window), rtol=1e-5, atol=1e-5
            )
