"""NVFP4 against compressed-tensors' own packing, ml_dtypes, and a group-by-group loop in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.nvfp4.helpers import quantize_and_pack_fp4, unpack_fp4_from_uint8
from compressed_tensors.quantization.quant_scheme import NVFP4
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.formats.values import E2M1, E4M3, from_codes, same_bits, to_codes
from turnout.formats import e2m1, fp8, nvfp4


def kernel_in_numpy(x: np.ndarray, global_scale: float) -> tuple[np.ndarray, np.ndarray]:
    """e2m1 codes [n, 16] and e4m3 bytes [n] of groups [n, 16], float32 step by step as on the GPU."""
    f = np.float32
    a = f(1) / f(global_scale)
    codes, scales = np.zeros(x.shape, np.uint8), np.zeros(len(x), np.uint8)
    for i, group in enumerate(x):
        sf = np.minimum(a * (np.abs(group).max() * f(1 / 6)), f(448))
        scales[i] = to_codes(torch.tensor([sf]), E4M3).item()
        sf = from_codes(torch.tensor([scales[i]]), E4M3).numpy()[0]
        inverse = f(0) if sf == 0 else f(1) / (sf * (f(1) / a))
        codes[i] = to_codes(torch.from_numpy(group * inverse), E2M1).numpy()
    return codes, scales


def assert_as_kernel(x: Tensor, global_scale: float) -> None:
    codes, scales = kernel_in_numpy(x.numpy().reshape(-1, 16), global_scale)
    packed, scale = nvfp4.quantize_activation(x, torch.tensor(global_scale))
    assert torch.equal(scale.view(torch.uint8).flatten(), torch.from_numpy(scales))
    assert torch.equal(e2m1.unpack(packed).view(-1, 16), torch.from_numpy(codes))


def test_every_byte_under_every_scale_decodes_as_in_compressed_tensors():
    """Their order is (e4m3 / reciprocal) * e2m1; with a power of two for global scale both are exact."""
    packed = torch.arange(256, dtype=torch.uint8).view(32, 8).repeat(256, 1)
    scale = torch.arange(256, dtype=torch.uint8).repeat_interleave(32)[:, None].view(fp8.DTYPE)
    values = unpack_fp4_from_uint8(packed, 256 * 32, 16, dtype=torch.float32)
    ours = nvfp4.decode(packed, scale, torch.tensor(2.0**-7))
    scales = from_codes(scale.view(torch.uint8), E4M3) * 2.0**-7
    assert same_bits(ours, values * scales)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_encode_as_compressed_tensors_packs_them(dtype):
    """Whole pipeline: their global scale is our reciprocal, their block scales and bytes are ours.

    The largest weight makes the global scale a power of two, so that dividing by it and multiplying by
    its reciprocal, in which the two differ, are the same.
    """
    torch.manual_seed(0)
    w = torch.randn(64, 256).clamp(-4, 4).to(dtype)
    w[0, 0] = 5.25  # 448 * 6 / 5.25 = 512
    reciprocal = generate_gparam(w.float().amin(), w.float().amax())
    groups = w.float().unflatten(-1, (-1, 16))
    their_scale, _ = calculate_qparams(
        groups.amin(-1), groups.amax(-1), NVFP4["weights"], global_scale=reciprocal
    )
    global_scale = nvfp4.global_scale(w)
    assert global_scale == 1 / reciprocal
    packed, scale = nvfp4.encode(w, global_scale)
    assert torch.equal(scale.float(), their_scale.float())
    theirs = quantize_and_pack_fp4(w.float(), their_scale.float(), global_scale=reciprocal)
    assert torch.equal(packed, theirs)


def test_random_activations_quantise_as_the_kernel_does():
    torch.manual_seed(0)
    x = torch.randn(64, 128) * torch.randn(64, 1).exp2()
    assert_as_kernel(x, nvfp4.global_scale(x).item())


@settings(deadline=None)
@given(
    st.lists(st.floats(-1e4, 1e4, width=32), min_size=16, max_size=16),
    st.floats(2.0**-20, 2.0**10, width=32),
)
def test_any_group_quantises_as_the_kernel_does(values, global_scale):
    assert_as_kernel(torch.tensor([values]), global_scale)


def test_ties_round_to_even_codes():
    x = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    expected = torch.tensor([6.0, 0, 1, 1, 2, 2, 4, 4])
    one = torch.tensor(1.0)
    for function in (nvfp4.encode, nvfp4.quantize_activation):
        packed, scale = function(torch.cat([x, -x])[None], one)
        assert scale.float().item() == 1
        assert same_bits(nvfp4.decode(packed, scale, one)[0], torch.cat([expected, -expected]))


def test_the_global_scale_uses_the_whole_range():
    torch.manual_seed(0)
    w = torch.randn(3, 8, 32)
    one = nvfp4.global_scale(w)
    each = nvfp4.global_scale(w, lead=1)
    assert torch.equal(one, w.abs().amax() / 2688)
    assert torch.equal(each, w.abs().amax(dim=(1, 2)) / 2688)
    _, scale = nvfp4.encode(w, each)
    assert scale.float().amax(dim=(1, 2)).tolist() == [448, 448, 448]


def test_each_expert_has_its_own_global_scale():
    torch.manual_seed(0)
    w = torch.randn(3, 8, 32) * torch.tensor([1.0, 100.0, 0.01])[:, None, None]
    each = nvfp4.global_scale(w, lead=1)
    packed, scale = nvfp4.encode(w, each)
    for e in range(3):
        one, one_scale = nvfp4.encode(w[e], each[e])
        assert torch.equal(packed[e], one)
        assert torch.equal(scale[e].view(torch.uint8), one_scale.view(torch.uint8))
        assert torch.equal(nvfp4.decode(packed, scale, each)[e], nvfp4.decode(one, one_scale, each[e]))


def test_weights_and_activations_differ_at_most_where_rounding_is_a_tie():
    torch.manual_seed(0)
    x = torch.randn(64, 256)
    s = nvfp4.global_scale(x)
    weight, activation = nvfp4.encode(x, s), nvfp4.quantize_activation(x, s)
    assert torch.equal(weight[1].view(torch.uint8), activation[1].view(torch.uint8))
    assert (weight[0] != activation[0]).sum() <= 2


def test_fake_quantize_is_quantize_then_decode():
    torch.manual_seed(0)
    x = torch.randn(7, 5, 64)
    x[0, 0, :16] = 0
    x[1, 1, 3] = torch.inf
    s = nvfp4.global_scale(x.nan_to_num(posinf=3.0))
    assert torch.equal(nvfp4.fake_quantize(x, s), nvfp4.decode(*nvfp4.quantize_activation(x, s), s))


def test_error_is_within_the_bound_of_the_format():
    """Half a step of e2m1 (1/6 of the group's maximum) and half of e4m3's (1/16) for the scale."""
    torch.manual_seed(0)
    w = torch.randn(64, 256)
    s = nvfp4.global_scale(w)
    error = (nvfp4.fake_quantize(w, s) - w).unflatten(-1, (-1, 16)).abs().amax(-1)
    amax = w.unflatten(-1, (-1, 16)).abs().amax(-1)
    assert (error <= amax * (1 / 6 + 1 / 16)).all()
    assert (nvfp4.fake_quantize(w, s) - w).norm() < 0.11 * w.norm()


def test_all_zero_weights_stay_zero():
    w = torch.zeros(2, 4, 32)
    each = nvfp4.global_scale(w, lead=1)
    assert each.tolist() == [1, 1]
    packed, scale = nvfp4.encode(w, each)
    assert not packed.any()
    assert torch.equal(nvfp4.decode(packed, scale, each), w)
    assert torch.equal(nvfp4.fake_quantize(w, each), w)


@pytest.mark.parametrize("amax", [2.0**-149, 1e-42, 1e-38, 1e-34, 1e-30, 1e30, 3e38])
def test_extreme_weights_decode_to_something_near(amax):
    """No zero turns into a six because 0 * inf is NaN; what is lost is below 1e-30."""
    w = torch.zeros(1, 32)
    w[0, 0], w[0, 17] = amax, -amax / 2
    s = nvfp4.global_scale(w)
    decoded = nvfp4.decode(*nvfp4.encode(w, s), s)
    torch.testing.assert_close(decoded, w, rtol=0.1, atol=1e-30)
    assert (decoded[w == 0] == 0).all()


@pytest.mark.parametrize(
    ("amax", "kept"), [(6 * 2.0**-10, 6 * 2.0**-10), (2.0**-10, 2.0**-10), (2.0**-12, 0)]
)
def test_small_groups_of_weights_keep_what_the_smallest_scale_can_hold(amax, kept):
    """Rounding 2**-11 to the scale 0, as kernels do with activations, would lose them."""
    w = torch.tensor([[amax] * 16 + [448 * 6.0] * 16])
    packed, scale = nvfp4.encode(w, torch.tensor(1.0))
    assert scale.float()[0].tolist() == [2.0**-9, 448]
    assert nvfp4.decode(packed, scale, torch.tensor(1.0))[0, 0] == kept


def test_small_groups_of_activations_become_zero_as_on_the_gpu():
    x = torch.tensor([[6 * 2.0**-11] * 16 + [448 * 6.0] * 16])
    packed, scale = nvfp4.quantize_activation(x, torch.tensor(1.0))
    assert scale.float()[0, 0] == 0
    assert not packed[0, :8].any()


def test_subnormal_block_scales_are_used():
    x = torch.full((1, 32), 6.0)
    x[0, :16] = 6 * 2.0**-9  # of the largest scale, 1 under global scale 1
    _, scale = nvfp4.encode(x, torch.tensor(1.0))
    assert scale.view(torch.uint8)[0, 0] == 1
    assert torch.equal(nvfp4.fake_quantize(x, torch.tensor(1.0)), x)


def test_nan_spoils_its_own_group_only_and_infinity_saturates():
    x = torch.ones(1, 48)
    x[0, 2] = torch.nan
    x[0, 20] = torch.inf
    s = torch.tensor(1 / 448)
    decoded = nvfp4.decode(*nvfp4.encode(x, s), s)[0]
    assert decoded[:16].isnan().all()
    assert decoded[20] == 6
    assert torch.allclose(decoded[32:], torch.ones(16), rtol=0.07)


@pytest.mark.parametrize("function", [nvfp4.encode, nvfp4.quantize_activation, nvfp4.fake_quantize])
@pytest.mark.parametrize("columns", [15, 17, 8, 1])
def test_columns_that_leave_a_group_open_are_refused(function, columns):
    with pytest.raises(ValueError, match=rf"divisible by 16: shape \(2, {columns}\)"):
        function(torch.zeros(2, columns), torch.tensor(1.0))


def test_a_global_scale_with_too_many_dimensions_is_refused():
    with pytest.raises(ValueError, match=r"shape \(1, 1, 1\) for a 2-D tensor"):
        nvfp4.encode(torch.zeros(2, 16), torch.ones(1, 1, 1))
