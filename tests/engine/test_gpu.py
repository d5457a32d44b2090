"""The same engine on CUDA: greedy equals the CPU in float32, and every part runs in bfloat16."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.step.test_draft_layer import prompts as asked
from tests.engine.step.test_draft_layer import published
from tests.engine.toy import always_drafting
from tests.tiny import write_model
from tools.random_checkpoint import QWEN3_30B, write
from turnout import LLM, SamplingParams
from turnout.engine.cuda_graph_policy import SHORT_CONTEXT
from turnout.engine.llm import Completion
from turnout.engine.sampling.greedy import find_near_ties, greedy
from turnout.models import blocks, weights
from turnout.models.dense import Fp8Weight

pytestmark = pytest.mark.gpu

SETTINGS = {"load_progress": False, "max_total_tokens": 2048, "mem_fraction_static": 0.2}
DRAFTING = {"speculative_algorithm": "MTP", "speculative_num_steps": 2, "max_running_requests": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder)
    return folder


def prompts(count: int) -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(256) for _ in range(draw.randint(1, 60))] for _ in range(count)]


def answers(folder: Path, sampling: SamplingParams, **flags: object) -> list[list[int]]:
    with LLM(str(folder), **(SETTINGS | flags)) as llm:
        return [completion.token_ids for completion in llm.generate(prompts(12), sampling)]


@pytest.mark.parametrize(
    "flags", [{}, {"chunked_prefill_size": 7, "max_running_requests": 3}, {"max_total_tokens": 192}]
)
def test_float32_equals_the_cpu(folder: Path, flags: dict) -> None:
    greedy = SamplingParams(max_tokens=24, ignore_eos=True)
    expected = answers(folder, greedy, device="cpu")
    assert answers(folder, greedy, device="cuda", dtype="float32", **flags) == expected


def test_bfloat16_samples_scores_and_penalises(folder: Path) -> None:
    sampling = SamplingParams(
        max_tokens=16,
        ignore_eos=True,
        min_tokens=4,
        temperature=0.8,
        top_p=0.9,
        top_k=40,
        min_p=0.01,
        seed=1,
        logprobs=3,
        prompt_logprobs=1,
        presence_penalty=0.5,
        repetition_penalty=1.1,
        logit_bias={5: 1.0},
    )
    first = answers(folder, sampling, device="cuda", dtype="bfloat16")
    assert first == answers(folder, sampling, device="cuda", dtype="bfloat16")
    assert {len(tokens) for tokens in first} == {16}


def test_close_calls_equal_the_cpu() -> None:
    logits = torch.randn(64, 500)
    logits[::2, 7] = logits[::2].amax(-1) * (1 + 1e-6)
    best = logits.argmax(-1)
    expected = find_near_ties(logits.clone(), best)
    assert find_near_ties(logits.cuda(), best.cuda()).tolist() == expected.tolist()
    assert expected.any()


def test_not_a_number_is_told_on_cuda() -> None:
    logits = torch.randn(3, 50, device="cuda")
    logits[1, 4] = float("nan")
    assert greedy(logits, near_ties=True)[1].tolist() == [1, 0, 1]


def test_decoding_in_graphs_is_what_running_eagerly_gives(folder: Path) -> None:
    """The second token comes from a decode step; batches of 1 to 12 replay graphs of several sizes."""
    sampling = SamplingParams(max_tokens=2, ignore_eos=True, logprobs=5)
    found = []
    for flags in ({}, {"disable_cuda_graph": True}):
        with LLM(
            str(folder), device="cuda", dtype="bfloat16", max_running_requests=12, **(SETTINGS | flags)
        ) as llm:
            assert isinstance(llm.info()["decode_graphs"], list) != bool(flags)
            runs = [llm.generate(prompts(count), sampling) for count in (1, 3, 12)]
            found.append([completion for run in runs for completion in run])
    compared = 0
    for graph, eager in zip(*found, strict=True):
        if graph.token_ids[0] == eager.token_ids[0]:
            a, b = (dict(completion.logprobs[1].top) for completion in (graph, eager))
            shared = a.keys() & b.keys()
            assert len(shared) >= 3
            assert all(abs(a[token] - b[token]) < 0.1 for token in shared)
            compared += 1
    assert compared >= 12


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_long_answers_in_graphs_are_repeatable_and_count_only_tokens(folder: Path, overlap: str) -> None:
    """With steps that overlap too: a request that ends at its maximum brings no row more. Of the same steps:
    prompts that are partly cached, and graphs of other sizes, have products by other kernels, and this
    model's best tokens are often two in bfloat16."""
    greedy = SamplingParams(max_tokens=40, ignore_eos=True)
    flags = SETTINGS | {"overlap_schedule": overlap, "disable_prefix_cache": True}
    with LLM(str(folder), device="cuda", dtype="bfloat16", max_running_requests=12, **flags) as llm:
        core = llm._open()
        for _ in range(40):  # sizes are left for steps with nothing to do
            core.step()
        before = sum(map(sum, core._model.expert_counts()))
        first = [completion.token_ids for completion in llm.generate(prompts(9), greedy)]
        routed = sum(map(sum, core._model.expert_counts())) - before
        assert first == [completion.token_ids for completion in llm.generate(prompts(9), greedy)]
    tokens = sum(len(prompt) for prompt in prompts(9)) + 9 * 39
    assert routed == tokens * 2 * 2  # layers, experts of a token


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
def test_drafts_of_a_draft_layer_equal_the_cpu(tmp_path: Path, family: str) -> None:
    """As many drafts as on a CPU, of which as many hold: those are compared with transformers'."""
    published(tmp_path / "model", family)
    settings = SETTINGS | DRAFTING | {"dtype": "float32"}
    greedy, found = SamplingParams(max_tokens=20, ignore_eos=True), []
    for device in ("cpu", "cuda"):
        with LLM(str(tmp_path / "model"), device=device, **settings) as llm:
            always_drafting(llm._open())
            told = [completion.token_ids for completion in llm.generate(asked(4), greedy)]
            found.append((told, llm.stats().spec_draft_tokens, llm.stats().spec_accepted_tokens))
    assert found[0] == found[1]


