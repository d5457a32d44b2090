"""FP8 in 128 x 128 blocks, in three spellings of the scale, which multiplies in all of them.

| published by                          | scale               | shape                                    |
|---------------------------------------|---------------------|------------------------------------------|
| DeepSeek-V3 and its followers         | `.weight_scale_inv` | [ceil(N/128), ceil(K/128)]               |
| llm-compressor's FP8_BLOCK            | `.weight_scale`     | [ceil(N/128), ceil(K/128)]               |
| ModelOpt's FP8_PB_WO                  | `.weight_scale`     | [N/128, 1, K/128, 1], or as above        |

Scales are float32, of some families bfloat16. Activations are quantised as they come, or not at all
(FP8_PB_WO), so there are no input scales.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from turnout.checkpoint.experts import StoredExperts, Wanted, stored_experts
from turnout.checkpoint.files import FLOATS, TensorFiles
from turnout.checkpoint.parts import E4M3, POSITIVE, Part
from turnout.formats.experts import ExpertWeights
from turnout.formats.fp8 import BLOCK
from turnout.formats.packed import PackedTensor
from turnout.vocabulary import Format

DATA = Part(".weight", (E4M3,))
WHY = "config.json says that this module is stored as FP8 in blocks"


@dataclass(frozen=True)
class Fp8Blocks:
    scale: Part

    def linear(self, files: TensorFiles, module: str, n: int, k: int) -> PackedTensor:
        data, scale = (part.read(files, module, n, k, WHY) for part in (DATA, self.scale))
        return PackedTensor(format=Format.FP8, data=data, scale=scale.float())

    def experts(self, wanted: Wanted) -> ExpertWeights:
        stored = stored_experts(wanted, DATA)
        heights = {"w13": wanted.shape.intermediate, "w2": wanted.shape.hidden}
        return stored.weights(lambda matrix: self._matrix(stored, matrix, heights[matrix]))

    def _matrix(self, stored: StoredExperts, matrix: str, rows: int) -> PackedTensor:
        """`rows` is the height of one stored weight: gate and up are cut into blocks separately.

        Where 128 does not divide it, stacking shifts up's blocks; both are then cut into blocks of
        gcd(rows, 128) rows, so that every weight keeps exactly its own scale.
        """
        data, scale = stored.read(matrix, DATA), stored.read(matrix, self.scale).float()
        stacked = data.shape[1] // rows
        if stacked == 1 or rows % BLOCK == 0:
            return PackedTensor(format=Format.FP8, data=data, scale=scale)
        height = math.gcd(rows, BLOCK)
        scale = scale.unflatten(1, (stacked, -1)).repeat_interleave(BLOCK // height, dim=2)
        scale = scale[:, :, : rows // height].flatten(1, 2)
        return PackedTensor(format=Format.FP8, data=data, scale=scale, block_rows=height)


DEEPSEEK = Fp8Blocks(Part(".weight_scale_inv", FLOATS, rows=BLOCK, columns=BLOCK, sound=POSITIVE))
COMPRESSED = Fp8Blocks(
    Part(".weight_scale", FLOATS, rows=BLOCK, columns=BLOCK, sound=POSITIVE, any_ones=True)
)
