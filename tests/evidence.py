"""What a test on GPUs shows, written into its junit XML: device, commit, the backends among its parameters.

tools/proven.py reads it back.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest

from turnout.bench import results

MARKS = ("gpu", "multigpu")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if any(item.get_closest_marker(mark) for mark in MARKS) and (device := device_name()):
        names = backends(getattr(getattr(item, "callspec", None), "params", {}))
        item.user_properties += [("device", device), ("commit", commit())]
        item.user_properties += [("backend", name) for name in names]


def backends(parameters: Mapping[str, Any]) -> list[str]:
    """Names in parameters called runner or dispatcher, or in such attributes of other parameters."""
    from turnout.moe.capabilities.declared import DISPATCHERS, RUNNERS

    values = [parameters.get("runner"), parameters.get("dispatcher")]
    for value in parameters.values():
        values += [getattr(value, "runner", None), getattr(value, "dispatcher", None)]
    return sorted({v for v in values if isinstance(v, str)} & {*RUNNERS, *DISPATCHERS})


@cache
def device_name() -> str:
    """Of the first GPU, "" where there is none."""
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""


@cache
def commit() -> str:
    return results.commit()
