"""What runners hand to FlashInfer's `cutlass_fused_moe`, decoded and computed, against the oracle.

tests/moe/backends/flashinfer/cutlass_contract.py says what stands in for the device. On an H200:
tests/moe/backends/flashinfer/test_cutlass_gpu.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.moe.backends.flashinfer.cutlass_contract import BLACKWELL, HOPPER, Broken, library
from tests.moe.build import expert_slice, make_experts, make_plan, make_spec
from turnout.formats.experts import ExpertWeights, shard
from turnout.moe.backends.flashinfer import weights_cutlass
from turnout.moe.batch import Hidden, TokensBatch
from turnout.moe.capabilities.declared import RUNNERS
from turnout.moe.reference import experts_reference
from turnout.moe.spec import MoESpec

CPU = torch.device("cpu")
BOUND = 1e-3
RUNNER = {"mxfp4": "flashinfer_mxfp4", "bf16": "flashinfer_cutlass"}
NUMERICS = {"bf16": "bf16", "mxfp4": "bf16", "fp8": "fp8", "nvfp4": "nvfp4"}


def runner_of(spec: MoESpec, experts: ExpertWeights):
    name = RUNNER.get(spec.format, "flashinfer_cutlass")
    plan = make_plan(
        spec,
        runner=name,
        weight_storage="packed",
        activation_format=NUMERICS[spec.format],
        compute_dtype="bfloat16",
        first=experts.first_expert,
        count=experts.num_local_experts,
    )
    return RUNNERS.load(name)(spec, plan, CPU)


def batch_of(spec: MoESpec, T: int, seed: int = 1) -> TokensBatch:
    """The first token is padding."""
    draw = torch.Generator().manual_seed(seed)
    x_TH = torch.randn(T, spec.hidden_size, generator=draw).bfloat16()
    weights_TK, ids_TK = torch.rand(T, spec.num_experts, generator=draw).topk(spec.top_k)
    ids_TK[:1], weights_TK[:1] = -1, 0
    return TokensBatch(hidden=Hidden(data=x_TH), topk_ids=ids_TK.int(), topk_weights=weights_TK)


def expected(spec: MoESpec, experts: ExpertWeights, batch: TokensBatch) -> torch.Tensor:
    """The oracle with biases as the library takes them, in bf16."""
    b13, b2 = (None if b is None else b.bfloat16().float() for b in (experts.b13, experts.b2))
    return experts_reference(
        batch.hidden.data.float(),
        batch.topk_ids,
        batch.topk_weights,
        replace(experts, b13=b13, b2=b2),
        spec.activation,
        activation_format=NUMERICS[spec.format],
    )


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((got.float() - wanted).norm() / wanted.norm()).item()


def sizes(format: str) -> dict[str, int]:
    """GPT-OSS's are no multiple of 128 either."""
    return {"hidden_size": 96, "intermediate_size": 160} if format == "mxfp4" else {"intermediate_size": 128}


@pytest.mark.parametrize(
    ("format", "activation"),
    [
        ("mxfp4", "silu"),
        ("mxfp4", "swiglu"),
        ("mxfp4", "swiglu-limit"),
        ("mxfp4", "relu2"),
        ("bf16", "silu"),
        ("bf16", "swiglu"),
        ("bf16", "relu2"),
        ("fp8", "silu"),
        ("nvfp4", "silu"),
        ("nvfp4", "swiglu"),
        ("nvfp4", "relu2"),
    ],
)
@pytest.mark.parametrize("held", [(0, 8), (4, 2)], ids=["all", "slice"])
def test_what_is_handed_over_computes_the_layer(format: str, activation: str, held: tuple[int, int]):
    spec = make_spec(activation, format, **sizes(format))
    experts = expert_slice(make_experts(spec, dtype=torch.bfloat16), *held)
    runner, batch = runner_of(spec, experts), batch_of(spec, 9)
    with library(BLACKWELL if format == "nvfp4" else HOPPER) as launches:
        runner.prepare(experts)
        out_TH = runner(batch)
    wanted_TH = expected(spec, experts, batch)
    assert out_TH.shape == wanted_TH.shape
    assert out_TH.is_contiguous()
    assert error(launches.result[:, : spec.hidden_size], wanted_TH) < BOUND
    assert not out_TH[0].any()
    assert not launches.result[:, spec.hidden_size :].any()  # what pads adds nothing


