"""Presets by name; this machine against what psutil and torch say."""

import psutil
import pytest
import torch

from turnout.errors import UserError
from turnout.parallel import hardware
from turnout.parallel.hardware import PRESETS, detect, hardware_names, named


def test_presets_know_their_generation():
    assert hardware_names() == ["cpu", "a100", "h100", "h200", "b200", "gb200", "b300", "gb300"]
    assert {name for name, preset in PRESETS.items() if preset.has_fp4_units} == {
        "b200",
        "gb200",
        "b300",
        "gb300",
    }
    assert all(p.device == "cuda" and not p.present and p.memory_bytes >= 80e9 for p in PRESETS.values())
    assert named("h200").architecture == 90


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(UserError, match="unknown") as error:
        named("h20")
    assert all(name in str(error.value) for name in hardware_names())


def test_the_cpu_is_this_machine_within_its_limits():
    cpu = named("cpu")
    assert (cpu.device, cpu.architecture, cpu.present) == ("cpu", 0, True)
    assert 0 < cpu.memory_bytes <= psutil.virtual_memory().total
    assert not cpu.has_fp4_units


def test_auto_asks_torch_only_where_a_driver_shows_itself(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: asked.append(True))
    monkeypatch.setattr(hardware, "_may_have_gpu", lambda: False)
    assert detect("auto").device == "cpu"
    assert asked == []
    monkeypatch.setattr(hardware, "_may_have_gpu", lambda: True)
    assert detect("auto").device == "cpu"
    assert asked == [True]


def test_cuda_without_a_gpu_says_what_to_do(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="--device cpu"):
        detect("cuda")


def test_a_control_group_limits_memory(monkeypatch, tmp_path):
    limit = tmp_path / "memory.max"
    limit.write_text("1000000\n")
    monkeypatch.setattr(hardware, "MEMORY_LIMITS", (str(limit), str(tmp_path / "absent")))
    assert detect("cpu").memory_bytes == 1_000_000
    limit.write_text("max\n")
    assert detect("cpu").memory_bytes == psutil.virtual_memory().total


@pytest.mark.gpu
def test_a_gpu_is_described_by_torch():
    found = detect("cuda")
    assert found.present
    assert (
        found.architecture
        == 10 * torch.cuda.get_device_capability()[0] + torch.cuda.get_device_capability()[1]
    )
    assert found.memory_bytes == torch.cuda.get_device_properties(0).total_memory
