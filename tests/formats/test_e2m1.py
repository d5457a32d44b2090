"""e2m1 codes against ml_dtypes and compressed-tensors."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8, unpack_fp4_from_uint8
from hypothesis import given
from hypothesis import strategies as st

from tests.formats.values import E2M1, around, every_bfloat16, from_codes, same_bits, to_codes
from turnout.formats import e2m1

CODES = torch.arange(16, dtype=torch.uint8)
BYTES = torch.arange(256, dtype=torch.uint8)


def test_every_code_decodes_as_in_ml_dtypes():
    assert same_bits(e2m1.decode(CODES), from_codes(CODES, E2M1))


def test_every_value_encodes_to_its_own_code():
    assert torch.equal(e2m1.encode(e2m1.decode(CODES)), CODES)


def test_every_bfloat16_encodes_as_in_ml_dtypes():
    x = every_bfloat16()
    x = x[~x.isnan()]
    assert torch.equal(e2m1.encode(x), to_codes(x, E2M1))


def test_ties_and_their_neighbours_encode_as_in_ml_dtypes():
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 7.0, 1e-45, 3e38]
    x = around(ties)
    assert torch.equal(e2m1.encode(x), to_codes(x, E2M1))


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=50))
def test_any_float_encodes_as_in_ml_dtypes(values):
    x = torch.tensor(values)
    assert torch.equal(e2m1.encode(x), to_codes(x, E2M1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_float_dtypes_encode_alike(dtype):
    x = torch.linspace(-8, 8, 4097).to(dtype)
    assert torch.equal(e2m1.encode(x), to_codes(x.float(), E2M1))


def test_infinities_saturate_and_nan_becomes_six_as_in_ptx():
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, -torch.nan, 1e30, -1e30])
    assert e2m1.decode(e2m1.encode(x)).tolist() == [6, -6, 6, 6, 6, -6]


def test_rounding_equals_encoding_and_decoding():
    x = every_bfloat16()
    assert same_bits(e2m1.round_to_e2m1(x), e2m1.decode(e2m1.encode(x)))


def test_inputs_are_left_alone():
    x = torch.tensor([0.3, -9.0, 2.6])
    e2m1.encode(x)
    e2m1.round_to_e2m1(x)
    assert x.tolist() == torch.tensor([0.3, -9.0, 2.6]).tolist()


def test_every_byte_unpacks_as_in_compressed_tensors():
    theirs = unpack_fp4_from_uint8(BYTES.view(16, 16), 16, 32, dtype=torch.float32)
    assert same_bits(e2m1.decode_packed(BYTES.view(16, 16)), theirs)
    assert same_bits(e2m1.decode(e2m1.unpack(BYTES.view(16, 16))), theirs)


def test_every_byte_packs_as_in_compressed_tensors():
    codes = e2m1.unpack(BYTES.view(16, 16))
    assert torch.equal(e2m1.pack(codes), BYTES.view(16, 16))
    assert torch.equal(pack_fp4_to_uint8(e2m1.decode(codes)), BYTES.view(16, 16))


def test_the_even_index_is_the_low_nibble():
    assert e2m1.pack(torch.tensor([0x3, 0xA], dtype=torch.uint8)).tolist() == [0xA3]


def test_an_odd_number_of_codes_is_refused():
    with pytest.raises(ValueError, match=r"odd number.*\(2, 3\)"):
        e2m1.pack(torch.zeros(2, 3, dtype=torch.uint8))


def test_empty_tensors_pass_through():
    assert e2m1.encode(torch.zeros(0, 4)).shape == (0, 4)
    assert e2m1.decode_packed(torch.zeros(0, 4, dtype=torch.uint8)).shape == (0, 8)
