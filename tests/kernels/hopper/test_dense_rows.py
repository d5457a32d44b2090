"""Products of 9 to 128 rows by specialised warps: compiled for Hopper, and on a GPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from triton.experimental.gluon import language as gl

from tests.kernels.compiled import compiled, machine_code
from turnout.config import Config
from turnout.engine.cuda_graph_policy import PREFILL_SIZES, graph_sizes
from turnout.engine.warmup import prompt_sizes
from turnout.kernels.common import rowwise
from turnout.kernels.common.row_gemm import PROCESSORS
from turnout.kernels.hopper.dense_rows import REGISTERS, Tile, multiply_some_rows, parts, plan, runs

QWEN3 = {(2048, 4096): (Tile(64, 1, 3), 4), (5120, 2048): (Tile(64, 2, 2), 3)}
SIZES = graph_sizes(Config(model="", cuda_graph_max_bs=512, max_running_requests=512))


@pytest.mark.parametrize(("shape", "way"), QWEN3.items())
def test_plans_keep_multiprocessors_at_work(shape: tuple[int, int], way: tuple[Tile, int]):
    assert {plan(rows, *shape) for rows in range(33, 65)} == {way}


def test_steps_of_all_sizes_have_plans_of_first_prompts():
    """Decode graphs and prefill graphs too."""
    for outputs, inputs in (*QWEN3, (128, 2048), (2112, 7168), (576, 7168)):
        plans = {plan(size, outputs, inputs) for size in prompt_sizes(2048, 1) if 9 <= size <= 128}
        sizes = {*SIZES, *PREFILL_SIZES, 9, 17, 33, 65, 127}
        assert {plan(size, outputs, inputs) for size in sizes if 9 <= size <= 128} <= plans


@pytest.mark.parametrize("inputs", [64, 256, 2048, 7168])
def test_programs_run_at_once(inputs: int):
    """None has nothing to do or much more than its share, and steps are loaded ahead."""
    steps = -(-inputs // 128)
    for outputs in range(64, 20000, 192):
        way = plan(64, outputs, inputs)
        assert way is None or outputs <= 128 * PROCESSORS
        if way is not None:
            tile, count = way
            assert -(-outputs // (64 * tile.groups)) * count <= PROCESSORS
            assert 1 <= count <= steps
            assert tile.stages >= min(2, steps // count)
            longest, share = tile.groups * -(-steps // count), outputs / 64 * steps / PROCESSORS
            assert longest <= max(8, 1.4 * share)


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "taken"),
    [
        (8, 2048, 4096, False),  # split_gemm.py's
        (9, 2048, 4096, True),
        (128, 5120, 2048, True),
        (129, 2048, 4096, False),
        (64, 40000, 2048, False),
        (64, 9000, 2880, False),  # half of the multiprocessors would wait
        (64, 2048, 4100, False),  # where the TMA cannot read
    ],
)
def test_which_products_are_taken(
    rows: int, outputs: int, inputs: int, taken: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    x, weight = (torch.empty(n, inputs, dtype=torch.bfloat16) for n in (rows, outputs))
    assert runs(x, weight) == taken
    assert not runs(x, weight.half())


@pytest.mark.parametrize(
    "tile",
    [Tile(64, 1, 3), Tile(64, 2, 2), Tile(32, 1, 4), Tile(16, 1, 5), Tile(128, 1, 4)],
    ids=lambda tile: str(tuple(tile)),
)
def test_compiles_as_designed(tile: Tile, tmp_path: Path):
    box = repr(gl.NVMMASharedLayout(128, 16, 2))
    constants = {"ROWS": tile.rows, "GROUPS": tile.groups, "STAGES": tile.stages, "PDL": True}
    done = compiled(
        multiply_some_rows, constants, warps=4, multiples=("M",), most_registers=REGISTERS,
        x_desc=f"tensordesc<bf16[{tile.rows}, 64],{box}>",
        w_desc=f"tensordesc<bf16[{64 * tile.groups}, 64],{box}>",
    )  # fmt: skip
    text = done.asm["ptx"]
    instructions, needs = machine_code(done, tmp_path)
    products = 8 * tile.groups  # of 16 of a step's 128 inputs each
    assert len(re.findall(rf"wgmma\.mma_async\S*m64n{tile.rows}k16", text)) == products
    assert instructions.count("HGMMA") == products
    assert "STACK:0" in needs  # nothing is spilt
    loading = text.partition("griddepcontrol.wait")[0]
    assert len(re.findall(r"cp\.async\.bulk\.tensor", loading)) >= 2  # weights come before the wait


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [9, 16, 31, 50, 64, 128])
@pytest.mark.parametrize(
    ("outputs", "inputs"), [(2048, 4096), (5120, 2048), (200, 1000), (64, 64), (8000, 2880)]
)
def test_products_on_a_gpu(rows: int, outputs: int, inputs: int):
    """Next to float64 products; also where tiles and steps are not full, and one after another."""
    torch.manual_seed(0)
    x = torch.randn(rows, inputs, device="cuda").bfloat16()
    weight = (torch.randn(outputs, inputs, device="cuda") * inputs**-0.5).bfloat16()
    assert runs(x, weight)
    wanted = x.double() @ weight.double().T
    for count in (None, 1, 2):
        way = plan(rows, outputs, inputs)
        assert way is not None
        if count is not None and count > -(-inputs // 128):
            continue
        found = parts(x, weight, (way[0], count) if count else None)
        assert float((found.double().sum(0) - wanted).abs().max()) < 1e-4
    given = rowwise.product(torch.nn.functional.linear, x, weight, None)
    assert float((given.double().sum(0) - wanted).abs().max()) < 1e-4
