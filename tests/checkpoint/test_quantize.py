"""`quantize` writes what other engines read: checked with numpy, compressed-tensors and transformers."""

from __future__ import annotations

import fnmatch
import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from compressed_tensors.compressors import NVFP4PackedCompressor, PackedQuantizationCompressor
from compressed_tensors.entrypoints.convert.converters import ModelOptNvfp4Converter
from compressed_tensors.quantization import QuantizationConfig
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.checkpoint import packing
from tests.checkpoint.writers import load
from tests.tiny import QWEN2_MOE, QWEN3_MOE, write_model
from turnout.checkpoint import ExpertShape, open_checkpoint
from turnout.checkpoint.encoders import summarize
from turnout.checkpoint.quantize import InputAmax, quantize

E, LAYERS, INNER, HIDDEN = 8, 2, 32, 64
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
SHAPE = ExpertShape(num_experts=E, hidden=HIDDEN, intermediate=INNER)
CALIBRATION = {
    f"model.layers.{layer}.mlp.experts.{e}": InputAmax(w13=3.0 + e, w2=0.5 + layer)
    for layer in range(LAYERS)
    for e in range(E)
}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    write_model(folder, dtype=torch.bfloat16)
    return folder


@pytest.fixture(scope="module")
def quantized(source, tmp_path_factory):
    """Every format once: folder by name."""
    parent = tmp_path_factory.mktemp("quantized")
    for name, calibration in (
        ("nvfp4", CALIBRATION),
        ("w4a16", None),
        ("mxfp4", None),
        ("fp8", None),
        ("int4", None),
        ("bf16", None),
    ):
        format = "nvfp4" if name == "w4a16" else name
        quantize(source, parent / name, format, calibration=calibration)
    return parent


def modelopt(weight: Tensor, amax: float) -> tuple[dict[str, Tensor], Tensor]:
    """Tensors by suffix and decoded weights [N, K], in numpy and ml_dtypes, by ModelOpt's formulas."""
    w = weight.numpy()
    scale_2 = np.float32(amax) / np.float32(6 * 448)
    groups = w.reshape(len(w), -1, 16)
    scale = (np.abs(groups).max(-1) / (np.float32(6) * scale_2)).clip(2.0**-9, 448)
    scale = scale.astype(ml_dtypes.float8_e4m3fn)
    step = (scale.astype(np.float32) * scale_2)[..., None]
    codes = packing.e2m1_codes(groups / step)
    tensors = {
        ".weight": torch.from_numpy(packing.two_per_byte(codes.reshape(w.shape))),
        ".weight_scale": torch.from_numpy(scale.view(np.uint8)).view(torch.float8_e4m3fn),
        ".weight_scale_2": torch.tensor(scale_2),
    }
    return tensors, torch.from_numpy((packing.e2m1_values(codes) * step).reshape(w.shape))


def modelopt_expert(plain: dict[str, Tensor], name: str) -> dict[str, tuple[dict[str, Tensor], Tensor]]:
    """`modelopt` of the three projections; gate and up share their largest magnitude."""
    weights = {p: plain[f"{name}.{p}.weight"].float() for p in PROJECTIONS}
    amax = {p: weight.abs().max().item() for p, weight in weights.items()}
    amax["gate_proj"] = amax["up_proj"] = max(amax["gate_proj"], amax["up_proj"])
    return {p: modelopt(weight, amax[p]) for p, weight in weights.items()}


def expert(layer: int, e: int) -> str:
    return f"model.layers.{layer}.mlp.experts.{e}"


def experts() -> list[str]:
    return [expert(layer, e) for layer in range(LAYERS) for e in range(E)]


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def test_nvfp4_holds_what_an_independent_writer_packs(source, quantized):
    plain, written = load(source), load(quantized / "nvfp4")
    for name in experts():
        for projection, (tensors, _) in modelopt_expert(plain, name).items():
            for suffix, expected in tensors.items():
                actual = written[f"{name}.{projection}{suffix}"]
                assert actual.dtype == expected.dtype
                assert torch.equal(actual.float(), expected.float()), suffix


