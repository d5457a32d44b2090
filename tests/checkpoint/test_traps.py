"""What other engines read wrongly in silence: here each is an error that names it, or read rightly."""

from __future__ import annotations

import math
import re

import pytest
import torch

from tests.checkpoint.test_formats import PREFIX, SHAPE, SIZE, assert_experts
from tests.checkpoint.writers import edit_config, load, save, write_checkpoint
from turnout.checkpoint import CheckpointError, ExpertShape, open_checkpoint
from turnout.errors import UserError

EXPERT = f"{PREFIX}.2.gate_proj"
FUSED = f"{PREFIX}.gate_up_proj"


def damaged(folder, format, change, **fields):
    """A checkpoint in `format` after `change(tensors)`."""
    written = write_checkpoint(folder, format, **SIZE | fields)
    tensors = load(folder)
    change(tensors)
    save(folder, tensors)
    return written


def refused(folder, *words, shape=SHAPE, **slice_):
    with pytest.raises(UserError) as caught, open_checkpoint(folder) as checkpoint:
        checkpoint.experts(PREFIX, shape, **slice_)
    for word in words:
        assert word in str(caught.value), caught.value


def put(name, value):
    return lambda tensors: tensors.__setitem__(name, value)


def drop(name):
    return lambda tensors: tensors.pop(name)


def fill(name, value, index=0):
    def change(tensors):
        flat = tensors[name].view(torch.uint8) if tensors[name].itemsize == 1 else tensors[name]
        flat.view(-1)[index] = value

    return change


# Missing


@pytest.mark.parametrize(
    ("format", "tensor"),
    [
        ("bf16", f"{EXPERT}.weight"),
        ("bf16-stacked", FUSED),
        ("modelopt", f"{EXPERT}.weight"),
        ("modelopt", f"{EXPERT}.weight_scale"),
        ("modelopt", f"{EXPERT}.weight_scale_2"),
        ("modelopt-fused", f"{FUSED}_weight_scale_2"),
        ("compressed-tensors", f"{EXPERT}.weight_packed"),
        ("compressed-tensors", f"{EXPERT}.weight_global_scale"),
        ("mxfp4", f"{FUSED}_scales"),
        ("mxfp4", f"{FUSED}_blocks"),
        ("fp8", f"{EXPERT}.weight_scale_inv"),
    ],
)
def test_missing_tensor(format, tensor, tmp_path):
    damaged(tmp_path, format, drop(tensor))
    refused(tmp_path, f"tensor {tensor}", "is missing", str(tmp_path))


@pytest.mark.parametrize(
    ("format", "tensor"),
    [
        ("modelopt", f"{EXPERT}.input_scale"),
        ("modelopt-fused", f"{PREFIX}.down_proj_input_scale"),
        ("compressed-tensors", f"{EXPERT}.input_global_scale"),
    ],
)
def test_a_missing_input_scale_is_not_one(format, tensor, tmp_path):
    """Not even that of an expert which another rank holds: all ranks must quantise alike."""
    damaged(tmp_path, format, drop(tensor))
    refused(tmp_path, f"tensor {tensor}", "is missing", "would be a guess", first=6, count=2)


def test_weight_only_checkpoints_need_no_input_scales(tmp_path):
    write_checkpoint(tmp_path, "modelopt-weight-only", **SIZE)
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.experts(PREFIX, SHAPE).input_scales is None


# Wrong shape, wrong dtype


@pytest.mark.parametrize(
    ("format", "tensor", "value", "expected"),
    [
        ("bf16", f"{EXPERT}.weight", torch.zeros(96, 63).bfloat16(), "expected [96, 64], found [96, 63]"),
        ("bf16-stacked", FUSED, torch.zeros(8, 96, 64), "expected [8, 192, 64], found [8, 96, 64]"),
        (
            "modelopt",
            f"{EXPERT}.weight_scale",
            torch.zeros(96, 8).to(torch.float8_e4m3fn),
            "expected [96, 4], found [96, 8]",
        ),
        ("modelopt", f"{EXPERT}.weight_scale_2", torch.ones(96), "expected a scalar, found [96]"),
        ("modelopt", f"{EXPERT}.input_scale", torch.ones(2), "expected a scalar, found [2]"),
        ("modelopt-fused", f"{FUSED}_weight_scale_2", torch.ones(8, 3), "a scalar or [8] or [8, 2], found"),
        ("modelopt-fused", f"{PREFIX}.down_proj_weight_scale_2", torch.ones(8, 2), "a scalar or [8], found"),
        ("modelopt-fused", f"{FUSED}_input_scale", torch.ones(7), "a scalar or [8] or [8, 2], found [7]"),
        ("mxfp4", f"{FUSED}_scales", torch.zeros(8, 192, 3, dtype=torch.uint8), "expected [8, 192, 2]"),
        ("fp8", f"{EXPERT}.weight_scale_inv", torch.ones(2, 1), "expected [1, 1], found [2, 1]"),
    ],
)
def test_wrong_shape(format, tensor, value, expected, tmp_path):
    damaged(tmp_path, format, put(tensor, value))
    refused(tmp_path, f"model.safetensors: tensor {tensor}", "wrong shape", expected)


