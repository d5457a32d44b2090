"""Which kernel a batch takes and how it is cut: rule, tables, and what no kernel runs."""

from __future__ import annotations

import math
from typing import get_args

import msgspec
import pytest
from msgspec.structs import replace

from turnout.moe.backends.hopper.kernels import (
    KERNELS,
    AnyConfig,
    FewTokens,
    Fp8,
    Fp8Sorted,
    Packed,
    Pairs,
    Plain,
    Specialised,
    batched_experts_rule,
    candidates,
    choose,
    plain,
    refuse,
    rule,
    specialised,
    tiled,
    w4a8,
)
from turnout.moe.backends.hopper.kernels.fp8_sorted import ONLY
from turnout.moe.backends.hopper.kernels.pairs import columns, whole_chunks
from turnout.moe.backends.hopper.layer_shape import LayerShape
from turnout.moe.backends.hopper.tile_config import LayerTiles, TileConfig, chunks

SORTED = LayerTiles(ONLY, ONLY)
DSV3 = {"hidden": 7168, "inner": 2048, "w13_rows": 4096, "num_experts": 256, "local_experts": 32}
FORMATS = ["bf16", "fp8", "mxfp4", "nvfp4", "int4", "w4a8"]


def shape(format: str = "mxfp4", **fields) -> LayerShape:
    sizes = {
        "hidden": 2048, "inner": 768, "w13_rows": 1536, "num_experts": 128, "local_experts": 128, "top_k": 8,
    }  # fmt: skip
    return LayerShape(format=format, **(sizes | fields))


def both(config: TileConfig) -> LayerTiles:
    return LayerTiles(config, config)


def is_pairs(tiles: LayerTiles) -> bool:
    return all(isinstance(config, Pairs) for config in tiles)


def slices(tiles: LayerTiles) -> list[int]:
    """Warps that share columns, of each GEMM that few tokens' kernel takes."""
    return [config.split_k for config in tiles if isinstance(config, FewTokens)]


@pytest.mark.parametrize("format", FORMATS)
def test_the_rule_gives_what_kernels_run_and_wider_tiles_to_larger_batches(format: str):
    some = shape(format)
    found = [rule(some, tokens) for tokens in range(1, 20000, 7)]
    assert not any(refuse(some, tiles) for tiles in found)
    widths = [tiles.block_m for tiles in found]
    assert widths == sorted(widths)
    assert widths[0] == {"fp8": 8, "w4a8": 16}.get(format, 1)
    assert widths[-1] >= 128
    assert (found[-1] == SORTED) == (format == "fp8")
    assert not any(refuse(some, batched_experts_rule(some, capacity)) for capacity in (1, 40, 4000))


@pytest.mark.parametrize("kernel", KERNELS)
def test_each_kernel_answers_for_itself_alone(kernel: type[TileConfig]):
    """The rest of a batch's choice is asking them in order: whoever it is, its own rule gave it."""
    some = {format: shape(format) for format in FORMATS}
    assert [format for format in FORMATS if kernel.takes(some[format])]
    chosen = 0
    for layer in some.values():
        for tokens in (1, 4, 16, 64, 300, 2000, 8000):
            tiles = rule(layer, tokens)
            if isinstance(tiles.first, kernel):
                chosen += 1
                assert tiles == kernel.rule(layer, tokens)
                timed = [c for choices in candidates(layer, tokens) for c in choices.first]
                assert tiles.first in timed
                encoded = msgspec.json.encode(tiles.first)
                assert msgspec.json.decode(encoded, type=AnyConfig) == tiles.first
                assert msgspec.json.decode(encoded)["kernel"] == kernel.__struct_config__.tag
    assert chosen
    assert get_args(AnyConfig) == KERNELS


def test_few_programs_are_made_of_fewer_rows():
    assert rule(shape("bf16", hidden=1024), 1, batch_invariant=True).second.block_n == 64
    assert rule(shape("mxfp4"), 64, batch_invariant=True).first.block_n == 128
    narrow = rule(shape(**DSV3), 2, batch_invariant=True)
    assert [config.block_n for config in narrow] == [64, 128]


