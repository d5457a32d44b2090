"""Run by test_expert_gemm_w4a8.py with TRITON_INTERPRET=1: rows quantised for the W4A8 GEMM; prints JSON."""

from __future__ import annotations

import json

import torch

from turnout.formats import fp8
from turnout.kernels.expert_gemm_w4a8 import quantize_rows

K, COLUMNS = 160, 256
results = {}
draw = torch.Generator().manual_seed(0)
x_RK = torch.randn(5, K + 8, generator=draw)[:, :K] * torch.exp2(torch.arange(-2.0, 3.0))[:, None]
x_RK[3] = 0
order = torch.tensor([6, 2, 9, 4, 0, 8, 1, 3])
for name, source, total in (
    ("gathered", order // 2, 7),
    ("sorted", torch.arange(5), 4),
    ("all", torch.arange(5), 5),
):
    rows = len(source)
    q = torch.full((rows, COLUMNS), 99, dtype=torch.uint8).view(fp8.DTYPE)
    scale = torch.full((rows,), -1.0)
    tiles = torch.tensor([0, total], dtype=torch.int32)
    quantize_rows[(2,)](
        x_RK, order.int(), tiles, q, scale, rows, K, x_RK.stride(0), 2, COLUMNS, 256, 2, name != "all",
        name == "gathered", False, True,
    )  # fmt: skip
    wanted_RK = x_RK[source][:total]
    found_RC = q.float() * scale[:, None]
    good = torch.allclose(found_RC[:total, :K], fp8.fake_quantize_rows(wanted_RK), rtol=2**-3, atol=0)
    good &= bool((found_RC[:total, :K] - wanted_RK).norm() < 0.03 * wanted_RK.norm())
    amax = wanted_RK.abs().amax(1)
    good &= torch.allclose(scale[:total], torch.where(amax > 0, amax / 448, 1.0))
    good &= not found_RC[:total, K:].any() and bool((scale[total:] == -1).all())
    results[name] = good and bool((q.view(torch.uint8)[total:] == 99).all())

print(json.dumps(results))
