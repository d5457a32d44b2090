"""Experts of formats that nothing multiplies in, decoded while they load to the checkpoint's own dtype.

Models and plans see unquantised experts, so that a plan counts the memory that they then take. Matrices are
decoded one by one, so that loading needs no more memory than that of one of them in addition.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from turnout.checkpoint.experts import PerExpert, Wanted
from turnout.checkpoint.files import FLOATS, TensorFiles
from turnout.checkpoint.parts import decode_by_rows
from turnout.checkpoint.quantization_config import stored_dtype
from turnout.formats.experts import ExpertWeights
from turnout.formats.packed import PackedTensor
from turnout.vocabulary import Format

ReadLinear = Callable[[TensorFiles, str, int, int], PackedTensor]  # (files, module, N, K)


def own_dtype(config: Mapping[str, Any]) -> torch.dtype:
    """What config.json says that unquantised weights are stored in; bfloat16 where it says nothing known."""
    return {str(dtype).removeprefix("torch."): dtype for dtype in FLOATS}.get(
        stored_dtype(config), torch.bfloat16
    )


def experts(wanted: Wanted, read: ReadLinear) -> ExpertWeights:
    """The experts wanted, stored one by one, each of their linear layers read by `read`."""
    stored = PerExpert(wanted)
    return stored.weights(lambda matrix: _matrix(wanted, stored, matrix, read))


def _matrix(wanted: Wanted, stored: PerExpert, matrix: str, read: ReadLinear) -> PackedTensor:
    """[n, N, K], gate rows before up rows."""
    n, k = wanted.shape.matrix(matrix)
    out = torch.empty((wanted.count, n, k), dtype=own_dtype(wanted.config))
    modules = stored.modules(matrix)
    rows = wanted.count * n // len(modules)  # of one stored matrix
    for module, part in zip(modules, out.flatten(0, 1).split(rows), strict=True):
        part.copy_(decode_by_rows(read(wanted.files, module, rows, k), out.dtype))
    return PackedTensor(format=Format.BF16, data=out)
