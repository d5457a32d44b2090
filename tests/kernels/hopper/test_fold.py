"""Folding 4-bit weights to fragments: in Triton's interpreter as by torch, and compiled once a format.

On a GPU it is checked in tests/moe/backends/hopper/test_fragments.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.kernels import interpreted
from tests.kernels.bound import bound
from tests.kernels.compiled import compiled, machine_code
from turnout.kernels.hopper.fold import fold, fold_block

GROUPS = {"nvfp4": 16, "mxfp4": 32, "int4": 32}


@pytest.fixture(scope="module")
def results() -> dict[str, bool]:
    return interpreted.results("hopper/fold_in_interpreter.py")


@pytest.mark.parametrize("format", GROUPS)
@pytest.mark.parametrize(
    "shape", ["64-64-False", "72-96-False", "130-160-False", "192-96-True", "48-64-True"]
)
def test_folds_as_torch_does(results: dict[str, bool], format: str, shape: str):
    assert results[f"{format}-{shape}"]


@pytest.mark.parametrize("case", ["nvfp4-80-48-False", "columns"])
def test_folds_half_blocks_and_parts_of_rows(results: dict[str, bool], case: str):
    assert results[case]


@pytest.mark.parametrize("format", GROUPS)
def test_layers_of_all_sizes_share_one_kernel(format: str):
    """Also where their memory begins at any byte."""
    dtype = torch.int16 if format == "int4" else torch.uint8
    with bound() as keys:
        for experts, blocks_n, blocks_k, paired in ((1, 1, 1, False), (3, 2, 5, True), (16, 16, 16, True)):
            rows, columns = 64 * blocks_n, 64 * blocks_k
            memory = torch.empty(experts * rows * columns // 2 + 1, dtype=torch.uint8)
            for first in (0, 1):
                packed = memory[first:][: experts * rows * columns // 2].view(experts, rows, columns // 2)
                scale = torch.empty(experts, rows, columns // GROUPS[format], dtype=dtype)
                codes = torch.empty(experts, blocks_n, blocks_k, 512, dtype=torch.int32)
                fold(packed, scale, codes, codes, codes, format=format, group=GROUPS[format], paired=paired)
    assert len(keys) == 1


@pytest.mark.parametrize("format", GROUPS)
def test_compiles_for_hopper(format: str, tmp_path: Path):
    done = compiled(
        fold_block, {"FORMAT": format, "GROUP": GROUPS[format]}, warps=4, multiples=(),
        packed_ptr="*u8", scale_ptr="*i16" if format == "int4" else "*u8", top_ptr="*i32", codes_ptr="*i32",
        scales_ptr="*i32",
    )  # fmt: skip
    instructions, needs = machine_code(done, tmp_path)
    assert "STG.E.128" in instructions  # a thread's four words at once
    assert "STACK:0" in needs
