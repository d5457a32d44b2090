"""How GEMMs are cut: rule, tables, and what no kernel runs."""

from __future__ import annotations

import math

import pytest

from turnout.moe.backends.hopper.tile_config import (
    RULES,
    SORTED,
    SPECIAL,
    SPECIAL_ABOVE,
    LayerShape,
    Tiles,
    Tiling,
    choose,
    refuse,
    rule,
    shared_bytes,
    slab_rule,
)
from turnout.moe.backends.hopper.tile_few import chunks
from turnout.moe.backends.hopper.tile_pairs import columns, whole_chunks


def shape(format: str = "mxfp4", **fields) -> LayerShape:
    sizes = {
        "hidden": 2048, "inner": 768, "w13_rows": 1536, "num_experts": 128, "local_experts": 128, "top_k": 8,
    }  # fmt: skip
    return LayerShape(format=format, **(sizes | fields))


@pytest.mark.parametrize("format", ["bf16", "fp8", "mxfp4", "nvfp4"])
def test_the_rule_gives_what_kernels_run_and_wider_tiles_to_larger_batches(format: str):
    some = shape(format)
    found = [rule(some, tokens) for tokens in range(1, 20000, 7)]
    assert not any(refuse(some, tiles) for tiles in found)
    widths = [tiles.tokens for tiles in found]
    assert widths == sorted(widths)
    assert widths[0] == (8 if format == "fp8" else 1)
    assert widths[-1] >= 128
    assert found[-1].sorted == (format == "fp8")
    assert not any(refuse(some, slab_rule(some, capacity)) for capacity in (1, 40, 4000))


def test_few_programs_are_made_of_fewer_rows():
    assert rule(shape("bf16", hidden=1024), 1, one_order=True).second.rows == 64
    assert rule(shape("mxfp4"), 64, one_order=True).first.rows == 128
    dsv3 = shape(hidden=7168, inner=2048, w13_rows=4096, num_experts=256, local_experts=32)
    assert [tiling.rows for tiling in rule(dsv3, 2, one_order=True)[:2]] == [64, 128]


def test_few_tokens_of_4_bit_weights_are_multiplied_by_warps_that_share_columns():
    small = shape("nvfp4")
    slices = [rule(small, tokens).first.slices for tokens in (6, 64, 256)]
    assert slices == [1, 1, 0]
    assert [tiling.rows for tiling in rule(small, 64)[:2]] == [128, 64]
    dsv3 = shape(hidden=7168, inner=2048, w13_rows=4096, num_experts=256, local_experts=32)
    assert [tiling.slices for tiling in rule(dsv3, 6)[:2]] == [2, 1]
    for other in (shape("bf16"), shape("fp8")):
        assert rule(other, 6).first.slices == 0
    for tokens in (1, 4, 64):
        assert rule(small, tokens, one_order=True).first.slices == 0
        assert choose(small, (), tokens, one_order=True) == rule(small, tokens, one_order=True)


@pytest.mark.parametrize("format", ["bf16", "mxfp4", "nvfp4"])
def test_few_pairs_are_not_sorted_and_share_warps_as_this_rank_holds_them(format: str):
    whole = rule(shape(format), 1)
    assert whole.pairs
    assert whole.second.group == 8 == whole.second.warps
    assert rule(shape(format, top_k=4), 1).second[4:] == (8, 4, 2)
    dsv3 = shape(format, hidden=7168, inner=2048, w13_rows=4096, num_experts=256, local_experts=32)
    assert rule(dsv3, 1).second.group == 1
    assert not any(rule(some, 1, one_order=True).pairs for some in (shape(format), dsv3))
    for wide in (14336, 28672):
        for top_k in (1, 2, 8, 10):
            for experts in (16, 64):
                some = shape(
                    format, hidden=wide, inner=wide, num_experts=64, local_experts=experts, top_k=top_k
                )
                assert rule(some, 1).pairs
                assert not refuse(some, rule(some, 1))
    assert not rule(shape(format), 9).pairs
    table = ((1, whole), (16, rule(shape(format), 16)))
    assert [choose(shape(format), table, tokens).pairs for tokens in (1, 3)] == [True, True]
    odd = shape(format, top_k=30)  # 90 pairs
    assert choose(odd, table, 3) == rule(odd, 3)
    assert not rule(odd, 3).pairs


