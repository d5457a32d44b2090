"""NVFP4 in either of its published spellings; modelopt.py and compressed_tensors.py say how each spells it.

Legend: E experts of the model, n experts wanted; matrices are [N, K].
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from turnout.checkpoint.errors import CheckpointError
from turnout.checkpoint.experts import StoredExperts, Wanted, set_aside_input_scales, stored_experts
from turnout.checkpoint.files import TensorFiles
from turnout.checkpoint.parts import E4M3, E4M3_SCALE, Part, read_scalar, require_columns
from turnout.formats.experts import ExpertWeights, InputScales
from turnout.formats.nvfp4 import GROUP
from turnout.formats.packed import PackedTensor
from turnout.formats.scales import merge_gate_up
from turnout.vocabulary import Format

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Spelling:
    """Names of the tensors of one linear layer, after its own name."""

    data: str
    scale: str
    global_scale: str
    input_scale: str
    reciprocal: bool  # the two global scales are stored as 1 / scale

    @property
    def parts(self) -> tuple[Part, Part]:
        """Codes uint8 [N, K/2] and block scales e4m3 [N, K/16]."""
        return (
            Part(self.data, (torch.uint8,), columns=2),
            Part(self.scale, (E4M3,), columns=GROUP, sound=E4M3_SCALE),
        )

    def scale_of(self, stored: Tensor) -> Tensor:
        return 1.0 / stored if self.reciprocal else stored


WHY = "config.json says that this module is stored as NVFP4"
WHY_INPUT = (
    "Activations are to be quantised with it, and 1 would be a guess: calibrate and export again, or "
    "declare the checkpoint weight-only (input_activations null)"
)


@dataclass(frozen=True)
class Nvfp4:
    spelling: Spelling
    quantized_activations: bool  # input scales are read: W4A4

    def linear(self, files: TensorFiles, module: str, n: int, k: int) -> PackedTensor:
        return _linear(files, module, n, k, self.spelling)

    def experts(self, wanted: Wanted) -> ExpertWeights:
        """The experts wanted; input scales, where activations are quantised, of all experts of the layer."""
        return _experts(wanted, self.spelling, quantized_activations=self.quantized_activations)


def _linear(files: TensorFiles, module: str, n: int, k: int, spelling: Spelling) -> PackedTensor:
    require_columns(files, module, k, GROUP)
    _refuse_smoothing(files, [module])
    data, scale = (part.read(files, module, n, k, WHY) for part in spelling.parts)
    stored = read_scalar(files, module + spelling.global_scale, WHY)
    files.set_aside([module + spelling.input_scale])  # dense layers multiply in the compute dtype
    return PackedTensor(
        format=Format.NVFP4, data=data, scale=scale, global_scale=spelling.scale_of(stored).reshape(())
    )


def _experts(wanted: Wanted, spelling: Spelling, *, quantized_activations: bool) -> ExpertWeights:
    wanted.require_columns(GROUP)
    stored = stored_experts(wanted, spelling.parts[0])
    _refuse_smoothing(wanted.files, stored.modules("w13") + stored.modules("w2"))
    experts = stored.weights(lambda matrix: _matrix(wanted, stored, matrix, spelling))
    if not quantized_activations:
        set_aside_input_scales(wanted, stored, spelling.input_scale)
        return experts
    w13, w2 = (_input_scale(wanted, stored, matrix, spelling) for matrix in ("w13", "w2"))
    return replace(experts, input_scales=InputScales(w13=w13, w2=w2))


def _matrix(wanted: Wanted, stored: StoredExperts, matrix: str, spelling: Spelling) -> PackedTensor:
    data, scale = (stored.read(matrix, part) for part in spelling.parts)
    columns = spelling.scale_of(stored.scalars(matrix, spelling.global_scale, wanted.local, WHY))
    if columns.shape[1] == 2:
        _unify(wanted, data, scale, columns)
    return PackedTensor(format=Format.NVFP4, data=data, scale=scale, global_scale=columns.amax(dim=1))


def _unify(wanted: Wanted, data: Tensor, scale: Tensor, columns: Tensor) -> None:
    """Bring gate and up of each expert to the larger of their two global scales [n, 2], in place.

    Kernels take one scale for both; dropping the other would be wrong by their ratio.
    """
    differ = (columns[:, 0] != columns[:, 1]).nonzero().flatten().tolist()
    half = data.shape[1] // 2
    for e in differ:
        gate, up = (
            PackedTensor(format=Format.NVFP4, data=data[e, rows], scale=scale[e, rows], global_scale=own)
            for rows, own in zip((slice(half), slice(half, None)), columns[e], strict=True)
        )
        merged = merge_gate_up(gate, up)
        assert merged.scale is not None, "nvfp4 weights carry block scales"
        data[e].copy_(merged.data)
        scale[e].copy_(merged.scale)
    if differ:
        logger.warning(
            "%s: gate and up have different global scales in %d of %d experts; requantised to the larger",
            wanted.prefix,
            len(differ),
            len(columns),
        )


def _input_scale(wanted: Wanted, stored: StoredExperts, matrix: str, spelling: Spelling) -> Tensor:
    """float32 [E]. Gate and up see the same input, quantised once: the larger scale covers both ranges."""
    columns = stored.scalars(matrix, spelling.input_scale, wanted.all, WHY_INPUT)
    return spelling.scale_of(columns).amax(dim=1)


def _refuse_smoothing(files: TensorFiles, modules: list[str]) -> None:
    """AWQ-style exports divide weights by a factor that activations must then be multiplied by."""
    for module in modules:
        name = f"{module}.pre_quant_scale"
        if name in files:
            raise CheckpointError(
                "means that activations must be scaled first (AWQ, SmoothQuant), which is not supported",
                file=files.meta(name).file,
                tensor=name,
                remedy="Take or export the NVFP4 checkpoint without it",
            )
