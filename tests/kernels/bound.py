"""Under which keys Triton would file what calls of kernels need, by its own binder. No GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.jit import JITFunction, compute_cache_key, create_function_from_signature

BACKEND = make_backend(GPUTarget("cuda", 90, 32))
BINDERS: dict[JITFunction, Any] = {}


@contextmanager
def bound() -> Iterator[set[tuple[str, str]]]:
    """(kernel, the key under which Triton files what it compiles) of each call; nothing is launched."""
    found = set()

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        if self not in BINDERS:
            BINDERS[self] = create_function_from_signature(self.signature, self.params, BACKEND)
        _, specialization, rest = BINDERS[self](*args, debug=False, **options)
        found.add((self.fn.__name__, compute_cache_key({}, specialization, rest)))

    with patch.object(JITFunction, "run", run):
        yield found
