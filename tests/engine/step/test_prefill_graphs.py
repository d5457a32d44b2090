"""What a prefill graph would replay computes what the model does: pieces run again, at the same addresses."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.engine.step.rerun import Rerun, with_prefill_graphs
from tests.engine.test_cache_groups import SINKS
from tests.engine.test_request_states import MODELS, MTP, NGRAM, drive, published, recurrent, spoil
from tests.engine.toy import SHAPE, ToyModel, make_core, merge, request
from tests.models.families import FAMILIES, build
from tests.tiny import QWEN2_MOE, write_model
from turnout import LLM, SamplingParams
from turnout.attention.caches import AttentionCaches
from turnout.attention.kinds import CacheGroup
from turnout.attention.latent import LatentAttention
from turnout.config import Config
from turnout.engine.cuda_graph_policy import PREFILL_SIZES, first_prefill_sizes, prefill_graph_sizes
from turnout.engine.engine_plan import EnginePlan, resolve
from turnout.engine.step.prefill_graphs import Handed
from turnout.models.interface import ModelShape
from turnout.parallel.hardware import GB, Hardware

SIZES = [4, 8, 24]
WINDOWS = ModelShape(**(vars(SHAPE) | {"attention": (SINKS.sliding(5), SINKS)}))  # two cache groups
HYBRIDS = [replace(SHAPE, attention=layers) for layers in MODELS.values()]


@pytest.mark.parametrize("overlap", ["off", "on"])
@pytest.mark.parametrize(
    "shape", [SHAPE, WINDOWS, *HYBRIDS], ids=["one group", "two groups", "states", "states of two kinds"]
)
@pytest.mark.parametrize("seed", [0, 1, pytest.param(2, marks=pytest.mark.more)])
def test_requests_that_come_and_go_get_what_the_model_says(seed: int, shape: ModelShape, overlap: str):
    """Few pages, so that requests are put back; chunks next to decoding ones; steps beyond the largest. One
    size is captured between steps, as soon as there is room, and replayed from then on."""
    draw, model = random.Random(seed), ToyModel(shape=shape)
    core = make_core(
        model, num_pages=14, max_context=48, max_running_requests=5, overlap_schedule=overlap,
        max_prefill_tokens=32, chunked_prefill_size=12,
    )  # fmt: skip
    graphs = with_prefill_graphs(core, [SIZES[0], SIZES[-1]], later=SIZES[1:-1])
    spoil(core)
    core._commit.resolves_near_ties, core._commit._sampler._report_near_ties = False, False
    asked = {str(i): [draw.randrange(49) for _ in range(draw.choice([1, 3, 7, 20]))] for i in range(12)}
    found, pending = {}, list(asked)
    while pending or core.has_work():
        while pending and draw.random() < 0.4:
            id = pending.pop()
            core.add(request(id, asked[id], max_tokens=6, ignore_eos=True))
        for output in core.step():
            merge(found, output)
        if core._launched is None and len(graphs.steps) >= 3:
            with torch.inference_mode():
                graphs.capture_one_more()
    for id, output in found.items():
        assert output.token_ids == model.greedy(asked[id], 6, eos=False)
    assert graphs.sizes == SIZES
    assert len({size for size, _ in graphs.steps}) > 1
    assert all(count <= size for size, count in graphs.steps)
    assert core._forward.graph_steps == len(graphs.steps)


def test_schedules_with_states_and_drafts_never_change_an_answer():
    subject = replace(recurrent("hybrid"), flags=[{}, NGRAM[1], MTP[1]])
    assert min(drive(subject, 3, graphs=SIZES).values()) > 0


@pytest.mark.parametrize("name", ["glm_moe_dsa", pytest.param("deepseek_v4", marks=pytest.mark.more)])
def test_schedules_with_indexes_never_change_an_answer(name: str, tmp_path: Path):
    """Also of layers that share a choice; entries, whose windows end within steps and behind them."""
    assert min(drive(published(name, tmp_path), 2, graphs=SIZES).values()) > 0


def test_padding_writes_to_no_page_of_a_request():
    """A long prompt leaves its slots in the graph's input; a short one after it, of the same size, must not
    write there again."""
    model = ToyModel()
    core = make_core(model, disable_prefix_cache=True, chunked_prefill_size=32)
    with_prefill_graphs(core, [16])
    core.add(request("long", list(range(15)), max_tokens=8, ignore_eos=True))
    found = {}
    for output in core.step():
        merge(found, output)
    core.add(request("short", [7], max_tokens=2, ignore_eos=True))
    core.add(request("other", [3, 4], max_tokens=2, ignore_eos=True))
    while core.has_work():
        for output in core.step():
            merge(found, output)
    for id, prompt, count in (("long", list(range(15)), 8), ("short", [7], 2), ("other", [3, 4], 2)):
        assert found[id].token_ids == model.greedy(prompt, count, eos=False)


def test_a_size_captured_later_leaves_what_is_kept_of_prompts(tmp_path: Path):
    """Where kernels store keys and values in place, as on CUDA: a warm-up must not, of garbage, in pages that
    the next prompt may share."""
    write_model(tmp_path)
    with LLM(str(tmp_path), device="cpu", load_progress=False, max_total_tokens=1024, page_size=4) as llm:
        core = llm._open()
        graphs = with_prefill_graphs(core, [48], later=[16])
        llm.generate([[5] * 40], SamplingParams(max_tokens=1))
        (group,) = core._attention.groups
        kept = group.cache[:, :, : group.spare_slot].clone()
        core._model.reset_counts()
        graphs._handed = replace(graphs._handed, stored=True)
        while graphs.sizes != [16, 48]:
            core.step()
        assert kept.count_nonzero()
        assert torch.equal(group.cache[:, :, : group.spare_slot], kept)
        assert not sum(map(sum, core._model.expert_counts()))


def run(folder: Path, sizes: list[int], **flags: object) -> tuple[list, list[int], Rerun | None]:
    """Completions of prompts alone, together, and next to decoding ones; experts' counts; the graphs."""
    settings = {"load_progress": False, "max_total_tokens": 1024, "page_size": 4, "max_running_requests": 6}
    draw = random.Random(1)
    prompts = [[draw.randrange(256) for _ in range(length)] for length in (1, 5, 16, 17, 40, 64, 3, 30)]
    sampling = [SamplingParams(max_tokens=4 + i % 3, ignore_eos=True, prompt_logprobs=1) for i in range(8)]
    with LLM(str(folder), device="cpu", **(settings | flags)) as llm:
        core = llm._open()
        graphs = with_prefill_graphs(core, sizes) if sizes else None
        core._model.reset_counts()
        done = llm.generate([prompts[4]], sampling[4]) + llm.generate(prompts, sampling)
        return done, core._model.expert_counts(), graphs


