"""The planner: what it chooses, why, and what it refuses, with backends that only exist here."""

import re
from dataclasses import replace

import pytest

from tests.moe.made_up import (
    BLACKWELL,
    BUDGET,
    CPU,
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
from turnout.moe.capabilities.declared import RUNNERS
from turnout.moe.capabilities.limits import Limits
from turnout.moe.plan import PlanRequest, Wishes
from turnout.moe.spec import Activation, MoESpec
from turnout.packages import Package
from turnout.parallel.hardware import GB
from turnout.parallel.topology import Topology


def refused(spec=SPEC, **given):
    with pytest.raises(PlanRefused) as error:
        make(spec, **given)
    assert all(r.who and r.asked and r.limit and r.remedy for r in error.value.refusals)
    return error.value


def the_refusal(error, who):
    (found,) = [r for r in error.refusals if r.who == who]
    return found


# --- choosing -------------------------------------------------------------------------------------


def test_a_plan_holds_sizes_and_reasons():
    made = make(num_layers=4)
    assert (made.prefill.runner, made.prefill.dispatcher, made.prefill.layout) == ("oak", "ash", "tokens")
    assert (made.prefill.max_tokens, made.decode.max_tokens) == (2048, 64)
    assert (made.first_expert, made.num_local_experts) == (0, 64)
    assert made.weight_bytes == 64 * 3 * 1024 * 512 * 4
    assert made.prefill.reduce == "none"
    subjects = [reason.split(":")[0] for reason in made.reasons]
    assert subjects == [
        "runner oak",
        "prefill dispatcher ash",
        "decode dispatcher ash",
        "activations bf16",
        "weights decoded",
        "runner oak has no recorded run on hardware",
        "dispatcher ash has no recorded run on hardware",
    ]


def test_auto_takes_the_highest_preference_and_says_over_whom():
    runners = [runner("elm", preference=1), runner("oak", preference=5), runner("fir", preference=3)]
    made = make(runners=runners, dispatchers=[dispatcher("ash"), dispatcher("yew", preference=2)])
    assert (made.decode.runner, made.decode.dispatcher) == ("oak", "yew")
    assert "runner oak: preference 5, before fir (3), elm (1)" in made.reasons
    wished = make(runners=runners, request=PlanRequest(moe_runner_backend="elm"))
    assert wished.prefill.runner == "elm"
    assert "runner elm: asked for with --moe-runner-backend" in wished.reasons


def test_auto_passes_over_what_cannot_run_and_keeps_the_reason():
    best = runner("elm", preference=9, weight_formats=frozenset({"nvfp4"}), devices=frozenset({"cuda"}))
    made = make(runners=[best, runner("oak")])
    assert made.prefill.runner == "oak"
    assert [(r.who, r.asked) for r in made.refused] == [
        ("runner elm", "device cpu"),
        ("runner elm", "bf16 expert weights"),
    ]


def test_layouts_join_backends():
    batched = runner("elm", layouts=EXPERTS, preference=9)
    both = runner("oak", layouts=TOKENS | EXPERTS)
    made = make(runners=[batched, both], dispatchers=[dispatcher("ash", layout="tokens")])
    assert made.prefill.runner == "oak"
    (reason,) = made.refused
    assert reason.who == "runner elm with dispatcher ash"
    made = make(runners=[batched, both], dispatchers=[dispatcher("ash", layout="batched_experts")])
    assert (made.prefill.runner, made.prefill.layout) == ("elm", "batched_experts")


def test_names_do_not_matter():
    """The same declarations under any names give the same plan."""
    first = make(runners=[runner("torch")], dispatchers=[dispatcher("deepep")])
    second = make(runners=[runner("x")], dispatchers=[dispatcher("y")])
    renamed = replace(
        first,
        prefill=replace(first.prefill, runner="x", dispatcher="y"),
        decode=replace(first.decode, runner="x", dispatcher="y"),
        reasons=second.reasons,
    )
    assert renamed == second


# --- activations and storage ----------------------------------------------------------------------


def test_w4a4_runs_where_it_is_native():
    native = runner(fp4_units=True)
    assert make(NVFP4, runners=[native], hardware=BLACKWELL).activation_format == "nvfp4"
    assert make(NVFP4, runners=[native], hardware=HOPPER).activation_format == "bf16"
    assert make(NVFP4, runners=[runner()], hardware=BLACKWELL).activation_format == "bf16"
    weight_only = replace(NVFP4, quantized_activations=False)
    assert make(weight_only, runners=[native], hardware=BLACKWELL).activation_format == "bf16"


def test_emulated_w4a4_runs_when_asked_for():
    asked = PlanRequest(moe_activation_dtype="nvfp4")
    assert make(NVFP4, request=asked).activation_format == "nvfp4"
    error = refused(replace(NVFP4, quantized_activations=False), request=asked)
    assert "input scales" in the_refusal(error, "runner oak").limit
    assert "left to auto, runner oak with dispatcher ash would" in error.headline
    assert "W4A4 needs NVFP4 weights" in the_refusal(refused(SPEC, request=asked), "runner oak").limit
    plain = runner(activation_formats=frozenset({"bf16"}))
    assert (
        "multiply with bf16"
        in the_refusal(refused(NVFP4, request=asked, runners=[plain]), "runner oak").limit
    )


def test_fp8_activations_go_with_weights_that_a_runner_multiplies_with_them():
    asked = PlanRequest(moe_activation_dtype="fp8")
    both = runner(
        activation_formats=frozenset({"bf16", "fp8"}), fp8_weight_formats=frozenset({"fp8", "mxfp4"})
    )
    mxfp4 = replace(SPEC, format="mxfp4", hidden_size=2880, intermediate_size=2880)
    assert make(mxfp4, runners=[both]).activation_format == "bf16"  # W4A8 is never chosen unasked
    assert make(mxfp4, runners=[both], request=asked).activation_format == "fp8"
    only = replace(both, fp8_weight_formats=frozenset({"fp8"}))
    for spec, limit in (
        (mxfp4, "multiplies fp8 weights with FP8 activations"),
        (NVFP4, "no e4m3 number"),
        (SPEC, "W8A8 needs FP8 weights, W4A8 MXFP4"),
        (replace(mxfp4, format="fp8"), "quantises 128 columns together"),
    ):
        error = refused(spec, runners=[only], request=asked)
        assert limit in the_refusal(error, "runner oak").limit


def test_small_weights_are_decoded_once_on_a_cpu():
    small = make(NVFP4, num_layers=2)
    assert small.weight_storage == "decoded"
    assert "is small" in small.reasons[4]
    large = make(NVFP4, num_layers=48)
    assert large.weight_storage == "packed"
    assert large.weight_bytes < small.weight_bytes / 7
    cramped = make(NVFP4, num_layers=2, hardware=replace(CPU, memory_bytes=3 * GB))
    assert cramped.weight_storage == "packed"  # 0.8 GB is more than an eighth of it
    assert make(NVFP4, num_layers=2, hardware=HOPPER, compute_dtype="bfloat16").weight_storage == "packed"


def test_bf16_weights_are_decoded_where_that_costs_nothing():
    same = make(num_layers=100, hardware=HOPPER, compute_dtype="bfloat16")
    assert (same.weight_storage, same.weight_bytes) == ("decoded", 64 * 3 * 1024 * 512 * 2)
    widened = make(num_layers=100, hardware=HOPPER, compute_dtype="float32")
    assert (widened.weight_storage, widened.weight_bytes) == ("packed", 64 * 3 * 1024 * 512 * 2)
    stored = make(num_layers=100, hardware=HOPPER, compute_dtype="float32", stored_itemsize=4)
    assert (stored.weight_storage, stored.weight_bytes) == ("decoded", 64 * 3 * 1024 * 512 * 4)


def test_storage_is_honoured_or_refused():
    assert make(NVFP4, request=PlanRequest(moe_weight_storage="packed")).weight_storage == "packed"
    assert (
        make(NVFP4, request=PlanRequest(moe_weight_storage="decoded"), hardware=HOPPER).weight_storage
        == "decoded"
    )
    only_packed = runner(weight_storages=frozenset({"packed"}))
    assert make(NVFP4, runners=[only_packed]).weight_storage == "packed"
    error = refused(NVFP4, runners=[only_packed], request=PlanRequest(moe_weight_storage="decoded"))
    assert the_refusal(error, "runner oak").asked == "--moe-weight-storage decoded"


def test_storage_that_does_not_fit_falls_back_or_is_refused():
    """48 layers decoded in float32 take 19 GB; packed 2.7 GB."""
    host = replace(CPU, memory_bytes=16 * GB)
    made = make(NVFP4, num_layers=48, hardware=host)
    assert made.weight_storage == "packed"
    assert "use --moe-weight-storage packed" in made.refused[0].remedy
    error = refused(NVFP4, num_layers=48, hardware=host, request=PlanRequest(moe_weight_storage="decoded"))
    assert "19.3 GB" in error.refusals[0].asked
    assert "left to auto" in error.headline
    error = refused(NVFP4, num_layers=48, hardware=replace(CPU, memory_bytes=2 * GB))
    assert len(error.refusals) == 2  # each storage, with its own figures


# --- refusing -------------------------------------------------------------------------------------

GPT_OSS = MoESpec(
    hidden_size=2880,
    intermediate_size=2880,
    num_experts=32,
    top_k=4,
    activation=Activation(kind="swiglu", alpha=1.702, beta=1.0, limit=7.0),
    expert_bias=True,
    format="mxfp4",
)


def test_every_reason_is_given_at_once():
    picky = runner(
        weight_formats=frozenset({"bf16", "nvfp4"}),
        activations=frozenset({"silu"}),
        expert_bias=False,
        devices=frozenset({"cuda"}),
        hidden_multiple=128,
        intermediate_multiple=64,
        layouts=EXPERTS,
        activation_formats=frozenset({"bf16"}),
        weight_storages=frozenset({"packed"}),
    )
    error = refused(
        GPT_OSS,
        runners=[picky],
        dispatchers=[
            dispatcher(devices=frozenset({"cuda"}), limits=Limits(ep_sizes=frozenset({1})), multi_host=False)
        ],
        topology=Topology(tp_size=4, dp_size=2, ep_size=2, nnodes=2, enable_dp_attention=True),
        request=PlanRequest(
            moe_dispatch_dtype="fp8", moe_activation_dtype="nvfp4", moe_weight_storage="decoded"
        ),
        budget=replace(BUDGET, capacity=5, dp_size=2),
    )
    asked = {(r.who, r.asked) for r in error.refusals}
    oak, ash, pair = "runner oak", "dispatcher ash", "runner oak with dispatcher ash"
    assert asked == {
        ("budget", "--max-dispatch-tokens-per-rank 5"),
        (ash, "device cpu"),
        (ash, "--nnodes 2"),
        (ash, "--ep-size 2"),
        (oak, "device cpu"),
        (oak, "mxfp4 expert weights"),
        (oak, "activation swiglu"),
        (oak, "experts with biases"),
        (oak, "hidden size 2880"),
        (oak, "expert intermediate size 2880 over 2 expert-TP rank(s)"),
        (oak, "--moe-activation-dtype nvfp4"),
        (oak, "--moe-weight-storage decoded"),
        (pair, "layout 'tokens', which the dispatcher emits"),
        (pair, "--moe-dispatch-dtype fp8 at hidden size 2880"),
    }
    assert all(r.who in str(error) and r.remedy in str(error) for r in error.refusals)


def test_architectures_are_matched_on_gpus_only():
    blackwell = runner(architectures=frozenset({100, 103}), devices=frozenset({"cuda"}))
    assert make(runners=[blackwell], hardware=BLACKWELL, compute_dtype="bfloat16").prefill.runner == "oak"
    found = the_refusal(refused(runners=[blackwell], hardware=HOPPER), "runner oak")
    assert "9.0" in found.asked
    assert "10.0, 10.3" in found.limit


def test_packages_count_on_this_machine_only():
    absent = Package(
        module="no_such_package", distribution="no-such-package", install="pip install no-such-package"
    )
    exotic = runner(requires=(absent,))
    assert make(runners=[exotic], hardware=HOPPER).prefill.runner == "oak"
    found = the_refusal(refused(runners=[exotic], hardware=replace(HOPPER, present=True)), "runner oak")
    assert found.remedy == "pip install no-such-package"
    present = replace(absent, module="json")
    assert make(runners=[runner(requires=(present,))], hardware=replace(CPU, present=True))


def test_a_package_may_be_too_old():
    old = Package(
        module="pytest", distribution="pytest", minimum="1000.1", install="pip install pytest==1000.1"
    )
    here = replace(CPU, present=True)
    found = the_refusal(refused(runners=[runner(requires=(old,))], hardware=here), "runner oak")
    assert found.limit.startswith("needs pytest>=1000.1; here is ")
    assert found.remedy == "pip install pytest==1000.1"
    assert make(runners=[runner(requires=(replace(old, minimum="2"),))], hardware=here)
    missing = replace(old, only_with="no-such-package")
    assert make(runners=[runner(requires=(missing,))], hardware=here)
    assert replace(old, only_with="pytest").lacking().startswith("needs pytest>=1000.1 with pytest; here is ")
    unknown = replace(old, module="json", distribution="no-such-package")
    assert unknown.lacking().endswith("unknown version")


def test_a_typing_error_is_called_unknown():
    error = refused(request=PlanRequest(moe_runner_backend="tritom", moe_a2a_backend="none!"))
    assert [r.limit for r in error.refusals] == ["unknown; there are: oak", "unknown; there are: ash"]
    assert [r.remedy for r in error.refusals] == [
        "use --moe-runner-backend auto",
        "use --moe-a2a-backend auto",
    ]
    assert "left to auto" in error.headline


def test_earlier_names_of_requests_and_runners_still_ask():
    asked = Wishes(runner="elm", dispatch_format="bf16", two_batches=False, overlap_shared_expert=False)
    assert asked == PlanRequest(
        moe_runner_backend="elm", moe_dispatch_dtype="bf16", disable_shared_expert_overlap=True
    )
    runners = [runner("oak"), runner("elm", aliases=("ulm",))]
    assert make(runners=runners, wishes=asked).decode.runner == "elm"
    by_alias = make(runners=runners, request=PlanRequest(moe_runner_backend="ulm"))
    assert (by_alias.prefill.runner, by_alias.decode.runner) == ("elm", "elm")
    assert RUNNERS["triton"] is RUNNERS["hopper"]
    assert "triton" not in list(RUNNERS)


def test_dispatchers_that_nobody_asked_for_hide_no_obstacle():
    gpu = frozenset({"cuda"})
    both = [dispatcher("ash"), dispatcher("elm", devices=gpu)]
    error = refused(runners=[runner("oak", devices=gpu)], dispatchers=both)
    assert {r.who for r in error.refusals} == {"runner oak"}
    error = refused(
        runners=[runner("oak", devices=gpu)], dispatchers=both, request=PlanRequest(moe_a2a_backend="elm")
    )
    assert {r.who for r in error.refusals} == {"runner oak", "dispatcher elm"}


def test_next_to_a_typing_error_stands_only_what_else_would_be_in_the_way():
    gpu = dispatcher("elm", devices=frozenset({"cuda"}))
    both = [dispatcher("ash"), gpu]
    [meant] = refused(request=PlanRequest(moe_runner_backend="oaks"), dispatchers=both).refusals
    assert meant.remedy == "use --moe-runner-backend oak"
    error = refused(request=PlanRequest(moe_runner_backend="oaks", moe_a2a_backend="elm"), dispatchers=both)
    assert [r.who for r in error.refusals] == ["plan", "dispatcher elm"]


def test_an_explicit_choice_is_never_replaced():
    gpu = runner("elm", devices=frozenset({"cuda"}))
    error = refused(runners=[runner("oak"), gpu], request=PlanRequest(moe_runner_backend="elm"))
    assert {r.who for r in error.refusals} == {"runner elm"}
    assert "left to auto, runner oak" in error.headline


# --- sizes that divide --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "topology", "asked"),
    [
        (SPEC, Topology(tp_size=6, ep_size=6), "64 experts over --ep-size 6"),
        (SPEC, Topology(tp_size=3), "expert intermediate size 512 over 3 expert-TP rank(s)"),
        # 512 / 64 = 8 values: half of an NVFP4 group
        (NVFP4, Topology(tp_size=64), "expert intermediate size 512 over 64 expert-TP rank(s)"),
        (
            replace(SPEC, format="fp8"),
            Topology(tp_size=8),
            "expert intermediate size 512 over 8 expert-TP rank(s)",
        ),
        (
            replace(SPEC, format="mxfp4"),
            Topology(tp_size=32),
            "expert intermediate size 512 over 32 expert-TP rank(s)",
        ),
    ],
)
def test_experts_that_do_not_divide_are_refused_with_sizes_that_do(spec, topology, asked):
    found = the_refusal(refused(spec, topology=topology, num_layers=1), "layer")
    assert found.asked == asked
    tp_size = int((re.findall(r"--tp-size (\d+)", found.remedy) or [topology.tp_size])[0])
    sizes = [int(n) for n in re.findall(r"\d+", found.remedy.partition("--ep-size")[2])]
    assert sizes
    for size in sizes:
        assert make(spec, topology=Topology(tp_size=tp_size, ep_size=size))


