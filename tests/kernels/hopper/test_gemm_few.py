"""The GEMM for few tokens per expert compiles for its target without a GPU, and as its design counts on it.

Gluon has no interpreter; its numbers are checked on a GPU (tests/moe/test_matrix.py, mark `gpu`).
"""

from __future__ import annotations

import re

import pytest
from msgspec.structs import astuple

from tests.kernels.compiled import compiled
from turnout.kernels.hopper.gemm_few import expert_gemm_few
from turnout.moe.backends.hopper.kernels import FewTokens

CASES = [
    ("mxfp4", FewTokens(64, 8, 256, 4, 4, 1, 1), False),
    ("nvfp4", FewTokens(64, 8, 256, 4, 8, 1, 2), True),
    ("int4", FewTokens(64, 8, 256, 4, 8, 1, 2), True),
    ("nvfp4", FewTokens(32, 8, 256, 7, 8, 1, 4), True),
]


@pytest.mark.parametrize(
    ("format", "tiles", "whole"),
    CASES,
    ids=lambda v: "-".join(map(str, astuple(v))) if isinstance(v, FewTokens) else str(v),
)
def test_compiles_as_designed(format: str, tiles: FewTokens, whole: bool):
    constants = {
        "FORMAT": format, "ACTIVATION": "swiglu" if whole else "none", "GATHER": whole, "SCATTER": not whole,
        "BIAS": True, "BLOCK_N": tiles.block_n, "TOKENS": tiles.block_m,
        "K_BLOCKS": tiles.block_k // 64, "STAGES": tiles.num_stages, "GROUP": tiles.group_m,
        "SLICES": tiles.split_k, "WHOLE": whole, "PDL": True, "num_warps": tiles.num_warps,
    }  # fmt: skip
    text = compiled(expert_gemm_few, constants, warps=tiles.num_warps, w_ptr="*i32").asm["ptx"]
    steps = tiles.block_k // 64
    products = len(re.findall(r"mma\.sync\S*m16n8k16", text))
    held = tiles.block_n * tiles.split_k // (16 * tiles.num_warps)  # strips of a warp
    assert products == 2 * held * steps * 4 * tiles.block_m // 8  # in the loop, and of the last chunk
    end = text[text.rindex("mma.sync") :]
    assert "ld.global" not in end  # nothing is waited for any more, and eight columns are stored at once
    assert re.search(r"st\.global\S*\.v4\.b32", end)
    body = text[: text.rindex("mma.sync")]  # weights go from memory into operands, by no detour
    assert "st.shared" not in body
    assert "shfl" not in body
    wide = len(re.findall(r"ld\.global\S*\.v4\.b32", body))
    assert wide == 2 * held * steps
    if whole:
        loop = body[body.index("mma.sync") :]
        assert "bar.sync" not in loop