def test_drafts_in_graphs_score_like_eager_ones(tmp_path: Path) -> None:
    """In bfloat16, since float32 is computed without graphs: each token as long as all before it agree."""
    published(tmp_path / "model")
    settings = SETTINGS | DRAFTING | {"dtype": "bfloat16", "device": "cuda"}
    sampling, found = SamplingParams(max_tokens=20, ignore_eos=True, logprobs=5), []
    for flags in ({}, {"disable_cuda_graph": True}):
        with LLM(str(tmp_path / "model"), **(settings | flags)) as llm:
            assert isinstance(llm.info()["decode_graphs"], list) != bool(flags)
            always_drafting(llm._open())
            found.append(llm.generate(asked(4), sampling))
            assert llm.stats().spec_draft_tokens >= 4 * 2
    check_close(found[0], found[1], steps=20)


def made_up(folder: Path, format: str) -> str:
    sizes = {"hidden_size": 512, "moe_intermediate_size": 256, "num_hidden_layers": 2, "num_experts": 16}
    write(folder, QWEN3_30B | sizes | {"vocab_size": 4096, "eos_token_id": 4095}, format=format)
    return str(folder)


def scores(model: str, *batches: list[list[int]]) -> list[Completion]:
    sampling = SamplingParams(max_tokens=2, ignore_eos=True, logprobs=5)
    with LLM(model, **(SETTINGS | {"max_total_tokens": 4096})) as llm:
        return [completion for ids in batches for completion in llm.generate(ids, sampling)]


def check_close(found: list[Completion], wanted: list[Completion], steps: int = 2) -> None:
    """Of every prompt's first token, and of the next where those before are the same, as most seconds are."""
    compared = 0
    for ours, theirs in zip(found, wanted, strict=True):
        for step in range(steps):
            if ours.token_ids[:step] == theirs.token_ids[:step]:
                a, b = (dict(completion.logprobs[step].top) for completion in (ours, theirs))
                shared = a.keys() & b.keys()
                assert len(shared) >= 2
                assert all(abs(a[token] - b[token]) < 0.1 for token in shared)
                compared += 1
    assert compared >= 1.5 * len(found)


