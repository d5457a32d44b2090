"""The parts of a layer against transformers' and against their formulas in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm

from turnout.models.attention import WholeNorm
from turnout.models.blocks import GatedMLP, Norm
from turnout.parallel.groups import SINGLE_RANK

EPS = 1e-6


def exact_norm(x: Tensor, weight: Tensor) -> Tensor:
    x, weight = x.double(), weight.double()
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


@pytest.mark.parametrize("size", [1e-30, 1e-6, 1e-3, 1.0, 1e4, 1e15])
def test_norm_at_every_magnitude(size: float) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(5, 64) * size, torch.randn(64)
    torch.testing.assert_close(Norm(weight, EPS)(x).double(), exact_norm(x, weight), rtol=2e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_norm_in_half_precision_is_no_worse_than_transformers(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = (3 * torch.randn(200, 64)).to(dtype), torch.randn(64).to(dtype)
    theirs = Qwen3MoeRMSNorm(64, eps=EPS).to(dtype)
    theirs.weight.data = weight
    ours, expected = Norm(weight, EPS)(x), exact_norm(x, weight)
    assert ours.dtype == dtype
    with torch.no_grad():
        assert (ours - expected).abs().max() <= (theirs(x) - expected).abs().max()


def test_norm_with_a_weight_per_head() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(7, 3, 16), torch.randn(3, 16)
    heads = [exact_norm(x[:, h], weight[h]) for h in range(3)]
    torch.testing.assert_close(Norm(weight, EPS)(x).double(), torch.stack(heads, 1), rtol=2e-6, atol=0)


@pytest.mark.parametrize("rows", [0, 1, 7])
def test_norm_of_all_query_heads_and_of_all_key_heads(rows: int) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(rows, 6, 16), torch.randn(6, 16)
    norm = WholeNorm(weight, EPS, num_q=4, total_q=4, total_k=2, copies=1, group=SINGLE_RANK.attention_tp)
    whole = [exact_norm(x[:, h].flatten(1), weight[h].flatten()) for h in (slice(4), slice(4, None))]
    expected = torch.cat(whole, dim=1).view(rows, 6, 16)
    torch.testing.assert_close(norm(x).double(), expected, rtol=2e-6, atol=0)


def test_norm_of_zeros_and_of_nothing() -> None:
    norm = Norm(torch.ones(64), EPS)
    assert torch.equal(norm(torch.zeros(2, 64)), torch.zeros(2, 64))
    assert norm(torch.empty(0, 64)).shape == (0, 64)


def test_norm_does_not_depend_on_the_batch() -> None:
    torch.manual_seed(0)
    x, norm = torch.randn(33, 250), Norm(torch.randn(250), EPS)
    assert torch.equal(norm(x), torch.cat([norm(row) for row in x.split(1)]))


def test_gated_mlp_and_shared_expert() -> None:
    torch.manual_seed(0)
    x, gate, up, down, own = (torch.randn(*s) for s in ((4, 8), (6, 8), (6, 8), (8, 6), (1, 8)))
    expected = F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
    mlp = GatedMLP(torch.cat((gate, up)), down)
    torch.testing.assert_close(mlp(x), expected)
    shared = GatedMLP(torch.cat((gate, up)), down, token_gate=own)
    torch.testing.assert_close(shared(x), expected * torch.sigmoid(x @ own[0])[:, None])