@pytest.mark.parametrize("family", [*FAMILIES, "qwen3_moe", "qwen2_moe"])
def test_every_family_answers_as_without(family: str, tmp_path: Path):
    if family == "qwen3_moe":
        write_model(tmp_path)
    elif family == "qwen2_moe":
        write_model(tmp_path, QWEN2_MOE)
    else:
        build(tmp_path, FAMILIES[family])
    plain, counts, _ = run(tmp_path, [], chunked_prefill_size=24)
    found, padded_counts, graphs = run(tmp_path, [16, 32, 48], chunked_prefill_size=24)
    assert graphs is not None
    assert {size for size, _ in graphs.steps} == {16, 32, 48}
    assert [c.token_ids for c in found] == [c.token_ids for c in plain]
    assert padded_counts == counts, "padding is routed to no expert"
    for a, b in zip(found, plain, strict=True):
        scores = [[s.logprob for s in c.prompt_logprobs if s] for c in (a, b)]
        torch.testing.assert_close(*map(torch.tensor, scores), rtol=1e-3, atol=1e-3)


def test_sizes_reach_the_largest_step_or_the_limit():
    for most, last in ((2048, 2048), (8192, 2048), (1000, 1000), (70, 70), (5, 5)):
        plan = make_core(max_prefill_tokens=most, chunked_prefill_size=0, max_running_requests=4).engine_plan
        sizes = prefill_graph_sizes(plan.budget)
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == last
        for count in range(129, last):
            assert next(size for size in sizes if size >= count) <= 1.5 * count


