"""The device a plan is made for: measured on this machine, or named with `--hardware`.

Preset memory is the vendor's datasheet figure in decimal gigabytes per GPU (A100 and H100 SXM 80 GB,
H200 141 GB, B200 192 GB, GB200 NVL72 186 GB, B300 288 GB, GB300 NVL72 288 GB). Where a driver
reports more than that, a plan made from the preset errs on the safe side.
"""

from __future__ import annotations

import itertools
import platform
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from turnout.errors import UserError
from turnout.kernels import cpu
from turnout.vocabulary import Bf16Units, Device

if TYPE_CHECKING:
    import torch

GB = 10**9
# Where a control group, of version 2 or 1, says how much memory its processes may use.
DEVICES = ("auto", "cpu", "cuda")
L2_BYTES = 240_000_000  # of weights that are read before one of them is read again leave nothing of it there
MEMORY_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
CPU_INFO = "/proc/cpuinfo"
# Of a CPU's many flags, those that decide how fast matrices are multiplied.
VECTOR_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "asimd", "sve", "bf16")


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One device of a rank. `architecture`: CUDA compute capability times ten (90: Hopper); CPU 0.

    `present` tells this machine's own device, whose installed packages count, from a named one; `devices`
    is how many of them it has, 0 where ranks may share them or it is unknown. `peer_access`: whether all of
    them read and write each other's memory. `multiprocessors`: of a GPU; 0 where it is not known.
    `processor`, `vector_flags`, `bf16_units`: of a CPU, its model, those of VECTOR_FLAGS that it has, and
    what kernels multiply bfloat16 with.
    """

    name: str
    device: Device
    architecture: int
    memory_bytes: int
    present: bool = False
    devices: int = 0
    peer_access: bool = True
    multiprocessors: int = 0
    processor: str = ""
    vector_flags: tuple[str, ...] = ()
    bf16_units: Bf16Units = Bf16Units.NONE

    def with_bf16_units(self, asked: str) -> Hardware:
        """Confined to the units `asked` for, one of `known_bf16_units`; "auto": all that it has."""
        return self if asked == "auto" else replace(self, bf16_units=Bf16Units(asked))

    @property
    def known_bf16_units(self) -> tuple[Bf16Units, ...]:
        """Those that this CPU has, the fastest first; the last is `NONE`, which every one has."""
        best_first = tuple(Bf16Units)
        return best_first[best_first.index(self.bf16_units) :]

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
        processor, flags = _processor()
        return Hardware(
            name="cpu",
            device="cpu",
            architecture=0,
            memory_bytes=_host_memory(),
            present=True,
            processor=processor,
            vector_flags=tuple(flag for flag in VECTOR_FLAGS if flag in flags),
            bf16_units=_bf16_units(flags),
        )
    if device == "auto" and not may_have_gpu():
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


def cpu_name() -> str:
    """The CPU's model and how many of its cores there are, as the operating system tells it."""
    return _processor()[0]


def _processor() -> tuple[str, frozenset[str]]:
    """Model and cores, and all flags; where the operating system has no such file, the name alone."""
    try:
        lines = Path(CPU_INFO).read_text().splitlines()
    except OSError:
        lines = []
    fields = [(key.strip(), value.strip()) for key, _, value in (line.partition(":") for line in lines)]
    names = [value for key, value in fields if key == "model name"]
    flags = next((value for key, value in fields if key in ("flags", "Features")), "")
    name = names[0] if names else platform.processor() or platform.machine()
    for trademark in ("(R)", "(TM)", " Processor", " CPU"):
        name = name.replace(trademark, "")
    return f"{name} x{len(names) or 1}", frozenset(flags.split())


def _bf16_units(flags: frozenset[str]) -> Bf16Units:
    if {"amx_tile", "amx_bf16", "avx512_bf16"} <= flags and cpu.allow_tiles():
        return Bf16Units.AMX
    return Bf16Units.AVX512 if "avx512_bf16" in flags else Bf16Units.NONE


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


def may_have_gpu() -> bool:
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
