"""Small checkpoints in every published format, each with the transformers model it stands for.

    written = write_checkpoint(tmp_path, "modelopt")           # Qwen3-MoE of tests/tiny.py
    written = write_checkpoint(tmp_path, "fp8", QWEN2_MOE, dense=True, moe_intermediate_size=192)
    written.model            transformers model, float32, holding the dequantised weights
    written.weights          the same weights by their per-expert names on disk
    written.input_scales     NVFP4 input scales as they multiply, by expert module name

FORMATS lists the names. `dense=True` also quantises attention (and shared experts and dense MLPs) where the
format can; routers, norms, embeddings and lm_head never are. Tensors are packed by `packing`, without
Turnout.

For tests that damage a checkpoint: `load(folder)` and `save(folder, tensors)` read and write its tensors,
`edit_config(folder)` its config.json.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme, preset_name_to_scheme
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.checkpoint import packing
from tests.tiny import QWEN3_MOE, write_model

Tensors = dict[str, Tensor]
EXPERT = re.compile(
    r"(?P<experts>.*\.(mlp|block_sparse_moe|feed_forward)\.experts)\.(?P<e>\d+)\.(?P<projection>\w+)\.weight"
)
DENSE = re.compile(
    r".*\.(self_attn\.([qkvo]_proj|q_[ab]_proj|kv_a_proj_with_mqa|kv_b_proj|indexer\.(wq_b|wk))"
    r"|linear_attn\.(in_proj_(qkvz?|z|ba?|a)|out_proj)"
    r"|(mlp|feed_forward|shared_(expert|experts|mlp))\.(gate|up|down)_proj)\.weight"
)


@dataclass
class Written:
    folder: Path
    model: Any
    weights: Tensors
    input_scales: dict[str, float] = field(default_factory=dict)


Writer = Callable[[Written, Tensors, bool], None]  # (written, tensors, whether dense layers too)


def write_checkpoint(
    folder: Path,
    format: str,
    base: dict = QWEN3_MOE,
    *,
    dense: bool = False,
    shards: int = 1,
    seed: int = 0,
    **overrides: Any,
) -> Written:
    """Write a random model of `base | overrides` to `folder` in `format`, one of FORMATS or MIXED."""
    model = write_model(folder, base, seed=seed, **overrides)
    plain = load(folder)
    written = Written(folder, model, dict(plain))
    (FORMATS | MIXED)[format](written, plain, dense)
    save(folder, plain, shards=shards)
    load_weights(model, written.weights)
    return written


def load(folder: Path) -> Tensors:
    return {k: v for path in sorted(folder.glob("*.safetensors")) for k, v in load_file(path).items()}


def save(folder: Path, tensors: Tensors, *, shards: int = 1) -> None:
    """Replace the tensors of `folder`; with several shards, an index as the hub has it."""
    for path in [*folder.glob("*.safetensors"), *folder.glob("*.index.json")]:
        path.unlink()
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in list(tensors)[i::shards]}
        save_file(part, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    size = sum(t.nbytes for t in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@contextmanager
def edit_config(folder: Path, name: str = "config.json") -> Iterator[dict[str, Any]]:
    path = folder / name
    config = json.loads(path.read_text()) if path.exists() else {}
    yield config
    path.write_text(json.dumps(config, indent=2))


def load_weights(model: Any, weights: Tensors) -> None:
    """Put weights with per-expert names into a transformers model, whose experts are stacked."""
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in weights.items():
            match = EXPERT.fullmatch(name)
            if match is None:
                parameters[name].copy_(value)
            elif match["projection"] == "down_proj":
                parameters[f"{match['experts']}.down_proj"][int(match["e"])].copy_(value)
            else:
                stacked = parameters[f"{match['experts']}.gate_up_proj"][int(match["e"])]
                half = stacked.shape[0] // 2
                (stacked[:half] if match["projection"] == "gate_proj" else stacked[half:]).copy_(value)


def stack_experts(tensors: Tensors, suffix: str = ".weight") -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """{experts prefix: (gate [E, ...], up, down)} of the per-expert tensors, which are removed."""
    found: dict[str, dict[str, dict[int, Tensor]]] = {}
    pattern = re.compile(EXPERT.pattern.removesuffix(r"\.weight") + re.escape(suffix))
    for name in [n for n in tensors if pattern.fullmatch(n)]:
        match = pattern.fullmatch(name)
        assert match is not None
        layer = found.setdefault(match["experts"], {"gate_proj": {}, "up_proj": {}, "down_proj": {}})
        layer[match["projection"]][int(match["e"])] = tensors.pop(name)
    return {
        prefix: tuple(torch.stack([one[e] for e in range(len(one))]) for one in layer.values())  # type: ignore[misc]
        for prefix, layer in found.items()
    }


def _plain(written: Written, tensors: Tensors, dense: bool) -> None:
    """As transformers wrote it: per expert, float32."""


def _bfloat16(written: Written, tensors: Tensors, dense: bool) -> None:
    for name in tensors:
        tensors[name] = tensors[name].bfloat16()
        written.weights[name] = tensors[name].float()


def _stacked(written: Written, tensors: Tensors, dense: bool) -> None:
    """`gate_up_proj` [E, 2I, H], gate first."""
    for prefix, (gate, up, down) in stack_experts(tensors).items():
        tensors[f"{prefix}.gate_up_proj"] = torch.cat([gate, up], dim=1)
        tensors[f"{prefix}.down_proj"] = down


def _transposed(written: Written, tensors: Tensors, dense: bool) -> None:
    """`gate_up_proj` [E, H, 2I]."""
    _stacked(written, tensors, dense)
    for name in tensors:
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = tensors[name].transpose(1, 2)


def _pack_linears(
    written: Written, tensors: Tensors, dense: bool, pack: Callable[[str, Tensor], packing.Packed]
) -> list[str]:
    """Replace the weights of linear layers by `pack(module, weight)`; returns the modules left alone."""
    ignored = []
    for name in [n for n in tensors if n.endswith(".weight") and tensors[n].ndim == 2]:
        module = name.removesuffix(".weight")
        if EXPERT.fullmatch(name) or (dense and DENSE.fullmatch(name)):
            packed, written.weights[name] = pack(module, tensors.pop(name))
            tensors.update({module + suffix: tensor for suffix, tensor in packed.items()})
        elif "embed" not in name:
            ignored.append(module)
    return ignored


def input_scale(module: str) -> float:
    """A made-up scale per expert and matrix; gate and up share theirs, as they share their input."""
    match = EXPERT.fullmatch(f"{module}.weight")
    expert = int(match["e"]) if match else 3
    return (1 + expert % 7) / (6 * 448) * (4 if module.endswith("down_proj") else 1)


def shared_amax(weights: Tensors, module: str) -> float:
    """Largest magnitude; of gate and up together, as exporters give them one global scale."""
    fused = {re.sub(r"(gate|up)_proj$", name, module) for name in ("gate_proj", "up_proj")}
    return max(float(weights[f"{name}.weight"].abs().max()) for name in fused)


def _modelopt_tensors(written: Written, tensors: Tensors, dense: bool, inputs: bool) -> list[str]:
    original = dict(tensors)

    def pack(module: str, weight: Tensor) -> packing.Packed:
        packed, plain = packing.nvfp4(weight, shared_amax(original, module))
        if inputs:
            written.input_scales[module] = input_scale(module)
            packed[".input_scale"] = torch.tensor(input_scale(module))
        return packed, plain

    return _pack_linears(written, tensors, dense, pack)


def _modelopt(written: Written, tensors: Tensors, dense: bool) -> None:
    """NVFP4 announced by hf_quant_config.json, with wildcards as ModelOpt writes them."""
    ignored = _modelopt_tensors(written, tensors, dense, inputs=True)
    wild = sorted({re.sub(r"self_attn\.(?!indexer).*", "self_attn*", module) for module in ignored})
    with edit_config(written.folder, "hf_quant_config.json") as config:
        config["producer"] = {"name": "modelopt", "version": "0.39.0"}
        config["quantization"] = {
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": None,
            "group_size": 16,
            "exclude_modules": wild,
        }


def _modelopt_config(written: Written, tensors: Tensors, dense: bool, inputs: bool = True) -> None:
    """NVFP4 announced by config.json's quantization_config."""
    ignored = _modelopt_tensors(written, tensors, dense, inputs=inputs)
    four_bits = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    with edit_config(written.folder) as config:
        config["quantization_config"] = {
            "config_groups": {
                "group_0": {
                    "input_activations": four_bits if inputs else None,
                    "weights": four_bits,
                    "targets": ["Linear"],
                }
            },
            "ignore": ignored,
            "quant_algo": "NVFP4",
            "producer": {"name": "modelopt", "version": "0.39.0"},
            "quant_method": "modelopt",
        }


