"""What a backend declares, and refusals: why it cannot serve a layer, and what would mend that.

A refusal is data. The planner collects every one of them and prints them together before any
weight is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from turnout.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """`who` cannot do what was `asked`, because of `limit`; `remedy` says what to change."""

    who: str
    asked: str
    limit: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.who}: {self.asked}: {self.limit}. Remedy: {self.remedy}"


class PlanRefused(UserError):
    """Nothing allowed can run what was asked; carries every refusal found."""

    def __init__(self, headline: str, refusals: Sequence[Refusal]):
        self.refusals = tuple(refusals)
        super().__init__("\n".join([headline, *(f"  - {r}" for r in self.refusals)]))


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
    intermediate_multiple: int = 1
    graph_safe: bool = True
    deterministic: bool = True
    requires: tuple[str, ...] = ()  # importable packages
    install: str = ""  # the command that installs them


@dataclass(frozen=True, kw_only=True)
class DispatcherCapability:
    """What a dispatcher emits and where it works."""

    name: str
    summary: str
    layout: str
    wire_formats: frozenset[str] = frozenset({"bf16"})
    devices: frozenset[str] = frozenset({"cpu", "cuda"})
    multi_host: bool = True
    max_ep: int | None = None  # None: any
    graph_safe: bool = True
    requires: tuple[str, ...] = field(default=())
    install: str = ""
