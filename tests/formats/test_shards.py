"""Shards of experts: their outputs sum to the whole's, their scales stay with their weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from turnout.formats.codec import encode
from turnout.formats.experts import ExpertWeights, InputScales, shard
from turnout.formats.packed import PackedTensor
from turnout.formats.spec import FORMATS

E, H, I = 3, 64, 512


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make(format: str, *, gated: bool = True, biased: bool = False) -> ExpertWeights:
    """Block scales that differ by orders of magnitude, so that a neighbour of the right one is noticed."""
    rows = 2 * I if gated else I
    heights, widths = (torch.logspace(-3, 3, rows)[:, None], torch.logspace(-2, 2, I))
    scale = torch.ones(E)
    return ExpertWeights(
        w13=encode(normal(E, rows, H, seed=0) * heights, format),
        w2=encode(normal(E, H, I, seed=1) * widths, format),
        b13=normal(E, rows, seed=2) if biased else None,
        b2=normal(E, H, seed=3) if biased else None,
        input_scales=InputScales(w13=scale, w2=scale) if format == "nvfp4" else None,
        num_experts=E,
    )


def outputs(experts: ExpertWeights, x_TH: Tensor, *, gated: bool, bias_of_sum: bool) -> Tensor:
    """[E, T, H]: every expert's MLP in float64, all weights decoded."""
    w13, w2 = experts.w13.decode().double(), experts.w2.decode().double()
    h = torch.einsum("th,enh->etn", x_TH.double(), w13)
    if experts.b13 is not None:
        h = h + experts.b13[:, None]
    gate, up = h.chunk(2, dim=-1) if gated else (h, h.relu())
    y = torch.einsum("eti,ehi->eth", F.silu(gate) * up, w2)
    return y + experts.b2[:, None] if bias_of_sum and experts.b2 is not None else y


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize("biased", [True, False], ids=["biased", "biasless"])
def test_shards_sum_to_the_whole(format: str, count: int, gated: bool, biased: bool) -> None:
    whole, x_TH = make(format, gated=gated, biased=biased), normal(5, H, seed=4)
    shards = [shard(whole, i, count) for i in range(count)]
    got = sum(outputs(s, x_TH, gated=gated, bias_of_sum=i == 0) for i, s in enumerate(shards))
    torch.testing.assert_close(got, outputs(whole, x_TH, gated=gated, bias_of_sum=True), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("format", FORMATS)
def test_a_shard_holds_its_part_of_gate_then_of_up(format: str) -> None:
    whole = make(format, biased=True)
    third = shard(whole, 2, 4)
    part = slice(2 * I // 4, 3 * I // 4)
    gate, up = whole.w13.decode().chunk(2, dim=1)
    assert torch.equal(third.w13.decode(), torch.cat([gate[:, part], up[:, part]], dim=1))
    assert torch.equal(third.w2.decode(), whole.w2.decode()[..., part])
    gate, up = whole.b13.chunk(2, dim=1)
    assert torch.equal(third.b13, torch.cat([gate[:, part], up[:, part]], dim=1))
    assert torch.equal(third.b2, whole.b2)
    assert third.input_scales is whole.input_scales
    assert (third.first_expert, third.num_experts) == (whole.first_expert, whole.num_experts)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("experts", [1, 2])
def test_a_shard_keeps_nothing_of_the_whole_alive(format: str, experts: int) -> None:
    whole = make(format)
    whole = replace(whole, w13=whole.w13[:experts], w2=whole.w2[:experts])
    for part in (shard(whole, 1, 2).w13, shard(whole, 1, 2).w2):
        codes = (t for t in (part.data, part.scale) if t is not None)
        assert all(t.is_contiguous() and t.untyped_storage().nbytes() == t.nbytes for t in codes)


def test_rows_of_fp8_that_share_a_scale_over_fewer_than_128() -> None:
    """Gate and up of 96 rows stacked: blocks of 32 rows, as the checkpoint reader leaves them."""
    scale = torch.rand(E, 6, 1) + 0.5
    data = normal(E, 192, H, seed=0).to(torch.float8_e4m3fn)
    packed = PackedTensor(format="fp8", data=data, scale=scale, block_rows=32)
    gate, up = packed.decode().chunk(2, dim=1)
    last = packed.row_part(2, 3, stacked=2)
    assert last.block_rows == 32
    assert torch.equal(last.decode(), torch.cat([gate[:, 64:], up[:, 64:]], dim=1))
    with pytest.raises(ValueError, match=r"rows of 2 stacked matrices in 2 equal parts .* multiple of 32"):
        packed.row_part(0, 2, stacked=2)


@pytest.mark.parametrize(
    ("format", "intermediate", "count", "message"),
    [
        ("bf16", 96, 5, "rows of 2 stacked matrices in 5 equal parts are no multiple of 1"),
        ("fp8", 384, 2, "rows of 2 stacked matrices in 2 equal parts are no multiple of 128"),
        ("nvfp4", 48, 2, "columns in 2 equal parts are no multiple of 16"),
        ("mxfp4", 96, 2, "columns in 2 equal parts are no multiple of 32"),
        ("int4", 96, 2, "columns in 2 equal parts are no multiple of 32"),
    ],
)
def test_parts_that_cut_through_a_group_are_refused(
    format: str, intermediate: int, count: int, message: str
) -> None:
    whole = ExpertWeights(
        w13=encode(normal(E, 2 * intermediate, H, seed=0), format),
        w2=encode(normal(E, H, intermediate, seed=1), format),
        num_experts=E,
    )
    with pytest.raises(ValueError, match=message):
        shard(whole, 0, count)


def test_columns_that_leave_fp8_blocks_unequal_are_refused() -> None:
    """192 columns have two blocks, but halves of them would begin inside one."""
    packed = encode(normal(E, 128, 192, seed=0), "fp8")
    with pytest.raises(ValueError, match=r"fp8 weights \[3, 128, 192\]: columns in 2 equal parts"):
        packed.column_part(0, 2)
