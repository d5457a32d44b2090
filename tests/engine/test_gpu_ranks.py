"""Decode graphs of several GPUs: the bundled model answers as on one, with ranks idle and batches uneven."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import Pools, Rank
from tests.tiny import QWEN2_MOE, write_model
from turnout import LLM, SamplingParams
from turnout.config import Config
from turnout.engine.step import two_batch_overlap
from turnout.evals import wordmath
from turnout.moe.capabilities.declared import DISPATCHERS

pytestmark = pytest.mark.multigpu

SETTINGS = {
    "model": "demo",
    "device": "cuda",
    "load_progress": False,
    "mem_fraction_static": 0.2,
    "max_total_tokens": 8192,
    "max_running_requests": 8,
    "disable_prefix_cache": True,
}
COUNTS = (1, 3, 13)  # prompts of a call: one rank has none; batches of 2 and 1; more than run at once
SAME = 0.9  # of answers of up to 60 tokens, in bfloat16, where sums in another order decide close calls
TIMEOUT = 300  # seconds: kernels are compiled
# Of prompts that come together, the first of each pair to the first rank.
UNEVEN = [(3000, 5), (5, 3000), (3000, 40), (70, 3000), (3000,), (3000, 1, 2100, 130), (300, 3000)]
SAFE = [
    name
    for name, d in DISPATCHERS.entries.items()
    if d.exchange == "all_to_all" and d.graph_safe and not any(package.lacking() for package in d.requires)
]
PARALLEL_LAYOUTS: dict[str, dict[str, Any]] = {
    "dp": {"dp_size": 2, "enable_dp_attention": True, "moe_a2a_backend": "none"},
    "tp": {"moe_a2a_backend": "none"},
    "dp in turns": {
        "dp_size": 2,
        "enable_dp_attention": True,
        "moe_a2a_backend": "none",
        "enable_two_batch_overlap": True,
    },
    **{name: {"dp_size": 2, "enable_dp_attention": True, "moe_a2a_backend": name} for name in SAFE},
}


def questions(count: int) -> list[list[dict[str, str]]]:
    problems = wordmath.heldout(count, seed=11)
    return [[{"role": "user", "content": problem.question}] for problem in problems]


def answers(llm: LLM) -> list[list[int]]:
    """Token ids of every call; limits differ, so that ranks come to have fewer requests at other times."""
    found = []
    for count in COUNTS:
        sampling = [SamplingParams(max_tokens=60 - 7 * (i % 5), temperature=0) for i in range(count)]
        found += [c.token_ids for c in llm.chat(questions(count), sampling, progress=False)]
    return found


def on_rank(rank: Rank, config: Config) -> dict[str, Any]:
    two_batch_overlap.LEAST = 2
    with LLM.from_config(config, rank.launched()) as llm:
        core = llm._open()
        first = answers(llm)
        routed = sum(map(sum, core._model.expert_counts()))
        steps, idle = core.stats().steps, core.stats().idle_steps
        return {
            "graphs": llm.info()["decode_graphs"],
            "overlapped": llm.info()["plan"]["overlap_shared_expert"],
            "tokens": first,
            "repeated": answers(llm) == first,
            "routed": routed,
            "steps": steps,
            "idle": idle,
        }


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    with LLM(**SETTINGS) as llm:
        assert isinstance(llm.info()["decode_graphs"], list)
        tokens = answers(llm)
        return {"tokens": tokens, "routed": sum(map(sum, llm._open()._model.expert_counts()))}


def share(a: list[list[int]], b: list[list[int]]) -> float:
    return sum(x == y for x, y in zip(a, b, strict=True)) / len(a)


@pytest.mark.timeout(TIMEOUT + 30)
@pytest.mark.parametrize("name", PARALLEL_LAYOUTS)
def test_graphs_of_two_gpus_answer_as_one(ranks: Pools, alone: dict[str, Any], name: str):
    config = Config(**SETTINGS, tp_size=2, ep_size=2, **PARALLEL_LAYOUTS[name])
    found = ranks(2).run(on_rank, config, timeout=TIMEOUT)
    assert [own["graphs"] for own in found] == [[1, 2, 4, 8]] * 2
    assert found[0]["tokens"] == found[1]["tokens"]
    assert all(own["repeated"] for own in found)
    assert share(found[0]["tokens"], alone["tokens"]) >= SAME
    assert found[0]["steps"] == found[1]["steps"]
    if config.dp_size == 2:
        assert found[1]["idle"] > 10, "the second rank takes part in steps of the first one's only request"
        if found[0]["tokens"] == alone["tokens"]:  # then padding was never routed
            assert sum(own["routed"] for own in found) == alone["routed"]


@pytest.mark.timeout(2 * TIMEOUT + 30)
@pytest.mark.parametrize("name", ["dp", "tp"])
def test_a_shared_expert_during_the_others_changes_no_bit(ranks: Pools, tmp_path: Path, name: str):
    """Whole where tokens are sent, a share of the sum where they do not."""
    write_model(tmp_path, QWEN2_MOE, dtype=torch.bfloat16)
    settings = SETTINGS | PARALLEL_LAYOUTS[name] | {"model": str(tmp_path), "tp_size": 2, "ep_size": 2}
    found = {
        overlap: ranks(2).run(
            on_rank, Config(**settings, disable_shared_expert_overlap=not overlap), timeout=TIMEOUT
        )[0]
        for overlap in (True, False)
    }
    assert all(
        own["overlapped"] is overlap and own["graphs"] == [1, 2, 4, 8] for overlap, own in found.items()
    )
    assert found[True]["tokens"] == found[False]["tokens"]


def compiled_on_rank(rank: Rank, config: Config) -> tuple[int, list[list[int]]]:
    """How many kernels prompts of uneven lengths had compiled, and their answers."""
    sampling, found = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0), []
    with LLM.from_config(config, rank.launched()) as llm:
        for lengths in UNEVEN:
            prompts = [[3 + i % 200 for i in range(length)] for length in lengths]
            found += [c.token_ids for c in llm.generate(prompts, sampling, progress=False)]
        return llm.stats().kernels_compiled, found


@pytest.mark.timeout(TIMEOUT + 30)
@pytest.mark.parametrize("name", ["dp", *SAFE])
def test_nothing_is_compiled_for_few_tokens_next_to_many(ranks: Pools, tmp_path: Path, name: str):
    """A rank computes few tokens eagerly where the other has more than graphs of prompts hold."""
    write_model(tmp_path, max_position_embeddings=4096, dtype=torch.bfloat16)
    flags = {"model": str(tmp_path), "max_total_tokens": 16384, "tp_size": 2, "ep_size": 2}
    config = Config(**(SETTINGS | PARALLEL_LAYOUTS[name] | flags))
    found = ranks(2).run(compiled_on_rank, config, timeout=TIMEOUT)
    assert [compiled for compiled, _ in found] == [0, 0]
    assert found[0] == found[1]
