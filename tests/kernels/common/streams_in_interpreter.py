"""Run by test_streams.py with TRITON_INTERPRET=1: residual streams and turned heads; prints JSON."""

from __future__ import annotations

import json

import torch

from tests.kernels import interpreter
from turnout.kernels.common import streams as kernels
from turnout.kernels.common.streams import connect
from turnout.kernels.common.turned import turn
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
    eps = {"iterations": 20, "eps": 1e-6, "norm_eps": 1e-6, "gain_eps": 1e-2}
    found = connect(x, added, weights.fn, weights.base, weights.scale, norm.weight, **eps)
    return all(torch.allclose(*pair, rtol=1e-4, atol=1e-4) for pair in zip(found, wanted, strict=True))


results["added"] = connects(3, 320, 1)
results["parts"] = connects(17, 48, 3)
kernels.MANY = 1  # of as many tokens, one program mixes all columns of each
results["many"] = connects(3, 1100, 1)
results["embedding"] = connects(2, 64, 0, embedding=True)
results["none"] = connects(0, 64, 1)


def turns(rows: int, heads: int, size: int, end: int, *, normed: bool, back: bool) -> bool:
    wide = torch.randn(rows, heads * size + 5)
    x = wide[:, 2 : 2 + heads * size].unflatten(1, (heads, size))
    angles = torch.randn(rows, end // 2)
    cos, sin = angles.cos().repeat(1, 2), torch.cat((-angles.sin(), angles.sin()), 1)
    weight = torch.randn(size)
    plain = torch.nn.functional.rms_norm(x, (size,), weight, 1e-6) if normed else x
    wanted = turned(plain, (cos[:, None], sin[:, None]), back=back)
    rest = {"weight_D": weight, "eps": 1e-6} if normed else {}
    found = turn(x, cos, sin, back=back, **rest)
    return torch.allclose(found, wanted, atol=1e-5) and not torch.allclose(wanted, plain)


results["turn"] = turns(3, 8, 64, 16, normed=False, back=False)
results["turn-back"] = turns(3, 6, 48, 16, normed=False, back=True)
results["turn-normed"] = turns(2, 1, 128, 64, normed=True, back=False)

print(json.dumps(results))
