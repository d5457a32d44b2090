"""What a backend declares, and refusals: why it cannot serve a layer, and what would mend that.

A refusal is data. The planner collects every one of them and prints them together before any
weight is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from turnout.errors import PlanRefused, Refusal

__all__ = ["DispatcherCapability", "PlanRefused", "Refusal", "RunnerCapability"]


@dataclass(frozen=True, kw_only=True)
class RunnerCapability:
    """What a runner accepts. The planner compares it with spec, hardware, phase and dispatcher."""

    name: str
    summary: str
    layouts: frozenset[str]  # of {"tokens", "experts"}
    weight_formats: frozenset[str]  # of formats.packed.FORMATS
    wire_formats: frozenset[str] = frozenset({"bf16"})  # formats in which hidden states may arrive
    activation_formats: frozenset[str] = frozenset({"bf16"})  # what the GEMMs multiply with: "nvfp4" = W4A4
    activations: frozenset[str] = frozenset({"silu", "swiglu", "relu2"})
    expert_bias: bool = True
    devices: frozenset[str] = frozenset({"cpu", "cuda"})
    architectures: frozenset[int] | None = None  # CUDA compute capabilities (90, 100); None: any
    hidden_multiple: int = 1
    intermediate_multiple: int = 1  # of this rank's shard
    weight_storages: frozenset[str] = frozenset({"packed", "decoded"})
    fp4_units: bool = False  # W4A4 runs on FP4 tensor cores; False: its numerics are emulated
    preference: int = 0  # `auto` takes the highest that is allowed; raise it on measured grounds
    graph_safe: bool = True
    deterministic: bool = True
    requires: tuple[str, ...] = ()  # importable packages
    install: str = ""  # the command that installs them


@dataclass(frozen=True, kw_only=True)
class DispatcherCapability:
    """What a dispatcher emits and where it works.

    exchange says whose tokens the runner gets to see, and with that who owes the sum over ranks:
    "none":       this rank's own; every rank must hold the same tokens, and the layer reduces
    "gather":     those of all DP ranks; the combine has already summed
    "all_to_all": those routed to this rank's experts, up to `capacity` from each; already summed
    """

    name: str
    summary: str
    layout: str
    exchange: str = "none"
    wire_formats: frozenset[str] = frozenset({"bf16"})
    devices: frozenset[str] = frozenset({"cpu", "cuda"})
    multi_host: bool = True
    max_ep: int | None = None  # None: any
    preference: int = 0
    graph_safe: bool = True
    requires: tuple[str, ...] = field(default=())
    install: str = ""