def test_few_tokens_of_4_bit_weights_are_multiplied_by_warps_that_share_columns():
    small = shape("nvfp4")
    assert [slices(rule(small, tokens)) for tokens in (6, 64, 256)] == [[1, 1], [1, 1], []]
    assert [config.block_n for config in rule(small, 64)] == [128, 64]
    assert slices(rule(shape(**DSV3), 6)) == [2, 1]
    for other in (shape("bf16"), shape("fp8")):
        assert not slices(rule(other, 6))
    for tokens in (1, 4, 64):
        assert not slices(rule(small, tokens, batch_invariant=True))
        assert choose(small, (), tokens, batch_invariant=True) == rule(small, tokens, batch_invariant=True)


@pytest.mark.parametrize("format", ["bf16", "mxfp4", "nvfp4"])
def test_few_pairs_are_not_sorted_and_share_warps_as_this_rank_holds_them(format: str):
    whole = rule(shape(format), 1)
    assert is_pairs(whole)
    assert whole.second.group_m == 8 == whole.second.num_warps
    four = rule(shape(format, top_k=4), 1).second
    assert (four.num_warps, four.group_m, four.split_k) == (8, 4, 2)
    dsv3 = shape(format, **DSV3)
    assert rule(dsv3, 1).second.group_m == 1
    assert not any(is_pairs(rule(some, 1, batch_invariant=True)) for some in (shape(format), dsv3))
    for wide in (14336, 28672):
        for top_k in (1, 2, 8, 10):
            for experts in (16, 64):
                some = shape(
                    format, hidden=wide, inner=wide, num_experts=64, local_experts=experts, top_k=top_k
                )
                assert is_pairs(rule(some, 1))
                assert not refuse(some, rule(some, 1))
    assert not is_pairs(rule(shape(format), 9))
    table = ((1, whole), (16, rule(shape(format), 16)))
    assert [is_pairs(choose(shape(format), table, tokens)) for tokens in (1, 3)] == [True, True]
    odd = shape(format, top_k=30)  # 90 pairs
    assert choose(odd, table, 3) == rule(odd, 3)
    assert not is_pairs(rule(odd, 3))


@pytest.mark.parametrize(
    ("first", "second", "why"),
    [
        ({"group_m": 4}, {}, "group_m 4 in GEMM1"),
        ({"block_n": 48}, {}, "block_n 48"),
        ({"num_warps": 6}, {}, "num_warps 6"),
        ({"split_k": 8}, {}, "num_warps 4 for group_m 1, split_k 8"),
        ({"split_k": 0}, {}, "split_k 0"),
        ({"block_n": 128}, {}, "8 strips of a warp"),
        ({"num_stages": 5}, {}, "num_stages 5"),
        ({"block_k": 64}, {}, "block_k 64"),
        ({}, {"group_m": 3}, "group_m 3"),
    ],
)
def test_what_the_kernels_for_few_pairs_do_not_run_is_refused(first: dict, second: dict, why: str):
    for format in ("bf16", "mxfp4"):
        fine = rule(shape(format), 1)
        assert why in refuse(
            shape(format), LayerTiles(replace(fine.first, **first), replace(fine.second, **second))
        )
        wide = shape(format, inner=16384)
        assert "bytes of shared memory" in refuse(wide, fine)
    assert "kernel pairs does not take fp8 weights" in refuse(shape("fp8"), fine)
    assert "differ in block_m" in refuse(shape(), LayerTiles(fine.first, rule(shape(), 64).second))


def test_chunks_without_bounds_are_within_every_slice():
    for K in (64, 256, 768, 2048, 2880, 2896, 7168):
        for split_k in (1, 2, 4, 8):
            for block_k in (128, 256):
                blocks = math.ceil(math.ceil(K / 64) / split_k)
                whole, every = whole_chunks(K, split_k, block_k), chunks(K, split_k, block_k)
                ends = [part * blocks * 64 + whole * block_k for part in range(split_k)]
                assert whole == 0 or max(ends) <= K
                assert whole * block_k <= blocks * 64 <= every * block_k
                assert columns(K, split_k, block_k) >= every * block_k


