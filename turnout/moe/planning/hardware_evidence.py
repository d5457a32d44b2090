"""Where backends have run: plans and documentation tell it apart from what was only checked without hardware.

`RUNS` is written by tools/generate_docs.py from the results in benchmarks/results.
"""

from __future__ import annotations

from collections.abc import Mapping

# name -> devices with the day of the latest result
RUNS: dict[str, dict[str, str]] = {
    "collective": {"NVIDIA H200": "2026-11-22"},
    "collective-experts": {"NVIDIA H200": "2026-11-21"},
    "deepep-low-latency": {"NVIDIA H200": "2026-11-21"},
    "deepep-normal": {"NVIDIA H200": "2026-11-21"},
    "flashinfer": {"NVIDIA H200": "2026-11-28"},
    "flashinfer_cutlass": {"NVIDIA H200": "2026-11-21"},
    "flashinfer_mxfp4": {"NVIDIA H200": "2026-11-21"},
    "hopper": {"NVIDIA H100 80GB HBM3": "2026-11-27", "NVIDIA H200": "2026-11-28"},
    "none": {"NVIDIA H100 80GB HBM3": "2026-11-27", "NVIDIA H200": "2026-11-28"},
    "numba": {"AMD EPYC x2": "2026-11-28", "Intel Xeon x2": "2026-11-27"},
    "nvlink": {"NVIDIA H200": "2026-11-28"},
    "nvlink-experts": {"NVIDIA H200": "2026-11-28"},
    "torch": {"NVIDIA H100 80GB HBM3": "2026-11-27", "NVIDIA H200": "2026-11-28"},
}


def evidence(name: str, checked: str, runs: Mapping[str, Mapping[str, str]] = RUNS) -> str:
    """What speaks for a backend. `checked`: its declaration of what stands in for a run."""
    if runs.get(name):
        ran = "ran on " + ", ".join(f"{device} ({day})" for device, day in runs[name].items())
        return ran + (f"; elsewhere {checked}" if checked else "")
    return "has no recorded run on hardware" + (f"; {checked}" if checked else "")
