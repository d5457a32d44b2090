"""Run by test_batched_experts.py with TRITON_INTERPRET=1: rows to their experts and back; prints JSON."""

from __future__ import annotations

import json

import torch

from tests.kernels import interpreter
from turnout.kernels.nvlink import batched_experts

interpreter.prepare()
batched_experts.PAIRS, batched_experts.WORDS = (
    8,
    16,
)  # smaller than what is counted and moved, so that loops go round
results = {}
for name, N, k, H in (("several", 5, 3, 40), ("one each", 3, 1, 8), ("none", 0, 2, 8)):
    draw = torch.Generator().manual_seed(N)
    first, E = 4, 3
    x = torch.randn(N, H, generator=draw).bfloat16()
    ids = torch.stack([torch.randperm(E, generator=draw)[:k] + first for _ in range(N)] or [torch.zeros(0)])
    ids = ids.view(N, k).int()
    ids[torch.rand(N, k, generator=draw) < 0.4] = -1
    weights = torch.rand(N, k, generator=draw)
    places, counts = batched_experts.places(ids, first, E)
    out = batched_experts.spread(x, ids, places, E)
    good = counts.tolist() == [(ids == first + e).sum().item() for e in range(E)]
    for e in range(E):
        mine = (ids == first + e).any(1)
        good &= torch.equal(out[e, : counts[e]], x[mine])
    y = torch.where(torch.arange(N)[None, :, None] < counts[:, None, None], out, torch.nan)
    y = y * torch.tensor([1.0, 2.0, 4.0])[:, None, None].bfloat16()
    got = batched_experts.weigh(y, ids, places, weights)
    factor = torch.where(ids >= 0, weights * 2.0 ** (ids - first), 0.0)
    some = (ids >= 0).any(1)
    close = torch.allclose(got[some].float(), (factor.sum(1, keepdim=True) * x.float())[some], rtol=8e-3)
    results[name] = bool(good and close)
print(json.dumps(results))
