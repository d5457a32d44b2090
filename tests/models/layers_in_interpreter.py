"""Run by test_fewer_launches.py with TRITON_INTERPRET=1: layers whose kernels do more at once; prints JSON.

Each next to itself with as many launches as there are otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from unittest.mock import patch

import torch
from torch import Tensor

from tests.kernels import interpreter
from tests.moe.build import make_experts, make_plan, make_spec
from turnout.attention.capability import Chosen
from turnout.attention.kinds import AttentionSpec, CacheGroup
from turnout.attention.paged import paged_attention
from turnout.kernels.common import fewer_launches, rows
from turnout.models.attention import Attention
from turnout.models.blocks import Norm
from turnout.models.dense import linear
from turnout.models.moe_block import MoEBlock
from turnout.moe.spec import Routing
from turnout.parallel.groups import SINGLE_RANK
from turnout.vocabulary import Phase, RoutingKind

interpreter.prepare()
torch.manual_seed(0)
PAGE, H = 4, 32


def attention_layer(*, normed: bool, sinks: bool) -> bool:
    """Decode rows of three sequences and one of padding, over a cache that has their contexts."""
    spec = AttentionSpec.full(num_heads=4, num_kv_heads=2, head_dim=16)
    layer = Attention(
        0,
        spec,
        qkv=torch.randn(8 * 16, H) * H**-0.5,
        qkv_bias=None if normed else torch.randn(8 * 16),
        out=torch.randn(H, 4 * 16) / 8,
        out_bias=None,
        qk_norm=Norm(torch.rand(6, 16) + 0.5, 1e-6) if normed else None,
        sinks=torch.randn(4) if sinks else None,
        gate=None,
        group=SINGLE_RANK.attention_tp,
        linear=linear,
    )
    layer._fused = rows  # as on CUDA
    ends = torch.tensor([70, 1, 0, 33])
    pages = torch.arange(80).view(4, 20)
    places = (ends - 1).clamp(min=0)
    slots = pages.gather(1, places[:, None] // PAGE)[:, 0] * PAGE + places % PAGE
    x, angles = torch.randn(4, H), torch.randn(4, 8)
    cos, sin = angles.cos().repeat(1, 2), torch.cat((-angles.sin(), angles.sin()), 1)
    kept, found = torch.randn(2, 81 * PAGE, 2, 16), []
    for most in (0, 4):
        paged = paged_attention(
            CacheGroup(layers=(0,), spec=spec, sharing=()),
            num_pages=80,
            page_size=PAGE,
            max_running=4,
            max_context=80,
            device=torch.device("cpu"),
            dtype=torch.float32,
            chosen=Chosen(backend="triton", prompts="triton"),
        )
        paged.layer_cache(0).copy_(kept)
        slots[2] = paged.spare_slot
        step = paged.rows(slots, pages, ends, apart=True)
        calls, whole = [], step.whole

        def seen(*given: object, whole: Callable = whole, calls: list = calls) -> Tensor | None:
            calls.append(whole(*given))
            return calls[-1]

        step.whole = seen
        with patch.object(fewer_launches, "ATTENTION_ROWS", most):
            out = layer(x, {spec.rope: (cos[:, None], sin[:, None])}, step)
        assert [call is not None for call in calls] == [most > 0]
        found.append((out, paged.layer_cache(0)[:, slots[ends > 0]]))
    return all(torch.allclose(*pair, atol=1e-5) for pair in zip(*found, strict=True))


def moe_block(kind: RoutingKind, *, real: bool | None, parts: int) -> bool:
    """One row in bfloat16: sum, norm, choice and experts."""
    spec = make_spec(hidden_size=256, intermediate_size=64, routing=Routing(kind=kind))
    router = torch.randn(8, 256).bfloat16() / 8
    block = MoEBlock(
        spec,
        make_plan(spec, compute_dtype="bfloat16"),
        router_weight=router,
        experts=make_experts(spec, dtype=torch.bfloat16),
    )
    block._router.adds_parts = True  # as on CUDA
    norm = Norm((torch.rand(256) + 0.5).bfloat16(), 1e-6)
    x, delta = torch.randn(1, 256).bfloat16(), torch.randn(max(1, parts), 1, 256)
    told = None if real is None else torch.tensor([real])
    found = []
    for most in (0, 1):
        block.reset_counts()
        given = (delta if most else delta.sum(0).bfloat16()) if parts else None
        with patch.object(fewer_launches, "ROUTING_ROWS", most):
            assert (block.choose_of_norm(x, given, norm.weight, norm.eps, told) is None) == (most == 0)
            block.reset_counts()
            found.append(block.of_norm(norm, x, given, Phase.DECODE, None, told))
        found[-1] = *found[-1], block.expert_counts.clone()
    (total, out, counts), (total_1, out_1, counts_1) = found
    near = {"rtol": 3e-2, "atol": 3e-2}
    return (
        torch.allclose(total.float(), total_1.float(), **near)
        and torch.allclose(out.float(), out_1.float(), **near)
        and torch.equal(counts, counts_1)
        and int(counts.sum()) == (0 if real is False else 2)
    )


print(
    json.dumps(
        {
            "attention": attention_layer(normed=True, sinks=False),
            "attention-sinks": attention_layer(normed=False, sinks=True),
            "softmax": moe_block(RoutingKind.SOFTMAX_TOPK, real=True, parts=0),
            "parts": moe_block(RoutingKind.SOFTMAX_TOPK, real=None, parts=3),
            "topk": moe_block(RoutingKind.TOPK_SOFTMAX, real=None, parts=1),
            "padding": moe_block(RoutingKind.SOFTMAX_TOPK, real=False, parts=2),
        }
    )
)
