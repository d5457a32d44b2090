"""What a configuration says about quantisation, as one record. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turnout.checkpoint.errors import CheckpointError
from turnout.checkpoint.patterns import ModulePatterns
from turnout.errors import UserError
from turnout.formats.spec import FORMATS
from turnout.vocabulary import Format

EVERYTHING = ModulePatterns.parse("modelopt", ["*"], "built in")
MODELOPT_ALGORITHMS = {"NVFP4": True, "W4A16_NVFP4": False}  # -> activations are quantised as well
MODELOPT_FP8 = "FP8"
COMPRESSED_FORMAT, COMPRESSED_FP8 = "nvfp4-pack-quantized", "float-quantized"
NVFP4 = {"num_bits": 4, "type": "float", "group_size": 16}
ONE_SCALE = {"num_bits": 8, "type": "float", "strategy": "tensor"}  # FP8, for a whole weight
FP8_BLOCK = [FORMATS[Format.FP8].block_rows, FORMATS[Format.FP8].group]


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """How a checkpoint was quantised, and which modules were left alone.

    method: who wrote it, and so which reader understands it: "none", "modelopt", "compressed-tensors",
    "mxfp4", "fp8", or of any writer "fp8_tensor": one scale per weight. quantized_activations: the
    writer calibrated NVFP4 activations too (W4A4), and input scales are in the checkpoint.
    """

    method: str = "none"
    format: Format = Format.BF16
    quantized_activations: bool = False
    targets: ModulePatterns = EVERYTHING
    ignore: ModulePatterns = field(default_factory=ModulePatterns)
    experts_only: bool = False  # linear layers outside `experts` are never quantised

    def quantizes(self, module: str) -> bool:
        """Whether the linear layer called `module` is stored quantised."""
        if self.method == "none" or (self.experts_only and ".experts" not in module):
            return False
        return self.targets.matches(module) and not self.ignore.matches(module)

    def format_of(self, module: str) -> tuple[Format, bool]:
        """(format, quantised activations) of the linear layer called `module`."""
        return (self.format, self.quantized_activations) if self.quantizes(module) else (Format.BF16, False)

    def experts_format(self, prefix: str) -> tuple[Format, bool]:
        """(format, quantised activations) of the experts at `prefix`, such as `model.layers.0.mlp.experts`.

        Lists name modules of the first expert or the stacked ones; that every other expert agrees is
        checked when it is read. Raises UserError if some projections were left out and others not.
        """
        named = (
            [f"{prefix}.0.{name}" for name in ("gate_proj", "up_proj", "down_proj")],
            [f"{prefix}.gate_up_proj", f"{prefix}.down_proj"],
        )
        verdicts = [{self.quantizes(module) for module in modules} for modules in named]
        if any(len(verdict) > 1 for verdict in verdicts):
            raise UserError(
                f"{prefix}: some projections are listed as not quantised and others are not. Experts of one "
                f"layer must share a format: requantise with all of {prefix} in the list, or none of it"
            )
        quantized = all(verdict == {True} for verdict in verdicts)
        return (self.format, self.quantized_activations) if quantized else (Format.BF16, False)


def parse_quantization(config: Mapping[str, Any], file: Path | str = "config.json") -> Quantization:
    """The record for a configuration from `read_config`; `file` is named in errors.

    Raises UserError for a method, algorithm or variant that is not supported, naming those that are.
    """
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
    return _PARSERS[method](record, file)


def _modelopt(record: dict[str, Any], file: Path | str) -> Quantization:
    """NVFP4 or FP8 as ModelOpt exports them, in `config.json` or in `hf_quant_config.json`."""
    nested = record.get("quantization")
    if isinstance(nested, dict):
        record = record | nested
    if record.get("quant_algo") is None and record.get("kv_cache_quant_algo") is not None:
        return Quantization()  # the KV cache alone, which is this engine's own business
    algorithm = str(record.get("quant_algo")).upper()
    excluded = [*_names(record, "ignore", file), *_names(record, "exclude_modules", file)]
    ignore = ModulePatterns.parse("modelopt", excluded, f"{file}: exclude_modules")
    if algorithm == MODELOPT_FP8:
        return Quantization(method="fp8_tensor", format=Format.FP8, ignore=ignore)
    if algorithm not in MODELOPT_ALGORITHMS:
        known = [*MODELOPT_ALGORITHMS, MODELOPT_FP8]
        raise _unsupported(file, "quant_algo", record.get("quant_algo"), known)
    quantized_activations = MODELOPT_ALGORITHMS[algorithm]
    size = FORMATS[Format.NVFP4].group
    _require(file, "group_size", record.get("group_size", size), size)
    groups = _groups(record, file)
    for name, group in groups.items():
        _require_scheme(file, f"{name}.weights", group.get("weights"), NVFP4)
        quantized_activations &= group.get("input_activations") is not None
    return Quantization(
        method="modelopt", format=Format.NVFP4, quantized_activations=quantized_activations, ignore=ignore
    )


def _compressed_tensors(record: dict[str, Any], file: Path | str) -> Quantization:
    """NVFP4 or FP8 as compressed-tensors (llm-compressor) packs them, all groups alike."""
    groups = _groups(record, file)
    if len(groups) != 1:
        raise _unsupported(file, "config_groups", f"{len(groups)} groups", ["exactly one group"])
    ((name, group),) = groups.items()
    packed = group.get("format") or record.get("format")
    if packed not in (COMPRESSED_FORMAT, COMPRESSED_FP8):
        raise _unsupported(file, "format", packed, [COMPRESSED_FORMAT, COMPRESSED_FP8])
    transforms = record.get("transform_config")
    if isinstance(transforms, dict) and transforms.get("config_groups"):
        raise _unsupported(file, "transform_config", "rotations of weights or activations", ["none"])
    fp8 = packed == COMPRESSED_FP8
    _require_scheme(file, f"{name}.weights", group.get("weights"), ONE_SCALE if fp8 else NVFP4)
    activations = group.get("input_activations")
    if activations is not None and not fp8:
        _require_scheme(file, f"{name}.input_activations", activations, NVFP4)
        _require(file, f"{name}.input_activations.dynamic", activations.get("dynamic"), "local")
    targets = _names(group, "targets", file)
    dialect = "compressed-tensors"
    return Quantization(
        method="fp8_tensor" if fp8 else "compressed-tensors",
        format=Format.FP8 if fp8 else Format.NVFP4,
        quantized_activations=activations is not None and not fp8,
        # "Linear" names a class, that of every module asked about here.
        targets=EVERYTHING
        if "Linear" in targets
        else ModulePatterns.parse(dialect, targets, f"{file}: targets"),
        ignore=ModulePatterns.parse(dialect, _names(record, "ignore", file), f"{file}: ignore"),
    )


def _mxfp4(record: dict[str, Any], file: Path | str) -> Quantization:
    """GPT-OSS: the experts alone are MXFP4."""
    return Quantization(
        method="mxfp4",
        format=Format.MXFP4,
        experts_only=True,
        ignore=_not_converted(record, file),
    )


def _fp8(record: dict[str, Any], file: Path | str) -> Quantization:
    """DeepSeek-V3: e4m3 in 128x128 blocks, activations quantised as they come (`dynamic`). Else AutoFP8."""
    _require(file, "fmt", record.get("fmt", "e4m3"), "e4m3")
    if record.get("weight_block_size") is None:
        return Quantization(method="fp8_tensor", format=Format.FP8, ignore=_not_converted(record, file))
    _require(file, "weight_block_size", record.get("weight_block_size"), FP8_BLOCK)
    _require(file, "activation_scheme", record.get("activation_scheme", "dynamic"), "dynamic")
    if record.get("expert_dtype") not in (None, "fp8"):
        raise _unsupported(file, "expert_dtype", record["expert_dtype"], ["fp8"])
    return Quantization(method="fp8", format=Format.FP8, ignore=_not_converted(record, file))


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


def _require_scheme(file: Path | str, name: str, scheme: Any, wanted: Mapping[str, object]) -> None:
    if not isinstance(scheme, dict):
        raise CheckpointError(f"{name} is not usable", file=file, expected="a JSON object", found=scheme)
    for key, value in wanted.items():
        _require(file, f"{name}.{key}", scheme.get(key, value), value)
    _require(file, f"{name}.symmetric", scheme.get("symmetric", True), True)


def _require(file: Path | str, name: str, value: object, needed: object) -> None:
    if value != needed:
        raise _unsupported(file, name, value, [needed])


def _unsupported(file: Path | str, name: str, value: object, known: Iterable[object]) -> CheckpointError:
    return CheckpointError(
        f"{name} {value!r} is not supported",
        file=file,
        remedy=f"Supported: {', '.join(map(str, known))}",
    )
