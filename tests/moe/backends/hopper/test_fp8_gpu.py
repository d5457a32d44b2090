"""FP8 on a GPU at sizes that the matrix does not reach: many tokens per expert, and wide layers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.moe.build import expert_slice, make_experts, make_plan, make_spec
from turnout.moe.accuracy import BOUNDS, relative_error
from turnout.moe.backends.hopper.kernels import Fp8Sorted
from turnout.moe.batch import Hidden, TokensBatch
from turnout.moe.capabilities.declared import RUNNERS
from turnout.moe.reference import experts_reference

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("activation", ["silu", "swiglu", "relu2"])
@pytest.mark.parametrize("held", [(0, 4), (2, 2)])
@pytest.mark.parametrize("tokens", [20, 300, 1111])
def test_rows_sorted_by_expert(activation: str, held: tuple[int, int], tokens: int):
    spec = make_spec(activation, "fp8", hidden_size=256, intermediate_size=256, num_experts=4)
    plan = make_plan(
        spec,
        runner="hopper",
        activation_format="fp8",
        weight_storage="packed",
        compute_dtype="bfloat16",
        first=held[0],
        count=held[1],
    )
    plan = replace(plan, prefill=replace(plan.prefill, max_tokens=2048))
    experts = expert_slice(make_experts(spec), *held)
    runner = RUNNERS.load("hopper")(spec, plan, torch.device("cuda"))
    runner.prepare(experts)
    draw = torch.Generator().manual_seed(tokens)
    x_TH = torch.randn(tokens, 256, generator=draw).bfloat16()
    weights_TK, ids_TK = torch.rand(tokens, 4, generator=draw).topk(2)
    ids_TK[::7] = -1  # padding
    weights_TK[::7] = 0
    batch = TokensBatch(
        hidden=Hidden(data=x_TH.cuda()), topk_ids=ids_TK.int().cuda(), topk_weights=weights_TK.cuda()
    )
    assert isinstance(runner._tiles(tokens).first, Fp8Sorted) == (tokens > 24)
    out_TH = runner(batch)
    assert torch.equal(out_TH, runner(batch))
    wanted_TH = experts_reference(
        x_TH.float(), ids_TK, weights_TK, experts, spec.activation, activation_format="fp8"
    )
    assert relative_error(out_TH.float().cpu(), wanted_TH) < BOUNDS["fp8", "bfloat16"]
    assert not out_TH[::7].any()


@pytest.mark.parametrize("tokens", [1, 3, 9, 40])
@pytest.mark.parametrize("hidden", [640, 8448])
def test_few_tokens(hidden: int, tokens: int):
    """Alone, so that programs quantise what they multiply, if it fits, and sorted; with rows of zeros."""
    spec = make_spec("swiglu", "fp8", hidden_size=hidden, intermediate_size=128, num_experts=8)
    plan = make_plan(
        spec,
        runner="hopper",
        activation_format="fp8",
        weight_storage="packed",
        compute_dtype="bfloat16",
        first=2,
        count=4,
    )
    experts = expert_slice(make_experts(spec), 2, 4)
    runner = RUNNERS.load("hopper")(spec, plan, torch.device("cuda"))
    runner.prepare(experts)
    assert runner.shape.unsorted(tokens) == (tokens == 1)
    config = runner._tiles(tokens).first
    assert config.quantizes(hidden, first=True, unsorted=tokens == 1) == (tokens == 1 and hidden < 8192)
    draw = torch.Generator().manual_seed(tokens)
    x_TH = torch.randn(tokens, hidden, generator=draw).bfloat16()
    x_TH[1::4] = 0
    weights_TK, ids_TK = torch.rand(tokens, 8, generator=draw).topk(2)
    batch = TokensBatch(
        hidden=Hidden(data=x_TH.cuda()), topk_ids=ids_TK.int().cuda(), topk_weights=weights_TK.cuda()
    )
    out_TH = runner(batch)
    assert torch.equal(out_TH, runner(batch))
    wanted_TH = experts_reference(
        x_TH.float(), ids_TK, weights_TK, experts, spec.activation, activation_format="fp8"
    )
    assert relative_error(out_TH.float().cpu(), wanted_TH) < BOUNDS["fp8", "bfloat16"]
    # The same bits as of each token alone: quantised in the GEMM there, next to the sort here.
    for t in range(min(tokens, 3)):
        alone = TokensBatch(
            hidden=Hidden(data=batch.hidden.data[t : t + 1]),
            topk_ids=batch.topk_ids[t : t + 1],
            topk_weights=batch.topk_weights[t : t + 1],
        )
        assert torch.equal(runner(alone)[0], out_TH[t])
