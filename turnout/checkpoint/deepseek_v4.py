"""DeepSeek-V4 as released: linear layers in FP8, experts in MXFP4 or, of base models, in FP8.

| part                 | `.weight`              | `.scale`                                         |
|----------------------|------------------------|--------------------------------------------------|
| linear layers        | e4m3 [N, K]            | [N/128, K/128], e8m0 or, of base models, float32 |
| experts in fp4       | int8 [N, K/2], codes   | e8m0 [N, K/32]                                   |
| experts in fp8       | e4m3 [N, K]            | as of linear layers                              |

`expert_dtype` in config.json says which of these experts are in. An e8m0 byte b is 2 ** (b - 127).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from turnout.checkpoint.experts import PerExpert, StoredExperts, Wanted
from turnout.checkpoint.files import FLOATS, TensorFiles
from turnout.checkpoint.fp8 import Fp8Blocks
from turnout.checkpoint.parts import E8M0_SCALE, POSITIVE, Part
from turnout.formats.experts import ExpertWeights
from turnout.formats.fp8 import BLOCK
from turnout.formats.mxfp4 import GROUP
from turnout.formats.packed import PackedTensor
from turnout.vocabulary import Format

E8M0 = torch.float8_e8m0fnu
DENSE = Fp8Blocks(Part(".scale", (E8M0, *FLOATS), rows=BLOCK, columns=BLOCK, sound=POSITIVE))
CODES = Part(".weight", (torch.int8, torch.uint8), columns=2)
SCALES = Part(".scale", (E8M0, torch.uint8), columns=GROUP, sound=E8M0_SCALE)


@dataclass(frozen=True)
class DeepseekV4:
    """experts_format: MXFP4 or FP8."""

    experts_format: Format

    def linear(self, files: TensorFiles, module: str, n: int, k: int) -> PackedTensor:
        return DENSE.linear(files, module, n, k)

    def experts(self, wanted: Wanted) -> ExpertWeights:
        if self.experts_format == Format.FP8:
            return DENSE.experts(wanted)
        wanted.require_columns(GROUP)
        stored = PerExpert(wanted)
        return stored.weights(lambda matrix: _matrix(stored, matrix))


def _matrix(stored: StoredExperts, matrix: str) -> PackedTensor:
    data, scale = stored.read(matrix, CODES), stored.read(matrix, SCALES)
    return PackedTensor(format=Format.MXFP4, data=data.view(torch.uint8), scale=scale.view(torch.uint8))
