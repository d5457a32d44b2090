"""Compiling kernels before they are needed, and counting those that were not.

What is to be compiled is found by calling for it, while nothing is launched, not even what is compiled: a
GEMM would follow a table of tiles that no sort has written. Two ways:

* `recording` leaves a record of every kernel that is not compiled yet: Triton's hook sees it, with all that
  specialises it, and keeps it from being compiled there and then. Processes compile the records into Triton's
  cache on disk, where the next real call finds them. Tuning asks for hundreds, and each takes a second of a
  core.
* `compiling` compiles in threads of this process, which then has the kernels loaded: for the few dozens of a
  model that starts.

`variants` tells, without compiling, which variants of kernels calls ask for, so that `covering` can find a
few batch sizes that between them need every variant that any batch size does.

This is the only file that patches Triton: `JITFunction.run`, its parameters, `Autotuner.run`, the hook
`jit_cache_hook` and `dtype.is_dtype` are its internals, and may change with any minor version. With a Triton
other than PATCHED nothing is found ahead, so that kernels are compiled one by one as they are called.
"""

from __future__ import annotations

import importlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any, TypeVar
from unittest.mock import patch

from packaging.specifiers import SpecifierSet
from packaging.version import Version
from torch import Tensor
from triton import __version__, knobs
from triton.errors import TritonError
from triton.language import dtype
from triton.runtime._async_compile import AsyncCompileMode
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

T = TypeVar("T")
log = logging.getLogger(__name__)
PATCHED = SpecifierSet(">=3.6,<3.7")  # versions of Triton whose internals are known
MOST_PROCESSES = 16
EVERY, STRIDE = 512, 15  # tokens of batches up to which `covering` tries every size, and above how far apart
FAILURES = (TritonError,)  # of a kernel that cannot be compiled or needs too much of the GPU


@dataclass(frozen=True, kw_only=True)
class Record:
    """A kernel to compile, as Triton's `JITFunction.preload` takes it."""

    module: str
    name: str
    specialization: str


def can_record() -> bool:
    """Whether the internals of the Triton installed here are known."""
    return PATCHED.contains(Version(__version__).base_version)


def hash_compiler() -> None:
    """Triton's own libraries, 400 MB, whose hash it then keeps: every kernel is filed under it."""
    if can_record():
        from triton.runtime.cache import triton_key

        triton_key()


