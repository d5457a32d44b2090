"""INT4 of compressed-tensors: every group size of its library, reordered columns, damaged files, memory."""

from __future__ import annotations

import logging
import re

import numpy as np
import pytest
import torch

from tests.checkpoint import packing
from tests.checkpoint.test_formats import PREFIX, SHAPE, SIZE, assert_experts
from tests.checkpoint.writers import edit_config, load, save, write_checkpoint
from turnout.checkpoint import CheckpointError, ExpertShape, open_checkpoint
from turnout.checkpoint.files import TensorFiles
from turnout.checkpoint.int4 import Int4
from turnout.config import Config
from turnout.engine.engine_plan import resolve
from turnout.formats.experts import ExpertWeights

EXPERT = f"{PREFIX}.2.gate_proj"


def linear(folder, tensors, reader, n, k):
    save(folder, {f"m{suffix}": tensor for suffix, tensor in tensors.items()})
    return reader.linear(TensorFiles(folder), "m", n, k).data


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("group", [32, 64, 128, None])
@pytest.mark.parametrize(("n", "k"), [(256, 384), (40, 128), (11, 256)])
def test_decoded_as_the_library_decodes(n, k, group, symmetric, tmp_path):
    """Rows that fill no word of zero points among them."""
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(0)) + 0.3
    tensors, plain = packing.compressed(weight, packing.int4_scheme(group=group, symmetric=symmetric))
    reader = Int4(group or 0, symmetric)
    torch.testing.assert_close(linear(tmp_path, tensors, reader, n, k), plain, rtol=1e-6, atol=0)
    assert (plain - weight).norm() < 0.2 * weight.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scales_of_two_bytes_are_rounded_as_the_library_does(dtype, tmp_path):
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)).to(dtype)
    scheme = packing.int4_scheme(group=32, symmetric=False)
    tensors, plain = packing.compressed(weight, scheme)
    assert tensors[".weight_scale"].dtype == dtype
    ours = linear(tmp_path, tensors, Int4(32, False), 64, 128)
    assert ours.dtype == dtype
    assert torch.equal(ours.float(), plain)


