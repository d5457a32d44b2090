"""Halves of a decoder layer in one call against the same written out in torch, and where they are called."""

import copy

import pytest
import torch
from torch.nn import functional as F

from tests.kernels.cpu.test_experts import SWIGLU, layer, weights
from turnout.kernels.cpu import attention, decoder_layer, recurrent_layer
from turnout.kernels.cpu.decoder_layer import AttentionHalf, ExpertsHalf
from turnout.models.blocks import rotate
from turnout.moe.reference import experts_reference
from turnout.moe.routing import route
from turnout.moe.spec import Activation, Routing

H, HEADS, KV_HEADS, D, PAGE = 48, 6, 2, 32, 32
EPS = 1e-6
TOKENS = 32


def normed(x, gain):
    return x / (x.double().square().mean(-1, keepdim=True) + EPS).sqrt().float() * gain


@pytest.fixture(params=[1, 3])
def threads(request, monkeypatch):
    """How many share each call, however little it computes."""
    for module in (decoder_layer, recurrent_layer):
        monkeypatch.setattr(module, "threads_for", lambda multiplications: request.param)


def attention_layer(sinks: bool, head_norm: bool, gate: bool = False):
    given = {
        "qkv_XH": torch.randn((HEADS + 2 * KV_HEADS) * D, H) / H**0.5,
        "head_gain_GD": torch.randn(HEADS + KV_HEADS, D) if head_norm else None,
        "out_HY": torch.randn(H, HEADS * D) / (HEADS * D) ** 0.5,
        "sinks_H": torch.randn(HEADS) if sinks else None,
        "gate_YH": torch.randn(HEADS * D, H) / H**0.5 if gate else None,
    }
    sizes = {"num_q": HEADS, "num_kv": KV_HEADS, "head_dim": D}
    return {**given, "gain_H": torch.randn(H)}, AttentionHalf(**given, **sizes, head_eps=EPS)


