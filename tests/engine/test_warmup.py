"""What is tuned between loading and serving, and with what."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.engine.toy import ToyModel, make_core, request
from tests.moe.build import make_plan, make_spec
from turnout.engine import warmup
from turnout.engine.warmup import Tuner
from turnout.moe.backends.flashinfer import autotune
from turnout.parallel.groups import SINGLE_RANK

SPEC = make_spec("silu", "bf16", intermediate_size=128)
DRAFT = make_spec("silu", "fp8", intermediate_size=128)  # of layer 3


def tuned_with(runner: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, layers: int = 3):
    """The runners made for some layers, and what they were tuned with."""
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
    tuner.tune(SINGLE_RANK, None)
    return made, calls


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
    sizes = warmup.prompt_sizes(most)
    assert computed[: len(sizes)] == sizes
    assert set(sizes) >= {1, most}
    assert computed[len(sizes) :] == [rows for rows in (2, 4) if rows <= min(most, 6, pages)]
    assert core._scheduler.kv.pools[0].num_available == free
    core.add(request("a", [3, 1, 4, 1, 5], max_tokens=6, ignore_eos=True))
    found = []
    while core.has_work():
        found += [token for output in core.step() for token in output.token_ids]
    assert found == ToyModel().greedy([3, 1, 4, 1, 5], 6, eos=False)