def _modelopt_weight_only(written: Written, tensors: Tensors, dense: bool) -> None:
    """NVFP4 with `input_activations` null: W4A16."""
    _modelopt_config(written, tensors, dense, inputs=False)


def _modelopt_fused(written: Written, tensors: Tensors, dense: bool) -> None:
    """NVFP4 with experts stacked, and a column each for gate's and up's scales: [E, 2]."""
    _modelopt(written, tensors, dense)
    spelled = {".weight": "", ".weight_scale": "_weight_scale", ".weight_scale_2": "_weight_scale_2"}
    for suffix, fused in (spelled | {".input_scale": "_input_scale"}).items():
        for prefix, (gate, up, down) in stack_experts(tensors, suffix).items():
            wide = torch.stack([gate, up], dim=1) if gate.ndim == 1 else _cat(gate, up)
            tensors[f"{prefix}.gate_up_proj{fused}"] = wide
            tensors[f"{prefix}.down_proj{fused}"] = down


def _compressed(written: Written, tensors: Tensors, dense: bool, inputs: bool = True) -> None:
    """compressed-tensors NVFP4, configuration and tensors from the library itself."""
    original = dict(tensors)

    def pack(module: str, weight: Tensor) -> packing.Packed:
        packed, plain = packing.compressed_nvfp4(weight, shared_amax(original, module))
        if inputs:
            packed[".input_global_scale"] = torch.tensor([1 / input_scale(module)])
            written.input_scales[module] = input_scale(module)
        return packed, plain

    ignored = _pack_linears(written, tensors, dense, pack)
    kept = {m for m in ignored if not re.fullmatch(r".*mlp\.gate", m)} | {r"re:.*mlp\.gate$"}
    record = QuantizationConfig(
        config_groups={"group_0": packing.nvfp4_scheme(quantized_activations=inputs)},
        format="nvfp4-pack-quantized",
        quantization_status="compressed",
        ignore=sorted(kept),
    )
    with edit_config(written.folder) as config:
        config["quantization_config"] = json.loads(record.model_dump_json())


