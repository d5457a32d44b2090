"""What a backend declares: its runners and dispatchers, compared with a layer's by moe/planning.

All of it is data. Each backend's folder has a `declaration.py`, which imports no torch and holds the folder's
`BACKEND`; turnout/registry.py has a line for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import get_args

from turnout.errors import listed
from turnout.formats.spec import WEIGHT_FORMATS
from turnout.moe.budget import Budget, aligned, rows_seen
from turnout.moe.capabilities.cost import Cost
from turnout.moe.capabilities.limits import NO_LIMITS, Limits
from turnout.moe.capabilities.rank_share import DispatchShare, Share, received_bytes
from turnout.moe.capabilities.tuning import Tuning
from turnout.packages import Package
from turnout.parallel.hardware import Hardware
from turnout.parallel.topology import Topology
from turnout.vocabulary import (
    ActivationKind,
    ComputeDtype,
    Device,
    Exchange,
    Format,
    Layout,
    Phase,
    WeightStorage,
)


@dataclass(frozen=True, kw_only=True)
class RunnerCapability:
    """What a runner accepts. The planner compares it with spec, hardware, phase and dispatcher."""

    name: str
    summary: str
    layouts: frozenset[Layout]
    weight_formats: frozenset[Format]
    workspace: Callable[[Share], int]  # bytes that it needs next to the weights
    implementation: str = ""  # "package.module:class", imported when a plan takes it (moe/interface.py)
    aliases: tuple[str, ...] = ()  # other names that --moe-runner-backend takes
    wire_formats: frozenset[Format] = frozenset({Format.BF16})  # formats in which hidden states may arrive
    # What the GEMMs multiply with: "nvfp4" = W4A4, "fp8" = W8A8, W4A8; and weights for "fp8" and "bf16".
    activation_formats: frozenset[Format] = frozenset({Format.BF16})
    fp8_weight_formats: frozenset[Format] = frozenset({Format.FP8})
    weight_only_formats: frozenset[Format] = frozenset(WEIGHT_FORMATS)
    weight_only_layouts: frozenset[Layout] = frozenset(Layout)  # in which it does so
    compute_dtypes: frozenset[ComputeDtype] = frozenset(get_args(ComputeDtype))  # of hidden states
    activations: frozenset[ActivationKind] = frozenset(ActivationKind)
    expert_bias: bool = True
    devices: frozenset[Device] = frozenset({"cpu", "cuda"})
    architectures: frozenset[int] | None = None  # CUDA compute capabilities (90, 100); None: any
    format_architectures: tuple[tuple[Format, frozenset[int]], ...] = ()  # of formats not for all
    hidden_multiple: int = 1
    intermediate_multiple: int = 1  # of this rank's shard
    ungated_multiple: int = 1  # the same where W1 has no gate rows
    weight_storages: frozenset[WeightStorage] = frozenset(WeightStorage)
    fast_packed: frozenset[Format] = frozenset()  # formats that it reads packed as fast as decoded
    decoded_as_bf16: frozenset[Format] = frozenset()  # formats that it decodes to no wider type
    weights_per_layout: bool = False  # phases of different layouts have weights of their own
    fp4_units: bool = False  # W4A4 runs on FP4 tensor cores; False: its numerics are emulated
    fp8_units: bool = False  # the same of W8A8 and FP8 tensor cores
    preference: int = 0  # `auto` takes the highest that is allowed; raise it on measured grounds
    grounds: str = ""  # what that rests on
    graph_safe: bool = True
    autotuner: str = ""  # "package.module:function" that chooses among its kernels before it serves
    deterministic: bool = True  # the same batch gives the same bits
    # Every launch is of a Triton kernel, so what its batches need is found, and compiled, without running it.
    all_triton: bool = False
    tuning: Tuning | None = None  # how its GEMMs are cut, where that is measured
    checked: str = ""  # what stands in for a run on its hardware (planning/hardware_evidence.py)
    # Under --deterministic what a token gets does not depend on what else is in the batch.
    batch_invariant: bool = False
    requires: tuple[Package, ...] = ()


@dataclass(frozen=True, kw_only=True)
class WireNeed:
    """What a wire format asks for beyond what its dispatcher does."""

    format: Format
    architectures: frozenset[int]
    package: Package

    def lacking(self, hardware: Hardware) -> str:
        """On what tokens are sent so, where they are not between GPUs of this kind; "" where they are."""
        if hardware.device == "cuda" and hardware.architecture not in self.architectures:
            return f"on compute capability {generations(self.architectures)}"
        missing = hardware.present and self.package.lacking()
        return f"with {self.package} ({self.package.install})" if missing else ""


@dataclass(frozen=True, kw_only=True)
class DispatcherCapability:
    """What a dispatcher emits and where it works.

    exchange says whose tokens the runner gets to see, and with that who makes the sum over ranks:
    "gather":     those of all data-parallel groups, already summed by the combine. A single group's ranks
                  hold the same tokens: then nothing moves, and the layer makes the sum
    "all_to_all": those that chose an expert of which this rank holds a part; already summed

    The name of a `family` stands for its members, one for each `mode`. made_for: phases that `auto` takes it
    for, others where nothing else can.
    """

    name: str
    summary: str
    layout: Layout
    implementation: str = ""  # as of a runner
    aliases: tuple[str, ...] = ()  # other names that --moe-a2a-backend takes
    exchange: Exchange = Exchange.GATHER
    wire_formats: frozenset[Format] = frozenset({Format.BF16})
    wire_needs: tuple[WireNeed, ...] = ()
    combine_formats: frozenset[Format] = frozenset({Format.BF16})  # "bf16": the compute dtype
    withheld: tuple[str, ...] = ()  # formats that `on` took away, each with where it is there
    devices: frozenset[Device] = frozenset({"cpu", "cuda"})
    multi_host: bool = True
    peer_access: bool = False  # needs GPUs that read and write each other's memory
    architectures: frozenset[int] | None = None  # CUDA compute capabilities (90, 100); None: any
    limits: Limits = NO_LIMITS
    buffers: Callable[[DispatchShare], int] = received_bytes  # bytes, where tokens leave their rank
    equal_shares: bool = False  # ranks that share tokens have rows of their own, as many each
    row_multiple: int = 1  # of what `rows` says
    family: str = ""
    mode: str = ""
    made_for: frozenset[Phase] = frozenset(Phase)
    environment: tuple[tuple[str, str], ...] = ()  # variables for its library, set before ranks meet
    preference: int = 0
    graph_safe: bool = True
    checked: str = ""  # as of a runner
    batch_invariant: bool = False  # sums over ranks in a fixed order, under --deterministic
    two_batch_overlap: bool = False  # two batches may be in flight: no buffer serves both
    in_chunks: bool = False  # buffers may hold less than a step of prefill, which then passes in chunks
    cost: Cost | None = None  # as measured
    requires: tuple[Package, ...] = ()

    def rows(self, phase: Phase, budget: Budget, topology: Topology) -> int:
        """The most tokens a runner sees behind it in a step of `phase`."""
        senders = topology.attention_tp if self.equal_shares else 1
        rows = rows_seen(self.exchange, phase, budget, senders=senders)
        return aligned(rows, self.row_multiple)

    def on(self, hardware: Hardware) -> DispatcherCapability:
        """With only the wire formats that are sent between GPUs of this kind."""
        lacking = {need.format: need.lacking(hardware) for need in self.wire_needs}
        without = {format: where for format, where in lacking.items() if where}
        withheld = tuple(f"{format} {where}" for format, where in without.items())
        return replace(self, wire_formats=self.wire_formats.difference(without), withheld=withheld)


@dataclass(frozen=True, kw_only=True)
class Backend:
    """What one folder of moe/backends declares, the `BACKEND` of its declaration.py."""

    runners: tuple[RunnerCapability, ...] = ()
    dispatchers: tuple[DispatcherCapability, ...] = ()


def generations(architectures: Iterable[int]) -> str:
    """Compute capabilities for people: {90, 100} -> "10.0, 9.0"."""
    return listed(str(a / 10) for a in architectures)