@pytest.mark.parametrize(
    ("format", "tensor", "value", "expected"),
    [
        ("bf16", f"{EXPERT}.weight", torch.zeros(96, 64, dtype=torch.uint8), "found uint8"),
        ("bf16", f"{EXPERT}.weight", torch.zeros(96, 64), "expected bfloat16, found float32"),
        ("modelopt", f"{EXPERT}.weight", torch.zeros(96, 32), "expected uint8, found float32"),
        ("modelopt", f"{EXPERT}.weight_scale", torch.ones(96, 4), "expected float8_e4m3fn, found float32"),
        (
            "modelopt",
            f"{EXPERT}.weight_scale_2",
            torch.tensor(1, dtype=torch.int32),
            "bfloat16 or float16 or float32, found int32",
        ),
        ("fp8", f"{EXPERT}.weight", torch.zeros(96, 64, dtype=torch.float8_e5m2), "expected float8_e4m3fn"),
        ("mxfp4", f"{FUSED}_scales", torch.ones(8, 192, 2), "found float32"),
    ],
)
def test_wrong_dtype(format, tensor, value, expected, tmp_path):
    """One expert that differs from the first in dtype is wrong as well."""
    damaged(tmp_path, format, put(tensor, value))
    refused(tmp_path, f"model.safetensors: tensor {tensor}", "wrong dtype", expected)


# Scales that are none


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("format", "tensor"),
    [
        ("modelopt", f"{EXPERT}.weight_scale_2"),
        ("modelopt", f"{EXPERT}.input_scale"),
        ("modelopt-fused", f"{FUSED}_weight_scale_2"),
        ("modelopt-fused", f"{FUSED}_input_scale"),
        ("compressed-tensors", f"{EXPERT}.weight_global_scale"),
        ("compressed-tensors", f"{EXPERT}.input_global_scale"),
        ("fp8", f"{EXPERT}.weight_scale_inv"),
    ],
)
def test_scale_not_finite_and_positive(format, tensor, value, tmp_path):
    damaged(tmp_path, format, fill(tensor, value))
    expected = "finite and positive" if math.isfinite(value) else "expected finite numbers"
    refused(tmp_path, f"model.safetensors: tensor {tensor}", expected)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0x7F, ("expected finite numbers", "found NaN")),
        (0xFF, ("expected finite numbers", "found NaN")),
        (0x81, ("no scales", "1 negative of ")),
    ],
    ids=["nan", "-nan", "negative"],
)
@pytest.mark.parametrize(
    ("format", "tensor"),
    [
        ("modelopt", f"{EXPERT}.weight_scale"),
        ("modelopt-fused", f"{FUSED}_weight_scale"),
        ("compressed-tensors", f"{EXPERT}.weight_scale"),
    ],
)
def test_damaged_block_scale(format, tensor, code, words, tmp_path):
    damaged(tmp_path, format, fill(tensor, code, index=17))
    refused(tmp_path, f"tensor {tensor}", *words)


@pytest.mark.parametrize(
    ("format", "tensor", "code"),
    [
        ("fp8", f"{EXPERT}.weight", 0x7F),
        ("fp8", f"{EXPERT}.weight", 0xFF),
        ("modelopt-fp8-fused", FUSED, 0x7F),
        ("bf16", f"{EXPERT}.weight", float("nan")),
        ("bf16-stacked", FUSED, float("-inf")),
    ],
)
def test_weights_that_are_not_finite(format, tensor, code, tmp_path):
    """They would load, and poison every token that meets this expert."""
    damaged(tmp_path, format, fill(tensor, code, index=133))
    refused(tmp_path, f"model.safetensors: tensor {tensor}", "is damaged", "expected finite numbers")


def test_nan_in_mxfp4_scales(tmp_path):
    damaged(tmp_path, "mxfp4", fill(f"{FUSED}_scales", 255, index=9))
    refused(tmp_path, f"tensor {FUSED}_scales", "255 is NaN")


def test_an_all_zero_group_has_scale_zero(tmp_path):
    """Which is not damage: exporters write it for groups without weights."""
    damaged(tmp_path, "modelopt", fill(f"{EXPERT}.weight_scale", 0, index=3))
    with open_checkpoint(tmp_path) as checkpoint:
        w13 = checkpoint.experts(PREFIX, SHAPE).w13.decode()
    assert not w13[2, 0, 48:64].any()
    assert w13[2, 0, :48].any()


# Gate and up with global scales of their own


