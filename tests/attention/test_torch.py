"""A step without tokens, which ranks have that only take part in collectives, is an ordinary step."""

from __future__ import annotations

import pytest
import torch

from tests.engine.toy import SHAPE
from turnout.attention.backends.triton.paged import TritonAttention
from turnout.attention.kinds import cache_groups
from turnout.attention.torch import TorchAttention
from turnout.engine.step.near_ties import NoAttention

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def rows(count: int, heads: int, device: str) -> torch.Tensor:
    return torch.ones(count, heads, SPEC.head_dim, device=device)


SPEC = SHAPE.attention[0]


@pytest.mark.parametrize("device", DEVICES)
def test_no_tokens_attend_to_nothing(device: str):
    paged, by_kernels = (
        kind(
            *cache_groups(SHAPE.attention),
            num_pages=4,
            page_size=4,
            max_running=2,
            max_context=16,
            device=torch.device(device),
            dtype=torch.float32,
        )
        for kind in (TorchAttention, TritonAttention)
    )
    for attention in (paged.laid_out([], []), NoAttention(), by_kernels.laid_out([], [])):
        for layer in range(SHAPE.num_layers):
            q, k, v = (rows(0, heads, device) for heads in (SPEC.num_heads, *[SPEC.num_kv_heads] * 2))
            out = attention(layer, q, k, v)
            assert out.shape == (0, SPEC.num_heads, SPEC.head_dim)
            assert out.device.type == device