def _compressed_weight_only(written: Written, tensors: Tensors, dense: bool) -> None:
    _compressed(written, tensors, dense, inputs=False)


def _mxfp4(written: Written, tensors: Tensors, dense: bool) -> None:
    """GPT-OSS: experts alone, gate and up rows interleaved."""
    for prefix, (gate, up, down) in stack_experts(tensors).items():
        wide = torch.stack([gate, up], dim=2).flatten(1, 2)
        for name, stack in (("gate_up_proj", wide), ("down_proj", down)):
            packed = [packing.mxfp4(matrix) for matrix in stack]
            for suffix in ("_blocks", "_scales"):
                tensors[f"{prefix}.{name}{suffix}"] = torch.stack([p[suffix] for p, _ in packed])
            for e, (_, plain) in enumerate(packed):
                if name == "down_proj":
                    written.weights[f"{prefix}.{e}.down_proj.weight"] = plain
                else:
                    written.weights[f"{prefix}.{e}.gate_proj.weight"] = plain[0::2]
                    written.weights[f"{prefix}.{e}.up_proj.weight"] = plain[1::2]
    with edit_config(written.folder) as config:
        config["quantization_config"] = {
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.gate",
                "model.embed_tokens",
                "lm_head",
            ],
            "quant_method": "mxfp4",
        }


def _fp8(
    written: Written, tensors: Tensors, dense: bool, pack: Callable[[Tensor], packing.Packed] = packing.fp8
) -> None:
    """DeepSeek-V3's blocks; like its checkpoints, it lists no lm_head although that is plain."""
    ignored = _pack_linears(written, tensors, dense, lambda _, weight: pack(weight))
    with edit_config(written.folder) as config:
        config["quantization_config"] = {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": [m for m in ignored if m != "lm_head"],
        }


def _fp8_of_powers(written: Written, tensors: Tensors, dense: bool) -> None:
    """DeepSeek-V3.1: scales are powers of two, still float32."""
    _fp8(written, tensors, dense, partial(packing.fp8, powers=True))
    with edit_config(written.folder) as config:
        config["quantization_config"]["scale_fmt"] = "ue8m0"


def _fp8_tensors(
    written: Written, tensors: Tensors, dense: bool, *, shape: tuple[int, ...] = ()
) -> list[str]:
    """One scale for a weight, and the calibrated one of its input."""

    def pack(module: str, weight: Tensor) -> packing.Packed:
        packed, plain = packing.fp8_tensor(weight)
        packed[".weight_scale"] = packed[".weight_scale"].reshape(shape)
        return packed | {".input_scale": torch.full(shape, 0.25)}, plain

    return _pack_linears(written, tensors, dense, pack)