def test_nvfp4_is_decoded_by_compressed_tensors(source, quantized):
    """Their converter for ModelOpt checkpoints, then their decompressor (which works in bf16)."""
    plain, written = load(source), load(quantized / "nvfp4")
    scheme = packing.nvfp4_scheme(quantized_activations=True)
    for name in experts()[:3]:
        for projection in PROJECTIONS:
            module = f"{name}.{projection}"
            own = {k: v for k, v in written.items() if k.startswith(f"{module}.")}
            converter = ModelOptNvfp4Converter(targets=["re:.*experts.*"])
            converter.validate(dict(own))
            state = {k.removeprefix(f"{module}."): v for k, v in converter.process(own).items()}
            assert set(state) == {
                "weight_packed",
                "weight_scale",
                "weight_global_scale",
                "input_global_scale",
            }
            decoded = NVFP4PackedCompressor.decompress(state, scheme)["weight"].float()
            weight = plain[f"{module}.weight"].float()
            assert (decoded - weight).norm() < 0.12 * weight.norm()


def test_int4_is_what_compressed_tensors_reads_and_decompresses(source, quantized):
    """By the scheme that config.json declares; experts read back are what the library decompresses."""
    plain, written = load(source), load(quantized / "int4")
    record = config_of(quantized / "int4")["quantization_config"]
    (scheme,) = QuantizationConfig.model_validate(record).config_groups.values()
    decompressed = {}
    for module in (f"{name}.{projection}" for name in experts() for projection in PROJECTIONS):
        parts = ("weight_packed", "weight_scale", "weight_shape")
        state = {part: written[f"{module}.{part}"] for part in parts}
        assert state["weight_scale"].dtype == torch.bfloat16
        assert state["weight_shape"].tolist() == list(plain[f"{module}.weight"].shape)
        decompressed[module] = PackedQuantizationCompressor.decompress(state, scheme)["weight"].float()
        weight = plain[f"{module}.weight"].float()
        assert (decompressed[module] - weight).norm() < 0.11 * weight.norm()
    with open_checkpoint(quantized / "int4") as checkpoint:
        for layer in range(LAYERS):
            prefix = f"model.layers.{layer}.mlp.experts"
            assert checkpoint.experts_format(prefix) == ("int4", False)
            weights = checkpoint.experts(prefix, SHAPE)
            for e in range(E):
                gate, up, down = (decompressed[f"{expert(layer, e)}.{p}"] for p in PROJECTIONS)
                assert torch.equal(weights.w13[e].decode(), torch.cat((gate, up)))
                assert torch.equal(weights.w2[e].decode(), down)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_int4_of_another_dtype_says_that_its_scales_are_bfloat16(dtype, tmp_path):
    write_model(tmp_path / "source", dtype=dtype, num_hidden_layers=1)
    quantize(tmp_path / "source", tmp_path / "out", "int4")
    record = config_of(tmp_path / "out")["quantization_config"]
    (scheme,) = QuantizationConfig.model_validate(record).config_groups.values()
    assert scheme.weights.scale_dtype == torch.bfloat16
    with open_checkpoint(tmp_path / "out") as checkpoint:
        assert checkpoint.experts("model.layers.0.mlp.experts", SHAPE).format == "int4"


def test_calibrated_input_scales_are_amax_over_six_times_448(quantized):
    written = load(quantized / "nvfp4")
    for name in experts():
        w13, w2 = CALIBRATION[name]
        for projection, amax in (("gate_proj", w13), ("up_proj", w13), ("down_proj", w2)):
            scale = written[f"{name}.{projection}.input_scale"]
            assert scale.shape == ()
            assert scale.item() == pytest.approx(amax / (6 * 448), rel=1e-6)


def test_nvfp4_declares_itself_as_modelopt_does(quantized):
    inside = config_of(quantized / "nvfp4")["quantization_config"]
    own_file = json.loads((quantized / "nvfp4" / "hf_quant_config.json").read_text())
    excluded = ["lm_head", *(f"model.layers.{i}.{m}" for i in (0, 1) for m in ("mlp.gate", "self_attn*"))]
    fp4 = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    assert inside.pop("producer") == own_file.pop("producer")
    assert inside == {
        "config_groups": {
            "group_0": {"input_activations": fp4, "weights": fp4, "targets": ["Linear"]},
        },
        "ignore": excluded,
        "quant_algo": "NVFP4",
        "quant_method": "modelopt",
    }
    assert own_file == {
        "quantization": {
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": None,
            "group_size": 16,
            "exclude_modules": excluded,
        }
    }


def test_without_calibration_nvfp4_is_weight_only(quantized):
    folder = quantized / "w4a16"
    inside = config_of(folder)["quantization_config"]
    assert inside["quant_algo"] == "W4A16_NVFP4"
    assert inside["config_groups"]["group_0"]["input_activations"] is None
    assert not [name for name in load(folder) if "input_scale" in name]
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.experts_format("model.layers.0.mlp.experts") == ("nvfp4", False)
        assert checkpoint.experts("model.layers.0.mlp.experts", SHAPE).input_scales is None


