"""The one shape of every benchmark's result file: what ran, where, when, from which commit."""

from __future__ import annotations

import datetime
import json
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from turnout.errors import UserError
from turnout.packages import versions_of
from turnout.parallel.hardware import Hardware, cpu_name, detect

PACKAGES = ("torch", "triton", "transformers", "flashinfer-python")


def result(
    benchmark: str,
    rows: list[dict[str, Any]],
    *,
    device: str,
    devices: int = 1,
    driver: str = "",
    ceilings: dict[str, float] | None = None,
    command: str | None = None,
) -> dict[str, Any]:
    """A result with its provenance. `command` defaults to this process's own."""
    cpu = detect("cpu")
    return {
        "benchmark": benchmark,
        "device": device,
        "devices": devices,
        "processor": cpu.processor,
        "vector_flags": list(cpu.vector_flags),
        "bf16_units": str(cpu.bf16_units),
        "driver": driver,
        "versions": _versions(),
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "command": command or shlex.join([*_program(), *sys.argv[1:]]),
        "ceilings": ceilings or {},
        "rows": rows,
    }


def device_of(machine: Hardware) -> dict[str, Any]:
    """`result`'s device and driver."""
    on_cpu = machine.device == "cpu"
    return {"device": cpu_name() if on_cpu else machine.name, "driver": "" if on_cpu else gpu_driver()}


def check_output(*paths: Path | None) -> None:
    """Raise UserError, before an hour is measured, if a result cannot be saved at one of `paths`."""
    for path in filter(None, paths):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("a").close()
        except OSError as error:
            raise UserError(f"--output {path}: cannot be written ({error.strerror})") from None


def check_measured(rows: list[dict[str, Any]]) -> None:
    """Raise UserError if of our own `rows` (all but peers') there are some, and none could be measured."""
    reasons = [row.get("error_message") for row in rows if not row.get("peer")]
    if reasons and all(reasons):
        distinct = "; ".join(dict.fromkeys(map(str, reasons)))
        raise UserError(f"nothing was measured, all {len(reasons)} points failed: {distinct}")


def save(content: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def default_path(content: dict[str, Any], folder: Path = Path("benchmarks/results")) -> Path:
    """`<benchmark>-<device>-<date>.json` under `folder`."""
    device = content["device"].lower().replace(" ", "-").replace("/", "-")
    return folder / f"{content['benchmark']}-{device}-{content['date']}.json"


def gpu_driver() -> str:
    """The NVIDIA driver's version, "" where there is none."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return ""


def _versions() -> dict[str, str]:
    found = {name: version for name, version in versions_of(PACKAGES).items() if version != "none"}
    return {"python": platform.python_version()} | found


def _program() -> list[str]:
    """How this process was started: turnout, or a module of the tools."""
    spec = sys.modules["__main__"].__spec__
    return ["python", "-m", spec.name] if spec and spec.name.startswith("tools.") else ["turnout"]


def commit(package: Path = Path(__file__).parents[1]) -> str:
    """The commit of a package, by default the code that runs; "-dirty" if it differs from that, "" outside a
    checkout."""

    def git(*arguments: str) -> str:
        run = subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=package, check=False)
        return run.stdout.strip()

    changed = git("status", "--porcelain", "--", ".")
    return git("rev-parse", "--short=12", "HEAD") + ("-dirty" if changed else "")
