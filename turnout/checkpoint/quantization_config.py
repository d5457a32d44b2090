"""What `quantization_config` of config.json says, by every method that is read, as one record.

Does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from turnout.checkpoint.errors import CheckpointError
from turnout.checkpoint.patterns import ModulePatterns
from turnout.checkpoint.quantization import EVERYTHING, Quantization
from turnout.formats.spec import FORMATS, ITEMSIZE
from turnout.vocabulary import Format

FP8_BLOCK = [FORMATS[Format.FP8].block_rows, FORMATS[Format.FP8].group]
FP8_NAMES = ("e4m3", "float8_e4m3fn")
INT4_GROUPS = (32, 64, 128)
COMPRESSED_TENSORS = "compressed-tensors"
REORDERED = ("group", "dynamic", True)  # values of `actorder` that scatter a group's columns


def parse_quantization(config: Mapping[str, Any], file: Path | str = "config.json") -> Quantization:
    """The record for a configuration from `read_config`; `file` is named in errors.

    Models with other parts may have it next to the fields of the language model (Kimi-K2.5). Raises UserError
    for a method, algorithm or variant that is not supported, naming those that are.
    """
    text = config.get("text_config")
    if config.get("quantization_config") is None and isinstance(text, dict):
        config = text | {"dtype": text.get("dtype") or config.get("dtype")}
    record = config.get("quantization_config")
    if record is None:
        return Quantization()
    if not isinstance(record, dict):
        raise CheckpointError(
            "quantization_config has the wrong type",
            file=file,
            expected="a JSON object",
            found=type(record).__name__,
        )
    method = str(record.get("quant_method", "modelopt" if "quant_algo" in record else None))
    if method == COMPRESSED_TENSORS:
        return _compressed_tensors(record, file, stored_dtype(config))
    if method not in _PARSERS:
        raise _unsupported(file, "quant_method", method, [COMPRESSED_TENSORS, *_PARSERS])
    of_release = _RELEASES.get((method, str(config.get("model_type"))))
    if of_release is not None:
        return of_release(config, record, file)
    return _PARSERS[method](record, file)


def stored_dtype(config: Mapping[str, Any]) -> str:
    """What config.json says that unquantised weights are stored in, such as "bfloat16"; "None" if nothing."""
    return str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")


@dataclass(frozen=True, kw_only=True)
class _Scheme:
    """A reader, and what a configuration must say of the weights that it reads."""

    method: str
    format: Format
    weights: Mapping[str, object]  # of a config group
    quantized_activations: bool = False


_NVFP4 = {"num_bits": 4, "type": "float", "group_size": FORMATS[Format.NVFP4].group}
_MXFP4 = {"num_bits": 4, "type": "float", "group_size": FORMATS[Format.MXFP4].group}
_FP8 = {"num_bits": 8, "type": "float"}
MODELOPT = {
    "NVFP4": _Scheme(method="modelopt", format=Format.NVFP4, weights=_NVFP4, quantized_activations=True),
    "W4A16_NVFP4": _Scheme(method="modelopt", format=Format.NVFP4, weights=_NVFP4),
    "W4A8_NVFP4_FP8": _Scheme(method="modelopt", format=Format.NVFP4, weights=_NVFP4),
    "MXFP4": _Scheme(method="mxfp4_modelopt", format=Format.MXFP4, weights=_MXFP4),
    "W4A8_MXFP4_FP8": _Scheme(method="mxfp4_modelopt", format=Format.MXFP4, weights=_MXFP4),
    "FP8": _Scheme(method="fp8_tensor", format=Format.FP8, weights=_FP8),
    "FP8_PER_CHANNEL_PER_TOKEN": _Scheme(method="fp8_channel", format=Format.BF16, weights=_FP8),
    "FP8_PB_WO": _Scheme(method="fp8_block", format=Format.FP8, weights=_FP8),
}
# Quark's, by fields of `weight`; it names tensors as ModelOpt does.
QUARK = (
    (
        MODELOPT["MXFP4"],
        {"dtype": "fp4", "qscheme": "per_group", "group_size": _MXFP4["group_size"], "scale_format": "e8m0"},
    ),
    (MODELOPT["FP8"], {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}),
    (MODELOPT["FP8_PER_CHANNEL_PER_TOKEN"], {"dtype": "fp8_e4m3", "qscheme": "per_channel", "ch_axis": 0}),
)
MIXED = "MIXED_PRECISION"
# compressed-tensors: by format, and of float-quantized by strategy.
COMPRESSED = {
    "nvfp4-pack-quantized": _Scheme(method="compressed-tensors", format=Format.NVFP4, weights=_NVFP4),
    "mxfp4-pack-quantized": _Scheme(method="mxfp4_compressed", format=Format.MXFP4, weights=_MXFP4),
}
COMPRESSED_FP8 = {
    "tensor": _Scheme(method="fp8_tensor", format=Format.FP8, weights=_FP8),
    "channel": _Scheme(method="fp8_channel", format=Format.BF16, weights=_FP8),
    "block": _Scheme(method="fp8_block", format=Format.FP8, weights=_FP8 | {"block_structure": FP8_BLOCK}),
}


def _modelopt(record: dict[str, Any], file: Path | str) -> Quantization:
    """As ModelOpt exports, in `config.json` or in `hf_quant_config.json`."""
    nested = record.get("quantization")
    if isinstance(nested, dict):
        record = record | nested
    algorithm = str(record.get("quant_algo")).upper()
    if record.get("quant_algo") is None and record.get("kv_cache_quant_algo") is not None:
        return Quantization()  # only the KV cache, which is this engine's own business
    excluded = [*_names(record, "ignore", file), *_names(record, "exclude_modules", file)]
    ignore = ModulePatterns.parse("modelopt", excluded, f"{file}: exclude_modules")
    if algorithm == MIXED:
        return replace(_modelopt_layers(record, file), ignore=ignore)
    found = _modelopt_scheme(record, "quant_algo", file)
    quantized_activations = found.quantized_activations
    for name, group in _groups(record, file).items():
        _require_scheme(file, f"{name}.weights", group.get("weights"), MODELOPT[algorithm].weights)
        quantized_activations &= group.get("input_activations") is not None
    return replace(found, quantized_activations=quantized_activations, ignore=ignore)


def _modelopt_scheme(record: Mapping[str, Any], where: str, file: Path | str) -> Quantization:
    """Of `quant_algo` and `group_size`."""
    scheme = MODELOPT.get(str(record.get("quant_algo")).upper())
    if scheme is None:
        raise _unsupported(file, where, record.get("quant_algo"), [*MODELOPT, MIXED])
    if "group_size" in scheme.weights:
        size = scheme.weights["group_size"]
        _require(file, "group_size", record.get("group_size") or size, size)
    return Quantization(
        method=scheme.method, format=scheme.format, quantized_activations=scheme.quantized_activations
    )


def _modelopt_layers(record: Mapping[str, Any], file: Path | str) -> Quantization:
    """MIXED_PRECISION: `quantized_layers` says of each module, or of all experts of a layer, how."""
    layers = record.get("quantized_layers")
    if not isinstance(layers, dict) or not all(isinstance(layer, dict) for layer in layers.values()):
        raise CheckpointError(
            f"quant_algo {MIXED} without usable quantized_layers",
            file=file,
            expected="an object that gives each quantised module's quant_algo",
            found=type(layers).__name__,
            remedy="hf_quant_config.json of the same release has it: put it next to config.json",
        )
    names: dict[Quantization, list[str]] = {}
    for name, layer in layers.items():
        found = _modelopt_scheme(layer, f"quantized_layers[{name!r}].quant_algo", file)
        names.setdefault(found, []).append(name)
    return _together([replace(found, targets=ModulePatterns.named(of)) for found, of in names.items()])


def _together(schemes: Sequence[Quantization]) -> Quantization:
    """One record of several, in which the first that matches a module counts."""
    if not schemes:
        return Quantization()
    first, *others = schemes
    return replace(first, others=tuple(others))


def _compressed_tensors(record: dict[str, Any], file: Path | str, dtype: str) -> Quantization:
    """As compressed-tensors (llm-compressor) packs, in one group or in several. dtype: see `stored_dtype`."""
    groups = _groups(record, file)
    if not groups:
        raise _unsupported(file, "config_groups", "no groups", ["one group or more"])
    for key, part in (("transform_config", "config_groups"), ("sparsity_config", "format")):
        value = record.get(key)
        if isinstance(value, dict) and value.get(part) not in (None, {}, "dense"):
            raise _unsupported(file, key, value[part], ["none"])
    schemes = [_compressed_group(name, group, record, file, dtype) for name, group in groups.items()]
    # A module's own name, or a pattern of names, goes before its class.
    schemes.sort(key=lambda scheme: scheme.targets == EVERYTHING)
    ignore = ModulePatterns.parse(COMPRESSED_TENSORS, _names(record, "ignore", file), f"{file}: ignore")
    return replace(_together(schemes), ignore=ignore)


def _compressed_group(
    name: str, group: dict[str, Any], record: Mapping[str, Any], file: Path | str, dtype: str
) -> Quantization:
    found = _compressed_scheme(name, group, group.get("format") or record.get("format"), file, dtype)
    targets = _names(group, "targets", file)
    if "Linear" in targets:  # names a class, that of every module asked about here
        return found
    return replace(found, targets=ModulePatterns.parse(COMPRESSED_TENSORS, targets, f"{file}: targets"))


def _compressed_scheme(
    name: str, group: dict[str, Any], packed: Any, file: Path | str, dtype: str
) -> Quantization:
    weights, activations = group.get("weights"), group.get("input_activations")
    if packed == "pack-quantized":
        return _int4(name, weights, activations, file, dtype)
    if packed == "float-quantized":
        _require_scheme(file, f"{name}.weights", weights, _FP8)
        strategy = weights.get("strategy", "tensor") if isinstance(weights, dict) else None
        if strategy not in COMPRESSED_FP8:
            raise _unsupported(file, f"{name}.weights.strategy", strategy, COMPRESSED_FP8)
        scheme = COMPRESSED_FP8[strategy]
    elif packed in COMPRESSED:
        scheme = COMPRESSED[packed]
    else:
        raise _unsupported(file, "format", packed, [*COMPRESSED, "float-quantized", "pack-quantized"])
    _require_scheme(file, f"{name}.weights", weights, scheme.weights)
    quantized_activations = scheme.format == Format.NVFP4 and activations is not None
    if quantized_activations:
        inputs = _require_scheme(file, f"{name}.input_activations", activations, _NVFP4)
        _require(file, f"{name}.input_activations.dynamic", inputs.get("dynamic"), "local")
    return Quantization(
        method=scheme.method, format=scheme.format, quantized_activations=quantized_activations
    )


def _int4(name: str, weights: Any, activations: Any, file: Path | str, dtype: str) -> Quantization:
    """W4A16: one scale per group of columns or per row, with zero points or without. Experts stay packed
    where there are no zero points, columns are in order, and scales are in bfloat16: those are in the
    checkpoint's own `dtype` where the record does not say."""
    wanted: dict[str, object] = {"num_bits": 4, "type": "int"}
    where = f"{name}.weights"
    scheme = _require_scheme(file, where, weights, wanted, symmetric=False)
    _require(file, f"{name}.input_activations", activations, None)
    strategy = scheme.get("strategy", "group")
    symmetric = scheme.get("symmetric", True) is True
    dtype = str(scheme.get("scale_dtype") or dtype).removeprefix("torch.")
    in_order = scheme.get("actorder") not in REORDERED
    packed = symmetric and in_order and (dtype == "bfloat16" or dtype not in ITEMSIZE)
    format = Format.INT4 if packed else Format.BF16
    found = Quantization(method="int4", format=format, symmetric=symmetric)
    if strategy == "channel":
        return found
    _require(file, f"{where}.strategy", strategy, "group")
    group = scheme.get("group_size")
    if group not in INT4_GROUPS:
        raise _unsupported(file, f"{where}.group_size", group, INT4_GROUPS)
    return replace(found, group=int(group))


