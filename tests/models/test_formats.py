"""Models from quantised checkpoints: logits equal those of transformers with the dequantised weights."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.checkpoint.writers import FORMATS, MIXED, Written, write_checkpoint
from tests.models.configs import BASES
from tests.models.running import PlainAttention, load
from tests.models.test_logits import prompt, reference
from tests.tiny import QWEN2_MOE, write_model

BOUND = 1e-3  # relative, in the root mean square
DENSE_FORMATS = (
    "modelopt",
    "modelopt-config",
    "modelopt-w4a8-nvfp4-fp8",
    "modelopt-fp8-channel",
    "modelopt-fp8-blocks",
    "modelopt-mxfp4",
    "compressed-tensors",
    "compressed-mxfp4",
    "fp8",
    "fp8-dynamic",
    "fp8-block",
    "int4-g32-asymmetric",
    "int4-channel",
    "int4-bf16",
)
IDS = prompt(48)


def relative(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


def run(folder: Path, **options: str) -> Tensor:
    """Most of the prompt at once, the rest token by token: both phases of the plan."""
    attention = PlainAttention(load(folder, **options))
    parts = [attention.logits(("a", IDS[:40]))[0]]
    parts += [attention.logits(("a", [i]), phase="decode")[0] for i in IDS[40:]]
    return torch.cat(parts)


@pytest.mark.parametrize("storage", ["packed", "decoded"])
@pytest.mark.parametrize("format", FORMATS)
def test_experts_in_every_format(format: str, storage: str, tmp_path: Path) -> None:
    written = write_checkpoint(tmp_path, format, shards=2, moe_intermediate_size=96)
    ours = run(tmp_path, moe_weight_storage=storage, moe_activation_dtype="bf16")
    assert relative(ours, reference(written.model, IDS)) <= BOUND


@pytest.mark.parametrize("format", DENSE_FORMATS)
@pytest.mark.parametrize("base", BASES)
def test_dense_layers_too(base: str, format: str, tmp_path: Path) -> None:
    """Attention, shared experts and dense MLPs quantised as well; not all their sizes are whole blocks."""
    written = write_checkpoint(
        tmp_path, format, BASES[base], dense=True, num_hidden_layers=3, mlp_only_layers=[1]
    )
    assert relative(run(tmp_path), reference(written.model, IDS)) <= BOUND


@pytest.mark.parametrize("format", MIXED)
def test_modules_of_several_formats(format: str, tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 3, "mlp_only_layers": [1]}
    written = write_checkpoint(tmp_path, format, BASES["qwen2"], dense=True, **sizes)
    assert relative(run(tmp_path, moe_activation_dtype="bf16"), reference(written.model, IDS)) <= BOUND


def test_quantisation_is_visible_in_the_logits(tmp_path: Path) -> None:
    """Otherwise the comparisons above could not tell decoded weights from the original ones."""
    original = reference(write_model(tmp_path / "original"), IDS)
    write_checkpoint(tmp_path / "nvfp4", "modelopt")
    assert relative(run(tmp_path / "nvfp4"), original) > 20 * BOUND


@pytest.mark.parametrize("format", ["modelopt", "modelopt-fused", "compressed-tensors"])
def test_quantised_activations(format: str, tmp_path: Path) -> None:
    """W4A4 against transformers' model with its experts' inputs rounded by numpy and ml_dtypes.

    Values on the edge between two codes fall either way, so the bound is looser; rounding as a whole
    changes the logits much more.
    """
    written = write_checkpoint(tmp_path, format, QWEN2_MOE)
    ours = run(tmp_path, moe_activation_dtype="nvfp4")
    weight_only = reference(written.model, IDS)
    quantize_activations(written)
    theirs = reference(written.model, IDS)
    assert relative(theirs, weight_only) > 0.03
    assert relative(ours, theirs) <= 0.006


def test_the_largest_scale_of_a_layer_costs_no_accuracy(tmp_path: Path) -> None:
    """Against activations that are not rounded, it is as close as each expert's own calibrated scale.

    Both round by other amounts, so they differ from each other by about as much as either errs. An e4m3 scale
    of a group spans 2**15 in its normal range: a global scale several times too large leaves it there.
    """
    written = write_checkpoint(tmp_path, "modelopt", QWEN2_MOE)
    exact = reference(written.model, IDS)
    calibrated = [RoundedExperts(layer.mlp.experts) for layer in written.model.model.layers]
    use(written, calibrated)
    reference(written.model, IDS)
    own = [np.array(one.amax) / (6 * 448) for one in calibrated]
    assert all(scales.max(0).min() > 1.5 * scales[scales > 0].min() for scales in own)
    use(written, [RoundedExperts(one.experts, scales) for one, scales in zip(calibrated, own, strict=True)])
    by_own = reference(written.model, IDS)
    largest = [np.broadcast_to(scales.max(0), scales.shape) for scales in own]
    use(written, [RoundedExperts(one.experts, s) for one, s in zip(calibrated, largest, strict=True)])
    by_largest = reference(written.model, IDS)
    assert relative(by_own, exact) > 0.02
    assert relative(by_largest, by_own) > 0.02
    assert relative(by_largest, exact) <= 1.1 * relative(by_own, exact)


def quantize_activations(written: Written) -> None:
    """With the largest scale of a layer's experts, as vLLM and SGLang do for FlashInfer's kernels."""
    rounded = []
    for i, layer in enumerate(written.model.model.layers):
        prefix = f"model.layers.{i}.mlp.experts"
        largest = [
            max(s for name, s in written.input_scales.items() if name.startswith(prefix) and name.endswith(p))
            for p in ("gate_proj", "down_proj")
        ]
        rounded.append(RoundedExperts(layer.mlp.experts, np.tile(largest, (8, 1))))
    use(written, rounded)


def use(written: Written, experts: list[RoundedExperts]) -> None:
    for layer, one in zip(written.model.model.layers, experts, strict=True):
        layer.mlp.experts.forward = one


class RoundedExperts:
    """transformers' experts, one pair at a time, with both inputs rounded to NVFP4.

    scales: [E, 2], of both inputs for each expert; without, inputs are not rounded but their largest
    magnitudes noted in `amax` [E, 2], as a calibration does.
    """

    def __init__(self, experts, scales: np.ndarray | None = None):
        self.experts, self.scales = experts, scales
        self.amax = [[1e-6, 1e-6] for _ in experts.gate_up_proj]

    def __call__(self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        out_TH = torch.zeros_like(x_TH)
        for t, k in np.ndindex(*ids_TK.shape):
            e = int(ids_TK[t, k])
            gate, up = F.linear(self.rounded(x_TH[t], e, 0), self.experts.gate_up_proj[e]).chunk(2)
            h = self.rounded(F.silu(gate) * up, e, 1)
            out_TH[t] += weights_TK[t, k] * F.linear(h, self.experts.down_proj[e])
        return out_TH

    def rounded(self, x: Tensor, expert: int, which: int) -> Tensor:
        if self.scales is None:
            self.amax[expert][which] = max(self.amax[expert][which], float(x.abs().max()))
            return x
        return round_nvfp4(x, float(self.scales[expert][which]))


def round_nvfp4(x: Tensor, scale: float) -> Tensor:
    """Values e2m1 * (e4m3 group scale) * scale, groups of 16."""
    groups = x.detach().numpy().astype(np.float64).reshape(-1, 16)
    inner = (np.abs(groups).max(1) / 6 / scale).clip(0, 448).astype(np.float32)
    full = inner.astype(ml_dtypes.float8_e4m3fn).astype(np.float64)[:, None] * scale
    codes = np.divide(groups, full, out=np.zeros_like(groups), where=full > 0).clip(-6, 6)
    rounded = codes.astype(np.float32).astype(ml_dtypes.float4_e2m1fn).astype(np.float64) * full
    return torch.from_numpy(rounded.astype(np.float32).reshape(x.shape))
