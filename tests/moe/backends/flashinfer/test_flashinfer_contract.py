"""What the Blackwell runners hand to FlashInfer, decoded and computed, against the oracle.

No Blackwell is at hand: tests/moe/backends/flashinfer/flashinfer_contract.py says what stands in for it, and
what it checks. Errors planted in what is handed over must show.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.moe.backends.flashinfer.flashinfer_compile import ARCHITECTURE, Compiling
from tests.moe.backends.flashinfer.flashinfer_contract import Broken, Launches, library
from tests.moe.batched_dispatch import BatchedDispatch
from tests.moe.build import ACTIVATIONS, expert_slice, make_experts, make_setup
from turnout.formats import layouts, nvfp4
from turnout.formats.experts import ExpertWeights, InputScales, shard
from turnout.moe.backends.flashinfer import weights_blackwell
from turnout.moe.backends.local.dispatcher import NoDispatch
from turnout.moe.batch import ExpertsBatch, Hidden, TokensBatch
from turnout.moe.capabilities.declared import RUNNERS
from turnout.moe.plan import MoEPlan, PhasePlan
from turnout.moe.reference import experts_reference
from turnout.moe.spec import MoESpec

CPU = torch.device("cpu")
BOUND = 1e-3  # of what is computed in float32
ROUNDED = 4e-3  # of the same in bf16
FLIPPED = 5e-2  # where bf16 between the GEMMs tips some values over to the next e2m1
TOKENS = ("flashinfer_cutedsl", "flashinfer_trtllm")


def spec_of(activation: str = "silu", **sizes: int) -> MoESpec:
    given = {"hidden_size": 256, "intermediate_size": 128, "num_experts": 8, "top_k": 3} | sizes
    return MoESpec(activation=ACTIVATIONS[activation], format="nvfp4", quantized_activations=True, **given)


def plan_of(runner: str, experts: ExpertWeights, layouts: tuple[str, str], activation: str) -> MoEPlan:
    prefill, decode = (
        PhasePlan(
            phase=phase,
            runner=runner,
            dispatcher="none",
            layout=layout,
            wire_format="bf16",
            reduce="none",
            max_tokens=64,
        )
        for phase, layout in zip(("prefill", "decode"), layouts, strict=True)
    )
    return MoEPlan(
        prefill=prefill,
        decode=decode,
        activation_format=activation,
        weight_storage="packed",
        compute_dtype="bfloat16",
        first_expert=experts.first_expert,
        num_local_experts=experts.num_local_experts,
        weight_bytes=0,
        workspace_bytes=0,
        dispatch_bytes=0,
    )


def made(
    name: str,
    spec: MoESpec,
    experts: ExpertWeights,
    layouts: tuple[str, str] = ("tokens", "tokens"),
    activation: str = "nvfp4",
) -> Any:
    with library():
        runner = RUNNERS.load(name)(spec, plan_of(name, experts, layouts, activation), CPU)
        runner.prepare(experts)
    return runner


def run(runner: Any, batch: TokensBatch | ExpertsBatch) -> tuple[Tensor, Launches]:
    with library() as launches:
        return runner(batch), launches


def tokens_of(spec: MoESpec, T: int, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """x, ids and weights; the first token is padding where there are several."""
    draw = torch.Generator().manual_seed(seed)
    x_TH = torch.randn(T, spec.hidden_size, generator=draw).bfloat16()
    ids_TK = torch.rand(T, spec.num_experts, generator=draw).topk(spec.top_k).indices.int()
    weights_TK = torch.rand(T, spec.top_k, generator=draw)
    if T > 1:
        ids_TK[0], weights_TK[0] = -1, 0
    return x_TH, ids_TK, weights_TK


def on_the_wire(x: Tensor, experts: ExpertWeights) -> Hidden:
    assert experts.input_scales is not None
    scale = experts.input_scales.w13.max()
    codes, scales = nvfp4.quantize_activation(x, scale)
    return Hidden(data=codes, format="nvfp4", scale=scales, global_scale=scale)


def error(got: Tensor | None, expected: Tensor) -> float:
    assert got is not None
    return ((got.float() - expected).norm() / expected.norm()).item()


# Layout "tokens"


@pytest.mark.parametrize("wire", ["bf16", "nvfp4"])
@pytest.mark.parametrize("T", [1, 17, 64])
@pytest.mark.parametrize("name", TOKENS)
def test_tokens(name, T, wire):
    spec = spec_of()
    experts = make_experts(spec)
    x, ids, weights = tokens_of(spec, T)
    hidden = Hidden(data=x) if wire == "bf16" else on_the_wire(x, experts)
    batch = TokensBatch(hidden=hidden, topk_ids=ids, topk_weights=weights)
    out, launches = run(made(name, spec, experts), batch)
    expected = experts_reference(x, ids, weights, experts, spec.activation, activation_format="nvfp4")
    assert error(launches.result, expected) < BOUND
    assert out.dtype == torch.bfloat16
    assert error(out, expected) < ROUNDED
    assert ("fp4_quantize" in launches.names) == (wire == "bf16")


@pytest.mark.parametrize("activation", ["swiglu", "swiglu-limit", "relu2"])
def test_activations_of_cutedsl(activation):
    spec = spec_of(activation)
    experts = make_experts(spec)
    x, ids, weights = tokens_of(spec, 9)
    batch = TokensBatch(hidden=Hidden(data=x), topk_ids=ids, topk_weights=weights)
    _, launches = run(made("flashinfer_cutedsl", spec, experts), batch)
    expected = experts_reference(x, ids, weights, experts, spec.activation, activation_format="nvfp4")
    assert error(launches.result, expected) < BOUND


@pytest.mark.parametrize("wire", ["bf16", "nvfp4"])
@pytest.mark.parametrize("activation", ["silu", "relu2"])
def test_weights_alone_may_be_fp4(activation, wire):
    spec = spec_of(activation)
    experts = make_experts(spec)
    x, ids, weights = tokens_of(spec, 9)
    hidden = Hidden(data=x) if wire == "bf16" else on_the_wire(x, experts)
    batch = TokensBatch(hidden=hidden, topk_ids=ids, topk_weights=weights)
    runner = made("flashinfer_cutedsl", spec, replace(experts, input_scales=None), activation="bf16")
    _, launches = run(runner, batch)
    if wire == "nvfp4":
        x = nvfp4.decode(hidden.data, hidden.scale, hidden.global_scale).bfloat16()
    expected = experts_reference(x, ids, weights, experts, spec.activation)
    assert launches.names == ["cutedsl_w4a16"]
    assert error(launches.result, expected) < BOUND


@pytest.mark.parametrize("name", TOKENS)
def test_slices_and_shards_add_up_to_their_own_sums(name):
    spec = spec_of()
    whole = make_experts(spec)
    x, ids, weights = tokens_of(spec, 12)
    batch = TokensBatch(hidden=Hidden(data=x), topk_ids=ids, topk_weights=weights)
    parts = [expert_slice(whole, 0, 4), expert_slice(whole, 4, 4), expert_slice(whole, 6, 2)]
    for part in [*parts, shard(whole, 0, 2), shard(parts[1], 1, 2)]:
        _, launches = run(made(name, spec, part), batch)
        expected = experts_reference(x, ids, weights, part, spec.activation, activation_format="nvfp4")
        assert error(launches.result, expected) < BOUND


@pytest.mark.parametrize("name", TOKENS)
def test_no_tokens_launch_nothing_and_too_many_are_refused(name):
    spec = spec_of()
    runner = made(name, spec, make_experts(spec))
    x, ids, weights = tokens_of(spec, 65)
    out, launches = run(
        runner, TokensBatch(hidden=Hidden(data=x[:0]), topk_ids=ids[:0], topk_weights=weights[:0])
    )
    assert out.shape == (0, 256)
    assert launches.names == []
    with pytest.raises(ValueError, match="65 tokens, but the plan bounds them by 64"):
        run(runner, TokensBatch(hidden=Hidden(data=x), topk_ids=ids, topk_weights=weights))


# Layout "batched_experts"


def batched_of(spec: MoESpec, counts: list[int], seed: int = 2) -> tuple[Tensor, Tensor]:
    """x [E, C, H] with NaN beyond the counts, as uninitialised memory may be; counts [E]."""
    draw = torch.Generator().manual_seed(seed)
    x_ECH = torch.randn(len(counts), max(counts), spec.hidden_size, generator=draw).bfloat16()
    for e, count in enumerate(counts):
        x_ECH[e, count:] = torch.nan
    return x_ECH, torch.tensor(counts, dtype=torch.int32)


def batched_reference(x_ECH: Tensor, counts_E: Tensor, experts: ExpertWeights, spec: MoESpec) -> Tensor:
    out_ECH = torch.zeros(x_ECH.shape)
    for e, count in enumerate(counts_E.tolist()):
        ids = torch.full((count, 1), experts.first_expert + e, dtype=torch.int32)
        out_ECH[e, :count] = experts_reference(
            x_ECH[e, :count], ids, torch.ones(count, 1), experts, spec.activation,
            activation_format="nvfp4",
        )  # fmt: skip
    return out_ECH


@pytest.mark.parametrize("first", [0, 4])
@pytest.mark.parametrize("activation", ["silu", "swiglu", "relu2"])
def test_batched_experts(activation, first):
    spec = spec_of(activation)
    experts = expert_slice(make_experts(spec), first, 4)
    x_ECH, counts_E = batched_of(spec, [5, 0, 150, 1])
    runner = made("flashinfer_cutedsl", spec, experts, ("batched_experts", "batched_experts"))
    out, launches = run(runner, ExpertsBatch(hidden=Hidden(data=x_ECH), counts=counts_E))
    expected = batched_reference(x_ECH, counts_E, experts, spec)
    assert error(launches.result, expected) < (BOUND if activation == "silu" else FLIPPED)
    assert error(out, expected) < (ROUNDED if activation == "silu" else FLIPPED)
    assert not out[1].any()
    assert not out[0, 5:].any()


def test_rows_by_expert_quantized_before_the_wire():
    """They carry the scale that all experts share, however unlike their own it is."""
    spec = spec_of()
    whole = make_experts(spec)
    assert whole.input_scales is not None
    shared = InputScales(w13=whole.input_scales.w13.max().expand(8), w2=whole.input_scales.w2)
    experts = expert_slice(whole, 2, 4)
    x_ECH, counts_E = batched_of(spec, [3, 130, 0, 7])
    batch = ExpertsBatch(hidden=on_the_wire(x_ECH.nan_to_num(), experts), counts=counts_E)
    runner = made("flashinfer_cutedsl", spec, experts, ("batched_experts", "batched_experts"))
    _, launches = run(runner, batch)
    expected = batched_reference(x_ECH, counts_E, replace(experts, input_scales=shared), spec)
    assert error(launches.result, expected) < BOUND
    assert launches.names[0] == "block_scale_interleave"


def test_empty_batches_by_expert_launch_nothing():
    spec = spec_of()
    runner = made("flashinfer_cutedsl", spec, make_experts(spec), ("batched_experts", "batched_experts"))
    empty = ExpertsBatch(
        hidden=Hidden(data=torch.empty(8, 0, 256, dtype=torch.bfloat16)),
        counts=torch.zeros(8, dtype=torch.int32),
    )
    out, launches = run(runner, empty)
    assert out.shape == (8, 0, 256)
    assert launches.names == []


def test_one_runner_takes_both_layouts_with_weights_of_their_own():
    spec = spec_of()
    experts = make_experts(spec)
    runner = made("flashinfer_cutedsl", spec, experts, ("tokens", "batched_experts"))
    x, ids, weights = tokens_of(spec, 5)
    x_ECH, counts_E = batched_of(spec, [2, 0, 1, 4, 0, 0, 3, 1])
    tokens = TokensBatch(hidden=Hidden(data=x), topk_ids=ids, topk_weights=weights)
    batched = ExpertsBatch(hidden=Hidden(data=x_ECH), counts=counts_E)
    expected = experts_reference(x, ids, weights, experts, spec.activation, activation_format="nvfp4")
    for _ in range(2):
        assert error(run(runner, tokens)[1].result, expected) < BOUND
        assert (
            error(run(runner, batched)[1].result, batched_reference(x_ECH, counts_E, experts, spec)) < BOUND
        )


# Behind dispatchers


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(
    ("name", "dispatch"),
    [
        ("flashinfer_cutedsl", NoDispatch),
        ("flashinfer_cutedsl", BatchedDispatch),
        ("flashinfer_trtllm", NoDispatch),
    ],
)
def test_ranks_sum_up_behind_a_dispatcher_of_either_layout(name, dispatch, ranks):
    spec = spec_of()
    whole = make_experts(spec)
    x, ids, weights = tokens_of(spec, 20)
    layout = dispatch.capability.layout
    out = torch.zeros(20, 256)
    for rank in range(ranks):
        part = expert_slice(whole, 8 // ranks * rank, 8 // ranks)
        runner = made(name, spec, part, (layout, layout))
        plan = plan_of(name, part, (layout, layout), "nvfp4")
        dispatcher = dispatch(make_setup(spec, plan))
        batch, state = dispatcher.dispatch(x, ids, weights, (20,))
        out += dispatcher.combine(run(runner, batch)[0], state).float()
    expected = torch.zeros(20, 256)
    for rank in range(ranks):
        part = expert_slice(whole, 8 // ranks * rank, 8 // ranks)
        expected += experts_reference(x, ids, weights, part, spec.activation, activation_format="nvfp4")
    assert error(out, expected) < ROUNDED


# Weights


CASES = [
    ("flashinfer_cutedsl", "tokens"),
    ("flashinfer_cutedsl", "batched_experts"),
    ("flashinfer_trtllm", "tokens"),
]


def held(runner: Any) -> list[Any]:
    """Everything that holds tensors of a runner: (w13, w2, scales) of each of its routes."""
    if hasattr(runner, "_routes"):
        return [(w.w13, w.w2, w.scales) for w in (route._weights for route in runner._routes.values())]
    return [(runner._w13, runner._w2, runner._scales)]


def storage(runner: Any) -> list[Tensor]:
    matrices = [m for w13, w2, _ in held(runner) for m in (w13, w2)]
    scales = [scale for *_, scales in held(runner) for scale in scales.values()]
    return [t for m in matrices for t in (m.codes, m.swizzled)] + scales


def outcome(runner: Any, layout: str, spec: MoESpec, experts: ExpertWeights) -> float:
    """How far a batch of `layout` comes out from the oracle."""
    if layout == "tokens":
        x, ids, weights = tokens_of(spec, 9)
        _, launches = run(runner, TokensBatch(hidden=Hidden(data=x), topk_ids=ids, topk_weights=weights))
        expected = experts_reference(x, ids, weights, experts, spec.activation, activation_format="nvfp4")
    else:
        x_ECH, counts_E = batched_of(spec, [2, 0, 1, 4, 0, 0, 3, 1])
        _, launches = run(runner, ExpertsBatch(hidden=Hidden(data=x_ECH), counts=counts_E))
        expected = batched_reference(x_ECH, counts_E, experts, spec)
    return error(launches.result, expected)


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_new_weights_move_into_the_same_storage(name, layout):
    spec = spec_of()
    others = make_experts(spec, seed=5)
    with torch.inference_mode():  # as a loader may
        experts = make_experts(spec)
        runner = made(name, spec, experts, (layout, layout))
    before = [t.data_ptr() for t in storage(runner)]
    given = [t.clone() for t in (*experts.w13.parts(), *experts.w2.parts())]
    assert not any(t.is_inference() for t in storage(runner))
    with library():
        runner.update(others)
    assert [t.data_ptr() for t in storage(runner)] == before
    assert outcome(runner, layout, spec, others) < BOUND
    for mine, then in zip((*experts.w13.parts(), *experts.w2.parts()), given, strict=True):
        assert torch.equal(mine.view(torch.uint8), then.view(torch.uint8))


def test_w4a16_shares_no_storage_with_what_it_was_given():
    spec = spec_of()
    experts = make_experts(spec)
    given = {t.data_ptr() for t in (*experts.w13.parts(), *experts.w2.parts())}
    runner = made("flashinfer_cutedsl", spec, experts, activation="bf16")
    assert not given & {t.data_ptr() for t in storage(runner)}


def halves_swapped(runner: Any, experts: ExpertWeights) -> None:
    w13 = experts.w13
    swapped = replace(
        w13,
        data=layouts.swap_halves(w13.data),
        scale=layouts.swap_halves(w13.scale.view(torch.uint8)).view(torch.float8_e4m3fn),
    )
    for mine, _, _ in held(runner):
        order = {True: weights_blackwell.shuffled_up_gate, False: layouts.interleave_up_gate}[
            hasattr(runner, "_w13")
        ]
        if "alpha1_wire" in held(runner)[0][2]:
            order = weights_blackwell.as_they_are
        mine.load(weights_blackwell.Nvfp4Matrix(swapped, order, CPU))


def scales_unswizzled(runner: Any, experts: ExpertWeights) -> None:
    for w13, _, _ in held(runner):
        w13.swizzled.copy_(experts.w13.scale.view(torch.uint8).reshape(w13.swizzled.shape))


def scales_of_other_rows(runner: Any, experts: ExpertWeights) -> None:
    for _, w2, _ in held(runner):
        w2.swizzled.copy_(w2.swizzled.roll(1, dims=3))


def alphas_of_other_experts(runner: Any, experts: ExpertWeights) -> None:
    for *_, scales in held(runner):
        for name in ("alpha1", "gate"):
            if name in scales:
                scales[name].copy_(scales[name].roll(1))


def reciprocal(name: str) -> Callable[[Any, ExpertWeights], None]:
    def plant(runner: Any, experts: ExpertWeights) -> None:
        for *_, scales in held(runner):
            if name in scales:
                scales[name].copy_(1 / scales[name])
            else:
                scales["linear"].copy_(scales["gate"] ** 2 / scales["linear"])

    plant.__name__ = f"reciprocal_{name}"
    return plant


PLANTED = [
    halves_swapped,
    scales_unswizzled,
    scales_of_other_rows,
    alphas_of_other_experts,
    reciprocal("a1"),
    reciprocal("a2"),
]


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
@pytest.mark.parametrize(("name", "layout"), CASES)
def test_planted_errors_show(name, layout, plant):
    spec = spec_of()
    experts = make_experts(spec)
    runner = made(name, spec, experts, (layout, layout))
    assert outcome(runner, layout, spec, experts) < BOUND
    plant(runner, experts)
    assert outcome(runner, layout, spec, experts) > 10 * BOUND


@pytest.mark.parametrize("layout", ["tokens", "batched_experts"])
def test_strides_of_scales_show(layout, monkeypatch):
    """Values and shape are right, the storage is not: kernels see the storage alone."""
    spec = spec_of()
    experts = make_experts(spec)
    runner = made("flashinfer_cutedsl", spec, experts, (layout, layout))
    view = layouts.mma_view
    monkeypatch.setattr(layouts, "mma_view", lambda swizzled: view(swizzled).contiguous())
    with pytest.raises(Broken, match="strides"):
        outcome(runner, layout, spec, experts)


def test_padding_that_is_not_translated_shows():
    spec = spec_of()
    runner = made("flashinfer_cutedsl", spec, make_experts(spec))
    runner._routes["tokens"]._spec = replace(spec, num_experts=-1)
    x, ids, weights = tokens_of(spec, 4)
    with pytest.raises(Broken, match="ids must lie"):
        run(runner, TokensBatch(hidden=Hidden(data=x), topk_ids=ids, topk_weights=weights))


# What the library can do


def kernels(hidden: int, inner: int, kind: str, mode: str) -> int:
    """In how many ways the installed library says that it can run a layer of these sizes."""
    from flashinfer import CuteDslMoEWrapper
    from flashinfer.tllm_enums import ActivationType

    def empty(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    activation = ActivationType.Relu2 if kind == "relu2" else ActivationType.Swiglu
    with library():
        moe = CuteDslMoEWrapper(
            8, 2, hidden, inner, device="cpu", quant_mode=mode, activation_type=activation.value
        )
    rows, T = inner if kind == "relu2" else 2 * inner, 17
    w1, w2 = empty(8, rows, hidden // 2), empty(8, hidden, inner // 2)
    weights = empty(T, 2, dtype=torch.float32)
    if mode == "w4a4":
        inputs = [empty(T, hidden // 2), None, None, weights, w1, None, None, None, w2]
        return len(moe._runner.get_valid_tactics(inputs, None))
    x = empty(T, hidden, dtype=torch.bfloat16)
    return len(moe._w4a16_runner.get_valid_tactics([x, None, weights, w1, None, None, w2], None))


@pytest.mark.parametrize("mode", ["w4a4", "w4a16"])
@pytest.mark.parametrize(
    ("hidden", "inner", "kind"),
    [(128, 64, "silu"), (128, 128, "relu2"), (4096, 192, "silu"), (2048, 768, "silu"), (7168, 2048, "silu")],
)
def test_sizes_that_are_declared_have_kernels(hidden, inner, kind, mode):
    declared = RUNNERS["flashinfer_cutedsl"]
    assert hidden % declared.hidden_multiple == inner % declared.intermediate_multiple == 0
    assert kernels(hidden, inner, kind, mode) > 0


@pytest.mark.parametrize(
    ("hidden", "inner", "kind"), [(64, 64, "silu"), (128, 32, "silu"), (128, 64, "relu2")]
)
def test_sizes_just_short_of_them_have_none(hidden, inner, kind):
    assert kernels(hidden, inner, kind, "w4a4") == 0


@pytest.mark.more
def test_its_kernels_compile_for_blackwell_from_our_arguments(monkeypatch):
    """Both masked GEMMs are of one size, so that one kernel does for both: compiling takes seconds."""
    monkeypatch.setenv("CUTE_DSL_ARCH", ARCHITECTURE)
    square = spec_of("relu2", intermediate_size=256)
    x, ids, weights = tokens_of(spec_of(), 5)
    x_ECH, counts_E = batched_of(square, [2, 0, 1, 4, 0, 0, 3, 1])
    for spec, batch in (
        (spec_of(), TokensBatch(hidden=Hidden(data=x), topk_ids=ids, topk_weights=weights)),
        (square, ExpertsBatch(hidden=Hidden(data=x_ECH), counts=counts_E)),
    ):
        runner = made("flashinfer_cutedsl", spec, make_experts(spec), (batch.layout, batch.layout))
        with library(Compiling) as launches:
            runner(batch)
        assert len(launches.kernels) == 2
        for kernel in launches.kernels:
            assert ARCHITECTURE.encode() in kernel.dump_to_object("kernel")
