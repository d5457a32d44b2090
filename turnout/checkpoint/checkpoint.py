"""One checkpoint folder, opened: tensors by name, dense layers decoded, experts in canonical form."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from turnout.checkpoint import bf16, compressed_tensors, fp8, fp8_tensor, modelopt, mxfp4, nvfp4
from turnout.checkpoint.config import CONFIG, read_config
from turnout.checkpoint.experts import ExpertShape, Wanted
from turnout.checkpoint.files import FLOATS, ProgressFn, TensorFiles
from turnout.checkpoint.headers import TensorMeta
from turnout.checkpoint.locate import require_folder
from turnout.checkpoint.parts import decode_by_rows
from turnout.checkpoint.quantization import Quantization, parse_quantization
from turnout.formats.experts import ExpertWeights
from turnout.formats.packed import PackedTensor
from turnout.vocabulary import Format

SPELLINGS = {"modelopt": modelopt.SPELLING, "compressed-tensors": compressed_tensors.SPELLING}
# Tensors that turn a stored weight into the real one; a plain weight stands alone.
COMPANIONS = (".weight_scale", ".weight_scale_inv", ".weight_packed")


def open_checkpoint(folder: Path, progress: ProgressFn | None = None) -> Checkpoint:
    """Read the configuration and every file's header; weights are read when they are asked for.

    `progress(what, done, total)` is called after each tensor with its name and the bytes of the
    checkpoint dealt with so far, tensors that only other ranks need included. Raises CheckpointError
    for whatever the headers show to be wrong, UserError for a quantisation that is not supported.
    """
    return Checkpoint(folder, progress)


class Checkpoint:
    """`config`: config.json as read_config gives it. `quantization`: what it says about number formats."""

    def __init__(self, folder: Path, progress: ProgressFn | None = None):
        require_folder(folder)
        self.folder = folder
        self.config = read_config(folder)
        self.quantization: Quantization = parse_quantization(self.config, folder / CONFIG)
        self._files = TensorFiles(folder, progress)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files; they are opened again if more is read."""
        self._files.close()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors in the folder."""
        return self._files.nbytes

    def names(self) -> list[str]:
        return list(self._files)

    def has(self, name: str) -> bool:
        return name in self._files

    def meta(self, name: str) -> TensorMeta:
        """File, dtype, shape and bytes of a tensor; raises CheckpointError if there is none."""
        return self._files.meta(name)

    def unread(self) -> list[str]:
        """Tensors that were neither read nor belong to another rank's experts."""
        return self._files.unread()

    def tensor(
        self,
        name: str,
        shape: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        *,
        first: int = 0,
        count: int | None = None,
    ) -> Tensor:
        """A tensor as stored, or a plain one (bf16, f16, f32) converted to `dtype`; on the CPU.

        `count` (default: all) entries of its leading dimension from `first` on, read alone. Raises
        CheckpointError if it is missing, has another shape than `shape`, or is not plain although `dtype`
        was given.
        """
        if dtype is None:
            self._files.expect(name, shape)
            return self._files.read(name, first=first, count=count)
        meta = self._files.expect(name, shape, FLOATS)
        out = torch.empty(meta.shape if count is None else (count, *meta.shape[1:]), dtype=dtype)
        self._files.read_into(name, out, first=first)
        return out

    def linear(
        self,
        module: str,
        shape: tuple[int, int],
        dtype: torch.dtype,
        *,
        first: int = 0,
        count: int | None = None,
    ) -> Tensor:
        """The weight [N, K] of the dense layer called `module`, decoded to `dtype`; its bias is a `tensor`.

        `count` (default: all) of its rows from `first` on. A module that the configuration calls quantised
        may still be stored plain (routers and lm_head of many FP8 checkpoints are, unlisted): a float weight
        without scales is taken as it is.
        """
        if self._is_plain(module):
            self._files.expect(f"{module}.weight", shape, FLOATS, why=bf16.WHY)
            return self.tensor(f"{module}.weight", shape, dtype, first=first, count=count)
        decoded = decode_by_rows(self._packed(module, shape), dtype)
        return decoded if count in (None, len(decoded)) else decoded[first : first + count].clone()

    def experts(
        self, prefix: str, shape: ExpertShape, *, first: int = 0, count: int | None = None
    ) -> ExpertWeights:
        """Experts `first .. first + count` (default: all from `first`) of the layer at `prefix`.

        Reads these experts alone, except that input scales are those of all experts of the layer.
        """
        count = shape.num_experts - first if count is None else count
        if first < 0 or count < 1 or first + count > shape.num_experts:
            raise ValueError(f"experts {first}..{first + count} of {shape.num_experts}")
        format, quantized_activations = self.experts_format(prefix)
        wanted = Wanted(
            files=self._files,
            config=self.config,
            prefix=prefix,
            shape=shape,
            format=format,
            first=first,
            count=count,
        )
        weights = self._experts(wanted, quantized_activations)
        for other in wanted.others:
            self._files.set_aside(self._files.under(f"{prefix}.{other}."))
        return weights

    def experts_format(self, prefix: str) -> tuple[Format, bool]:
        """(format, whether activations were quantised too) of the experts."""
        return self.quantization.experts_format(prefix)

    def _experts(self, wanted: Wanted, quantized_activations: bool) -> ExpertWeights:
        plain_readers = {
            Format.BF16: bf16.experts,
            Format.MXFP4: mxfp4.experts,
            Format.FP8: self._fp8.experts,
        }
        if wanted.format in plain_readers:
            return plain_readers[wanted.format](wanted)
        spelling = SPELLINGS[self.quantization.method]
        return nvfp4.experts(wanted, spelling, quantized_activations=quantized_activations)

    def _packed(self, module: str, shape: tuple[int, int]) -> PackedTensor:
        if self.quantization.format == Format.FP8:
            return self._fp8.linear(self._files, module, *shape)
        return nvfp4.linear(self._files, module, *shape, SPELLINGS[self.quantization.method])

    @property
    def _fp8(self) -> ModuleType:
        return fp8_tensor if self.quantization.method == "fp8_tensor" else fp8

    def _is_plain(self, module: str) -> bool:
        if not self.quantization.quantizes(module) or self.quantization.format == Format.MXFP4:
            return True
        name = f"{module}.weight"
        scaled = any(module + suffix in self._files for suffix in COMPANIONS)
        return name in self._files and not scaled and self._files.meta(name).dtype in FLOATS
