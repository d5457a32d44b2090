"""What a test on GPUs shows, written into its junit XML, from which tools/gpu_tests.py reads it.

That is the machine, the commit, and of the test's parameters those that name a runner, a dispatcher or a
number format.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import pytest

from turnout.bench import results
from turnout.formats.spec import FORMATS
from turnout.packages import versions_of

MARKS = ("gpu", "multigpu")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if any(item.get_closest_marker(mark) for mark in MARKS) and (about := machine()):
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        item.user_properties += [*about.items(), *combination(parameters).items()]


def combination(parameters: Mapping[str, Any]) -> dict[str, str]:
    """What parameters called runner, dispatcher, format and activation_format name, or attributes of these
    names of other parameters and of their MoESpec."""
    from turnout.moe.capabilities.declared import DISPATCHERS, RUNNERS

    known = {
        "runner": ("runner", RUNNERS),
        "dispatcher": ("dispatcher", DISPATCHERS),
        "weights": ("format", FORMATS),
        "activations": ("activation_format", FORMATS),
    }
    return {
        axis: str(holder[name])
        for axis, (name, values) in known.items()
        for holder in _holders(parameters)
        if isinstance(holder.get(name), str) and holder[name] in values
    }


def _holders(parameters: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield parameters
    for value in parameters.values():
        for holder in (value, getattr(value, "spec", None)):
            yield getattr(holder, "__dict__", {})


@cache
def machine() -> dict[str, str]:
    """Device, number of GPUs, commit and versions; {} where there is no GPU."""
    import torch

    if not torch.cuda.is_available():
        return {}
    about = {"device": torch.cuda.get_device_name(0), "devices": str(torch.cuda.device_count())}
    return about | {"commit": results.commit()} | versions_of(("torch", "triton"))
