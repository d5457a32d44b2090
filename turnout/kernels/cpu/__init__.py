"""Kernels for CPUs, compiled on the spot by numba (LLVM, no compiler on the machine).

Each module holds kernels, which see addresses and sizes, and launchers, which take tensors. Importing a
module compiles its kernels, or fetches them from where an earlier process kept them (jit.py), so that no
request waits for a compiler.

Every sum of a row is made in one order, whatever other rows there are and however many threads: results are
batch-invariant.
"""

import ctypes
from importlib.util import find_spec

SYS_ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA = 158, 0x1023, 18  # Linux on x86-64


def available() -> bool:
    """Whether numba is installed."""
    return find_spec("numba") is not None


def allow_tiles() -> bool:
    """Ask the operating system for AMX's tiles, as each process must that uses them; whether it granted them.

    For Linux on a processor that has them.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.syscall(SYS_ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0)
