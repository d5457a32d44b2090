"""Packages: what is required is what is imported, and versions are compared as releases."""

from __future__ import annotations

import ast
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.test_imports import FILES, OPTIONAL, imports, module_of
from turnout.packages import NUMBA, Package, _is_at_least

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
REQUIRED = {required.name: required.specifier for required in map(Requirement, PROJECT["dependencies"])}
IMPORTED_AS = {"pyzmq": "zmq", "pyyaml": "yaml"}


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
    assert str(REQUIRED[NUMBA.distribution]) == f">={NUMBA.minimum}"


def test_every_requirement_is_imported_and_every_import_is_one_or_optional():
    imported = {
        target.split(".")[0]
        for file in FILES
        for _, target in imports(ast.parse(file.read_text()), module_of(file))
    }
    required = {IMPORTED_AS.get(name, name.replace("-", "_")) for name in REQUIRED}
    assert imported - {"turnout", *sys.stdlib_module_names} - OPTIONAL == required


def test_what_is_installed_here_is_found():
    here = Version(version("packaging"))
    needed = Package(module="packaging", distribution="packaging", install="", minimum=str(here))
    assert needed.lacking() == ""
    later = Package(module="packaging", distribution="packaging", install="", minimum=f"{here.major + 1}.0")
    assert later.lacking() == f"needs packaging>={here.major + 1}.0; here is {here}"
