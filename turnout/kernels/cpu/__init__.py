"""Kernels for CPUs, compiled on the spot by numba (LLVM, no compiler on the machine).

Each module holds kernels, which see addresses and sizes, and launchers, which take tensors. Importing a
module compiles its kernels, or fetches them from where an earlier process kept them (jit.py), so that no
request waits for a compiler.

Every sum of a row is made in one order, whatever other rows there are and however many threads: results are
batch-invariant.
"""

from importlib.util import find_spec


def available() -> bool:
    """Whether numba is installed."""
    return find_spec("numba") is not None
