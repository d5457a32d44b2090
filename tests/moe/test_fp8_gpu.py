"""FP8 on a GPU at sizes that take the kernels for many tokens per expert, which the matrix does not reach."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.moe.build import expert_slice, make_experts, make_plan, make_spec
from turnout.moe.accuracy import BOUNDS, relative_error
from turnout.moe.batch import Hidden, TokensBatch
from turnout.moe.reference import experts_reference
from turnout.registry import RUNNERS

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("activation", ["silu", "swiglu", "relu2"])
@pytest.mark.parametrize("held", [(0, 4), (2, 2)])
@pytest.mark.parametrize("tokens", [20, 300, 1111])
def test_rows_sorted_by_expert(activation: str, held: tuple[int, int], tokens: int):
    from turnout.moe.tiling.tiles import SORTED

    spec = make_spec(activation, "fp8", hidden_size=256, intermediate_size=256, num_experts=4)
    plan = make_plan(
        spec,
        runner="triton",
        activation_format="fp8",
        weight_storage="packed",
        compute_dtype="bfloat16",
        first=held[0],
        count=held[1],
    )
    plan = replace(plan, prefill=replace(plan.prefill, max_tokens=2048))
    experts = expert_slice(make_experts(spec), *held)
    runner = RUNNERS.get("triton")(spec, plan, torch.device("cuda"))
    runner.prepare(experts)
    draw = torch.Generator().manual_seed(tokens)
    x_TH = torch.randn(tokens, 256, generator=draw).bfloat16()
    weights_TK, ids_TK = torch.rand(tokens, 4, generator=draw).topk(2)
    ids_TK[::7] = -1  # padding
    weights_TK[::7] = 0
    batch = TokensBatch(
        hidden=Hidden(data=x_TH.cuda()), topk_ids=ids_TK.int().cuda(), topk_weights=weights_TK.cuda()
    )
    assert (runner._tiles(tokens) == SORTED) == (tokens > 24)
    out_TH = runner(batch)
    assert torch.equal(out_TH, runner(batch))
    wanted_TH = experts_reference(
        x_TH.float(), ids_TK, weights_TK, experts, spec.activation, activation_format="fp8"
    )
    assert relative_error(out_TH.float().cpu(), wanted_TH) < BOUNDS["fp8", "bfloat16"]
    assert not out_TH[::7].any()
