"""From a bf16 (float16, float32) checkpoint to NVFP4, MXFP4, FP8 or INT4: routed experts only, one at a time.

Attention, routers, norms, embeddings, shared experts and the head are copied as they are and listed as
not quantised: together they are a few percent of the weights and most of the loss. `bf16` quantises
nothing: it rounds a float32 checkpoint to bf16.

Memory stays at one expert's weights whatever the size of the model, and the output appears whole or not
at all (see writer.py). Which tensors each format consists of is encoders.py's business.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from turnout.checkpoint.config import CONFIG, MODELOPT_CONFIG, read_config
from turnout.checkpoint.encoders import (
    PROJECTIONS,
    Encoder,
    ExpertLayer,
    Fp8,
    InputAmax,
    Int4,
    Mxfp4,
    Nvfp4,
)
from turnout.checkpoint.errors import CheckpointError
from turnout.checkpoint.experts import ExpertShape, Wanted, stored_experts
from turnout.checkpoint.files import FLOATS, ProgressFn, TensorFiles
from turnout.checkpoint.parts import PLAIN
from turnout.checkpoint.quantization_config import stored_dtype
from turnout.checkpoint.writer import Entry, ShardWriter, new_folder, write_json
from turnout.errors import UserError
from turnout.formats.codec import check
from turnout.vocabulary import Format

__all__ = ["OUTPUT_FORMATS", "Calibration", "InputAmax", "quantize"]

Calibration = Mapping[str, tuple[float, float]]

OUTPUT_FORMATS = (Format.NVFP4, Format.MXFP4, Format.FP8, Format.INT4, Format.BF16)
SHARD_BYTES = 5_000_000_000
_COPY_BYTES = 1 << 26  # of a large tensor, such as the embeddings, at a time
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight")
_STACKED = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)")  # of all experts of a layer
_COPIED_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".tiktoken")
_COPIED_STEMS = ("LICENSE", "NOTICE")


def quantize(
    source: Path,
    out: Path,
    format: str,
    *,
    calibration: Calibration | Callable[[], Calibration] | None = None,
    progress: ProgressFn | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write the checkpoint folder `source` to the new folder `out` with its routed experts in `format`.

    calibration (nvfp4 only): InputAmax by expert, such as `model.layers.0.mlp.experts.3`; with it the
    checkpoint asks for quantised activations (W4A4), without it for weights only (W4A16). An expert that
    is absent or saw no token (0) takes its layer's largest values. A function that returns it is called
    once everything has been checked and `out` is reserved.

    progress(tensor, done, total) hears of each tensor of the source, in bytes.

    Raises UserError, before anything is written, for an unknown format, a source that is quantised
    already or has no routed experts, sizes that the format cannot hold, an `out` that exists, cannot be
    written or does not fit; and while writing for weights that are not finite or files that are damaged.
    """
    if format not in OUTPUT_FORMATS:
        raise UserError(f"unknown format {format!r}; quantize writes {', '.join(OUTPUT_FORMATS)}")
    format = Format(format)
    if calibration is not None and format != Format.NVFP4:
        raise UserError(f"calibrated activation scales belong to nvfp4; {format} has none")
    config = _unquantized_config(source)
    with closing(TensorFiles(source, progress)) as files:
        known = {} if callable(calibration) else calibration
        job = _bf16_job(files, config) if format == Format.BF16 else _job(files, config, format, known)
        groups = job.groups()
        needed = sum(entry.nbytes for group in groups for entry in group)
        with new_folder(out, needed_bytes=needed) as folder:
            if callable(calibration):
                job = _job(files, config, format, calibration())
            writer = ShardWriter(folder, groups, shard_bytes)
            job.run(writer)
            writer.finish()
            _copy_files(source, folder)
            _write_config(folder, config, job)