def _modelopt_fp8(written: Written, tensors: Tensors, dense: bool) -> None:
    ignored = _fp8_tensors(written, tensors, dense)
    with edit_config(written.folder, "hf_quant_config.json") as config:
        config["quantization"] = {
            "quant_algo": "FP8",
            "kv_cache_quant_algo": "FP8",
            "exclude_modules": ignored,
        }


def _modelopt_fp8_fused(written: Written, tensors: Tensors, dense: bool) -> None:
    """Experts stacked, with a column each for gate's and up's scales."""
    _modelopt_fp8(written, tensors, dense)
    for suffix, fused in (
        (".weight", ""),
        (".weight_scale", "_weight_scale"),
        (".input_scale", "_input_scale"),
    ):
        for prefix, (gate, up, down) in stack_experts(tensors, suffix).items():
            wide = torch.stack([gate, up], dim=1) if gate.ndim == 1 else _cat(gate, up)
            tensors[f"{prefix}.gate_up_proj{fused}"] = wide
            tensors[f"{prefix}.down_proj{fused}"] = down


def _compressed_fp8(written: Written, tensors: Tensors, dense: bool) -> None:
    ignored = _fp8_tensors(written, tensors, dense, shape=(1,))
    eight = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
    record = QuantizationConfig(
        config_groups={"group_0": {"weights": eight, "input_activations": eight, "targets": ["Linear"]}},
        format="float-quantized",
        quantization_status="compressed",
        ignore=ignored,
    )
    with edit_config(written.folder) as config:
        config["quantization_config"] = json.loads(record.model_dump_json())


def _by_scheme(scheme: QuantizationScheme, format: str, dtype: torch.dtype = torch.float32) -> Writer:
    """Configuration and tensors from compressed-tensors itself."""

    def write(written: Written, tensors: Tensors, dense: bool) -> None:
        ignored = _pack_linears(
            written, tensors, dense, lambda _, weight: packing.compressed(weight.to(dtype), scheme)
        )
        record = QuantizationConfig(
            config_groups={"group_0": scheme},
            format=format,
            quantization_status="compressed",
            ignore=ignored,
        )
        with edit_config(written.folder) as config:
            config["quantization_config"] = json.loads(record.model_dump_json())

    return write


def _preset(name: str, format: str) -> Writer:
    """As llm-compressor's preset of this name."""
    return _by_scheme(preset_name_to_scheme(name, ["Linear"]), format)


def _int4(group: int | None, *, symmetric: bool = True) -> Writer:
    return _by_scheme(packing.int4_scheme(group=group, symmetric=symmetric), "pack-quantized")


def _int4_of_bfloat16(group: int | None) -> Writer:
    """Scales in bfloat16, the dtype that the checkpoint gives as its own."""
    scheme = packing.int4_scheme(group=group, symmetric=True)
    write_scheme = _by_scheme(scheme, "pack-quantized", torch.bfloat16)

    def write(written: Written, tensors: Tensors, dense: bool) -> None:
        write_scheme(written, tensors, dense)
        with edit_config(written.folder) as config:
            config["dtype"] = "bfloat16"

    return write


def _kimi(written: Written, tensors: Tensors, dense: bool) -> None:
    """Kimi-K2-Thinking and K2.5: routed experts in INT4, all else as it was, by patterns that say nothing of
    the router, which is no Linear there."""
    _int4_of_bfloat16(32)(written, tensors, False)
    with edit_config(written.folder) as config:
        names = (r"self_attn.*", r"shared_experts.*", r"mlp\.(gate|up|gate_up|down)_proj.*")
        config["quantization_config"]["ignore"] = ["lm_head", *(f"re:.*{name}" for name in names)]
        if "text_config" in config:
            config["text_config"]["quantization_config"] = config.pop("quantization_config")


def _modelopt_as(algorithm: str, pack: Callable[[Tensor], packing.Packed], **fields: Any) -> Writer:
    """ModelOpt's record of `algorithm`, in hf_quant_config.json."""

    def write(written: Written, tensors: Tensors, dense: bool) -> None:
        ignored = _pack_linears(written, tensors, dense, lambda _, weight: pack(weight))
        with edit_config(written.folder, "hf_quant_config.json") as config:
            config["quantization"] = {"quant_algo": algorithm, "exclude_modules": ignored} | fields

    return write