def _mxfp4(record: dict[str, Any], file: Path | str) -> Quantization:
    """GPT-OSS: only the experts are MXFP4."""
    return Quantization(
        method="mxfp4",
        format=Format.MXFP4,
        experts_only=True,
        ignore=_not_converted(record, file),
    )


def _fp8(record: dict[str, Any], file: Path | str) -> Quantization:
    """DeepSeek-V3: e4m3 in 128x128 blocks, activations quantised as they come (`dynamic`). Else AutoFP8."""
    if record.get("fmt", "e4m3") not in FP8_NAMES:
        raise _unsupported(file, "fmt", record["fmt"], FP8_NAMES)
    if record.get("weight_block_size") is None:
        return Quantization(method="fp8_tensor", format=Format.FP8, ignore=_not_converted(record, file))
    _require(file, "weight_block_size", record.get("weight_block_size"), FP8_BLOCK)
    _require(file, "activation_scheme", record.get("activation_scheme", "dynamic"), "dynamic")
    if record.get("expert_dtype") not in (None, "fp8"):
        raise _unsupported(file, "expert_dtype", record["expert_dtype"], ["fp8"])
    return Quantization(method="fp8", format=Format.FP8, ignore=_not_converted(record, file))


def _deepseek_v4(config: Mapping[str, Any], record: dict[str, Any], file: Path | str) -> Quantization:
    """Linear layers in FP8 blocks, and experts as `expert_dtype` says, here or next to the other fields."""
    formats = {"fp4": Format.MXFP4, "fp8": Format.FP8}
    experts = record.get("expert_dtype") or config.get("expert_dtype") or "fp4"
    if experts not in formats:
        raise _unsupported(file, "expert_dtype", experts, formats)
    _require(file, "weight_block_size", record.get("weight_block_size"), FP8_BLOCK)
    _require(file, "activation_scheme", record.get("activation_scheme", "dynamic"), "dynamic")
    found = _not_converted(record, file)
    return Quantization(method="deepseek_v4", format=formats[experts], ignore=found)


