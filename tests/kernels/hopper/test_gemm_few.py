"""The GEMM for few tokens per expert compiles for its target without a GPU, and as its design counts on it.

Gluon has no interpreter; its numbers are checked on a GPU (tests/moe/test_matrix.py, mark `gpu`).
"""

from __future__ import annotations

import re

import pytest

from tests.kernels.compiled import compiled
from turnout.kernels.hopper.gemm_few import expert_gemm_few
from turnout.moe.backends.hopper.tile_config import Tiling

CASES = [
    ("mxfp4", Tiling(64, 8, 4, 4, 4, 1, 1), False),
    ("nvfp4", Tiling(64, 8, 4, 4, 8, 1, 2), True),
    ("nvfp4", Tiling(32, 8, 4, 7, 8, 1, 4), True),
]


@pytest.mark.parametrize(
    ("format", "tiles", "whole"),
    CASES,
    ids=lambda v: "-".join(map(str, v)) if isinstance(v, tuple) else str(v),
)
def test_compiles_as_designed(format: str, tiles: Tiling, whole: bool):
    constants = {
        "FORMAT": format, "ACTIVATION": "swiglu" if whole else "none", "GATHER": whole, "SCATTER": not whole,
        "BIAS": True, "BLOCK_N": tiles.rows, "TOKENS": tiles.tokens,
        "K_BLOCKS": tiles.k_blocks, "STAGES": tiles.stages, "GROUP": tiles.group, "SLICES": tiles.slices,
        "WHOLE": whole, "PDL": True, "num_warps": tiles.warps,
    }  # fmt: skip
    text = compiled(expert_gemm_few, constants, warps=tiles.warps, w_ptr="*i32").asm["ptx"]
    products = len(re.findall(r"mma\.sync\S*m16n8k16", text))
    held = tiles.rows * tiles.slices // (16 * tiles.warps)  # strips of a warp
    assert products == 2 * held * tiles.k_blocks * 4 * tiles.tokens // 8  # in the loop, and of the last chunk
    end = text[text.rindex("mma.sync") :]
    assert "ld.global" not in end  # nothing is waited for any more, and eight columns are stored at once
    assert re.search(r"st\.global\S*\.v4\.b32", end)
    body = text[: text.rindex("mma.sync")]  # weights go from memory into operands, by no detour
    assert "st.shared" not in body
    assert "shfl" not in body
    wide = len(re.findall(r"ld\.global\S*\.v4\.b32", body))
    assert wide == 2 * held * tiles.k_blocks
    if whole:
        loop = body[body.index("mma.sync") :]
        assert "bar.sync" not in loop
