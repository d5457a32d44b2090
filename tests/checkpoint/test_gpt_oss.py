"""GPT-OSS experts: biases, interleaved rows, stacked [E, H, 2I]; read as transformers reads them."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.checkpoint import packing
from tests.checkpoint.writers import edit_config, load, save
from turnout.checkpoint import CheckpointError, ExpertShape, open_checkpoint

E, H, I = 4, 64, 64  # 2I = 2H, and down_proj is square: its shape does not say which way round it is
PREFIX = "model.layers.0.mlp.experts"
SHAPE = ExpertShape(num_experts=E, hidden=H, intermediate=I, biased=True)


@pytest.fixture
def model(tmp_path):
    config = AutoConfig.for_model(
        "gpt_oss",
        vocab_size=64,
        hidden_size=H,
        intermediate_size=I,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=E,
        num_experts_per_tok=2,
        layer_types=["full_attention"],
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    model.save_pretrained(tmp_path)
    return model


def quantize(folder):
    """Rewrite the experts as OpenAI published them: blocks and scales of the [E, N, K] matrices."""
    tensors = load(folder)
    for name in (f"{PREFIX}.gate_up_proj", f"{PREFIX}.down_proj"):
        packed = [packing.mxfp4(one.T.float().contiguous())[0] for one in tensors.pop(name)]
        for suffix in ("_blocks", "_scales"):
            tensors[name + suffix] = torch.stack([p[suffix] for p in packed])
    save(folder, tensors)
    with edit_config(folder) as config:
        config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


def expert(weights, e, x_TH):
    """One expert in plain torch from canonical weights: GPT-OSS's clamped SwiGLU."""
    w13, w2 = weights.w13.decode()[e], weights.w2.decode()[e]
    gate, up = (x_TH @ w13.T + weights.b13[e]).chunk(2, dim=-1)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0) + 1
    return (gate * torch.sigmoid(1.702 * gate) * up) @ w2.T + weights.b2[e]


def assert_computes_like_transformers(weights, model, first=0):
    experts, x_TH = model.model.layers[0].mlp.experts, torch.randn(5, H)
    for i in range(weights.num_local_experts):
        ids = torch.full((5, 1), first + i)
        with torch.no_grad():
            expected = experts(x_TH, ids, torch.ones(5, 1))
        torch.testing.assert_close(expert(weights, i, x_TH), expected, rtol=1e-4, atol=1e-4)


def test_bf16_experts_compute_what_transformers_computes(model, tmp_path):
    with open_checkpoint(tmp_path) as checkpoint:
        weights = checkpoint.experts(PREFIX, SHAPE, first=1, count=2)
    assert_computes_like_transformers(weights, model, first=1)


def test_mxfp4_experts_compute_what_transformers_computes(model, tmp_path):
    quantize(tmp_path)
    tensors = load(tmp_path)
    experts = model.model.layers[0].mlp.experts
    with torch.no_grad():
        for name in ("gate_up_proj", "down_proj"):
            blocks, scales = (tensors[f"{PREFIX}.{name}_{part}"] for part in ("blocks", "scales"))
            getattr(experts, name).copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.experts_format(PREFIX) == ("mxfp4", False)
        weights = checkpoint.experts(PREFIX, SHAPE)
    assert_computes_like_transformers(weights, model)


@pytest.mark.parametrize("quantized", [False, True])
def test_a_missing_bias_is_not_zero(model, quantized, tmp_path):
    if quantized:
        quantize(tmp_path)
    tensors = load(tmp_path)
    tensors.pop(f"{PREFIX}.down_proj_bias")
    save(tmp_path, tensors)
    with (
        open_checkpoint(tmp_path) as checkpoint,
        pytest.raises(CheckpointError, match=r"down_proj_bias: is missing\. These experts carry biases"),
    ):
        checkpoint.experts(PREFIX, SHAPE)
