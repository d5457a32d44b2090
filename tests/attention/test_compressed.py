"""Compressed attention computes long contexts in blocks of fewer tokens, within what is planned for them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.attention.test_latent import Allocated
from turnout.attention import workspace
from turnout.attention.compressed import attend
from turnout.attention.kinds import CompressedSpec, cache_groups

SPEC = CompressedSpec(
    num_heads=16,
    num_kv_heads=1,
    head_dim=32,
    value_dim=32,
    scale=32**-0.5,
    sinks=True,
    recent=128,
    rate=4,
    output_groups=2,
)


def of_a_prompt(tokens: int, context: int) -> tuple[Tensor, float]:
    """(attention of the last tokens of a context; the most bytes that were allocated)."""
    torch.manual_seed(0)
    q, recent = torch.randn(tokens, 16, 32), torch.randn(tokens + 127, 32)
    entries, sinks = torch.randn(context // 4, 32), torch.randn(16)
    with Allocated() as allocated:
        found = attend(SPEC, q, context - tokens, recent, entries, sinks, lambda _, __, seen: seen)
    return found, allocated.most


def test_blocks_of_long_contexts_are_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, context, itemsize = 100, 32768, 4
    whole, held = of_a_prompt(tokens, context)
    assert workspace.compressed_rows(SPEC, context // 4) == 32
    monkeypatch.setattr(workspace, "COMPRESSED_SCORES", 16 * 5 * (context // 4 + 160))
    monkeypatch.setattr(workspace, "COMPRESSED_VALUES", 1)  # one context at a time
    assert workspace.compressed_rows(SPEC, context // 4) == 5
    few, allocated = of_a_prompt(tokens, context)
    assert allocated < held / 4
    planned = workspace.workspace_bytes(cache_groups([SPEC]), tokens, itemsize, context)
    assert planned / 4 < allocated <= planned
    torch.testing.assert_close(few, whole, atol=1e-5, rtol=1e-5)
    monkeypatch.setattr(workspace, "COMPRESSED_SCORES", 1)
    assert workspace.compressed_rows(SPEC, context // 4) == 1
