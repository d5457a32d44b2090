"""Ranks that step together answer as one rank does, whoever has work when: random schedules of arrivals,
lengths, aborts and rests over a real model with its experts spread over four processes.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.engine.cluster import Cluster, SingleRank
from tests.ranks import Pools
from tests.tiny import write_model

SCHEDULES, FEW = 40, 10
LONGEST, LONG = 6, 40  # tokens of an answer in the schedules, and of one that others join
DEADLINE = 60  # seconds for one schedule, which takes a quarter of one
TINY = {"hidden_size": 32, "head_dim": 8, "moe_intermediate_size": 16, "intermediate_size": 32}
DATA_PARALLEL = {"dp_size": 4, "ep_size": 4}
PAIRS = {"dp_size": 2, "ep_size": 4}  # two ranks share the requests of each group


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder, **TINY)
    return folder


@pytest.fixture(scope="module")
def single(model: Path) -> SingleRank:
    return SingleRank(model, LONG)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Of one token, of several chunks, of a whole step and more, and some that share a beginning."""
    draw = random.Random(0)
    lengths = [1, 2, 3, 5, 8, 12, 15, 16, 17, 24, 31, 32, 33, 40]
    found = [[draw.randrange(250) for _ in range(length)] for length in lengths]
    return found + [[*found[-1][:20], draw.randrange(250)] for _ in range(4)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


class Random:
    """Schedules drawn from a seed, run one after the other on the same cluster."""

    def __init__(self, cluster: Cluster, single: SingleRank, prompts: list[list[int]], lag: float = 0):
        self.cluster, self.single, self.prompts, self.lag = cluster, single, prompts, lag
        self.aborted = 0

    def run(self, seed: int) -> None:
        """Requests come and go; then all that were not aborted must have the single rank's answers."""
        draw = random.Random(seed)
        crowd = draw.choice([1, 2, 3, 6])
        groups = draw.sample(range(self.cluster.config.dp_size), draw.randint(1, self.cluster.config.dp_size))
        expected: dict[str, list[int]] = {}
        for number in range(crowd):
            id, prompt = f"{seed}.{number}", draw.choice(self.prompts)
            tokens = draw.randint(1, LONGEST)
            expected[id] = self.single.answer(prompt, tokens)
            lag = draw.random() * self.lag
            self.cluster.add(id, prompt, dp_rank=draw.choice(groups), lag=lag, max_tokens=tokens)
            if draw.random() < 0.5:  # the next one comes while this one is computed, or after it
                time.sleep(draw.random() * 0.03)
                self.cluster.listen()
            if draw.random() < 0.15:
                self.cluster.abort(draw.choice(list(expected)), lag)
        self.cluster.wait(expected, DEADLINE)
        for id, tokens in expected.items():
            self.check(id, tokens)

    def check(self, id: str, expected: list[int]) -> None:
        output = self.cluster.outputs[id]
        if output.finish_reason == "abort":
            self.aborted += 1
            assert output.token_ids == expected[: len(output.token_ids)], id
        else:
            assert (output.token_ids, output.error) == (expected, None), id


def assert_all_is_free(cluster: Cluster) -> None:
    """Every rank has nothing left of any request, and all computed the same steps."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:  # each reports once a second
        cluster.listen(0.1)
        counts = {stats.steps for stats in cluster.stats.values()}
        if len(cluster.stats) == cluster.config.tp_size and len(counts) == 1:
            break
    assert len(counts) == 1, cluster.stats
    for stats in cluster.stats.values():
        assert (stats.num_running, stats.num_waiting, stats.pages_used) == (0, 0, 0)


def test_random_schedules_answer_as_one_rank(
    ranks: Pools, folder: Path, model: Path, single: SingleRank, prompts: list[list[int]]
):
    with Cluster(ranks(4), folder, model, **DATA_PARALLEL) as cluster:
        schedules = Random(cluster, single, prompts)
        for seed in range(SCHEDULES):
            schedules.run(seed)
        assert_all_is_free(cluster)
        assert schedules.aborted > SCHEDULES // 20
        assert all(stats.idle_steps for stats in cluster.stats.values())


def test_ranks_that_share_requests_execute_commands_together(
    ranks: Pools, folder: Path, model: Path, single: SingleRank, prompts: list[list[int]]
):
    """Each command reaches the second rank of a pair up to 20 ms, some steps, after the first; the others may
    have stepped and rested meanwhile, and must not sleep over it.
    """
    flags = {"overlap_schedule": "on", "prefill_delayer": "on"}
    with Cluster(ranks(4), folder, model, **PAIRS, **flags) as cluster:
        schedules = Random(cluster, single, prompts, lag=0.02)
        for seed in range(FEW):
            schedules.run(seed)
        assert_all_is_free(cluster)
        took: list[float] = []
        while sum(seconds < 0.9 for seconds in took) < 3:  # those that sleep need a second
            began, id = time.monotonic(), f"late {len(took)}"
            cluster.add(id, prompts[0], dp_rank=0, lag=0.1, max_tokens=1)
            cluster.wait([id])
            took.append(time.monotonic() - began)
            assert len(took) < 20, took


@pytest.mark.parametrize(
    "sizes",
    [DATA_PARALLEL, PAIRS | {"overlap_schedule": "on"}],
    ids=["dp 4", "dp 2 x tp 2, steps overlap"],
)
def test_near_ties_are_decided_while_others_work(
    ranks: Pools,
    folder: Path,
    model: Path,
    single: SingleRank,
    prompts: list[list[int]],
    sizes: dict[str, Any],
):
    with Cluster(ranks(4), folder, model, close=0.03, **sizes) as cluster:
        schedules = Random(cluster, single, prompts)
        for seed in range(FEW // 2):
            schedules.run(seed)
    assert cluster.settled > FEW // 2


def test_drafts_change_no_answer(
    ranks: Pools, folder: Path, model: Path, single: SingleRank, prompts: list[list[int]]
):
    """Ranks with drafts, of different numbers, next to ranks that decode one token or nothing. They measure
    steps together before the first, and each by its own clock says how many prompt tokens it brings."""
    drafts = {"speculative_algorithm": "ngram", "speculative_num_draft_tokens": 3}
    with Cluster(ranks(4), folder, model, **DATA_PARALLEL, **drafts, target_tpot=5.0) as cluster:
        schedules = Random(cluster, single, prompts + [prompt * 2 for prompt in prompts[:6]])
        for seed in range(FEW // 2):
            schedules.run(seed)
        cluster.add("repeats itself", prompts[0], dp_rank=1, max_tokens=LONG)
        cluster.wait(["repeats itself"])
        schedules.check("repeats itself", single.answer(prompts[0], LONG))
        assert_all_is_free(cluster)
    assert sum(stats.spec_accepted_tokens for stats in cluster.stats.values()) > 0


def test_all_tokens_go_to_the_experts_of_one_rank(
    ranks: Pools, folder: Path, tmp_path_factory: pytest.TempPathFactory, prompts: list[list[int]]
):
    lopsided = tmp_path_factory.mktemp("lopsided")
    send_all_to_the_first_two_experts(write_model(lopsided, **TINY)).save_pretrained(lopsided)
    with Cluster(ranks(4), folder, lopsided, **DATA_PARALLEL) as cluster:
        schedules = Random(cluster, SingleRank(lopsided, LONGEST), prompts)
        for seed in range(FEW // 4):
            schedules.run(seed)
        assert_all_is_free(cluster)
    for stats in cluster.stats.values():
        for counts in stats.expert_tokens or []:
            assert counts[0] == counts[1]
            assert not any(counts[2:])


def send_all_to_the_first_two_experts(model: PreTrainedModel) -> PreTrainedModel:
    """Dimension 0 of the residual stream is the same for all tokens, and alone decides the routing."""
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 1.0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0
            layer.post_attention_layernorm.weight[0] = 1
            layer.mlp.experts.down_proj[:, 0] = 0
            layer.mlp.gate.weight.zero_()
            layer.mlp.gate.weight[:, 0] = torch.tensor([8.0, 7.0, *[-8.0] * 6])
    return model


@pytest.fixture
def cluster(ranks: Pools, folder: Path, model: Path) -> Iterator[Cluster]:
    with Cluster(ranks(4), folder, model, **DATA_PARALLEL) as cluster:
        yield cluster


def test_one_request_among_idle_ranks(cluster: Cluster, single: SingleRank, prompts: list[list[int]]):
    for rank in range(4):
        cluster.add(f"of {rank}", prompts[-1], dp_rank=rank, max_tokens=LONGEST)
        cluster.wait([f"of {rank}"])
        assert cluster.outputs[f"of {rank}"].token_ids == single.answer(prompts[-1], LONGEST)
    assert_all_is_free(cluster)
    for stats in cluster.stats.values():
        assert 0 < stats.idle_steps < stats.steps


def test_a_rank_joins_while_another_decodes(cluster: Cluster, single: SingleRank, prompts: list[list[int]]):
    """The first goes on until the second has its answer, which had no step of its own."""
    cluster.add("first", prompts[2], dp_rank=1, max_tokens=400, ignore_eos=True)
    while "first" not in cluster.outputs:
        cluster.listen(0.1)
    cluster.add("second", prompts[-2], dp_rank=3, max_tokens=LONGEST)
    cluster.wait(["second"])
    assert cluster.stats[3].idle_steps < cluster.stats[3].steps
    cluster.abort("first")
    cluster.wait(["first"])
    both = min(LONG, len(cluster.outputs["first"].token_ids))
    assert cluster.outputs["first"].token_ids[:both] == single.answer(prompts[2], both)
    assert cluster.outputs["second"].token_ids == single.answer(prompts[-2], LONGEST)
    assert_all_is_free(cluster)
    assert cluster.stats[1].idle_steps == 0 < cluster.stats[3].idle_steps


def test_the_only_request_is_aborted(cluster: Cluster, single: SingleRank, prompts: list[list[int]]):
    cluster.add("gone", prompts[3], dp_rank=2, max_tokens=400, ignore_eos=True)
    while "gone" not in cluster.outputs:
        cluster.listen(0.1)
    cluster.abort("gone")
    cluster.wait(["gone"])
    assert cluster.outputs["gone"].finish_reason == "abort"
    assert_all_is_free(cluster)
    cluster.add("next", prompts[4], dp_rank=0, max_tokens=LONGEST)
    cluster.wait(["next"])
    assert cluster.outputs["next"].token_ids == single.answer(prompts[4], LONGEST)
