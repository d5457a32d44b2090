"""Bytes next to the weights, against what the library allocates."""

from __future__ import annotations

import pytest

from tests.moe.build import make_spec
from turnout.moe.backends.flashinfer.workspace_blackwell import (
    TILE,
    cutedsl_workspace_bytes,
    slots,
    trtllm_workspace_bytes,
)
from turnout.moe.capabilities.rank_share import Share
from turnout.moe.spec import MoESpec, RankShape


def share(spec: MoESpec, rows: int, layout: str) -> Share:
    """Of the first of two ranks that hold 4 experts each, by two that divide every expert."""
    shape = RankShape.of(spec, num_local_experts=4, expert_tp=2)
    kind = spec.activation.kind
    return Share(shape=shape, activation=kind, rows=rows, layout=layout, decoded=False, itemsize=2)


@pytest.mark.parametrize("tokens", [0, 1, 3, 17, 512, 8192])
@pytest.mark.parametrize("experts", [1, 32, 256])
def test_slots_are_the_most_that_any_tile_of_the_library_makes(tokens, experts):
    from flashinfer.fused_moe.cute_dsl.moe_utils import get_max_num_permuted_tokens
    from flashinfer.fused_moe.cute_dsl.tuner import VALID_TILE_SIZES

    sizes = [get_max_num_permuted_tokens(tokens, 8, experts, tile) for tile in VALID_TILE_SIZES]
    assert slots(8 * tokens, experts) == max(sizes)
    assert max(VALID_TILE_SIZES) == TILE


def test_tokens_by_hand():
    """H 256, a shard of 64, 3 tokens of top-2 over 4 experts: 6 pairs in 4 tiles, 1024 slots."""
    spec = make_spec(format="nvfp4", hidden_size=256, intermediate_size=128)
    quantized, out, maps = 3 * (128 + 16), 2 * 3 * 256, 4 * (6 + 1024 + 8)
    expected = quantized + maps + 2 * 1024 * (256 + 64) + out
    assert cutedsl_workspace_bytes(share(spec, 3, "tokens")) == expected
    # TensorRT-LLM counts all 8 experts: 6 pairs may be in 6 tiles.
    maps = 4 * (6 + 2 * 1536 + 12 + 16)
    expected = quantized + maps + 1536 * (32 + 4) + 2 * 1536 * 256 + out
    assert trtllm_workspace_bytes(share(spec, 3, "tokens")) == expected


@pytest.mark.parametrize("activation", ["silu", "relu2"])
def test_batched_experts_by_hand(activation):
    """4 experts of 130 rows each, whose scales are padded to 256."""
    spec = make_spec(activation, format="nvfp4", hidden_size=256, intermediate_size=128)
    N = 128 if activation == "silu" else 64
    held, tiled = 4 * 130, 4 * 256
    expected = tiled * (128 + 16) + 2 * held * N + tiled * (32 + 4) + 2 * held * 256
    expected += 0 if activation == "silu" else held * (4 * 64 + 14 * 64)
    assert cutedsl_workspace_bytes(share(spec, 130, "batched_experts")) == expected
