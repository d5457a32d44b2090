"""MXFP4 against transformers' decoding, ml_dtypes, and the OCP formula in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.formats.values import E2M1, E8M0, from_codes, same_bits, to_codes
from turnout.formats import e2m1, mxfp4


def ocp(groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """e2m1 codes [n, 32] and e8m0 bytes [n] of finite float32 groups [n, 32]; OCP MX v1.0, section 6.3."""
    x = groups.astype(np.float64)
    amax = np.abs(x).max(axis=1)
    with np.errstate(divide="ignore"):
        exponent = np.where(amax > 0, np.floor(np.log2(amax)) - 2, -127).clip(-127, 127)
    value = x / np.exp2(exponent)[:, None]
    codes = to_codes(torch.from_numpy(value.astype(np.float32)), E2M1)
    return codes.numpy(), (exponent + 127).astype(np.uint8)


def assert_as_ocp(x: Tensor) -> None:
    codes, scales = ocp(x.numpy().reshape(-1, 32))
    packed, scale = mxfp4.encode(x)
    assert torch.equal(scale.flatten(), torch.from_numpy(scales))
    assert torch.equal(e2m1.unpack(packed).view(-1, 32), torch.from_numpy(codes))


def test_every_scale_decodes_as_in_ml_dtypes():
    scale = torch.arange(256, dtype=torch.uint8)
    assert same_bits(mxfp4.decode_scale(scale), from_codes(scale, E8M0))


def test_every_byte_under_every_scale_decodes_as_in_transformers():
    """255, NaN, is left out: transformers reads it as 2 ** 128."""
    scales = torch.arange(255, dtype=torch.uint8)[:, None].expand(255, 16).contiguous()
    blocks = torch.arange(256, dtype=torch.uint8).view(16, 16).expand(255, 16, 16).contiguous()
    theirs = convert_moe_packed_tensors(blocks[None], scales[None], dtype=torch.float32)[0].T
    assert same_bits(mxfp4.decode(blocks.flatten(1), scales), theirs.contiguous())


def test_the_nan_scale_decodes_to_nan():
    packed = torch.zeros(1, 16, dtype=torch.uint8)
    assert mxfp4.decode(packed, torch.tensor([[255]], dtype=torch.uint8)).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_random_weights_encode_by_the_ocp_formula(dtype):
    torch.manual_seed(0)
    x = (torch.randn(64, 256) * torch.randn(64, 1).mul(4).exp2()).to(dtype)
    assert_as_ocp(x.float())
    packed, scale = mxfp4.encode(x)
    assert torch.equal(packed, mxfp4.encode(x.float())[0])
    assert torch.equal(scale, mxfp4.encode(x.float())[1])


@settings(deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=32, max_size=32))
def test_any_finite_group_encodes_by_the_ocp_formula(values):
    assert_as_ocp(torch.tensor([values]))


@pytest.mark.parametrize("exponent", [-149, -140, -127, -126, -125, 0, 1, 126, 127])
def test_powers_of_two_over_the_whole_range_survive(exponent):
    x = torch.zeros(1, 32)
    x[0, 3], x[0, 4] = 2.0**exponent, -(2.0**exponent)
    assert_as_ocp(x)
    decoded = mxfp4.decode(*mxfp4.encode(x))
    expected = x if exponent >= -127 - 1 else torch.zeros_like(x)  # the smallest value is .5 * 2 ** -127
    assert torch.equal(decoded, expected)


def test_what_lies_between_six_and_eight_saturates():
    x = torch.zeros(1, 32)
    x[0, :3] = torch.tensor([7.9, -7.0, 5.0])
    packed, scale = mxfp4.encode(x)
    assert scale.item() == 127
    assert mxfp4.decode(packed, scale)[0, :3].tolist() == [6, -6, 4]


def test_an_all_zero_group_has_scale_code_zero_and_keeps_signs():
    x = torch.zeros(1, 32)
    x[0, 1] = -0.0
    packed, scale = mxfp4.encode(x)
    assert scale.item() == 0
    assert same_bits(mxfp4.decode(packed, scale), x)


def test_nan_spoils_its_own_group_only_and_infinity_saturates():
    x = torch.ones(1, 96)
    x[0, 2] = torch.nan
    x[0, 40] = -torch.inf
    packed, scale = mxfp4.encode(x)
    decoded = mxfp4.decode(packed, scale)[0]
    assert scale.tolist() == [[255, 252, 125]]
    assert decoded[:32].isnan().all()
    assert decoded[40] == -6 * 2.0**125
    assert torch.equal(decoded[64:], torch.ones(32))


def test_encoding_what_was_decoded_changes_no_value():
    torch.manual_seed(0)
    once = mxfp4.decode(*mxfp4.encode(torch.randn(16, 64)))
    assert torch.equal(mxfp4.decode(*mxfp4.encode(once)), once)


@pytest.mark.parametrize("columns", [31, 33, 16, 1])
def test_columns_that_leave_a_group_open_are_refused(columns):
    with pytest.raises(ValueError, match=rf"divisible by 32: shape \(2, {columns}\)"):
        mxfp4.encode(torch.zeros(2, columns))
