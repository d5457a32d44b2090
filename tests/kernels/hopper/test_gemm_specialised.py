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
from turnout.kernels.hopper.gemm_specialised import expert_gemm_specialised
from turnout.moe.backends.hopper.kernels.specialised import CHOICES, Specialised

TILE = gl.NVMMASharedLayout(128, 16, 2)


@pytest.mark.parametrize(
    ("format", "first", "tiles", "widths", "ragged"),
    [
        pytest.param("mxfp4", True, CHOICES["packed"][1], 1, True, marks=pytest.mark.more),
        ("nvfp4", False, CHOICES["packed"][0], 2, False),
        ("bf16", True, CHOICES["bf16"][0], 1, False),
        pytest.param("int4", True, CHOICES["packed"][1], 1, True, marks=pytest.mark.more),
    ],
)
def test_compiles_as_designed(
    format: str, first: bool, tiles: Specialised, widths: int, ragged: bool, tmp_path: Path
):
    """With few widths of tiles, for the sake of time; the others are the same code again."""
    packed, extra = format != "bf16", tiles.block_m - 128
    constants = {
        "FORMAT": format, "ACTIVATION": "swiglu" if first else "none", "GATHER": first, "SCATTER": not first,
        "BIAS": True, "ROWS": tiles.block_n, "TOKENS": 128, "EXTRA": extra, "WIDTHS": widths,
        "K_BLOCKS": tiles.block_k // 64, "STAGES": tiles.num_stages, "GROUP": tiles.group_m, "RAGGED": ragged,
        "PDL": True,
    }  # fmt: skip
    done = compiled(
        expert_gemm_specialised, constants, warps=4, multiples=(*MULTIPLES, "out_columns"),
        x_from="*bf16" if first else f"tensordesc<bf16[128, 64],{TILE!r}>", extra_from="*bf16",
        w_from="*i32" if packed else f"tensordesc<bf16[{tiles.block_n}, 64],{TILE!r}>",
    )  # fmt: skip
    text = done.asm["ptx"]
    products = re.findall(r"wgmma\.mma_async\S*m64n(\d+)k16", text)
    one = 2 * 4 * (tiles.block_k // 64 + ragged) * tiles.block_n // 128
    parts = {128: one} if widths == 1 else {128: one, 64: one}
    if extra:
        parts = {128: 2 * one, extra: one}  # of tiles of 128 tokens, and of wider ones
    assert Counter(products) == {str(width): count for width, count in parts.items()}
    assert len(re.findall(r"atom\.\S*add", text)) == 1
    assert "cp.async.mbarrier.arrive.noinc" in text
    assert ("cp.async.bulk.tensor.2d" in text) == (format == "bf16" or not first)
    assert "stmatrix.sync.aligned.m8n8.x4.trans" in text
    assert not re.search(r"st\.global\.(b16|v\d\.b16)", text)
    instructions, needs = machine_code(done, tmp_path)
    # Four products of 16 columns are under way together, or two of 4-bit weights. Had operands to wait,
    # ptxas would let each end first.
    assert instructions.count("HGMMA") == len(products)
    assert len(re.findall(r"HGMMA.*gsb0", instructions)) == len(products) // (2 if packed else 4)
    assert "STACK:0" in needs  # nothing is spilt
