"""Calibration against hooks in transformers: the largest inputs of every expert, and their scales."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.tiny import QWEN2_MOE, QWEN3_MOE, write_model
from turnout.commands.quantize import quantize
from turnout.engine.calibration import Sample, calibrate

SAMPLES: list[Sample] = [
    "The quick brown fox jumps over the lazy dog.",
    [{"role": "user", "content": "2 + 2"}, {"role": "assistant", "content": "4"}],
    "".join(chr(33 + i * i % 89) for i in range(600)),  # longer than the context
]


def silent(what: str, done: int, total: int) -> None:
    pass


def hooked_amax(folder: Path, prompts: list[list[int]]) -> dict[str, tuple[float, float]]:
    """What transformers' own experts see, computed from what reaches them and their parameters."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager")
    found: dict[str, tuple[float, float]] = {}

    def watch(name: str):
        def hook(module, args):
            x, ids, _ = args
            for expert in ids.unique().tolist():
                rows = x[(ids == expert).any(dim=1)]
                gate, up = (rows @ module.gate_up_proj[expert].T).chunk(2, dim=-1)
                inner = torch.nn.functional.silu(gate) * up
                old = found.get(f"{name}.{expert}", (0.0, 0.0))
                new = (float(rows.abs().max()), float(inner.abs().max()))
                found[f"{name}.{expert}"] = (max(old[0], new[0]), max(old[1], new[1]))

        return hook

    for name, module in model.named_modules():
        if name.endswith("mlp.experts"):
            module.register_forward_pre_hook(watch(name))
    with torch.no_grad():
        for ids in prompts:
            model(torch.tensor([ids]))
    return found


@pytest.mark.parametrize(
    "base",
    [QWEN3_MOE | {"num_experts": 24}, QWEN2_MOE | {"decoder_sparse_step": 2, "num_hidden_layers": 4}],
    ids=["qwen3", "qwen2-sparse"],
)
def test_largest_inputs_are_those_hooks_see_in_transformers(tmp_path, base):
    write_model(tmp_path, base)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    prompts = [
        tokenizer(SAMPLES[0]).input_ids,
        tokenizer.apply_chat_template(SAMPLES[1], tokenize=True, return_dict=False),
        tokenizer(SAMPLES[2]).input_ids[:512],
    ]
    expected = hooked_amax(tmp_path, prompts)
    found = calibrate(str(tmp_path), SAMPLES, silent)
    assert {name for name, amax in found.items() if any(amax)} == set(expected)
    for name, amax in expected.items():
        assert found[name] == pytest.approx(amax, rel=1e-4)


def test_a_tokenizer_without_template_reads_the_contents(tmp_path):
    write_model(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    expected = hooked_amax(tmp_path, [tokenizer("2 + 2\n4").input_ids])
    found = calibrate(str(tmp_path), SAMPLES[1:2], silent)
    assert {name: amax for name, amax in found.items() if any(amax)} == {
        name: pytest.approx(amax, rel=1e-4) for name, amax in expected.items()
    }


def test_a_written_scale_is_the_layers_own(tmp_path):
    write_model(tmp_path / "in")
    quantize(str(tmp_path / "in"), tmp_path / "out", "nvfp4", samples=SAMPLES)
    amax = calibrate(str(tmp_path / "in"), SAMPLES, silent)
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        for name, (w13, w2) in amax.items():
            if not w13:  # no token came by; what it gets instead is the checkpoint writer's business
                continue
            for projection, value in (("gate_proj", w13), ("up_proj", w13), ("down_proj", w2)):
                scale = file.get_tensor(f"{name}.{projection}.input_scale").item()
                assert scale == pytest.approx(value / (6 * 448), rel=1e-6)
