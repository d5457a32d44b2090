"""FlashInfer's tactics at warm-up: its autotuner as installed, with made-up times, as no device gives any."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tests.moe.backends.flashinfer.cutlass_contract import TACTICS, library
from tests.moe.backends.flashinfer.test_cutlass_contract import batch_of, runner_of
from tests.moe.build import make_experts, make_spec
from turnout.errors import UserError
from turnout.moe.backends.flashinfer import autotune
from turnout.parallel.groups import Group

CPU = torch.device("cpu")
FASTEST = 2  # of each GEMM's tactics, of which the first is what an untuned call takes


class Second(Group):
    """Rank 1 of 2, whose peer has said `value` before."""

    def __init__(self, value: Tensor) -> None:
        super().__init__((0, 1), 1)
        self._value = value

    def all_gather(self, x_R: Tensor, counts) -> Tensor:
        first = torch.tensor([len(self._value)]) if x_R.dtype == torch.int64 else self._value
        return torch.cat([first, x_R])


@pytest.fixture
def tuner(monkeypatch: pytest.MonkeyPatch):
    """FlashInfer's autotuner, empty; what it timed, and in which modes."""
    from flashinfer.autotuner import AutoTuner

    made = AutoTuner()
    made.timed = []

    def profile(runner, inputs, tactic, *args, **kwargs) -> float:
        made.timed.append(
            (len(inputs[0]), tactic, torch.is_inference_mode_enabled(), torch.is_grad_enabled())
        )
        return 1.0 if tactic % TACTICS == FASTEST else 2.0

    monkeypatch.setattr(made, "_profile_single_kernel", profile)
    monkeypatch.setattr(AutoTuner, "_instance", made)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return made


def tune(folder: Path, world: Group | None = None):
    """A runner, tuned, and which tactics its next call takes."""
    spec = make_spec("silu", "bf16", intermediate_size=128)
    experts = make_experts(spec, dtype=torch.bfloat16)
    runner = runner_of(spec, experts)
    steps: list[tuple[str, int, int]] = []
    with library() as launches, torch.inference_mode():
        runner.prepare(experts)
        autotune.tune(
            runner,
            spec,
            runner._plan,
            device=CPU,
            device_name="made up",
            world=world or Group(),
            folder=folder,
            progress=lambda *step: steps.append(step),
        )
        runner(batch_of(spec, 9))
    return launches.tactics[-1], steps


def test_a_tuner_that_can_time_nothing_is_reported_and_asked_again(
    tmp_path: Path, tuner, monkeypatch, caplog
):
    def fails(*args, **kwargs) -> float:
        raise RuntimeError("a module is missing")

    monkeypatch.setattr(tuner, "_profile_single_kernel", fails)
    taken, _ = tune(tmp_path)
    assert taken == (-1, -1)
    assert "could time no kernel" in caplog.text
    assert not [file for file in tmp_path.rglob("*") if file.is_file()]


def test_the_fastest_tactics_are_taken_and_kept(tmp_path: Path, tuner):
    taken, steps = tune(tmp_path)
    assert taken == (FASTEST, TACTICS + FASTEST)
    assert {timed[2:] for timed in tuner.timed} == {(False, False)}  # inference mode, gradients
    assert max(tokens for tokens, *_ in tuner.timed) == 64  # the plan's bound
    assert [step[1:] for step in steps] == [(0, 1), (1, 1)]
    (file,) = (tmp_path / "flashinfer").iterdir()
    assert file.suffix == ".json"


def test_what_was_kept_is_not_timed_again(tmp_path: Path, tuner):
    tune(tmp_path)
    tuner.clear_cache()
    tuner.timed.clear()
    taken, steps = tune(tmp_path)
    assert taken == (FASTEST, TACTICS + FASTEST)
    assert not tuner.timed
    assert not steps


def test_other_ranks_take_what_the_first_chose(tmp_path: Path, tuner):
    import pickle

    tune(tmp_path)
    (file,) = (tmp_path / "flashinfer").iterdir()
    said = torch.frombuffer(bytearray(pickle.dumps(file.read_text())), dtype=torch.uint8)
    tuner.clear_cache()
    tuner.timed.clear()
    taken, _ = tune(tmp_path / "own", Second(said))
    assert taken == (FASTEST, TACTICS + FASTEST)
    assert not tuner.timed
    assert not (tmp_path / "own").exists()


def test_tactics_of_another_environment_are_an_error(tmp_path: Path, tuner):
    import pickle

    tune(tmp_path)
    (file,) = (tmp_path / "flashinfer").iterdir()
    from flashinfer.version import __version__

    foreign = file.read_text().replace(__version__, "0.0.1")
    said = torch.frombuffer(bytearray(pickle.dumps(foreign)), dtype=torch.uint8)
    with pytest.raises(UserError, match="rank 1 cannot use the FlashInfer tactics"):
        tune(tmp_path, Second(said))


def test_a_folder_that_cannot_be_written_costs_the_file_alone(tmp_path: Path, tuner):
    with patch.object(Path, "mkdir", side_effect=PermissionError(13, "not allowed")):
        taken, _ = tune(tmp_path)
    assert taken == (FASTEST, TACTICS + FASTEST)


def test_files_differ_by_what_times_depend_on(tmp_path: Path):
    spec = make_spec("silu", "bf16", intermediate_size=128)
    plan = runner_of(spec, make_experts(spec))._plan
    names = {
        autotune.path(tmp_path, spec, plan, "one", 1),
        autotune.path(tmp_path, spec, plan, "another", 1),
        autotune.path(tmp_path, spec, plan, "one", 2),
        autotune.path(tmp_path, make_spec("relu2", "bf16", intermediate_size=128), plan, "one", 1),
    }
    assert len(names) == 4
