"""The writers that readers are tested with, held against the libraries that own the formats."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors import NVFP4PackedCompressor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.checkpoint import packing


@pytest.fixture
def weight():
    torch.manual_seed(0)
    return torch.randn(256, 384) * torch.logspace(-3, 1, 384)


def same(a, b):
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def test_fp8_decodes_in_transformers(weight):
    tensors, plain = packing.fp8(weight)
    decoded = Fp8Dequantize(None)._dequantize_one(tensors[".weight"], tensors[".weight_scale_inv"])
    torch.testing.assert_close(decoded.float(), plain, rtol=1e-6, atol=0)


def test_mxfp4_decodes_in_transformers(weight):
    tensors, plain = packing.mxfp4(weight)
    blocks, scales = tensors["_blocks"][None], tensors["_scales"][None]
    decoded = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert torch.equal(decoded[0].T, plain)


def test_nvfp4_decodes_in_compressed_tensors(weight):
    tensors, plain = packing.compressed_nvfp4(weight, float(weight.abs().max()))
    state = {name.removeprefix("."): tensor for name, tensor in tensors.items()}
    decoded = NVFP4PackedCompressor.decompress(state, packing.nvfp4_scheme(quantized_activations=True))
    torch.testing.assert_close(decoded["weight"].float(), plain, rtol=1e-2, atol=0)  # it computes in bf16


def test_modelopt_and_compressed_tensors_differ_in_the_reciprocal_alone(weight):
    amax = float(weight.abs().max())
    ours, plain = packing.nvfp4(weight, amax)
    theirs, their_plain = packing.compressed_nvfp4(weight, amax)
    assert float(ours[".weight_scale_2"]) == pytest.approx(1 / float(theirs[".weight_global_scale"]))
    used = ours[".weight_scale"].float() > 0  # compressed-tensors gives empty groups a scale
    scales = [tensors[".weight_scale"].float()[used] for tensors in (ours, theirs)]
    agree = (scales[0] == scales[1]).float().mean()
    assert agree > 0.999  # but for a rounding tie
    torch.testing.assert_close(plain, their_plain, rtol=0.15, atol=amax / 448 / 2)
    assert ((plain - their_plain).abs() > 1e-6 * amax).float().mean() < 0.001


@pytest.mark.parametrize("pack", [packing.fp8, packing.mxfp4, lambda w: packing.nvfp4(w, 40.0)])
def test_quantised_weights_are_near_the_original(weight, pack):
    """Of each row's largest weight: the writers quantise, they do not merely round-trip."""
    _, plain = pack(weight)
    error = (plain - weight).abs().amax() / weight.abs().amax()
    assert 0 < error < 0.2
