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
from turnout.moe.backends.hopper.kernels import Fp8, fp8
from turnout.moe.backends.hopper.kernels.fp8_sorted import ONLY
from turnout.moe.backends.hopper.tile_config import MIN_TOKENS

TILE, ROWS = gl.NVMMASharedLayout(128, 8, 2), gl.NVMMASharedLayout(128, 16, 2)


def weights_type(rows: int) -> str:
    return f"tensordesc<fp8e4nv[{rows}, 128],{TILE!r}>"


TYPES = {
    "w_desc": weights_type(ONLY.block_n),
    "out_desc": f"tensordesc<bf16[64, 128],{ROWS!r}>",
}
TOKENS_TYPE = f"tensordesc<fp8e4nv[64, 128],{TILE!r}>"


def products(done) -> set[int]:
    """The widths of the tensor cores' products."""
    return {int(n) for n in re.findall(r"wgmma\.mma_async\S*m64n(\d+)k32\.f32\.e4m3\.e4m3", done.asm["ptx"])}


# Pairs that are not sorted are tiles of their own.
SMALL = [
    (tiles, direct)
    for tiles in (*(config for _, config in fp8.RULES), *fp8.WIDER.values())
    for direct in ((False, True) if tiles.block_m == MIN_TOKENS else (False,))
]


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(("tiles", "direct"), SMALL, ids=str)
def test_small_tiles(tiles: Fp8, direct: bool, first: bool):
    groups = 7  # no whole number of steps
    inside = tiles.quantizes(128 * groups, first=first, unsorted=direct)
    assert inside == (direct or (not first and tiles.block_m == MIN_TOKENS))
    constants = {
        "GROUPS": groups, "INSIDE": inside, "ACTIVATION": "silu" if first else "none", "GATHER": first,
        "SCATTER": not first, "DIRECT": direct, "PAIRED": first, "BIAS": False, "BLOCK_N": tiles.block_n,
        "TOKENS": tiles.block_m, "K_BLOCKS": tiles.block_k // 128, "STAGES": tiles.num_stages,
        "TILES_GROUP": tiles.group_m, "PDL": True, "num_warps": tiles.num_warps,
    }  # fmt: skip
    types = {"x_ptr": "*bf16" if inside else "*fp8e4nv", "w_desc": weights_type(tiles.block_n)}
    done = compiled(expert_gemm_fp8, constants, warps=tiles.num_warps, **types)
    ptx = done.asm["ptx"]
    assert products(done) == {tiles.block_m}
    assert "cvt.rn.satfinite.e4m3x2.f32" in ptx if inside else "cvt.rn.satfinite.e4m3x2.f32" not in ptx
    # GEMM2's programs ask for weights before they wait for GEMM1's results.
    weights, wait = ptx.index("cp.async.bulk.tensor.2d.shared"), ptx.index("griddepcontrol.wait")
    assert (weights < wait) == (inside and not first)


@pytest.mark.parametrize(
    ("first", "activation"),
    [(True, "silu"), pytest.param(True, "relu2", marks=pytest.mark.more), (False, "none")],
)
def test_specialised_warps(first: bool, activation: str):
    constants = {
        "FIRST": first, "ACTIVATION": activation, "BIAS": True, "GROUP": ONLY.group_m, "PDL": True,
        "STAGES": stages_of(ONLY.num_stages, first=first),
    }  # fmt: skip
    types = {"x_desc": TOKENS_TYPE, "out_ptr": "*fp8e4nv" if first else "*bf16"}
    done = compiled(expert_gemm_fp8_specialised, constants, warps=ONLY.num_warps, **TYPES | types)
    ptx = done.asm["ptx"]
    assert products(done) == {128}
    assert "cp.async.bulk.tensor.2d.shared" in ptx
    # GEMM2 lets the TMA store; the multiplying warps take the loading one's registers.
    assert ("cp.async.bulk.tensor.2d.global.shared" in ptx) == (not first)
    assert ptx.count("setmaxnreg.inc") > 1


@pytest.fixture(scope="module")
def results() -> dict[str, bool]:
    return interpreted.results("hopper/quantize_in_interpreter.py")


@pytest.mark.parametrize("case", ["rows", "places", "next to the sort"])
def test_interpreted(results: dict[str, bool], case: str):
    assert results[case]