def test_pairs_of_4_bit_weights_are_sorted_later_than_others():
    assert [shape(format).unsorted(5) for format in ("mxfp4", "nvfp4", "bf16", "fp8")] == [
        True,
        True,
        False,
        False,
    ]
    few = {"num_experts": 32, "local_experts": 32, "top_k": 4}
    assert [shape(**few).unsorted(tokens) for tokens in (1, 3, 4)] == [True, True, False]
    assert [is_pairs(rule(shape(**few), tokens)) for tokens in (3, 4, 5)] == [True, True, False]
    assert [is_pairs(rule(shape("bf16", **few), tokens)) for tokens in (3, 4)] == [True, False]
    assert shape().touched(5) == 40
    assert 120 < shape().touched(64) < 128
    assert shape(local_experts=32).touched(5) == 10


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (FewTokens(64, 64, 256, 4, 4, 1, 1), "block_m 64 for few tokens"),
        (FewTokens(48, 8, 256, 4, 4, 1, 1), "block_n 48"),
        (FewTokens(16, 8, 256, 4, 8, 1, 4), "block_n 16 with num_warps 8, split_k 4"),
        (FewTokens(256, 8, 256, 4, 4, 1, 1), "block_k 256"),
        (FewTokens(64, 8, 256, 1, 4, 1, 1), "num_stages 1"),
        (FewTokens(64, 32, 256, 16, 8, 1, 2), "bytes of shared memory"),
        (FewTokens(64, 8, 256, 4, 4, 0, 1), "group_m 0"),
    ],
)
def test_what_the_kernel_for_few_tokens_does_not_run_is_refused(config: FewTokens, why: str):
    assert why in refuse(shape(), both(config))
    fine = both(FewTokens(64, 8, 256, 4, 8, 1, 2))
    assert not refuse(shape("nvfp4"), fine)
    for other in ("bf16", "fp8"):
        assert f"kernel few_tokens does not take {other} weights" in refuse(shape(other), fine)


def test_fp8_is_sorted_only_where_tiles_are_whole():
    ragged = shape("fp8", hidden=2048 + 128)
    assert rule(shape("fp8"), 4096) == SORTED
    assert all(isinstance(config, Fp8) for config in rule(ragged, 4096))
    for other in (ragged, shape("bf16")):
        assert "kernel fp8_sorted does not take" in refuse(other, SORTED)
    small = Fp8(128, 128, 128, 4, 8)
    assert not refuse(shape("fp8"), both(small))
    assert "rows in the order of experts for one of" in refuse(shape("fp8"), LayerTiles(ONLY, small))
    assert "no configuration of fp8_sorted but" in refuse(shape("fp8"), both(replace(ONLY, num_stages=3)))


def test_rows_are_sorted_by_experts_before_kernels_that_need_it_whatever_a_table_says():
    """A table's entry may serve batches so small that others' pairs are not sorted."""
    some = shape("fp8")
    assert some.unsorted(2)
    assert not SORTED.unsorted(some, 2)
    assert rule(some, 2).unsorted(some, 2)
    packed, few = Packed(64, 8, 64, 5, 4), FewTokens(64, 8, 256, 4, 8, 1, 2)
    assert both(packed).unsorted(shape(), 2)
    assert not LayerTiles(packed, few).unsorted(shape(), 2)


