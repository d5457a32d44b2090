"""Under --deterministic a request's tokens and log-probabilities are the same bits in every batch."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from tests.models.families import FAMILIES, build
from tests.models.test_families_describe import PUBLISHED
from tests.ranks import Pools, Rank
from tests.tiny import QWEN2_MOE, write_model
from turnout import LLM, SamplingParams, packages
from turnout.config import Config
from turnout.engine.engine_plan import resolve
from turnout.errors import PlanRefused
from turnout.parallel import hardware

SETTINGS = {
    "num_threads": 1,
    "load_progress": False,
    "max_total_tokens": 2048,
    "mem_fraction_static": 0.2,
    "deterministic": True,
}
CPU = {"device": "cpu", "moe_weight_storage": "packed"}
# Rows that vectors of a CPU do not divide; those of the experts on a GPU are multiples of 16.
ODD = {"hidden_size": 72, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 56}
ON_GPU = {"hidden_size": 80, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 56}
Found = list[tuple]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder, QWEN2_MOE, **ODD)
    return folder


@pytest.fixture(scope="module")
def gpu_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder, QWEN2_MOE, **ON_GPU)
    return folder


def asked() -> list[tuple[list[int], SamplingParams]]:
    """Prompts of 1 to 40 tokens, two of which begin alike; greedy and drawn, with and without scores."""
    draw = random.Random(0)
    prompts = [[draw.randrange(256) for _ in range(length)] for length in (7, 1, 33, 20)]
    prompts.append(prompts[2][:32] + prompts[3][:8])
    settings = [{}, {"temperature": 1.0, "top_p": 0.9}, {"prompt_logprobs": 3}]
    return [
        (prompt, SamplingParams(max_tokens=6, ignore_eos=True, logprobs=20, seed=i, **settings[i % 3]))
        for i, prompt in enumerate(prompts)
    ]


def answers(llm: LLM, which: list[int]) -> Found:
    """All that can be seen of the model's numbers, unrounded."""
    prompts, sampling = zip(*(asked()[i] for i in which), strict=True)
    return [
        (
            c.token_ids,
            [(entry.logprob, entry.top) for entry in c.logprobs],
            [entry and (entry.logprob, entry.top) for entry in c.prompt_logprobs or []],
        )
        for c in llm.generate(list(prompts), list(sampling))
    ]


def alone_and_together(llm: LLM) -> tuple[Found, Found]:
    together = answers(llm, [0, 1, 2, 3, 4])  # first, for then no prefix is known
    return [answers(llm, [i])[0] for i in range(5)], together


def assert_same_bits(folder: Path, **flags: object) -> None:
    with LLM(str(folder), **(SETTINGS | flags)) as llm:
        alone, together = alone_and_together(llm)
    assert together == alone
    for other in (
        {"chunked_prefill_size": 5, "max_running_requests": 2, "disable_prefix_cache": True},
        {"max_total_tokens": 112, "max_prefill_tokens": 16},
        {"speculative_algorithm": "ngram"},
    ):
        with LLM(str(folder), **(SETTINGS | flags | other)) as llm:
            assert answers(llm, [4, 2, 3, 0, 1]) == [alone[i] for i in (4, 2, 3, 0, 1)]


def test_on_a_cpu(folder: Path):
    assert_same_bits(folder, **CPU)
    with LLM(str(folder), **(SETTINGS | CPU | {"deterministic": False})) as llm:
        alone, together = alone_and_together(llm)
    assert together != alone  # so the promise is not kept by chance


@pytest.mark.parametrize(
    ("family", "drafts"),
    [
        ("deepseek_v4", "ngram"),
        pytest.param("deepseek_v32", "ngram", marks=pytest.mark.more),
        pytest.param("qwen3_next", "none", marks=pytest.mark.more),
    ],
)
def test_of_layers_that_keep_more_than_keys_and_values(family: str, drafts: str, tmp_path: Path):
    """Entries of whole windows, choices by an index, recurrent states: other cuts, snapshots and drafts."""
    build(tmp_path, FAMILIES[family])
    flags = SETTINGS | CPU | {"page_size": 8}
    with LLM(str(tmp_path), **flags) as llm:
        alone = [answers(llm, [i])[0] for i in range(5)]
    flags |= {"chunked_prefill_size": 5, "max_running_requests": 2, "speculative_algorithm": drafts}
    flags |= {"state_snapshot_interval": 16} if family != "deepseek_v32" else {}
    with LLM(str(tmp_path), **flags) as llm:
        assert answers(llm, [2, 3, 0, 1, 4]) == [alone[i] for i in (2, 3, 0, 1, 4)]
        assert llm.stats().cached_prompt_tokens > 0


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("deepseek-v4-flash", "entries are made of whole windows, in products that depend on how"),
        ("deepseek-v3.2", "latent attention on CUDA has products by head that are not batch-invariant"),
    ],
)
def test_what_is_not_invariant_on_cuda_is_refused(name: str, limit: str):
    sizes = {"tp_size": 8, "dp_size": 8, "ep_size": 8, "enable_dp_attention": True}
    config = Config(model=str(PUBLISHED / f"{name}.json"), deterministic=True, **sizes)
    with pytest.raises(PlanRefused) as refused:
        resolve(config, hardware.named("h200"))
    assert [r.remedy for r in refused.value.refusals if limit in r.limit] == [
        "leave --deterministic out, or use --device cpu"
    ]


def on_rank(rank: Rank, config: Config) -> tuple[Found, Found]:
    with LLM.from_config(config, rank.launched()) as llm:
        return alone_and_together(llm)


GROUPS = {"ep_size": 2, "dp_size": 2, "enable_dp_attention": True}


@pytest.mark.parametrize(
    "sizes",
    [{"ep_size": 2}, GROUPS, GROUPS | {"moe_a2a_backend": "collective-experts"}],
    ids=["tp", "dp", "batched"],
)
def test_on_two_ranks(ranks: Pools, folder: Path, sizes: dict):
    config = Config(model=str(folder), tp_size=2, **(SETTINGS | CPU | sizes))
    for alone, together in ranks(2).run(on_rank, config):
        assert together == alone


def test_cuda_needs_triton(monkeypatch: pytest.MonkeyPatch, folder: Path):
    monkeypatch.setattr(packages, "_is_here", lambda module: False)
    device = replace(hardware.named("h200"), present=True)
    for deterministic in (False, True):
        config = Config(model=str(folder), moe_runner_backend="torch", deterministic=deterministic)
        if not deterministic:
            assert not resolve(config, device).plan.deterministic
            continue
        with pytest.raises(PlanRefused) as error:
            resolve(config, device)
        assert [(r.asked, r.limit) for r in error.value.refusals] == [
            ("--deterministic", "attention and dense layers: needs triton>=3.6, not installed here")
        ]


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
def test_on_a_gpu(gpu_folder: Path, graphs: bool):
    assert_same_bits(gpu_folder, device="cuda", dtype="bfloat16", disable_cuda_graph=not graphs)


@pytest.mark.gpu
def test_graphs_give_the_bits_of_eager_steps(gpu_folder: Path):
    found = []
    for disabled in (False, True):
        with LLM(str(gpu_folder), device="cuda", disable_cuda_graph=disabled, **SETTINGS) as llm:
            found.append(answers(llm, [0, 1, 2, 3, 4]))
    assert found[0] == found[1]
