"""What is tuned between loading and serving, and with what."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.engine.step.rerun import Rerun, with_prefill_graphs
from tests.engine.toy import ToyModel, engine_plan, make_core, request, run
from tests.moe.build import make_plan, make_spec
from turnout.config import Config
from turnout.engine import chosen_sizes, warmup
from turnout.engine.builder import build_engine
from turnout.engine.core import EngineCore
from turnout.engine.ranks.step_sync import StepSync, SyncedStep
from turnout.engine.scheduler.scheduler import Chunk
from turnout.engine.step.cuda_graphs import Computed
from turnout.engine.step.forward import Forward
from turnout.engine.warmup import Tuner
from turnout.models.interface import Step
from turnout.moe.backends.flashinfer import autotune
from turnout.parallel.exchange import StepRecord
from turnout.parallel.groups import SINGLE_RANK
from turnout.parallel.topology import Topology

SPEC = make_spec("silu", "bf16", intermediate_size=128)
DRAFT = make_spec("silu", "fp8", intermediate_size=128)  # of layer 3


def tuned_with(runner: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, layers: int = 3):
    """The runners of some layers, and what they were tuned with."""
    calls: list[tuple] = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(autotune, "tune", lambda *args, **kwargs: calls.append((args, kwargs)))
    plan = make_plan(SPEC, runner=runner, weight_storage="packed", compute_dtype="bfloat16")
    engine_plan = SimpleNamespace(
        experts_of=lambda layer: (DRAFT if layer == 3 else SPEC, plan),
        hardware=SimpleNamespace(name="made up"),
    )
    made = [object() for _ in range(layers)]
    tuner = Tuner(engine_plan, torch.device("cpu"), made.__getitem__)
    assert [tuner.make_runner(layer) for layer in range(layers)] == made
    prepared = [object() for _ in made]  # as other objects, by whoever keeps weights
    tuner.tune(prepared, SINGLE_RANK, None)
    return prepared, calls


def test_the_first_layer_stands_for_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    made, [(args, options)] = tuned_with("flashinfer_cutlass", monkeypatch, tmp_path)
    assert args[0] is made[0]
    assert args[1] is SPEC
    assert options["world"] is SINGLE_RANK.world
    assert options["folder"] == tmp_path / "turnout"
    assert options["device_name"] == "made up"


def test_a_draft_layer_in_another_format_stands_for_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    made, calls = tuned_with("flashinfer_cutlass", monkeypatch, tmp_path, layers=4)
    assert [args[:2] for args, _ in calls] == [(made[0], SPEC), (made[3], DRAFT)]


@pytest.mark.parametrize(("runner", "layers"), [("torch", 3), ("hopper", 3), ("flashinfer_cutlass", 0)])
def test_nothing_to_choose_or_no_layer_means_no_tuning(runner: str, layers: int, monkeypatch, tmp_path: Path):
    assert tuned_with(runner, monkeypatch, tmp_path, layers)[1] == []


@pytest.mark.parametrize(
    ("most", "context", "pages"), [(40, 128, 64), (50, 12, 64), (1, 128, 64), (16, 16, 4)]
)
def test_first_prompts_have_all_sizes_and_leave_nothing(most: int, context: int, pages: int):
    model = ToyModel()
    core = make_core(
        model, num_pages=pages, max_context=context, max_prefill_tokens=most, max_running_requests=6
    )
    free, computed = core._scheduler.kv.pools[0].num_available, []
    scored: list[int] = []
    make_logits = model.logits

    def logits(hidden_SH: torch.Tensor) -> torch.Tensor:
        scored.append(len(hidden_SH))
        return make_logits(hidden_SH)

    model.reset_counts = lambda: computed.extend(model.steps)
    model.logits = logits
    warmup.first_prompts(core.engine_plan, core._forward, model, core._scheduler.kv, None)
    model.logits = make_logits
    assert scored == [min(size, 6) for size in computed]  # rows of the head, up to what may end at once
    sizes = warmup.prompt_sizes(most, 1)
    assert computed[: len(sizes)] == sizes
    assert set(sizes) >= {1, most}
    assert computed[len(sizes) :] == [rows for rows in (2, 4, 6) if rows <= min(most, 6, pages)]
    assert core._scheduler.kv.pools[0].num_available == free
    core.add(request("a", [3, 1, 4, 1, 5], max_tokens=6, ignore_eos=True))
    found = []
    while core.has_work():
        found += [token for output in core.step() for token in output.token_ids]
    assert found == ToyModel().greedy([3, 1, 4, 1, 5], 6, eos=False)


@pytest.mark.parametrize("streams", [1, 4])
def test_first_prompts_have_the_size_of_connections_where_residual_streams_are_several(streams: int):
    model = ToyModel()
    model.shape = dataclasses.replace(model.shape, residual_streams=streams)
    core = make_core(model, num_pages=64, max_context=128, max_prefill_tokens=100, max_running_requests=2)
    computed: list[int] = []
    model.reset_counts = lambda: computed.extend(model.steps)
    warmup.first_prompts(core.engine_plan, core._forward, model, core._scheduler.kv, None)
    assert computed == [1, 2, 3, 4, 7, 8, 15, 16, 31, 32, 63, 64, *([80] if streams > 1 else []), 100, 2]


def watched_eager_steps(core: EngineCore) -> list[tuple[int, tuple[int, ...]]]:
    """Of each step that will be computed eagerly: its tokens, and those of each data-parallel rank."""
    found, compute = [], core._forward.eagerly

    def noted(chunks: Sequence[Chunk], synced: SyncedStep) -> Computed:
        found.append((sum(chunk.length for chunk in chunks), synced.tokens))
        return compute(chunks, synced)

    core._forward.eagerly = noted
    return found


@pytest.mark.parametrize("decoding", [[], [2], [2, 6]], ids=str)
def test_first_prompts_go_the_ways_of_steps(decoding: list[int]):
    """As graphs where these hold them, and eagerly where none does or where a step may decode as many."""
    model = ToyModel()
    core = make_core(model, num_pages=64, max_context=128, max_prefill_tokens=40, max_running_requests=6)
    graphs = with_prefill_graphs(core, [4, 24])
    if decoding:
        core._forward.graphs = SimpleNamespace(sizes=decoding)
    eagerly = watched_eager_steps(core)
    with torch.inference_mode():
        warmup.first_prompts(core.engine_plan, core._forward, model, core._scheduler.kv, None)
    sizes = [*warmup.prompt_sizes(40, 1), 2, 4, 6]
    assert [count for _, count in graphs.steps] == [size for size in sizes if size <= 24]
    decode = range(max(decoding, default=0) + 1, 7)
    assert [count for count, _ in eagerly] == [size for size in sizes if size > 24 or size in decode]


def core_of_two_ranks(model: ToyModel, rank: int, prefill: list[int]) -> tuple[EngineCore, Rerun]:
    """Of one of two data-parallel ranks, with graphs of prompts of these sizes."""
    core = make_core(model, num_pages=64, max_context=128, max_prefill_tokens=40, max_running_requests=6)
    topology = Topology(tp_size=2, dp_size=2, ep_size=2, enable_dp_attention=True, rank=rank)
    core.engine_plan = dataclasses.replace(core.engine_plan, topology=topology)
    core._forward = Forward(core.engine_plan, core._model, core._attention)
    return core, with_prefill_graphs(core, prefill)


@pytest.mark.parametrize("decoding", [5, 6])
def test_first_prompts_of_data_parallel_ranks_take_no_eager_steps_where_graphs_hold_all(decoding: int):
    """Of 40 tokens, and of the six requests that may decode."""
    model = ToyModel()
    core, graphs = core_of_two_ranks(model, 0, [4, 40])
    core._forward.graphs = SimpleNamespace(sizes=[decoding])
    eagerly = watched_eager_steps(core)
    with torch.inference_mode():
        warmup.first_prompts(core.engine_plan, core._forward, model, core._scheduler.kv, None)
    sizes = [*warmup.prompt_sizes(40, 1), 2, 4, 6]
    assert [count for _, count in graphs.steps] == [*sizes, 40, 1]
    assert [count for count, _ in eagerly] == ([] if decoding == 6 else sizes)


@pytest.mark.parametrize("rank", [0, 1])
def test_first_prompts_of_data_parallel_ranks_are_uneven_too(rank: int):
    """A rank with few tokens computes them eagerly next to one with more than graphs hold."""
    model = ToyModel()
    core, graphs = core_of_two_ranks(model, rank, [4, 24])
    plan = core.engine_plan
    free, eagerly = core._scheduler.kv.pools[0].num_available, watched_eager_steps(core)
    with torch.inference_mode():
        warmup.first_prompts(plan, core._forward, model, core._scheduler.kv, None)
    sizes = [*warmup.prompt_sizes(40, 1), 2, 4, 6]
    alike, uneven = eagerly[:-2], eagerly[-2:]
    assert alike == [(size, (size, size)) for size in sizes]
    assert uneven == [([40, 1][rank], (40, 1)), ([1, 40][rank], (1, 40))]
    assert [count for _, count in graphs.steps] == [size for size in sizes if size <= 24]
    assert core._scheduler.kv.pools[0].num_available == free


class Machine(ToyModel):
    """Takes so many seconds for each token, by a clock of its own."""

    def __init__(self, token_seconds: float) -> None:
        super().__init__()
        self.token_seconds, self.now = token_seconds, 0.0

    def forward(self, step: Step) -> torch.Tensor:
        self.now += self.token_seconds * len(step.input_ids)
        return super().forward(step)


def built(machine: Machine, monkeypatch: pytest.MonkeyPatch, *, asked: bool = False) -> EngineCore:
    """An engine whose plan chose 8 running requests and 64 prompt tokens, of which 2 and 16 are the least."""
    candidates = {"max_running_requests": {"cpu": (2, 8)}, "max_prefill_tokens": {"cpu": (16, 64)}}
    monkeypatch.setattr(chosen_sizes, "CANDIDATES", candidates)
    monkeypatch.setattr(warmup, "time", SimpleNamespace(perf_counter=lambda: machine.now))
    config = Config(max_running_requests=8, max_prefill_tokens=64, page_size=4, chunked_prefill_size=64)
    plan = engine_plan(config, machine.shape, num_pages=64, max_context=128)
    reasons = dict.fromkeys(candidates, chosen_sizes.AS_ASKED if asked else "leaves enough")
    return build_engine(dataclasses.replace(plan, size_reasons=reasons), model=machine)


@pytest.mark.parametrize(
    ("token_seconds", "running", "prompt"), [(0.007, 8, 64), (0.01, 8, 32), (0.05, 8, 16), (0.1, 4, 16)]
)
def test_sizes_of_steps_that_take_too_long_are_halved(
    token_seconds: float, running: int, prompt: int, monkeypatch: pytest.MonkeyPatch, caplog
):
    machine = Machine(token_seconds)
    with caplog.at_level(logging.WARNING):
        core = built(machine, monkeypatch)
    info = core.info()
    assert {name: size["value"] for name, size in info["sizes"].items()} == {
        "max_running_requests": running,
        "max_prefill_tokens": prompt,
    }
    assert info["measured_step_ms"]["prefill"][64] == pytest.approx(64_000 * token_seconds)
    assert ("max_prefill_tokens" in caplog.text.replace("-", "_")) == (prompt < 64)
    if prompt == 32:
        assert "--max-prefill-tokens 32: a step of 64 took 640 ms, more than 500" in caplog.text
    machine.steps.clear()
    asked = {str(i): [1 + i, 2, 3] * 10 for i in range(8)}
    found = run(core, [request(id, ids, max_tokens=3, ignore_eos=True) for id, ids in asked.items()])
    assert {id: output.token_ids for id, output in found.items()} == {
        id: ToyModel().greedy(ids, 3, eos=False) for id, ids in asked.items()
    }
    assert prompt <= max(machine.steps) <= prompt + running


def test_a_size_that_was_asked_for_is_not_timed(monkeypatch: pytest.MonkeyPatch):
    machine = Machine(1.0)
    core = built(machine, monkeypatch, asked=True)
    assert machine.now == 0
    assert core.info()["sizes"]["max_prefill_tokens"] == {"value": 64, "reason": chosen_sizes.AS_ASKED}


def test_the_slowest_rank_decides(monkeypatch: pytest.MonkeyPatch):
    machine = Machine(0.007)
    core = built(machine, monkeypatch)

    def exchange(record: StepRecord) -> list[StepRecord]:
        return [record, record._replace(tokens=2 * record.tokens)]

    plan, _ = warmup.lower_sizes(
        core.engine_plan, core._forward, machine, core._scheduler, StepSync(exchange=exchange)
    )
    assert plan.lowered_sizes == {"max_prefill_tokens": 32}


@pytest.mark.parametrize("algorithm", ["none", "MTP"])
def test_a_draft_layer_computes_first_prompts_too(algorithm: str):
    """Steps of the same sizes, which take every kernel of it; answers are the same afterwards."""
    model, drafted = ToyModel(drafts=True), []
    draft = model.draft

    def noted(step: Step, hidden_NH: torch.Tensor) -> torch.Tensor:
        drafted.append(len(hidden_NH))
        return draft(step, hidden_NH)

    model.draft = noted
    core = make_core(model, max_prefill_tokens=40, speculative_algorithm=algorithm)
    free, computed = core._scheduler.kv.pools[0].num_available, []
    model.reset_counts = lambda: computed.extend(model.steps)
    warmup.first_prompts(core.engine_plan, core._forward, model, core._scheduler.kv, None)
    assert drafted == (computed if algorithm == "MTP" else [])
    assert core._scheduler.kv.pools[0].num_available == free
    found = run(core, [request("a", [3, 1, 4, 1, 5], max_tokens=6, ignore_eos=True)])
    assert found["a"].token_ids == model.greedy([3, 1, 4, 1, 5], 6, eos=False)
