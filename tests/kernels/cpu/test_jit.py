"""Kernels that processes compiled apart from each other are linked by the names of their parts."""

from collections import defaultdict
from importlib import import_module
from pathlib import Path

import pytest
from numba.core.registry import CPUDispatcher

from turnout.kernels import cpu
from turnout.kernels.cpu import vectors


def test_parts_made_by_one_def_have_names_of_their_own():
    found = defaultdict(set)
    for file in Path(cpu.__file__).parent.glob("[a-z]*.py"):
        for value in vars(import_module(f"turnout.kernels.cpu.{file.stem}")).values():
            if isinstance(value, CPUDispatcher):
                found[value.py_func.__module__, value.py_func.__qualname__].add(value)
    assert any(name == "unpack" for _, name in found)
    assert all(len(functions) == 1 for functions in found.values()), found


@pytest.mark.parametrize("other", ["fsub", "fmul", "fdiv"])
def test_operators_on_vectors_do_not_share_a_name(other):
    names = {
        vectors._operation(name)(vectors.vector, vectors.vector).__qualname__ for name in ("fadd", other)
    }
    assert len(names) == 2