@pytest.mark.parametrize(("waiting", "ratio"), [(0, 2), (7, 4)])
def test_sizes_captured_first_reach_as_far_with_more_padding(waiting: int, ratio: int):
    for most in (5, 70, 1000, 2048):
        sizes = sorted({size for size in PREFILL_SIZES if size <= most} | {most})
        first = first_prefill_sizes(sizes, waiting)
        assert set(first) <= set(sizes)
        assert first == sorted(first)
        assert first[-1] == most
        assert all(ratio * a <= b for a, b in itertools.pairwise(first))
        for size in sizes:
            assert next(f for f in first if f >= size) < 2 * ratio * size


def test_the_cpu_has_none():
    assert "CUDA only" in str(make_core().info()["prefill_graphs"])


def test_what_pieces_hand_to_states_is_planned(tmp_path: Path):
    """bfloat16 tensors for the largest size, which recurrent layers need more of than attention."""
    build(tmp_path, FAMILIES["qwen3_next"])
    hardware = Hardware(name="H200", device="cuda", architecture=90, memory_bytes=141 * GB, present=False)
    plan = resolve(Config(model=str(tmp_path)), hardware)
    assert not plan.why_no_prefill_graphs
    (group,) = plan.state_groups
    handed = 2 * PREFILL_SIZES[-1] * (group.spec.mixed + group.spec.num_heads * group.spec.value_dim)
    without = resolve(Config(model=str(tmp_path), disable_prefill_graph=True), hardware)
    assert plan.memory.prefill_graphs > handed > without.memory.prefill_graphs == 0


def test_what_pieces_hand_to_latent_attention_is_planned(tmp_path: Path):
    """Queries, latent vectors, results, of the largest size: whichever form attention takes, no keys."""
    build(tmp_path, FAMILIES["glm4_moe_lite"])
    hardware = Hardware(name="H200", device="cuda", architecture=90, memory_bytes=141 * GB, present=False)
    plan = resolve(Config(model=str(tmp_path)), hardware)
    assert not plan.why_no_prefill_graphs
    (group,) = plan.cache_groups
    spec, H = group.spec, plan.description.shape.hidden_size
    caches = AttentionCaches([make_latent(group)])
    handed = Handed.for_rows(PREFILL_SIZES[-1], [spec], caches, stored=True)
    sizes = [flat_X.nbytes // PREFILL_SIZES[-1] // 2 for flat_X in (*handed.given_X, handed.out_X)]
    assert sizes == [
        spec.num_heads * spec.head_dim,
        spec.latent_dim + spec.rope_dim,
        spec.num_heads * spec.value_dim,
    ]
    assert plan.memory.prefill_graphs > 2 * PREFILL_SIZES[-1] * (sum(sizes) + H)


def make_latent(group: CacheGroup) -> LatentAttention:
    sizes = {"num_pages": 4, "page_size": 16, "max_running": 1, "max_context": 64}
    return LatentAttention(group, number=0, device=torch.device("cpu"), dtype=torch.bfloat16, **sizes)


def test_they_are_planned_unless_they_are_disabled(tmp_path: Path):
    """Nothing without; more for larger steps, up to the largest size; why not, in words."""
    write_model(tmp_path)
    hardware = Hardware(name="H200", device="cuda", architecture=90, memory_bytes=141 * GB, present=False)

    def planned(**flags: object) -> EnginePlan:
        return resolve(Config(model=str(tmp_path), **flags), hardware)  # type: ignore[arg-type]

    off, on = planned(disable_prefill_graph=True), planned()
    assert "--disable-prefill-graph" in off.why_no_prefill_graphs
    assert "--deterministic" in planned(deterministic=True).why_no_prefill_graphs
    assert not on.why_no_prefill_graphs
    bytes_of = [
        planned(max_prefill_tokens=most, chunked_prefill_size=0).memory for most in (256, 1024, 2048, 8192)
    ]
    sizes = [memory.prefill_graphs for memory in bytes_of]
    assert 0 < sizes[0] < sizes[1] < sizes[2] == sizes[3]
    assert off.memory.prefill_graphs == 0
    assert on.memory.total == off.memory.total + on.memory.prefill_graphs - off.memory.kv + on.memory.kv
