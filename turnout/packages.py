"""Optional packages that backends need: what is imported, which version, and the command that installs it.

A backend declares its packages in `requires`; the planner asks `lacking` about each of them on the machine
that plans for itself. Nothing is imported to find out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING

from packaging.version import Version

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Package:
    """An import, the name that pip knows it by, and the first version that does ("": any).

    only_with: needed where this distribution is installed; "": always.
    """

    module: str
    distribution: str
    install: str
    minimum: str = ""
    only_with: str = ""

    def __str__(self) -> str:
        only = f" with {self.only_with}" if self.only_with else ""
        return self.distribution + (f">={self.minimum}" if self.minimum else "") + only

    def lacking(self) -> str:
        """Why it cannot be imported here; "" if it can."""
        if self.only_with and not _version(self.only_with):
            return ""
        if not _is_here(self.module):
            return f"needs {self}, not installed here"
        if not self.minimum:
            return ""
        found = _version(self.distribution)
        if not found:
            return f"needs {self}; here is a {self.module} of unknown version"
        return "" if _is_at_least(found, self.minimum) else f"needs {self}; here is {found}"


def versions_of(distributions: Sequence[str]) -> dict[str, str]:
    """The version of each that is installed here, "none" for others."""
    return {name: _version(name) or "none" for name in distributions}


def _is_here(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # nor is the package that it would be part of
        return False


def _version(distribution: str) -> str:
    """What is installed here; "" if nothing is."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


def _is_at_least(found: str, minimum: str) -> bool:
    """Compares releases, of which 0.7.2.post1, 0.7.2.dev3 and 0.7.2+cu130 are 0.7.2, or pre-releases with one
    that is needed."""
    here, needed = Version(found), Version(minimum)
    return (here if needed.is_prerelease else Version(here.base_version)) >= needed


TRITON = Package(module="triton", distribution="triton", minimum="3.6", install="pip install 'triton>=3.6'")
NUMBA = Package(module="numba", distribution="numba", minimum="0.68", install="pip install 'numba>=0.68'")


def runs_triton(device: torch.device) -> bool:
    """Whether Triton's kernels run on `device`: on CUDA, where any version of Triton is installed."""
    return device.type == "cuda" and _triton_is_here()


@cache
def _triton_is_here() -> bool:
    return _is_here(TRITON.module)
