"""Routers against transformers' own."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from turnout.moe.routing import Router, route
from turnout.moe.spec import Routing

T, H, E, K = 33, 24, 16, 4


def randomize(module: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.copy_(torch.randn_like(tensor))
    return module


def by_expert(ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The order of a token's experts means nothing."""
    ids_TK, order = ids_TK.long().sort(dim=-1)
    return ids_TK, weights_TK.gather(1, order)


def assert_same(ours, theirs) -> None:
    (ids, weights), (ids_ref, weights_ref) = by_expert(*ours), by_expert(*theirs)
    assert ours[0].dtype == torch.int32
    assert ours[1].dtype == torch.float32
    assert torch.equal(ids, ids_ref)
    torch.testing.assert_close(weights, weights_ref, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(
    ("model_type", "router"), [("qwen2_moe", Qwen2MoeTopKRouter), ("qwen3_moe", Qwen3MoeTopKRouter)]
)
def test_softmax_then_topk(model_type, router, renormalize):
    config = AutoConfig.for_model(
        model_type, hidden_size=H, num_experts=E, num_experts_per_tok=K, norm_topk_prob=renormalize
    )
    logits, weights, ids = randomize(router(config))(torch.randn(T, H))
    routing = Routing(kind="softmax_topk", renormalize=renormalize)
    assert_same(route(logits, routing, K), (ids, weights))


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(("groups", "kept"), [(1, 1), (4, 2), (8, 3)])
def test_sigmoid_with_groups_and_correction_bias(groups, kept, renormalize):
    config = AutoConfig.for_model(
        "deepseek_v3",
        hidden_size=H,
        n_routed_experts=E,
        num_experts_per_tok=K,
        n_group=groups,
        topk_group=kept,
        norm_topk_prob=renormalize,
        routed_scaling_factor=2.5,
    )
    router = randomize(DeepseekV3TopkRouter(config))
    logits, weights, ids = router(torch.randn(T, H))
    routing = Routing(
        kind="sigmoid_topk", renormalize=renormalize, n_group=groups, topk_group=kept, scaling_factor=2.5
    )
    ours = route(logits, routing, K, router.e_score_correction_bias)
    assert_same(ours, (ids, weights))
    unbiased = route(logits, routing, K)
    assert not torch.equal(by_expert(*unbiased)[0], by_expert(*ours)[0]), "the bias must have moved a choice"


def test_topk_then_softmax():
    config = AutoConfig.for_model("gpt_oss", hidden_size=H, num_local_experts=E, num_experts_per_tok=K)
    logits, weights, ids = randomize(GptOssTopKRouter(config))(torch.randn(T, H))
    assert_same(route(logits, Routing(kind="topk_softmax"), K), (ids, weights))


@pytest.mark.parametrize("kind", ["softmax_topk", "sigmoid_topk", "topk_softmax"])
def test_low_precision_logits_are_scored_in_float32(kind):
    logits = torch.randn(T, E, generator=torch.Generator().manual_seed(1)).bfloat16()
    routing = Routing(kind=kind)
    assert all(map(torch.equal, route(logits, routing, K), route(logits.float(), routing, K)))


@pytest.mark.parametrize("kind", ["softmax_topk", "sigmoid_topk", "topk_softmax"])
def test_no_tokens(kind):
    routing = Routing(kind=kind, n_group=4, topk_group=2)
    ids, weights = route(torch.empty(0, E), routing, K)
    assert ids.shape == weights.shape == (0, K)


def test_padding_is_named_and_not_counted():
    torch.manual_seed(0)
    logits, real = torch.randn(T, E), torch.rand(T) < 0.5
    counts = torch.ones(E, dtype=torch.int64)
    routing = Routing(kind="softmax_topk", renormalize=True)
    router = Router(routing, num_experts=E, top_k=K, device=logits.device)
    ids, weights = router(logits, real, counts)
    wanted = route(logits, routing, K)
    assert torch.equal(ids[real], wanted[0][real])
    torch.testing.assert_close(weights[real], wanted[1][real], rtol=1e-6, atol=1e-7)
    assert (ids[~real] == -1).all()
    assert not weights[~real].any()
    assert torch.equal(counts, 1 + torch.bincount(ids[real].flatten().long(), minlength=E))
