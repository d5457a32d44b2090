"""Versions of packages are compared as releases: those that libraries have had, and what is installed."""

from __future__ import annotations

import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from turnout.packages import NUMBA, Package, _is_at_least

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("found", "minimum", "enough"),
    [
        ("0.7.2", "0.7.2", True),
        ("0.7.2.post1", "0.7.2", True),
        ("0.7.2+cu130", "0.7.2", True),
        ("0.7.2.dev20260101", "0.7.2", True),
        ("0.7.10", "0.7.2", True),
        ("3.6", "3.6.0", True),
        ("3.6.0", "3.6", True),
        ("0.7.1.post9", "0.7.2", False),
        ("2.29.7", "2.30", False),
        ("4.0.0b36", "4.0.0b36", True),
        ("4.0.0", "4.0.0b36", True),
        ("4.0.0b20", "4.0.0b36", False),
    ],
)
def test_releases_are_compared(found: str, minimum: str, enough: bool):
    assert _is_at_least(found, minimum) is enough


def test_what_the_project_requires_is_what_backends_ask_for():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = {r.name: r.specifier for r in map(Requirement, project["dependencies"])}
    assert f">={NUMBA.minimum}" == str(required[NUMBA.distribution])


def test_what_is_installed_here_is_found():
    here = Version(version("packaging"))
    needed = Package(module="packaging", distribution="packaging", install="", minimum=str(here))
    assert needed.lacking() == ""
    later = Package(module="packaging", distribution="packaging", install="", minimum=f"{here.major + 1}.0")
    assert later.lacking() == f"needs packaging>={here.major + 1}.0; here is {here}"
