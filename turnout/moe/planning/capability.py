"""What a backend declares, and refusals: why it cannot serve a layer, and what would mend that.

A refusal is data. The planner collects every one of them and prints them together before any weight is
loaded. Each constraint has one owner: what one backend allows is its `refusals`, what a layer's sizes allow
is division.py's, what two backends must agree on pairing.py's. All compare declared values; none knows a
backend's name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

from turnout.errors import Refusal, listed
from turnout.formats.spec import WEIGHT_FORMATS
from turnout.moe.backends.torch.workspace import workspace_bytes as torch_workspace_bytes
from turnout.moe.budget import Budget, aligned, rows_seen
from turnout.moe.planning.cost import Cost
from turnout.moe.planning.dispatcher_limits import NO_LIMITS, OTHER_DISPATCHER, Limits
from turnout.moe.planning.packages import Package
from turnout.moe.planning.rank_share import Share
from turnout.moe.planning.sharding_rules import arrangement, shards
from turnout.moe.spec import MoESpec
from turnout.parallel.hardware import Hardware
from turnout.parallel.topology import Topology
from turnout.vocabulary import Exchange, Format, Layout, Phase, WeightStorage

OTHER_RUNNER = "choose another --moe-runner-backend"


@dataclass(frozen=True, kw_only=True)
class RunnerCapability:
    """What a runner accepts. The planner compares it with spec, hardware, phase and dispatcher."""

    name: str
    summary: str
    layouts: frozenset[Layout]
    weight_formats: frozenset[Format]
    wire_formats: frozenset[Format] = frozenset({Format.BF16})  # formats in which hidden states may arrive
    # What the GEMMs multiply with: "nvfp4" = W4A4, "fp8" = W8A8, W4A8; and weights for "fp8" and "bf16".
    activation_formats: frozenset[Format] = frozenset({Format.BF16})
    fp8_weight_formats: frozenset[Format] = frozenset({Format.FP8})
    weight_only_formats: frozenset[Format] = frozenset(WEIGHT_FORMATS)
    weight_only_layouts: frozenset[Layout] = frozenset(
        {Layout.TOKENS, Layout.BATCHED_EXPERTS}
    )  # in which it does so
    compute_dtypes: frozenset[str] = frozenset({"float32", "bfloat16", "float16"})  # of hidden states
    activations: frozenset[str] = frozenset({"silu", "swiglu", "relu2"})
    expert_bias: bool = True
    devices: frozenset[str] = frozenset({"cpu", "cuda"})
    architectures: frozenset[int] | None = None  # CUDA compute capabilities (90, 100); None: any
    format_architectures: tuple[
        tuple[Format, frozenset[int]], ...
    ] = ()  # of formats that not all of them have
    hidden_multiple: int = 1
    intermediate_multiple: int = 1  # of this rank's shard
    ungated_multiple: int = 1  # the same where W1 has no gate rows
    weight_storages: frozenset[WeightStorage] = frozenset(WeightStorage)
    fast_packed: frozenset[Format] = frozenset()  # formats that it reads packed as fast as decoded
    decoded_as_bf16: frozenset[Format] = frozenset()  # formats that it decodes to no wider type
    weights_per_layout: bool = False  # phases of different layouts have weights of their own
    fp4_units: bool = False  # W4A4 runs on FP4 tensor cores; False: its numerics are emulated
    fp8_units: bool = False  # the same of W8A8 and FP8 tensor cores
    workspace: Callable[[Share], int] = torch_workspace_bytes  # bytes beside the weights
    preference: int = 0  # `auto` takes the highest that is allowed; raise it on measured grounds
    grounds: str = ""  # what that rests on
    graph_safe: bool = True
    autotuned: bool = False  # has FlashInfer's autotuner choose among its kernels (autotune.py)
    deterministic: bool = True  # the same batch gives the same bits
    tiled: bool = False  # cuts its GEMMs by the plan's table of tilings (tile_config.py)
    checked: str = ""  # what stands in for a run on its hardware (planning/proven.py)
    # Under --deterministic what a token gets depends, in no bit, on what else is in the batch.
    batch_invariant: bool = False
    requires: tuple[Package, ...] = ()

    def refusals(
        self, spec: MoESpec, topology: Topology, hardware: Hardware, compute_dtype: str
    ) -> list[Refusal]:
        """Why this runner cannot run `spec` here, whatever the dispatcher."""
        who = f"runner {self.name}"
        refuse = partial(Refusal, who=who)
        found = _place_refusals(who, self, hardware, OTHER_RUNNER)
        if compute_dtype not in self.compute_dtypes:
            limit = f"computes in {listed(self.compute_dtypes)}"
            remedy = f"use --dtype {min(self.compute_dtypes)}, or {OTHER_RUNNER}"
            found.append(refuse(asked=f"hidden states in {compute_dtype}", limit=limit, remedy=remedy))
        if spec.format not in self.weight_formats:
            takes = listed(self.weight_formats)
            remedy = f"{OTHER_RUNNER}, or convert the checkpoint to {takes} with `turnout quantize`"
            found.append(
                refuse(asked=f"{spec.format} expert weights", limit=f"accepts {takes}", remedy=remedy)
            )
        for weight_format, architectures in self.format_architectures:
            on_cuda = hardware.device == "cuda"
            if weight_format == spec.format and on_cuda and hardware.architecture not in architectures:
                asked = f"{spec.format} expert weights on {_generation(hardware)}"
                limit = f"has kernels for them for {_generations(architectures)}"
                found.append(refuse(asked=asked, limit=limit, remedy=OTHER_RUNNER))
        return found + self._layer_refusals(spec, topology)

    def _layer_refusals(self, spec: MoESpec, topology: Topology) -> list[Refusal]:
        """Activation, biases and sizes."""
        refuse, found = partial(Refusal, who=f"runner {self.name}", remedy=OTHER_RUNNER), []
        if spec.activation.kind not in self.activations:
            limit = f"computes {listed(self.activations)}"
            found.append(refuse(asked=f"activation {spec.activation.kind}", limit=limit))
        if spec.expert_bias and not self.expert_bias:
            found.append(refuse(asked="experts with biases", limit="its GEMMs add no bias"))
        if spec.hidden_size % self.hidden_multiple:
            limit = f"must be a multiple of {self.hidden_multiple}"
            found.append(refuse(asked=f"hidden size {spec.hidden_size}", limit=limit))
        shard, rest = divmod(spec.intermediate_size, topology.expert_tp)
        gated = spec.activation.gated
        multiple = math.lcm(self.intermediate_multiple, 1 if gated else self.ungated_multiple)
        if not rest and shard % multiple:  # a rest is refused by layer_refusals
            limit = f"a rank's shard must be a multiple of {multiple}"
            remedy = f"{arrangement(spec, topology, multiple)}, or {OTHER_RUNNER}"
            found.append(refuse(asked=shards(spec, topology), limit=limit, remedy=remedy))
        return found


@dataclass(frozen=True, kw_only=True)
class WireNeed:
    """What a wire format asks for beyond what its dispatcher does."""

    format: Format
    architectures: frozenset[int]
    package: Package

    def lacking(self, hardware: Hardware) -> str:
        """On what tokens travel so, where they do not between GPUs of this kind; "" where they do."""
        if hardware.device == "cuda" and hardware.architecture not in self.architectures:
            return f"on compute capability {_generations(self.architectures)}"
        missing = hardware.present and self.package.lacking()
        return f"with {self.package} ({self.package.install})" if missing else ""


@dataclass(frozen=True, kw_only=True)
class DispatcherCapability:
    """What a dispatcher emits and where it works.

    exchange says whose tokens the runner gets to see, and with that who owes the sum over ranks:
    "gather":     those of all data-parallel groups, already summed by the combine. A single group's ranks
                  hold the same tokens: then nothing moves, and the layer owes the sum
    "all_to_all": those that chose an expert of which this rank holds a part; already summed

    The name of a `family` stands for its members, one for each `mode`. buffers: which formula sizes its
    memory (budget.dispatch_bytes). made_for: phases that `auto` takes it for, others where nothing else can.
    """

    name: str
    summary: str
    layout: Layout
    exchange: Exchange = Exchange.GATHER
    wire_formats: frozenset[Format] = frozenset({Format.BF16})
    wire_needs: tuple[WireNeed, ...] = ()
    combine_formats: frozenset[Format] = frozenset({Format.BF16})  # "bf16": the compute dtype
    withheld: tuple[str, ...] = ()  # formats that `on` took away, each with where it is there
    devices: frozenset[str] = frozenset({"cpu", "cuda"})
    multi_host: bool = True
    peer_access: bool = False  # needs GPUs that read and write each other's memory
    architectures: frozenset[int] | None = None  # CUDA compute capabilities (90, 100); None: any
    limits: Limits = NO_LIMITS
    buffers: str = "rows"
    row_multiple: int = 1  # of what `rows` says
    family: str = ""
    mode: str = ""
    made_for: frozenset[Phase] = frozenset(Phase)
    environment: tuple[tuple[str, str], ...] = ()  # variables for its library, set before ranks meet
    preference: int = 0
    graph_safe: bool = True
    checked: str = ""  # as of a runner
    batch_invariant: bool = False  # sums over ranks in a fixed order, under --deterministic
    in_turns: bool = False  # a batch may set out before the last one is back: no buffer serves both
    in_chunks: bool = False  # buffers may hold less than a step of prefill, which then passes in chunks
    cost: Cost | None = None  # as measured
    requires: tuple[Package, ...] = ()

    def rows(self, phase: Phase, budget: Budget, topology: Topology) -> int:
        """The most tokens a runner sees behind it in a step of `phase`."""
        senders = topology.attention_tp if self.buffers == "symmetric" else 1
        rows = rows_seen(self.exchange, phase, budget, senders=senders)
        return aligned(rows, self.row_multiple)

    def on(self, hardware: Hardware) -> DispatcherCapability:
        """With the wire formats alone that are sent between GPUs of this kind."""
        lacking = {need.format: need.lacking(hardware) for need in self.wire_needs}
        without = {format: where for format, where in lacking.items() if where}
        withheld = tuple(f"{format} {where}" for format, where in without.items())
        return replace(self, wire_formats=self.wire_formats.difference(without), withheld=withheld)

    def refusals(
        self, spec: MoESpec, topology: Topology, hardware: Hardware, compute_dtype: str
    ) -> list[Refusal]:
        """Why this dispatcher cannot work between these ranks, whatever the runner."""
        who = f"dispatcher {self.name}"
        found = _place_refusals(who, self, hardware, OTHER_DISPATCHER)
        if topology.nnodes > 1 and not self.multi_host:
            found.append(
                Refusal(
                    who=who,
                    asked=f"--nnodes {topology.nnodes}",
                    limit="works within one host",
                    remedy="use --nnodes 1, or --moe-a2a-backend collective or none",
                )
            )
        if self.peer_access and topology.tp_size > 1 and not hardware.peer_access:
            found.append(
                Refusal(
                    who=who,
                    asked=f"{topology.tp_size} ranks on GPUs of this machine",
                    limit="they cannot reach each other's memory (`nvidia-smi topo -p2p r` shows who can)",
                    remedy="use --moe-a2a-backend collective or none",
                )
            )
        return found + self.limits.refusals(who, spec, topology, compute_dtype)


def _place_refusals(
    who: str, backend: RunnerCapability | DispatcherCapability, hardware: Hardware, other: str
) -> list[Refusal]:
    """Device, architecture and, on this machine, packages."""
    refuse, found = partial(Refusal, who=who), []
    if hardware.device not in backend.devices:
        limit = f"runs on {listed(backend.devices)}"
        remedy = f"use --device {' or '.join(sorted(backend.devices))}, or {other}"
        found.append(refuse(asked=f"device {hardware.device}", limit=limit, remedy=remedy))
    architectures = backend.architectures
    if hardware.device == "cuda" and architectures and hardware.architecture not in architectures:
        limit = f"has kernels for {_generations(architectures)}"
        found.append(refuse(asked=_generation(hardware), limit=limit, remedy=other))
    if hardware.present:
        found += [
            refuse(asked="this Python environment", limit=lacking, remedy=package.install)
            for package in backend.requires
            if (lacking := package.lacking())
        ]
    return found


def _generation(hardware: Hardware) -> str:
    return f"{hardware.name} (compute capability {hardware.architecture / 10})"


def _generations(architectures: Iterable[int]) -> str:
    return listed(str(a / 10) for a in architectures)
