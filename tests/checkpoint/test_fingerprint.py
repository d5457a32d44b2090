"""Fingerprints of model folders: equal for copies, different for other weights of the same sizes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from turnout.checkpoint.fingerprint import differences, fingerprint


@pytest.mark.parametrize("size", [0, 1, 5000, 1 << 14, (1 << 20) + 3])
def test_copies_are_equal_and_a_change_is_named(tmp_path: Path, size: int):
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    (one / "config.json").write_text("{}")
    (one / "a.safetensors").write_bytes(bytes(range(256)) * (size // 256) + b"x" * (size % 256))
    (one / "tokenizer.json").write_text("not looked at")
    shutil.copytree(one, other)
    assert sorted(fingerprint(one)) == ["a.safetensors", "config.json"]
    assert differences(fingerprint(one), fingerprint(other)) == []
    with (other / "a.safetensors").open("ab") as file:
        file.write(b"!")
    (one / "b.safetensors").touch()
    assert differences(fingerprint(one), fingerprint(other)) == ["a.safetensors", "b.safetensors"]


def test_other_weights_of_the_same_size(tmp_path: Path):
    for name, value in (("one", 1), ("other", 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "w.safetensors").write_bytes(bytes([value]) * 3_000_000)
    assert differences(fingerprint(tmp_path / "one"), fingerprint(tmp_path / "other")) == ["w.safetensors"]
