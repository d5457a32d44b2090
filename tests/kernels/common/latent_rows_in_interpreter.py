"""Run by test_latent_rows.py with TRITON_INTERPRET=1: rows of latent attention against torch's; prints JSON.

They are what stands between the products. In float32: the interpreter cuts off what bfloat16 does not hold.
"""

from __future__ import annotations

import json

import torch
import torch.nn.functional as F

from tests.kernels import interpreter
from turnout.kernels.common.latent_rows import latents, rotated

torch.manual_seed(0)
interpreter.prepare()
results = {}


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin


def angles(rows: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    half = torch.randn(rows, size // 2)
    return half.cos().repeat(1, 2), torch.cat((-half.sin(), half.sin()), 1)


def near(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return torch.allclose(found, wanted, rtol=1e-5, atol=1e-5)


def makes_latents(rows: int, queries: int, size: int, rope: int, *, normed: bool) -> bool:
    """queries: values before those of the latent; normed or left alone."""
    x = torch.randn(rows, queries + size + rope)
    query_gain, gain = torch.randn(queries) if normed else None, torch.randn(size)
    cos, sin = angles(rows, rope)
    q, c, r = x.split([queries, size, rope], 1)
    wanted = torch.cat((F.rms_norm(c, (size,), gain, 1e-6), turned(r, cos, sin)), 1)
    good = True
    for given in (x, torch.stack((2 * x, x / 2, -1.5 * x))):
        latent, query = latents(given, query_gain, gain, cos, sin, 1e-6)
        good &= near(latent, wanted)
        if query_gain is None:
            good &= query is None
        else:
            good &= query is not None and near(query, F.rms_norm(q, (queries,), query_gain, 1e-6))
    return good


def rotates(rows: int, heads: int, size: int, rope: int, *, more: int) -> bool:
    """more: values of a row after its heads."""
    x = torch.randn(rows, heads * size + more)
    cos, sin = angles(rows, rope)
    of_heads = x[:, : heads * size].view(rows, heads, size)
    nope, tail = of_heads.split([size - rope, rope], 2)
    wanted = torch.cat((nope, turned(tail, cos[:, None], sin[:, None])), 2)
    parts = torch.stack((2 * x, -x))
    return all(near(rotated(given, heads, size, cos, sin), wanted) for given in (x, parts))


results["latents"] = makes_latents(3, 48, 64, 16, normed=True) and makes_latents(1, 20, 24, 8, normed=True)
results["latents-alone"] = makes_latents(2, 40, 32, 16, normed=False)
results["rotated"] = rotates(3, 4, 24, 8, more=0) and rotates(2, 11, 48, 16, more=40)
turn = angles(0, 8)
latent, query = latents(torch.zeros(0, 40), torch.ones(8), torch.ones(24), *turn, 1e-6)
results["none"] = (
    latent.shape == (0, 32)
    and query is not None
    and query.shape == (0, 8)
    and rotated(torch.zeros(0, 48), 2, 24, *turn).shape == (0, 2, 24)
)
print(json.dumps(results))
