"""Run by test_rows.py with TRITON_INTERPRET=1: the steps between products against torch; prints JSON.

In float32: the interpreter cuts off what bfloat16 does not hold.
"""

from __future__ import annotations

import json

import torch
import torch.nn.functional as F
import triton

from tests.kernels import interpreter
from turnout.kernels.common import rows
from turnout.kernels.common.gated_row import multiply_gated_row
from turnout.kernels.common.normed_row import multiply_normed_row, multiply_whole_row
from turnout.kernels.common.route import choose, choose_of_token, choose_sigmoid
from turnout.kernels.common.rows import angles, gate, gated, norm, rotate
from turnout.kernels.common.split_gemm import multiply_row
from turnout.kernels.common.split_gemm import parts as parts_of
from turnout.moe.routing import route, weigh
from turnout.moe.spec import Routing
from turnout.vocabulary import RoutingKind

interpreter.prepare()
rows.FEW = 4  # of more rows a program has several heads
torch.manual_seed(0)
results = {}


def near(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return torch.allclose(found.float(), wanted.float(), rtol=1e-5, atol=1e-5)


def norms(rows: int, size: int) -> bool:
    x, delta, weight = torch.randn(rows, size), torch.randn(rows, size), torch.randn(size)
    (same, alone), (total, both) = norm(x, weight, 1e-6), norm(x, weight, 1e-6, delta)
    good = same is x and torch.equal(total, x + delta)
    parts = torch.stack((delta, x, -2 * x))
    for found, of in ((alone, x), (both, x + delta), (norm(x, weight, 1e-6, parts)[1], delta)):
        good &= near(found, F.rms_norm(of, (size,), weight, 1e-6))
    of_rows = parts.transpose(0, 1).contiguous().transpose(0, 1)  # as experts leave a row for each pair
    return good & all(map(torch.equal, norm(x, weight, 1e-6, of_rows), norm(x, weight, 1e-6, parts)))


def rotates(rows: int, q: int, k: int, size: int, *, normed: bool) -> bool:
    heads = torch.randn(rows, (q + 2 * k) * size)
    weight = torch.randn(q + k, size) if normed else None
    angles = torch.randn(rows, size // 2)
    cos, sin = angles.cos().repeat(1, 2), torch.cat((-angles.sin(), angles.sin()), 1)
    both = heads[:, : (q + k) * size].view(rows, q + k, size)
    if weight is not None:
        both = F.rms_norm(both, (size,), eps=1e-6) * weight
    wanted = both * cos[:, None] + both.roll(size // 2, -1) * sin[:, None]
    found = rotate(heads, q, k, cos, sin, weight, 1e-6)
    good = near(torch.cat(found, 1), wanted)
    cache, slots = torch.zeros(k, 80, 2, size), torch.randperm(80)[:rows]
    filled = cache.clone()
    filled[:, slots, 0] = wanted[:, q:].transpose(0, 1)
    filled[:, slots, 1] = heads.view(rows, -1, size)[:, q + k :].transpose(0, 1)
    parts = torch.stack((2 * heads, -heads))
    for given in (heads, parts):
        found, no_keys = rotate(given, q, k, cos, sin, weight, 1e-6, store=(cache.zero_(), slots))
        good &= near(found, wanted[:, :q]) and no_keys is None and near(cache, filled)
    return good


def chooses(
    tokens: int, experts: int, top_k: int, *, of_all=True, renormalize=True, scaling=1.0, parts=False
) -> bool:
    logits = torch.randn(tokens, experts)
    real = torch.rand(tokens) < 0.7 if tokens > 1 else None
    counts = torch.full((experts,), 5)
    given = torch.stack((logits / 2, logits / 4, logits / 4)) if parts else logits
    ids, weights = choose(
        given, top_k, of_all=of_all, renormalize=renormalize, scaling=scaling, real_T=real, counts_E=counts
    )
    shares, wanted = (logits.softmax(-1) if of_all else logits).topk(top_k)
    shares = shares if of_all else shares.softmax(-1)
    if of_all and renormalize:
        shares = shares / shares.sum(-1, keepdim=True)
    if real is not None:
        wanted, shares = wanted.masked_fill(~real[:, None], -1), shares * real[:, None]
    chosen = wanted.flatten()
    return (
        torch.equal(ids, wanted.int())
        and near(weights, scaling * shares)
        and torch.equal(counts, 5 + torch.bincount(chosen[chosen >= 0], minlength=experts))
    )


def by_sigmoid(
    tokens: int,
    experts: int,
    top_k: int,
    *,
    kind=RoutingKind.SIGMOID_TOPK,
    groups=1,
    kept=1,
    biased=True,
    renormalize=True,
    parts=False,
) -> bool:
    """Against the composed router, for biases of either sign and larger than any score."""
    logits = (3 if kind == RoutingKind.SIGMOID_TOPK else 9) * torch.randn(tokens, experts)
    bias = 5 * torch.randn(experts) if biased else None
    real = torch.rand(tokens) < 0.7 if tokens > 1 else None
    counts = torch.full((experts,), 5)
    routing = Routing(
        kind=kind,
        renormalize=renormalize,
        n_group=groups,
        topk_group=kept,
        scaling_factor=2.5,
    )
    wanted, shares = route(logits, routing, top_k, bias)
    ids, weights = choose_sigmoid(
        torch.stack((logits / 2, logits / 4, logits / 4)) if parts else logits,
        top_k,
        bias_E=bias,
        groups=groups,
        kept=kept,
        roots=kind == RoutingKind.SQRT_SOFTPLUS_TOPK,
        renormalize=renormalize,
        scaling=2.5,
        real_T=real,
        counts_E=counts,
    )
    if real is not None:
        wanted, shares = wanted.masked_fill(~real[:, None], -1), shares * real[:, None]
    chosen = wanted.flatten().long()
    return (
        torch.equal(ids, wanted)
        and near(weights, shares)
        and torch.equal(counts, 5 + torch.bincount(chosen[chosen >= 0], minlength=experts))
    )


def sigmoid_odd() -> bool:
    """Saturated logits are no ties without a bias; a NaN shows in its own row alone."""
    logits = torch.tensor([[40.0, 60.0, 20.0, 50.0], [0.1, float("nan"), 0.3, 0.2], [4.0, 3.0, 2.0, 1.0]])
    counts = torch.zeros(4, dtype=torch.int64)
    ids, weights = choose_sigmoid(
        logits, 1, bias_E=None, groups=1, kept=1, renormalize=False, scaling=1.0, real_T=None, counts_E=counts
    )
    return (
        ids[[0, 2], 0].tolist() == [1, 0]
        and near(weights[[0, 2], 0], logits[[0, 2], [1, 0]].sigmoid())
        and bool(weights[1].isnan().all())
    )


def by_token(tokens: int, experts: int, top_k: int, *, parts: bool, renormalize: bool) -> bool:
    """Against the composed router."""
    logits, table = 9 * torch.randn(tokens, experts), torch.randn(30, experts).topk(top_k).indices.int()
    token_ids, real = torch.randint(30, (tokens,)), torch.rand(tokens) < 0.7 if tokens > 1 else None
    counts = torch.full((experts,), 5)
    routing = Routing(kind=RoutingKind.SQRT_SOFTPLUS_TOPK, renormalize=renormalize, scaling_factor=2.5)
    wanted, shares = weigh(logits, table[token_ids], routing)
    ids, weights = choose_of_token(
        torch.stack((logits / 2, logits / 4, logits / 4)) if parts else logits,
        top_k,
        table_VK=table,
        token_ids_T=token_ids,
        renormalize=renormalize,
        scaling=2.5,
        real_T=real,
        counts_E=counts,
    )
    if real is not None:
        wanted, shares = wanted.masked_fill(~real[:, None], -1), shares * real[:, None]
    chosen = wanted.flatten().long()
    return (
        torch.equal(ids, wanted)
        and near(weights, shares)
        and torch.equal(counts, 5 + torch.bincount(chosen[chosen >= 0], minlength=experts))
    )


def turns_by_angles(rows: int, size: int) -> bool:
    """At positions as long contexts have them."""
    positions, frequencies = torch.randint(2**20, (rows,)), torch.rand(size)
    scaling, signs = torch.randn(size), torch.randn(size)
    cos, sin = angles(positions, frequencies, scaling, signs, torch.float32)
    wanted = positions[:, None].float() * frequencies
    return near(cos, wanted.cos() * scaling) and near(sin, wanted.sin() * signs)


def exact_product(rows: int, outputs: int, inner: int) -> bool:
    x, w = torch.randn(rows, inner), torch.randn(outputs, inner)
    found = parts_of(x, w)
    return found is not None and torch.allclose(found.sum(0), x @ w.T, atol=1e-4)


def odd() -> bool:
    """Equal logits, infinite ones, and a NaN, which spoils the weights of its own token alone."""
    logits = torch.zeros(4, 6)
    logits[1, 3:] = -torch.inf
    logits[2] = -torch.inf
    logits[3, 2] = torch.nan
    counts = torch.zeros(6, dtype=torch.int64)
    ids, weights = choose(logits, 4, of_all=True, renormalize=True, scaling=1.0, real_T=None, counts_E=counts)
    distinct = all(len(set(row)) == 4 and min(row) >= 0 and max(row) < 6 for row in ids.tolist())
    return (
        distinct
        and ids[0].tolist() == [0, 1, 2, 3]
        and ids[1, :3].tolist() == [0, 1, 2]
        and near(weights[:2], torch.tensor([[0.25] * 4, [1 / 3] * 3 + [0]]))
        and bool(weights[3].isnan().all())
    )


def normed_product(size: int, outputs: int, parts: int, *, width: int) -> bool:
    """Of the parts of a sum by a matrix, next to norm and product one after the other."""
    x, delta, gain = torch.randn(1, size), torch.randn(parts, 1, size), torch.randn(size)
    w, block = torch.randn(outputs, size), triton.next_power_of_2(size)
    total, normed = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
    y = torch.full((size // width, 1, outputs), torch.nan)
    multiply_normed_row[(-(-outputs // 64), len(y))](
        x, delta, gain, w, w, total, normed, y, outputs, size, 1e-6, size, parts, block, 64, width, 0, False
    )
    summed = x + delta.sum(0)
    wanted = F.rms_norm(summed, (size,), gain, 1e-6)
    good = near(normed, wanted) and torch.allclose(y.sum(0), wanted @ w.T, atol=1e-3)
    return good and (near(total, summed) if parts else bool(total.isnan().all()))


def whole_row(size: int, outputs: int, parts: int) -> bool:
    """Of programs that have whole rows of weights: with a norm before it, and with a bias."""
    x, delta, gain = torch.randn(1, size), torch.randn(parts, 1, size), torch.randn(size)
    w, bias = torch.randn(outputs, size), torch.randn(outputs)
    total, normed = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
    y = torch.full((1, 1, outputs), torch.nan)
    multiply_whole_row[(outputs // 8,)](
        x, delta, gain, w, total, normed, y, 1e-6, size, parts, size, 8, False
    )  # fmt: skip
    summed = x + delta.sum(0)
    wanted = F.rms_norm(summed, (size,), gain, 1e-6)
    good = near(normed, wanted) and torch.allclose(y.sum(0), wanted @ w.T, atol=1e-3)
    multiply_row[(outputs // 8,)](x, w, bias, y, size, 8, size, True, False)
    good &= torch.allclose(y[0], F.linear(x, w, bias), atol=1e-3)
    return good and (near(total, summed) if parts else bool(total.isnan().all()))


def gates(rows: int, size: int) -> bool:
    """With a number of each row apart, and as a column of what is gated, in parts and not."""
    x, token = torch.randn(rows, 2 * size + 4), torch.randn(rows, 1)
    plain = F.silu(x[:, :size]) * x[:, size : 2 * size]
    joined = x[:, 2 * size :][:, :1]
    parts, parts_of_token = torch.stack((2 * x, -x)), torch.stack((token / 2, token, -token / 2))
    good = near(gate(x, torch.float32, M=size), plain)
    good &= near(gate(x, torch.float32, M=size, token=token), plain * token.sigmoid())
    good &= near(gate(x, torch.float32, M=size, token=joined), plain * joined.sigmoid())
    good &= near(gate(parts, torch.float32, M=size, token=parts_of_token), plain * token.sigmoid())
    of_parts = parts[..., 2 * size :][..., :1]
    good &= near(gated(x, x + 1), x * (x + 1).sigmoid()) and near(gated(x, parts), x * x.sigmoid())
    return good and near(gate(parts, torch.float32, M=size, token=of_parts), plain * joined.sigmoid())


def gated_product(size: int, outputs: int, parts: int, *, width: int) -> bool:
    """Next to activation, product and sum one after the other; the row's number is a column of parts."""
    x, more, w = torch.randn(parts, 2 * size + 4), torch.randn(1, outputs), torch.randn(outputs, size)
    y = torch.full((size // width, 1, outputs), torch.nan)
    multiply_gated_row[(-(-outputs // 64), len(y))](
        x, x[:, 2 * size :], w, w, more, y, outputs, size, 2 * size + 4, x.stride(0), size,
        parts, parts, 64, width, 0, False,
    )  # fmt: skip
    gate, up, rest = x.sum(0, keepdim=True).split([size, size, 4], dim=1)
    wanted = more + F.silu(gate) * up * rest[:, :1].sigmoid() @ w.T
    return torch.allclose(y.sum(0), wanted, atol=1e-3)


results["gate"] = gates(3, 24) and gates(1, 1030)
results["gated-product"] = all(
    gated_product(*sizes, width=width) for sizes, width in (((512, 70, 8), 256), ((128, 64, 1), 128))
)
results["whole-row"] = whole_row(256, 16, 3) and whole_row(512, 128, 1) and whole_row(1024, 8, 0)
results["normed-product"] = all(
    normed_product(*sizes, width=width)
    for sizes, width in (((512, 70, 1), 256), ((384, 128, 5), 128), ((256, 9, 0), 256))
)
results["norm"] = norms(3, 48) and norms(1, 64)
results["rotate"] = (
    rotates(3, 4, 2, 16, normed=True)
    and rotates(2, 3, 1, 24, normed=True)
    and rotates(5, 5, 2, 8, normed=True)
)
results["rotate-only"] = rotates(2, 2, 2, 8, normed=False)
results["softmax-topk"] = chooses(9, 16, 4) and chooses(1, 6, 2, renormalize=False)
results["sigmoid"] = by_sigmoid(9, 16, 4) and by_sigmoid(1, 6, 2, renormalize=False, biased=False)
results["sigmoid-groups"] = (
    by_sigmoid(9, 16, 4, groups=4, kept=2)
    and by_sigmoid(5, 40, 6, groups=8, kept=4, parts=True)
    and by_sigmoid(4, 12, 3, groups=3, kept=2, biased=False)
    and by_sigmoid(4, 4, 2, groups=4, kept=3)
)
ROOTS = {"kind": RoutingKind.SQRT_SOFTPLUS_TOPK}
results["roots"] = by_sigmoid(9, 16, 4, **ROOTS) and by_sigmoid(4, 12, 3, biased=False, parts=True, **ROOTS)
results["angles"] = turns_by_angles(3, 64) and turns_by_angles(1, 24) and turns_by_angles(0, 8)
results["by-token"] = by_token(9, 16, 6, parts=True, renormalize=True) and by_token(
    1, 8, 2, parts=False, renormalize=False
)
results["exact-product"] = exact_product(1, 20, 300) and exact_product(7, 40, 512)
results["sigmoid-odd"] = sigmoid_odd()
results["topk-softmax"] = chooses(5, 8, 4, of_all=False) and chooses(7, 40, 6, scaling=2.5, parts=True)
results["odd"] = odd()
empty = torch.zeros(0, 8)
results["none"] = norm(empty, torch.ones(8), 1e-6, empty)[1].shape == (0, 8)

print(json.dumps(results))
