"""The bundled checkpoint: its size, its record, and that it is NVFP4 as others would read and write it."""

from __future__ import annotations

import json
import math

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tools.demo.export import decoded
from turnout.checkpoint.locate import ASSETS

DEMO = ASSETS / "demo"
MB = 1e6


@pytest.fixture(scope="module")
def tensors(tmp_path_factory) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(as shipped, decoded to bf16)"""
    folder = tmp_path_factory.mktemp("demo") / "bf16"
    decoded(DEMO, folder)
    return load_file(DEMO / "model.safetensors"), load_file(folder / "model.safetensors")


def test_sizes():
    size = sum(path.stat().st_size for path in ASSETS.rglob("*") if path.is_file())
    assert size < 12.2 * MB  # nearly all of a wheel


def test_record_says_what_it_can_do():
    record = json.loads((DEMO / "training.json").read_text())
    assert {"commit", "date", "device", "steps", "arguments", "log"} <= record.keys()
    bf16 = record["heldout"]["bf16"]["groups"]
    assert bf16["wording"] >= 0.97
    for name in ("nvfp4", "mxfp4"):
        for group in ("wording", "sums", "results"):
            assert record["heldout"][name]["groups"][group] >= bf16[group] - 0.02, (name, group)


@pytest.mark.parametrize("layer", [0, 7])
@pytest.mark.parametrize("expert", [0, 31])
def test_experts_are_nvfp4_and_decode_to_what_they_say(tensors, layer, expert):
    """Decoded with ml_dtypes, which knows nothing of our codec; `decoded` rounds that to bf16 (2^-9)."""
    nvfp4, bf16 = tensors
    shared = set()
    for projection in ("gate", "up", "down"):
        module = f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj"
        packed = nvfp4[f"{module}.weight"]
        codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2).numpy().astype(np.uint8)
        value = torch.from_numpy(codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32))
        scale = nvfp4[f"{module}.weight_scale"].float().repeat_interleave(16, dim=-1)
        total = nvfp4[f"{module}.weight_scale_2"]
        torch.testing.assert_close(
            bf16[f"{module}.weight"].float(), value * scale * total, rtol=2**-8, atol=0
        )
        assert math.isfinite(nvfp4[f"{module}.input_scale"]), module
        assert nvfp4[f"{module}.input_scale"] > 0, module
        if projection != "down":
            shared.add(total.item())
    assert len(shared) == 1, "gate and up share a global scale"


def test_everything_but_experts_is_bf16(tensors):
    nvfp4, bf16 = tensors
    assert all(t.dtype == torch.bfloat16 for t in bf16.values())
    kept = {name: t for name, t in nvfp4.items() if ".experts." not in name}
    assert kept.keys() == {name for name in bf16 if ".experts." not in name}
    for name, t in kept.items():
        assert torch.equal(t, bf16[name]), name