def test_mxfp4_is_decoded_by_transformers(source, quantized):
    plain, written = load(source), load(quantized / "mxfp4")
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}.mlp.experts"
        gate_up, down = (
            convert_moe_packed_tensors(
                written[f"{prefix}.{p}_blocks"], written[f"{prefix}.{p}_scales"], dtype=torch.float32
            )
            for p in ("gate_up_proj", "down_proj")
        )
        decoded = {"gate_proj": gate_up[..., ::2], "up_proj": gate_up[..., 1::2], "down_proj": down}
        for e in range(E):
            for projection, values in decoded.items():
                weight = plain[f"{prefix}.{e}.{projection}.weight"].float()
                _, expected = packing.mxfp4(weight)
                assert torch.equal(values[e].T, expected)


def test_fp8_is_decoded_by_transformers(tmp_path):
    """Several blocks per matrix; theirs are equally high, so sizes are in whole blocks."""
    wide = QWEN3_MOE | {"hidden_size": 128, "moe_intermediate_size": 256, "num_experts": 2}
    write_model(tmp_path / "source", wide, dtype=torch.bfloat16, num_hidden_layers=1)
    quantize(tmp_path / "source", tmp_path / "fp8", "fp8")
    plain, written = load(tmp_path / "source"), load(tmp_path / "fp8")
    for module in (f"{expert(0, e)}.{p}" for e in range(2) for p in PROJECTIONS):
        state = {name: [written[f"{module}.{name}"]] for name in ("weight", "weight_scale_inv")}
        decoded = Fp8Dequantize(None).convert(state)["weight"]
        weight = plain[f"{module}.weight"].float()
        assert torch.equal(decoded, packing.fp8(weight)[1])
        assert (decoded - weight).norm() < 0.03 * weight.norm()


def test_fp8_holds_what_an_independent_writer_packs(source, quantized):
    plain, written = load(source), load(quantized / "fp8")
    for name in experts():
        for projection in PROJECTIONS:
            tensors, _ = packing.fp8(plain[f"{name}.{projection}.weight"].float())
            for suffix, expected in tensors.items():
                actual = written[f"{name}.{projection}{suffix}"]
                assert actual.dtype == expected.dtype
                assert torch.equal(actual.float(), expected.float()), suffix
    record = config_of(quantized / "fp8")["quantization_config"]
    names = record.pop("modules_to_not_convert")
    assert record == {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
    }
    assert "model.layers.1.self_attn.q_proj" in names


@pytest.mark.parametrize("format", ["nvfp4", "w4a16", "mxfp4", "fp8"])
def test_our_own_reader_gets_the_same_weights_back(source, quantized, format):
    plain = load(source)
    with open_checkpoint(quantized / format) as checkpoint:
        for layer in range(LAYERS):
            weights = checkpoint.experts(f"model.layers.{layer}.mlp.experts", SHAPE)
            for e in range(E):
                name = expert(layer, e)
                if format in ("nvfp4", "w4a16"):
                    values = {p: decoded for p, (_, decoded) in modelopt_expert(plain, name).items()}
                else:
                    pack = getattr(packing, format)
                    values = {p: pack(plain[f"{name}.{p}.weight"].float())[1] for p in PROJECTIONS}
                both = torch.cat((values["gate_proj"], values["up_proj"]))
                assert torch.equal(weights.w13[e].decode(), both)
                assert torch.equal(weights.w2[e].decode(), values["down_proj"])