@pytest.mark.parametrize("ratio", [0.5, 2.0, 0.37, 5.3])
@pytest.mark.parametrize(
    ("format", "tensor", "column"),
    [
        ("modelopt", f"{EXPERT}.weight_scale_2", None),
        ("modelopt-fused", f"{FUSED}_weight_scale_2", (2, 0)),
        ("compressed-tensors", f"{EXPERT}.weight_global_scale", None),
    ],
)
def test_gate_and_up_scales_that_differ_are_requantised(format, tensor, column, ratio, tmp_path, caplog):
    """Dropping one would be wrong by `ratio`; requantising costs at most the rounding of an e4m3 scale."""
    exponent = -1 if format == "compressed-tensors" else 1

    def change(tensors):
        tensors[tensor][... if column is None else column] *= ratio**exponent

    written = damaged(tmp_path, format, change)
    written.weights[f"{EXPERT}.weight"] *= ratio
    with open_checkpoint(tmp_path) as checkpoint:
        weights = checkpoint.experts(PREFIX, SHAPE)
    w13 = weights.w13.decode()
    for half, name in ((w13[2, :96], "gate"), (w13[2, 96:], "up")):
        expected = written.weights[f"{PREFIX}.2.{name}_proj.weight"]
        worst = ((half - expected).abs() / expected.abs().clamp(min=1e-9)).max()
        assert worst <= (1e-6 if ratio in (0.5, 2.0) else 1 / 16 + 1e-6), name
    assert weights.w13.global_scale.shape == (8,)
    assert "1 of 8 experts" in caplog.text
    others = torch.tensor([e for e in range(8) if e != 2])
    clean = w13[others]
    for i, e in enumerate(others.tolist()):
        assert torch.allclose(clean[i, :96], written.weights[f"{PREFIX}.{e}.gate_proj.weight"], rtol=1e-6)


def test_input_scales_of_gate_and_up_take_the_larger(tmp_path):
    """Both quantise the same activation, once: the larger scale covers both ranges."""

    def change(tensors):
        tensors[f"{EXPERT}.input_scale"] *= 3

    written = damaged(tmp_path, "modelopt", change)
    with open_checkpoint(tmp_path) as checkpoint:
        scales = checkpoint.experts(PREFIX, SHAPE).input_scales
    assert scales.w13[2] == pytest.approx(3 * written.input_scales[EXPERT], rel=1e-6)


# Configuration and files that disagree


def test_listed_as_unquantised_but_packed(tmp_path):
    write_checkpoint(tmp_path, "modelopt-config", **SIZE)
    with edit_config(tmp_path) as config:
        config["quantization_config"]["ignore"].append("model.layers.*.mlp.experts*")
    refused(tmp_path, "wrong dtype", "found uint8", "not quantised")


def test_not_listed_but_plain(tmp_path):
    write_checkpoint(tmp_path, "float32", **SIZE)
    write_checkpoint(tmp_path / "other", "modelopt-config", **SIZE)
    with edit_config(tmp_path) as config, edit_config(tmp_path / "other") as other:
        config["quantization_config"] = other["quantization_config"]
    refused(tmp_path, "wrong dtype", "expected uint8, found float32", "stored as nvfp4")


def test_layers_listed_as_unquantised_are_read_plain(tmp_path):
    written = write_checkpoint(tmp_path / "packed", "modelopt-config", **SIZE)
    write_checkpoint(tmp_path / "plain", "float32", **SIZE)
    tensors = load(tmp_path / "packed")
    plain = {k: v for k, v in load(tmp_path / "plain").items() if k.startswith("model.layers.0.mlp.experts")}
    mixed = {k: v for k, v in tensors.items() if not k.startswith("model.layers.0.mlp.experts")} | plain
    save(tmp_path / "packed", mixed)
    with edit_config(tmp_path / "packed") as config:
        config["quantization_config"]["ignore"].append("model.layers.0.mlp.experts*")
    with open_checkpoint(tmp_path / "packed") as checkpoint:
        assert checkpoint.experts_format("model.layers.0.mlp.experts") == ("bf16", False)
        assert checkpoint.experts("model.layers.0.mlp.experts", SHAPE).format == "bf16"
        assert_experts(checkpoint.experts(PREFIX, SHAPE), written)


def test_projections_of_one_layer_in_different_formats(tmp_path):
    write_checkpoint(tmp_path, "modelopt-config", **SIZE)
    with edit_config(tmp_path) as config:
        config["quantization_config"]["ignore"].append("*.down_proj")
    refused(tmp_path, PREFIX, "share a format")


def test_more_experts_on_disk_than_in_the_configuration(tmp_path):
    write_checkpoint(tmp_path, "bf16", **SIZE)
    shape = ExpertShape(num_experts=6, hidden=64, intermediate=96)
    refused(tmp_path, f"{PREFIX}.6.", "config.json does not count", "expected experts 0 to 5", shape=shape)