def _w4a8_nvfp4_fp8(written: Written, tensors: Tensors, dense: bool) -> None:
    original = dict(tensors)

    def pack(module: str, weight: Tensor) -> packing.Packed:
        return packing.w4a8_nvfp4_fp8(weight, shared_amax(original, module))

    ignored = _pack_linears(written, tensors, dense, pack)
    with edit_config(written.folder, "hf_quant_config.json") as config:
        config["quantization"] = {
            "quant_algo": "W4A8_NVFP4_FP8",
            "group_size": 16,
            "exclude_modules": ignored,
        }


def _auto_fp8(written: Written, tensors: Tensors, dense: bool) -> None:
    ignored = _fp8_tensors(written, tensors, dense)
    with edit_config(written.folder) as config:
        config["quantization_config"] = {
            "quant_method": "fp8",
            "activation_scheme": "static",
            "modules_to_not_convert": ignored,
        }


def _cat(gate: Tensor, up: Tensor) -> Tensor:
    """torch.cat does not take e4m3."""
    return torch.cat([gate.view(torch.uint8), up.view(torch.uint8)], dim=1).view(gate.dtype)


FORMATS: dict[str, Writer] = {
    "float32": _plain,
    "bf16": _bfloat16,
    "bf16-stacked": _stacked,
    "bf16-transposed": _transposed,
    "modelopt": _modelopt,
    "modelopt-config": _modelopt_config,
    "modelopt-weight-only": _modelopt_weight_only,
    "modelopt-fused": _modelopt_fused,
    "compressed-tensors": _compressed,
    "compressed-tensors-weight-only": _compressed_weight_only,
    "mxfp4": _mxfp4,
    "fp8": _fp8,
    "fp8-ue8m0": _fp8_of_powers,
    "modelopt-fp8": _modelopt_fp8,
    "modelopt-fp8-fused": _modelopt_fp8_fused,
    "compressed-tensors-fp8": _compressed_fp8,
    "auto-fp8": _auto_fp8,
    "fp8-dynamic": _preset("FP8_DYNAMIC", "float-quantized"),
    "fp8-block": _preset("FP8_BLOCK", "float-quantized"),
    "int4-g32": _int4(32),
    "int4-g32-asymmetric": _int4(32, symmetric=False),
    "int4-channel": _int4(None),
    "int4-bf16": _int4_of_bfloat16(32),
    "int4-bf16-channel": _int4_of_bfloat16(None),
    "int4-kimi": _kimi,
    "int4-channel-asymmetric": _int4(None, symmetric=False),
    "compressed-mxfp4": _preset("MXFP4", "mxfp4-pack-quantized"),
    "compressed-mxfp4a16": _preset("MXFP4A16", "mxfp4-pack-quantized"),
    "modelopt-fp8-channel": _modelopt_as("FP8_PER_CHANNEL_PER_TOKEN", packing.fp8_channel),
    "modelopt-fp8-blocks": _modelopt_as("fp8_pb_wo", packing.fp8_pb_wo),
    "modelopt-mxfp4": _modelopt_as("mxfp4", packing.modelopt_mxfp4),
    "modelopt-w4a8-mxfp4-fp8": _modelopt_as("W4A8_MXFP4_FP8", packing.modelopt_mxfp4, group_size=32),
    "modelopt-w4a8-nvfp4-fp8": _w4a8_nvfp4_fp8,
}


MIXER = re.compile(r".*\.(self_attn|linear_attn)\..*")


def _modelopt_mixed(written: Written, tensors: Tensors, dense: bool) -> None:
    """ModelOpt's MIXED_PRECISION: routed experts W4A4, other MLPs and the head W4A16, attention FP8. All
    experts of a layer are one entry; config.json says less than hf_quant_config.json."""
    original, layers = dict(tensors), {}

    def pack(module: str, weight: Tensor) -> packing.Packed:
        if MIXER.fullmatch(module):
            layers[module] = {"quant_algo": "FP8"}
            packed, plain = packing.fp8_tensor(weight)
            return packed | {".input_scale": torch.tensor(0.25)}, plain
        expert = EXPERT.fullmatch(f"{module}.weight")
        name, algorithm = (expert["experts"], "NVFP4") if expert else (module, "W4A16_NVFP4")
        layers[name] = {"quant_algo": algorithm, "group_size": 16}
        packed, plain = packing.nvfp4(weight, shared_amax(original, module))
        if expert:
            packed[".input_scale"] = torch.tensor(input_scale(module))
        return packed, plain

    _pack_linears(written, tensors, dense, pack)
    packed, written.weights["lm_head.weight"] = pack("lm_head", tensors.pop("lm_head.weight"))
    tensors.update({f"lm_head{suffix}": tensor for suffix, tensor in packed.items()})
    with edit_config(written.folder) as config:
        config["quantization_config"] = {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
            "ignore": ["mtp*"],
        }
    with edit_config(written.folder, "hf_quant_config.json") as config:
        config["quantization"] = {
            "quant_algo": "MIXED_PRECISION",
            "kv_cache_quant_algo": "FP8",
            "exclude_modules": ["mtp*"],
            "quantized_layers": layers,
        }