@dataclass(frozen=True, kw_only=True)
class _Job:
    """What is copied and what is encoded."""

    files: TensorFiles
    config: Mapping[str, Any]  # of the source
    copied: tuple[str, ...]
    dtypes: Mapping[str, torch.dtype]  # of copied tensors that are rounded to another one
    layers: tuple[ExpertLayer, ...] = ()
    encoder: Encoder | None = None
    changes: Mapping[str, Any]  # to config.json, other than quantization_config

    def groups(self) -> list[list[Entry]]:
        """Every tensor of the output, in the order in which `run` writes them."""
        groups = [[Entry(n, self._dtype(n), self.files.meta(n).shape)] for n in self.copied]
        for layer in self.layers:
            assert self.encoder is not None
            groups += self.encoder.groups(layer)
        return groups

    def run(self, writer: ShardWriter) -> None:
        for name in self.copied:
            self._copy(name, writer)
        for layer in self.layers:
            assert self.encoder is not None
            for index in range(layer.experts.num_experts):
                self.encoder.write(layer, index, self._read(layer, index), writer)

    def _read(self, layer: ExpertLayer, index: int) -> dict[str, Tensor]:
        """Gate, up and down of one expert, by PROJECTIONS, however they are stored."""
        wanted = Wanted(
            files=self.files,
            config=dict(self.config),
            prefix=layer.prefix,
            shape=layer.experts,
            stored=Format.BF16,
            first=index,
            count=1,
        )
        stored = stored_experts(wanted, PLAIN)
        (w13,), (w2,) = (stored.read(matrix, PLAIN) for matrix in ("w13", "w2"))
        return dict(zip(PROJECTIONS, (*w13.chunk(2), w2), strict=True))

    def _copy(self, name: str, writer: ShardWriter) -> None:
        meta, dtype = self.files.meta(name), self._dtype(name)
        rows = meta.shape[0] if meta.shape else 1
        step = max(1, rows * _COPY_BYTES // max(meta.nbytes, 1))
        if step >= rows:
            writer.write(name, self.files.read(name).to(dtype))
            return
        for first in range(0, rows, step):
            part = self.files.read(name, first=first, count=min(step, rows - first))
            writer.write(name, part.to(dtype), first=first)

    def _dtype(self, name: str) -> torch.dtype:
        return self.dtypes.get(name, self.files.meta(name).dtype)


def _job(
    files: TensorFiles,
    config: Mapping[str, Any],
    format: Format,
    calibration: Calibration | None,
) -> _Job:
    layers = _expert_layers(files, config)
    for layer in layers:
        for projection in PROJECTIONS:
            check(format, layer.shape(projection), f"{layer.module(0, projection)}.weight")
        _refuse_bias(files, layer, format)
    _check_calibration(calibration, layers)
    encoders: dict[Format, Encoder] = {
        encoder.format: encoder
        for encoder in (
            Nvfp4(calibration),
            Mxfp4(),
            Fp8(str(config.get("model_type"))),
            Int4(stored_dtype(config)),
        )
    }
    copied = tuple(name for name in files if not _EXPERT.fullmatch(name) and not _STACKED.fullmatch(name))
    return _Job(
        files=files,
        config=config,
        copied=copied,
        dtypes={},
        layers=layers,
        encoder=encoders[format],
        changes={},
    )


def _bf16_job(files: TensorFiles, config: Mapping[str, Any]) -> _Job:
    """Round what has the checkpoint's own dtype; what a bf16 checkpoint keeps in float32 stays so."""
    own = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    metas = {name: files.meta(name).dtype for name in files}
    rounded = {name: torch.bfloat16 for name, dtype in metas.items() if own == str(dtype)[len("torch.") :]}
    keys = [key for key in ("dtype", "torch_dtype") if key in config] or ["dtype"]
    changes = dict.fromkeys(keys, "bfloat16")
    return _Job(files=files, config=config, copied=tuple(files), dtypes=rounded, changes=changes)


def _unquantized_config(source: Path) -> dict[str, Any]:
    config = read_config(source)
    record = config.get("quantization_config") or config.get("compression_config")
    if record is not None:
        record = record if isinstance(record, dict) else {}
        method = " ".join(
            str(record[key]) for key in ("quant_method", "quant_algo", "format") if key in record
        )
        raise UserError(
            f"{source} is quantised already ({method or 'its config.json says so'}); "
            "quantize starts from bf16, float16 or float32 weights"
        )
    return config


def _expert_layers(files: TensorFiles, config: Mapping[str, Any]) -> tuple[ExpertLayer, ...]:
    """Every MoE layer, with every projection of every expert present and of the right shape and dtype."""
    counts: dict[str, int] = {}
    for name in files:
        if match := _EXPERT.fullmatch(name):
            counts[match[1]] = max(counts.get(match[1], 0), int(match[2]) + 1)
        elif match := _STACKED.fullmatch(name):
            counts[match[1]] = files.meta(name).shape[0]
    if not counts:
        raise CheckpointError(
            "has no routed experts to quantise",
            file=files.folder,
            expected="tensors named ....experts.0.gate_proj.weight and so on, or ....experts.gate_up_proj",
            found="none",
        )
    for prefix, count in counts.items():
        declared = _declared_experts(config)
        if declared is not None and count != declared:
            raise CheckpointError(
                f"{prefix} has the wrong number of experts", file=files.folder, expected=declared, found=count
            )
    return tuple(
        _stacked_layer(files, config, prefix, count)
        if f"{prefix}.gate_up_proj" in files
        else _expert_layer(files, prefix, count)
        for prefix, count in counts.items()
    )


def _stacked_layer(files: TensorFiles, config: Mapping[str, Any], prefix: str, count: int) -> ExpertLayer:
    """Its experts are written one by one; their sizes are checked when they are read."""
    hidden = _text(config).get("hidden_size")
    down = files.expect(f"{prefix}.down_proj", None, FLOATS)
    if len(down.shape) != 3 or not isinstance(hidden, int) or hidden not in down.shape[1:]:
        expected = f"three dimensions, one of them hidden_size ({hidden})"
        raise files.wrong(f"{prefix}.down_proj", "has the wrong shape", expected, list(down.shape))
    inner = down.shape[1] * down.shape[2] // hidden
    return ExpertLayer(
        prefix=prefix, experts=ExpertShape(num_experts=count, intermediate=inner, hidden=hidden)
    )


def _refuse_bias(files: TensorFiles, layer: ExpertLayer, format: Format) -> None:
    """MXFP4 is written stacked, next to stacked biases as they are; nothing reads the other formats so."""
    name = f"{layer.prefix}.down_proj_bias"
    if name in files and format != Format.MXFP4:
        raise files.wrong(
            name, f"is a bias of experts, for which {format} has no place", "none", "a bias", "Give mxfp4"
        )


def _expert_layer(files: TensorFiles, prefix: str, count: int) -> ExpertLayer:
    names = ("w1", "w3", "w2") if f"{prefix}.0.w1.weight" in files else PROJECTIONS
    first = files.expect(f"{prefix}.0.{names[0]}.weight", None, FLOATS)
    if len(first.shape) != 2:
        raise files.wrong(f"{prefix}.0.{names[0]}.weight", "is not a matrix", "[I, H]", list(first.shape))
    rows, columns = first.shape
    shape = ExpertShape(num_experts=count, intermediate=rows, hidden=columns)
    layer = ExpertLayer(prefix=prefix, experts=shape, names=names)
    for index in range(count):
        for projection in PROJECTIONS:
            name = f"{layer.module(index, projection)}.weight"
            files.expect(name, layer.shape(projection), FLOATS, why="All experts of a layer are needed")
    return layer


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of the language model, which those of other parts may stand next to."""
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config


def _declared_experts(config: Mapping[str, Any]) -> int | None:
    for key in ("num_experts", "n_routed_experts", "num_local_experts"):
        if isinstance(_text(config).get(key), int):
            return _text(config)[key]
    return None


def _check_calibration(calibration: Calibration | None, layers: tuple[ExpertLayer, ...]) -> None:
    known = {layer.expert(index) for layer in layers for index in range(layer.experts.num_experts)}
    for name in calibration or {}:
        if name not in known:
            example = layers[0].expert(0)
            raise UserError(
                f"calibration names {name!r}, which is no expert here; they are called {example!r}"
            )


def _copy_files(source: Path, folder: Path) -> None:
    """Tokenizer, generation settings, chat template, licence: everything small but weights and config."""
    for path in sorted(source.iterdir()):
        ours = path.name in (CONFIG, MODELOPT_CONFIG) or path.name.endswith(".index.json")
        wanted = path.suffix in _COPIED_SUFFIXES or path.stem in _COPIED_STEMS
        if path.is_file() and wanted and not ours:
            shutil.copyfile(path, folder / path.name)


def _write_config(folder: Path, source_config: Mapping[str, Any], job: _Job) -> None:
    """config.json comes last: without it the folder is no model."""
    config = {**source_config, **job.changes}
    if job.encoder is not None:
        kept = {n.removesuffix(".weight") for n in job.copied if _is_linear(n, job.files)}
        kept.add("lm_head")  # a module even where its weights are those of the embeddings
        quantized = [
            layer.module(index, projection)
            for layer in job.layers
            for index in range(layer.experts.num_experts)
            for projection in PROJECTIONS
        ]
        config["quantization_config"], files = job.encoder.declare(sorted(kept), quantized)
        for name, value in files.items():
            write_json(folder / name, value)
    write_json(folder / CONFIG, config)


def _is_linear(name: str, files: TensorFiles) -> bool:
    """Matrices other than embeddings; the lists of what was not quantised are about linear layers."""
    return name.endswith(".weight") and len(files.meta(name).shape) == 2 and "embed" not in name
