"""What a configuration says about quantisation, as one record. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from turnout.checkpoint.errors import CheckpointError
from turnout.checkpoint.patterns import ModulePatterns
from turnout.errors import UserError
from turnout.formats.spec import FORMATS, ITEMSIZE
from turnout.vocabulary import Format

EVERYTHING = ModulePatterns.parse("modelopt", ["*"], "built in")
DECODED = {"int4": "int4", "fp8_channel": "fp8"}  # methods of which runners lack some or all -> stored as
FP8_BLOCK = [FORMATS[Format.FP8].block_rows, FORMATS[Format.FP8].group]
FP8_NAMES = ("e4m3", "float8_e4m3fn")
INT4_GROUPS = (32, 64, 128)
REORDERED = ("group", "dynamic", True)  # values of `actorder` that scatter a group's columns


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """How a checkpoint was quantised, and which modules were not.

    method: which reader understands it, a name of `checkpoint.READERS`, or "none", or "mxfp4" (GPT-OSS).
    format: what experts are kept in; bf16 where they are decoded while they load. quantized_activations: the
    writer calibrated NVFP4 activations too (W4A4), and input scales are in the checkpoint. group, symmetric:
    of INT4, the columns that share a scale (0: all of a row), and whether there are no zero points.
    """

    method: str = "none"
    format: Format = Format.BF16
    quantized_activations: bool = False
    group: int = 0
    symmetric: bool = True
    targets: ModulePatterns = EVERYTHING
    ignore: ModulePatterns = field(default_factory=ModulePatterns)
    experts_only: bool = False  # linear layers outside `experts` are never quantised

    @property
    def decodes_experts(self) -> bool:
        """Whether experts become unquantised weights while they load."""
        return self.stored != self.format

    @property
    def stored(self) -> str:
        """The format in the files."""
        return DECODED.get(self.method, self.format)

    def quantizes(self, module: str) -> bool:
        """Whether the linear layer called `module` is stored quantised."""
        if self.method == "none" or (self.experts_only and ".experts" not in module):
            return False
        return self.targets.matches(module) and not self.ignore.matches(module)

    def leaving_out(self, module: str) -> Quantization:
        """The same, but that nothing in `module` was quantised."""
        return replace(self, ignore=self.ignore + ModulePatterns.parse("modelopt", [module], "built in"))

    def is_fp8(self, module: str) -> bool:
        """Whether the linear layer called `module` is stored in FP8."""
        return self.stored == Format.FP8 and self.quantizes(module)

    def experts_format(self, prefix: str) -> tuple[Format, bool]:
        """(format, quantised activations) of the experts at `prefix`, such as `model.layers.0.mlp.experts`.

        As `quantizes_experts`.
        """
        quantized = self.quantizes_experts(prefix)
        return (self.format, self.quantized_activations) if quantized else (Format.BF16, False)

    def quantizes_experts(self, prefix: str) -> bool:
        """Whether the experts at `prefix` are stored quantised.

        Lists name modules of the first expert or the stacked ones; that every other expert agrees is
        checked when it is read. Raises UserError if some projections were left out and others not.
        """
        named = (
            [f"{prefix}.0.{name}" for name in ("gate_proj", "up_proj", "down_proj")],
            [f"{prefix}.0.{name}" for name in ("w1", "w3", "w2")],
            [f"{prefix}.gate_up_proj", f"{prefix}.down_proj"],
        )
        verdicts = [{self.quantizes(module) for module in modules} for modules in named]
        if any(len(verdict) > 1 for verdict in verdicts):
            raise UserError(
                f"{prefix}: some projections are listed as not quantised and others are not. Experts of one "
                f"layer must share a format: requantise with all of {prefix} in the list, or none of it"
            )
        return all(verdict == {True} for verdict in verdicts)


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
    if method not in _PARSERS:
        raise _unsupported(file, "quant_method", method, _PARSERS)
    of_release = _RELEASES.get((method, str(config.get("model_type"))))
    if of_release is not None:
        return of_release(config, record, file)
    found = _PARSERS[method](record, file)
    if found.method == "int4" and not _stays_packed(found, record, stored_dtype(config)):
        return replace(found, format=Format.BF16)
    return found


def stored_dtype(config: Mapping[str, Any]) -> str:
    """What config.json says that unquantised weights are stored in, such as "bfloat16"; "None" if nothing."""
    return str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")


def _stays_packed(found: Quantization, record: Mapping[str, Any], dtype: str) -> bool:
    """Whether INT4 experts are `Format.INT4`: no zero points, columns in order, scales in bfloat16. Those are
    in the checkpoint's own `dtype` where the record does not say."""
    ((_, group),) = record["config_groups"].items()
    scheme = group["weights"]
    dtype = str(scheme.get("scale_dtype") or dtype).removeprefix("torch.")
    reordered = scheme.get("actorder") in REORDERED
    return found.symmetric and not reordered and (dtype == "bfloat16" or dtype not in ITEMSIZE)


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
    """As ModelOpt exports, in `config.json` or in `hf_quant_config.json`; all layers alike."""
    nested = record.get("quantization")
    if isinstance(nested, dict):
        record = record | nested
    if record.get("quant_algo") is None and record.get("kv_cache_quant_algo") is not None:
        return Quantization()  # only the KV cache, which is this engine's own business
    scheme = MODELOPT.get(str(record.get("quant_algo")).upper())
    if scheme is None:
        raise _unsupported(file, "quant_algo", record.get("quant_algo"), MODELOPT)
    excluded = [*_names(record, "ignore", file), *_names(record, "exclude_modules", file)]
    quantized_activations = scheme.quantized_activations
    if "group_size" in scheme.weights:
        size = scheme.weights["group_size"]
        _require(file, "group_size", record.get("group_size") or size, size)
    for name, group in _groups(record, file).items():
        _require_scheme(file, f"{name}.weights", group.get("weights"), scheme.weights)
        quantized_activations &= group.get("input_activations") is not None
    return Quantization(
        method=scheme.method,
        format=scheme.format,
        quantized_activations=quantized_activations,
        ignore=ModulePatterns.parse("modelopt", excluded, f"{file}: exclude_modules"),
    )


