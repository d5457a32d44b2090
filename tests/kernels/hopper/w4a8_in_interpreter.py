"""Run by test_gemm_w4a8.py with TRITON_INTERPRET=1: rows quantised for the W4A8 GEMM; prints JSON."""

from __future__ import annotations

import json

import torch
from torch import Tensor

from tests.kernels import interpreter
from turnout.formats import fp8
from turnout.kernels.hopper.quantize_rows import quantize_rows, quantize_tokens

R, K, COLUMNS, TOP_K = 5, 160, 256, 3
draw = torch.Generator().manual_seed(0)
x_RK = torch.randn(R, K + 8, generator=draw)[:, :K] * torch.exp2(torch.arange(-2.0, 3.0))[:, None]
x_RK[3] = 0


def empty(rows: int) -> tuple[Tensor, Tensor]:
    return torch.full((rows, COLUMNS), 99, dtype=torch.uint8).view(fp8.DTYPE), torch.full((rows,), -1.0)


def right(q_RC: Tensor, scale_R: Tensor, source: list[int]) -> bool:
    """Row i is that of x_RK[source[i]], or, below 0, has not been written."""
    good = True
    for row, scale, i in zip(q_RC, scale_R, source, strict=True):
        if i < 0:
            good &= bool((row.view(torch.uint8) == 99).all()) and scale.item() == -1
            continue
        wanted_K, found_C = x_RK[i], row.float() * scale
        amax = wanted_K.abs().amax()
        good &= torch.allclose(scale, amax / 448 if amax > 0 else torch.ones(()))
        good &= torch.allclose(found_C[:K], fp8.fake_quantize_rows(wanted_K), rtol=2**-3, atol=0)
        good &= bool((found_C[:K] - wanted_K).norm() <= 0.03 * wanted_K.norm()) and not found_C[K:].any()
    return good


interpreter.prepare()
results = {}
for name, total in (("sorted", 4), ("all", R)):
    q, scale = empty(R)
    tiles = torch.tensor([0, total], dtype=torch.int32)
    quantize_rows[(2,)](
        x_RK, tiles, q, scale, R, K, x_RK.stride(0), COLUMNS, 256, 2, name == "sorted", False, True
    )
    results[name] = right(q, scale, [*range(total), *[-1] * (R - total)])

place = torch.tensor([[4, 0, -1], [7, 1, 2], [-1, -1, -1], [3, 5, 6], [8, 9, 10]], dtype=torch.int32)
q, scale = empty(12)
quantize_tokens[(3,)](x_RK, place, q, scale, R, K, x_RK.stride(0), TOP_K, COLUMNS, 256, 2, False, True)
results["tokens"] = right(q, scale, [0, 1, 1, 3, 0, 3, 3, 1, 4, 4, 4, -1])

print(json.dumps(results))
