"""No module below the engine keeps state of its own: what a run makes belongs to an object of that run.

State is what a function changes and a later call finds again: a name bound by `global`, a container at the
top of a module that its functions fill, and the results that `functools.cache` keeps.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.test_imports import BELOW_ENGINE, FILES, module_of, part_of

CHANGES = {
    "add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem", "popleft",
    "remove", "setdefault", "update",
}  # fmt: skip
CACHES = {"cache", "lru_cache", "cached"}
LISTED = {
    # Handles to memory that all layers of a process share.
    ("turnout.moe.arena", "_SHARED"): "the runners' workspace on each device",
    ("turnout.moe.backends.deepep.dispatcher", "_BUFFERS"): "the library's communication buffers",
    ("turnout.moe.backends.flashinfer.dispatcher", "_WORKSPACES"): "the library's communication workspace",
    ("turnout.moe.backends.nvlink.all_to_all", "_REGIONS"): "symmetric memory that ranks write to each other",
    ("turnout.parallel.symmetric", "_ALIVE"): "symmetric memory whose faults each step asks about",
    # Handles to what a process or a device has one of.
    ("turnout.checkpoint.files", "_readers"): "threads that read",
    ("turnout.kernels.cpu.team", "_team"): "threads that stay with a step",
    ("turnout.kernels.cpu.threads", "_pool"): "threads that compute",
    ("turnout.kernels.cpu.threads", "_together"): "how many compute together, as torch has for its own",
    ("turnout.moe.in_flight", "_stream"): "a device's second stream",
    # Constants, computed when first asked for.
    ("turnout.attention.states", "_on_cpu"): "whether there is a kernel for such states on a CPU",
    ("turnout.formats.e2m1", "_pairs"): "a table of decoded pairs on a device",
    ("turnout.formats.e2m1", "_values"): "a table of values on a device",
    ("turnout.formats.int4", "_pairs"): "a table of decoded pairs on a device",
    ("turnout.kernels.common.dependent", "launches_early"): "whether a device can launch dependents early",
    ("turnout.kernels.hopper.dense_fp8", "plan"): "the tile that should take least, by shape",
    ("turnout.kernels.hopper.dense_rows", "plan"): "the tile by which no program reads much, by shape",
    ("turnout.kernels.common.few_rows", "part_count"): "into how many parts a product of few rows is cut",
}


def state(tree: ast.Module) -> Iterator[str]:
    """The names of what functions of a module keep between calls."""
    bound = set()
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        bound |= {target.id for target in targets if isinstance(target, ast.Name)}
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for decorator in function.decorator_list:
            called = decorator.func if isinstance(decorator, ast.Call) else decorator
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            if name in CACHES:
                yield function.name
        nodes = list(ast.walk(function))
        local = {node.arg for node in nodes if isinstance(node, ast.arg)}
        local |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        for node in nodes:
            if isinstance(node, ast.Global):
                yield from node.names
            name = _changed(node)
            if name in bound - local:
                yield name


def _changed(node: ast.AST) -> str | None:
    """The name of a container that this statement or call changes."""
    holder: ast.AST | None = None
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
        holder = node.func.value
    elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
        holder = node.value
    return holder.id if isinstance(holder, ast.Name) else None


def test_state_is_only_what_is_listed():
    found = {
        (module_of(file), name)
        for file in FILES
        if part_of(module_of(file)) in BELOW_ENGINE
        for name in state(ast.parse(file.read_text()))
    }
    assert sorted(found) == sorted(LISTED)


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("COUNT = 0\ndef f():\n    global COUNT\n    COUNT += 1", ["COUNT"]),
        ("SEEN = {}\ndef f(x):\n    SEEN[x] = 1", ["SEEN"]),
        ("SEEN: dict = {}\ndef f(x):\n    del SEEN[x]", ["SEEN"]),
        ("SEEN = []\nclass C:\n    def f(self):\n        SEEN.append(self)", ["SEEN"]),
        ("@functools.cache\ndef f(): ...", ["f"]),
        ("@lru_cache(maxsize=2)\ndef f(): ...", ["f"]),
        ("TABLE = {1: 2}\ndef f(x):\n    return TABLE[x]", []),
        ("def f():\n    seen = {}\n    seen[1] = 2\n    seen.update(seen)", []),
        ("seen = {}\ndef f(seen):\n    seen[1] = 2", []),
        ("TABLE = {}\nTABLE[1] = 2", []),
    ],
)
def test_state_is_found(source, names):
    assert list(state(ast.parse(source))) == names
