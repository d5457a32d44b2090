"""Dense layers kept in FP8: rows divided, stacked and ordered like those of plain matrices; models; bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.checkpoint.writers import FORMATS, MIXED, Written, save, write_checkpoint
from tests.models.configs import BASES
from tests.models.families import FAMILIES, build, one_by_one
from tests.models.running import load
from tests.models.test_families_formats import dequantised
from tests.models.test_formats import BOUND, IDS, relative, run
from tests.models.test_logits import reference
from turnout.attention.kinds import DeltaNetSpec
from turnout.checkpoint import open_checkpoint
from turnout.formats.fp8 import encode_blocks
from turnout.formats.packed import PackedTensor
from turnout.models import _read_spec, dense, describe, weights
from turnout.models.delta_net import read_delta_net
from turnout.models.dense import Dense, Fp8Weight
from turnout.models.shares import Share, whole
from turnout.parallel.groups import Group
from turnout.vocabulary import Format


def decoded(weight: Fp8Weight) -> Tensor:
    scale_MK = weight.scale_GM.T.repeat_interleave(weight.group, 1)[:, : weight.data_MK.shape[1]]
    return weight.data_MK.float() * scale_MK


def packed(rows: int, columns: int) -> PackedTensor:
    data, scale = encode_blocks(torch.randn(rows, columns) * torch.rand(rows, 1))
    return PackedTensor(format=Format.FP8, data=data, scale=scale)


@pytest.mark.parametrize(
    ("rows", "columns", "group"),
    [
        (whole(576), whole(400), 128),
        (Share(576, 192, 144), whole(400), 128),
        (whole(576), Share(400, 128, 200), 128),
        (Share(576, 0, 288), Share(400, 176, 224), 16),
    ],
)
def test_a_share_has_the_values_of_the_whole(rows: Share, columns: Share, group: int) -> None:
    torch.manual_seed(0)
    matrix = packed(576, 400)
    weight = Fp8Weight.of(matrix, rows, columns)
    assert weight is not None
    assert weight.group == group
    wanted = matrix.decode().narrow(0, rows.start, rows.size).narrow(1, columns.start, columns.size)
    assert torch.equal(decoded(weight), wanted)
    order = torch.randperm(rows.size)
    assert torch.equal(
        decoded(Fp8Weight.stacked([weight, weight[order]])), torch.cat((wanted, wanted[order]))
    )


def test_a_share_that_would_need_a_scale_for_few_columns_is_none() -> None:
    assert Fp8Weight.of(packed(128, 256), whole(128), Share(256, 136, 120)) is None


def oracle(x: Tensor, weight: Dense, bias: Tensor | None = None) -> Tensor:
    return F.linear(x, weight if isinstance(weight, Tensor) else decoded(weight), bias)


def kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Fp8Weight]:
    """What a model of this checkpoint keeps in FP8, from now on in every model that is loaded."""
    found: list[Fp8Weight] = []
    make = weights.Weights._packed

    def noted(*args: object) -> Fp8Weight | None:
        weight = make(*args)
        found.extend([] if weight is None else [weight])
        return weight

    monkeypatch.setattr(weights, "keeps_fp8", lambda *_: True)
    monkeypatch.setattr(weights.Weights, "_packed", noted)
    monkeypatch.setattr(dense, "linear", oracle)
    load(folder)
    return found


def check_bytes(folder: Path, found: list[Fp8Weight]) -> None:
    planned = describe(open_checkpoint(folder).config).dense_in_fp8
    assert sum(weight.data_MK.numel() for weight in found) == planned.total > 0


@pytest.mark.parametrize(
    ("base", "format"),
    [("qwen2", "fp8"), ("qwen3", "fp8-dynamic"), ("qwen3", "fp8-block"), ("qwen2", "modelopt-mixed")],
)
def test_logits_equal_transformers(
    base: str, format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shared experts and dense layers among them, biases, and scales of blocks, of rows, of a matrix."""
    sizes = {"num_hidden_layers": 3, "mlp_only_layers": [1]}
    written = write_checkpoint(tmp_path, format, BASES[base], dense=True, **sizes)
    check_bytes(tmp_path, kept(tmp_path, monkeypatch))
    assert relative(run(tmp_path), reference(written.model, IDS)) <= BOUND


@pytest.mark.parametrize(
    ("name", "format"),
    [
        ("deepseek_v3", "fp8"),
        ("deepseek_v3", "modelopt-fp8-nvfp4"),
        ("qwen3_next", "fp8"),
        ("qwen3_5_moe_text", "fp8"),
    ],
)
def test_families_whose_rows_are_ordered_anew(
    name: str, format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Latent attention with interleaved rope, also next to experts in NVFP4; queries next to gates;
    DeltaNet's rows by key head and kind."""
    built = build(tmp_path / "quantised", replace(FAMILIES[name], release=one_by_one))
    tensors = dict(built.tensors)
    written = Written(built.folder, built.model, dict(tensors))
    (FORMATS | MIXED)[format](written, tensors, True)
    save(built.folder, tensors)
    theirs = dequantised(built, written.weights, tmp_path / "plain")
    check_bytes(built.folder, kept(built.folder, monkeypatch))
    assert relative(run(built.folder, moe_activation_dtype="bf16"), reference(theirs, IDS)) <= BOUND


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("qwen3_next", "nothing"),
        ("qwen3_next", "in_proj_ba"),
        ("qwen3_5_moe_text", "nothing"),
        ("qwen3_5_moe_text", "in_proj_z"),
        ("qwen3_5_moe_text", "in_proj_a"),
    ],
)
def test_shares_of_delta_net(name: str, plain: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads that begin within a block of FP8, and projections that the release left plain: the rows that
    decoded weights give."""
    built = build(tmp_path, replace(FAMILIES[name], release=one_by_one))
    tensors = dict(built.tensors)
    FORMATS["fp8"](Written(built.folder, built.model, dict(tensors)), tensors, True)
    for module in [n.removesuffix(".weight") for n in tensors if n.endswith(f"{plain}.weight")]:
        tensors[f"{module}.weight"] = built.tensors[f"{module}.weight"]
        del tensors[f"{module}.weight_scale_inv"]
    save(built.folder, tensors)
    checkpoint = open_checkpoint(built.folder)
    spec = _read_spec(checkpoint.config, drafts=False, index_fp8=False)
    layer, prefix = spec.shape.attention[0], f"{spec.layer_prefix(0)}.{spec.names.recurrent}"
    assert isinstance(layer, DeltaNetSpec)
    for rank in range(2):
        found = []
        for keeps in (False, True):
            monkeypatch.setattr(weights, "keeps_fp8", lambda *_, keeps=keeps: keeps)
            read = weights.Weights(checkpoint, device=torch.device("cpu"), dtype=torch.float32)
            net = read_delta_net(0, prefix, spec, layer, read, Group((0, 1), rank))
            found.append([*net._mixed, net._out])
        (mixed, out), (*parts, kept_out) = found
        assert isinstance(kept_out, Fp8Weight)
        assert any(isinstance(part, Fp8Weight) for part in parts)
        rows = [decoded(part) if isinstance(part, Fp8Weight) else part for part in parts]
        assert torch.equal(torch.cat(rows), mixed)
        assert torch.equal(decoded(kept_out), out)
