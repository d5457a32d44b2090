"""Products of many rows with FP8 weights by specialised warps: compiled for Hopper, and on a GPU."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.experimental.gluon import language as gl

from tests.kernels.bound import bound
from tests.kernels.compiled import compiled, machine_code
from tools import fit_dense_fp8
from tools.dense_fp8 import MATRICES
from turnout.config import Config
from turnout.engine.cuda_graph_policy import PREFILL_SIZES, graph_sizes
from turnout.engine.warmup import prompt_sizes
from turnout.formats.fp8 import decode_blocks, encode_blocks
from turnout.kernels.common import row_gemm
from turnout.kernels.hopper import dense_fp8
from turnout.kernels.hopper.dense_fp8 import Tile, faster, multiply_rows_specialised, parts, plan
from turnout.models import dense

TILES = [Tile(128, 2, 2, 3), Tile(128, 3, 1, 4), Tile(64, 2, 2, 4)]
RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
GRAPHS = Config(model="", cuda_graph_max_bs=512, max_running_requests=512)
SIZES = sorted({33, 63, 65, 127, 129, 191, 255, *graph_sizes(GRAPHS), *PREFILL_SIZES})


def results(file: str) -> list[dict[str, Any]]:
    return json.loads((RESULTS / file).read_text())["rows"]


@pytest.fixture(scope="module")
def measured() -> list[dict[str, Any]]:
    return results("dense-fp8-nvidia-h200-2026-11-26.json")


def test_the_constants_are_those_fitted_to_the_measurement(measured: list[dict[str, Any]]):
    known = [dense_fp8.PROGRAM_US, dense_fp8.MB_US, dense_fp8.PRODUCT_US, dense_fp8.BY_ROWS_US]
    known = [*dense_fp8.STEP_US.values(), *known]
    assert fit_dense_fp8.fitted(measured).tolist() == pytest.approx(known, abs=1e-3)


# Of 64 rows row_gemm.py's tile took 8.6 and 12.8 us of two products where the rule's took 10.0 and 14.6.
@pytest.mark.parametrize(("least", "most", "longest"), [(65, 256, 0.06), (1, 64, 0.16)])
def test_what_is_planned_took_little_longer_than_the_best_of_all(
    measured: list[dict[str, Any]], least: int, most: int, longest: float
):
    """The best of all ways that were measured, of each matrix and number of rows."""
    excess = []
    for row in measured:
        if least <= row["rows"] <= most:
            way = plan(row["rows"], row["outputs"], row["inputs"])
            excess.append(fit_dense_fp8.ways(row)[way] / min(row["ways"].values()) - 1)
    assert len(excess) >= 14
    assert max(excess) < longest
    assert sum(excess) / len(excess) < 0.03


@pytest.mark.parametrize("rows", [33, 64, 65, 100, 128, 129, 200, 256])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 256), (576, 7168), (12288, 2048), (2048, 512)])
def test_plans_are_of_tiles_that_fit(rows: int, outputs: int, inputs: int):
    """Also of shapes that were not measured: no part is empty, and no tile half empty."""
    tile, count = plan(rows, outputs, inputs)
    assert 1 <= count <= -(-inputs // 128)
    assert tile.rows == 64 or tile.rows < 2 * rows
    if isinstance(tile, row_gemm.Tile):
        assert rows <= 64
        assert count == row_gemm.part_count(tile, rows, outputs, inputs)


def test_models_take_it_where_it_was_faster():
    """On an H100: than row_gemm.py in the tile that models take."""
    found = results("dense-fp8-nvidia-h100-2026-11-27.json")
    taken = [row for row in found if faster(row["rows"], row["outputs"], row["inputs"])]
    assert [sum(row["rows"] == size for row in taken) for size in (64, 128, 256)] == [8, 20, 20]
    over = [row["ways"]["planned"] / row["ways"]["rows"] for row in taken]
    assert max(over) < 1.02
    assert sum(row["ways"]["planned"] for row in taken) < 0.75 * sum(row["ways"]["rows"] for row in taken)


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "kernel"),
    [
        (2, 12288, 2048, "multiply_few_rows"),
        (3, 12288, 2048, "multiply_part"),
        (32, 12288, 2048, "multiply_part"),
        (33, 12288, 2048, "multiply_rows_specialised"),
        (64, 36864, 7168, "multiply_rows_specialised"),
        (33, 4096, 4096, "multiply_rows"),
        (64, 2048, 4096, "multiply_rows"),
        (64, 256, 7168, "multiply_part"),
        (65, 256, 7168, "multiply_rows_specialised"),
        (65, 2048, 512, "multiply_rows_specialised"),
        (256, 4096, 4096, "multiply_rows_specialised"),
        (257, 4096, 4096, None),
        (256, 4096, 4104, "multiply_rows"),  # where the TMA cannot read
    ],
)
def test_which_kernel_multiplies(
    rows: int, outputs: int, inputs: int, kernel: str | None, monkeypatch: pytest.MonkeyPatch
):
    """As models ask for a product; on Hopper, were it not for the launch. None: the library's, of decoded
    weights."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    data = torch.empty(outputs, inputs, dtype=torch.float8_e4m3fn)
    weight = dense.Fp8Weight(data, torch.empty(-(-inputs // 128), outputs), 128)
    with bound() as launched:
        found = dense._parts(torch.empty(rows, inputs, dtype=torch.bfloat16), weight, None)
    assert {name for name, _ in launched} == ({kernel} if kernel else set())
    assert (found is None) == (kernel is None)


def test_steps_of_all_sizes_have_plans_of_first_prompts():
    """Decode graphs and prefill graphs too: each number of parts is a kernel of its own for what adds up."""
    assert {40, 64, 72, 192, 256} < set(SIZES)
    for outputs, inputs in MATRICES.values():
        plans = {plan(size, outputs, inputs) for size in prompt_sizes(2048, 1) if 32 < size <= 256}
        assert {plan(size, outputs, inputs) for size in SIZES if 32 < size <= 256} <= plans


def test_parts_are_no_larger_than_decoded_weights():
    """Of more rows a piece of 64 MB is decoded at a time: parts of fewer rows need no more memory."""
    for outputs, inputs in (*MATRICES.values(), (576, 18432), (256, 65536), (18432, 7168)):
        for rows in range(33, 257):
            tile, count = plan(rows, outputs, inputs)
            assert count == 1 or count * rows * outputs * 4 <= 2 * dense.MOST_DECODED, (tile, count)


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
@pytest.mark.parametrize("tile", [*TILES, None])
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs"), [(65, 576, 7168), (77, 2112, 1536), (100, 1008, 1040), (130, 208, 272)]
)
@pytest.mark.parametrize("count", [None, 1])
def test_products_on_a_gpu(tile: Tile | None, rows: int, outputs: int, inputs: int, count: int | None):
    """Next to float64 products by the decoded weights; also where tiles, groups and stages are not full."""
    torch.manual_seed(0)
    data, scale = (found.cuda() for found in encode_blocks(torch.randn(outputs, inputs)))
    decoded = decode_blocks(data, scale).bfloat16()
    x = torch.randn(rows, inputs, device="cuda").bfloat16()
    scale_GM = scale.repeat_interleave(128, 0)[:outputs].T.contiguous()
    found = parts(x, data, scale_GM, tile, count).double().sum(0)
    wanted = x.double() @ decoded.double().T
    assert float((found - wanted).abs().max() / wanted.square().mean().sqrt()) < 1e-3
