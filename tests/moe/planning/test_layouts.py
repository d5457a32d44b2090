"""What a plan makes of runners that treat the two layouts unlike: other weights, other numerics."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.moe.made_up import BLACKWELL, EXPERTS, NVFP4, TOKENS, dispatcher, make, runner
from turnout.errors import PlanRefused
from turnout.moe.plan import PlanRequest
from turnout.moe.spec import Activation
from turnout.parallel.topology import Topology

BATCHED = dispatcher("elm", layout="batched_experts", made_for=frozenset({"decode"}), preference=5)
BOTH = TOKENS | EXPERTS


def planned(spec=NVFP4, request=PlanRequest(), dispatchers=(dispatcher(), BATCHED), **declared):
    made_up = runner(layouts=BOTH, weight_storages=frozenset({"packed"}), fp4_units=True, **declared)
    return make(
        spec,
        runners=[made_up],
        dispatchers=list(dispatchers),
        hardware=BLACKWELL,
        compute_dtype="bfloat16",
        request=request,
    )


def test_weights_in_an_order_per_layout_count_for_each():
    once, twice = planned(), planned(weights_per_layout=True)
    for made in (once, twice):
        assert (made.prefill.layout, made.decode.layout) == ("tokens", "batched_experts")
    assert twice.weight_bytes == 2 * once.weight_bytes
    alone = planned(weights_per_layout=True, dispatchers=[dispatcher()])
    assert alone.weight_bytes == once.weight_bytes


def test_weight_only_numerics_stay_in_the_layouts_that_have_them():
    """W4A4 goes to rows by expert; FP4 weights alone keep both phases with tokens, or are refused."""
    assert planned(weight_only_layouts=TOKENS).decode.layout == "batched_experts"
    weight_only = PlanRequest(moe_activation_dtype="bf16")
    assert planned(request=weight_only).decode.layout == "batched_experts"
    kept = planned(request=weight_only, weight_only_layouts=TOKENS)
    assert (kept.activation_format, kept.decode.layout) == ("bf16", "tokens")
    with pytest.raises(PlanRefused) as refused:
        planned(
            request=weight_only, weight_only_layouts=TOKENS, dispatchers=[replace(BATCHED, made_for=BOTH)]
        )
    assert any(
        r.asked == "weights multiplied with bf16 in layout 'batched_experts'"
        and r.limit == "does so in layout tokens"
        for r in refused.value.refusals
    )


def test_rows_without_a_gate_may_have_a_multiple_of_their_own():
    plain = replace(NVFP4, activation=Activation(kind="relu2"))
    aligned = {"intermediate_multiple": 64, "ungated_multiple": 128}
    assert planned(plain, **aligned)
    assert planned(NVFP4, intermediate_multiple=64, ungated_multiple=1024)
    shards = {"topology": Topology(tp_size=8), "hardware": BLACKWELL, "compute_dtype": "bfloat16"}
    assert make(NVFP4, runners=[runner(**aligned)], **shards)
    with pytest.raises(PlanRefused) as refused:
        make(plain, runners=[runner(**aligned)], **shards)
    assert any(r.limit == "a rank's shard must be a multiple of 128" for r in refused.value.refusals)
