"""The FP8 GEMMs compile for Hopper without a GPU: within its memory, without spilling in the hot loop.

Their numbers are checked on a GPU (tests/moe/test_matrix.py, mark `gpu`); the quantisation that feeds them
here, in Triton's interpreter.
"""

from __future__ import annotations

import re

import pytest
from triton.experimental.gluon import language as gl

from tests.kernels import interpreted
from tests.kernels.compiled import compiled
from turnout.kernels.hopper.gemm_fp8 import expert_gemm_fp8
from turnout.kernels.hopper.gemm_fp8_specialised import expert_gemm_fp8_specialised, stages_of
from turnout.moe.backends.hopper import tile_fp8
from turnout.moe.backends.hopper.tile_config import MIN_TOKENS, RULES, SORTED, Tiling, quantizes

TILE, ROWS = gl.NVMMASharedLayout(128, 8, 2), gl.NVMMASharedLayout(128, 16, 2)


def weights_type(rows: int) -> str:
    return f"tensordesc<fp8e4nv[{rows}, 128],{TILE!r}>"


TYPES = {
    "w_desc": weights_type(SORTED.first.rows),
    "out_desc": f"tensordesc<bf16[64, 128],{ROWS!r}>",
}
TOKENS_TYPE = f"tensordesc<fp8e4nv[64, 128],{TILE!r}>"


def products(done) -> set[int]:
    """The widths of the tensor cores' products."""
    return {int(n) for n in re.findall(r"wgmma\.mma_async\S*m64n(\d+)k32\.f32\.e4m3\.e4m3", done.asm["ptx"])}


# Pairs that are not sorted are tiles of their own.
SMALL = [
    (tiles, direct)
    for tiles in (*(t for _, t in RULES["fp8"]), *(Tiling(*cut, 1) for cut in tile_fp8.WIDER.values()))
    for direct in ((False, True) if tiles.tokens == MIN_TOKENS else (False,))
]


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(("tiles", "direct"), SMALL, ids=str)
def test_small_tiles(tiles: Tiling, direct: bool, first: bool):
    groups = 7  # no whole number of steps
    inside = quantizes(tiles, 128 * groups, first=first, direct=direct)
    assert inside == (direct or (not first and tiles.tokens == MIN_TOKENS))
    constants = {
        "GROUPS": groups, "INSIDE": inside, "ACTIVATION": "silu" if first else "none", "GATHER": first,
        "SCATTER": not first, "DIRECT": direct, "PAIRED": first, "BIAS": False, "BLOCK_N": tiles.rows,
        "TOKENS": tiles.tokens, "K_BLOCKS": tiles.k_blocks, "STAGES": tiles.stages,
        "TILES_GROUP": tiles.group, "PDL": True, "num_warps": tiles.warps,
    }  # fmt: skip
    types = {"x_ptr": "*bf16" if inside else "*fp8e4nv", "w_desc": weights_type(tiles.rows)}
    done = compiled(expert_gemm_fp8, constants, warps=tiles.warps, **types)
    ptx = done.asm["ptx"]
    assert products(done) == {tiles.tokens}
    assert "cvt.rn.satfinite.e4m3x2.f32" in ptx if inside else "cvt.rn.satfinite.e4m3x2.f32" not in ptx
    # GEMM2's programs ask for weights before they wait for GEMM1's results.
    weights, wait = ptx.index("cp.async.bulk.tensor.2d.shared"), ptx.index("griddepcontrol.wait")
    assert (weights < wait) == (inside and not first)


@pytest.mark.parametrize(("first", "activation"), [(True, "silu"), (True, "relu2"), (False, "none")])
def test_specialised_warps(first: bool, activation: str):
    tiling = SORTED.first if first else SORTED.second
    constants = {
        "FIRST": first, "ACTIVATION": activation, "BIAS": True, "GROUP": tiling.group, "PDL": True,
        "STAGES": stages_of(tiling.stages, first=first),
    }  # fmt: skip
    types = {"x_desc": TOKENS_TYPE, "out_ptr": "*fp8e4nv" if first else "*bf16"}
    done = compiled(expert_gemm_fp8_specialised, constants, warps=tiling.warps, **TYPES | types)
    ptx = done.asm["ptx"]
    assert products(done) == {128}
    assert "cp.async.bulk.tensor.2d.shared" in ptx
    # GEMM2 lets the TMA store; the multiplying warps take the loading one's registers.
    assert ("cp.async.bulk.tensor.2d.global.shared" in ptx) == (not first)
    assert ptx.count("setmaxnreg.inc") > 1


@pytest.fixture(scope="module")
def results() -> dict[str, bool]:
    return interpreted.results("hopper/quantize_in_interpreter.py")


@pytest.mark.parametrize("case", ["rows", "places", "beside the sort"])
def test_interpreted(results: dict[str, bool], case: str):
    assert results[case]
