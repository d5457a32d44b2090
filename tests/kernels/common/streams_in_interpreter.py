"""Run by test_streams.py with TRITON_INTERPRET=1: residual streams and turned heads; prints JSON."""

from __future__ import annotations

import json
from dataclasses import replace

import torch

from tests.kernels import interpreter
from turnout.kernels.common import streams as kernels
from turnout.kernels.common import turned as turned_kernels
from turnout.kernels.common.streams import connect, connect_last, cut_of
from turnout.kernels.common.turned import divide, turn
from turnout.models.blocks import Norm
from turnout.models.compressed_attention import turned
from turnout.models.spec import StreamSpec
from turnout.models.streams import StreamWeights

interpreter.prepare()
torch.manual_seed(0)
results = {}


def connects(rows: int, hidden: int, parts: int, *, embedding: bool = False) -> bool:
    """Against torch's composition, in float32. parts: of what a block gave."""
    spec = StreamSpec(count=4, iterations=20, eps=1e-6)
    weights = StreamWeights(
        spec=spec,
        fn=torch.randn(24, 4 * hidden) / hidden**0.5,
        base=torch.randn(24),
        scale=torch.tensor([1.5, 0.7, 1.2]),
        norm_eps=1e-6,
    )
    x, y, post = torch.randn(rows, 4, hidden), torch.randn(max(1, parts), rows, hidden), torch.rand(rows, 4)
    if embedding:
        x = x[:, :1].expand(-1, 4, -1)
    norm = Norm(torch.randn(hidden), 1e-2)
    wanted = weights.of_sum(x, (post, y.sum(0)) if parts else None, norm)
    added = (post, y[0] if parts == 1 else y) if parts else None
    eps = {"eps": 1e-6, "norm_eps": 1e-6, "gain_eps": 1e-2}
    found = connect(x, added, weights.fn, weights.base, weights.scale, norm.weight, iterations=20, **eps)
    last = replace(weights, fn=weights.fn[:4], base=weights.base[:4], scale=weights.scale[:1])
    wanted += last.collapsed(x, (post, y.sum(0)) if parts else None, norm)
    found += connect_last(x, added, last.fn, last.base, last.scale, norm.weight, **eps)
    return all(torch.allclose(*pair, rtol=1e-4, atol=1e-4) for pair in zip(found, wanted, strict=True))


results["added"] = connects(3, 320, 1)
results["parts"] = connects(17, 48, 3)
kernels.MANY = kernels.SOME = 1  # of as many tokens, programs have more columns of each
results["many"] = connects(3, 1100, 1)
kernels.cut_of = lambda tokens, hidden: kernels.Cut(4, 2, 4, 4)
results["cut"] = connects(19, 1100, 3) and connects(3, 64, 0)
kernels.cut_of = lambda tokens, hidden: kernels.Cut(2, 2)
results["cut"] &= connects(19, 1100, 2)
kernels.cut_of = cut_of
results["embedding"] = connects(2, 64, 0, embedding=True)
results["none"] = connects(0, 64, 1)


def angles(rows: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of halves, [N, end]."""
    drawn = torch.randn(rows, end // 2)
    return drawn.cos().repeat(1, 2), torch.cat((-drawn.sin(), drawn.sin()), 1)


def turns(rows: int, heads: int, size: int, end: int, *, normed=False, back=False, parts=False) -> bool:
    wide = torch.randn(rows, heads * size + 5)
    x = wide[:, 2 : 2 + heads * size].unflatten(1, (heads, size))
    cos, sin = angles(rows, end)
    weight = torch.randn(size)
    plain = torch.nn.functional.rms_norm(x, (size,), weight, 1e-6) if normed else x
    wanted = turned(plain, (cos[:, None], sin[:, None]), back=back)
    rest = {"weight_D": weight, "eps": 1e-6} if normed else {}
    found = turn(torch.stack((2 * x, -x / 2, -x / 2)) if parts else x, cos, sin, back=back, **rest)
    return torch.allclose(found, wanted, atol=1e-5) and not torch.allclose(wanted, plain)


def divides(rows: int, sizes: tuple[int, int, int, int], end: int, *, parts: bool) -> bool:
    """A row of ranks of queries, kv, what entries are made of, and weights."""
    x, gains = torch.randn(rows, sum(sizes)), [torch.randn(size) for size in sizes[:2]]
    cos, sin = angles(rows, end)
    q, kv, raw, weights = x.split(sizes, dim=1)
    q, kv = (torch.nn.functional.rms_norm(y, (len(g),), g, 1e-6) for y, g in zip((q, kv), gains, strict=True))
    wanted = q, turned(kv[:, None], (cos[:, None], sin[:, None]))[:, 0], raw, weights * 0.3
    given = torch.stack((2 * x, -x / 2, -x / 2)) if parts else torch.cat((x, x), dim=1)[:, : sum(sizes)]
    found = divide(given, sizes, *gains, cos, sin, scale=0.3, eps=1e-6)
    return all(torch.allclose(*pair, atol=1e-5) for pair in zip(found, wanted, strict=True))


results["turn"] = turns(3, 8, 64, 16)
results["turn-back"] = turns(3, 6, 48, 16, back=True)
results["turn-normed"] = turns(2, 1, 128, 64, normed=True)
results["turn-parts"] = turns(3, 5, 64, 16, normed=True, parts=True) and turns(1, 2, 16, 8, parts=True)
turned_kernels.COPIED = 16
results["divide"] = divides(3, (24, 32, 40, 6), 8, parts=False) and divides(
    1, (16, 48, 0, 0), 16, parts=False
)
results["divide-parts"] = divides(2, (24, 48, 32, 0), 8, parts=True)

print(json.dumps(results))
