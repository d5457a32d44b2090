"""Run by test_pack.py with TRITON_INTERPRET=1: rows for the wire; prints JSON."""

from __future__ import annotations

import json
from itertools import pairwise

import torch

from tests.kernels import interpreter
from turnout.formats import fp8, nvfp4
from turnout.kernels.common.pack import pack, sum_parts, sum_rows

interpreter.prepare()
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
    pack(x, ids, weights, out, [place // 2 for place in at])
    floats, ints = out.view(torch.float32), out.view(torch.int32)
    good = torch.equal(floats[:tokens, :hidden], x) and not floats[tokens:, :hidden].any()
    good &= torch.equal(ints[:tokens, at[0] : at[0] + k], ids) and bool(
        (ints[tokens:, at[0] : at[0] + k] == -1).all()
    )
    good &= torch.equal(floats[:tokens, at[1] : at[1] + k], weights)
    results[name] = good and not floats[tokens:, at[1] : at[1] + k].any()

source = torch.tensor([2, 0, 2, 1, 0])
x, ids, weights = torch.randn(3, 8), torch.randint(0, 9, (3, 1)).int(), torch.rand(3, 1)
out = torch.full((5, 6), 77)
pack(x, ids, weights, out, [4, 5], source_R=source)
results["some"] = (
    torch.equal(out.view(torch.float32)[:, :8], x[source])
    and torch.equal(out.view(torch.int32)[:, 8:9], ids[source])
    and torch.equal(out.view(torch.float32)[:, 10:11], weights[source])
)

GLOBAL = torch.tensor(0.004)
for format, hidden, row_bytes, scale_bytes in (("fp8", 1280, 1280, 40), ("nvfp4", 1104, 552, 69)):
    draw = torch.Generator().manual_seed(hidden)
    x = torch.randn(3, hidden, generator=draw).bfloat16()
    x[1] *= 50
    ids, weights = torch.randint(0, 9, (3, 2), generator=draw).int(), torch.rand(3, 2, generator=draw)
    scales_at = row_bytes // 8
    ids_at = scales_at + -(-scale_bytes // 8)
    out = torch.full((5, ids_at + 2), 77)
    where = [scales_at, ids_at, ids_at + 1]
    pack(x, ids, weights, out, where, format=format, global_scale=GLOBAL)
    wanted, scales = fp8.encode_activation(x) if format == "fp8" else nvfp4.quantize_activation(x, GLOBAL)
    bytes_, floats, ints = (out.view(dtype) for dtype in (torch.uint8, torch.float32, torch.int32))
    found = bytes_[:, 8 * scales_at : 8 * scales_at + scale_bytes]
    results[format] = (
        torch.equal(bytes_[:3, :row_bytes], wanted.view(torch.uint8))
        and torch.equal(found[:3], scales.view(torch.uint8))
        and torch.equal(ints[:3, 2 * ids_at : 2 * ids_at + 2], ids)
        and torch.equal(floats[:3, 2 * ids_at + 2 :], weights)
        and not bytes_[3:, :row_bytes].any()
        and not found[3:].any()
        and bool((ints[3:, 2 * ids_at : 2 * ids_at + 2] == -1).all())
        and not floats[3:, 2 * ids_at + 2 :].any()
    )

draw = torch.Generator().manual_seed(0)
back, order = torch.randn(9, 1100, generator=draw), torch.randperm(9, generator=draw)
bags = torch.tensor([0, 2, 2, 3, 9])
wanted = torch.stack([back[order[a:b]].sum(0) for a, b in pairwise(bags.tolist())])
results["sum"] = torch.allclose(sum_rows(back, order, bags), wanted, atol=1e-5)

parts = torch.randn(3, 7, 700, generator=draw)
results["parts"] = torch.equal(sum_parts(parts), parts[0] + parts[1] + parts[2])

print(json.dumps(results))
