"""One checkpoint folder, opened: tensors by name, dense layers decoded, experts in canonical form."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from turnout.checkpoint import (
    bf16,
    compressed_tensors,
    deepseek_v4,
    fp8,
    fp8_channel,
    fp8_tensor,
    int4,
    modelopt,
    mxfp4,
    mxfp4_linear,
    nvfp4,
)
from turnout.checkpoint.config import CONFIG, read_config
from turnout.checkpoint.experts import ExpertShape, Wanted
from turnout.checkpoint.files import FLOATS, TensorFiles
from turnout.checkpoint.headers import TensorMeta
from turnout.checkpoint.locate import require_folder
from turnout.checkpoint.parts import decode_by_rows
from turnout.checkpoint.quantization import Quantization
from turnout.checkpoint.quantization_config import parse_quantization
from turnout.formats.experts import ExpertWeights
from turnout.formats.packed import PackedTensor
from turnout.vocabulary import Format

logger = logging.getLogger(__name__)

# Tensors that turn a stored weight into the real one; a plain weight has none.
COMPANIONS = (".weight_scale", ".weight_scale_inv", ".weight_packed", ".scale")


class Reader(Protocol):
    """How one published format stores a linear layer, and the experts of a layer."""

    def linear(self, files: TensorFiles, module: str, n: int, k: int) -> PackedTensor: ...

    def experts(self, wanted: Wanted) -> ExpertWeights: ...


# By `Quantization.method`. GPT-OSS's MXFP4 is for experts only, and not here.
READERS: dict[str, Callable[[Quantization], Reader]] = {
    "modelopt": lambda q: nvfp4.Nvfp4(modelopt.SPELLING, q.quantized_activations),
    "compressed-tensors": lambda q: nvfp4.Nvfp4(compressed_tensors.SPELLING, q.quantized_activations),
    "fp8": lambda q: fp8.DEEPSEEK,
    "deepseek_v4": lambda q: deepseek_v4.DeepseekV4(q.format),
    "fp8_block": lambda q: fp8.COMPRESSED,
    "fp8_channel": lambda q: fp8_channel,
    "fp8_tensor": lambda q: fp8_tensor,
    "int4": lambda q: int4.Int4(q.group, q.symmetric, packed=not q.decodes_experts),
    "mxfp4_compressed": lambda q: mxfp4_linear.COMPRESSED,
    "mxfp4_modelopt": lambda q: mxfp4_linear.MODELOPT,
}


def open_checkpoint(folder: Path) -> Checkpoint:
    """Read the configuration and every file's header; weights are read when they are asked for.

    Raises CheckpointError for whatever the headers show to be wrong, UserError for a quantisation that is not
    supported.
    """
    return Checkpoint(folder)


class Checkpoint:
    """`config`: config.json as read_config gives it. `quantization`: what it says about number formats."""

    def __init__(self, folder: Path):
        require_folder(folder)
        self.folder = folder
        self.config = read_config(folder)
        self.quantization: Quantization = parse_quantization(self.config, folder / CONFIG)
        self._files = TensorFiles(folder)
        self._told = False  # that experts are decoded

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

    def pin(self) -> None:
        """Read experts into page-locked memory from now on, from which a GPU copies at full speed."""
        self._files.pinned = True

    def names(self) -> list[str]:
        return list(self._files)

    def rename(self, pairs: Sequence[tuple[str, str]]) -> None:
        """`re.sub` of the names of all tensors, pair by pair; before anything is read."""
        if pairs:
            self._files.rename(pairs)

    def has(self, name: str) -> bool:
        return name in self._files

    def meta(self, name: str, *, why: str = "") -> TensorMeta:
        """File, dtype, shape and bytes of a tensor; raises CheckpointError, with `why`, if there is none."""
        return self._files.meta(name, why=why)

    def unread(self) -> list[str]:
        """Tensors that were neither read nor belong to another rank's experts."""
        return self._files.unread()

    def set_aside(self, names: Iterable[str]) -> None:
        """Count tensors as dealt with although nothing reads them."""
        self._files.set_aside(names)

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

        `count` (default: all) entries of its leading dimension from `first` on, and reads only them. Raises
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
        decoded = decode_by_rows(self.packed(module, shape), dtype)
        return decoded if count in (None, len(decoded)) else decoded[first : first + count].clone()

    def linear_into(
        self,
        module: str,
        shape: tuple[int, int],
        out: Tensor,
        staging: Tensor,
        *,
        first: int = 0,
        first_column: int = 0,
    ) -> None:
        """Fill `out` [n, k], on any device, with rows from `first` and columns from `first_column` on of what
        `linear` gives. staging: uint8, on the CPU, that rows come through which are stored plain.
        """
        if self._is_plain(module):
            name = f"{module}.weight"
            self._files.expect(name, shape, FLOATS, why=bf16.WHY)
            self._files.read_staged(name, out, staging, first=first, first_column=first_column)
            return
        decoded = decode_by_rows(self.packed(module, shape), out.dtype)
        out.copy_(decoded[first : first + out.shape[0], first_column : first_column + out.shape[1]])

    def is_fp8(self, module: str) -> bool:
        """Whether the dense layer called `module` is stored in FP8."""
        return self.quantization.is_fp8(module) and not self._is_plain(module)

    def packed(self, module: str, shape: tuple[int, int]) -> PackedTensor:
        """The weight [N, K] of a dense layer that is stored quantised, as it is stored."""
        found = self.quantization.of(module)
        assert found is not None, "whoever asks knows that it is"
        return READERS[found.method](found).linear(self._files, module, *shape)

    def experts(
        self, prefix: str, shape: ExpertShape, *, first: int = 0, count: int | None = None
    ) -> ExpertWeights:
        """Experts `first .. first + count` (default: all from `first`) of the layer at `prefix`.

        Reads only these experts, except that input scales are those of all experts of the layer.
        """
        count = shape.num_experts - first if count is None else count
        if first < 0 or count < 1 or first + count > shape.num_experts:
            raise ValueError(f"experts {first}..{first + count} of {shape.num_experts}")
        quantization = self.quantization.of_experts(prefix)
        wanted = Wanted(
            files=self._files,
            config=self.config,
            prefix=prefix,
            shape=shape,
            stored=quantization.stored if quantization else Format.BF16,
            first=first,
            count=count,
        )
        weights = self._experts(wanted, quantization) if quantization else bf16.experts(wanted)
        for other in wanted.others:
            self._files.set_aside(self._files.under(f"{prefix}.{other}."))
        return weights

    def experts_format(self, prefix: str) -> tuple[Format, bool]:
        """(format, whether activations were quantised too) of the experts."""
        return self.quantization.experts_format(prefix)

    def _experts(self, wanted: Wanted, quantization: Quantization) -> ExpertWeights:
        if quantization.method == "mxfp4":
            return mxfp4.experts(wanted)
        if quantization.decodes_experts and not self._told:
            self._told = True
            logger.info(
                "%s: no runner multiplies in experts stored like this (%s): they are decoded while they "
                "load, and take the memory of unquantised ones",
                self.folder,
                quantization.method,
            )
        return READERS[quantization.method](quantization).experts(wanted)

    def _is_plain(self, module: str) -> bool:
        if self.quantization.of(module) is None:
            return True
        name = f"{module}.weight"
        scaled = any(module + suffix in self._files for suffix in COMPANIONS)
        return name in self._files and not scaled and self._files.meta(name).dtype in FLOATS