@pytest.mark.parametrize("format", ["nvfp4", "w4a16", "mxfp4", "fp8", "int4", "bf16"])
def test_everything_but_routed_experts_is_copied_bit_for_bit(source, quantized, format):
    plain, written = load(source), load(quantized / format)
    kept = [name for name in plain if ".experts." not in name or format == "bf16"]
    assert len(kept) > 15
    for name in kept:
        assert written[name].dtype == plain[name].dtype
        assert torch.equal(written[name], plain[name])
    others = set(written) - set(kept)
    assert all(".mlp.experts." in name for name in others)
    per_expert = {"nvfp4": 12, "w4a16": 9, "fp8": 6, "int4": 9, "bf16": 0}
    expected = 4 * LAYERS if format == "mxfp4" else per_expert[format] * LAYERS * E
    assert len(others) == expected


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "fp8", "int4"])
@pytest.mark.parametrize("base", [QWEN3_MOE, QWEN2_MOE], ids=["qwen3", "qwen2"])
def test_every_linear_layer_is_either_quantised_or_listed(tmp_path, base, format):
    """Shared experts, their gate and dense layers as well."""
    overrides = {"mlp_only_layers": [1], "num_hidden_layers": 3, "num_experts": 4}
    write_model(tmp_path / "source", base, dtype=torch.bfloat16, **overrides)
    quantize(tmp_path / "source", tmp_path / "out", format)
    record = config_of(tmp_path / "out")["quantization_config"]
    listed = record["ignore" if format in ("nvfp4", "int4") else "modules_to_not_convert"]
    plain = load(tmp_path / "source")
    linear = {
        name.removesuffix(".weight")
        for name, tensor in plain.items()
        if tensor.ndim == 2 and name != "model.embed_tokens.weight"
    }
    for module in linear:
        matched = any(fnmatch.fnmatchcase(module, pattern) for pattern in listed)
        assert matched == (".experts." not in module), module


def test_a_tied_head_is_listed_although_it_has_no_weights(tmp_path):
    write_model(tmp_path / "source", dtype=torch.bfloat16, tie_word_embeddings=True, num_hidden_layers=1)
    assert "lm_head.weight" not in load(tmp_path / "source")
    quantize(tmp_path / "source", tmp_path / "out", "fp8")
    assert "lm_head" in config_of(tmp_path / "out")["quantization_config"]["modules_to_not_convert"]


@pytest.mark.parametrize(
    ("kept", "expected"),
    [
        ("model.layers.1.self_attn.q_proj", "model.layers.1.self_attn*"),
        ("model.layers.1.mlp.gate", "model.layers.1.mlp.gate"),
        ("model.layers.2.mlp.gate_proj", "model.layers.2*"),  # a dense layer
        ("model.layers.0.mlp.shared_expert.up_proj", "model.layers.0.mlp.shared_expert*"),
        ("lm_head", "lm_head"),
        ("vision.blocks.0.fc", "vision*"),
        ("model.layers.1.mlp.experts.10.x", "model.layers.1.mlp.experts.10*"),
        ("model.layer", "model.layer"),
    ],
)
def test_lists_are_as_short_as_modelopt_makes_them(kept, expected):
    quantized = [f"model.layers.{i}.mlp.experts.{e}.up_proj" for i in (0, 1, 10) for e in (0, 1)]
    assert summarize([kept], quantized) == [expected]


def test_a_layer_whose_number_begins_anothers_is_listed_with_a_dot():
    """`model.layers.1*` would match layer 10."""
    quantized = ["model.layers.10.mlp.experts.0.up_proj"]
    assert summarize(["model.layers.1.mlp.up_proj"], quantized) == ["model.layers.1.*"]


def test_other_files_come_along_and_weights_do_not(source, quantized):
    for format in ("nvfp4", "mxfp4", "fp8", "bf16"):
        folder = quantized / format
        names = {path.name for path in folder.iterdir()}
        expected = {path.name for path in source.iterdir()}
        assert names == expected | ({"hf_quant_config.json"} if format == "nvfp4" else set())
        text = "Is 12 more than 7?"
        tokenizers = (AutoTokenizer.from_pretrained(f) for f in (source, folder))
        assert len({tuple(t.encode(text)) for t in tokenizers}) == 1
        config = AutoConfig.from_pretrained(folder).to_dict()
        config.pop("quantization_config", None)
        assert config == AutoConfig.from_pretrained(source).to_dict() | {
            "_name_or_path": config.get("_name_or_path")
        }


