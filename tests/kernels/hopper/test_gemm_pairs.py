"""The GEMMs of few pairs compile for their target without a GPU, and as their design counts on it.

Gluon has no interpreter; their numbers are checked on a GPU (tests/moe/test_matrix.py, mark `gpu`).
"""

from __future__ import annotations

import inspect
import re

import pytest

from tests.kernels.compiled import compiled
from turnout.kernels.hopper.gemm_pairs import gemm_of_pairs, gemm_of_tokens
from turnout.moe.backends.hopper.kernels import Pairs
from turnout.moe.backends.hopper.kernels.pairs import whole_chunks
from turnout.moe.backends.hopper.layer_shape import LayerShape
from turnout.moe.backends.hopper.tile_config import chunks

K = 768
FIRST = [
    ("mxfp4", Pairs(16, 1, 256, 2, 4, 1, 4), 64),
    ("int4", Pairs(16, 1, 256, 2, 4, 1, 4), 64),
    ("bf16", Pairs(32, 1, 128, 3, 4, 1, 2), 32),
]
CHOSEN_BEFORE = {"TOP_K": 0, "PARTS": 1, "OF_ALL": False, "PADDED": False, "LOGITS": 32}
CHOOSING = {"TOP_K": 8, "PARTS": 2, "PADDED": True, "LOGITS": 128}
SECOND = [("nvfp4", Pairs(16, 1, 256, 1, 8, 8, 1), 8), ("bf16", Pairs(16, 1, 128, 2, 4, 2, 2), 8)]


def text_of(kernel, format: str, config: Pairs, **constants) -> str:
    whole = whole_chunks(K, config.split_k, config.block_k) if format == "bf16" else 0
    constants = {
        "FORMAT": format, "BIAS": True, "BLOCK_N": config.block_n, "K_BLOCKS": config.block_k // 64,
        "CHUNKS": chunks(K, config.split_k, config.block_k), "WHOLE": whole, "SLICES": config.split_k,
        "AHEAD": config.num_stages, "PDL": True, "num_warps": config.num_warps,
    } | CHOSEN_BEFORE | constants  # fmt: skip
    pointers = {"w_ptr": "*bf16", "scales_ptr": "*fp32"} if format == "bf16" else {"w_ptr": "*i32"}
    of_kernel = inspect.signature(kernel.fn).parameters
    constants = {name: value for name, value in constants.items() if name in of_kernel}
    pointers |= {"ids_ptr": "*i32", "real_ptr": "*i1", "counts_ptr": "*i64"}
    done = compiled(kernel, constants, warps=config.num_warps, **pointers)
    layer = LayerShape(format=format, hidden=K, inner=K, w13_rows=K, num_experts=8, local_experts=8, top_k=8)
    assert done.metadata.shared <= config.shared_bytes(layer, first=True) + 1024
    return done.asm["ptx"]


def count(pattern: str, text: str) -> int:
    return len(re.findall(pattern, text))


def check_loop(text: str, format: str, config: Pairs, found: str = "vote.sync") -> None:
    """Weights go from memory into operands, 16 bytes at a time, and nothing waits for another warp."""
    strips = config.block_n * config.split_k * config.group_m // (16 * config.num_warps)
    blocks = chunks(K, config.split_k, config.block_k) * config.block_k // 64
    assert count(r"mma\.sync\S*m16n8k16", text) == strips * blocks * 4
    assert count(r"ld\.global\S*\.v4\.b32", text) == strips * blocks * (4 if format == "bf16" else 1)
    first = text.index("mma.sync")
    loop = text[first : text.rindex("mma.sync")]
    assert "bar.sync" not in text[: text.index("cp.async")]
    assert not re.search(r"bar\.sync|st\.shared|shfl", loop)
    ahead = text[text.index(found) : first]
    most = min(blocks, config.num_stages * config.block_k // 64)
    assert count(r"ld\.global\S*\.v4\.b32", ahead) >= strips * most


@pytest.mark.parametrize(("format", "config", "pairs"), FIRST, ids=["mxfp4", "int4", "bf16"])
def test_the_first_gemm_finds_its_pair_without_other_warps(format: str, config: Pairs, pairs: int):
    text = text_of(gemm_of_pairs, format, config, PAIRS=pairs, ACTIVATION="swiglu", LATE=False)
    check_loop(text, format, config)
    assert count("vote.sync", text) == pairs // 32
    assert text.index("griddepcontrol.wait") < text.index("vote.sync")  # ids are there only then


@pytest.mark.parametrize(("format", "config", "top_k"), SECOND, ids=["nvfp4", "bf16"])
def test_the_second_gemm_loads_weights_before_it_waits_for_the_first(format: str, config: Pairs, top_k: int):
    text = text_of(
        gemm_of_tokens, format, config, PAIRS=32, GROUP=config.group_m, ONCE=config.group_m >= top_k
    )
    check_loop(text, format, config)
    early = text[: text.index("griddepcontrol.wait")]
    assert count(r"ld\.global\S*\.v4\.b32", early) > 0
    assert "cp.async" not in early
    assert early.index("griddepcontrol.launch_dependents") < early.index("v4.b32")


@pytest.mark.parametrize(("format", "config", "pairs"), FIRST[::2], ids=["mxfp4", "bf16"])
def test_the_first_gemm_may_choose_without_other_warps(format: str, config: Pairs, pairs: int):
    text = text_of(gemm_of_pairs, format, config, PAIRS=32, ACTIVATION="swiglu", LATE=False, **CHOOSING)
    assert "bar.sync" not in text[: text.index("cp.async")]
    assert count("vote.sync", text) == 0
    assert count("redux.sync", text) >= 16  # the largest that is left, and the first expert that has it
    assert count(r"\b(atom|red)\.\S*add\.u64", text) == 1


@pytest.mark.parametrize("of_all", [False, True])
@pytest.mark.parametrize(("format", "config", "top_k"), SECOND, ids=["nvfp4", "bf16"])
def test_the_second_gemm_may_choose_before_it_waits(format: str, config: Pairs, top_k: int, of_all: bool):
    text = text_of(
        gemm_of_tokens, format, config, PAIRS=32, GROUP=config.group_m, ONCE=config.group_m >= top_k,
        OF_ALL=of_all, **CHOOSING,
    )  # fmt: skip
    check_loop(text, format, config, found="redux.sync")
    early = text[: text.index("griddepcontrol.wait")]
    assert count("redux.sync", early) >= 16
    assert count(r"ld\.global\S*\.v4\.b32", early) > 0
    assert early.index("griddepcontrol.launch_dependents") < early.index("v4.b32")
