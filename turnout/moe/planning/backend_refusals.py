"""Why one backend cannot serve a layer here, and what would help: its declaration against the problem.

A refusal is data. The planner collects every one of them and prints them together before any weight is
loaded. Each constraint has one owner: what one backend allows is here, what a layer's sizes allow is in
sharding_rules.py, what two backends must agree on in compatibility.py. All compare declared values; none
knows a backend's name.
"""

from __future__ import annotations

import math
from functools import partial

from turnout.errors import Refusal, listed, standing
from turnout.moe.capabilities.capability import DispatcherCapability, RunnerCapability, generations
from turnout.moe.capabilities.limits import OTHER_DISPATCHER
from turnout.moe.planning.sharding_rules import parallel_layout, shards
from turnout.moe.spec import MoESpec
from turnout.parallel.hardware import Hardware
from turnout.parallel.topology import Topology
from turnout.vocabulary import ComputeDtype

OTHER_RUNNER = "choose another --moe-runner-backend"


def runner_refusals(
    runner: RunnerCapability,
    spec: MoESpec,
    topology: Topology,
    hardware: Hardware,
    compute_dtype: ComputeDtype,
) -> list[Refusal]:
    """Why `runner` cannot run `spec` here, whatever the dispatcher."""
    who = f"runner {runner.name}"
    refuse = partial(Refusal, who=who)
    found = _place_refusals(who, runner, hardware, OTHER_RUNNER)
    if compute_dtype not in runner.compute_dtypes:
        limit = f"computes in {listed(runner.compute_dtypes)}"
        remedy = f"use --dtype {min(runner.compute_dtypes)}, or {OTHER_RUNNER}"
        found.append(refuse(asked=f"hidden states in {compute_dtype}", limit=limit, remedy=remedy))
    if spec.format not in runner.weight_formats:
        takes = listed(runner.weight_formats)
        remedy = f"{OTHER_RUNNER}, or convert the checkpoint to {takes} with `turnout quantize`"
        found.append(refuse(asked=f"{spec.format} expert weights", limit=f"accepts {takes}", remedy=remedy))
    for weight_format, architectures in runner.format_architectures:
        on_cuda = hardware.device == "cuda"
        if weight_format == spec.format and on_cuda and hardware.architecture not in architectures:
            asked = f"{spec.format} expert weights on {_generation(hardware)}"
            limit = f"has kernels for them for {generations(architectures)}"
            found.append(refuse(asked=asked, limit=limit, remedy=OTHER_RUNNER))
    return found + _layer_refusals(runner, spec, topology)


def _layer_refusals(runner: RunnerCapability, spec: MoESpec, topology: Topology) -> list[Refusal]:
    """Activation, biases and sizes."""
    refuse, found = partial(Refusal, who=f"runner {runner.name}", remedy=OTHER_RUNNER), []
    if spec.activation.kind not in runner.activations:
        limit = f"computes {listed(runner.activations)}"
        found.append(refuse(asked=f"activation {spec.activation.kind}", limit=limit))
    if spec.expert_bias and not runner.expert_bias:
        found.append(refuse(asked="experts with biases", limit="its GEMMs add no bias"))
    if spec.hidden_size % runner.hidden_multiple:
        limit = f"must be a multiple of {runner.hidden_multiple}"
        found.append(refuse(asked=f"hidden size {spec.hidden_size}", limit=limit))
    shard, rest = divmod(spec.intermediate_size, topology.expert_tp)
    gated = spec.activation.gated
    multiple = math.lcm(runner.intermediate_multiple, 1 if gated else runner.ungated_multiple)
    if not rest and shard % multiple:  # a rest is refused by layer_refusals
        limit = f"a rank's shard must be a multiple of {multiple}"
        remedy = f"{parallel_layout(spec, topology, multiple)}, or {OTHER_RUNNER}"
        found.append(refuse(asked=shards(spec, topology), limit=limit, remedy=remedy))
    return found


def dispatcher_refusals(
    dispatcher: DispatcherCapability,
    spec: MoESpec,
    topology: Topology,
    hardware: Hardware,
    compute_dtype: ComputeDtype,
) -> list[Refusal]:
    """Why `dispatcher` cannot work between these ranks, whatever the runner."""
    who = f"dispatcher {dispatcher.name}"
    obstacles = (
        (
            topology.nnodes > 1 and not dispatcher.multi_host,
            f"--nnodes {topology.nnodes}",
            "works within one host",
            "use --nnodes 1, or --moe-a2a-backend collective or none",
        ),
        (
            dispatcher.peer_access and topology.tp_size > 1 and not hardware.peer_access,
            f"{topology.tp_size} ranks on GPUs of this machine",
            "they cannot reach each other's memory (`nvidia-smi topo -p2p r` shows who can)",
            "use --moe-a2a-backend collective or none",
        ),
    )
    return [
        *_place_refusals(who, dispatcher, hardware, OTHER_DISPATCHER),
        *standing(who, obstacles),
        *dispatcher.limits.refusals(who, spec, topology, compute_dtype),
    ]


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
        limit = f"has kernels for {generations(architectures)}"
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