def _quark(record: dict[str, Any], file: Path | str) -> Quantization:
    """As AMD's Quark exports: `layer_quant_config` by patterns, in order, and `global_quant_config` for the
    rest. Inputs that it means to be quantised stay as they are; KV caches are this engine's own business."""
    export = record.get("export") or {}
    found = export.get("weight_format", "real_quantized")
    _require(file, "export.weight_format", found, "real_quantized")
    if record.get("layer_type_quant_config"):
        raise _unsupported(file, "layer_type_quant_config", record["layer_type_quant_config"], ["none"])
    of_cache = tuple(export.get("kv_cache_group") or ())
    layers = record.get("layer_quant_config") or {}
    schemes = [
        replace(
            _quark_scheme(layer, name, file), targets=ModulePatterns.parse("quark", [name], f"{file}: {name}")
        )
        for name, layer in layers.items()
        if name not in of_cache
    ]
    overall = record.get("global_quant_config") or {}
    if overall.get("weight"):
        schemes.append(_quark_scheme(overall, "global_quant_config", file))
    ignore = ModulePatterns.parse("quark", _names(record, "exclude", file), f"{file}: exclude")
    return replace(_together(schemes), ignore=ignore)


def _quark_scheme(layer: Any, name: str, file: Path | str) -> Quantization:
    weight = layer.get("weight") if isinstance(layer, dict) else None
    for scheme, wanted in QUARK:
        if isinstance(weight, dict) and all(weight.get(key) == value for key, value in wanted.items()):
            return Quantization(method=scheme.method, format=scheme.format)
    known = [" ".join(map(str, wanted.values())) for _, wanted in QUARK]
    raise _unsupported(file, f"{name}.weight", weight, known)