def test_the_nearest_entry_of_a_table_counts():
    some = shape()
    one, two, three = (rule(some, tokens) for tokens in (1, 256, 4096))
    table = ((1, one), (16, two), (4096, three))
    wanted = {1: one, 3: one, 4: two, 16: two, 255: two, 256: three, 4096: three, 10**6: three}
    assert {tokens: choose(some, table, tokens) for tokens in wanted} == wanted
    assert {choose(some, ((256, two),), tokens) for tokens in (1, 300, 9999)} == {two}
    assert choose(some, (), 4096) == three


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (Plain(192, 8, 128, 5, 4), "block_n 192"),
        (Plain(128, 24, 128, 5, 4), "block_m 24"),
        (Plain(64, 8, 128, 5, 8), "block_n 64 with num_warps 8"),
        (Plain(128, 8, 128, 2, 4), "num_stages 2"),
        (Plain(128, 8, 192, 4, 4), "block_k 192"),
        (Plain(256, 256, 64, 3, 8), "in the registers of num_warps 8"),
        (Plain(128, 128, 128, 8, 4), "bytes of shared memory"),
        (Plain(128, 8, 128, 5, 4, 0), "group_m 0"),
        (Packed(256, 8, 64, 5, 4), "block_n 256"),
        (Packed(128, 8, 128, 5, 4), "block_k 128"),
        (w4a8.W4A8(64, 16, 128, 4, 4), "block_n 64"),
        (w4a8.W4A8(128, 16, 128, 4, 8), "num_warps 8"),
        (w4a8.W4A8(256, 128, 128, 9, 4), "bytes of shared memory"),
    ],
)
def test_what_no_kernel_runs_is_refused(config: TileConfig, why: str):
    format = {"plain": "bf16", "packed": "mxfp4"}.get(config.kernel, config.kernel)
    assert why in refuse(shape(format), both(config))


def test_many_tokens_per_expert_are_for_specialised_warps():
    for weights, above in specialised.ABOVE.items():
        some = shape("nvfp4" if weights == "packed" else weights, num_experts=8, local_experts=8)
        assert not isinstance(rule(some, above).first, Specialised)
        assert rule(some, above + 1) == both(specialised.CHOICES[weights][0])
        for config in specialised.CHOICES[weights]:
            assert not refuse(some, both(config))
            for change, why in (
                ({"block_n": 64}, "block_n 64"),
                ({"block_m": 256 if weights == "packed" else 144}, "with specialised warps"),
                ({"num_warps": 8}, "num_warps 8"),
                ({"block_k": 256}, "block_k 256"),
                ({"num_stages": 12}, "bytes of shared memory"),
                ({"group_m": 0}, "group_m 0"),
            ):
                assert why in refuse(some, both(replace(config, **change)))
    assert "kernel specialised does not take fp8 weights" in refuse(shape("fp8"), both(config))


def test_gemms_that_disagree_on_tokens_are_refused():
    assert "differ in block_m" in refuse(shape("bf16"), LayerTiles(*(one for _, one in plain.RULES[:2])))


def test_batches_fall_into_no_more_tiles_than_are_allowed_for():
    some = shape(num_experts=8, local_experts=4, top_k=2)
    for tokens, width in ((5, 8), (9, 8), (100, 16), (1000, 64)):
        pairs = tokens * 2
        for busiest in range(pairs + 1):  # that many in one expert, the rest as evenly as can be in three
            rest = [(pairs - busiest + i) // 3 for i in range(3)]
            tiles = sum(math.ceil(n / width) for n in (busiest, *rest))
            assert tiles <= some.most_tiles(tokens, width)


def test_bytes_of_shared_memory_are_those_of_all_stages():
    bf16, fp8 = Plain(256, 128, 64, 4, 8), Fp8(128, 64, 128, 4, 4)
    assert bf16.shared_bytes(shape("bf16"), first=True) == 4 * 64 * 2 * (256 + 128)
    assert fp8.shared_bytes(shape("fp8"), first=True) == 4 * (128 * (128 + 64) + 4 * 64)
    # Three stages and four boxes of [64, 128] rows in bf16.
    assert ONLY.shared_bytes(shape("fp8"), first=False) == 3 * 128 * (256 + 128) + 4 * 64 * 128 * 2


def test_a_kernel_without_configurations_for_a_layer_is_not_asked():
    assert Fp8Sorted.takes(shape("fp8"))
    assert not Fp8Sorted.takes(shape("fp8", w13_rows=1536 + 128))
    assert not any(kernel.takes(shape("w4a8")) for kernel in KERNELS if kernel is not w4a8.W4A8)
    assert tiled.Tiled not in KERNELS
