"""Products of many rows with FP8 weights by specialised warps: compiled for Hopper, and on a GPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from triton.experimental.gluon import language as gl

from tests.kernels.compiled import compiled, machine_code
from turnout.formats.fp8 import decode_blocks, encode_blocks
from turnout.kernels.hopper.dense_fp8 import Tile, multiply_rows_specialised, parts

TILES = [Tile(128, 2, 2, 3), Tile(128, 3, 1, 4), Tile(64, 2, 2, 4)]


@pytest.mark.parametrize("tile", TILES)
def test_compiles_as_designed(tile: Tile, tmp_path: Path):
    constants = {"ROWS": tile.rows, "GROUPS": tile.groups, "BLOCKS": tile.blocks, "STAGES": tile.stages}
    done = compiled(
        multiply_rows_specialised, constants | {"PDL": True}, warps=4, multiples=("M",),
        x_desc=f"tensordesc<bf16[{tile.rows}, 64],{gl.NVMMASharedLayout(128, 16, 2)!r}>",
        w_desc=f"tensordesc<fp8e4nv[{64 * tile.blocks}, 128],{gl.NVMMASharedLayout(128, 8, 2)!r}>",
    )  # fmt: skip
    text = done.asm["ptx"]
    instructions, needs = machine_code(done, tmp_path)
    products = 8 * tile.groups * tile.blocks  # of 16 of a step's 128 inputs each
    assert len(re.findall(rf"wgmma\.mma_async\S*m64n{tile.rows}k16", text)) == products
    assert instructions.count("HGMMA") == products
    # Two of them are under way together while the next are decoded: none waits for operands.
    assert len(re.findall(r"HGMMA.*gsb0", instructions)) == products // 2
    assert "STACK:0" in needs  # nothing is spilt


@pytest.mark.gpu
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs"), [(65, 576, 7168), (77, 2112, 1536), (100, 1008, 1040), (130, 208, 272)]
)
@pytest.mark.parametrize("count", [None, 1])
def test_products_on_a_gpu(tile: Tile, rows: int, outputs: int, inputs: int, count: int | None):
    """Next to float64 products by the decoded weights; also where tiles, groups and stages are not full."""
    torch.manual_seed(0)
    data, scale = (found.cuda() for found in encode_blocks(torch.randn(outputs, inputs)))
    decoded = decode_blocks(data, scale).bfloat16()
    x = torch.randn(rows, inputs, device="cuda").bfloat16()
    scale_GM = scale.repeat_interleave(128, 0)[:outputs].T.contiguous()
    found = parts(x, data, scale_GM, tile, count).double().sum(0)
    wanted = x.double() @ decoded.double().T
    assert float((found - wanted).abs().max() / wanted.square().mean().sqrt()) < 1e-3
