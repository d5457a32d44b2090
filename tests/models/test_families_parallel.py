"""Every family over ranks: attention TP, and data-parallel attention with experts spread over ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.checkpoint.writers import FORMATS, Written, save
from tests.models.families import FAMILIES, build, one_by_one
from tests.models.test_families_formats import dequantised
from tests.models.test_parallel import check, expected_logits
from tests.ranks import Pools

TOPOLOGIES = {"tp2": (2, {}), "dp2 ep2": (2, {"dp_size": 2, "ep_size": 2})}


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(its folder, transformers' logits of every sequence)"""
    built = build(tmp_path_factory.mktemp(request.param), FAMILIES[request.param])
    return built.folder, expected_logits(built.model)


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_logits_equal_transformers(name: str, model: Any, ranks: Pools) -> None:
    folder, expected = model
    size, sizes = TOPOLOGIES[name]
    check(ranks, folder, expected, size, sizes)


def test_a_key_head_that_two_ranks_hold_counts_once_in_a_whole_norm(tmp_path: Any, ranks: Pools) -> None:
    built = build(tmp_path, FAMILIES["minimax_m2"])
    check(ranks, tmp_path, expected_logits(built.model), 4, {})


@pytest.mark.parametrize("name", ["qwen3_5_moe", pytest.param("qwen3_next", marks=pytest.mark.more)])
def test_heads_that_do_not_begin_where_blocks_of_fp8_do(name: str, tmp_path: Any, ranks: Pools) -> None:
    """Of recurrent layers too, whose b and a have fewer rows than a block on all ranks together."""
    family = FAMILIES[name]
    built = build(tmp_path / "fp8", replace(family, release=one_by_one) if name == "qwen3_5_moe" else family)
    tensors = dict(built.tensors)
    written = Written(built.folder, built.model, dict(tensors))
    FORMATS["fp8"](written, tensors, True)
    save(built.folder, tensors)
    small = [n for n in tensors if n.endswith(("in_proj_b.weight_scale_inv", "in_proj_ba.weight_scale_inv"))]
    assert small
    theirs = dequantised(built, written.weights, tmp_path / "plain")
    check(ranks, built.folder, expected_logits(theirs), 2, {"ep_size": 2}, moe_activation_dtype="bf16")


@pytest.mark.parametrize(
    ("size", "sizes"),
    [
        (2, {}),
        pytest.param(4, {"dp_size": 2, "ep_size": 4, "enable_dp_lm_head": True}, marks=pytest.mark.more),
    ],
    ids=str,
)
def test_dense_layers_whole_on_each_rank(
    size: int, sizes: dict[str, Any], tmp_path: Any, ranks: Pools
) -> None:
    built = build(tmp_path, FAMILIES["glm4_moe_lite"])
    check(ranks, tmp_path, expected_logits(built.model), size, sizes | {"moe_dense_tp_size": 1})


@pytest.mark.parametrize(
    "name",
    ["deepseek_v4", *(pytest.param(x, marks=pytest.mark.more) for x in ("deepseek_v32", "glm_moe_dsa"))],
)
def test_a_rank_for_each_share_of_requests_and_of_experts(name: str, tmp_path: Any, ranks: Pools) -> None:
    """The default layout of DeepSeek-V4, over four ranks, some of which have no tokens in a step."""
    built = build(tmp_path, FAMILIES[name])
    check(ranks, tmp_path, expected_logits(built.model), 4, {"dp_size": 4, "ep_size": 4})


@pytest.mark.more
@pytest.mark.parametrize("sizes", [{"ep_size": 2}, {"dp_size": 2, "ep_size": 4}], ids=str)
@pytest.mark.parametrize("dispatcher", ["none", "collective", "collective-experts"])
def test_four_ranks(sizes: dict[str, int], dispatcher: str, model: Any, ranks: Pools) -> None:
    """Shared experts are a shard of the sum, or whole; tokens go to the ranks of their experts."""
    folder, expected = model
    torch.manual_seed(0)
    check(ranks, folder, expected, 4, sizes, moe_a2a_backend=dispatcher)
