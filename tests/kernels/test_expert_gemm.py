"""The Hopper GEMM compiles for its target without a GPU, and into the code that its design counts on.

Gluon has no interpreter; its numbers are checked on a GPU (tests/moe/test_matrix.py, mark `gpu`).
"""

from __future__ import annotations

import inspect
import re

import pytest
from triton.backends.compiler import GPUTarget
from triton.compiler import compile as compile_kernel
from triton.experimental.gluon._runtime import GluonASTSource

from turnout.kernels.expert_gemm import expert_gemm
from turnout.moe.tiling.tiles import RULES, Tiling

POINTERS = {
    "x_ptr": "*bf16",
    "out_ptr": "*bf16",
    "order_ptr": "*i32",
    "tiles_ptr": "*i32",
    "scales_ptr": "*i32",
}
CASES = [(f, t) for f in ("mxfp4", "nvfp4") for _, t in RULES["packed"]]
CASES += [("bf16", t) for _, t in RULES["bf16"]]


def ptx(format: str, tiles: Tiling, *, first: bool) -> str:
    constants = {
        "FORMAT": format, "ACTIVATION": "swiglu" if first else "none", "GATHER": first, "SCATTER": not first,
        "DIRECT": False, "BIAS": True, "BLOCK_N": tiles.rows, "TOKENS": tiles.tokens,
        "K_BLOCKS": tiles.k_blocks, "STAGES": tiles.stages,
        "GROUP": tiles.group, "PDL": True, "num_warps": tiles.warps,
    }  # fmt: skip
    signature, values, attributes = {}, {}, {}
    for place, name in enumerate(inspect.signature(expert_gemm.fn).parameters):
        if name in constants:
            signature[name], values[(place,)] = "constexpr", constants[name]
        elif name.endswith("_ptr"):
            weights = "*bf16" if format == "bf16" else "*i32"
            signature[name] = weights if name == "w_ptr" else POINTERS.get(name, "*fp32")
            attributes[(place,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if name.startswith("act_") else "i32"
            if name in ("K", "x_stride", "out_stride"):
                attributes[(place,)] = [["tt.divisibility", 16]]
    source = GluonASTSource(expert_gemm, signature=signature, constexprs=values, attrs=attributes)
    compiled = compile_kernel(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": tiles.warps})
    assert compiled.metadata.shared <= 227 * 1024
    return compiled.asm["ptx"]


@pytest.mark.parametrize(
    ("format", "tiles"), CASES, ids=lambda v: v if isinstance(v, str) else "-".join(map(str, v))
)
def test_compiles_as_designed(format: str, tiles: Tiling):
    text = ptx(format, tiles, first=tiles.k_blocks == 1)
    products = len(re.findall(r"wgmma\.mma_async\S*m64n(\d+)k16", text))
    blocks = tiles.rows // 64 * 4 // tiles.warps
    unrolled = max(2, tiles.k_blocks)
    assert products == blocks * 4 * unrolled
    if format != "bf16":  # operands come from registers that decoding wrote, by no detour
        body = text[: text.rindex("wgmma.mma_async")]
        assert "st.shared" not in body
        assert "shfl" not in body
    assert "cp.async.cg.shared.global" in text
