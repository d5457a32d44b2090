"""The GEMM of specialised warps compiles for Hopper without a GPU, and into what its design counts on.

Its numbers are checked on a GPU (tests/moe/test_matrix.py and test_deterministic.py, mark `gpu`).
"""

from __future__ import annotations

import inspect
import re
import subprocess
from pathlib import Path

import pytest
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import compile as compile_kernel
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from turnout.kernels.expert_gemm_specialised import expert_gemm_specialised
from turnout.moe.tiling.tiles import SHARED_BYTES, SPECIAL, Tiling

TILE = gl.NVMMASharedLayout(128, 16, 2)
TYPES = {
    "out_ptr": "*bf16",
    "order_ptr": "*i32",
    "tiles_ptr": "*i32",
    "scales_ptr": "*i32",
}


def compiled(format: str, tiles: Tiling, *, first: bool):
    """With tiles of one width, for the sake of time; the others are the same code again."""
    constants = {
        "FORMAT": format, "ACTIVATION": "swiglu" if first else "none", "GATHER": first, "SCATTER": not first,
        "BIAS": True, "ROWS": tiles.rows, "TOKENS": tiles.tokens, "WIDTHS": 1, "K_BLOCKS": tiles.k_blocks,
        "STAGES": tiles.stages, "GROUP": tiles.group, "PDL": True,
    }  # fmt: skip
    types = {
        "x_from": "*bf16" if first else f"tensordesc<bf16[{tiles.tokens}, 64],{TILE!r}>",
        "w_from": f"tensordesc<bf16[{tiles.rows}, 64],{TILE!r}>" if format == "bf16" else "*i32",
    }
    signature, values, attributes = {}, {}, {}
    for place, name in enumerate(inspect.signature(expert_gemm_specialised.fn).parameters):
        if name in constants:
            signature[name], values[(place,)] = "constexpr", constants[name]
        elif name.endswith(("_ptr", "_from")):
            signature[name] = (types | TYPES).get(name, "*fp32")
            if signature[name].startswith("*"):
                attributes[(place,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if name.startswith("act_") else "i32"
            if name in ("K", "x_stride", "out_stride", "out_columns"):
                attributes[(place,)] = [["tt.divisibility", 16]]
    source = GluonASTSource(expert_gemm_specialised, signature=signature, constexprs=values, attrs=attributes)
    return compile_kernel(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})


@pytest.mark.parametrize(("format", "first"), [("mxfp4", True), ("nvfp4", False), ("bf16", True)])
def test_compiles_as_designed(format: str, first: bool, tmp_path: Path):
    tiles = SPECIAL["bf16" if format == "bf16" else "packed"][0]
    done = compiled(format, tiles, first=first)
    text = done.asm["ptx"]
    assert done.metadata.shared <= SHARED_BYTES
    products = re.findall(r"wgmma\.mma_async\S*m64n(\d+)k16", text)
    assert products == [str(tiles.tokens)] * (2 * 4 * tiles.k_blocks * tiles.rows // 128)
    assert "cp.async.mbarrier.arrive.noinc" in text
    assert ("cp.async.bulk.tensor.2d" in text) == (format == "bf16" or not first)
    assert "stmatrix.sync.aligned.m8n8.x4.trans" in text
    assert not re.search(r"st\.global\.(b16|v\d\.b16)", text)
    file = tmp_path / "kernel.ptx"
    file.write_text(text)
    said = subprocess.run(
        [knobs.nvidia.ptxas.path, "-v", "-arch=sm_90a", file, "-o", tmp_path / "kernel.cubin"],
        capture_output=True, text=True, check=True,
    ).stderr  # fmt: skip
    assert "serialized" not in said  # where operands would wait for products
    assert "0 bytes spill stores, 0 bytes spill loads" in said
