"""What a backend declares, and refusals: why it cannot serve a layer, and what would mend that.

A refusal is data. The planner collects every one of them and prints them together before any weight is
loaded. Each constraint has one owner: what a layer's sizes allow is `layer_refusals`, what one backend
allows is its `refusals`, what two backends must agree on is `pair_refusals`. All compare declared
values; none knows a backend's name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from turnout.errors import PlanRefused, Refusal
from turnout.moe.budget import WEIGHT_GROUP, WIRE_GROUP, Budget, aligned, moves, rows_seen
from turnout.moe.limits import NO_LIMITS, OTHER_DISPATCHER, Limits
from turnout.moe.packages import Package
from turnout.moe.spec import MoESpec
from turnout.moe.workspace.share import Share
from turnout.moe.workspace.torch import workspace_bytes as torch_workspace_bytes
from turnout.parallel.hardware import Hardware
from turnout.parallel.topology import Topology, divisors, one_of

__all__ = [
    "DispatcherCapability",
    "PlanRefused",
    "Refusal",
    "RunnerCapability",
    "WireNeed",
    "layer_refusals",
    "pair_refusals",
    "wire_format",
]

CONVERT = "convert the bf16 checkpoint to another format with `turnout quantize`"
OTHER_RUNNER = "choose another --moe-runner-backend"


@dataclass(frozen=True, kw_only=True)
class RunnerCapability:
    """What a runner accepts. The planner compares it with spec, hardware, phase and dispatcher."""

    name: str
    summary: str
    layouts: frozenset[str]  # of {"tokens", "experts"}
    weight_formats: frozenset[str]  # of formats.packed.FORMATS
    wire_formats: frozenset[str] = frozenset({"bf16"})  # formats in which hidden states may arrive
    # What the GEMMs multiply with: "nvfp4" = W4A4, "fp8" = W8A8, W4A8; and weights for "fp8" and "bf16".
    activation_formats: frozenset[str] = frozenset({"bf16"})
    fp8_weight_formats: frozenset[str] = frozenset({"fp8"})
    weight_only_formats: frozenset[str] = frozenset(WEIGHT_GROUP)
    weight_only_layouts: frozenset[str] = frozenset({"tokens", "experts"})  # in which it does so
    compute_dtypes: frozenset[str] = frozenset({"float32", "bfloat16", "float16"})  # of hidden states
    activations: frozenset[str] = frozenset({"silu", "swiglu", "relu2"})
    expert_bias: bool = True
    devices: frozenset[str] = frozenset({"cpu", "cuda"})
    architectures: frozenset[int] | None = None  # CUDA compute capabilities (90, 100); None: any
    format_architectures: tuple[tuple[str, frozenset[int]], ...] = ()  # of formats that not all of them have
    hidden_multiple: int = 1
    intermediate_multiple: int = 1  # of this rank's shard
    ungated_multiple: int = 1  # the same where W1 has no gate rows
    weight_storages: frozenset[str] = frozenset({"packed", "decoded"})
    fast_packed: frozenset[str] = frozenset()  # formats that it reads packed as fast as decoded
    decoded_as_bf16: frozenset[str] = frozenset()  # formats that it decodes to no wider type
    weights_per_layout: bool = False  # phases of different layouts have weights of their own
    fp4_units: bool = False  # W4A4 runs on FP4 tensor cores; False: its numerics are emulated
    fp8_units: bool = False  # the same of W8A8 and FP8 tensor cores
    workspace: Callable[[Share], int] = torch_workspace_bytes  # bytes beside the weights
    preference: int = 0  # `auto` takes the highest that is allowed; raise it on measured grounds
    grounds: str = ""  # what that rests on
    graph_safe: bool = True
    autotuned: bool = False  # has FlashInfer's autotuner choose among its kernels (autotune.py)
    deterministic: bool = True  # the same batch gives the same bits
    tiled: bool = False  # cuts its GEMMs by the plan's table of tilings (tiles.py)
    checked: str = ""  # what stands in for a run on its hardware (proven.py)
    # Under --deterministic what a token gets depends, in no bit, on what else is in the batch.
    batch_invariant: bool = False
    requires: tuple[Package, ...] = ()

    def refusals(
        self, spec: MoESpec, topology: Topology, hardware: Hardware, compute_dtype: str
    ) -> list[Refusal]:
        """Why this runner cannot run `spec` here, whatever the dispatcher."""
        who = f"runner {self.name}"
        found = _place_refusals(who, self, hardware, OTHER_RUNNER)
        if compute_dtype not in self.compute_dtypes:
            found.append(
                Refusal(
                    who=who,
                    asked=f"hidden states in {compute_dtype}",
                    limit=f"computes in {_listed(self.compute_dtypes)}",
                    remedy=f"use --dtype {min(self.compute_dtypes)}, or {OTHER_RUNNER}",
                )
            )
        if spec.format not in self.weight_formats:
            takes = _listed(self.weight_formats)
            found.append(
                Refusal(
                    who=who,
                    asked=f"{spec.format} expert weights",
                    limit=f"accepts {takes}",
                    remedy=f"{OTHER_RUNNER}, or convert the checkpoint to {takes} with `turnout quantize`",
                )
            )
        for weight_format, architectures in self.format_architectures:
            on_cuda = hardware.device == "cuda"
            if weight_format == spec.format and on_cuda and hardware.architecture not in architectures:
                found.append(
                    Refusal(
                        who=who,
                        asked=f"{spec.format} expert weights on {hardware.name} "
                        f"(compute capability {hardware.architecture / 10})",
                        limit=f"has kernels for them for {_listed(str(a / 10) for a in architectures)}",
                        remedy=OTHER_RUNNER,
                    )
                )
        if spec.activation.kind not in self.activations:
            limit = f"computes {_listed(self.activations)}"
            found.append(
                Refusal(who=who, asked=f"activation {spec.activation.kind}", limit=limit, remedy=OTHER_RUNNER)
            )
        if spec.expert_bias and not self.expert_bias:
            limit = "its GEMMs add no bias"
            found.append(Refusal(who=who, asked="experts with biases", limit=limit, remedy=OTHER_RUNNER))
        if spec.hidden_size % self.hidden_multiple:
            limit = f"must be a multiple of {self.hidden_multiple}"
            asked = f"hidden size {spec.hidden_size}"
            found.append(Refusal(who=who, asked=asked, limit=limit, remedy=OTHER_RUNNER))
        shard, rest = divmod(spec.intermediate_size, topology.expert_tp)
        gated = spec.activation.gated
        multiple = math.lcm(self.intermediate_multiple, 1 if gated else self.ungated_multiple)
        if not rest and shard % multiple:  # a rest is refused by layer_refusals
            found.append(
                Refusal(
                    who=who,
                    asked=_shards(spec, topology),
                    limit=f"a rank's shard must be a multiple of {multiple}",
                    remedy=f"{_arrangement(spec, topology, multiple)}, or {OTHER_RUNNER}",
                )
            )
        return found


@dataclass(frozen=True, kw_only=True)
class WireNeed:
    """What a wire format asks for beyond what its dispatcher does."""

    format: str
    architectures: frozenset[int]
    package: Package

    def lacking(self, hardware: Hardware) -> str:
        """On what tokens travel so, where they do not between GPUs of this kind; "" where they do."""
        if hardware.device == "cuda" and hardware.architecture not in self.architectures:
            return f"on compute capability {_listed(str(a / 10) for a in self.architectures)}"
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
    layout: str
    exchange: str = "gather"
    wire_formats: frozenset[str] = frozenset({"bf16"})
    wire_needs: tuple[WireNeed, ...] = ()
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
    made_for: frozenset[str] = frozenset({"prefill", "decode"})
    environment: tuple[tuple[str, str], ...] = ()  # variables for its library, set before ranks meet
    preference: int = 0
    graph_safe: bool = True
    checked: str = ""  # as of a runner
    batch_invariant: bool = False  # sums over ranks in a fixed order, under --deterministic
    in_turns: bool = False  # a batch may set out before the last one is back: no buffer serves both
    requires: tuple[Package, ...] = ()

    def rows(self, phase: str, budget: Budget, topology: Topology) -> int:
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
                    remedy=f"use --nnodes 1, or {OTHER_DISPATCHER}",
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


def layer_refusals(spec: MoESpec, topology: Topology) -> list[Refusal]:
    """Why no backend at all can run `spec` on ranks so arranged."""
    found = []
    if not 1 <= spec.top_k <= spec.num_experts:
        found.append(
            Refusal(
                who="layer",
                asked=f"top-{spec.top_k} of {spec.num_experts} experts",
                limit="a token goes to at least one expert and to none twice",
                remedy="mend num_experts_per_tok or num_experts in config.json",
            )
        )
    needed = _shard_multiple(spec, topology.expert_tp)
    if spec.num_experts % topology.ep_size:
        found.append(
            Refusal(
                who="layer",
                asked=f"{spec.num_experts} experts over --ep-size {topology.ep_size}",
                limit="every rank holds the same number of experts",
                remedy=_arrangement(spec, topology),
            )
        )
    if spec.intermediate_size % (topology.expert_tp * needed):
        found.append(
            Refusal(
                who="layer",
                asked=_shards(spec, topology),
                limit=f"shards must be equal, and multiples of {needed} for {spec.format} weights",
                remedy=_arrangement(spec, topology),
            )
        )
    if spec.hidden_size % _shard_multiple(spec, 1):
        found.append(
            Refusal(
                who="layer",
                asked=f"hidden size {spec.hidden_size}",
                limit=f"{spec.format} weights come in groups of {WEIGHT_GROUP[spec.format]}",
                remedy=CONVERT,
            )
        )
    return found


def pair_refusals(
    runner: RunnerCapability,
    dispatcher: DispatcherCapability,
    spec: MoESpec,
    wish: str = "auto",
    *,
    dp_size: int = 1,
) -> list[Refusal]:
    """Why this runner cannot be fed by this dispatcher. `wish`: a wire format, or "auto"."""
    who = f"runner {runner.name} with dispatcher {dispatcher.name}"
    found = []
    if dispatcher.layout not in runner.layouts:
        found.append(
            Refusal(
                who=who,
                asked=f"layout {dispatcher.layout!r}, which the dispatcher emits",
                limit=f"the runner takes {_listed(runner.layouts)}",
                remedy=f"{OTHER_RUNNER}, or {OTHER_DISPATCHER}",
            )
        )
    asked = f"--moe-dispatch-dtype {wish}"
    if wish not in ("auto", "bf16") and not moves(dispatcher.exchange, dp_size=dp_size):
        found.append(
            Refusal(
                who=f"dispatcher {dispatcher.name}",
                asked=f"{asked} with --dp-size {dp_size}",
                limit="no token travels, for every rank holds them all",
                remedy=f"use --moe-dispatch-dtype auto, or {OTHER_DISPATCHER}",
            )
        )
    elif wish == "nvfp4" and not spec.quantized_activations:
        found.append(
            Refusal(
                who="wire",
                asked=asked,
                limit="tokens are quantised with the checkpoint's calibrated input scales, and it holds none",
                remedy="use --moe-dispatch-dtype auto, or quantise from bf16 with "
                "`turnout quantize MODEL OUT --format nvfp4 --calibrate`",
            )
        )
    elif not _wire_formats(runner, dispatcher, spec, wish, dp_size):
        sends = _listed((*dispatcher.wire_formats, *dispatcher.withheld))
        found.append(
            Refusal(
                who=who,
                asked=f"{asked} at hidden size {spec.hidden_size}",
                limit=f"the dispatcher sends {sends}; the runner takes "
                f"{_listed(runner.wire_formats)}; fp8 and nvfp4 need a hidden size divisible by "
                f"{WIRE_GROUP['fp8']} and {WIRE_GROUP['nvfp4']}",
                remedy="use --moe-dispatch-dtype auto"
                if wish != "auto"
                else f"{OTHER_RUNNER}, or {OTHER_DISPATCHER}",
            )
        )
    return found


def wire_format(
    runner: RunnerCapability,
    dispatcher: DispatcherCapability,
    spec: MoESpec,
    wish: str,
    activation_format: str,
    *,
    dp_size: int = 1,
) -> str:
    """The format on the wire for a pair that has no refusals.

    The GEMMs' own format when both sides speak it: quantised before the wire instead of after it, the
    values are the same and the bytes fewer. Otherwise unquantised, which costs no accuracy.
    """
    shared = _wire_formats(runner, dispatcher, spec, wish, dp_size)
    for choice in (activation_format, "bf16"):
        if choice in shared:
            return choice
    return min(shared)


def _wire_formats(
    runner: RunnerCapability, dispatcher: DispatcherCapability, spec: MoESpec, wish: str, dp_size: int
) -> set[str]:
    """Tokens that do not travel stay as they are; NVFP4 needs scales that calibration left."""
    possible = {"bf16", "fp8", "nvfp4"} if moves(dispatcher.exchange, dp_size=dp_size) else {"bf16"}
    if not spec.quantized_activations:
        possible -= {"nvfp4"}
    shared = runner.wire_formats & dispatcher.wire_formats & possible
    return {f for f in shared if spec.hidden_size % WIRE_GROUP[f] == 0 and wish in ("auto", f)}


def _place_refusals(
    who: str, backend: RunnerCapability | DispatcherCapability, hardware: Hardware, other: str
) -> list[Refusal]:
    """Device, architecture and, on this machine, packages."""
    found = []
    if hardware.device not in backend.devices:
        found.append(
            Refusal(
                who=who,
                asked=f"device {hardware.device}",
                limit=f"runs on {_listed(backend.devices)}",
                remedy=f"use --device {' or '.join(sorted(backend.devices))}, or {other}",
            )
        )
    architectures = getattr(backend, "architectures", None)
    if hardware.device == "cuda" and architectures and hardware.architecture not in architectures:
        found.append(
            Refusal(
                who=who,
                asked=f"{hardware.name} (compute capability {hardware.architecture / 10})",
                limit=f"has kernels for {_listed(str(a / 10) for a in architectures)}",
                remedy=other,
            )
        )
    if hardware.present:
        found += [
            Refusal(who=who, asked="this Python environment", limit=lacking, remedy=package.install)
            for package in backend.requires
            if (lacking := package.lacking())
        ]
    return found


def _shard_multiple(spec: MoESpec, expert_tp: int) -> int:
    """What a rank's shard of the intermediate size must be a multiple of, so that no scale is shared.

    FP8 blocks may be cut short at the end of a whole matrix, hence do not bind experts that are whole.
    """
    return 1 if spec.format == "fp8" and expert_tp == 1 else WEIGHT_GROUP[spec.format]


def _shards(spec: MoESpec, topology: Topology) -> str:
    return f"expert intermediate size {spec.intermediate_size} over {topology.expert_tp} expert-TP rank(s)"


def _arrangement(spec: MoESpec, topology: Topology, multiple: int = 1) -> str:
    """The --ep-size, else --tp-size too, under which experts and shards divide, the latter by `multiple`."""
    step = math.lcm(topology.dp_size, topology.nnodes)
    for tp_size in range(topology.tp_size, 0, -step):
        fitting = [
            ep
            for ep in divisors(tp_size)
            if spec.num_experts % ep == 0
            and spec.intermediate_size % (multiple * tp_size // ep) == 0
            and spec.intermediate_size % (_shard_multiple(spec, tp_size // ep) * tp_size // ep) == 0
        ]
        if fitting:
            smaller = f"--tp-size {tp_size} " if tp_size < topology.tp_size else ""
            return f"use {smaller}--ep-size {one_of(fitting)}"
    return CONVERT


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
