"""Dispatcher "nvlink" on CPUs: its kernels in Triton's interpreter, between processes that share memory.

What they compute, in every format and layout of ranks; that they compile for Hopper, few enough registers for
as many programs as are launched; and what becomes of a peer that does not come. Between GPUs:
tests/moe/backends/nvlink/test_nvlink_gpu.py.
"""

from __future__ import annotations

import inspect

import pytest
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_kernel

from tests.kernels import interpreted
from turnout.kernels.nvlink import combine, links
from turnout.kernels.nvlink import dispatch as sending

CASES = (
    "bf16", "fp8", "nvfp4", "back in fp8", "three ranks", "three ranks, back in fp8", "shared", "in turns",
    "batched", "deserted", "overfull",
)  # fmt: skip


@pytest.fixture(scope="module")
def results() -> dict[str, bool]:
    return interpreted.results("nvlink/nvlink_in_interpreter.py")


@pytest.mark.parametrize("case", CASES)
def test_every_row_and_every_sum(results: dict[str, bool], case: str):
    assert results[case]


TYPES = dict.fromkeys(("x_ptr", "y_ptr", "out_ptr", "weights_ptr"), "*i32") | {"limit": "i64"}
TYPES |= dict.fromkeys(("ids_ptr", "out_ids_ptr", "received_ptr"), "*i32")
TYPES |= dict.fromkeys(("out_weights_ptr", "scale_ptr"), "*fp32")
TYPES |= dict.fromkeys(("addresses_ptr", "epochs_ptr", "failed_ptr", "told_ptr"), "*i64")
SIZES = {
    "RANK": 1, "RANKS": 4, "RP": 4, "TP": 1, "K": 8, "KP": 8, "H": 7168, "PARTS": 1, "BLOCK": 16, "LAG": 1,
    "KIND": tl.bfloat16, "BACK": "bf16", "STRIDE": 14336, "INTERPRETED": False,
}  # fmt: skip
PACKED = {"bf16": 2, "nvfp4": 8}  # columns of a word


def ptx(kernel, **constants) -> str:
    """Compiled for Hopper, as launched: 16-byte pointers, sizes that are multiples of 16."""
    constants = SIZES | constants
    signature, values, attributes = {}, {}, {}
    for place, name in enumerate(inspect.signature(kernel.fn).parameters):
        if name in constants:
            signature[name], values[(place,)] = "constexpr", constants[name]
            continue
        signature[name] = TYPES.get(name, "i32")
        if name == "x_ptr" and constants["FORMAT"] != "bf16":
            signature[name] = "*bf16"
        if name in ("y_ptr", "out_ptr") and constants["BACK"] != "bf16":
            signature[name] = "*bf16"
        if name not in ("tokens", "room", "few", "limit"):
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature=signature, constexprs=values, attrs=attributes)
    warps = links.WARPS if constants["ALL_WORDS"] else links.MANY_WARPS
    options = {"num_warps": warps, "maxnreg": links.REGISTERS}
    return compile_kernel(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]


def dispatch(format: str, words: bool) -> str:
    row, scale_row = 7168 // PACKED[format], 112 if format == "nvfp4" else 0
    return ptx(
        sending.dispatch_rows, FORMAT=format, ROW=row, SCALE_ROW=scale_row, STRIDE=4 * (row + scale_row),
        W=(8192 if words else 4096) // PACKED[format], S=(128 if words else 64) if scale_row else 1,
        WORDS=words, ALL_WORDS=words,
    )  # fmt: skip


@pytest.mark.parametrize("format", ["bf16", "nvfp4"])
def test_dispatch_by_flags_for_hopper(format: str):
    """Tokens leave 16 (nvfp4: 8) bytes at a time; flags are released."""
    code = dispatch(format, words=False)
    wide = "st.global.v2.b32" if format == "nvfp4" else "st.global.v4.b32"
    assert wide in code
    assert "atom.global.sys.release.exch.b64" in code
    assert f".maxnreg {links.REGISTERS}" in code
    assert "bar.red.popc" in code  # all warps leave a wait together
    assert "ld.acquire.sys.global.b64" in code


def test_dispatch_in_words_for_hopper():
    """16 bytes at a time both ways, and no fence."""
    code = dispatch("bf16", words=True)
    for part in ("st.global.v4.b32", "ld.volatile.global.v4.b32", "bar.red.popc"):
        assert part in code
    assert "fence" not in code
    assert "release" not in code


@pytest.mark.parametrize("words", [True, False])
def test_combine_for_hopper(words: bool):
    code = ptx(combine.combine_rows, ROW=3584, W=4096, WORDS=words, ALL_WORDS=words)
    assert "st.global.v4.b32" in code
    assert "bar.red.popc" in code
    assert ("ld.volatile.global.v4.b32" in code) is words
    assert ("atom.global.sys.release.exch.b64" in code) is not words
    assert f".maxnreg {links.REGISTERS}" in code


@pytest.mark.parametrize("words", [True, False])
def test_combine_in_fp8_for_hopper(words: bool):
    """Results leave and come at least 8 bytes at a time."""
    code = ptx(
        combine.combine_rows, ROW=1792, W=256 if words else 1024, STRIDE=7392, BACK="fp8", WORDS=words,
        ALL_WORDS=words,
    )  # fmt: skip
    assert ("st.global.v2.b32" if words else "st.global.v4.b32") in code
    assert ("ld.volatile.global.v2.b32" in code) is words
    assert ("atom.global.sys.release.exch.b64" in code) is not words
    assert f".maxnreg {links.REGISTERS}" in code