def _modelopt_fp8_next_to_nvfp4(written: Written, tensors: Tensors, dense: bool) -> None:
    """ModelOpt's MIXED_PRECISION: routed experts W4A4, all other linear layers in FP8 blocks."""
    original, layers = dict(tensors), {}

    def pack(module: str, weight: Tensor) -> packing.Packed:
        expert = EXPERT.fullmatch(f"{module}.weight")
        if not expert:
            layers[module] = {"quant_algo": "FP8_PB_WO"}
            return packing.fp8_pb_wo(weight)
        layers[expert["experts"]] = {"quant_algo": "NVFP4", "group_size": 16}
        packed, plain = packing.nvfp4(weight, shared_amax(original, module))
        return packed | {".input_scale": torch.tensor(input_scale(module))}, plain

    _pack_linears(written, tensors, dense, pack)
    with edit_config(written.folder) as config:
        config["quantization_config"] = {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": layers,
        }


def _compressed_mixed(written: Written, tensors: Tensors, dense: bool) -> None:
    """llm-compressor with two groups: attention in FP8, a scale per row, and other linear layers in NVFP4."""
    original, eight = (
        dict(tensors),
        preset_name_to_scheme("FP8_DYNAMIC", [r"re:.*(self|linear)_attn\..*_proj"]),
    )

    def pack(module: str, weight: Tensor) -> packing.Packed:
        if MIXER.fullmatch(module):
            return packing.compressed(weight, eight)
        packed, plain = packing.compressed_nvfp4(weight, shared_amax(original, module))
        return packed | {".input_global_scale": torch.tensor([1 / input_scale(module)])}, plain

    ignored = _pack_linears(written, tensors, dense, pack)
    four = packing.nvfp4_scheme(quantized_activations=True)
    record = QuantizationConfig(
        config_groups={
            "group_0": four.model_copy(update={"format": "nvfp4-pack-quantized"}),
            "group_1": eight.model_copy(update={"format": "float-quantized"}),
        },
        format="mixed-precision",
        quantization_status="compressed",
        ignore=ignored,
    )
    with edit_config(written.folder) as config:
        config["quantization_config"] = json.loads(record.model_dump_json())


def _quark(written: Written, tensors: Tensors, dense: bool) -> None:
    """AMD's Quark: MXFP4, but for attention, which is FP8 with a scale per row."""

    def pack(module: str, weight: Tensor) -> packing.Packed:
        return packing.fp8_channel(weight) if MIXER.fullmatch(module) else packing.modelopt_mxfp4(weight)

    ignored = _pack_linears(written, tensors, dense, pack)
    four = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0", "ch_axis": -1}
    eight = {"dtype": "fp8_e4m3", "qscheme": "per_channel", "ch_axis": 0, "symmetric": True}
    with edit_config(written.folder) as config:
        config["quantization_config"] = {
            "quant_method": "quark",
            "export": {
                "kv_cache_group": ["*k_proj", "*v_proj"],
                "pack_method": "reorder",
                "weight_format": "real_quantized",
            },
            "global_quant_config": {
                "weight": four,
                "input_tensors": four | {"is_dynamic": True},
                "bias": None,
            },
            "layer_quant_config": {
                "*_attn.*": {"weight": eight, "input_tensors": eight | {"is_dynamic": True}},
                "*k_proj": {"output_tensors": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}},
            },
            "layer_type_quant_config": {},
            "exclude": [
                r"re:.*mlp\.gate$",
                *(module for module in ignored if not module.endswith("mlp.gate")),
            ],
        }


# Modules of one checkpoint in several formats.
MIXED: dict[str, Writer] = {
    "modelopt-mixed": _modelopt_mixed,
    "modelopt-fp8-nvfp4": _modelopt_fp8_next_to_nvfp4,
    "compressed-mixed": _compressed_mixed,
    "quark": _quark,
}
