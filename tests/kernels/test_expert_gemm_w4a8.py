"""The W4A8 GEMM compiles for Hopper without a GPU: operands reach the tensor cores by no detour.

Its numbers are checked on a GPU (tests/moe/test_matrix.py and test_w4a8_gpu.py, mark `gpu`), its decoding in
tests/formats/test_fragments_fp8.py.
"""

from __future__ import annotations

import pytest
from triton.experimental.gluon import language as gl

from tests.kernels.compiled import compiled
from tests.kernels.test_expert_gemm_fp8 import products
from turnout.kernels.expert_gemm_w4a8 import expert_gemm_w4a8
from turnout.moe.tiling.tiles import RULES, W4A8, Tiling

NARROW, *_, WIDE = [tiling for _, tiling in RULES[W4A8]]


@pytest.mark.parametrize(("tiles", "first"), [(NARROW, False), (WIDE, True), (WIDE, False)])
def test_compiles_as_designed(tiles: Tiling, first: bool):
    constants = {
        "ACTIVATION": "swiglu" if first else "none", "SCATTER": not first, "BIAS": True,
        "TOKENS": tiles.tokens, "STAGES": tiles.stages, "TILES_GROUP": tiles.group, "PDL": True,
    }  # fmt: skip
    x, w = gl.NVMMASharedLayout(128, 8, 2), gl.NVMMASharedLayout(128, 32, 2)
    done = compiled(
        expert_gemm_w4a8, constants, warps=tiles.warps, multiples=("out_stride",),
        x_desc=f"tensordesc<fp8e4nv[{tiles.tokens}, 128],{x!r}>", w_desc=f"tensordesc<i32[128, 32],{w!r}>",
        w_scale_ptr="*i32",
    )  # fmt: skip
    assert products(done) == {tiles.tokens}
    text = done.asm["ptx"]
    # Four decodings of 64 x 128 weights, 24 permutes each; none to put bytes together afterwards.
    assert text.count("prmt.b32") == 4 * 24
