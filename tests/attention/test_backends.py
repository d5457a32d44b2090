"""What attention backends declare: the first that takes a layer is chosen, and refusals name all limits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from turnout.attention.backends import Place, choose, refusals
from turnout.attention.kinds import AttentionSpec, cache_groups

SPEC = AttentionSpec.full(num_heads=8, num_kv_heads=2, head_dim=64)
H200 = Place(device="cuda", dtype="bfloat16", page_size=16, present=False)
LATENT = AttentionSpec.latent(num_heads=16, nope_dim=128, rope_dim=64, value_dim=128, latent_dim=512)
HOST = Place(device="cpu", dtype="float32", page_size=16)


@pytest.mark.parametrize(
    ("spec", "place", "chosen"),
    [
        (SPEC, H200, "triton"),
        (LATENT, H200, "triton"),
        (LATENT, replace(H200, dtype="float32"), "torch"),
        (LATENT, HOST, "torch"),
        (replace(SPEC.sliding(128), sinks=True), H200, "triton"),
        (AttentionSpec.full(num_heads=4, num_kv_heads=4, head_dim=256), H200, "triton"),
        (AttentionSpec.full(num_heads=4, num_kv_heads=4, head_dim=512), H200, "torch"),
        (SPEC, replace(H200, dtype="float32"), "torch"),
        (replace(SPEC.sliding(128), sinks=True), HOST, "cpu"),
        (SPEC, replace(HOST, page_size=8), "torch"),
        (SPEC, replace(HOST, dtype="bfloat16"), "torch"),
        (AttentionSpec.full(num_heads=4, num_kv_heads=4, head_dim=24), HOST, "torch"),
    ],
)
def test_choice(spec: AttentionSpec, place: Place, chosen: str) -> None:
    assert choose(spec, place) == chosen
    assert refusals(cache_groups([spec]), place) == []


def test_a_layer_that_none_takes_is_refused_by_name() -> None:
    groups = cache_groups([SPEC, replace(SPEC, head_dim=192, value_dim=128)])
    (refusal,) = refusals(groups, H200)
    assert "layer 1: full, heads of 192 and 128, on cuda in bfloat16" in refusal.asked
    assert "torch keeps values as large as keys (192), not 128" in refusal.limit
    assert "cpu runs on cpu, computes in float32, not bfloat16" in refusal.limit
    assert refusal.remedy
