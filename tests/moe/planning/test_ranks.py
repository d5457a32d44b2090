"""The planner between ranks: who moves tokens, in which format, who sums, and what buffers that takes."""

from dataclasses import replace

import pytest

from tests.moe.made_up import (
    BLACKWELL,
    BUDGET,
    EXPERTS,
    HOPPER,
    NVFP4,
    SPEC,
    TOKENS,
    dispatcher,
    make,
    runner,
)
from turnout.errors import PlanRefused
from turnout.moe.budget import Budget
from turnout.moe.plan import PlanRequest
from turnout.parallel.hardware import GB
from turnout.parallel.topology import Topology

# --- ranks ----------------------------------------------------------------------------------------


def test_a_gather_within_one_group_moves_nothing_and_leaves_the_sum_to_the_layer():
    for topology in (Topology(tp_size=4), Topology(tp_size=4, ep_size=4), Topology(tp_size=4, ep_size=2)):
        made = make(topology=topology)
        assert (made.decode.reduce, made.shared_expert, made.dispatch_bytes) == ("layer", "sharded", 0)
        assert (made.prefill.max_tokens, made.decode.max_tokens) == (2048, 64)
        assert any("the layer sums over ranks" in reason for reason in made.reasons)
    alone = make()
    assert (alone.decode.reduce, alone.shared_expert, alone.dispatch_bytes) == ("none", "whole", 0)


def test_a_gather_over_groups_counts_everyones_tokens_and_has_summed():
    topology = Topology(tp_size=4, dp_size=2, ep_size=4, enable_dp_attention=True)
    made = make(topology=topology)
    assert (made.decode.reduce, made.shared_expert) == ("none", "whole")
    assert (made.prefill.max_tokens, made.decode.max_tokens) == (2 * 2048, 2 * 64)
    assert made.dispatch_bytes == 2 * 2048 * (2 * 4 * 1024 + 8 * 8)


def test_a_shared_expert_is_sharded_only_if_the_layer_sums_in_both_phases():
    """It takes one kind of weights, and under an all-to-all no rank would sum its shards."""
    ash = dispatcher("ash", made_for=frozenset({"prefill"}))
    yew = dispatcher("yew", exchange="all_to_all", preference=2, layout="batched_experts")
    topology, both = Topology(tp_size=4, ep_size=4), runner(layouts=TOKENS | EXPERTS)
    made = make(topology=topology, dispatchers=[yew], runners=[both])
    assert (made.prefill.reduce, made.decode.reduce, made.shared_expert) == ("none", "none", "whole")
    made = make(topology=topology, dispatchers=[ash, yew], runners=[both])
    assert (made.prefill.reduce, made.decode.reduce, made.shared_expert) == ("layer", "none", "whole")


def test_what_need_not_be_sent_stays():
    """However good a dispatcher is, one that moves nothing comes first; the reason says so."""
    ash, yew = dispatcher("ash"), dispatcher("yew", exchange="all_to_all", preference=2)
    made = make(topology=Topology(tp_size=4, ep_size=4), dispatchers=[ash, yew])
    assert (made.prefill.dispatcher, made.decode.dispatcher) == ("ash", "ash")
    assert (
        "decode dispatcher ash: all ranks hold the same tokens, and nothing has to be dispatched"
        in made.reasons
    )
    apart = Topology(tp_size=4, dp_size=4, ep_size=4, enable_dp_attention=True)
    made = make(topology=apart, budget=replace(BUDGET, dp_size=4), dispatchers=[ash, yew])
    assert (made.prefill.dispatcher, made.decode.dispatcher) == ("yew", "yew")


def test_a_budget_for_other_groups_is_a_mistake_of_the_caller():
    with pytest.raises(ValueError, match="dp_size 1"):
        make(topology=Topology(tp_size=2, dp_size=2, enable_dp_attention=True), budget=BUDGET)


def test_a_rank_holds_its_slice():
    made = make(topology=Topology(tp_size=8, ep_size=4, rank=5))
    assert (made.first_expert, made.num_local_experts) == (32, 16)
    assert made.weight_bytes == 16 * 3 * 1024 * 256 * 4


@pytest.mark.parametrize(("ep", "rows"), [(8, 2 * 2048), (2, 2 * 2048), (1, 2 * 2048)])
def test_an_all_to_all_reaches_every_rank_that_holds_a_part(ep, rows):
    peers = [dispatcher(exchange="all_to_all")]
    topology = Topology(tp_size=8, dp_size=2, ep_size=ep, enable_dp_attention=True)
    made = make(topology=topology, dispatchers=peers)
    assert (made.prefill.max_tokens, made.decode.max_tokens) == (rows, 2 * 64)
    assert (made.prefill.reduce, made.shared_expert) == ("none", "whole")
    assert made.dispatch_bytes == rows * (2 * 4 * 1024 + 8 * 8)


def test_a_capacity_asked_for_is_what_buffers_are_made_for():
    peers = [dispatcher(exchange="all_to_all")]
    topology = Topology(tp_size=8, dp_size=8, ep_size=8, enable_dp_attention=True)
    made = make(topology=topology, dispatchers=peers, budget=replace(BUDGET, capacity=5000, dp_size=8))
    assert (made.prefill.max_tokens, made.decode.max_tokens) == (8 * 5000, 8 * 64)


def spread(ep, dp=32):
    return Topology(tp_size=32, dp_size=dp, ep_size=ep, enable_dp_attention=dp > 1)


