"""The GEMM of specialised warps compiles for Hopper without a GPU, and into what its design counts on.

Its numbers are checked on a GPU (tests/moe/test_matrix.py and test_deterministic.py, mark `gpu`).
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from triton.experimental.gluon import language as gl

from tests.kernels.compiled import MULTIPLES, compiled, machine_code
from turnout.kernels.expert_gemm_specialised import expert_gemm_specialised
from turnout.moe.tiling.tiles import SPECIAL

TILE = gl.NVMMASharedLayout(128, 16, 2)


@pytest.mark.parametrize(
    ("format", "first", "widths", "ragged"),
    [("mxfp4", True, 1, True), ("nvfp4", False, 2, False), ("bf16", True, 1, False)],
)
def test_compiles_as_designed(format: str, first: bool, widths: int, ragged: bool, tmp_path: Path):
    """With few widths of tiles, for the sake of time; the others are the same code again."""
    tiles = SPECIAL["bf16" if format == "bf16" else "packed"][0]
    constants = {
        "FORMAT": format, "ACTIVATION": "swiglu" if first else "none", "GATHER": first, "SCATTER": not first,
        "BIAS": True, "ROWS": tiles.rows, "TOKENS": tiles.tokens, "WIDTHS": widths,
        "K_BLOCKS": tiles.k_blocks, "STAGES": tiles.stages, "GROUP": tiles.group, "RAGGED": ragged,
        "PDL": True,
    }  # fmt: skip
    done = compiled(
        expert_gemm_specialised, constants, warps=4, multiples=(*MULTIPLES, "out_columns"),
        x_from="*bf16" if first else f"tensordesc<bf16[{tiles.tokens}, 64],{TILE!r}>",
        w_from=f"tensordesc<bf16[{tiles.rows}, 64],{TILE!r}>" if format == "bf16" else "*i32",
    )  # fmt: skip
    text = done.asm["ptx"]
    products = re.findall(r"wgmma\.mma_async\S*m64n(\d+)k16", text)
    one = 2 * 4 * (tiles.k_blocks + ragged) * tiles.rows // 128
    parts = {1: {1: one}, 2: {1: one, 2: one}}[widths]
    assert Counter(products) == {str(tiles.tokens // part): count for part, count in parts.items()}
    assert len(re.findall(r"atom\.\S*add", text)) == 1
    assert "cp.async.mbarrier.arrive.noinc" in text
    assert ("cp.async.bulk.tensor.2d" in text) == (format == "bf16" or not first)
    assert "stmatrix.sync.aligned.m8n8.x4.trans" in text
    assert not re.search(r"st\.global\.(b16|v\d\.b16)", text)
    instructions, needs = machine_code(done, tmp_path)
    # Four products of 16 columns are under way at once. Had operands to wait, ptxas would let each end first.
    assert instructions.count("HGMMA") == len(products)
    assert len(re.findall(r"HGMMA.*gsb0", instructions)) == len(products) // 4
    assert "STACK:0" in needs  # nothing is spilt