def _compressed_tensors(record: dict[str, Any], file: Path | str) -> Quantization:
    """As compressed-tensors (llm-compressor) packs, all groups alike."""
    groups = _groups(record, file)
    if len(groups) != 1:
        raise _unsupported(file, "config_groups", f"{len(groups)} groups", ["exactly one group"])
    ((name, group),) = groups.items()
    transforms = record.get("transform_config")
    if isinstance(transforms, dict) and transforms.get("config_groups"):
        raise _unsupported(file, "transform_config", "rotations of weights or activations", ["none"])
    found = _compressed_scheme(name, group, group.get("format") or record.get("format"), file)
    targets = _names(group, "targets", file)
    dialect = "compressed-tensors"
    return replace(
        found,
        # "Linear" names a class, that of every module asked about here.
        targets=EVERYTHING
        if "Linear" in targets
        else ModulePatterns.parse(dialect, targets, f"{file}: targets"),
        ignore=ModulePatterns.parse(dialect, _names(record, "ignore", file), f"{file}: ignore"),
    )


def _compressed_scheme(name: str, group: dict[str, Any], packed: Any, file: Path | str) -> Quantization:
    weights, activations = group.get("weights"), group.get("input_activations")
    if packed == "pack-quantized":
        return _int4(name, weights, activations, file)
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


def _int4(name: str, weights: Any, activations: Any, file: Path | str) -> Quantization:
    """W4A16: one scale per group of columns or per row, with zero points or without."""
    wanted: dict[str, object] = {"num_bits": 4, "type": "int"}
    where = f"{name}.weights"
    scheme = _require_scheme(file, where, weights, wanted, symmetric=False)
    _require(file, f"{name}.input_activations", activations, None)
    strategy = scheme.get("strategy", "group")
    symmetric = scheme.get("symmetric", True) is True
    found = Quantization(method="int4", format=Format.INT4, symmetric=symmetric)
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


# By the method and the family, of releases that mean something else by it than others do.
_RELEASES = {("fp8", "deepseek_v4"): _deepseek_v4}
_PARSERS: dict[str, Callable[[dict[str, Any], Path | str], Quantization]] = {
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "compressed-tensors": _compressed_tensors,
    "mxfp4": _mxfp4,
    "fp8": _fp8,
}


def _not_converted(record: dict[str, Any], file: Path | str) -> ModulePatterns:
    key = "modules_to_not_convert"
    return ModulePatterns.parse("transformers", _names(record, key, file), f"{file}: {key}")


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
