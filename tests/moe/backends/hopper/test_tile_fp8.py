"""How FP8's small tiles are cut, and where their programs quantise what they multiply."""

from __future__ import annotations

import pytest

from turnout.moe.backends.hopper import tile_fp8
from turnout.moe.backends.hopper.tile_config import (
    SHARED_BYTES,
    SORTED,
    LayerShape,
    Tiles,
    Tiling,
    quantizes,
    refuse,
    rule,
    shared_bytes,
)


def shape(**fields: int) -> LayerShape:
    sizes = {
        "hidden": 2048, "inner": 768, "w13_rows": 1536, "num_experts": 128, "local_experts": 128, "top_k": 8,
    }  # fmt: skip
    return LayerShape(format="fp8", **(sizes | fields))


def test_programs_quantise_where_that_spares_a_launch_and_is_not_done_too_often():
    one, four, many = (rule(shape(), tokens) for tokens in (1, 4, 128))
    for tiling in one[:2]:
        assert quantizes(tiling, 2048, first=True, direct=True)
        assert quantizes(tiling, 768, first=False, direct=True)
    assert not quantizes(four.first, 2048, first=True, direct=False)
    assert quantizes(four.second, 768, first=False, direct=False)
    assert many.tokens == 16
    assert not quantizes(many.second, 768, first=False, direct=False)


@pytest.mark.parametrize("direct", [True, False])
def test_what_has_no_room_is_quantised_before(direct: bool):
    tiling = Tiling(64, 8, 2, 4, 4, 1)
    room = [K for K in range(128, 40000, 128) if quantizes(tiling, K, first=False, direct=direct)]
    assert room == list(range(128, room[-1] + 1, 128))
    groups = 1 << (room[-1] // 128 - 1).bit_length()  # held as a power of two
    assert shared_bytes("fp8", tiling) + groups * 128 * 8 <= SHARED_BYTES
    assert shared_bytes("fp8", tiling) + 2 * groups * 128 * 8 > SHARED_BYTES - 64 * 1024


def test_wider_tiles_of_gemm2_are_for_where_programs_are_many():
    assert [tiling.rows for tiling in rule(shape(), 1)[:2]] == [64, 64]
    for tokens, width in ((16, 8), (128, 16)):
        assert [tiling[:2] for tiling in rule(shape(), tokens)[:2]] == [(64, width), (128, width)]
    small = {"hidden": 512, "num_experts": 16, "local_experts": 16, "top_k": 2}
    assert rule(shape(**small), 20).tokens == 8
    assert rule(shape(**small), 20).second.rows == 64


def test_few_tokens_per_expert_need_no_rows_by_expert():
    widths = {tokens: rule(shape(), tokens).tokens for tokens in (64, 128, 256, 300)}
    assert widths == {64: 8, 128: 16, 256: 32, 300: SORTED.tokens}


def test_all_that_is_timed_runs():
    for tokens, (firsts, seconds) in tile_fp8.CHOICES.items():
        for cut in (*firsts, *seconds, *(tile_fp8.ALONE if tokens == 8 else ())):
            tiling = Tiling(*cut, 1)
            assert tiling.tokens == tokens
            assert not refuse(shape(), Tiles(tiling, tiling))
    assert [len(tile_fp8.choices(tokens, direct=False)) for tokens in (8, 16, 32, 64)] == [2, 3, 3, 2]
