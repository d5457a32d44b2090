"""The Hopper GEMM compiles for its target without a GPU, and into the code that its design counts on.

Gluon has no interpreter; its numbers are checked on a GPU (tests/moe/test_matrix.py, mark `gpu`).
"""

from __future__ import annotations

import re

import pytest

from tests.kernels.compiled import compiled
from turnout.kernels.expert_gemm import expert_gemm
from turnout.moe.tiling.tiles import RULES, Tiling

# Each tiling; of the 4-bit formats, for the sake of time, one in turn, both for the narrowest and the widest.
PACKED = [tiling for _, tiling in RULES["packed"]]
CASES = [(("mxfp4", "nvfp4")[i % 2], tiling) for i, tiling in enumerate(PACKED)]
CASES += [("nvfp4", PACKED[0]), ("nvfp4", PACKED[-1])]
CASES += [("bf16", tiling) for _, tiling in RULES["bf16"]]


@pytest.mark.parametrize(
    ("format", "tiles"), CASES, ids=lambda v: v if isinstance(v, str) else "-".join(map(str, v))
)
def test_compiles_as_designed(format: str, tiles: Tiling):
    first = tiles.k_blocks == 1
    constants = {
        "FORMAT": format, "ACTIVATION": "swiglu" if first else "none", "GATHER": first, "SCATTER": not first,
        "DIRECT": False, "BIAS": True, "BLOCK_N": tiles.rows, "TOKENS": tiles.tokens,
        "K_BLOCKS": tiles.k_blocks, "STAGES": tiles.stages,
        "GROUP": tiles.group, "PDL": True, "num_warps": tiles.warps,
    }  # fmt: skip
    w_ptr = "*bf16" if format == "bf16" else "*i32"
    text = compiled(expert_gemm, constants, warps=tiles.warps, w_ptr=w_ptr).asm["ptx"]
    products = len(re.findall(r"wgmma\.mma_async\S*m64n(\d+)k16", text))
    blocks = tiles.rows // 64 * 4 // tiles.warps
    unrolled = max(2, tiles.k_blocks)
    assert products == blocks * 4 * unrolled
    if format != "bf16":  # operands come from registers that decoding wrote, by no detour
        body = text[: text.rindex("wgmma.mma_async")]
        assert "st.shared" not in body
        assert "shfl" not in body
    assert "cp.async.cg.shared.global" in text