def test_shards_of_experts_sum_to_them_with_each_bias_once():
    spec = make_spec("swiglu", "mxfp4", hidden_size=96, intermediate_size=128)
    whole, batch = make_experts(spec), batch_of(spec, 5)
    total_TH = torch.zeros(5, 96)
    for rank in range(2):
        part = shard(whole, rank, 2)
        runner = runner_of(spec, whole)
        with library() as launches:
            runner.prepare(part if rank == 0 else replace(part, b2=None))
            runner(batch)
        total_TH += launches.result[:, :96]
    assert error(total_TH, expected(spec, whole, batch)) < BOUND


@pytest.mark.parametrize("format", ["mxfp4", "fp8"])
def test_no_token_and_new_weights_in_the_same_storage(format: str):
    spec = make_spec("silu", format, **sizes(format))
    old, new, batch = make_experts(spec), make_experts(spec, seed=3), batch_of(spec, 4)
    runner = runner_of(spec, old)
    with library() as launches:
        runner.prepare(old)
        assert runner(batch_of(spec, 0)).shape == (0, spec.hidden_size)
        assert launches.result is None  # nothing was launched
        addresses = [t.data_ptr() for t in (runner._moe.weights.w13, *runner._moe.weights.scales)]
        runner.update(new)
        runner(batch)
    assert addresses == [t.data_ptr() for t in (runner._moe.weights.w13, *runner._moe.weights.scales)]
    assert error(launches.result[:, : spec.hidden_size], expected(spec, new, batch)) < BOUND


@pytest.mark.parametrize("mistake", ["gate first", "row-major codes", "row-major scales", "scales of others"])
def test_a_mistake_is_noticed(mistake: str, monkeypatch: pytest.MonkeyPatch):
    spec = make_spec("silu", "mxfp4")
    experts, batch = make_experts(spec), batch_of(spec, 9)
    if mistake == "gate first":
        up_gate = weights_cutlass.up_gate
        rolled = lambda x, **options: up_gate(x.roll(96, 1), **options)  # noqa: E731
        monkeypatch.setattr(weights_cutlass, "up_gate", rolled)
    elif mistake == "row-major codes":
        monkeypatch.setattr(weights_cutlass, "interleave_mxfp4", torch.clone)
    elif mistake == "row-major scales":
        monkeypatch.setattr(weights_cutlass, "fold_scales", lambda s: s.reshape(s.shape[0], -1, 16))
    else:
        fold = weights_cutlass.fold_scales
        monkeypatch.setattr(weights_cutlass, "fold_scales", lambda s: fold(s.roll(1, 0)))
    runner = runner_of(spec, experts)
    with library() as launches:
        runner.prepare(experts)
        runner(batch)
    assert error(launches.result, expected(spec, experts, batch)) > 0.1


def test_a_batch_beyond_the_plan_is_refused():
    spec = make_spec("silu", "mxfp4")
    experts = make_experts(spec)
    runner = runner_of(spec, experts)
    with library():
        runner.prepare(experts)
        with pytest.raises(ValueError, match="the plan bounds them"):
            runner(batch_of(spec, 65))


def test_what_the_library_would_reject_breaks_the_contract():
    spec = make_spec("silu", "bf16", intermediate_size=128)
    experts = make_experts(spec, dtype=torch.bfloat16)
    runner = runner_of(spec, experts)
    with library() as launches:
        runner.prepare(experts)
        launches.get_workspace_size = None
        batch = batch_of(spec, 3)
        with pytest.raises(Broken, match="ids"):
            runner(replace(batch, topk_ids=batch.topk_ids.long()))


def test_scales_are_folded_as_the_library_folds_them():
    from flashinfer.fused_moe import interleave_moe_scales_for_sm90_mixed_gemm

    scales = torch.randint(0, 256, (2, 128, 8), dtype=torch.uint8)
    assert torch.equal(weights_cutlass.fold_scales(scales), interleave_moe_scales_for_sm90_mixed_gemm(scales))
