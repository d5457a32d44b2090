"""How FP8's small tiles are cut, and where their programs quantise what they multiply."""

from __future__ import annotations

import pytest

from turnout.moe.backends.hopper.kernels import Fp8, Fp8Sorted, candidates, fp8, refuse, rule
from turnout.moe.backends.hopper.layer_shape import LayerShape
from turnout.moe.backends.hopper.tile_config import SHARED_BYTES, LayerTiles


def shape(**fields: int) -> LayerShape:
    sizes = {
        "hidden": 2048, "inner": 768, "w13_rows": 1536, "num_experts": 128, "local_experts": 128, "top_k": 8,
    }  # fmt: skip
    return LayerShape(format="fp8", **(sizes | fields))


def test_programs_quantise_where_that_spares_a_launch_and_is_not_done_too_often():
    one, four, many = (rule(shape(), tokens) for tokens in (1, 4, 128))
    for config in one:
        assert config.quantizes(2048, first=True, unsorted=True)
        assert config.quantizes(768, first=False, unsorted=True)
    assert not four.first.quantizes(2048, first=True, unsorted=False)
    assert four.second.quantizes(768, first=False, unsorted=False)
    assert many.block_m == 16
    assert not many.second.quantizes(768, first=False, unsorted=False)


@pytest.mark.parametrize("unsorted", [True, False])
def test_what_has_no_room_is_quantised_before(unsorted: bool):
    config = Fp8(64, 8, 256, 4, 4)
    room = [K for K in range(128, 40000, 128) if config.quantizes(K, first=False, unsorted=unsorted)]
    assert room == list(range(128, room[-1] + 1, 128))
    groups = 1 << (room[-1] // 128 - 1).bit_length()  # held as a power of two
    held = config.shared_bytes(shape(), first=False)
    assert held + groups * 128 * 8 <= SHARED_BYTES
    assert held + 2 * groups * 128 * 8 > SHARED_BYTES - 64 * 1024


def test_wider_tiles_of_gemm2_are_for_where_programs_are_many():
    assert [config.block_n for config in rule(shape(), 1)] == [64, 64]
    for tokens, width in ((16, 8), (128, 16)):
        cut = [(config.block_n, config.block_m) for config in rule(shape(), tokens)]
        assert cut == [(64, width), (128, width)]
    small = {"hidden": 512, "num_experts": 16, "local_experts": 16, "top_k": 2}
    assert rule(shape(**small), 20).block_m == 8
    assert rule(shape(**small), 20).second.block_n == 64


def test_few_tokens_per_expert_need_no_rows_by_expert():
    assert {tokens: rule(shape(), tokens).block_m for tokens in (64, 128, 256)} == {64: 8, 128: 16, 256: 32}
    assert isinstance(rule(shape(), 300).first, Fp8Sorted)


def test_all_that_is_timed_runs():
    for width, found in fp8.FAST.items():
        for config in (*found[0], *found[1], *(fp8.FAST_UNSORTED if width == 8 else ())):
            assert config.block_m == width
            assert not refuse(shape(), LayerTiles(config, config))
    timed = [candidates(shape(), tokens) for tokens in (1, 20, 100, 200, 2000)]
    widths = [[choices.first[0].block_m for choices in found] for found in timed]
    assert widths == [[8], [8, 16], [8, 16, 32], [128, 16, 32, 64], [128, 32, 64]]
