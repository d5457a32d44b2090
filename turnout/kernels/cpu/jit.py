"""Compiles kernels when their module is imported, and keeps what came out for the next process.

numba keeps compiled functions by the file that they stand in, and would take no notice of a change in another
file that they call into. So they are kept in a folder named by a digest of all files here.

Measured on one core of an AMD EPYC: numba itself takes 0.6 s to import, a kernel 0.3 to 2 s to compile and
10 ms to fetch.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba

HERE = Path(__file__).parent


def _folder() -> Path:
    """Beside the sources as Python's own compiled files are, or else in the user's cache."""
    digest = hashlib.sha1(numba.__version__.encode())
    for file in sorted(HERE.glob("*.py")):
        digest.update(file.read_bytes())
    beside = HERE / "__pycache__"
    if not os.access(beside if beside.exists() else HERE, os.W_OK):
        beside = Path.home() / ".cache" / "turnout"
    return beside / f"kernels-{digest.hexdigest()[:12]}"


FOLDER = _folder()


def kernel(signature: str) -> Callable[[Callable[..., Any]], Any]:
    """The decorated function, compiled for `signature`; it runs without Python's global lock."""

    def compiled(function: Callable[..., Any]) -> Any:
        before, numba.config.CACHE_DIR = numba.config.CACHE_DIR, str(FOLDER)
        try:
            return numba.njit(signature, nogil=True, cache=True, error_model="numpy")(function)
        finally:
            numba.config.CACHE_DIR = before

    return compiled


part = numba.njit(error_model="numpy")  # a function that kernels call
inline = numba.njit(forceinline=True, error_model="numpy")  # part of whatever kernel calls it
