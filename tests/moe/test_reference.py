"""The oracle itself: W4A4 against codes written out, the rest is held by transformers (test_layer)."""

from __future__ import annotations

import torch

from tests.moe.build import expert_slice, make_experts, make_spec
from turnout.formats import nvfp4
from turnout.moe.reference import experts_reference

IDS = torch.tensor([[0, 5]], dtype=torch.int32)
WEIGHTS = torch.tensor([[0.25, 0.75]])


def by_hand(x_H, experts, expert, s1, s2):
    """One expert from encoded and decoded activations, in float64."""

    def rounded(v, scale):
        return nvfp4.decode(*nvfp4.quantize_activation(v.float()[None], scale), scale)[0].double()

    w13, w2 = experts.w13.decode()[expert].double(), experts.w2.decode()[expert].double()
    gate, up = (w13 @ rounded(x_H, s1)).chunk(2)
    return w2 @ rounded(gate / (1 + (-gate).exp()) * up, s2)


def test_w4a4_takes_the_largest_scales_of_all_experts():
    experts = make_experts(make_spec("silu", "nvfp4"))
    s1, s2 = experts.input_scales.w13.max(), experts.input_scales.w2.max()
    x_TH = torch.randn(1, 128, generator=torch.Generator().manual_seed(2))
    y = experts_reference(x_TH, IDS, WEIGHTS, experts, make_spec().activation, activation_format="nvfp4")
    ref = sum(
        float(weight) * by_hand(x_TH[0], experts, expert, s1, s2)
        for expert, weight in zip(IDS[0].tolist(), WEIGHTS[0], strict=True)
    )
    torch.testing.assert_close(y[0].double(), ref, rtol=1e-4, atol=1e-5)


def test_a_slice_quantises_as_the_whole_layer_does():
    """Rank 1 of 2: the scales of both GEMMs come from all experts, also those it does not hold."""
    experts = make_experts(make_spec("silu", "nvfp4"))
    assert experts.input_scales.w2.argmax() < 4, "the largest scale is another rank's"
    part = expert_slice(experts, 4, 4)
    x_TH = torch.randn(1, 128, generator=torch.Generator().manual_seed(2))
    y = experts_reference(x_TH, IDS, WEIGHTS, part, make_spec().activation, activation_format="nvfp4")
    s1, s2 = experts.input_scales.w13.max(), experts.input_scales.w2.max()
    torch.testing.assert_close(
        y[0].double(), 0.75 * by_hand(x_TH[0], experts, 5, s1, s2), rtol=1e-4, atol=1e-5
    )
