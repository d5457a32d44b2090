"""Weights stream to where they stay: the host never holds much more than this rank's share."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import torch

from tests.checkpoint.measure_loading import LAYERS, VOCABULARY
from tests.checkpoint.writers import edit_config, save

E, H, I = 16, 1024, 512
E4M3 = torch.float8_e4m3fn
RECORDS = {
    "bf16": None,
    "transposed": None,
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["model.embed_tokens"]},
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "mxfp4": {"quant_method": "mxfp4"},
}


def linear(format, n, k):
    if format == "bf16":
        return {".weight": torch.ones(n, k, dtype=torch.bfloat16)}
    if format == "fp8":
        return {
            ".weight": torch.full((n, k), 0x38, dtype=torch.uint8).view(E4M3),
            ".weight_scale_inv": torch.ones(-(-n // 128), -(-k // 128)),
        }
    return {
        ".weight": torch.full((n, k // 2), 0x21, dtype=torch.uint8),
        ".weight_scale": torch.full((n, k // 16), 0x38, dtype=torch.uint8).view(E4M3),
        ".weight_scale_2": torch.tensor(0.01),
        ".input_scale": torch.tensor(0.01),
    }


def layer(format, prefix):
    if format == "transposed":
        yield f"{prefix}.gate_up_proj", torch.ones(E, H, 2 * I + 32, dtype=torch.bfloat16)[..., : 2 * I]
        yield f"{prefix}.down_proj", torch.ones(E, I, H, dtype=torch.bfloat16)
    elif format == "mxfp4":
        for name, n, k in (("gate_up_proj", 2 * I, H), ("down_proj", H, I)):
            yield f"{prefix}.{name}_blocks", torch.full((E, n, k // 32, 16), 0x21, dtype=torch.uint8)
            yield f"{prefix}.{name}_scales", torch.full((E, n, k // 32), 127, dtype=torch.uint8)
    else:
        for e in range(E):
            for name, n, k in (("gate_proj", I, H), ("up_proj", I, H), ("down_proj", H, I)):
                for suffix, tensor in linear(format, n, k).items():
                    yield f"{prefix}.{e}.{name}{suffix}", tensor


def write(folder, format):
    """Large enough for the interpreter's own noise not to matter."""
    folder.mkdir()
    tensors = {"model.embed_tokens.weight": torch.ones(VOCABULARY, H, dtype=torch.bfloat16)}
    for i in range(LAYERS):
        tensors |= layer(format, f"model.layers.{i}.mlp.experts")
    save(folder, tensors)
    with edit_config(folder) as config:
        # 2I == H, so that the family decides; and no other format's family is transposed
        config["model_type"] = "llama4_text" if format == "transposed" else "qwen3_moe"
        config["quantization_config"] = RECORDS[format]
    return str(folder)


def test_peak_memory_stays_near_the_weights_kept(tmp_path):
    folders = {format: write(tmp_path / format, format) for format in RECORDS}
    cases = [(folder, *part) for folder in folders.values() for part in ((0, E), (4, 4))]
    shape = {"num_experts": E, "hidden": H, "intermediate": I}
    result = subprocess.run(
        [sys.executable, "-m", "tests.checkpoint.measure_loading", json.dumps(cases), json.dumps(shape)],
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"},  # what is freed leaves the process at once
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    for case, (kept, grown) in zip(cases, json.loads(result.stdout), strict=True):
        print(f"{case}: kept {kept / 1e6:.0f} MB, grew {grown / 1e6:.0f} MB, {grown / kept:.2f}")
        assert kept > 30_000_000, case
        assert grown < 1.3 * kept, f"{grown / kept:.2f} times the weights of {case}"
        assert grown > 0.8 * kept, f"the measurement missed the weights of {case}"
