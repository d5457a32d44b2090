"""Run by test_gemm_fp8.py with TRITON_INTERPRET=1: quantising rows; prints JSON."""

from __future__ import annotations

import json

import torch

from tests.kernels import interpreter
from turnout.formats import fp8
from turnout.kernels.hopper.quantize_groups import quantize_places, quantize_rows, sort_and_quantize
from turnout.kernels.hopper.sort import place_pairs

interpreter.prepare()
results = {}
R, K, GROUPS = 11, 384, 3
draw = torch.Generator().manual_seed(0)
x = torch.randn(R, K, generator=draw)
x[3] = 0
x[5, :128] *= 1000
codes, scales = fp8.encode_activation(x)


def same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Equal but for the interpreter's own mistake: rounding up to a power of two loses the carry."""
    found, wanted = found.float(), wanted.float()
    wrong = found != wanted
    carries = wanted.abs().log2() % 1 == 0
    return bool(
        (2 * found[wrong] == wanted[wrong]).all() and carries[wrong].all() and wrong.float().mean() < 0.05
    )


q = torch.zeros(R, K, dtype=torch.float8_e4m3fn)
s = torch.zeros(R, GROUPS)
quantize_rows[(5,)](x, q, s, R, K, K, GROUPS, 8, False)
results["rows"] = same(q, codes) and torch.allclose(s, scales, rtol=1e-6)

T, TOP_K = 7, 3
place = torch.randperm(T * TOP_K, generator=draw).int()
place[torch.rand(T * TOP_K, generator=draw) < 0.6] = -1
held = (place >= 0).nonzero().flatten()
codes_P, scales_P = torch.zeros(T * TOP_K, K, dtype=torch.float8_e4m3fn), torch.zeros(T * TOP_K, GROUPS)
quantize_places[(T,)](x, place, codes_P, scales_P, K, K, TOP_K, 512, False)
at = place[held].long()
results["places"] = (
    torch.equal(codes_P[at].float(), q[held // TOP_K].float())
    and torch.equal(scales_P[at], s[held // TOP_K])
    and int((scales_P != 0).any(1).sum()) == len(held)
)

# Next to the sort: what either launch alone leaves.
ids = torch.randint(-1, 9, (R * 2,), generator=draw).int()
E, EP = 5, 8


def sorted_pairs(quantised: bool) -> list[torch.Tensor]:
    counts, order, tiles = (torch.zeros(n).int() for n in (EP * 9, R * 2, 4 + 4 * (E + R)))
    codes, scales = torch.zeros(R, K, dtype=torch.float8_e4m3fn), torch.zeros(R, GROUPS)
    pairs = (R * 2, 1, E, 4, 1)
    if quantised:
        sort_and_quantize[(1 + 5,)](
            ids, counts, order, tiles, x, codes, scales, *pairs, R, K, K, 32, EP, True, GROUPS, 8, False
        )
    else:
        place_pairs[(1,)](ids, counts, order, order, tiles, *pairs, 32, EP, True, False, False, False)
        quantize_rows[(5,)](x, codes, scales, R, K, K, GROUPS, 8, False)
    return [counts, order, tiles, codes.float(), scales]


results["next to the sort"] = all(
    torch.equal(one, other) for one, other in zip(sorted_pairs(True), sorted_pairs(False), strict=True)
)

print(json.dumps(results))