def test_the_remedy_names_the_most_ranks_over_which_experts_divide():
    for tp_size in (6, 7, 48, 90, 96, 600):
        topology = Topology(tp_size=tp_size, dp_size=2 - tp_size % 2, enable_dp_attention=True)
        remedy = the_refusal(refused(SPEC, topology=topology, num_layers=1), "layer").remedy
        tp, eps = re.fullmatch(r"use (?:--tp-size (\d+) )?--ep-size ([\d, or]+)", remedy).groups()
        found = int(tp or tp_size), [int(n) for n in re.findall(r"\d+", eps)]
        fitting = [
            (n, [ep for ep in range(1, n + 1) if n % ep == 64 % ep == 512 % (n // ep) == 0])
            for n in range(topology.dp_size, tp_size + 1, topology.dp_size)
        ]
        assert found == [one for one in fitting if one[1]][-1]


def test_fp8_blocks_bind_shards_not_whole_experts():
    odd = replace(SPEC, format="fp8", intermediate_size=704)  # 5.5 blocks
    assert make(odd)
    (found,) = refused(odd, topology=Topology(tp_size=2)).refusals
    assert "multiples of 128" in found.limit
    assert found.remedy == "use --ep-size 2"
    assert make(odd, topology=Topology(tp_size=2, ep_size=2))


def test_a_spec_that_no_model_can_have():
    assert the_refusal(refused(replace(SPEC, top_k=65)), "layer").asked == "top-65 of 64 experts"
    assert the_refusal(refused(replace(NVFP4, hidden_size=1000)), "layer").asked == "hidden size 1000"
