"""Run by test_expert_gemm_fp8.py with TRITON_INTERPRET=1: quantising and sorting rows; prints JSON."""

from __future__ import annotations

import json

import torch

from turnout.formats import fp8
from turnout.kernels.expert_gemm_fp8 import quantize_rows
from turnout.kernels.expert_gemm_fp8_specialised import note_places, sum_places

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

T, TOP_K, H = 7, 3, 200
ids = torch.randint(-1, 8, (T, TOP_K), generator=draw).int()
held = ((ids >= 2) & (ids < 6)).flatten().nonzero().flatten().int()
order = torch.full((T * TOP_K,), -7, dtype=torch.int32)
order[: len(held)] = held[torch.randperm(len(held), generator=draw)]
tiles = torch.tensor([0, len(held), 0, 0], dtype=torch.int32)
place = torch.full((T * TOP_K,), -7, dtype=torch.int32)
counters = torch.ones(20, dtype=torch.int32)
note_places[(3,)](ids, order, tiles, place, counters, T * TOP_K, 2, 4, 18, 8, False)
results["places"] = (
    torch.equal(order[place[held.long()].long()], held)
    and int((place == -1).sum()) == T * TOP_K - len(held)
    and counters.tolist() == [0] * 18 + [1] * 2
)

y = torch.randn(T * TOP_K, H, generator=draw).bfloat16()
out = torch.full((T, H), torch.nan)
sum_places[(T, 2)](y, place, out, H, TOP_K, 128, False)
by_pair = torch.zeros(T * TOP_K, H)
by_pair[held.long()] = y[place[held.long()].long()].float()
results["sum"] = torch.allclose(out, by_pair.view(T, TOP_K, H).sum(1), atol=1e-6)

print(json.dumps(results))
