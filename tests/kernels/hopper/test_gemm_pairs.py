"""The GEMMs of few pairs compile for their target without a GPU, and as their design counts on it.

Gluon has no interpreter; their numbers are checked on a GPU (tests/moe/test_matrix.py, mark `gpu`).
"""

from __future__ import annotations

import re

import pytest

from tests.kernels.compiled import compiled
from turnout.kernels.hopper.gemm_pairs import gemm_of_pairs, gemm_of_tokens
from turnout.moe.backends.hopper.tile_config import Tiling
from turnout.moe.backends.hopper.tile_few import chunks
from turnout.moe.backends.hopper.tile_pairs import PAIR, shared_bytes, whole_chunks

K = 768
FIRST = [("mxfp4", Tiling(16, PAIR, 4, 2, 4, 1, 4), 64), ("bf16", Tiling(32, PAIR, 2, 3, 4, 1, 2), 32)]
SECOND = [("nvfp4", Tiling(16, PAIR, 4, 1, 8, 8, 1), 8), ("bf16", Tiling(16, PAIR, 2, 2, 4, 2, 2), 8)]


def text_of(kernel, format: str, tiling: Tiling, **constants) -> str:
    whole = whole_chunks(K, tiling.slices, tiling.k_blocks) if format == "bf16" else 0
    constants |= {
        "FORMAT": format, "BIAS": True, "BLOCK_N": tiling.rows, "K_BLOCKS": tiling.k_blocks,
        "CHUNKS": chunks(K, tiling.slices, tiling.k_blocks), "WHOLE": whole, "SLICES": tiling.slices,
        "AHEAD": tiling.stages, "PDL": True, "num_warps": tiling.warps,
    }  # fmt: skip
    pointers = {"w_ptr": "*bf16", "scales_ptr": "*fp32"} if format == "bf16" else {"w_ptr": "*i32"}
    done = compiled(kernel, constants, warps=tiling.warps, ids_ptr="*i32", **pointers)
    assert done.metadata.shared <= shared_bytes(tiling, K) + 1024
    return done.asm["ptx"]


def count(pattern: str, text: str) -> int:
    return len(re.findall(pattern, text))


def check_loop(text: str, format: str, tiling: Tiling) -> None:
    """Weights go from memory into operands, 16 bytes at a time, and nothing waits for another warp."""
    strips = tiling.rows * tiling.slices * tiling.group // (16 * tiling.warps)
    blocks = chunks(K, tiling.slices, tiling.k_blocks) * tiling.k_blocks
    assert count(r"mma\.sync\S*m16n8k16", text) == strips * blocks * 4
    assert count(r"ld\.global\S*\.v4\.b32", text) == strips * blocks * (4 if format == "bf16" else 1)
    first = text.index("mma.sync")
    loop = text[first : text.rindex("mma.sync")]
    assert "bar.sync" not in text[: text.index("cp.async")]
    assert not re.search(r"bar\.sync|st\.shared|shfl", loop)
    ahead = text[text.index("vote.sync") : first]
    most = min(blocks, tiling.stages * tiling.k_blocks)
    assert count(r"ld\.global\S*\.v4\.b32", ahead) >= strips * most


@pytest.mark.parametrize(("format", "tiling", "pairs"), FIRST, ids=["mxfp4", "bf16"])
def test_the_first_gemm_finds_its_pair_without_other_warps(format: str, tiling: Tiling, pairs: int):
    text = text_of(gemm_of_pairs, format, tiling, PAIRS=pairs, ACTIVATION="swiglu", LATE=False)
    check_loop(text, format, tiling)
    assert count("vote.sync", text) == pairs // 32
    assert text.index("griddepcontrol.wait") < text.index("vote.sync")  # ids are there only then


@pytest.mark.parametrize(("format", "tiling", "top_k"), SECOND, ids=["nvfp4", "bf16"])
def test_the_second_gemm_loads_weights_before_it_waits_for_the_first(format: str, tiling: Tiling, top_k: int):
    text = text_of(gemm_of_tokens, format, tiling, PAIRS=32, GROUP=tiling.group, ONCE=tiling.group >= top_k)
    check_loop(text, format, tiling)
    early = text[: text.index("griddepcontrol.wait")]
    assert count(r"ld\.global\S*\.v4\.b32", early) > 0
    assert "cp.async" not in early
    assert early.index("griddepcontrol.launch_dependents") < early.index("v4.b32")
