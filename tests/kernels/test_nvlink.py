"""Dispatcher "nvlink" on CPUs: its kernels in Triton's interpreter, between processes that share memory.

What they compute, in every format and arrangement; that they compile for Hopper, few enough registers for as
many programs as are launched; and what becomes of a peer that does not come. Between GPUs:
tests/moe/test_nvlink_gpu.py.
"""

from __future__ import annotations

import inspect

import pytest
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_kernel

from tests.kernels import interpreted
from turnout.kernels import nvlink

CASES = ("bf16", "fp8", "nvfp4", "three ranks", "shared", "deserted")


@pytest.fixture(scope="module")
def results() -> dict[str, bool]:
    return interpreted.results("nvlink_in_interpreter.py")


@pytest.mark.parametrize("case", CASES)
def test_every_row_and_every_sum(results: dict[str, bool], case: str):
    assert results[case]


TYPES = {"x_ptr": "*bf16", "y_ptr": "*bf16", "out_ptr": "*bf16", "limit": "i64"}
TYPES |= dict.fromkeys(("ids_ptr", "out_ids_ptr", "received_ptr"), "*i32")
TYPES |= dict.fromkeys(("weights_ptr", "out_weights_ptr", "scale_ptr"), "*fp32")
TYPES |= dict.fromkeys(("addresses_ptr", "epochs_ptr", "failed_ptr", "told_ptr"), "*i64")
SIZES = {
    "RANK": 1, "RANKS": 8, "RP": 8, "TP": 1, "K": 8, "KP": 8, "H": 7168, "P": 7, "PP": 8, "PIECE": 1024,
    "INTERPRETED": False, "PUSH": True, "WAIT": True,
}  # fmt: skip


def ptx(kernel, **constants) -> str:
    """Compiled for Hopper, as launched: 16-byte pointers, sizes that are multiples of 16."""
    constants = SIZES | constants
    signature, values, attributes = {}, {}, {}
    for place, name in enumerate(inspect.signature(kernel.fn).parameters):
        if name in constants:
            signature[name], values[(place,)] = "constexpr", constants[name]
            continue
        signature[name] = TYPES.get(name, "i32")
        if name not in ("tokens", "room", "limit"):
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature=signature, constexprs=values, attrs=attributes)
    return compile_kernel(source, target=GPUTarget("cuda", 90, 32), options=nvlink.OPTIONS).asm["ptx"]


@pytest.mark.parametrize("format", ["bf16", "nvfp4"])
def test_dispatch_for_hopper(format: str):
    """Tokens leave 16 (nvfp4: 8) bytes at a time, then a barrier, then the flags' release."""
    code = ptx(nvlink.dispatch_rows, PIECES=8, BLOCK=16, FORMAT=format)
    wide = "st.global.v2.b32" if format == "nvfp4" else "st.global.v4.b32"
    stored, released = code.rfind(wide), code.find("atom.global.sys.release.exch.b64")
    assert stored > 0
    assert released > 0
    assert f".maxnreg {nvlink.REGISTERS}" in code
    assert "bar.red.popc" in code  # all warps leave a wait together
    assert "fence.acq_rel.sys" in code


def test_combine_for_hopper():
    code = ptx(nvlink.combine_rows, ROWS=4, PIECES=8, SUM_PIECES=4)
    for part in ("st.global.v4.b32", "atom.global.sys.release.exch.b64", "fence.acq_rel.sys", "bar.red.popc"):
        assert part in code
    assert f".maxnreg {nvlink.REGISTERS}" in code
