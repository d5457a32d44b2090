"""FP8 with one scale per row, called output channel by its writers.

llm-compressor publishes it as FP8_DYNAMIC, ModelOpt as FP8_PER_CHANNEL_PER_TOKEN: per linear layer `weight`
e4m3 [N, K] and `weight_scale` [N, 1] or [N], which multiplies. Activations are quantised as they come, so
there are no input scales. Runners of FP8 take scales per 128 x 128 block, which no row's scale is: experts
are decoded while they load, and activations stay unquantised, which is finer.
"""

from __future__ import annotations

from turnout.checkpoint import decoded
from turnout.checkpoint.experts import Wanted
from turnout.checkpoint.files import FLOATS, TensorFiles
from turnout.checkpoint.parts import E4M3, POSITIVE, Part
from turnout.formats.experts import ExpertWeights
from turnout.formats.fp8 import BLOCK
from turnout.formats.packed import PackedTensor
from turnout.vocabulary import Format

DATA = Part(".weight", (E4M3,))
SCALE = Part(".weight_scale", FLOATS, columns=0, sound=POSITIVE, any_ones=True)
INPUT_SCALE = ".input_scale"
WHY = "config.json says that this module is stored as FP8 with one scale per row"


def linear(files: TensorFiles, module: str, n: int, k: int) -> PackedTensor:
    """In blocks that are one row high."""
    data, scale = (part.read(files, module, n, k, WHY) for part in (DATA, SCALE))
    files.set_aside([module + INPUT_SCALE])
    return PackedTensor(
        format=Format.FP8, data=data, scale=scale.float().repeat(1, -(-k // BLOCK)), block_rows=1
    )


def experts(wanted: Wanted) -> ExpertWeights:
    return decoded.experts(wanted, linear)
