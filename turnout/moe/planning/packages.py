"""Optional packages that backends need: what is imported, which version, and the command that installs it.

A backend declares its packages in `requires`; the planner asks `lacking` about each of them on the machine
that plans for itself. Nothing is imported to find out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec


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
        beside = f" with {self.only_with}" if self.only_with else ""
        return self.distribution + (f">={self.minimum}" if self.minimum else "") + beside

    def lacking(self) -> str:
        """What stands against importing it here: "" if nothing."""
        if self.only_with and not _version(self.only_with):
            return ""
        if not _is_here(self.module):
            return f"needs {self}, not installed here"
        if not self.minimum:
            return ""
        found = _version(self.distribution)
        if not found:
            return f"needs {self}; here is a {self.module} of unknown version"
        return "" if _numbers(found) >= _numbers(self.minimum) else f"needs {self}; here is {found}"


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


def _numbers(text: str) -> tuple[int, ...]:
    """The release of a version, 0.7.2 of 0.7.2.post1 or 0.7.2+cu130."""
    release = re.match(r"[\d.]*\d", text)
    numbers = [int(part) for part in release[0].split(".")] if release else []
    return tuple(numbers + [0] * (4 - len(numbers)))


TRITON = Package(module="triton", distribution="triton", minimum="3.6", install="pip install 'triton>=3.6'")
NUMBA = Package(module="numba", distribution="numba", minimum="0.61", install="pip install 'numba>=0.61'")
FLASHINFER = Package(
    module="flashinfer",
    distribution="flashinfer-python",
    minimum="0.7.2",  # CuteDslMoEWrapper takes quant_mode and no longer preallocates
    install="pip install 'turnout[flashinfer]'",
)
DEEPEP = Package(
    module="deep_ep",
    distribution="deep_ep",
    install="pip install --no-deps 'tokenspeed-deepep<2' (Python 3.12 and CUDA 13), or build DeepEP",
)
DEEPEP_NVFP4 = Package(
    module="deep_ep",
    distribution="sgl-deep-ep",
    minimum="0.1.2",
    install="pip install --no-deps 'sgl-deep-ep>=0.1.2'",
)
NVSHMEM = Package(
    module="nvidia.nvshmem",
    distribution="nvidia-nvshmem-cu13",
    minimum="3.4",
    install="pip install 'nvidia-nvshmem-cu13>=3.4'",
)
NCCL = Package(
    module="nvidia.nccl",
    distribution="nvidia-nccl-cu13",
    minimum="2.30",
    install="pip install --no-deps 'nvidia-nccl-cu13>=2.30'",
    only_with="sgl-deep-ep",  # DeepEP 2 is linked against it, and checks which one PyTorch has loaded
)
