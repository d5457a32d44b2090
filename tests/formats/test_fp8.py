"""FP8 blocks against ml_dtypes and a block-by-block loop in numpy."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from tests.formats.values import E4M3, around, every_bfloat16, from_codes, same_bits, to_codes
from turnout.formats import fp8

FLT_MAX = torch.finfo(torch.float32).max


def blocks_in_numpy(w: np.ndarray, block: int = 128) -> tuple[np.ndarray, np.ndarray]:
    """e4m3 codes and float32 scales of a float32 matrix, one block after the other."""
    n, k = w.shape
    codes = np.zeros((n, k), np.uint8)
    scales = np.zeros((-(-n // block), -(-k // block)), np.float32)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            rows, columns = slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block)
            scale = np.abs(w[rows, columns]).max() / np.float32(448)
            scales[i, j] = scale if scale > 0 else 1
            value = w[rows, columns] / scales[i, j]
            codes[rows, columns] = np.clip(value, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return codes, scales


def test_every_code_decodes_as_in_ml_dtypes():
    codes = torch.arange(256, dtype=torch.uint8)
    ours = fp8.decode_blocks(codes.view(16, 16).view(fp8.DTYPE), torch.ones(1, 1))
    assert same_bits(ours.flatten(), from_codes(codes, E4M3))


def test_every_bfloat16_converts_as_in_ml_dtypes_up_to_the_largest_value():
    x = torch.cat([every_bfloat16(), around([0.0, 2.0**-10, 2.0**-9, 3 * 2.0**-10, 2.0**-6, 17.0, 19.0])])
    x = x[~(x.abs() > 448)]
    codes = fp8.saturate(x).view(torch.uint8)
    nan = x.isnan()  # the sign of a NaN says nothing
    assert torch.equal(codes[~nan], to_codes(x[~nan], E4M3))
    assert fp8.saturate(x)[nan].float().isnan().all()


def test_larger_values_saturate_instead_of_becoming_nan():
    x = torch.tensor([449.0, 464.0, 465.0, 1e9, torch.inf, -449.0, -torch.inf])
    assert fp8.saturate(x).float().tolist() == [448] * 5 + [-448] * 2


@pytest.mark.parametrize("shape", [(128, 128), (256, 384), (1, 1), (130, 5), (64, 300), (127, 129)])
def test_blocks_equal_a_loop_in_numpy(shape):
    torch.manual_seed(0)
    w = torch.randn(shape) * torch.rand(shape[0], 1).exp2()
    data, scale = fp8.encode_blocks(w)
    codes, scales = blocks_in_numpy(w.numpy())
    assert torch.equal(data.view(torch.uint8), torch.from_numpy(codes))
    assert torch.equal(scale, torch.from_numpy(scales))
    decoded = from_codes(torch.from_numpy(codes), E4M3).numpy()
    expected = decoded * np.repeat(np.repeat(scales, 128, 0), 128, 1)[: shape[0], : shape[1]]
    assert same_bits(fp8.decode_blocks(data, scale), torch.from_numpy(expected))


def test_stacked_experts_encode_one_by_one():
    torch.manual_seed(0)
    w = torch.randn(3, 130, 200)
    data, scale = fp8.encode_blocks(w)
    for e in range(3):
        one, one_scale = fp8.encode_blocks(w[e])
        assert torch.equal(data[e].view(torch.uint8), one.view(torch.uint8))
        assert torch.equal(scale[e], one_scale)
    assert torch.equal(fp8.decode_blocks(data, scale)[1], fp8.decode_blocks(data[1], scale[1]))


def test_an_all_zero_block_has_scale_one():
    w = torch.zeros(128, 256)
    w[:, 128:] = 3.0
    data, scale = fp8.encode_blocks(w)
    assert scale[0, 0] == 1
    assert torch.equal(fp8.decode_blocks(data, scale)[:, :128], torch.zeros(128, 128))


def test_subnormal_weights_keep_their_values():
    w = torch.full((128, 128), 448 * 2.0**-149)
    data, scale = fp8.encode_blocks(w)
    assert torch.equal(fp8.decode_blocks(data, scale), w)


def test_nan_spoils_its_own_block_only_and_infinity_saturates():
    w = torch.ones(128, 384)
    w[3, 5] = torch.nan
    w[7, 130] = -torch.inf
    data, scale = fp8.encode_blocks(w)
    decoded = fp8.decode_blocks(data, scale)
    assert decoded[:, :128].isnan().all()
    assert scale[0, 1] == FLT_MAX / 448
    assert decoded[7, 130] < -0.99 * FLT_MAX
    assert torch.equal(decoded[:, 256:], torch.ones(128, 128))


def test_activations_are_scaled_per_row_and_128_columns():
    torch.manual_seed(0)
    x = torch.randn(5, 3, 256).bfloat16()
    data, scale = fp8.encode_activation(x)
    assert scale.shape == (5, 3, 2)
    for row, codes, scales in zip(x.view(-1, 256), data.view(-1, 256), scale.view(-1, 2), strict=True):
        expected, expected_scale = blocks_in_numpy(row.float()[None].numpy())
        assert torch.equal(codes.view(torch.uint8), torch.from_numpy(expected)[0])
        assert torch.equal(scales, torch.from_numpy(expected_scale)[0])
    assert (fp8.decode_activation(data, scale) - x.float()).norm() < 0.04 * x.float().norm()


def test_rounding_is_within_a_sixteenth_of_every_value():
    torch.manual_seed(0)
    w = torch.randn(256, 256).abs() + 0.1  # far from e4m3's subnormal range
    decoded = fp8.decode_blocks(*fp8.encode_blocks(w))
    assert ((decoded - w).abs() <= w / 16).all()


def test_a_group_that_is_cut_has_a_scale_of_its_own():
    x = torch.randn(3, 200, generator=torch.Generator().manual_seed(0))
    parts = [fp8.fake_quantize(part) for part in (x[:, :128], torch.nn.functional.pad(x[:, 128:], (0, 56)))]
    assert torch.equal(fp8.fake_quantize(x), torch.cat(parts, 1)[:, :200])


def test_wrong_shapes_are_refused():
    with pytest.raises(ValueError, match=r"divisible by 128: \(2, 130\)"):
        fp8.encode_activation(torch.zeros(2, 130))
    with pytest.raises(ValueError, match=r"needs scale \(2, 1\), not \(1, 1\)"):
        fp8.decode_blocks(torch.zeros(129, 128).to(fp8.DTYPE), torch.ones(1, 1))