def test_an_all_to_all_comes_first_where_few_ranks_need_a_token():
    """Top-8 needs 1 - (31/32)^8 = 22 % of 32 slices, and 40 % of 16."""
    pair = [dispatcher("ash", preference=10), dispatcher("yew", exchange="all_to_all")]
    made = make(topology=spread(32), dispatchers=pair)
    assert (made.prefill.dispatcher, made.decode.dispatcher) == ("yew", "yew")
    assert (
        "decode dispatcher yew: a token needs 22% of the ranks, and ash would bring it to all" in made.reasons
    )
    assert make(topology=spread(16), dispatchers=pair).decode.dispatcher == "ash"
    assert make(topology=spread(32, dp=1), dispatchers=pair).decode.dispatcher == "ash"
    assert make(topology=spread(32), dispatchers=pair[:1]).decode.dispatcher == "ash"
    asked = make(topology=spread(32), dispatchers=pair, request=PlanRequest(moe_a2a_backend="ash"))
    assert asked.decode.dispatcher == "ash"
    assert "decode dispatcher ash: asked for with --moe-a2a-backend" in asked.reasons


def test_phases_may_have_their_own_dispatchers_and_pay_for_both():
    """A million gathered tokens take a workspace of 86 GB; rows by expert of 34 GB fit in for decoding."""
    large = Budget.from_limits(
        chunked_prefill_size=2**17, max_prefill_tokens=2**17, max_running_requests=64, dp_size=8
    )
    batched = dispatcher("yew", layout="batched_experts", exchange="all_to_all", preference=2)
    gathered = dispatcher("ash", exchange="gather", preference=1)
    made = make(
        runners=[runner(layouts=TOKENS | EXPERTS)],
        dispatchers=[gathered, batched],
        budget=large,
        hardware=replace(HOPPER, memory_bytes=100 * GB),
        compute_dtype="bfloat16",
        topology=Topology(tp_size=8, dp_size=8, ep_size=8, enable_dp_attention=True),
    )
    assert (made.prefill.dispatcher, made.decode.dispatcher) == ("ash", "yew")
    rows, batched_rows = 8 * 2**17, 8 * 64
    assert made.dispatch_bytes == rows * (2 * 2 * 1024 + 64) + batched_rows * (8 * 2 * 2 * 1024 + 64)
    assert any("lower --max-prefill-tokens" in r.remedy for r in made.refused)


# --- wire -----------------------------------------------------------------------------------------

ANY_WIRE = frozenset({"bf16", "fp8", "nvfp4"})


APART = Topology(tp_size=2, dp_size=2, enable_dp_attention=True)


def wires(
    spec=SPEC,
    asked="auto",
    hardware=BLACKWELL,
    runner_wires=ANY_WIRE,
    dispatcher_wires=ANY_WIRE,
    topology=APART,
):
    return make(
        spec,
        runners=[runner(wire_formats=runner_wires, fp4_units=True)],
        dispatchers=[dispatcher(exchange="gather", wire_formats=dispatcher_wires)],
        hardware=hardware,
        compute_dtype="bfloat16",
        request=PlanRequest(moe_dispatch_dtype=asked),
        topology=topology,
    ).decode.wire_format


def test_tokens_are_sent_in_the_gemms_format_where_both_sides_speak_it():
    assert wires() == "bf16"
    assert wires(NVFP4) == "nvfp4"
    assert wires(NVFP4, hardware=HOPPER) == "bf16"
    assert wires(NVFP4, dispatcher_wires=frozenset({"bf16", "fp8"})) == "bf16"
    assert wires(NVFP4, asked="fp8") == "fp8"
    assert wires(NVFP4, asked="bf16") == "bf16"


def test_a_wire_format_that_one_side_lacks_is_refused():
    for lacking in ({"runner_wires": frozenset({"bf16"})}, {"dispatcher_wires": frozenset({"bf16"})}):
        with pytest.raises(PlanRefused, match="--moe-dispatch-dtype fp8"):
            wires(asked="fp8", **lacking)
    with pytest.raises(PlanRefused, match="divisible by 128"):
        wires(replace(SPEC, hidden_size=960), asked="fp8")


def test_tokens_are_sent_in_nvfp4_only_with_calibrated_scales():
    assert wires(NVFP4, asked="nvfp4", hardware=HOPPER) == "nvfp4"
    for spec in (replace(NVFP4, quantized_activations=False), SPEC):
        assert wires(spec) == "bf16"
        with pytest.raises(PlanRefused, match=r"calibrated input scales.*--calibrate"):
            wires(spec, asked="nvfp4")


def test_tokens_that_stay_are_not_quantised():
    alone = Topology(tp_size=2)
    assert wires(NVFP4, topology=alone) == "bf16"
    assert wires(NVFP4, asked="bf16", topology=alone) == "bf16"
    for asked in ("fp8", "nvfp4"):
        with pytest.raises(PlanRefused, match="no token is dispatched") as error:
            wires(NVFP4, asked=asked, topology=alone)
        assert "--moe-dispatch-dtype auto" in error.value.refusals[0].remedy
    peers = [dispatcher(), dispatcher("yew", exchange="all_to_all", wire_formats=ANY_WIRE)]
    made = make(
        topology=alone,
        dispatchers=peers,
        runners=[runner(wire_formats=ANY_WIRE)],
        request=PlanRequest(moe_dispatch_dtype="fp8"),
    )
    assert (made.decode.dispatcher, made.decode.wire_format) == ("yew", "fp8")
    assert "decode tokens are dispatched in fp8: asked for with --moe-dispatch-dtype" in made.reasons
