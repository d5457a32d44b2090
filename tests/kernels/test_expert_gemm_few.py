"""The GEMM for few tokens per expert compiles for its target without a GPU, and as its design counts on it.

Gluon has no interpreter; its numbers are checked on a GPU (tests/moe/test_matrix.py, mark `gpu`).
"""

from __future__ import annotations

import inspect
import re

import pytest
from triton.backends.compiler import GPUTarget
from triton.compiler import compile as compile_kernel
from triton.experimental.gluon._runtime import GluonASTSource

from turnout.kernels.expert_gemm_few import expert_gemm_few
from turnout.moe.tiling.tiles import Tiling

POINTERS = {
    "x_ptr": "*bf16",
    "out_ptr": "*bf16",
    "order_ptr": "*i32",
    "tiles_ptr": "*i32",
    "w_ptr": "*i32",
    "scales_ptr": "*i32",
}
CASES = [
    ("mxfp4", Tiling(64, 8, 4, 4, 4, 1, 1), False),
    ("nvfp4", Tiling(64, 8, 4, 4, 8, 1, 2), True),
    ("nvfp4", Tiling(32, 8, 4, 7, 8, 1, 4), True),
]


def ptx(format: str, tiles: Tiling, *, whole: bool) -> str:
    constants = {
        "FORMAT": format, "ACTIVATION": "swiglu" if whole else "none", "GATHER": whole, "SCATTER": not whole,
        "DIRECT": whole, "BIAS": True, "BLOCK_N": tiles.rows, "TOKENS": tiles.tokens,
        "K_BLOCKS": tiles.k_blocks, "STAGES": tiles.stages, "GROUP": tiles.group, "SLICES": tiles.slices,
        "WHOLE": whole, "PDL": True, "num_warps": tiles.warps,
    }  # fmt: skip
    signature, values, attributes = {}, {}, {}
    for place, name in enumerate(inspect.signature(expert_gemm_few.fn).parameters):
        if name in constants:
            signature[name], values[(place,)] = "constexpr", constants[name]
        elif name.endswith("_ptr"):
            signature[name] = POINTERS.get(name, "*fp32")
            attributes[(place,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if name.startswith("act_") else "i32"
            if name in ("K", "x_stride", "out_stride"):
                attributes[(place,)] = [["tt.divisibility", 16]]
    source = GluonASTSource(expert_gemm_few, signature=signature, constexprs=values, attrs=attributes)
    compiled = compile_kernel(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": tiles.warps})
    assert compiled.metadata.shared <= 227 * 1024
    return compiled.asm["ptx"]


@pytest.mark.parametrize(
    ("format", "tiles", "whole"),
    CASES,
    ids=lambda v: "-".join(map(str, v)) if isinstance(v, tuple) else str(v),
)
def test_compiles_as_designed(format: str, tiles: Tiling, whole: bool):
    text = ptx(format, tiles, whole=whole)
    products = len(re.findall(r"mma\.sync\S*m16n8k16", text))
    held = tiles.rows * tiles.slices // (16 * tiles.warps)  # strips of a warp
    assert products == 2 * held * tiles.k_blocks * 4 * tiles.tokens // 8  # in the loop, and of the last chunk
    body = text[: text.rindex("mma.sync")]  # weights go from memory into operands, by no detour
    assert "st.shared" not in body
    assert "shfl" not in body
    wide = len(re.findall(r"ld\.global\S*\.v4\.b32", body))
    assert wide == 2 * held * tiles.k_blocks
    if whole:
        loop = body[body.index("mma.sync") :]
        assert "bar.sync" not in loop