# By the method and the family, of releases that mean something else by it than others do.
_RELEASES = {("fp8", "deepseek_v4"): _deepseek_v4}
_PARSERS: dict[str, Callable[[dict[str, Any], Path | str], Quantization]] = {
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "mxfp4": _mxfp4,
    "fp8": _fp8,
    "quark": _quark,
}


def _not_converted(record: dict[str, Any], file: Path | str) -> ModulePatterns:
    """AutoFP8 calls them `ignored_layers`, and writes patterns as compressed-tensors does."""
    key, older = "modules_to_not_convert", "ignored_layers"
    found = ModulePatterns.parse("transformers", _names(record, key, file), f"{file}: {key}")
    return found + ModulePatterns.parse(COMPRESSED_TENSORS, _names(record, older, file), f"{file}: {older}")


def _names(record: Mapping[str, Any], key: str, file: Path | str) -> list[str]:
    """A list of strings that may be absent or null."""
    value = record.get(key) or []
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise CheckpointError(f"{key} is not usable", file=file, expected="a list of strings", found=value)
    return value


def _groups(record: Mapping[str, Any], file: Path | str) -> dict[str, dict[str, Any]]:
    groups = record.get("config_groups") or {}
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise CheckpointError(
            "config_groups is not usable", file=file, expected="an object of objects", found=groups
        )
    return groups


def _require_scheme(
    file: Path | str, name: str, scheme: Any, wanted: Mapping[str, object], *, symmetric: bool = True
) -> dict[str, Any]:
    """The scheme, which must agree with `wanted` in every field that it has."""
    if not isinstance(scheme, dict):
        raise CheckpointError(f"{name} is not usable", file=file, expected="a JSON object", found=scheme)
    for key, value in wanted.items():
        _require(file, f"{name}.{key}", scheme.get(key, value), value)
    if symmetric:
        _require(file, f"{name}.symmetric", scheme.get("symmetric", True), True)
    return scheme


def _require(file: Path | str, name: str, value: object, needed: object) -> None:
    if value != needed:
        raise _unsupported(file, name, value, [needed])


def _unsupported(file: Path | str, name: str, value: object, known: Iterable[object]) -> CheckpointError:
    return CheckpointError(
        f"{name} {value!r} is not supported",
        file=file,
        remedy=f"Supported: {', '.join(map(str, known))}",
    )
