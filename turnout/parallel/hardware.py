"""The device a plan is made for: measured on this machine, or named with `--hardware`.

Preset memory is the vendor's datasheet figure in decimal gigabytes per GPU (A100 and H100 SXM 80 GB,
H200 141 GB, B200 192 GB, GB200 NVL72 186 GB, B300 288 GB, GB300 NVL72 288 GB). Where a driver
reports more than that, a plan made from the preset errs on the safe side.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from turnout.errors import UserError
from turnout.vocabulary import Device

if TYPE_CHECKING:
    import torch

GB = 10**9
# Where a control group, of version 2 or 1, says how much memory its processes may use.
DEVICES = ("auto", "cpu", "cuda")
L2_BYTES = 240_000_000  # of weights that are read before one of them is read again leave nothing of it there
MEMORY_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One device of a rank. `architecture`: CUDA compute capability times ten (90: Hopper); CPU 0.

    `present` tells this machine's own device, whose installed packages count, from a named one; `devices`
    is how many of them it has, 0 where ranks may share them or it is unknown. `peer_access`: whether all of
    them read and write each other's memory. `multiprocessors`: of a GPU; 0 where it is not known.
    """

    name: str
    device: Device
    architecture: int
    memory_bytes: int
    present: bool = False
    devices: int = 0
    peer_access: bool = True
    multiprocessors: int = 0

    @property
    def has_fp4_units(self) -> bool:
        """Blackwell and later multiply FP4 in their tensor cores."""
        return self.architecture >= 100


PRESETS = {
    preset.name: preset
    for preset in (
        Hardware(name="a100", device="cuda", architecture=80, memory_bytes=80 * GB, multiprocessors=108),
        Hardware(name="h100", device="cuda", architecture=90, memory_bytes=80 * GB, multiprocessors=132),
        Hardware(name="h200", device="cuda", architecture=90, memory_bytes=141 * GB, multiprocessors=132),
        Hardware(name="b200", device="cuda", architecture=100, memory_bytes=192 * GB),
        Hardware(name="gb200", device="cuda", architecture=100, memory_bytes=186 * GB),
        Hardware(name="b300", device="cuda", architecture=103, memory_bytes=288 * GB),
        Hardware(name="gb300", device="cuda", architecture=103, memory_bytes=288 * GB),
    )
}


def hardware_names() -> list[str]:
    return ["cpu", *PRESETS]


def named(name: str) -> Hardware:
    """The preset called `name`, in capitals or not; "cpu" is this machine's.

    Raises UserError naming the known ones.
    """
    asked, name = name, name.lower()
    if name == "cpu":
        return detect("cpu")
    if name not in PRESETS:
        raise UserError(f"--hardware {asked!r}: unknown; known: {', '.join(hardware_names())}")
    return PRESETS[name]


def detect(device: str = "auto") -> Hardware:
    """This machine's device: "cpu", "cuda" (its current GPU), or "auto", a GPU where there is one.

    Creates a CUDA context only when a GPU is what it returns. Raises UserError if "cuda" finds none, and for
    other names.
    """
    if device not in DEVICES:
        raise UserError(f"--device {device!r}: must be one of {', '.join(DEVICES)}")
    if device == "cpu":
        return Hardware(name="cpu", device="cpu", architecture=0, memory_bytes=_host_memory(), present=True)
    if device == "auto" and not _may_have_gpu():
        return detect("cpu")
    import torch

    if not torch.cuda.is_available():
        if device == "auto":
            return detect("cpu")
        raise UserError(
            "--device cuda: torch finds no usable GPU here; use --device cpu, or install a CUDA build of "
            "torch and check the driver (`turnout plan --hardware h200` needs no GPU)"
        )
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Hardware(
        name=properties.name,
        device="cuda",
        architecture=10 * properties.major + properties.minor,
        memory_bytes=properties.total_memory,
        present=True,
        devices=torch.cuda.device_count(),
        peer_access=_peer_access(torch.cuda.device_count()),
        multiprocessors=properties.multi_processor_count,
    )


def copies_beyond_cache(weight_bytes: int) -> int:
    """Sets of weights of so many bytes that a GPU's L2 cache does not hold together."""
    return min(6, L2_BYTES // weight_bytes + 2)


def multiprocessors(device: torch.device) -> int:
    """Of a GPU, as kernels that are launched on it need it."""
    import torch

    return torch.cuda.get_device_properties(device).multi_processor_count


def _peer_access(devices: int) -> bool:
    import torch

    pairs = itertools.permutations(range(devices), 2)
    return all(torch.cuda.can_device_access_peer(one, other) for one, other in pairs)


def _may_have_gpu() -> bool:
    """Whether it is worth importing torch to ask: on Linux a driver shows itself by a device file."""
    devices = (
        Path(f) for f in ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/dev/kfd", "/dev/nvhost-ctrl")
    )
    return sys.platform != "linux" or any(device.exists() for device in devices)


def _host_memory() -> int:
    """Bytes of RAM this process may use: the machine's, or its control group's limit if lower."""
    total = psutil.virtual_memory().total
    for limit_file in MEMORY_LIMITS:
        try:
            total = min(total, int(Path(limit_file).read_text()))
        except (OSError, ValueError):  # no such controller, or the word "max": no limit
            continue
    return total
