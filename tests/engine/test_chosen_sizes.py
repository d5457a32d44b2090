"""Sizes that flags leave open: what plans choose by memory, what they keep, and what they say about it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests.engine.planned import NVFP4, QWEN3_30B, SMALL, write
from turnout.config import Config
from turnout.engine.chosen_sizes import sizes_to_time
from turnout.engine.engine_plan import EnginePlan, resolve
from turnout.engine.worker import summary
from turnout.errors import PlanRefused
from turnout.parallel.hardware import GB, Hardware, named

Model = Callable[..., Config]
HOST = Hardware(name="cpu", device="cpu", architecture=0, memory_bytes=32 * GB, present=True)
H200 = named("h200")


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return partial(write, tmp_path)


def sizes(plan: EnginePlan) -> tuple[int, int, int]:
    config = plan.config
    return config.max_running_requests, config.max_prefill_tokens, config.cuda_graph_max_bs


def test_an_h200_serves_hundreds_of_requests_in_graphs(model: Model):
    plan = resolve(model(QWEN3_30B | NVFP4), H200)
    assert sizes(plan) == (512, 8192, 512)
    assert plan.num_pages * plan.page_size > 1_000_000
    assert re.search(r"leaves 99% .* 1,\d{3} tokens", plan.size_reasons["max_running_requests"])
    assert any("--max-running-requests 512: leaves" in line for line in summary(plan))
    assert any("8192" in line and "halved at the start while" in line for line in summary(plan))
    assert sizes_to_time(plan) == {
        "max_running_requests": [512, 256, 128, 64],
        "max_prefill_tokens": [8192, 4096, 2048],
    }
    assert plan.describe()["sizes"]["cuda_graph_max_bs"] == {"value": 512, "reason": "all running requests"}


@pytest.mark.parametrize(("memory", "running"), [(141, 512), (64, 256), (48, 128), (30, 64)])
def test_less_memory_runs_fewer_requests(model: Model, memory: int, running: int):
    plan = resolve(model(QWEN3_30B | NVFP4), replace(H200, memory_bytes=memory * GB))
    assert plan.config.max_running_requests == plan.config.cuda_graph_max_bs == running
    if running > 64:
        assert plan.num_pages * plan.page_size >= 1024 * running
    else:
        assert "too little KV cache" in plan.size_reasons["max_running_requests"]


def test_a_size_that_was_given_stays(model: Model):
    plan = resolve(model(QWEN3_30B | NVFP4, max_running_requests=700, max_prefill_tokens=100), H200)
    assert sizes(plan) == (700, 100, 700)
    assert plan.size_reasons["max_running_requests"] == plan.size_reasons["max_prefill_tokens"] == "as asked"
    assert sizes_to_time(plan) == {}


def test_graphs_of_batches_that_no_step_has_are_left_out(model: Model):
    few = {"max_prefill_tokens": 16, "chunked_prefill_size": 16, "max_running_requests": 8}
    plan = resolve(model(SMALL, **few, cuda_graph_max_bs=64), H200)
    assert (plan.config.cuda_graph_max_bs, plan.budget.local) == (8, 16)
    assert any("--cuda-graph-max-bs 8: not 64" in line for line in summary(plan))


def test_a_given_kv_cache_bounds_how_many_run(model: Model):
    plan = resolve(model(QWEN3_30B | NVFP4, max_total_tokens=200_000), H200)
    assert plan.config.max_running_requests == 128


def test_more_requests_than_memory_holds_are_refused_before_serving(model: Model):
    with pytest.raises(PlanRefused, match="logits") as caught:
        resolve(model(QWEN3_30B | NVFP4, max_running_requests=400_000), H200)
    fits = re.search(r"--max-running-requests (\d+) or less", str(caught.value))
    assert fits
    assert resolve(model(QWEN3_30B | NVFP4, max_running_requests=int(fits[1])), H200)


def test_a_cpu_keeps_its_sizes(model: Model):
    plan = resolve(model(SMALL), HOST)
    assert sizes(plan) == (64, 2048, 64)
    assert sizes_to_time(plan) == {}
    assert "cuda_graph_max_bs" not in plan.size_reasons
