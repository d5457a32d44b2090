"""Every published format, written independently, reads back as the weights it stands for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.checkpoint.writers import DENSE, FORMATS, Written, load, save, write_checkpoint
from tests.tiny import QWEN2_MOE, QWEN3_MOE
from turnout.checkpoint import ExpertShape, open_checkpoint
from turnout.checkpoint.parts import decode_by_rows
from turnout.formats import codec
from turnout.formats.experts import ExpertWeights

EXPECTED = {
    "float32": ("bf16", False),
    "bf16": ("bf16", False),
    "bf16-stacked": ("bf16", False),
    "bf16-transposed": ("bf16", False),
    "modelopt": ("nvfp4", True),
    "modelopt-config": ("nvfp4", True),
    "modelopt-weight-only": ("nvfp4", False),
    "modelopt-fused": ("nvfp4", True),
    "compressed-tensors": ("nvfp4", True),
    "compressed-tensors-weight-only": ("nvfp4", False),
    "mxfp4": ("mxfp4", False),
    "fp8": ("fp8", False),
    "fp8-ue8m0": ("fp8", False),
    "modelopt-fp8": ("fp8", False),
    "modelopt-fp8-fused": ("fp8", False),
    "compressed-tensors-fp8": ("fp8", False),
    "auto-fp8": ("fp8", False),
    "fp8-dynamic": ("bf16", False),
    "fp8-block": ("fp8", False),
    "int4-g32": ("bf16", False),
    "int4-g32-asymmetric": ("bf16", False),
    "int4-channel": ("bf16", False),
    "int4-bf16": ("int4", False),
    "int4-bf16-channel": ("int4", False),
    "int4-kimi": ("int4", False),
    "int4-channel-asymmetric": ("bf16", False),
    "compressed-mxfp4": ("mxfp4", False),
    "compressed-mxfp4a16": ("mxfp4", False),
    "modelopt-fp8-channel": ("bf16", False),
    "modelopt-fp8-blocks": ("fp8", False),
    "modelopt-mxfp4": ("mxfp4", False),
    "modelopt-w4a8-mxfp4-fp8": ("mxfp4", False),
    "modelopt-w4a8-nvfp4-fp8": ("nvfp4", False),
}
# 2 * 96 differs from 64, so that a transposed matrix can be told by its shape
SIZE = {"moe_intermediate_size": 96}
SHAPE = ExpertShape(num_experts=8, hidden=64, intermediate=96)
PREFIX = "model.layers.1.mlp.experts"


def assert_experts(weights: ExpertWeights, written: Written, prefix: str = PREFIX) -> None:
    """Decoded experts equal the reference up to the order of float32 multiplications."""
    w13, w2 = weights.w13.decode(), weights.w2.decode()
    half = w13.shape[1] // 2
    for i in range(weights.num_local_experts):
        e = weights.first_expert + i
        for name, value in (("gate", w13[i, :half]), ("up", w13[i, half:]), ("down", w2[i])):
            expected = written.weights[f"{prefix}.{e}.{name}_proj.weight"]
            torch.testing.assert_close(value, expected, rtol=1e-6, atol=0, msg=f"expert {e} {name}")


@pytest.mark.parametrize("format", FORMATS)
def test_experts_decode_to_the_reference(format, tmp_path):
    written = write_checkpoint(tmp_path, format, **SIZE)
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.experts_format(PREFIX) == EXPECTED[format]
        weights = checkpoint.experts(PREFIX, SHAPE)
    assert weights.format == EXPECTED[format][0]
    assert weights.num_local_experts == weights.num_experts == 8
    assert_experts(weights, written)


@pytest.mark.parametrize("format", FORMATS)
def test_a_slice_of_experts_is_the_slice_of_all(format, tmp_path):
    write_checkpoint(tmp_path, format, **SIZE)
    with open_checkpoint(tmp_path) as checkpoint:
        whole = checkpoint.experts(PREFIX, SHAPE)
        part = checkpoint.experts(PREFIX, SHAPE, first=5, count=2)
    assert (part.first_expert, part.num_local_experts, part.num_experts) == (5, 2, 8)
    for matrix in ("w13", "w2"):
        ours, theirs = getattr(part, matrix), getattr(whole, matrix)[5:7]
        for a, b in zip(ours.parts(), theirs.parts(), strict=True):
            assert torch.equal(_bytes(a), _bytes(b)), matrix
    if whole.input_scales is not None:  # of all experts, whatever this rank holds
        assert torch.equal(part.input_scales.w13, whole.input_scales.w13)
        assert torch.equal(part.input_scales.w2, whole.input_scales.w2)


@pytest.mark.parametrize("format", ["modelopt", "modelopt-fused", "compressed-tensors"])
def test_input_scales_multiply_whoever_wrote_them(format, tmp_path):
    written = write_checkpoint(tmp_path, format, **SIZE)
    with open_checkpoint(tmp_path) as checkpoint:
        scales = checkpoint.experts(PREFIX, SHAPE, first=6, count=1).input_scales
    for name, ours in (("gate", scales.w13), ("up", scales.w13), ("down", scales.w2)):
        theirs = [written.input_scales[f"{PREFIX}.{e}.{name}_proj"] for e in range(8)]
        torch.testing.assert_close(ours, torch.tensor(theirs), rtol=1e-6, atol=0)


@pytest.mark.parametrize("format", [f for f in FORMATS if not f.startswith("bf16")])
@pytest.mark.parametrize("base", [QWEN2_MOE, QWEN3_MOE], ids=["qwen2", "qwen3"])
def test_dense_layers_decode_to_the_reference(format, base, tmp_path):
    written = write_checkpoint(tmp_path, format, base, dense=True)
    modules = [n.removesuffix(".weight") for n in written.weights if DENSE.fullmatch(n)]
    modules += ["lm_head", "model.layers.0.mlp.gate"]
    with open_checkpoint(tmp_path) as checkpoint:
        for module in modules:
            expected = written.weights[f"{module}.weight"]
            weight = checkpoint.linear(module, tuple(expected.shape), torch.float32)
            torch.testing.assert_close(weight, expected, rtol=1e-6, atol=0, msg=module)
            half = checkpoint.linear(module, tuple(expected.shape), torch.bfloat16)
            torch.testing.assert_close(half, expected.bfloat16(), rtol=1e-2, atol=0, msg=module)
            some = checkpoint.linear(module, tuple(expected.shape), torch.float32, first=3, count=4)
            assert torch.equal(some, weight[3:7])
            assert some.untyped_storage().nbytes() == some.nbytes, "the rest is kept as well"


@pytest.mark.parametrize("format", ["bf16-stacked", "modelopt-fused"])
def test_square_matrices_follow_the_family(format, tmp_path):
    """2I == H: the shape does not say that Qwen's experts are not transposed."""
    written = write_checkpoint(tmp_path, format, hidden_size=64, moe_intermediate_size=32)
    with open_checkpoint(tmp_path) as checkpoint:
        weights = checkpoint.experts(PREFIX, ExpertShape(num_experts=8, hidden=64, intermediate=32))
    assert_experts(weights, written)


