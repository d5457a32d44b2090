"""The steps between the products of latent attention: in Triton's interpreter, and a layer of it on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels import interpreted
from tests.kernels.compiled import compiled
from turnout.attention.kinds import AttentionKind, AttentionSpec
from turnout.attention.up_projection import UpProjection
from turnout.models.blocks import Norm
from turnout.models.latent_attention import LatentAttention
from turnout.parallel.groups import SINGLE_RANK


@pytest.fixture(scope="module")
def results() -> dict[str, bool]:
    return interpreted.results("common/latent_rows_in_interpreter.py")


@pytest.mark.parametrize("case", ["latents", "latents-alone", "rotated", "none"])
def test_interpreted(results: dict[str, bool], case: str):
    assert results[case]


def test_compiled_for_hopper():
    from turnout.kernels.common.latent_rows import norm_latents, rotate_tails

    common = {"R": 64, "PARTS": 8, "PDL": True}
    sizes = {"LQP": 2048, "LC": 512, "LCP": 512, "RP": 64}
    heads = {"D": 192, "DP": 256, "HEADS": 8}
    for kernel, constants in ((norm_latents, common | sizes), (rotate_tails, common | heads)):
        text = compiled(kernel, constants, warps=4, multiples=("row_stride",), eps="fp32").asm["ptx"]
        assert "ld.global" not in text[: text.index("griddepcontrol.wait")]


class Seen:
    """An attention that keeps what it is given, and answers with zeros."""

    def latent(
        self, layer: int, q: torch.Tensor, latent: torch.Tensor, up: UpProjection, index: None
    ) -> torch.Tensor:
        self.given = q, latent
        return q.new_zeros(len(q), *up.values_size)


@pytest.mark.gpu
@pytest.mark.parametrize("query_rank", [0, 1536])
@pytest.mark.parametrize("rows", [0, 1, 16, 40, 300])
def test_queries_and_latents_on_a_gpu(rows: int, query_rank: int):
    torch.manual_seed(0)
    H, heads, size, rope, latent = 2048, 16, 192, 64, 512

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, device="cuda") * shape[-1] ** -0.5).bfloat16()

    spec = AttentionSpec(
        kind=AttentionKind.LATENT,
        num_heads=heads,
        num_kv_heads=1,
        head_dim=size,
        value_dim=128,
        scale=size**-0.5,
        latent_dim=latent,
        rope_dim=rope,
    )
    down = random((query_rank or heads * size) + latent + rope, H)
    layer = LatentAttention(
        0,
        spec,
        down=down,
        query_norm=Norm(torch.rand(query_rank, device="cuda").bfloat16(), 1e-6) if query_rank else None,
        query_up=random(heads * size, query_rank) if query_rank else None,
        latent_norm=Norm(torch.rand(latent, device="cuda").bfloat16(), 1e-6),
        up=UpProjection(random(heads * 256, latent).view(heads, 256, latent), 128),
        out=random(H, heads * 128),
        group=SINGLE_RANK.attention_tp,
    )
    x, half = torch.randn(rows, H, device="cuda").bfloat16(), torch.randn(rows, 1, rope // 2, device="cuda")
    cos, sin = half.cos().repeat(1, 1, 2).bfloat16(), torch.cat((-half.sin(), half.sin()), -1).bfloat16()
    seen: Any = Seen()
    out = layer(x, {spec.rope: (cos, sin)}, seen)
    assert out.shape[-2:] == (rows, H)
    for found, wanted in zip(seen.given, layer._composed(x, cos, sin)[:2], strict=True):
        torch.testing.assert_close(found, wanted, rtol=3e-2, atol=3e-2)
