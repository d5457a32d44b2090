"""MXFP4 of single linear layers, experts one by one, in the spellings of llm-compressor and of ModelOpt.

| published by                                            | codes uint8 [N, K/2] | scales [N, K/32], e8m0   |
|---------------------------------------------------------|----------------------|--------------------------|
| compressed-tensors, format `mxfp4-pack-quantized`        | `.weight_packed`     | `.weight_scale`          |
| ModelOpt, `MXFP4` and `W4A8_MXFP4_FP8`                   | `.weight`            | `.weight_scale`          |

A scale is the byte b of 2 ** (b - 127), stored as uint8 or as e8m0. Inputs that the writer meant to be
quantised stay as they are, so calibrated input scales are left unused.

Sources: compressed-tensors, `compressors/mxfp4`; ModelOpt, `quantization/qtensor/mxfp4_tensor.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from turnout.checkpoint.experts import PerExpert, StoredExperts, Wanted, set_aside_input_scales
from turnout.checkpoint.files import TensorFiles
from turnout.checkpoint.parts import E8M0_SCALE, Part, require_columns
from turnout.formats.experts import ExpertWeights
from turnout.formats.mxfp4 import GROUP
from turnout.formats.packed import PackedTensor
from turnout.vocabulary import Format

SCALE = Part(".weight_scale", (torch.uint8, torch.float8_e8m0fnu), columns=GROUP, sound=E8M0_SCALE)
WHY = "config.json says that this module is stored as MXFP4"


@dataclass(frozen=True)
class Mxfp4Linear:
    codes: Part
    input_scale: str

    def linear(self, files: TensorFiles, module: str, n: int, k: int) -> PackedTensor:
        require_columns(files, module, k, GROUP)
        data, scale = (part.read(files, module, n, k, WHY) for part in (self.codes, SCALE))
        files.set_aside([module + self.input_scale])
        return PackedTensor(format=Format.MXFP4, data=data, scale=scale.view(torch.uint8))

    def experts(self, wanted: Wanted) -> ExpertWeights:
        wanted.require_columns(GROUP)
        stored = PerExpert(wanted)
        set_aside_input_scales(wanted, stored, self.input_scale)
        return stored.weights(lambda matrix: self._matrix(stored, matrix))

    def _matrix(self, stored: StoredExperts, matrix: str) -> PackedTensor:
        data, scale = stored.read(matrix, self.codes), stored.read(matrix, SCALE)
        return PackedTensor(format=Format.MXFP4, data=data, scale=scale.view(torch.uint8))


COMPRESSED = Mxfp4Linear(Part(".weight_packed", (torch.uint8,), columns=2), ".input_global_scale")
MODELOPT = Mxfp4Linear(Part(".weight", (torch.uint8,), columns=2), ".input_scale")