@pytest.mark.parametrize(
    ("first", "second", "why"),
    [
        ({"group": 4}, {}, "4 is no time for GEMM2 to start"),
        ({"rows": 48}, {}, "48 weight rows"),
        ({"warps": 6}, {}, "6 warps"),
        ({"slices": 8}, {}, "4 warps for 1 pairs in 8 slices"),
        ({"rows": 128}, {}, "8 strips of a warp"),
        ({"stages": 5}, {}, "5 chunks ahead"),
        ({"k_blocks": 1}, {}, "1 blocks at once"),
        ({}, {"group": 3}, "3 pairs"),
    ],
)
def test_what_the_kernels_for_few_pairs_do_not_run_is_refused(first: dict, second: dict, why: str):
    for format in ("bf16", "mxfp4"):
        fine = rule(shape(format), 1)
        assert why in refuse(
            shape(format), Tiles(fine.first._replace(**first), fine.second._replace(**second))
        )
        wide = shape(format, inner=16384)
        assert "bytes of shared memory" in refuse(wide, fine)
    assert "pairs that are not sorted" in refuse(shape("fp8"), fine)
    assert "differ in their tokens" in refuse(shape(), Tiles(fine.first, rule(shape(), 64).second))


def test_chunks_without_bounds_are_within_every_slice():
    for K in (64, 256, 768, 2048, 2880, 2896, 7168):
        for slices in (1, 2, 4, 8):
            for k_blocks in (2, 4):
                blocks = math.ceil(math.ceil(K / 64) / slices)
                whole, all_chunks = whole_chunks(K, slices, k_blocks), chunks(K, slices, k_blocks)
                ends = [(part * blocks + whole * k_blocks) * 64 for part in range(slices)]
                assert whole == 0 or max(ends) <= K
                assert whole * k_blocks <= blocks <= all_chunks * k_blocks
                assert columns(K, slices, k_blocks) >= all_chunks * k_blocks * 64


def test_pairs_of_4_bit_weights_are_sorted_later_than_others():
    assert [shape(format).direct(5) for format in ("mxfp4", "nvfp4", "bf16", "fp8")] == [
        True,
        True,
        False,
        False,
    ]
    few = {"num_experts": 32, "local_experts": 32, "top_k": 4}
    assert [shape(**few).direct(tokens) for tokens in (1, 3, 4)] == [True, True, False]
    assert [shape(**few).unsorted(tokens) for tokens in (3, 4, 5)] == [True, True, False]
    assert [shape("bf16", **few).unsorted(tokens) for tokens in (3, 4)] == [True, False]
    assert not shape("fp8").unsorted(1)
    assert shape().touched(5) == 40
    assert 120 < shape().touched(64) < 128
    assert shape(local_experts=32).touched(5) == 10


@pytest.mark.parametrize(
    ("tiling", "why"),
    [
        (Tiling(64, 64, 4, 4, 4, 1, 1), "64 tokens for few tokens"),
        (Tiling(48, 8, 4, 4, 4, 1, 1), "48 weight rows"),
        (Tiling(16, 8, 4, 4, 8, 1, 4), "16 rows with 8 warps in 4 slices"),
        (Tiling(256, 8, 4, 4, 4, 1, 1), "4 blocks at once"),
        (Tiling(64, 8, 4, 1, 4, 1, 1), "1 stages"),
        (Tiling(64, 32, 4, 16, 8, 1, 2), "bytes of shared memory"),
        (Tiling(64, 8, 4, 4, 4, 0, 1), "0 tiles taking turns"),
    ],
)
def test_what_the_kernel_for_few_tokens_does_not_run_is_refused(tiling: Tiling, why: str):
    assert why in refuse(shape(), Tiles(tiling, tiling))
    fine = Tiling(64, 8, 4, 4, 8, 1, 2)
    assert not refuse(shape("nvfp4"), Tiles(fine, fine))
    for other in ("bf16", "fp8"):
        assert "columns in slices" in refuse(shape(other), Tiles(fine, fine))


