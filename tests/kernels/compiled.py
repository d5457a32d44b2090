"""Compiling kernels for Hopper without a GPU, as their runner would."""

from __future__ import annotations

import inspect
import subprocess
from pathlib import Path
from typing import Any

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_kernel
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

from turnout.moe.backends.hopper.tile_config import SHARED_BYTES

TARGET = GPUTarget("cuda", 90, 32)
TYPES = {"x_ptr": "*bf16", "out_ptr": "*bf16", "order_ptr": "*i32", "tiles_ptr": "*i32", "scales_ptr": "*i32"}
MULTIPLES = ("K", "x_stride", "out_stride")  # of 16, as pointers are


def compiled(
    kernel: Any,
    constants: dict[str, Any],
    *,
    warps: int,
    multiples: tuple[str, ...] = MULTIPLES,
    most_registers: int | None = None,
    stages: int = 0,
    **types: str,
) -> Any:
    """`kernel` with `constants`. types: of its pointers and descriptors, where not TYPES'; else *fp32.
    stages: 0: as many as Triton takes unasked.

    Numbers are int32, those of an activation float32. It fits into the memory of a multiprocessor.
    """
    signature, values, attributes = {}, {}, {}
    for place, name in enumerate(inspect.signature(kernel.fn).parameters):
        if name in constants:
            signature[name], values[(place,)] = "constexpr", constants[name]
        elif name.endswith(("_ptr", "_from", "_desc")):
            signature[name] = (TYPES | types).get(name, "*fp32")
            if signature[name].startswith("*"):
                attributes[(place,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if name.startswith("act_") else "i32"
            if name in multiples:
                attributes[(place,)] = [["tt.divisibility", 16]]
    options = {"num_warps": warps} | ({} if most_registers is None else {"maxnreg": most_registers})
    if stages:
        options["num_stages"] = stages
    language = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    source = language(kernel, signature=signature, constexprs=values, attrs=attributes)
    done = compile_kernel(source, target=TARGET, options=options)
    assert done.metadata.shared <= SHARED_BYTES
    return done


def machine_code(done: Any, folder: Path) -> tuple[str, str]:
    """The instructions of what `compiled` returned, and what it needs of registers and of a stack."""
    file = folder / "kernel.cubin"
    file.write_bytes(done.asm["cubin"])

    def dump(what: str) -> str:
        command = [knobs.nvidia.cuobjdump.path, what, file]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    return dump("-sass"), dump("-res-usage")
