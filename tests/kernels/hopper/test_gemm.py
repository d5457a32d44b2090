"""The Hopper GEMMs compile for their target without a GPU, and into the code that their designs count on.

Gluon has no interpreter; their numbers are checked on a GPU (tests/moe/test_matrix.py, mark `gpu`).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.kernels.compiled import compiled, machine_code
from turnout.kernels.hopper.gemm import expert_gemm
from turnout.kernels.hopper.gemm_packed import expert_gemm_packed, most_registers, rest_of
from turnout.moe.backends.hopper.kernels import packed, plain
from turnout.moe.backends.hopper.tile_config import SHARED_BYTES, TileConfig


def name(config: TileConfig) -> str:
    return "-".join(map(str, msgspec.structs.astuple(config)))


# Each tiling but the widest, which only rows by expert use; of the 4-bit formats, to save time, one in turn,
# both for the narrowest. Those that take longest to compile are the same code as the others.
PACKED = [config for _, config in packed.RULES][:-1]
CASES = [
    pytest.param(("mxfp4", "nvfp4")[i % 2], config, marks=[pytest.mark.more] if config.block_m == 64 else [])
    for i, config in enumerate(PACKED)
]
CASES += [pytest.param("nvfp4", PACKED[0])]
CASES += [
    pytest.param("int4", config, marks=pytest.mark.more) for config in (PACKED[0], PACKED[1], PACKED[3])
]
RESIDENT = {8: 5, 16: 6, 32: 4, 64: 3}  # programs of a multiprocessor


@pytest.mark.parametrize("tiles", [config for _, config in plain.RULES], ids=name)
def test_bf16_compiles_as_designed(tiles: TileConfig):
    constants = common(tiles) | {"K_BLOCKS": tiles.block_k // 64, "num_warps": tiles.num_warps}
    text = compiled(expert_gemm, constants, warps=tiles.num_warps, w_ptr="*bf16").asm["ptx"]
    blocks = tiles.block_n // 64 * 4 // tiles.num_warps
    assert products(text) == blocks * 4 * max(2, tiles.block_k // 64)
    assert "cp.async.cg.shared.global" in text


@pytest.mark.parametrize(("format", "tiles"), CASES, ids=lambda v: v if isinstance(v, str) else name(v))
def test_4_bits_compile_as_designed(format: str, tiles: TileConfig, tmp_path: Path):
    k_blocks = 46 if tiles.num_stages == 5 else 32
    rest, ahead = rest_of(k_blocks, tiles.num_stages), tiles.num_stages - 2
    constants = common(tiles) | {"FORMAT": format, "REST": rest, "WHOLE": True}
    done = compiled(
        expert_gemm_packed,
        constants,
        warps=4,
        most_registers=most_registers(tiles.block_n, tiles.block_m),
        w_ptr="*i32",
    )
    text = done.asm["ptx"]
    steps = tiles.num_stages + rest + ahead
    widths = {tiles.block_m} | ({32} if tiles.block_m == 64 and tiles.group_m == 1 else set())
    for width in widths:
        places = [at.start() for at in re.finditer(rf"wgmma\.mma_async\S*m64n{width}k16", text)]
        assert len(places) == tiles.block_n // 64 * 4 * steps
        body = text[places[0] : places[-1]]
        assert body.count("bar.sync") == steps - 1  # none between the requests and the products of a step
        assert "st.shared" not in body  # operands come from registers that decoding wrote, by no detour
        assert "shfl" not in body
    code, usage = machine_code(done, tmp_path)
    registers = -(-int(re.findall(r"REG:(\d+)", usage)[0]) // 8) * 8
    resident = min(65536 // (128 * registers), SHARED_BYTES // (done.metadata.shared + 1024))
    assert resident >= RESIDENT[tiles.block_m]
    parts = 4 if tiles.block_m == 16 else 2
    assert len(re.findall("WARPGROUP.ARRIVE", code)) == parts * steps * len(
        widths
    )  # products are not serialised


def common(tiles: TileConfig) -> dict[str, Any]:
    first = tiles.block_m != 16
    return {
        "ACTIVATION": "swiglu" if first else "none", "GATHER": first, "SCATTER": not first, "DIRECT": False,
        "BIAS": True, "BLOCK_N": tiles.block_n, "TOKENS": tiles.block_m, "STAGES": tiles.num_stages,
        "GROUP": tiles.group_m, "PDL": True,
    }  # fmt: skip


def products(text: str) -> int:
    return len(re.findall(r"wgmma\.mma_async\S*m64n(\d+)k16", text))