@pytest.mark.parametrize("format", ["fp8", "modelopt-fp8", "fp8-block", "fp8-dynamic"])
@pytest.mark.parametrize("intermediate", [32, 96, 160, 192, 256])
def test_fp8_blocks_of_gate_and_up_keep_their_own_scales(intermediate, format, tmp_path):
    """Where 128 does not divide the expert size, up's blocks start inside one of the stacked matrix's."""
    written = write_checkpoint(
        tmp_path, format, num_hidden_layers=2, hidden_size=160, moe_intermediate_size=intermediate
    )
    shape = ExpertShape(num_experts=8, hidden=160, intermediate=intermediate)
    with open_checkpoint(tmp_path) as checkpoint:
        weights = checkpoint.experts(PREFIX, shape, first=2, count=3)
    assert_experts(weights, written)
    assert weights.w13[1:2].decode().shape == (1, 2 * intermediate, 160)  # slices keep their blocks


WITH_UNUSED_SCALES = [f for f in FORMATS if f.endswith(("-fp8", "-fp8-fused", "mxfp4", "mxfp4-fp8"))]


@pytest.mark.parametrize("format", WITH_UNUSED_SCALES)
def test_scales_of_inputs_that_are_quantised_as_they_come_are_set_aside(format, tmp_path):
    write_checkpoint(tmp_path, format, **SIZE)
    with open_checkpoint(tmp_path) as checkpoint:
        for layer in range(checkpoint.config["num_hidden_layers"]):
            checkpoint.experts(f"model.layers.{layer}.mlp.experts", SHAPE)
        assert not [name for name in checkpoint.unread() if ".experts" in name]


def test_float8_scales_may_be_stored_in_bfloat16(tmp_path):
    """As Qwen3's FP8 checkpoints do."""
    written = write_checkpoint(tmp_path, "fp8", **SIZE)
    tensors = load(tmp_path)
    for name in [n for n in tensors if n.endswith("_scale_inv")]:
        module, scale = name.removesuffix("_scale_inv"), tensors[name]
        tensors[name] = scale.bfloat16()
        written.weights[module] *= tensors[name].float() / scale  # one block: a scalar
    save(tmp_path, tensors)
    with open_checkpoint(tmp_path) as checkpoint:
        weights = checkpoint.experts(PREFIX, SHAPE)
    assert weights.w13.scale.dtype == torch.float32
    assert_experts(weights, written)


@pytest.mark.parametrize("format", ["bf16", "fp8", "nvfp4", "mxfp4", "int4"])
def test_decoding_few_rows_at_a_time_changes_nothing(format, monkeypatch):
    torch.manual_seed(0)
    packed = codec.encode(torch.randn(700, 160), format)
    monkeypatch.setattr("turnout.checkpoint.parts.ROWS_AT_ONCE", 256)
    assert torch.equal(decode_by_rows(packed, torch.float32), packed.decode())


@pytest.mark.parametrize("names", [("w1", "w3", "w2"), ("gate_proj", "up_proj", "down_proj")])
@pytest.mark.parametrize("gated", [True, False])
def test_projections_by_other_names_and_without_a_gate(names, gated, tmp_path):
    """w1 is the gate and w3 is up (Mixtral); experts without a gate have up and down alone."""
    written = write_checkpoint(tmp_path, "float32", **SIZE)
    renamed = dict(zip(("gate_proj", "up_proj", "down_proj"), names, strict=True))
    tensors = {}
    for name, tensor in load(tmp_path).items():
        if gated or not name.endswith("gate_proj.weight"):
            *start, module, end = name.split(".")
            tensors[".".join((*start, renamed.get(module, module), end))] = tensor
    save(tmp_path, tensors)
    shape = ExpertShape(num_experts=8, hidden=64, intermediate=96, gated=gated)
    with open_checkpoint(tmp_path) as checkpoint:
        weights = checkpoint.experts(PREFIX, shape, first=3, count=2)
    if gated:
        assert_experts(weights, written)
    else:
        assert weights.w13.shape == (2, 96, 64)
        assert torch.equal(weights.w13.data[1], written.weights[f"{PREFIX}.4.up_proj.weight"])


def test_shards_read_as_one(tmp_path):
    written = write_checkpoint(tmp_path, "modelopt", shards=3, **SIZE)
    with open_checkpoint(tmp_path) as checkpoint:
        assert_experts(checkpoint.experts(PREFIX, SHAPE), written)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)
