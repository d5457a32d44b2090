"""The W4A8 GEMM compiles for Hopper without a GPU: operands reach the tensor cores by no detour.

Its numbers are checked on a GPU (tests/moe/test_matrix.py and test_w4a8_gpu.py, mark `gpu`), its decoding in
tests/moe/backends/hopper/test_fragments_fp8.py.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from triton.experimental.gluon import language as gl

from tests.kernels import interpreted
from tests.kernels.compiled import compiled, machine_code
from tests.kernels.hopper.test_gemm_fp8 import products
from turnout.kernels.hopper.gemm_w4a8 import expert_gemm_w4a8
from turnout.moe.backends.hopper.kernels.w4a8 import RULES, W4A8

NARROW, _, _, WIDE, TALL = [config for _, config in RULES]


@pytest.mark.parametrize(
    ("tiles", "first"),
    [(NARROW, False), (WIDE, True), pytest.param(TALL, False, marks=pytest.mark.more)],
)
def test_compiles_as_designed(tiles: W4A8, first: bool, tmp_path: Path):
    """With one width of tiles, for the sake of time; the others are the same code again."""
    constants = {
        "ACTIVATION": "swiglu" if first else "none", "SECOND": not first, "SCATTER": not first, "BIAS": True,
        "BLOCKS": tiles.block_n // 64, "TOKENS": tiles.block_m, "WIDTHS": 1,
        "STAGES": tiles.num_stages, "GROUP": tiles.group_m, "PDL": True,
    }  # fmt: skip
    x, w = gl.NVMMASharedLayout(128, 8, 2), gl.NVMMASharedLayout(128, 32, 2)
    done = compiled(
        expert_gemm_w4a8, constants, warps=tiles.num_warps, multiples=("out_stride",),
        x_desc=f"tensordesc<fp8e4nv[{tiles.block_m}, 128],{x!r}>",
        w_desc=f"tensordesc<i32[{tiles.block_n // 2}, 32],{w!r}>",
        w_scale_ptr="*i32",
    )  # fmt: skip
    assert products(done) == {tiles.block_m}
    # Three steps of code, one of them for an odd last. Each group decodes its blocks of 64 x 128 weights, by
    # 24 permutes each; none puts bytes together afterwards.
    blocks = 3 * tiles.block_n // 64
    assert done.asm["ptx"].count("prmt.b32") == 24 * blocks
    instructions, needs = machine_code(done, tmp_path)
    # Four products of 32 columns are under way at once. Had operands to wait, ptxas would let each end first.
    assert instructions.count("QGMMA") == 4 * blocks
    assert len(re.findall(r"QGMMA.*gsb0", instructions)) == blocks
    spilt = [int(size) for size in re.findall(r"STACK:(\d+)", needs)]
    assert max(spilt) <= 128  # bytes, where a tile ends


@pytest.fixture(scope="module")
def results() -> dict[str, bool]:
    return interpreted.results("hopper/w4a8_in_interpreter.py")


@pytest.mark.parametrize("case", ["tokens", "sorted", "all"])
def test_quantises_rows(results: dict[str, bool], case: str):
    assert results[case]
