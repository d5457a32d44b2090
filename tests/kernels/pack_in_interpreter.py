"""Run by test_pack.py with TRITON_INTERPRET=1: rows for the wire; prints JSON."""

from __future__ import annotations

import json

import torch

from turnout.kernels.pack import pack

results = {}
for name, tokens, rows, hidden, k in (
    ("exact", 3, 3, 12, 4),
    ("padded", 2, 5, 2100, 3),
    ("none", 0, 2, 8, 1),
):
    draw = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, hidden, generator=draw)
    ids = torch.randint(0, 9, (tokens, k), generator=draw).int()
    weights = torch.rand(tokens, k, generator=draw)
    words = hidden // 2 + 2 * -(-k // 2)
    out = torch.full((rows, words), 77)
    at = hidden, hidden + 2 * -(-k // 2)
    pack(x.view(torch.int64), ids, weights, out, out.view(torch.int32), out.view(torch.float32), *at)
    floats, ints = out.view(torch.float32), out.view(torch.int32)
    good = torch.equal(floats[:tokens, :hidden], x) and not floats[tokens:, :hidden].any()
    good &= torch.equal(ints[:tokens, at[0] : at[0] + k], ids) and bool(
        (ints[tokens:, at[0] : at[0] + k] == -1).all()
    )
    good &= torch.equal(floats[:tokens, at[1] : at[1] + k], weights)
    results[name] = good and not floats[tokens:, at[1] : at[1] + k].any()

print(json.dumps(results))
