"""The bundled checkpoints: sizes, and that the NVFP4 one is the bf16 one, quantised and calibrated."""

from __future__ import annotations

import json
import math
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors import safe_open

from turnout.checkpoint.locate import ASSETS, locate

BF16 = locate("demo-bf16")
MB = 1e6


def folder_size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def test_sizes():
    assert folder_size(ASSETS / "demo") < 7.4 * MB
    assert sum(folder_size(folder) for folder in ASSETS.iterdir() if folder.is_dir()) < 7.5 * MB  # of a wheel


def test_both_share_tokenizer_and_record():
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "training.json"):
        assert (ASSETS / "demo" / name).read_bytes() == (BF16 / name).read_bytes(), name


def test_record_says_what_it_can_do():
    record = json.loads((ASSETS / "demo" / "training.json").read_text())
    assert {"commit", "date", "device", "steps", "arguments", "log"} <= record.keys()
    bf16 = record["heldout"]["bf16"]["accuracy"]
    assert bf16 >= 0.97
    for name in ("nvfp4", "mxfp4"):
        assert record["heldout"][name]["accuracy"] >= bf16 - 0.02


@pytest.fixture(scope="module")
def files():
    with (
        safe_open(ASSETS / "demo" / "model.safetensors", "pt") as nvfp4,
        safe_open(BF16 / "model.safetensors", "pt") as bf16,
    ):
        yield nvfp4, bf16


def test_everything_but_experts_is_copied(files):
    nvfp4, bf16 = files
    for name in bf16.keys():  # noqa: SIM118 - a safetensors file is not a dict
        if ".experts." not in name:
            assert torch.equal(nvfp4.get_tensor(name), bf16.get_tensor(name)), name


@pytest.mark.parametrize("layer", [0, 4])
@pytest.mark.parametrize("expert", [0, 31])
def test_experts_are_the_bf16_weights_rounded(files, layer, expert):
    """Decoded with ml_dtypes; rounding to e2m1 in groups of 16 costs about 9.5 % in norm."""
    nvfp4, bf16 = files
    shared = set()
    for projection in ("gate", "up", "down"):
        module = f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj"
        packed = nvfp4.get_tensor(f"{module}.weight")
        codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2).numpy().astype(np.uint8)
        value = torch.from_numpy(codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32))
        scale = nvfp4.get_tensor(f"{module}.weight_scale").float().repeat_interleave(16, dim=-1)
        total = nvfp4.get_tensor(f"{module}.weight_scale_2")
        weight = bf16.get_tensor(f"{module}.weight").float()
        error = (value * scale * total - weight).norm() / weight.norm()
        assert 0.05 < error < 0.12, module
        assert math.isfinite(nvfp4.get_tensor(f"{module}.input_scale")), module
        assert nvfp4.get_tensor(f"{module}.input_scale") > 0, module
        if projection != "down":
            shared.add(total.item())
    assert len(shared) == 1, "gate and up share a global scale"