def test_fewer_experts_on_disk_than_in_the_configuration(tmp_path):
    write_checkpoint(tmp_path, "bf16-stacked", **SIZE)
    shape = ExpertShape(num_experts=9, hidden=64, intermediate=96)
    refused(tmp_path, FUSED, "expected [9, 192, 64], found [8, 192, 64]", shape=shape)


@pytest.mark.parametrize(
    ("format", "bias"),
    [
        ("bf16", f"{EXPERT}.bias"),
        ("bf16-stacked", f"{FUSED}_bias"),
        ("mxfp4", f"{FUSED}_bias"),
        ("fp8", f"{EXPERT}.bias"),
    ],
)
def test_a_bias_nobody_would_add(format, bias, tmp_path):
    damaged(tmp_path, format, put(bias, torch.ones(8, 192)))
    refused(tmp_path, f"tensor {bias}", "is a bias")


def test_smoothed_weights_are_refused(tmp_path):
    damaged(tmp_path, "modelopt", put(f"{EXPERT}.pre_quant_scale", torch.ones(64)))
    refused(tmp_path, f"{EXPERT}.pre_quant_scale", "AWQ")


@pytest.mark.parametrize(("format", "multiple"), [("modelopt", 16), ("mxfp4", 32)])
def test_sizes_the_format_cannot_hold(format, multiple, tmp_path):
    write_checkpoint(tmp_path, format, **SIZE)
    shape = ExpertShape(num_experts=8, hidden=64, intermediate=97)
    refused(tmp_path, f"a multiple of {multiple} columns, found 97", shape=shape)


def test_a_slice_that_is_no_slice(tmp_path):
    write_checkpoint(tmp_path, "bf16", **SIZE)
    with open_checkpoint(tmp_path) as checkpoint:
        for first, count in ((-1, 2), (7, 2), (0, 0)):
            with pytest.raises(ValueError, match="of 8"):
                checkpoint.experts(PREFIX, SHAPE, first=first, count=count)


# Dense layers


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (drop("model.layers.0.self_attn.q_proj.weight_scale_2"), ("weight_scale_2", "is missing")),
        (drop("model.layers.0.self_attn.q_proj.weight_scale"), ("weight_scale", "is missing")),
        (fill("model.layers.0.self_attn.q_proj.weight_scale_2", float("nan")), ("is damaged",)),
        (fill("model.layers.0.self_attn.q_proj.weight_scale_2", -1.0), ("finite and positive",)),
        (
            put("model.layers.0.self_attn.q_proj.weight", torch.zeros(64, 64)),
            ("wrong dtype", "expected uint8"),
        ),
        (
            put("model.layers.0.self_attn.q_proj.pre_quant_scale", torch.ones(64)),
            ("pre_quant_scale", "not supported"),
        ),
    ],
)
def test_damaged_dense_layer(change, words, tmp_path):
    damaged(tmp_path, "modelopt", change, dense=True)
    module = "model.layers.0.self_attn.q_proj"
    with (
        pytest.raises(CheckpointError, match=re.escape(module)) as caught,
        open_checkpoint(tmp_path) as checkpoint,
    ):
        checkpoint.linear(module, (64, 64), torch.float32)
    for word in words:
        assert word in str(caught.value), caught.value


def test_tensors(tmp_path):
    written = write_checkpoint(tmp_path, "bf16", **SIZE)
    with open_checkpoint(tmp_path) as checkpoint:
        name = "model.embed_tokens.weight"
        assert checkpoint.tensor(name, (384, 64)).dtype == torch.bfloat16
        assert torch.equal(checkpoint.tensor(name, (384, 64), torch.float32), written.weights[name])
        assert checkpoint.has(name)
        assert name in checkpoint.names()
        assert checkpoint.meta(name).shape == (384, 64)
        with pytest.raises(CheckpointError, match=r"tensor model\.nothing: is missing"):
            checkpoint.tensor("model.nothing")
        with pytest.raises(CheckpointError, match=re.escape("expected [384, 65], found [384, 64]")):
            checkpoint.tensor(name, (384, 65))


@pytest.mark.parametrize("format", ["bf16", "bf16-stacked"])
def test_a_tensor_nobody_knows_stays_unread(format, tmp_path):
    """So that a model can refuse what it would otherwise leave out of its sum."""
    unknown = f"{PREFIX}.1.gate_proj.zero_point" if format == "bf16" else f"{PREFIX}.gate_up_proj_zero_point"
    damaged(tmp_path, format, put(unknown, torch.ones(3)))
    with open_checkpoint(tmp_path) as checkpoint:
        checkpoint.experts(PREFIX, SHAPE, first=0, count=4)
        assert [name for name in checkpoint.unread() if name.startswith(PREFIX)] == [unknown]