def attention_in_torch(total, weights, cos, sin, scale, window):
    """Of one sequence, all of whose tokens are there."""
    heads = (normed(total, weights["gain_H"]) @ weights["qkv_XH"].T).view(len(total), -1, D)
    qk, v = heads[:, : HEADS + KV_HEADS], heads[:, HEADS + KV_HEADS :]
    if weights["head_gain_GD"] is not None:
        qk = normed(qk, weights["head_gain_GD"])
    q, k = rotate(qk, cos[:, None], sin[:, None]).split((HEADS, KV_HEADS), dim=1)
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    ages = torch.arange(len(total))[:, None] - torch.arange(len(total))
    unseen = (ages < 0) | (ages >= window) if window else ages < 0
    scores = (torch.einsum("thd,lhd->htl", q, k) * scale).masked_fill(unseen, float("-inf"))
    if (sinks := weights["sinks_H"]) is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(-1, len(total), 1)), dim=-1)
    shares = scores.softmax(-1)[..., : len(total)]
    out = torch.einsum("htl,lhd->thd", shares, v).flatten(1)
    if (gate := weights["gate_YH"]) is not None:
        out = out * (normed(total, weights["gain_H"]) @ gate.T).sigmoid()
    return out @ weights["out_HY"].T


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(
    ("window", "sinks", "head_norm", "gate"),
    [(0, False, True, False), (0, False, False, True), (40, True, True, False)],
)
def test_attention(window, sinks, head_norm, gate):
    """Two sequences, in chunks of several tokens and then one by one, through pages that held NaN."""
    torch.manual_seed(0)
    length, scale = 80, 0.2
    weights, half = attention_layer(sinks, head_norm, gate)
    x, delta = torch.randn(2, length, H), torch.randn(2, length, H)
    angles = torch.randn(length, D // 2)
    cos = torch.cat((angles.cos(), angles.cos()), -1)
    sin = torch.cat((-angles.sin(), angles.sin()), -1)
    expected = [attention_in_torch(x[i] + delta[i], weights, cos, sin, scale, window) for i in range(2)]
    table = torch.randperm(6).view(2, 3)
    storage = torch.full((KV_HEADS, 6 * PAGE * 2 * D), float("nan"))
    cache = attention.Cache(storage, table, PAGE, window=window, scale=scale)
    lengths = [10, *[1, 2, 15] * 3, 1, 15]
    assert sum(lengths) == length
    at = 0
    for count in lengths:
        these = slice(at, at + count)
        chunks = attention.Chunks([(1, at, count), (0, at, count)], HEADS // KV_HEADS, window)
        rows = [torch.cat((y[1, these], y[0, these])) for y in (x, delta)]
        found = half(
            *rows, weights["gain_H"], EPS, cos[these].repeat(2, 1), sin[these].repeat(2, 1), chunks, cache
        )
        assert found is not None
        assert torch.equal(found[0], rows[0] + rows[1])
        both = torch.cat((expected[1][these], expected[0][these]))
        torch.testing.assert_close(found[1], both, rtol=1e-4, atol=1e-5)
        at += count


def shared_expert(hidden, shared):
    """Weights of one of 32 columns. shared: "", "plain" or "gated"."""
    if not shared:
        return None
    gate_up, down = torch.randn(64, hidden) / hidden**0.5, torch.randn(hidden, 32) / 32**0.5
    return gate_up, down, torch.randn(1, hidden) / hidden**0.5 if shared == "gated" else None


def shared_in_torch(rows, weights):
    gate_up, down, token_gate = weights
    gate, up = (rows @ gate_up.T).chunk(2, dim=-1)
    out = (F.silu(gate) * up) @ down.T
    return out if token_gate is None else out * (rows @ token_gate.T).sigmoid()


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("kind", ["softmax_topk", "topk_softmax"])
@pytest.mark.parametrize(
    ("form", "activation", "biased", "shared"),
    [
        ("bfloat16", Activation(), False, ""),
        ("nvfp4", Activation(), False, "gated"),
        ("float32", SWIGLU, True, "plain"),
    ],
)
def test_experts(kind, form, activation, biased, shared):
    torch.manual_seed(1)
    experts, routing, k = weights(form, activation, biased), Routing(kind=kind, scaling_factor=1.5), 3
    hidden, count = experts.w13.shape[2], experts.num_experts
    router, gain = torch.randn(count, hidden) / hidden**0.5, torch.randn(hidden)
    counts = torch.zeros(count, dtype=torch.int64)
    more = shared_expert(hidden, shared)
    half = ExpertsHalf(
        layer(experts, activation),
        router_EH=router,
        counts_E=counts,
        top_k=k,
        of_all=kind == "softmax_topk",
        renormalize=routing.renormalize,
        scaling=routing.scaling_factor,
        first=0,
        shared=more,
    )
    chosen = torch.zeros(count, dtype=torch.int64)
    for tokens in (1, 7, TOKENS):
        x, delta = torch.randn(tokens, hidden), torch.randn(tokens, hidden)
        for added in (None, delta):
            total = x if added is None else x + added
            found = half(x, added, gain, EPS)
            assert found is not None
            assert torch.equal(found[0], total)
            rows = normed(total, gain)
            ids, shares = route(rows @ router.T, routing, k)
            chosen += ids.flatten().bincount(minlength=count)
            expected = experts_reference(rows, ids, shares, experts, activation)
            if more is not None:
                expected = expected + shared_in_torch(rows, more)
            torch.testing.assert_close(found[1], expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(counts, chosen)


def test_a_token_gets_the_same_bits_in_any_batch():
    torch.manual_seed(2)
    experts = weights("bfloat16", Activation(), False)
    hidden = experts.w13.shape[2]
    half = ExpertsHalf(
        layer(experts, Activation()),
        router_EH=torch.randn(experts.num_experts, hidden),
        counts_E=torch.zeros(experts.num_experts, dtype=torch.int64),
        top_k=2,
        of_all=True,
        renormalize=True,
        scaling=1.0,
        first=0,
    )
    x, gain = torch.randn(TOKENS, hidden), torch.randn(hidden)
    _, whole = half(x, None, gain, EPS)
    for cut in (1, 5, 17):
        parts = [half(part, None, gain, EPS)[1] for part in x.split(cut)]
        assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("outputs", [1, 5, 16, 40])
def test_dots(outputs):
    """Products with a matrix as torch keeps it; other rows change no bit."""
    torch.manual_seed(3)
    x, weight = torch.randn(TOKENS, 48), torch.randn(outputs, 48)
    found = decoder_layer.linear(x, weight)
    torch.testing.assert_close(found, F.linear(x.double(), weight.double()).float(), rtol=1e-5, atol=1e-5)
    alone = torch.cat([decoder_layer.linear(row, weight) for row in x.split(1)])
    assert torch.equal(alone, found)


def test_a_copy_reads_weights_of_its_own():
    """As of a layer that lies in memory that ranks share: what it was copied from is freed."""
    torch.manual_seed(4)
    weights, half = attention_layer(True, True)
    mine, theirs = copy.deepcopy((weights, half)), (weights, half)
    table, storage = torch.arange(1).view(1, 1), torch.zeros(KV_HEADS, PAGE * 2 * D)
    cache = attention.Cache(storage, table, PAGE, window=0, scale=1.0)
    chunks = attention.Chunks([(0, 0, 5)], HEADS // KV_HEADS)
    x, (cos, sin) = torch.randn(5, H), torch.randn(2, 5, D)

    def run(weights, half):
        return half(x, None, weights["gain_H"], EPS, cos, sin, chunks, cache)[1]

    expected = run(*theirs)
    for tensor in weights.values():
        if tensor is not None:
            tensor.fill_(float("nan"))
    assert run(*theirs).isnan().all()
    assert torch.equal(run(*mine), expected)


def test_steps_that_are_not_one_call(monkeypatch):
    """Many tokens, and none."""
    weights, half = attention_layer(False, True)
    table = torch.arange(8).view(1, 8)
    storage = torch.zeros(KV_HEADS, 8 * PAGE * 2 * D)
    cache = attention.Cache(storage, table, PAGE, window=0, scale=1.0)

    def given(count: int):
        chunks = attention.Chunks([(0, 0, count)] if count else [], HEADS // KV_HEADS)
        cos, sin = torch.randn(2, count, D)
        return torch.randn(count, H), None, weights["gain_H"], EPS, cos, sin, chunks, cache

    dense = sum(weights[name].numel() for name in ("qkv_XH", "out_HY"))
    assert half(*given(0)) is None
    monkeypatch.setattr(decoder_layer, "FEW_MULTIPLICATIONS", 20 * dense)  # attention's own do not count
    assert half(*given(20)) is not None
    assert half(*given(21)) is None
    monkeypatch.setattr(decoder_layer, "FEW_MULTIPLICATIONS", 1)
    assert half(*given(20)) is None
    assert half(*given(2)) is not None
