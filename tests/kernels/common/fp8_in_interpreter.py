"""Run by test_fp8_weights.py with TRITON_INTERPRET=1: products by e4m3 weights; prints JSON.

In float32: the interpreter cuts off what bfloat16 does not hold.
"""

from __future__ import annotations

import json
from unittest.mock import patch

import torch
import torch.nn.functional as F

from tests.kernels import interpreter
from turnout.kernels.common import few_rows, row_gemm, rows
from turnout.kernels.common.fp8_weights import decode
from turnout.kernels.common.split_gemm import multiply_part
from turnout.models import dense

interpreter.prepare()
torch.manual_seed(0)
results = {}


def weight(M: int, K: int, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(e4m3 [M, K], scales [G, M], and what they mean), with every code but the two NaNs."""
    codes = torch.randint(0, 254, (M, K), dtype=torch.uint8)
    codes += (codes > 126).to(torch.uint8)
    data = codes.view(torch.float8_e4m3fn)
    scale = torch.rand(-(-K // group), M) * 1e-2
    return data, scale, data.float() * scale.T.repeat_interleave(group, 1)[:, :K]


def decodes(M: int, K: int, group: int) -> bool:
    data, scale, wanted = weight(M, K, group)
    few = decode(data[7:30], scale[:, 7:30], group, torch.float32)
    return torch.equal(decode(data, scale, group, torch.float32), wanted) and torch.equal(few, wanted[7:30])


def near(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return torch.allclose(found, wanted, atol=1e-3, rtol=1e-5)


def multiplies(N: int, M: int, K: int, group: int, *, bias=False, count=1) -> bool:
    """`row_gemm`, whole and in parts, for x of a wider matrix."""
    data, scale, w = weight(M, K, group)
    x, b = torch.randn(N, 2 * K)[:, :K], torch.randn(M) if bias else None
    whole = row_gemm.linear(x, data, b, scale_GM=scale, group=group)
    parts = row_gemm.parts(x, data, scale, group)
    return near(whole, F.linear(x, w, b)) and len(parts) == count and near(parts.sum(0), x @ w.T)


def splits(N: int, M: int, K: int, group: int, *, width: int, steps: int) -> bool:
    data, scale, w = weight(M, K, group)
    x, count = torch.randn(N, K), K // (width * steps)
    y = torch.full((count, N, M), torch.nan)
    multiply_part[(-(-M // 64), count)](
        x, data, scale, w, y, N, M, K, K, K, 16, 64, width, steps, False, False, group, False
    )  # fmt: skip
    plain = torch.full_like(y, torch.nan)
    multiply_part[(-(-M // 64), count)](
        x, w, w, w, plain, N, M, K, K, K, 16, 64, width, steps, False, False, 0, False
    )
    return torch.equal(y, plain) and near(y.sum(0), x @ w.T)


def few(N: int, M: int, K: int) -> bool:
    """`few_rows`, in all numbers of parts, for x of a wider matrix; each part is what its inputs give."""
    data, scale, w = weight(M, K, 128)
    x = torch.randn(N, 2 * K)[:, :K]
    good = few_rows.runs(x, data, 128)
    for count in few_rows.counts(M, K):
        y = few_rows.parts(x, data, scale, count)
        pieces = zip(x.chunk(count, 1), w.chunk(count, 1), strict=True)
        good &= near(y, torch.stack([piece @ part.T for piece, part in pieces]))
    more = torch.randn(17, K)
    y = few_rows.parts(x, data, scale, None, more)
    return good and y.shape[2] == M + 17 and near(y.sum(0), x @ torch.cat((w, more)).T)


def both(N: int, M: int, K: int, R: int, group: int) -> bool:
    """A product with FP8 weights and with others, as models ask for it: in one launch or not at all."""
    data, scale, w = weight(M, K, group)
    x, small, large = torch.randn(N, K), torch.randn(R, K), dense.Fp8Weight(data, scale, group)
    with patch.object(dense, "runs_triton", lambda device: True):
        good = dense.product_of_both(dense.invariant_linear, x, large, small) is None
        good &= dense.product_of_both(dense.linear, x, w, small) is None
        found = dense.product_of_both(dense.linear, x, large, small)
        if N > 2 or group != 128 or K % 512:
            return good and found is None
        good &= torch.equal(dense._parts(x, large, None), found[..., :M])
    return good and near(found.sum(0), x @ torch.cat((w, small)).T)


def sums() -> bool:
    parts = torch.randn(3, 5, 70)
    good = near(rows.add(parts, None, torch.float32), parts.sum(0))
    for bias in (torch.randn(70), torch.randn(5, 70)):
        good &= near(rows.add(parts, bias, torch.float32), parts.sum(0) + bias)
    return good


def gates() -> bool:
    parts = torch.randn(3, 5, 2 * 70)
    good = True
    for given, x in ((parts, parts.sum(0)), (parts[0], parts[0])):
        good &= near(rows.gate(given, torch.float32), F.silu(x[:, :70]) * x[:, 70:])
        limited = F.silu(x[:, :70].clamp(max=0.5)) * x[:, 70:].clamp(-0.5, 0.5)
        good &= near(rows.gate(given, torch.float32, 0.5), limited)
    return good


results["decode"] = all(decodes(*sizes) for sizes in ((64, 256, 128), (70, 400, 128), (33, 112, 16)))
results["rows"] = multiplies(5, 70, 256, 128, bias=True, count=4) and multiplies(20, 64, 512, 64, count=8)
results["rows-many"] = multiplies(100, 140, 512, 128, count=4) and multiplies(130, 40, 320, 64)
results["rows-some"] = multiplies(40, 200, 512, 128, count=4) and multiplies(64, 66, 80, 16)
results["rows-odd"] = multiplies(3, 40, 200, 128) and multiplies(3, 66, 80, 16, bias=True)
results["parts"] = splits(5, 130, 512, 128, width=256, steps=1) and splits(1, 64, 512, 32, width=128, steps=2)
results["parts-long"] = splits(16, 70, 1024, 128, width=128, steps=4) and splits(
    2, 9, 256, 16, width=256, steps=1
)
results["few"] = all(few(N, M, K) for N in (1, 2) for M, K in ((70, 1024), (16, 512), (33, 1536)))
results["both"] = both(1, 70, 1024, 5, 128) and both(2, 32, 512, 64, 128)
results["both-not"] = both(3, 70, 512, 5, 128) and both(1, 70, 512, 5, 64) and both(2, 70, 640, 5, 128)
x, data = torch.randn(5, 576), weight(16, 576, 128)[0]
results["few-not"] = not any(
    few_rows.runs(x[:rows, :inputs], data[:, :inputs].contiguous(), group)
    for rows, inputs, group in ((1, 576, 128), (3, 512, 128), (1, 512, 64), (0, 512, 128))
)
results["sums"] = sums()
results["gates"] = gates()
print(json.dumps(results))
