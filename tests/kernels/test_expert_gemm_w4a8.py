"""The W4A8 GEMM compiles for Hopper without a GPU: operands reach the tensor cores by no detour.

Its numbers are checked on a GPU (tests/moe/test_matrix.py and test_w4a8_gpu.py, mark `gpu`), its decoding in
tests/formats/test_fragments_fp8.py.
"""

from __future__ import annotations

import inspect

import pytest
from triton.backends.compiler import GPUTarget
from triton.compiler import compile as compile_kernel
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

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
    types = {
        "x_desc": f"tensordesc<fp8e4nv[{tiles.tokens}, 128],{x!r}>",
        "w_desc": f"tensordesc<i32[128, 32],{w!r}>",
        "w_scale_ptr": "*i32",
        "out_ptr": "*bf16",
        "order_ptr": "*i32",
        "tiles_ptr": "*i32",
    }
    signature, values, attributes = {}, {}, {}
    for place, name in enumerate(inspect.signature(expert_gemm_w4a8.fn).parameters):
        if name in constants:
            signature[name], values[(place,)] = "constexpr", constants[name]
        elif name.endswith(("_ptr", "_desc")):
            signature[name] = types.get(name, "*fp32")
            if name.endswith("_ptr"):
                attributes[(place,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if name.startswith("act_") else "i32"
            if name == "out_stride":
                attributes[(place,)] = [["tt.divisibility", 16]]
    source = GluonASTSource(expert_gemm_w4a8, signature=signature, constexprs=values, attrs=attributes)
    done = compile_kernel(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": tiles.warps})
    assert done.metadata.shared <= 227 * 1024
    assert products(done) == {tiles.tokens}
    text = done.asm["ptx"]
    # Four decodings of 64 x 128 weights, 24 permutes each; none to put bytes together afterwards.
    assert text.count("prmt.b32") == 4 * 24