def test_only_known_files_are_copied(source, tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    for path in source.iterdir():
        (folder / path.name).symlink_to(path)
    for name in ("LICENSE", "NOTICE.md", "merges.txt", "spiece.model", "modeling.py", "old.bin", "README.md"):
        (folder / name).write_text(name)
    (folder / "original").mkdir()
    quantize(folder, tmp_path / "out", "mxfp4")
    copied = {path.name for path in (tmp_path / "out").iterdir()} - {path.name for path in source.iterdir()}
    assert copied == {"LICENSE", "NOTICE.md", "merges.txt", "spiece.model"}


def test_float32_is_rounded_to_bf16(tmp_path):
    write_model(tmp_path / "source", dtype=torch.float32)
    quantize(tmp_path / "source", tmp_path / "out", "bf16")
    plain, written = load(tmp_path / "source"), load(tmp_path / "out")
    assert set(plain) == set(written)
    assert all(torch.equal(written[name], plain[name].bfloat16()) for name in plain)
    assert config_of(tmp_path / "out")["dtype"] == "bfloat16"
    rounded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert rounded.dtype == torch.bfloat16
    cast = AutoModelForCausalLM.from_pretrained(tmp_path / "source", dtype=torch.bfloat16)
    ids = torch.arange(24)[None]
    with torch.no_grad():
        assert torch.equal(rounded(ids).logits, cast(ids).logits)


def test_bf16_leaves_alone_what_a_bf16_checkpoint_keeps_in_float32(source, tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    tensors = load(source)
    tensors["model.layers.0.mlp.gate.e_score_correction_bias"] = torch.randn(E)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text((source / "config.json").read_text())
    quantize(folder, tmp_path / "out", "bf16")
    written = load(tmp_path / "out")
    assert all(torch.equal(written[name], tensor) for name, tensor in tensors.items())
    assert written["model.layers.0.mlp.gate.e_score_correction_bias"].dtype == torch.float32


def test_float16_and_float32_sources_give_what_their_values_give(source, tmp_path):
    """bf16 values widened to float32 quantise to the same bytes."""
    folder = tmp_path / "source"
    folder.mkdir()
    save_file({k: v.float() for k, v in load(source).items()}, folder / "model.safetensors")
    (folder / "config.json").write_text((source / "config.json").read_text())
    for format in ("nvfp4", "mxfp4", "fp8"):
        quantize(folder, tmp_path / format, format)
        quantize(source, tmp_path / f"{format}-bf16", format)
        wide, narrow = load(tmp_path / format), load(tmp_path / f"{format}-bf16")
        for name in (n for n in narrow if ".experts." in n):
            assert torch.equal(wide[name].float(), narrow[name].float())


def test_small_shards_have_an_index_and_hold_everything_once(source, quantized, tmp_path):
    quantize(source, tmp_path / "out", "nvfp4", calibration=CALIBRATION, shard_bytes=60_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    count = len(files)
    assert count > 3
    assert files == [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    whole = load(quantized / "nvfp4")
    assert set(index["weight_map"]) == set(whole)
    total = 0
    for file in files:
        with safe_open(tmp_path / "out" / file, "pt") as shard:
            names = list(shard.keys())
            assert names
            assert all(index["weight_map"][name] == file for name in names)
            tensors = {name: shard.get_tensor(name) for name in names}
        size = sum(tensor.nbytes for tensor in tensors.values())
        assert size <= 60_000
        total += size
        for name, tensor in tensors.items():
            assert torch.equal(tensor.view(-1).view(torch.uint8), whole[name].view(-1).view(torch.uint8))
    assert index["metadata"]["total_size"] == total


def test_a_group_larger_than_a_shard_gets_its_own_file(source, quantized, tmp_path):
    quantize(source, tmp_path / "out", "mxfp4", shard_bytes=1)
    whole = load(quantized / "mxfp4")
    written = load(tmp_path / "out")
    assert all(torch.equal(written[name], tensor) for name, tensor in whole.items())
    with open_checkpoint(tmp_path / "out") as checkpoint:
        assert set(checkpoint.names()) == set(whole)


def test_progress_counts_the_bytes_of_the_source(source, tmp_path):
    heard: list[tuple[str, int, int]] = []
    quantize(source, tmp_path / "out", "fp8", progress=lambda *now: heard.append(now))
    plain = load(source)
    total = sum(tensor.nbytes for tensor in plain.values())
    assert sorted(name for name, _, _ in heard) == sorted(plain)
    assert [done for _, done, _ in heard] == sorted(done for _, done, _ in heard)
    assert heard[-1][1:] == (total, total)


def test_experts_without_tokens_take_their_layers_largest_input(source, tmp_path):
    calibration = {name: tuple(amax) for name, amax in CALIBRATION.items()}
    del calibration[expert(0, 3)]
    calibration[expert(1, 2)] = (0.0, 0.0)
    quantize(source, tmp_path / "out", "nvfp4", calibration=calibration)
    written = load(tmp_path / "out")
    for name, w2 in ((expert(0, 3), 0.5), (expert(1, 2), 1.5)):
        assert written[f"{name}.up_proj.input_scale"].item() == pytest.approx((3.0 + E - 1) / 2688)
        assert written[f"{name}.down_proj.input_scale"].item() == pytest.approx(w2 / 2688)
