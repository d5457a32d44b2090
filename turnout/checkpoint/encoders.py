"""How quantised experts are named, stored and declared on disk: one class per format written.

* nvfp4, as ModelOpt exports it: per expert `{gate,up,down}_proj.weight`, `.weight_scale`, `.weight_scale_2`
  and, when calibrated, `.input_scale`; declared in `hf_quant_config.json` and in `quantization_config`.
* mxfp4, as GPT-OSS has it: per layer `gate_up_proj_blocks`, `gate_up_proj_scales`, `down_proj_blocks`,
  `down_proj_scales`, all experts stacked, gate and up rows interleaved.
* fp8, as DeepSeek-V3 and Qwen3-FP8 have it: per expert `{gate,up,down}_proj.weight`, `.weight_scale_inv`.
* int4, as Kimi-K2-Thinking has it (compressed-tensors, `pack-quantized`): per expert
  `{gate,up,down}_proj.weight_packed`, `.weight_scale` and `.weight_shape`.

Legend: E experts, I intermediate size, H hidden size.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from turnout import __version__
from turnout.checkpoint.experts import ExpertShape
from turnout.checkpoint.writer import Entry, ShardWriter
from turnout.errors import UserError
from turnout.formats import fp8, int4, layouts, mxfp4, nvfp4
from turnout.formats.codec import encode
from turnout.vocabulary import Format

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, kw_only=True)
class ExpertLayer:
    """The routed experts of one layer, written as `{prefix}.{e}.gate_proj.weight [I, H]` and so on."""

    prefix: str
    experts: ExpertShape
    names: tuple[str, str, str] = PROJECTIONS  # what the checkpoint calls gate, up and down

    def expert(self, index: int) -> str:
        return f"{self.prefix}.{index}"

    def module(self, index: int, projection: str) -> str:
        """The name of a projection, one of PROJECTIONS, of expert `index`."""
        return f"{self.expert(index)}.{self.names[PROJECTIONS.index(projection)]}"

    def shape(self, projection: str) -> tuple[int, int]:
        rows, columns = self.experts.intermediate, self.experts.hidden
        return (columns, rows) if projection == "down_proj" else (rows, columns)


class InputAmax(NamedTuple):
    """The largest magnitudes seen while calibrating: of an expert's input, and of its GEMM1's output."""

    w13: float
    w2: float


class Encoder(Protocol):
    """Writes the experts of a layer one by one, and says in the configuration what it did."""

    format: Format

    def groups(self, layer: ExpertLayer) -> list[list[Entry]]:
        """What will be written, in the order of writing; each group into one file."""
        ...

    def write(self, layer: ExpertLayer, index: int, weights: Mapping[str, Tensor], to: ShardWriter) -> None:
        """Encode expert `index`; `weights` are its three projections by name."""
        ...

    def declare(self, kept: Sequence[str], quantized: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
        """(`quantization_config`, further files by name) given linear modules kept and quantised."""
        ...


class _ByExpert:
    """Experts whose tensors are written one after the other, those of each into one file."""

    def groups(self, layer: ExpertLayer) -> list[list[Entry]]:
        return [
            [e for p in PROJECTIONS for e in self.entries(layer.module(i, p), layer.shape(p))]
            for i in range(layer.experts.num_experts)
        ]

    def entries(self, module: str, shape: tuple[int, int]) -> list[Entry]:
        """Those of one linear layer of `shape` [N, K]."""
        raise NotImplementedError


class Nvfp4(_ByExpert):
    """ModelOpt's export. Gate and up share a global scale, since kernels multiply them in one GEMM."""

    format = Format.NVFP4

    def __init__(self, calibration: Mapping[str, tuple[float, float]] | None):
        self._calibration = calibration

    def write(self, layer: ExpertLayer, index: int, weights: Mapping[str, Tensor], to: ShardWriter) -> None:
        both = torch.cat((weights["gate_proj"], weights["up_proj"]))
        shared = {"gate_proj": nvfp4.global_scale(both), "up_proj": nvfp4.global_scale(both)}
        for projection, weight in weights.items():
            module = layer.module(index, projection)
            packed = encode(weight, Format.NVFP4, global_scale=shared.get(projection), name=module)
            assert packed.scale is not None
            assert packed.global_scale is not None
            to.write(f"{module}.weight", packed.data)
            to.write(f"{module}.weight_scale", packed.scale)
            to.write(f"{module}.weight_scale_2", packed.global_scale)
        if self._calibration is not None:
            amax = self._amax(layer, index)
            for projection, value in zip(PROJECTIONS, (amax.w13, amax.w13, amax.w2), strict=True):
                scale = torch.tensor(value / nvfp4.GLOBAL_MAX)
                to.write(f"{layer.module(index, projection)}.input_scale", scale)

    def declare(self, kept: Sequence[str], quantized: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Weight-only is what ModelOpt calls W4A16_NVFP4: no activation scheme, no input scales."""
        algorithm = "W4A16_NVFP4" if self._calibration is None else "NVFP4"
        scheme = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": nvfp4.GROUP}
        activations = None if self._calibration is None else scheme
        excluded = summarize(kept, quantized)
        producer = {"name": "turnout", "version": __version__}
        config = {
            "config_groups": {
                "group_0": {"input_activations": activations, "weights": scheme, "targets": ["Linear"]}
            },
            "ignore": excluded,
            "quant_algo": algorithm,
            "producer": producer,
            "quant_method": "modelopt",
        }
        record = {
            "quant_algo": algorithm,
            "kv_cache_quant_algo": None,
            "group_size": nvfp4.GROUP,
            "exclude_modules": excluded,
        }
        return config, {"hf_quant_config.json": {"producer": producer, "quantization": record}}

    def entries(self, module: str, shape: tuple[int, int]) -> list[Entry]:
        rows, columns = shape
        scalars = ["weight_scale_2"] + ([] if self._calibration is None else ["input_scale"])
        return [
            Entry(f"{module}.weight", torch.uint8, (rows, columns // 2)),
            Entry(f"{module}.weight_scale", fp8.DTYPE, (rows, columns // nvfp4.GROUP)),
            *(Entry(f"{module}.{name}", torch.float32) for name in scalars),
        ]

    def _amax(self, layer: ExpertLayer, index: int) -> InputAmax:
        """What was calibrated; of the whole layer where no token reached this expert."""
        calibrated = self._calibration or {}
        everyone = [calibrated.get(layer.expert(i), (0.0, 0.0)) for i in range(layer.experts.num_experts)]
        own = everyone[index]
        values = [own[n] or max(amax[n] for amax in everyone) for n in range(2)]
        if not all(math.isfinite(value) and value > 0 for value in values):
            raise UserError(
                f"calibration of {layer.prefix} gave input maxima {values} for expert {index}: they must be "
                "finite, and positive for at least one expert. Calibrate with more text, or without"
            )
        return InputAmax(*values)


class Mxfp4:
    """GPT-OSS's tensors, for the experts of any architecture."""

    format = Format.MXFP4

    def groups(self, layer: ExpertLayer) -> list[list[Entry]]:
        experts, inner, hidden = layer.experts.num_experts, layer.experts.intermediate, layer.experts.hidden
        return [
            [
                *self._entries(f"{layer.prefix}.gate_up_proj", (experts, 2 * inner, hidden)),
                *self._entries(f"{layer.prefix}.down_proj", (experts, hidden, inner)),
            ]
        ]

    def write(self, layer: ExpertLayer, index: int, weights: Mapping[str, Tensor], to: ShardWriter) -> None:
        gate_up = torch.cat((weights["gate_proj"], weights["up_proj"]))
        stacked = {
            "gate_up_proj": layouts.interleave_gate_up_rows(gate_up),
            "down_proj": weights["down_proj"],
        }
        for projection, weight in stacked.items():
            packed = encode(weight, Format.MXFP4, name=f"{layer.expert(index)}.{projection}")
            assert packed.scale is not None
            blocks = packed.data.unflatten(-1, (-1, mxfp4.GROUP // 2))
            to.write(f"{layer.prefix}.{projection}_blocks", blocks[None], first=index)
            to.write(f"{layer.prefix}.{projection}_scales", packed.scale[None], first=index)

    def declare(self, kept: Sequence[str], quantized: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
        return {"quant_method": "mxfp4", "modules_to_not_convert": list(kept)}, {}

    def _entries(self, name: str, shape: tuple[int, int, int]) -> list[Entry]:
        experts, rows, columns = shape
        groups = columns // mxfp4.GROUP
        return [
            Entry(f"{name}_blocks", torch.uint8, (experts, rows, groups, mxfp4.GROUP // 2)),
            Entry(f"{name}_scales", torch.uint8, (experts, rows, groups)),
        ]


class Fp8(_ByExpert):
    """DeepSeek-V3's blocks of 128 x 128; activations are quantised as they come. Under the names of
    DeepSeek-V4's releases for that `model_type`, whose experts are in MXFP4 where nothing else is said."""

    format = Format.FP8

    def __init__(self, model_type: str = ""):
        of_v4 = model_type == "deepseek_v4"
        self._scale = "scale" if of_v4 else "weight_scale_inv"
        self._declared = {"expert_dtype": "fp8"} if of_v4 else {}

    def write(self, layer: ExpertLayer, index: int, weights: Mapping[str, Tensor], to: ShardWriter) -> None:
        for projection, weight in weights.items():
            module = layer.module(index, projection)
            packed = encode(weight, Format.FP8, name=module)
            assert packed.scale is not None
            to.write(f"{module}.weight", packed.data)
            to.write(f"{module}.{self._scale}", packed.scale)

    def declare(self, kept: Sequence[str], quantized: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
        config = self._declared | {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": [fp8.BLOCK, fp8.BLOCK],
            "modules_to_not_convert": list(kept),
        }
        return config, {}

    def entries(self, module: str, shape: tuple[int, int]) -> list[Entry]:
        rows, columns = shape
        blocks = (-(-rows // fp8.BLOCK), -(-columns // fp8.BLOCK))
        return [
            Entry(f"{module}.weight", fp8.DTYPE, shape),
            Entry(f"{module}.{self._scale}", torch.float32, blocks),
        ]


class Int4(_ByExpert):
    """compressed-tensors' W4A16 in groups of 32, symmetric. dtype: of the checkpoint's other weights."""

    format = Format.INT4

    def __init__(self, dtype: str):
        self._dtype = dtype

    def write(self, layer: ExpertLayer, index: int, weights: Mapping[str, Tensor], to: ShardWriter) -> None:
        for projection, weight in weights.items():
            module = layer.module(index, projection)
            packed = encode(weight, Format.INT4, name=module)
            assert packed.scale is not None
            to.write(f"{module}.weight_packed", packed.data.view(torch.int32))
            to.write(f"{module}.weight_scale", packed.scale)
            to.write(f"{module}.weight_shape", torch.tensor(weight.shape))

    def declare(self, kept: Sequence[str], quantized: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Modules are listed one by one: the library matches names whole. Scales are taken to be of the
        checkpoint's dtype unless it says otherwise."""
        scheme: dict[str, Any] = {
            "num_bits": 4,
            "type": "int",
            "symmetric": True,
            "strategy": "group",
            "group_size": int4.GROUP,
            "dynamic": False,
        }
        if self._dtype != "bfloat16":
            scheme["scale_dtype"] = "torch.bfloat16"
        config = {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {
                "group_0": {"targets": ["Linear"], "weights": scheme, "input_activations": None}
            },
            "ignore": list(kept),
        }
        return config, {}

    def entries(self, module: str, shape: tuple[int, int]) -> list[Entry]:
        rows, columns = shape
        return [
            Entry(f"{module}.weight_packed", torch.int32, (rows, columns // 8)),
            Entry(f"{module}.weight_scale", torch.bfloat16, (rows, columns // int4.GROUP)),
            Entry(f"{module}.weight_shape", torch.int64, (2,)),
        ]


def summarize(kept: Iterable[str], quantized: Iterable[str]) -> list[str]:
    """Modules as ModelOpt lists them: the shortest `prefix*` or `prefix.*` that spares what is quantised.

    vLLM and SGLang fuse projections (`qkv_proj`), so that `self_attn*` matches where names would not.
    """
    in_order = sorted(quantized)
    return sorted({_shortest(name, in_order) for name in kept})


def _shortest(name: str, quantized: Sequence[str]) -> str:
    for end, character in enumerate(name):
        if character == ".":
            for prefix in (name[:end], name[: end + 1]):
                if not _any_begins_with(prefix, quantized):
                    return f"{prefix}*"
    return name


def _any_begins_with(prefix: str, in_order: Sequence[str]) -> bool:
    at = bisect_left(in_order, prefix)
    return at < len(in_order) and in_order[at].startswith(prefix)
