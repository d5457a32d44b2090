"""FP8 with one scale for a whole weight, read as blocks of 128 x 128 that all have it: the very same weights.

Per linear layer `weight` e4m3 [N, K] and `weight_scale`, a number that multiplies, as ModelOpt's FP8,
compressed-tensors' float-quantized with strategy `tensor`, and AutoFP8 write them. Stacked experts spell it
`gate_up_proj_weight_scale`, with scalars [E] or [E, 2]. A calibrated `input_scale` is left unused:
activations are quantised as they come, per token and 128 columns, which is finer.
"""

from __future__ import annotations

import math

from turnout.checkpoint.experts import StoredExperts, Wanted, set_aside_input_scales, stored_experts
from turnout.checkpoint.files import TensorFiles
from turnout.checkpoint.parts import E4M3, Part, read_scalar
from turnout.formats.experts import ExpertWeights
from turnout.formats.fp8 import BLOCK
from turnout.formats.packed import PackedTensor
from turnout.vocabulary import Format

DATA = Part(".weight", (E4M3,))
SCALE, INPUT_SCALE = ".weight_scale", ".input_scale"
WHY = "config.json says that this module is stored as FP8 with one scale"


def linear(files: TensorFiles, module: str, n: int, k: int) -> PackedTensor:
    data, scale = DATA.read(files, module, n, k, WHY), read_scalar(files, module + SCALE, WHY)
    files.set_aside([module + INPUT_SCALE])
    return PackedTensor(format=Format.FP8, data=data, scale=scale.repeat(-(-n // BLOCK), -(-k // BLOCK)))


def experts(wanted: Wanted) -> ExpertWeights:
    stored = stored_experts(wanted, DATA)
    set_aside_input_scales(wanted, stored, INPUT_SCALE)
    return stored.weights(lambda matrix: _matrix(wanted, stored, matrix))


def _matrix(wanted: Wanted, stored: StoredExperts, matrix: str) -> PackedTensor:
    """Blocks are as high as 128 and the height of gate have in common, so that none holds rows of both."""
    data, columns = stored.read(matrix, DATA), stored.scalars(matrix, SCALE, wanted.local, WHY)
    rows, halves = data.shape[1], 2 if matrix == "w13" and wanted.shape.gated else 1
    height = BLOCK if halves == 1 else math.gcd(rows // 2, BLOCK)
    each = columns.expand(-1, halves).repeat_interleave(-(-rows // halves // height), dim=1)
    scale = each[:, :, None].repeat(1, 1, -(-data.shape[2] // BLOCK))
    return PackedTensor(format=Format.FP8, data=data, scale=scale, block_rows=height)