def test_fp8_is_sorted_only_where_tiles_are_whole():
    assert rule(shape("fp8"), 4096) == SORTED
    assert rule(shape("fp8", hidden=2048 + 128), 4096).sorted is False
    assert "whole tiles" in refuse(shape("fp8", hidden=2048 + 128), SORTED)
    assert "whole tiles" in refuse(shape("bf16"), SORTED)


def test_the_nearest_entry_of_a_table_counts():
    some = shape()
    one, two, three = (rule(some, tokens) for tokens in (1, 256, 4096))
    table = ((1, one), (16, two), (4096, three))
    wanted = {1: one, 3: one, 4: two, 16: two, 255: two, 256: three, 4096: three, 10**6: three}
    assert {tokens: choose(some, table, tokens) for tokens in wanted} == wanted
    assert {choose(some, ((256, two),), tokens) for tokens in (1, 300, 9999)} == {two}
    assert choose(some, (), 4096) == three


@pytest.mark.parametrize(
    ("tiling", "why"),
    [
        (Tiling(192, 8, 2, 5, 4, 1), "192 weight rows"),
        (Tiling(128, 24, 2, 5, 4, 1), "24 tokens"),
        (Tiling(64, 8, 2, 5, 8, 1), "64 rows with 8 warps"),
        (Tiling(128, 8, 2, 2, 4, 1), "2 stages"),
        (Tiling(128, 8, 3, 4, 4, 1), "3 blocks a step"),
        (Tiling(256, 256, 1, 3, 8, 1), "in the registers of 8 warps"),
        (Tiling(128, 128, 2, 8, 4, 1), "bytes of shared memory"),
        (Tiling(128, 8, 2, 5, 4, 0), "0 tiles taking turns"),
    ],
)
def test_what_no_kernel_runs_is_refused(tiling: Tiling, why: str):
    assert why in refuse(shape(), Tiles(tiling, tiling))


def test_many_tokens_per_expert_are_for_specialised_warps():
    for format, bounds in SPECIAL_ABOVE.items():
        some = shape("nvfp4" if format == "packed" else format, num_experts=8, local_experts=8)
        assert not rule(some, bounds[-1][0]).specialised
        assert [rule(some, above + 1).first for above, _ in bounds] == [tiling for _, tiling in bounds]
        for tiling in SPECIAL[format]:
            assert not refuse(some, Tiles(tiling, tiling))
            assert shared_bytes(format, tiling) > shared_bytes(format, tiling._replace(warps=8))
            for change, why in (
                ({"rows": 64}, "64 weight rows"),
                ({"k_blocks": 4}, "4 blocks a step"),
                ({"stages": 12}, "bytes of shared memory"),
                ({"group": 0}, "0 tiles taking turns"),
            ):
                other = tiling._replace(**change)
                assert why in refuse(some, Tiles(other, other))
    assert "fp8 weights" in refuse(shape("fp8"), Tiles(tiling, tiling))


def test_gemms_that_disagree_on_tokens_are_refused():
    assert "differ in their tokens" in refuse(shape(), Tiles(*(tiling for _, tiling in RULES["bf16"][:2])))


def test_batches_fall_into_no_more_tiles_than_are_allowed_for():
    some = shape(num_experts=8, local_experts=4, top_k=2)
    for tokens, width in ((5, 8), (9, 8), (100, 16), (1000, 64)):
        pairs = tokens * 2
        for busiest in range(pairs + 1):  # that many in one expert, the rest as evenly as can be in three
            rest = [(pairs - busiest + i) // 3 for i in range(3)]
            tiles = sum(math.ceil(n / width) for n in (busiest, *rest))
            assert tiles <= some.most_tiles(tokens, width)


def test_bytes_of_shared_memory_are_those_of_all_stages():
    assert shared_bytes("bf16", Tiling(256, 128, 1, 4, 8, 8)) == 4 * 64 * 2 * (256 + 128)
    assert shared_bytes("fp8", Tiling(128, 64, 1, 4, 4, 1)) == 4 * (128 * (128 + 64) + 4 * 64)
