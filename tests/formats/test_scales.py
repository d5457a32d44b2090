"""Resolution of NVFP4 scales: every accepted shape, every refusal, and the formulas by hand."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from turnout.formats import nvfp4, scales
from turnout.formats.codec import encode
from turnout.formats.experts import ExpertWeights, InputScales
from turnout.formats.packed import PackedTensor
from turnout.formats.scales import ScaleError

E, FIRST, LOCAL = 8, 4, 2
MINE = range(FIRST, FIRST + LOCAL)
ALL = torch.arange(1.0, E + 1)


def per_expert(scale: Tensor | None) -> Tensor:
    return scales.per_expert(scale, name="mlp.experts.weight_scale_2", num_experts=E, experts=MINE)


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        (torch.tensor(0.5), [0.5, 0.5]),
        (torch.tensor([0.5]), [0.5, 0.5]),
        (torch.tensor([0.5, 0.25]), [0.5, 0.25]),
        (ALL, [5, 6]),
        (ALL[:, None].expand(E, 2), [5, 6]),
        (torch.tensor([[3.0, 3.0], [4.0, 4.0]]), [3, 4]),
        (ALL.bfloat16(), [5, 6]),
    ],
    ids=["scalar", "one", "local", "global", "global pairs", "local pairs", "bf16"],
)
def test_accepted_shapes(scale, expected):
    resolved = per_expert(scale)
    assert resolved.dtype == torch.float32
    assert resolved.tolist() == expected


def test_without_a_slice_all_experts_are_meant():
    assert scales.per_expert(ALL, name="s", num_experts=E).tolist() == ALL.tolist()


@pytest.mark.parametrize("shape", [(3,), (E + 1,), (E, 3), (3, 2), (E, 1, 2), (2, E), (0,), (E, 0), (1, 1)])
def test_other_shapes_are_refused_by_name_and_shape(shape):
    message = f"tensor mlp.experts.weight_scale_2 (shape {list(shape)}): "
    message += "accepted shapes are a scalar, [8], [2], [8, 2], [2, 2]"
    with pytest.raises(ScaleError, match=re.escape(message)):
        per_expert(torch.ones(shape))


def test_a_missing_scale_is_not_one():
    with pytest.raises(ScaleError, match=r"tensor mlp\.experts\.weight_scale_2 \(absent\): is missing"):
        per_expert(None)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 0.0, -1.0])
def test_scales_that_are_no_scales_are_refused(bad):
    scale = ALL.clone()
    scale[5] = bad
    with pytest.raises(ScaleError, match=r"finite and positive, but expert 5 has"):
        per_expert(scale)
    with pytest.raises(ScaleError, match=r"finite and positive, but expert 4 has"):
        per_expert(torch.tensor(bad))


def test_a_bad_scale_of_another_rank_is_that_ranks_error():
    scale = ALL.clone()
    scale[0] = torch.nan
    assert per_expert(scale).tolist() == [5, 6]


def test_gate_and_up_that_differ_are_refused_and_named():
    pairs = ALL[:, None].repeat(1, 2)
    pairs[5, 1] = 7.5
    with pytest.raises(ScaleError, match=r"expert 5 differ \(6 and 7\.5\), and 1 of 2 experts are so"):
        per_expert(pairs)


def test_gate_and_up_of_an_activation_take_the_larger():
    pairs = torch.stack([ALL, ALL.flip(0)], dim=1)
    assert scales.input_scale(pairs, name="s", num_experts=E).tolist() == [8, 7, 6, 5, 5, 6, 7, 8]


def weights(s13: Tensor | None, s2: Tensor | None, first: int = FIRST, local: int = LOCAL) -> ExpertWeights:
    torch.manual_seed(0)
    given = None if s13 is None or s2 is None else InputScales(w13=s13, w2=s2)
    return ExpertWeights(
        w13=encode(torch.randn(E, 32, 16), "nvfp4")[first : first + local],
        w2=encode(torch.randn(E, 16, 16), "nvfp4")[first : first + local],
        input_scales=given,
        first_expert=first,
        num_experts=E,
    )


def test_scales_follow_the_formulas():
    """Of ALL experts, though experts 4 and 5 alone are held here."""
    w = weights(ALL.flip(0), ALL)
    resolved = scales.resolve(w)
    assert resolved.s1 == resolved.s2 == 8
    assert resolved.a1 == resolved.a2 == 1 / 8
    torch.testing.assert_close(resolved.alpha1, 8 * w.w13.global_scale)
    torch.testing.assert_close(resolved.alpha2, 8 * w.w2.global_scale)
    assert resolved.a1.shape == resolved.s2.shape == ()


def test_every_rank_quantises_alike():
    """So results do not depend on how experts are spread over ranks."""
    ranks = [scales.resolve(weights(ALL, 2 * ALL, first=f, local=2)) for f in range(0, E, 2)]
    assert {(r.a1.item(), r.a2.item()) for r in ranks} == {(1 / 8, 1 / 16)}


def test_the_kernels_arithmetic_with_these_scales_is_the_decoded_product():
    """GEMM on codes and block scales, times alpha = w_2 * s, equals the product of decoded operands."""
    torch.manual_seed(0)
    x = torch.randn(4, 16)
    w = weights(torch.full((E,), x.abs().max().item() / 2688), ALL)
    resolved = scales.resolve(w)
    codes, sf = nvfp4.quantize_activation(x, resolved.s1)
    one = torch.tensor(1.0)
    x_in_codes = nvfp4.decode(codes, sf, one)
    w_in_codes = nvfp4.decode(w.w13.data, w.w13.scale, one)
    kernel = torch.einsum("th,enh->etn", x_in_codes, w_in_codes) * resolved.alpha1[:, None, None]
    decoded = torch.einsum("th,enh->etn", nvfp4.decode(codes, sf, resolved.s1), w.w13.decode())
    torch.testing.assert_close(kernel, decoded)


def test_weights_without_input_scales_cannot_be_w4a4():
    with pytest.raises(ScaleError, match=r"tensor layer 3 input_scale of w13 \(absent\): is missing"):
        scales.resolve(weights(None, None), layer="layer 3")


def test_bad_scales_are_refused_when_resolved():
    bad = ALL.clone()
    bad[0] = torch.nan  # another rank's, but a1 is shared by all
    with pytest.raises(ScaleError, match=r"layer 3 input_scale of w13 \(shape \[8\]\).*expert 0"):
        scales.resolve(weights(bad, ALL), layer="layer 3")
    with pytest.raises(ScaleError, match=r"layer 3 input_scale of w2 \(shape \[2\]\): accepted shapes"):
        scales.resolve(weights(ALL, ALL[:2]), layer="layer 3")
    w = weights(ALL, ALL)
    broken = replace(w, w2=replace(w.w2, global_scale=torch.tensor([1.0, -1.0])))
    with pytest.raises(ScaleError, match=r"layer 3 global scale of w2 \(shape \[2\]\).*expert 5"):
        scales.resolve(broken, layer="layer 3")


def half(size: float, experts: int = 3) -> PackedTensor:
    torch.manual_seed(int(size * 1000))
    return encode(size * torch.randn(experts, 32, 64), "nvfp4")


def test_halves_with_one_scale_are_stacked_untouched():
    gate = half(1.0)
    up = replace(gate, data=gate.data.flip(1))
    merged = scales.merge_gate_up(gate, up)
    assert merged.shape == (3, 64, 64)
    assert torch.equal(merged.data, torch.cat([gate.data, up.data], dim=1))
    assert torch.equal(merged.global_scale, gate.global_scale)
    assert torch.equal(merged.decode(), torch.cat([gate.decode(), up.decode()], dim=1))


def test_a_ratio_of_a_power_of_two_is_absorbed_exactly():
    gate = half(1.0)
    up = replace(gate, global_scale=gate.global_scale / 4)
    merged = scales.merge_gate_up(gate, up)
    assert torch.equal(merged.global_scale, gate.global_scale)
    assert torch.equal(merged.decode(), torch.cat([gate.decode(), up.decode()], dim=1))


@settings(deadline=None, max_examples=30)
@given(st.floats(0.02, 50.0))
def test_halves_with_different_scales_keep_their_values_within_the_bound(ratio):
    gate, up = half(1.0), half(ratio)
    merged = scales.merge_gate_up(gate, up)
    assert torch.equal(merged.global_scale, torch.maximum(gate.global_scale, up.global_scale))
    expected = torch.cat([gate.decode(), up.decode()], dim=1)
    decoded = merged.decode()
    assert ((decoded - expected).abs() <= expected.abs() / 16 * 1.0001).all()
    assert (decoded - expected).norm() <= 0.04 * expected.norm()


def test_each_expert_keeps_the_half_that_has_the_larger_scale():
    gate, up = half(1.0), half(1.01)
    ratio = torch.tensor([3.0, 0.3, 1.0])
    up = replace(up, global_scale=gate.global_scale * ratio)
    merged = scales.merge_gate_up(gate, up).decode()
    assert torch.equal(merged[0, 32:], up.decode()[0])
    assert torch.equal(merged[1, :32], gate.decode()[1])
    assert torch.equal(merged[2], torch.cat([gate.decode(), up.decode()], dim=1)[2])


def test_a_ratio_beyond_e4m3_saves_what_it_can():
    """Block scales of at most 448 shrink by 2 ** 14 to subnormals: codes are rounded again."""
    gate = half(1.0)
    up = replace(half(1.01), global_scale=gate.global_scale * 2.0**-14)
    merged = scales.merge_gate_up(gate, up)
    expected = up.decode()
    error = (merged.decode()[:, 32:] - expected).norm() / expected.norm()
    assert error < 0.25  # a quarter: dropping the scale would be wrong by 2 ** 14
    assert torch.equal(merged.decode()[:, :32], gate.decode())


def test_a_single_pair_without_expert_dimension_merges_too():
    gate, up = half(1.0)[0], half(2.0)[0]
    assert gate.global_scale.shape == ()
    merged = scales.merge_gate_up(gate, up)
    assert torch.equal(merged.data, scales.merge_gate_up(half(1.0), half(2.0)).data[0])
