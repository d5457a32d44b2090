"""Run by test_paged_attention.py with TRITON_INTERPRET=1: attention and products by rows; prints JSON.

In float32: the interpreter's products of bfloat16 are wrong.
"""

from __future__ import annotations

import json

import torch
from triton.runtime import interpreter

from turnout.kernels.paged_attention import attend
from turnout.kernels.row_gemm import linear

results = {}
patch = interpreter._patch_lang_tensor


def patch_index(tensor, scope) -> None:
    """Loop bounds are arrays of one element, which numpy 2.5 no longer takes for integers."""
    patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


interpreter._patch_lang_tensor = patch_index


def error(ends: list[int], *, heads=(4, 2), size=16, page=16, splits=1) -> float:
    """The largest difference from a softmax written out; every slot that no row holds is NaN."""
    draw = torch.Generator().manual_seed(len(ends))
    (Hq, Hkv), P = heads, 1 + -(-max(ends) // page)
    B = len(ends)
    pages = torch.randperm(B * P, generator=draw).view(B, P)
    cache = torch.randn(Hkv, B * P * page, 2, size, generator=draw)
    q = torch.randn(B, Hq, size, generator=draw)
    wanted = torch.zeros(B, Hq, size)
    used = torch.zeros(B * P * page, dtype=torch.bool)
    for b, end in enumerate(ends):
        slots = (pages[b, :, None] * page + torch.arange(page)).flatten()[:end]
        used[slots] = True
        k, v = (x.float().repeat_interleave(Hq // Hkv, 0) for x in cache[:, slots].unbind(2))
        scores = torch.einsum("hd,hld->hl", q[b].float(), k) / size**0.5
        wanted[b] = torch.einsum("hl,hld->hd", scores.softmax(-1), v) if end else 0
    cache[:, ~used] = torch.nan
    found = attend(q, cache, pages, torch.tensor(ends), page_size=page, splits=splits)
    return float((found.float() - wanted).abs().max())


def product(N: int, M: int, K: int, *, bias: bool = False, rows: int | None = None) -> bool:
    """Whether `linear` is right for x [N, K] of a wider matrix."""
    draw = torch.Generator().manual_seed(N)
    x, w = torch.randn(N, 2 * K, generator=draw)[:, :K], torch.randn(M, K, generator=draw)
    b = torch.randn(M, generator=draw) if bias else None
    return torch.allclose(linear(x, w, b, rows), torch.nn.functional.linear(x, w, b), atol=1e-4)


results["short"] = error([1, 5, 17]) < 1e-5
results["pages"] = error([130, 64, 65, 200]) < 1e-5
results["splits"] = error([300, 7, 129], splits=4) < 1e-5
results["padding"] = error([40, 0, 3, 0], splits=2) < 1e-5
results["odd-heads"] = error([90, 33], heads=(6, 2), size=24, page=4) < 1e-5
results["one-kv-head"] = error([70], heads=(20, 1), size=32) < 1e-5
results["product"] = product(1, 70, 128, bias=True) and product(0, 8, 64)
results["product-odd"] = product(37, 5, 72) and product(37, 64, 72, bias=True, rows=16)

print(json.dumps(results))
