"""What is compiled ahead, in other processes, is what a call compiles. No GPU: a driver is stood in."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton import knobs
from triton.language import dtype
from triton.runtime import jit
from triton.runtime.jit import create_function_from_signature

from tests.kernels.bound import BACKEND
from turnout.kernels.common import compilation
from turnout.kernels.common.compilation import CompilationCounter, Record


@triton.jit
def kernel(FORMAT: triton.language.constexpr, SIZE: triton.language.constexpr):
    pass


def test_constants_that_name_types_stay_strings(monkeypatch: pytest.MonkeyPatch):
    found: dict[Any, Any] = {}

    def keep(key: str, signature: Any, device: int, constants: Any, *_: Any, **__: Any) -> None:
        found.update(constants)

    backend = SimpleNamespace(parse_options=lambda options: options)
    monkeypatch.setattr(kernel, "_do_compile", keep)
    monkeypatch.setattr(kernel, "device_caches", {0: (None, None, None, backend, None)})
    active = SimpleNamespace(get_current_device=lambda: 0)
    monkeypatch.setattr(jit, "driver", SimpleNamespace(active=active))
    written = {
        "name": kernel._fn_name, "signature": {}, "constant_keys": [[0], [1]], "constant_vals": ["bf16", 8],
        "attrs_keys": [], "attrs_vals": [], "options": {}, "key": "",
    }  # fmt: skip
    compilation._compile(Record(module=__name__, name="kernel", specialization=json.dumps(written)))
    assert found == {(0,): "bf16", (1,): 8}
    assert isinstance(found[(0,)], str)
    assert dtype.is_dtype("bf16")  # as Triton has it, again


def test_kernels_are_recorded_with_the_triton_that_is_patched(monkeypatch: pytest.MonkeyPatch):
    assert compilation.can_record()  # what is pinned
    for found, known in (("3.6.1+cu130", True), ("3.6.0.post1", True), ("3.7.0", False), ("3.5.1", False)):
        monkeypatch.setattr(compilation, "__version__", found)
        assert compilation.can_record() is known


@triton.autotune([triton.Config({"SIZE": size}) for size in (16, 32)], key=[])
@triton.jit
def tuned(SIZE: triton.language.constexpr):
    pass


def test_kernels_that_time_themselves_learn_nothing_where_nothing_is_launched():
    with compilation.compiling(1):
        tuned[(1,)]()
    assert not tuned.cache
    assert "run" in vars(type(tuned))  # Triton's own again


def test_what_is_compiled_while_serving_is_counted_and_named(caplog: pytest.LogCaptureFixture):
    """By the hook that Triton calls, with what its own binder makes of arguments."""

    @triton.jit(do_not_specialize=["rows"])
    def scale(x_ptr, y_ptr, rows, columns, factor, SIZE: tl.constexpr, KIND: tl.constexpr):
        pass

    x = torch.empty(64, dtype=torch.bfloat16)
    binder = create_function_from_signature(scale.signature, scale.params, BACKEND)
    bound, found, rest = binder(x, x[1:], 5, 32, 0.5, SIZE=128, KIND="nvfp4", num_warps=8, debug=False)
    options, signature, constants, attributes = scale._pack_args(BACKEND, rest, bound, found, rest)
    counter = CompilationCounter()
    counter.start()
    try:
        key = jit.compute_cache_key({}, found, rest)
        hook = knobs.runtime.jit_post_compile_hook
        scale._call_hook(hook, key, signature, 0, constants, options, [attributes], False)
    finally:
        counter.stop()
    assert counter.count == 1
    said = (
        "scale(x_ptr: *bf16 of 16, y_ptr: *bf16, rows: i32, columns: i32 of 16, factor: fp32, SIZE=128, KIND="
    )
    assert f"{said}nvfp4), 8 warps" in caplog.text
