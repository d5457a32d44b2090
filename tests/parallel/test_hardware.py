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


@pytest.mark.parametrize(
    ("flags", "units"),
    [
        ("avx2 avx512f avx512_bf16 amx_tile amx_bf16", "amx_bf16"),
        ("avx2 avx512f avx512_bf16", "avx512_bf16"),
        ("avx2 avx512f amx_tile amx_int8", "none"),
        ("avx2", "none"),
    ],
)
def test_a_cpus_units_are_those_of_its_flags(flags, units, monkeypatch, tmp_path):
    info = tmp_path / "cpuinfo"
    info.write_text(
        f"processor\t: 0\nmodel name\t: Some CPU\nflags\t\t: fpu {flags}\n\nmodel name\t: Some CPU\n"
    )
    monkeypatch.setattr(hardware, "CPU_INFO", str(info))
    monkeypatch.setattr(hardware.cpu, "allow_tiles", lambda: True)
    found = detect("cpu")
    assert (found.processor, found.bf16_units) == ("Some x2", units)
    assert set(found.vector_flags) == set(flags.split()) - {"amx_tile", "amx_int8"}
    assert found.with_bf16_units("auto") == found
    assert found.with_bf16_units("none").bf16_units == "none"


def test_tiles_that_the_operating_system_withholds_are_not_used(monkeypatch, tmp_path):
    info = tmp_path / "cpuinfo"
    info.write_text("flags : avx512_bf16 amx_tile amx_bf16\n")
    monkeypatch.setattr(hardware, "CPU_INFO", str(info))
    monkeypatch.setattr(hardware.cpu, "allow_tiles", lambda: False)
    assert detect("cpu").known_bf16_units == ("avx512_bf16", "none")


def test_torch_knows_the_same_units():
    flags = detect("cpu").vector_flags
    assert ("amx_bf16" in flags) == torch.cpu._is_amx_tile_supported()
    assert ("avx512_bf16" in flags) == torch.cpu._is_avx512_bf16_supported()


def test_auto_asks_torch_only_where_a_driver_shows_itself(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: asked.append(True))
    monkeypatch.setattr(hardware, "may_have_gpu", lambda: False)
    assert detect("auto").device == "cpu"
    assert asked == []
    monkeypatch.setattr(hardware, "may_have_gpu", lambda: True)
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
