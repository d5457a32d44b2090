"""The public surface: `encode`, PackedTensor, and the table the documentation is generated from."""

from __future__ import annotations

import pytest
import torch

from turnout.formats import nvfp4
from turnout.formats.codec import FormatError, check, encode
from turnout.formats.spec import FORMATS
from turnout.vocabulary import Format

# Relative error of normally distributed weights, and what one value may be off by in units of its
# group's largest: half the widest step of the values, plus that of the scale.
BOUNDS = {"bf16": 0.002, "fp8": 0.03, "nvfp4": 0.11, "mxfp4": 0.13, "int4": 0.11}


@pytest.fixture
def weight():
    torch.manual_seed(0)
    return torch.randn(4, 256, 384)


def test_the_table_describes_every_format():
    assert list(FORMATS) == list(Format)
    assert all(spec.format == name for name, spec in FORMATS.items())


@pytest.mark.parametrize("format", FORMATS)
def test_bits_per_weight_are_what_is_stored(format, weight):
    packed = encode(weight, format)
    bits = 8 * packed.nbytes / weight.numel()
    assert bits == pytest.approx(FORMATS[format].bits_per_weight, rel=1e-3)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_encoding_keeps_shape_and_most_of_the_value(format, dtype, weight):
    packed = encode(weight.to(dtype), format)
    assert packed.shape == weight.shape
    decoded = packed.decode()
    assert decoded.dtype == torch.float32
    assert (decoded - weight).norm() < BOUNDS[format] * weight.norm()
    assert torch.equal(packed.decode(torch.bfloat16), decoded.bfloat16())


@pytest.mark.parametrize("format", FORMATS)
def test_some_experts_of_a_stack_are_those_experts(format, weight):
    packed = encode(weight, format)
    assert torch.equal(packed[1:3].decode(), packed.decode()[1:3])
    assert torch.equal(packed[2].decode(), packed.decode()[2])
    assert torch.equal(packed[torch.tensor([3, 0])].decode(), packed.decode()[[3, 0]])
    assert torch.equal(encode(weight[2], format).decode(), packed[2].decode())


def test_gate_and_up_can_share_a_global_scale(weight):
    both = encode(weight, "nvfp4")
    scale = nvfp4.global_scale(weight[:, :128], lead=1) * 3
    half = encode(weight[:, :128], "nvfp4", global_scale=scale)
    assert torch.equal(half.global_scale, scale)
    assert not torch.equal(half.global_scale, both.global_scale)
    assert (half.decode() - weight[:, :128]).norm() < BOUNDS["nvfp4"] * weight[:, :128].norm()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_weights_that_are_not_finite_are_refused(format, bad, weight):
    weight[1, 2, 3] = bad
    with pytest.raises(FormatError, match=r"^mlp\.up \[4, 256, 384\]: 1 values are NaN or infinite"):
        encode(weight, format, name="mlp.up")


@pytest.mark.parametrize(
    ("format", "shape", "message"),
    [
        ("nvfp4", (8, 24), r"w \[8, 24\]: nvfp4 needs columns in multiples of 16, not 24"),
        ("mxfp4", (8, 48), r"w \[8, 48\]: mxfp4 needs columns in multiples of 32, not 48"),
        ("nvfp4", (16,), r"w: a weight is a non-empty matrix \[\.\.\., N, K\], not \[16\]"),
        ("fp8", (0, 128), r"w: a weight is a non-empty matrix"),
        ("int4", (8, 48), r"w \[8, 48\]: int4 needs columns in multiples of 32, not 48"),
        ("int3", (8, 32), r"unknown format 'int3'; known: bf16, fp8, nvfp4, mxfp4, int4"),
    ],
)
def test_shapes_and_names_that_do_not_fit_are_refused(format, shape, message):
    with pytest.raises(FormatError, match=message):
        encode(torch.zeros(shape), format, name="w")
    with pytest.raises(FormatError, match=message):
        check(format, shape, "w")


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.float8_e4m3fn, torch.bool])
def test_only_real_floats_are_encoded(dtype):
    with pytest.raises(FormatError, match="only float16, bfloat16, float32 and float64"):
        encode(torch.zeros(32, 32).to(dtype), "fp8")


def test_the_source_is_left_alone(weight):
    before = weight.clone()
    for format in FORMATS:
        encode(weight, format).decode()
    assert torch.equal(weight, before)
