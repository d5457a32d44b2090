"""Weights that were not quantised: bfloat16, float16 or float32, as published by most model families."""

from __future__ import annotations

from turnout.checkpoint.experts import Wanted, stored_experts
from turnout.checkpoint.files import TensorFiles
from turnout.checkpoint.parts import PLAIN
from turnout.formats.experts import ExpertWeights
from turnout.formats.packed import PackedTensor
from turnout.vocabulary import Format

WHY = "config.json does not list this module as quantised"


def linear(files: TensorFiles, module: str, n: int, k: int) -> PackedTensor:
    return PackedTensor(format=Format.BF16, data=PLAIN.read(files, module, n, k, WHY))


def experts(wanted: Wanted) -> ExpertWeights:
    """Experts stored one by one or stacked, in the dtype of the file."""
    stored = stored_experts(wanted, PLAIN)
    return stored.weights(lambda matrix: PackedTensor(format=Format.BF16, data=stored.read(matrix, PLAIN)))
