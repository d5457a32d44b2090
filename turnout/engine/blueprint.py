"""Configuration + config.json + hardware -> everything about a run that is decided before weights load."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from turnout.config import Config
from turnout.models.interface import ModelDescription
from turnout.moe.budget import Budget
from turnout.moe.plan import MoEPlan
from turnout.parallel.hardware import Hardware
from turnout.parallel.topology import Topology


@dataclass(frozen=True, kw_only=True)
class MemoryTable:
    """Planned bytes of one rank. `available` is what --mem-fraction-static leaves of the device."""

    dense: int  # all parameters but the routed experts', in the compute dtype
    experts: int  # routed experts of all layers, as stored for use
    kv: int
    workspace: int  # of the runner; shared by the layers
    dispatch: int  # of the dispatcher; shared by the layers
    available: int

    @property
    def total(self) -> int:
        return self.dense + self.experts + self.kv + self.workspace + self.dispatch


@dataclass(frozen=True, kw_only=True)
class Blueprint:
    """One rank's run, resolved once and passed down."""

    config: Config
    folder: Path
    description: ModelDescription
    topology: Topology
    hardware: Hardware
    compute_dtype: str  # torch dtype name: "float32", "bfloat16", "float16"
    budget: Budget
    plan: MoEPlan
    page_size: int
    num_pages: int
    max_context: int  # longest prompt + output in tokens
    memory: MemoryTable
