"""What runners were measured to take for a layer on this machine, kept on disk (`turnout tune`).

Only an explicit command measures and writes; planning reads. So what is chosen does not depend on how busy
the machine was at a start, and ranks that read the same file choose alike.

One file holds one layer on one device in one parallel layout. It counts while the versions it was
measured with are those installed; a file that is older, or damaged, is left aside with a warning.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
import os
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from turnout.moe.capabilities.capability import RunnerCapability
from turnout.moe.capabilities.tuning import AGAIN
from turnout.moe.spec import MoESpec
from turnout.packages import versions_of
from turnout.parallel.hardware import Hardware
from turnout.parallel.topology import Topology

log = logging.getLogger("turnout.moe")


class Measured(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Times of one layer. `layer` is what `describe` gives."""

    layer: dict[str, Any]
    versions: dict[str, str]
    date: str
    microseconds: dict[str, dict[int, float]]  # runner -> tokens of a batch -> a call's time


def describe(
    spec: MoESpec,
    topology: Topology,
    hardware: Hardware,
    compute_dtype: str,
    activations: str = "auto",
) -> dict[str, Any]:
    """What times depend on, but for versions; plain values for JSON. activations: what was asked for."""
    sizes = {name: getattr(topology, name) for name in ("tp_size", "dp_size", "ep_size")}
    values = {
        "device": hardware.name,
        "host": platform.node() if hardware.device == "cpu" else "",  # a CPU's name tells too little
        "processor": hardware.processor,
        "units": [*sorted(hardware.vector_flags), str(hardware.bf16_units)],
        "architecture": hardware.architecture,
        "compute_dtype": compute_dtype,
        "activations": activations,
        "spec": dataclasses.asdict(spec),
        "topology": sizes,
    }
    plain: dict[str, Any] = json.loads(json.dumps(values))
    return plain


def versions(runners: Iterable[RunnerCapability]) -> dict[str, str]:
    """What times depend on, as installed here: torch, what `runners` need, their kernels."""
    runners = list(runners)
    packages = dict.fromkeys(package.distribution for runner in runners for package in runner.requires)
    revisions = [runner.tuning.revision for runner in runners if runner.tuning is not None]
    return versions_of(("torch", *packages, "turnout")) | {"kernels": "; ".join(revisions)}


def path(folder: Path, layer: Mapping[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(layer, sort_keys=True).encode()).hexdigest()
    return folder / "tune" / f"{digest[:32]}.json"


def write(folder: Path, measured: Measured) -> Path:
    """Keep it in `folder`, whole or not at all; the file. Raises OSError."""
    file = path(folder, measured.layer)
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_suffix(f".{os.getpid()}")
    draft.write_bytes(msgspec.json.format(msgspec.json.encode(measured), indent=2))
    draft.replace(file)
    return file


def read(folder: Path, layer: Mapping[str, Any], installed: Mapping[str, str]) -> dict[str, dict[int, float]]:
    """By runner and tokens of a batch the times of `layer` in us; empty where none that count were taken.
    installed: what `versions` says."""
    file = path(folder, layer)
    try:
        found = msgspec.json.decode(file.read_bytes(), type=Measured)
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.MsgspecError) as error:
        log.warning("%s: left aside, for it cannot be read (%s); %s", file, error, AGAIN)
        return {}
    times = [time for batch in found.microseconds.values() for time in batch.values()]
    if (
        found.layer != layer
        or not all(found.microseconds.values())
        or not all(0 < t < math.inf for t in times)
    ):
        log.warning("%s: left aside, for it does not hold times of this layer; %s", file, AGAIN)
        return {}
    for package, version in installed.items():
        if found.versions.get(package) != version:
            log.warning(
                "%s: left aside, for it was measured with %s %s, and %s is installed; %s",
                file,
                package,
                found.versions.get(package),
                version,
                AGAIN,
            )
            return {}
    return found.microseconds
