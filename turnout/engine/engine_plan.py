"""Configuration + config.json + hardware -> everything about a run that is decided before weights load.

All that stands in the way is found here and raised together: flags that contradict the checkpoint or each
other, MoE backends that cannot run it, too little memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec

from turnout.attention import choose as attention
from turnout.cache import cache_folder
from turnout.checkpoint import locate, read_config, tensor_names
from turnout.config import Config
from turnout.engine import cuda_graph_policy
from turnout.engine.chosen_sizes import with_sizes
from turnout.engine.contradictions import contradictions
from turnout.engine.memory_fit import memory_table
from turnout.engine.memory_plan import MemoryTable, Rank, dense_bytes, pages_by_group, share_host
from turnout.engine.parallel_config import (
    attention_refusals,
    delayer_refusals,
    draft_layer_refusals,
    host_refusals,
    make_topology,
    target_refusals,
    two_batch_refusals,
    with_default_layout,
)
from turnout.engine.state_limits import state_refusals
from turnout.errors import PlanRefused, Refusal
from turnout.formats.spec import ITEMSIZE
from turnout.models import describe
from turnout.models.interface import ModelDescription
from turnout.moe.budget import Budget
from turnout.moe.capabilities.declared import RUNNERS
from turnout.moe.plan import MoEPlan, PlanRequest, plan
from turnout.moe.planning import measured as times_kept
from turnout.moe.planning.runner_by_batch_size import Times
from turnout.moe.spec import MoESpec
from turnout.parallel.hardware import Hardware, detect
from turnout.parallel.topology import Topology
from turnout.vocabulary import ComputeDtype, Format

NEAR_TIE_BLOCK = 64  # tokens of a forward that decides a near-tie, in float32 (near_ties.py)
CPU_CHUNK = 512  # tokens


@dataclass(frozen=True, kw_only=True)
class EnginePlan(Rank):
    """One rank's run, resolved once and passed down."""

    folder: Path
    budget: Budget
    plan: MoEPlan
    page_size: int
    num_pages: int  # KV pages of each cache group that keeps whole contexts
    max_context: int  # longest prompt + output in tokens
    memory: MemoryTable
    measured: Times = dataclasses.field(default_factory=dict)  # what chose between runners
    size_reasons: dict[str, str] = dataclasses.field(default_factory=dict)  # by field of the configuration
    lowered_sizes: dict[str, int] = dataclasses.field(default_factory=dict)  # by step times, at the start

    @property
    def chunk_tokens(self) -> int:
        """Prompt tokens of one request per step. A CPU would keep those that decode waiting for seconds."""
        default = CPU_CHUNK if self.hardware.device == "cpu" else self.config.max_prefill_tokens
        return self.config.chunked_prefill_size or default

    def size(self, name: str) -> int:
        """What a field of the configuration in `size_reasons` came to."""
        return self.lowered_sizes.get(name, getattr(self.config, name))

    @property
    def why_no_decode_graphs(self) -> str:
        """Why decode steps run eagerly, or "" if they replay graphs."""
        return cuda_graph_policy.why_no_decode_graphs(
            self.config,
            self.hardware,
            self.plan,
            self.cache_groups,
            self.attention_place,
            keeps_states=self.keeps_states,
        )

    @property
    def why_no_prefill_graphs(self) -> str:
        """Why steps with prompt tokens run eagerly, or "" if they replay graphs."""
        return cuda_graph_policy.why_no_prefill_graphs(self.config, self.hardware, self.plan)

    @property
    def why_no_prefill_delayer(self) -> str:
        """Why prompts never wait for those of other ranks, or "" if they do for a few steps."""
        if self.topology.dp_size == 1:
            return "there is one data-parallel rank"
        asked = self.config.prefill_delayer
        if asked == "auto" and (eager := self.why_no_decode_graphs):
            return f"decode steps are no CUDA graphs: {eager}"
        return "--prefill-delayer is off" if asked == "off" else ""

    @property
    def group_pages(self) -> tuple[int, ...]:
        """KV pages of each cache group."""
        return pages_by_group(self.cache_groups, self.num_pages, self.config, self.budget)

    def requests_at_once(self) -> dict[int, int]:
        """Requests that one rank can run together, by the tokens of each: 8k, 32k, 128k if the longest is
        longer, and the longest.

        Bounded by pages of whole contexts and by --max-running-requests, for which other caches have room.
        """
        most = self.size("max_running_requests")
        tokens = [*(size for size in (8192, 32768, 131072) if size < self.max_context), self.max_context]
        return {size: min(most, self.num_pages // -(-size // self.page_size)) for size in tokens}

    def experts_of(self, layer: int) -> tuple[MoESpec, MoEPlan]:
        """What the experts of an MoE layer are and how they run; those of a draft layer may differ."""
        draft = self.description.draft_moe
        if draft is None or self.plan.draft is None or layer != self.description.moe_layers[-1]:
            return self.description.moe, self.plan
        return draft, self.plan.draft

    def with_pages(self, num_pages: int) -> EnginePlan:
        """With no more than `num_pages` KV pages."""
        if num_pages >= self.num_pages:
            return self
        fewer = dataclasses.replace(
            self, num_pages=num_pages, max_context=min(self.max_context, num_pages * self.page_size)
        )
        memory = dataclasses.replace(self.memory, kv=sum(fewer.group_bytes(num_pages, self.budget)))
        return dataclasses.replace(fewer, memory=memory)

    def describe(self) -> dict[str, Any]:
        """Plain values for JSON: what `plan --json` prints and /server_info reports."""
        return {
            "model": str(self.folder),
            "config": self.config.describe(),
            "description": dataclasses.asdict(self.description),
            "topology": self.topology.describe(),
            "hardware": dataclasses.asdict(self.hardware),
            "compute_dtype": self.compute_dtype,
            "budget": dataclasses.asdict(self.budget)
            | {"gathered": self.budget.gathered, "received": self.budget.received},
            "sizes": {
                name: {"value": self.size(name), "reason": reason}
                for name, reason in self.size_reasons.items()
            },
            "plan": msgspec.to_builtins(self.plan),  # tables hold configurations of a runner's own types
            "kv": {
                "page_size": self.page_size,
                "num_pages": self.num_pages,
                "tokens": self.page_size * self.num_pages,
                "max_context": self.max_context,
                "requests_at_once": self.requests_at_once(),
                "groups": [
                    {
                        "kind": group.spec.kind,
                        "layers": len(group.layers),
                        "window": group.spec.window,
                        "backend": chosen.backend,
                        "prompts": chosen.prompts,
                        "prompt_tokens": chosen.prompt_tokens,
                        "num_pages": pages,
                        "token_bytes": group.token_bytes(ITEMSIZE[self.compute_dtype]),
                        "bytes": size,
                    }
                    for group, pages, size, chosen in zip(
                        self.cache_groups,
                        self.group_pages,
                        self.group_bytes(self.num_pages, self.budget),
                        self.attention_backends,
                        strict=True,
                    )
                ],
                "states": [
                    {
                        "kind": group.spec.kind,
                        "layers": len(group.layers),
                        "request_bytes": group.state_bytes(ITEMSIZE[self.compute_dtype]),
                        "num_slots": self.num_state_slots,
                    }
                    for group in self.state_groups
                ],
            },
            "memory": dataclasses.asdict(self.memory) | {"total": self.memory.total},
            "dense_parts": dense_bytes(self, self.plan),
        }


@dataclass(frozen=True, kw_only=True)
class ModelFolder:
    """A model as its folder describes it, with no weight read."""

    folder: Path
    description: ModelDescription
    stored_itemsize: int  # of unquantised weights, in bytes


def read_model(config: Config) -> ModelFolder:
    """Raises UserError for a model that cannot be found or described."""
    folder = locate(config.model)
    fields = read_config(folder)
    dtype = str(fields.get("dtype") or fields.get("torch_dtype"))
    names = tensor_names(folder) if config.drafts_by_layer else ()
    return ModelFolder(
        folder=folder,
        description=describe(
            fields,
            drafts=config.drafts_by_layer,
            names=names,
            index_fp8=config.index_cache_dtype == Format.FP8,
        ),
        stored_itemsize=ITEMSIZE.get(dtype, ITEMSIZE["bfloat16"]),
    )


def resolve(
    config: Config,
    hardware: Hardware | None = None,
    *,
    rank: int | None = None,
    measured: Times | None = None,
) -> EnginePlan:
    """Decide everything for `config` on `hardware` (default: this machine's).

    `rank` of all, once they have been launched: by default the first one of this host. `measured`: times of
    runners instead of those kept on this machine.
    Raises PlanRefused with every reason, UserError for a model that cannot be found or described.
    """
    model = read_model(config)
    config = with_default_layout(config, model.description)
    hardware = hardware or detect(config.device)
    topology = make_topology(config, rank)
    misplaced = host_refusals(config, topology, hardware, launched=rank is not None)
    return decide(config, model, hardware, topology, misplaced, measured)


def decide(
    config: Config,
    model: ModelFolder,
    hardware: Hardware,
    topology: Topology,
    found: Sequence[Refusal] = (),
    measured: Times | None = None,
) -> EnginePlan:
    """`resolve` for ranks arranged as in `topology`; `found` already stands in the way.

    hardware: the host's. The rank's, in the result, is its share of it. The result's configuration has every
    size that chosen_sizes.py decides, whether or not it was given.
    """
    return with_sizes(
        config,
        hardware.device,
        lambda sized: _decide(sized, model, hardware, topology, found, measured),
    )


def _decide(
    config: Config,
    model: ModelFolder,
    hardware: Hardware,
    topology: Topology,
    found: Sequence[Refusal],
    measured: Times | None,
) -> EnginePlan:
    description, dtype = model.description, _compute_dtype(config, hardware)
    hardware = share_host(hardware, topology)
    found = [
        *found,
        *contradictions(config, description, hardware, dtype),
        *attention_refusals(description, topology),
        *two_batch_refusals(config, topology),
        *target_refusals(config, topology),
        *delayer_refusals(config, topology),
        *state_refusals(config, description, hardware),
        *draft_layer_refusals(config),
    ]
    hardware = hardware.with_bf16_units(config.cpu_bf16_units)
    budget = _budget(config, topology, dtype)
    if measured is None:
        measured = _measured(config, description, topology, hardware, dtype)
    plan_experts = partial(
        _plan_experts,
        description,
        PlanRequest.of(config),
        measured,
        topology=topology,
        hardware=hardware,
        compute_dtype=dtype,
        stored_itemsize=model.stored_itemsize,
        tuning_folder=cache_folder(),
    )
    try:
        moe = plan_experts(budget=budget)
    except PlanRefused as error:
        raise PlanRefused(error.headline, [*found, *error.refusals]) from None
    if found:
        raise PlanRefused("the configuration cannot run", found)
    rank = Rank(
        config=config, description=description, topology=topology, hardware=hardware, compute_dtype=dtype
    )
    _check_attention(rank)
    memory, num_pages, max_context = memory_table(rank, budget, moe, lambda other: plan_experts(budget=other))
    return EnginePlan(
        **{field.name: getattr(rank, field.name) for field in dataclasses.fields(rank)},
        folder=model.folder,
        budget=budget,
        plan=moe,
        page_size=config.page_size,
        num_pages=num_pages,
        max_context=max_context,
        memory=memory,
        measured=measured,
    )


def _check_attention(rank: Rank) -> None:
    """Raises PlanRefused unless there is an attention backend for each of the rank's layers."""
    recurrent = [group.spec for group in rank.state_groups]
    found = attention.refusals(rank.cache_groups, rank.attention_place)
    found += attention.state_refusals(recurrent, rank.attention_place)
    if found:
        raise PlanRefused("no attention backend takes the model's layers", found)


def _plan_experts(
    description: ModelDescription, request: PlanRequest, measured: Times, **place: Any
) -> MoEPlan:
    """Of the model's MoE layers, and of a draft layer whose experts are in another format.

    What `request` says of formats and their runners is about the former. place: what else `plan` is told."""
    draft = description.draft_moe
    num_layers = len(description.moe_layers) - (draft is not None)
    made = plan(description.moe, request=request, measured=measured, num_layers=num_layers, **place)
    if draft is None:
        return made
    request = dataclasses.replace(
        request,
        moe_runner_backend="auto",
        moe_dispatch_dtype="auto",
        moe_activation_dtype="auto",
        moe_weight_storage="auto",
    )
    try:
        return dataclasses.replace(made, draft=plan(draft, request=request, **place))
    except PlanRefused as error:
        headline = f"experts of the draft layer, in {draft.format}: {error.headline}"
        raise PlanRefused(headline, error.refusals) from None


def _measured(
    config: Config, description: ModelDescription, topology: Topology, hardware: Hardware, dtype: ComputeDtype
) -> Times:
    """What `turnout tune` found on this machine; a named device was never measured."""
    if not hardware.present or topology.refusals():
        return {}
    layer = times_kept.describe(description.moe, topology, hardware, dtype, config.moe_activation_dtype)
    found = times_kept.read(cache_folder(), layer, times_kept.versions(RUNNERS.values()))
    return {RUNNERS.aliases.get(name, name): times for name, times in found.items()}


def _compute_dtype(config: Config, hardware: Hardware) -> ComputeDtype:
    if config.dtype != "auto":
        return cast(ComputeDtype, config.dtype)
    return "bfloat16" if hardware.device == "cuda" else "float32"


def _budget(config: Config, topology: Topology, dtype: ComputeDtype) -> Budget:
    return Budget.from_limits(
        chunked_prefill_size=config.chunked_prefill_size,
        max_prefill_tokens=config.max_prefill_tokens,
        max_running_requests=config.max_running_requests,
        draft_tokens=config.verified_tokens,
        near_tie_tokens=NEAR_TIE_BLOCK if dtype == "float32" else 0,
        dp_size=topology.dp_size,
        max_dispatch_tokens_per_rank=config.max_dispatch_tokens_per_rank,
    )
