"""FP8 in 128 x 128 blocks, as DeepSeek-V3 and its followers publish it.

Per linear layer `weight` e4m3 [N, K] and `weight_scale_inv` [ceil(N/128), ceil(K/128)], float32 (some
families: bfloat16), which MULTIPLIES despite its name. Activations are quantised as they come, so there
are no input scales.
"""

from __future__ import annotations

import math

from turnout.checkpoint.experts import Arrangement, Wanted, arrangement
from turnout.checkpoint.files import FLOATS, TensorFiles
from turnout.checkpoint.parts import E4M3, POSITIVE, Part
from turnout.formats.experts import ExpertWeights
from turnout.formats.packed import PackedTensor
from turnout.vocabulary import Format

BLOCK = 128
DATA = Part(".weight", (E4M3,))
SCALE = Part(".weight_scale_inv", FLOATS, rows=BLOCK, columns=BLOCK, sound=POSITIVE)
WHY = "config.json says that this module is stored as FP8"


def linear(files: TensorFiles, module: str, n: int, k: int) -> PackedTensor:
    data, scale = (part.read(files, module, n, k, WHY) for part in (DATA, SCALE))
    return PackedTensor(format=Format.FP8, data=data, scale=scale.float())


def experts(wanted: Wanted) -> ExpertWeights:
    stored = arrangement(wanted, DATA)
    return ExpertWeights(
        w13=_matrix(stored, "w13", wanted.shape.intermediate),
        w2=_matrix(stored, "w2", wanted.shape.hidden),
        b13=stored.bias("w13"),
        b2=stored.bias("w2"),
        first_expert=wanted.first,
        num_experts=wanted.shape.num_experts,
    )


def _matrix(stored: Arrangement, matrix: str, rows: int) -> PackedTensor:
    """`rows` is the height of one stored weight: gate and up are cut into blocks apart.

    Where 128 does not divide it, stacking shifts up's blocks; both are then cut into blocks of
    gcd(rows, 128) rows, so that every weight keeps exactly its own scale.
    """
    data, scale = stored.read(matrix, DATA), stored.read(matrix, SCALE).float()
    stacked = data.shape[1] // rows
    if stacked == 1 or rows % BLOCK == 0:
        return PackedTensor(format=Format.FP8, data=data, scale=scale)
    height = math.gcd(rows, BLOCK)
    scale = scale.unflatten(1, (stacked, -1)).repeat_interleave(BLOCK // height, dim=2)
    scale = scale[:, :, : rows // height].flatten(1, 2)
    return PackedTensor(format=Format.FP8, data=data, scale=scale, block_rows=height)
