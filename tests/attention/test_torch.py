"""A step without tokens, as ranks that only keep others company have it, is an ordinary step."""

from __future__ import annotations

import pytest
import torch

from tests.engine.toy import SHAPE
from turnout.attention.torch import PagedAttention
from turnout.attention.triton import StepAttention
from turnout.engine.step.near_ties import NoAttention

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def rows(count: int, heads: int, device: str) -> torch.Tensor:
    return torch.ones(count, heads, SHAPE.head_dim, device=device)


@pytest.mark.parametrize("device", DEVICES)
def test_no_tokens_attend_to_nothing(device: str):
    paged = PagedAttention(
        SHAPE,
        num_pages=4,
        page_size=4,
        max_running=2,
        max_context=16,
        device=torch.device(device),
        dtype=torch.float32,
    )
    paged.begin([], [])
    for attention in (paged, NoAttention(), StepAttention(paged, [], [])):
        for layer in range(SHAPE.num_layers):
            q, k, v = (rows(0, heads, device) for heads in (SHAPE.num_heads, *[SHAPE.num_kv_heads] * 2))
            out = attention(layer, q, k, v)
            assert out.shape == (0, SHAPE.num_heads, SHAPE.head_dim)
            assert out.device.type == device
