"""Run by test_sort.py with TRITON_INTERPRET=1: every sorting kernel on small cases; prints JSON."""

from __future__ import annotations

import json
from math import ceil

import torch

from tests.kernels import interpreter
from turnout.kernels.hopper.sort import count_pairs, place_pairs, sum_pairs, sum_places, tile_batched_experts

interpreter.prepare()
results = {}


def power(n: int) -> int:
    return 1 << (n - 1).bit_length()


def sorts(
    pairs: int, local: int, total: int, first: int, width: int,
    *, block: int = 0, ids=None, widest_first: bool = False, places: bool = False,
) -> bool:  # fmt: skip
    draw = torch.Generator().manual_seed(pairs)
    ids = torch.randint(0, total, (pairs,), generator=draw).int() if ids is None else ids
    alone, ep = not block, power(local + 1)
    block = block or max(16, power(pairs))
    programs = -(-pairs // block)
    counts = torch.zeros(9 * ep, dtype=torch.int32)
    order, place = torch.full((2, pairs), -7, dtype=torch.int32)
    tiles = torch.full((4 + 4 * (local + pairs // width + 1),), -7, dtype=torch.int32)
    if not alone:
        count_pairs[(programs,)](ids, counts, pairs, first, local, block, ep, False)
    place_pairs[(programs,)](
        ids, counts, order, place, tiles, pairs, first, local, width, programs, block, ep, alone,
        widest_first, places, False,
    )  # fmt: skip
    mine = ids - first
    held = ((mine >= 0) & (mine < local)).nonzero().flatten()
    size = torch.bincount(mine[held].long(), minlength=local)
    end = size.cumsum(0)
    start = end - size
    good = sorted(order[: len(held)].tolist()) == held.tolist()
    for e in range(local):
        good &= bool((mine[order[start[e] : end[e]].long()] == e).all())
    wanted = [
        [e, row, min(row + width, int(end[e]))]
        for e in range(local)
        for row in range(int(start[e]), int(end[e]), width)
    ]
    if widest_first:
        wanted.sort(key=lambda tile: (tile[2] - tile[1] < width, -ceil(4 * (tile[2] - tile[1]) / width)))
    good &= tiles[:4].tolist() == [len(wanted), len(held), 0, 0]
    good &= tiles[4 : 4 + 4 * len(wanted)].view(-1, 4)[:, :3].tolist() == wanted
    if places:
        good &= torch.equal(order[place[held].long()], held.int())
        good &= int((place == -1).sum()) == pairs - len(held)
    return good and not counts.any()


results["few"] = sorts(40, 32, 32, 0, 16)
results["one"] = sorts(1, 8, 8, 0, 8)
results["blocks"] = sorts(600, 16, 16, 0, 16, block=128)
results["one-expert"] = sorts(200, 4, 4, 0, 24, block=64, ids=torch.full((200,), 3, dtype=torch.int32))
results["other-ranks"] = sorts(300, 8, 32, 16, 8, block=128)
results["places"] = sorts(300, 8, 32, 16, 8, block=128, places=True)
results["widest-first"] = sorts(900, 16, 24, 4, 16, block=128, widest_first=True)
results["widest-first-alone"] = sorts(40, 8, 8, 0, 8, widest_first=True)
results["padding"] = sorts(32, 8, 8, 0, 8, ids=torch.full((32,), -1, dtype=torch.int32))

counts = torch.tensor([0, 5, 9, 1], dtype=torch.int32)
tiles = torch.zeros(64, dtype=torch.int32)
tile_batched_experts[(1,)](counts, tiles, 9, 4, 4, 8)
wanted = [[1, 9, 13], [1, 13, 14], [2, 18, 22], [2, 22, 26], [2, 26, 27], [3, 27, 28]]
results["batched"] = int(tiles[0]) == 6 and tiles[4:28].view(-1, 4)[:, :3].tolist() == wanted

for name, dtype in (("sum", torch.float32), ("sum-bf16", torch.bfloat16)):
    draw = torch.Generator().manual_seed(0)
    y = torch.randn(12, 100, generator=draw).bfloat16()
    ids = torch.randint(0, 8, (3, 4), generator=draw).int()
    out = torch.full((3, 100), torch.nan, dtype=dtype)
    sum_pairs[(3, 2)](y, ids, out, 100, 100, 2, 4, 4, 64, False)
    held = ((ids >= 2) & (ids < 6)).unsqueeze(2)
    ref = (y.view(3, 4, 100).float() * held).sum(1)
    close = torch.allclose(
        out.float(), ref.to(dtype).float(), rtol=1e-6 if name == "sum" else 1e-2, atol=1e-6
    )
    results[name] = bool(close)

T, TOP_K, H = 7, 3, 200
draw = torch.Generator().manual_seed(0)
y = torch.randn(T * TOP_K, H, generator=draw).bfloat16()
place = torch.randperm(T * TOP_K, generator=draw).int()
place[torch.rand(T * TOP_K, generator=draw) < 0.6] = -1
wanted = (y.float()[place.long()] * (place >= 0)[:, None]).view(T, TOP_K, H).sum(1)
for few in (False, True):
    out = torch.full((T, H), torch.nan)
    sum_places[(T, 2)](y, place, out, H, TOP_K, 128, few, False)
    results[f"sum-places-{few}"] = torch.allclose(out, wanted, atol=1e-6)

print(json.dumps(results))