def test_dense_layers_kept_in_fp8_score_like_decoded_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts long and short, and decode steps in graphs."""
    model, draw = made_up(tmp_path / "model", "fp8"), random.Random(0)
    ids = [[draw.randrange(256) for _ in range(length)] for length in (*[1] * 12, 2, 40, 70, 300, 900)]
    kept = []
    make = weights.Weights._packed
    monkeypatch.setattr(weights.Weights, "_packed", lambda *args: kept.append(make(*args)) or kept[-1])
    found = scores(model, ids)
    assert len(kept) == 4  # two of each layer
    assert all(isinstance(weight, Fp8Weight) for weight in kept)
    monkeypatch.setattr(weights, "keeps_fp8", lambda *_: False)
    check_close(found, scores(model, ids))
    assert kept[4:] == [None] * 4


@pytest.mark.parametrize("format", ["fp8", "nvfp4"])
def test_one_request_takes_fewer_launches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    """Norms are part of the products after them, and give what they give alone."""
    model, draw = made_up(tmp_path / "model", format), random.Random(0)
    ids = [[[draw.randrange(256) for _ in range(50)]] for _ in range(6)]  # one at a time
    calls: list[object] = []
    fused = blocks.normed_product

    def noted(*args: Any) -> Any:
        calls.append(fused(*args))
        return calls[-1]

    monkeypatch.setattr(blocks, "normed_product", noted)
    found = scores(model, *ids)
    assert any(made is not None for made in calls)
    monkeypatch.setattr(blocks, "normed_product", lambda *_: None)
    check_close(found, scores(model, *ids))


def test_contexts_outgrow_the_graphs_of_short_ones(tmp_path: Path) -> None:
    """Each of 20 at another step; scores are those of steps without graphs."""
    model, draw = made_up(tmp_path / "model", "nvfp4"), random.Random(0)
    ids = [[draw.randrange(256) for _ in range(SHORT_CONTEXT - draw.randint(4, 10))] for _ in range(20)]
    sampling = SamplingParams(max_tokens=16, ignore_eos=True, logprobs=5)
    settings = SETTINGS | {"max_total_tokens": 8192, "max_running_requests": 24}
    found, replayed = [], []
    for flags in ({}, {"disable_cuda_graph": True}):
        with LLM(model, **(settings | flags)) as llm:
            graphs = llm._open()._forward.graphs
            if graphs is not None:
                choose = graphs.graph_of
                graphs.graph_of = lambda *args, by=choose: replayed.append(by(*args)) or replayed[-1]
            found.append(llm.generate(ids, sampling))
            if graphs is not None:
                assert replayed[0] is graphs._graphs[24, True]
                assert replayed[-1] is graphs._graphs[24, False]
    check_close(found[0], found[1], steps=16)


@pytest.mark.parametrize("flags", [{}, {"disable_cuda_graph": True}, {"disable_prefill_graph": True}])
@pytest.mark.parametrize("format", ["nvfp4", "fp8", "bf16"])
def test_nothing_is_compiled_while_serving(tmp_path: Path, format: str, flags: dict) -> None:
    """Prompts of random lengths, alone and together, after ever other numbers of decoding requests."""
    sizes = {"hidden_size": 1024, "moe_intermediate_size": 256, "num_hidden_layers": 2, "num_experts": 64}
    config = QWEN3_30B | sizes | {"vocab_size": 4096, "eos_token_id": 4095}
    write(tmp_path / "model", config, format=format)
    draw = random.Random(0)
    settings = {"max_prefill_tokens": 2048, "max_running_requests": 32, "max_total_tokens": 2**16} | flags
    with LLM(str(tmp_path / "model"), load_progress=False, mem_fraction_static=0.3, **settings) as llm:
        for _ in range(60):
            lengths = [round(2000 ** draw.random()) for _ in range(round(40 ** draw.random()))]
            ids = [[draw.randrange(256) for _ in range(length)] for length in lengths]
            llm.generate(ids, SamplingParams(max_tokens=draw.randint(1, 8), ignore_eos=True))
        assert llm.stats().kernels_compiled == 0