def test_columns_that_gptq_reordered(tmp_path):
    """`weight_g_idx` says which group a column's scale and zero point are of."""
    draw = np.random.default_rng(0)
    n, k, group = 16, 128, 32
    codes, zero = draw.integers(0, 16, (n, k)), draw.integers(0, 16, (n, k // group))
    scale = draw.uniform(0.1, 1, (n, k // group)).astype(np.float32)
    order = draw.permutation(np.arange(k) // group)
    words = sum(codes[:, i::8].astype(np.uint32) << np.uint32(4 * i) for i in range(8))
    zero_words = sum(zero[i::8].astype(np.uint32) << np.uint32(4 * i) for i in range(8))
    tensors = {
        ".weight_packed": torch.from_numpy(words.astype(np.uint32).view(np.int32)),
        ".weight_zero_point": torch.from_numpy(zero_words.astype(np.uint32).view(np.int32)),
        ".weight_scale": torch.from_numpy(scale),
        ".weight_g_idx": torch.from_numpy(order.astype(np.int32)),
    }
    expected = (codes - zero[:, order]) * scale[:, order]
    ours = linear(tmp_path, tensors, Int4(group, False), n, k)
    np.testing.assert_allclose(ours.numpy(), expected, rtol=1e-6)
    tensors[".weight_g_idx"][3] = 4
    with pytest.raises(CheckpointError, match=r"m\.weight_g_idx: names groups that have no scale.*0 to 4"):
        linear(tmp_path, tensors, Int4(group, False), n, k)


@pytest.mark.parametrize(
    ("suffix", "change", "words"),
    [
        (".weight_packed", lambda t: t[:, :-1], "wrong shape: expected [96, 8], found [96, 7]"),
        (".weight_packed", lambda t: t.float(), "wrong dtype: expected int32, found float32"),
        (".weight_scale", lambda t: t[:, :1], "wrong shape: expected [96, 2], found [96, 1]"),
        (".weight_scale", lambda t: t * torch.nan, "expected finite numbers"),
        (".weight_zero_point", lambda t: t[:-1], "wrong shape: expected [12, 2], found [11, 2]"),
        (".weight_zero_point", lambda t: None, "is missing"),
        (".weight_shape", lambda t: t + 1, "names another shape than config.json: expected [96, 64]"),
    ],
)
def test_damaged(suffix, change, words, tmp_path):
    write_checkpoint(tmp_path, "int4-g32-asymmetric", **SIZE)
    tensors = load(tmp_path)
    changed = change(tensors.pop(EXPERT + suffix))
    save(tmp_path, tensors if changed is None else tensors | {EXPERT + suffix: changed})
    with open_checkpoint(tmp_path) as checkpoint:
        found = re.escape(f"tensor {EXPERT}{suffix}: ") + ".*" + re.escape(words)
        with pytest.raises(CheckpointError, match=found):
            checkpoint.experts(PREFIX, SHAPE)


def test_sizes_that_are_no_whole_groups(tmp_path):
    tensors, _ = packing.compressed(torch.randn(32, 96), packing.int4_scheme(group=32, symmetric=True))
    with pytest.raises(CheckpointError, match=r"tensor m: .*a multiple of 64 columns, found 96"):
        linear(tmp_path, tensors, Int4(64, True), 32, 96)


@pytest.mark.parametrize("group", [32, 64, 128, None])
def test_experts_stay_packed_and_are_counted_so(group, tmp_path, caplog):
    """Whatever the group: 4 bits and a bfloat16 for every 32 columns, in memory and in the plan."""
    sizes = {"hidden_size": 128, "moe_intermediate_size": 256}
    written = write_checkpoint(tmp_path, "int4-bf16", **sizes)
    scheme = packing.int4_scheme(group=group, symmetric=True)
    tensors = load(tmp_path)
    for name, weight in list(written.weights.items()):
        if ".experts." in name:
            module = name.removesuffix(".weight")
            packed, written.weights[name] = packing.compressed(weight.bfloat16(), scheme)
            tensors |= {module + suffix: tensor for suffix, tensor in packed.items()}
    save(tmp_path, tensors)
    with edit_config(tmp_path) as config:
        weights = config["quantization_config"]["config_groups"]["group_0"]["weights"]
        weights |= {"strategy": "group" if group else "channel", "group_size": group}
    shape = ExpertShape(num_experts=8, hidden=128, intermediate=256)
    with caplog.at_level(logging.INFO, "turnout"), open_checkpoint(tmp_path) as checkpoint:
        layers = [checkpoint.experts(f"model.layers.{i}.mlp.experts", shape) for i in range(2)]
        assert not [name for name in checkpoint.unread() if ".experts." in name]
    assert layers[1].format == "int4"
    assert_experts(layers[1], written)
    assert not caplog.text
    assert [layer.nbytes for layer in layers] == [8 * 3 * 128 * 256 * 9 // 16] * 2
    assert _planned_bytes(tmp_path) == sum(layer.nbytes for layer in layers)


def test_scales_of_another_dtype_than_said_are_rounded_with_a_warning(tmp_path, caplog):
    written = write_checkpoint(tmp_path, "int4-bf16", **SIZE)
    tensors = load(tmp_path)
    save(tmp_path, {n: t.half() if n.endswith("_scale") else t for n, t in tensors.items()})
    with caplog.at_level(logging.WARNING, "turnout"), open_checkpoint(tmp_path) as checkpoint:
        assert_experts(checkpoint.experts(PREFIX, SHAPE), written)  # bfloat16's few bits fit into float16
    assert "rounded from torch.float16 to bfloat16" in caplog.text


@pytest.mark.parametrize(
    ("suffix", "change", "words"),
    [
        (".weight_packed", lambda t: t[:, :-1], "wrong shape: expected [96, 8], found [96, 7]"),
        (".weight_packed", lambda t: t.float(), "wrong dtype: expected int32, found float32"),
        (".weight_scale", lambda t: t[:, :1], "wrong shape: expected [96, 2], found [96, 1]"),
        (".weight_scale", lambda t: t.view(torch.int16), "wrong dtype: expected"),
        (".weight_scale", lambda t: None, "is missing"),
        (".weight_shape", lambda t: t + 1, "names another shape than config.json: expected [96, 64]"),
        (".weight_g_idx", lambda t: torch.arange(64).flip(0) // 32, "reorders columns: expected"),
    ],
)
def test_damaged_and_packed(suffix, change, words, tmp_path):
    write_checkpoint(tmp_path, "int4-bf16", **SIZE)
    tensors = load(tmp_path)
    changed = change(tensors.pop(EXPERT + suffix, None))
    save(tmp_path, tensors if changed is None else tensors | {EXPERT + suffix: changed})
    with open_checkpoint(tmp_path) as checkpoint:
        found = re.escape(f"tensor {EXPERT}{suffix}: ") + ".*" + re.escape(words)
        with pytest.raises(CheckpointError, match=found):
            checkpoint.experts(PREFIX, SHAPE)


@pytest.mark.parametrize("format", ["int4-g32", "fp8-dynamic", "modelopt-fp8-channel"])
def test_experts_are_decoded_and_counted_so(format, tmp_path, caplog):
    """Kept in the checkpoint's own dtype, said once, and planned with the memory that they take."""
    written = write_checkpoint(tmp_path, format, **SIZE)
    with caplog.at_level(logging.INFO, "turnout"), open_checkpoint(tmp_path) as checkpoint:
        layers = [checkpoint.experts(f"model.layers.{i}.mlp.experts", SHAPE) for i in range(2)]
    assert_experts(layers[1], written)
    assert caplog.text.count("decoded while they load") == 1
    assert _planned_bytes(tmp_path) == sum(layer.nbytes for layer in layers)
    with edit_config(tmp_path) as config:
        config["dtype"] = "bfloat16"
        if format == "int4-g32":
            group = config["quantization_config"]["config_groups"]["group_0"]
            group["weights"]["scale_dtype"] = "torch.float32"
    with open_checkpoint(tmp_path) as checkpoint:
        half = checkpoint.experts(PREFIX, SHAPE)
    assert half.w13.data.dtype == torch.bfloat16
    assert torch.equal(half.w2.data, layers[1].w2.data.bfloat16())
    assert _planned_bytes(tmp_path) == 2 * _nbytes(half)


def _nbytes(experts: ExpertWeights) -> int:
    return experts.w13.data.nbytes + experts.w2.data.nbytes


def _planned_bytes(folder) -> int:
    """Of all experts, packed as stored."""
    config = Config(model=str(folder), device="cpu", moe_weight_storage="packed", moe_runner_backend="torch")
    return resolve(config).memory.experts
