"""The search for tilings: on a made-up device whose times are known, and, with a GPU, on the real one."""

from __future__ import annotations

import math
from dataclasses import replace

import msgspec
import pytest
import torch

from tests.moe.build import make_experts, make_plan, make_spec
from turnout.moe.backends.hopper.autotune import (
    BETWEEN,
    TOKENS,
    _settle,
    _tune,
    calls_in_graph,
    tile_times,
    to_compile,
)
from turnout.moe.backends.hopper.kernels import candidates, choose, refuse, rule
from turnout.moe.backends.hopper.layer_shape import LayerShape
from turnout.moe.backends.hopper.tile_config import LayerTiles, TileConfig
from turnout.moe.batch import Hidden, TokensBatch
from turnout.moe.capabilities.declared import RUNNERS
from turnout.parallel.hardware import copies_beyond_cache

SHAPE = LayerShape(
    format="mxfp4", hidden=2048, inner=768, w13_rows=1536, num_experts=128, local_experts=128, top_k=8
)


class Device:
    """Stands for a GPU on which each tiling takes `slow`, but for some."""

    def __init__(
        self, first: dict[TileConfig, float], second: dict[TileConfig, float], slow: float = 100.0
    ) -> None:
        self._first, self._second, self._slow = first, second, slow
        self.timed: list[LayerTiles] = []

    def time(self, tokens: int, tiles: LayerTiles) -> float:
        self.timed.append(tiles)
        return self._first.get(tiles.first, self._slow) + self._second.get(tiles.second, self._slow)

    def in_turn(self, tokens: int, choices: list[LayerTiles]) -> dict[LayerTiles, float]:
        return {tiles: self.time(tokens, tiles) for tiles in choices}


@pytest.mark.parametrize("tokens", [4, 64, 1024])
def test_the_fastest_of_both_gemms_are_found_one_after_the_other(tokens: int):
    choices = candidates(SHAPE, tokens)[-1]
    first, second = choices.first[-1], choices.second[1]
    device = Device({first: 10.0}, {second: 20.0})
    entry = _tune(device, SHAPE, tokens)
    assert entry.tiles == LayerTiles(first, second)
    assert (entry.us, entry.rule_us) == (30.0, device.time(tokens, rule(SHAPE, tokens)))
    assert len(set(device.timed)) < 40


def test_kernels_that_cannot_be_made_are_passed_over():
    said = rule(SHAPE, 64)
    device = Device({said.first: 50.0}, {said.second: 50.0}, slow=math.inf)
    assert _tune(device, SHAPE, 64).tiles == said


def test_the_rule_stays_unless_it_is_beaten_by_more_than_noise():
    said = rule(SHAPE, 64)
    other = LayerTiles(msgspec.structs.replace(said.first, num_stages=6), said.second)
    for us, wanted in ((99.0, said), (95.0, other)):
        device = Device({said.first: 100.0, other.first: us}, {said.second: 0.0})
        entry = _settle(device, SHAPE, 64, (other,))
        assert entry.tiles == wanted
        assert (entry.us, entry.rule_us) == (100.0 if wanted == said else us, 100.0)


def test_enough_copies_of_weights_to_leave_the_cache():
    assert [copies_beyond_cache(size) for size in (10**6, 60_000_000, 10**10)] == [6, 6, 2]


def test_few_tokens_are_timed_with_every_draw_of_routes():
    assert calls_in_graph(100.0, 2, 4) == 4
    assert calls_in_graph(30.0, 6, 4) == 12
    assert calls_in_graph(1000.0, 2, 4) == 2, "many tokens are alike"
    assert calls_in_graph(1000.0, 6, 4) == 6


@pytest.mark.gpu
@pytest.mark.parametrize("format", ["mxfp4", "fp8"])
def test_tables_are_measured_and_leave_runners_right(format: str):
    spec = make_spec(format=format, hidden_size=256, intermediate_size=256)
    plan = make_plan(
        spec,
        runner="hopper",
        activation_format="fp8" if format == "fp8" else "bf16",
        compute_dtype="bfloat16",
    )
    plan = replace(plan, prefill=replace(plan.prefill, max_tokens=256))
    runners = [RUNNERS.load("hopper")(spec, plan, torch.device("cuda")) for _ in range(2)]
    for runner in runners:
        runner.prepare(make_experts(spec))

    def batches(tokens: int) -> list[TokensBatch]:
        draw = torch.Generator().manual_seed(tokens)
        x_TH = torch.randn(tokens, 256, generator=draw).bfloat16().cuda()
        weights_TK, ids_TK = torch.rand(tokens, spec.num_experts, generator=draw).topk(spec.top_k)
        return [
            TokensBatch(
                hidden=Hidden(data=x_TH), topk_ids=ids_TK.int().cuda(), topk_weights=weights_TK.cuda()
            )
        ]

    with torch.inference_mode():
        wanted = {tokens: runners[0](batches(tokens)[0]) for tokens in (4, 256)}
        space = runners[0]._spaces["tokens"]
        space.tiles.fill_(1 << 29)  # whoever follows it leaves the memory there is
        space.h.fill_(7)
        assert to_compile(runners[0], batches, 256)
        assert torch.all(space.h == 7), "nothing was launched"
        entries = tile_times(runners, batches, 256, lambda done, of: None)
        assert [e.tokens for e in entries] == sorted(t for t in TOKENS + BETWEEN if t <= 256)
        assert all(0 < e.us <= e.rule_us for e in entries)
        assert not any(refuse(runners[0].shape, e.tiles) for e in entries)
        table = tuple((e.tokens, e.tiles) for e in entries)
        assert runners[0]._tiles(64) == choose(runners[0].shape, table, 64)
        for tokens, y in wanted.items():
            torch.testing.assert_close(runners[0](batches(tokens)[0]), y, rtol=2e-2, atol=2e-2)