@contextmanager
def recording() -> Iterator[dict[Record, None]]:
    """Calls of kernels launch nothing; those of kernels that are not compiled yet leave a record here."""
    records: dict[Record, None] = {}

    def note(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        records[Record(module=fn.module, name=fn.name, specialization=compile["specialization_data"])] = None
        return True

    before = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = note
    try:
        with _launching_nothing():
            yield records
    finally:
        knobs.runtime.jit_cache_hook = before


@contextmanager
def compiling(threads: int) -> Iterator[None]:
    """Calls of kernels launch nothing; those that are not compiled yet are, by the end of the block."""
    taken: list[tuple[float, str]] = []
    began = time.perf_counter()

    def note(*, src: Any, times: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            taken.append((times.total / 1e6, src.name))

    before = knobs.compilation.listener
    knobs.compilation.listener = note
    try:
        with ThreadPoolExecutor(threads) as pool, AsyncCompileMode(pool), _launching_nothing():
            yield
    finally:
        knobs.compilation.listener = before
    if taken:
        longest, name = max(taken)
        all_took, here = sum(seconds for seconds, _ in taken), time.perf_counter() - began
        log.info(
            "compiled %d kernels in %.1f s, %d at a time; one by one they took %.1f s, %s alone %.1f s",
            len(taken), here, threads, all_took, name, longest,
        )  # fmt: skip


Variant = tuple[Any, ...]  # a kernel, and all that Triton compiles it again for


@contextmanager
def variants() -> Iterator[set[Variant]]:
    """Calls of kernels launch nothing and compile nothing: what they would have needed is in the set."""
    found: set[Variant] = set()

    def note(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        params = self.params
        found.add(
            (
                self,
                *(_specialised(param, arg) for param, arg in zip(params, args, strict=False)),
                *sorted(options.items()),
            )
        )

    with patch.object(JITFunction, "run", note):
        yield found


def _specialised(param: Any, arg: Any) -> Any:
    """What of an argument a compiled kernel depends on, as Triton's own binder has it: the whole value of a
    constant, of an integer whether it is 1 or a multiple of 16, of a pointer its type and alignment."""
    if param.is_constexpr:
        return arg
    if isinstance(arg, Tensor):
        return arg.dtype, param.do_not_specialize_on_alignment or arg.data_ptr() % 16 == 0
    if isinstance(arg, int) and not isinstance(arg, bool):
        return int if param.do_not_specialize else (arg == 1, arg % 16 == 0, arg.bit_length() > 31)
    if isinstance(arg, float | bool) or arg is None:
        return type(arg)
    return arg.base.dtype, tuple(arg.block_shape), arg.layout  # a TensorDescriptor


def covering(call: Callable[[int], object], most: int) -> list[int]:
    """Batch sizes up to `most` that need every variant that `call`, of a batch of so many tokens, asks for.

    All sizes up to EVERY are tried. Above, variants last for 40 sizes or more, as four models in five formats
    have shown, so some are: STRIDE apart, whose multiples leave every remainder by 16.
    """
    return needing(call, (*range(1, min(most, EVERY) + 1), *range(EVERY + STRIDE, most, STRIDE), most))


def needing(call: Callable[[T], object], sizes: Iterable[T]) -> list[T]:
    """Those of `sizes` for which `call` asks for a variant that it did not ask for with any before."""
    seen: set[Variant] = set()
    found = []
    for size in sizes:
        with variants() as needed:
            call(size)
        if not needed <= seen:
            seen |= needed
            found.append(size)
    return found


@contextmanager
def _launching_nothing() -> Iterator[None]:
    run = JITFunction.run

    def prepare(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return run(self, *args, grid=grid, warmup=True, **options)

    # Libraries have kernels that time their tiles by launching them, and would learn that all take no time.
    with patch.object(JITFunction, "run", prepare), patch.object(Autotuner, "run", lambda *_, **__: None):
        yield


def specialization(kernel: str, compiled: dict[str, Any]) -> str:
    """What a kernel was compiled for, of what Triton tells its hooks: the values of constants, the types of
    the rest and which of them are multiples of 16, and the number of warps."""
    [attributes] = compiled["configs"]
    words = []
    for i, (name, kind) in enumerate(compiled["signature"].items()):
        if (i,) in compiled["constants"]:
            words.append(f"{name}={compiled['constants'][i,]}")
        else:
            words.append(f"{name}: {kind}" + (" of 16" if attributes.get((i,)) else ""))
    return f"{kernel}({', '.join(words)}), {compiled['num_warps']} warps"


class CompilationCounter:
    """How many kernels were compiled, or loaded from Triton's cache on disk, since `start`, in this process.

    A kernel that is compiled while requests are served holds all of them up for a second, so each is logged
    with what specialises it.
    """

    def __init__(self) -> None:
        self.count = 0

    def start(self) -> None:
        """Count from now on, in place of whatever counted before."""
        self.count = 0
        knobs.runtime.jit_post_compile_hook = self._note

    def stop(self) -> None:
        knobs.runtime.jit_post_compile_hook = None

    def _note(self, *, fn: Any, compile: dict[str, Any], **_: Any) -> None:
        self.count += 1
        log.warning("compiled while serving: %s", specialization(fn.name, compile))


def compilers() -> Executor:
    """A process per core, up to MOST_PROCESSES."""
    return ProcessPoolExecutor(min(MOST_PROCESSES, os.cpu_count() or 1), mp_context=get_context("spawn"))


def submit(pool: Executor, records: Iterable[Record]) -> list[Future[None]]:
    """Compile into the cache on disk. What fails is left to fail, with its reason, where it is called."""
    return [pool.submit(_compile, record) for record in records]


def _compile(record: Record) -> None:
    # `preload` takes a string that names a type, such as the format "bf16", for the type, and files what it
    # compiles where the string's would be. Our kernels have strings among their constants, and no types.
    with patch.object(dtype, "is_dtype", lambda name: False):
        getattr(importlib.import_module(record.module), record.name).preload(record.specialization)
