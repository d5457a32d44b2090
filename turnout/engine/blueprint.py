"""Configuration + config.json + hardware -> everything about a run that is decided before weights load.

All that stands in the way is found here and raised together: flags that contradict the checkpoint or each
other, MoE backends that cannot run it, memory that does not suffice.

The KV cache gets `--max-total-tokens`; else on CUDA what --mem-fraction-static leaves; else on a CPU, whose
memory is shared with everything else, CPU_KV_BYTES or one context of the length asked for. Never more than
all running requests could use.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnout.checkpoint import locate, read_config
from turnout.config import Config
from turnout.errors import PlanRefused, Refusal
from turnout.models import describe
from turnout.models.interface import ModelDescription
from turnout.moe.budget import ITEMSIZE, Budget, gigabytes, kv_bytes_per_token, logits_bytes
from turnout.moe.plan import MoEPlan, Wishes, plan
from turnout.parallel.hardware import Hardware, detect
from turnout.parallel.topology import Topology

CPU_KV_BYTES = 256 * 10**6
QUANTIZATION_FORMATS = {"modelopt_fp4": "nvfp4"}  # flag -> format, where the names differ


@dataclass(frozen=True, kw_only=True)
class MemoryTable:
    """Planned bytes of one rank. `available` is --mem-fraction-static of the device."""

    dense: int  # all parameters but the routed experts', in the compute dtype
    experts: int  # routed experts of all layers, as stored for use
    kv: int
    workspace: int  # of the runner; shared by the layers
    dispatch: int  # of the dispatcher; shared by the layers
    logits: int
    available: int

    @property
    def total(self) -> int:
        return self.dense + self.experts + self.kv + self.workspace + self.dispatch + self.logits


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

    def describe(self) -> dict[str, Any]:
        """Plain values for JSON: what `plan --json` prints and /server_info reports."""
        return {
            "model": str(self.folder),
            "config": self.config.describe(),
            "description": dataclasses.asdict(self.description),
            "topology": dataclasses.asdict(self.topology),
            "hardware": dataclasses.asdict(self.hardware),
            "compute_dtype": self.compute_dtype,
            "budget": dataclasses.asdict(self.budget),
            "plan": dataclasses.asdict(self.plan),
            "kv": {
                "page_size": self.page_size,
                "num_pages": self.num_pages,
                "tokens": self.page_size * self.num_pages,
                "max_context": self.max_context,
            },
            "memory": dataclasses.asdict(self.memory) | {"total": self.memory.total},
        }


def resolve(config: Config, hardware: Hardware | None = None, *, rank: int | None = None) -> Blueprint:
    """Decide everything for `config` on `hardware` (default: this machine's).

    `rank` of all: by default the first one of this host.
    Raises PlanRefused with every reason, UserError for a model that cannot be found or described.
    """
    folder = locate(config.model)
    fields = read_config(folder)
    description = describe(fields)
    hardware = hardware or detect(config.device)
    topology = _topology(config, rank)
    dtype = _compute_dtype(config, hardware)
    found = [
        *_contradictions(config, description, hardware),
        *_attention_refusals(description, topology),
    ]
    budget = _budget(config, topology, hardware)
    try:
        moe = plan(
            description.moe,
            topology=topology,
            budget=budget,
            hardware=hardware,
            wishes=_wishes(config),
            compute_dtype=dtype,
            num_layers=len(description.moe_layers),
            stored_itemsize=ITEMSIZE.get(str(fields.get("dtype") or fields.get("torch_dtype")), 2),
        )
    except PlanRefused as error:
        raise PlanRefused(error.headline, [*found, *error.refusals]) from None
    if found:
        raise PlanRefused("the configuration cannot run", found)
    memory, num_pages, max_context = _memory(config, description, topology, hardware, dtype, budget, moe)
    return Blueprint(
        config=config,
        folder=folder,
        description=description,
        topology=topology,
        hardware=hardware,
        compute_dtype=dtype,
        budget=budget,
        plan=moe,
        page_size=config.page_size,
        num_pages=num_pages,
        max_context=max_context,
        memory=memory,
    )


def _topology(config: Config, rank: int | None) -> Topology:
    return Topology(
        tp_size=config.tp_size,
        dp_size=config.dp_size,
        ep_size=config.ep_size,
        enable_dp_attention=config.enable_dp_attention,
        nnodes=config.nnodes,
        rank=config.node_rank * (config.tp_size // config.nnodes) if rank is None else rank,
    )


def _compute_dtype(config: Config, hardware: Hardware) -> str:
    if config.dtype != "auto":
        return config.dtype
    return "bfloat16" if hardware.device == "cuda" else "float32"


def _budget(config: Config, topology: Topology, hardware: Hardware) -> Budget:
    graphs = hardware.device == "cuda" and not config.disable_cuda_graph
    drafts = config.speculative_num_draft_tokens if config.speculative_algorithm != "none" else 0
    return Budget.from_limits(
        chunked_prefill_size=config.chunked_prefill_size,
        max_prefill_tokens=config.max_prefill_tokens,
        max_running_requests=config.max_running_requests,
        graph_max_batch=config.cuda_graph_max_bs if graphs else 0,
        draft_tokens=drafts,
        dp_size=topology.dp_size,
        max_dispatch_tokens_per_rank=config.max_dispatch_tokens_per_rank,
    )


def _wishes(config: Config) -> Wishes:
    return Wishes(
        runner=config.moe_runner_backend,
        dispatcher=config.moe_a2a_backend,
        dispatch_format=config.moe_dispatch_dtype,
        activation_format=config.moe_activation_dtype,
        weight_storage=config.moe_weight_storage,
    )


def _contradictions(config: Config, description: ModelDescription, hardware: Hardware) -> list[Refusal]:
    """Flags that say something else than the checkpoint or the hardware."""
    found = []
    wanted = QUANTIZATION_FORMATS.get(config.quantization, config.quantization)
    held = description.moe.format
    if wanted not in ("auto", held):
        same = {form: name for name, form in QUANTIZATION_FORMATS.items()}.get(held, held)
        found.append(
            Refusal(
                who="checkpoint",
                asked=f"--quantization {config.quantization}",
                limit=f"the experts in {config.model} are {held}",
                remedy=f"use --quantization auto or {same}, or convert the bf16 checkpoint with "
                f"`turnout quantize MODEL OUT --format {wanted}`",
            )
        )
    longest = description.shape.max_position_embeddings
    if config.context_length > longest:
        found.append(
            Refusal(
                who="model",
                asked=f"--context-length {config.context_length}",
                limit=f"positions beyond {longest} (max_position_embeddings) were never trained",
                remedy=f"use --context-length {longest} or less, or 0 for the model's",
            )
        )
    if config.device not in ("auto", hardware.device):
        found.append(
            Refusal(
                who="hardware",
                asked=f"--device {config.device}",
                limit=f"the plan is for {hardware.name}, a {hardware.device} device",
                remedy=f"use --device auto or {hardware.device}, or another --hardware",
            )
        )
    return found


def _attention_refusals(description: ModelDescription, topology: Topology) -> list[Refusal]:
    """Heads are split evenly over attention-TP ranks; KV heads are split or repeated evenly."""
    if topology.refusals() or _heads_fit(description, topology.attention_tp):
        return []
    fitting = [
        n
        for n in range(1, topology.tp_size + 1)
        if topology.tp_size % n == 0 and _heads_fit(description, topology.tp_size // n)
    ]
    shape = description.shape
    return [
        Refusal(
            who="model",
            asked=f"{shape.num_heads} heads, {shape.num_kv_heads} of KV, over "
            f"{topology.attention_tp} attention-TP ranks",
            limit="heads divide evenly over ranks, and KV heads over ranks or ranks over KV heads",
            remedy="use --enable-dp-attention with --dp-size " + " or ".join(map(str, fitting)),
        )
    ]


def _heads_fit(description: ModelDescription, attention_tp: int) -> bool:
    heads, kv_heads = description.shape.num_heads, description.shape.num_kv_heads
    return heads % attention_tp == 0 and (kv_heads % attention_tp == 0 or attention_tp % kv_heads == 0)


def _memory(
    config: Config,
    description: ModelDescription,
    topology: Topology,
    hardware: Hardware,
    dtype: str,
    budget: Budget,
    moe: MoEPlan,
) -> tuple[MemoryTable, int, int]:
    """(bytes per rank, KV pages, longest context). Raises PlanRefused if they do not fit."""
    shape = description.shape
    memory = MemoryTable(
        # Embeddings and matrices are split; the norms and routers that are not are too small to count.
        dense=description.dense_parameters * ITEMSIZE[dtype] // topology.attention_tp,
        experts=moe.weight_bytes * len(description.moe_layers),
        kv=0,
        workspace=moe.workspace_bytes,
        dispatch=moe.dispatch_bytes,
        logits=logits_bytes(config.max_running_requests * budget.tokens_per_request, shape.vocab_size),
        available=int(hardware.memory_bytes * config.mem_fraction_static),
    )
    page_bytes = config.page_size * kv_bytes_per_token(
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        attention_tp=topology.attention_tp,
        itemsize=ITEMSIZE[dtype],
    )
    longest = config.context_length or shape.max_position_embeddings
    room = (memory.available - memory.total) // page_bytes
    if room < 1:
        raise PlanRefused(
            "the model does not fit in memory", [_too_large(config, memory, hardware, page_bytes)]
        )
    pages = _pages(config, hardware, longest, page_bytes, room)
    refusals = _kv_refusals(config, pages, room, page_bytes)
    if refusals:
        raise PlanRefused("the KV cache does not fit", refusals)
    table = dataclasses.replace(memory, kv=pages * page_bytes)
    return table, pages, min(longest, pages * config.page_size)


def _pages(config: Config, hardware: Hardware, longest: int, page_bytes: int, room: int) -> int:
    """KV pages wanted, whether or not they fit in `room`."""
    if config.max_total_tokens:
        return -(-config.max_total_tokens // config.page_size)
    one_context = -(-longest // config.page_size)
    useful = config.max_running_requests * one_context
    if hardware.device == "cuda":
        return min(useful, room)
    asked = one_context if config.context_length else 1
    return min(useful, max(asked, min(room, CPU_KV_BYTES // page_bytes)))


def _kv_refusals(config: Config, pages: int, room: int, page_bytes: int) -> list[Refusal]:
    found = []
    size, most = config.page_size, room * config.page_size
    if pages > room:
        flag = "--max-total-tokens" if config.max_total_tokens else "--context-length"
        found.append(
            Refusal(
                who="KV cache",
                asked=f"{flag} {pages * size} ({gigabytes(pages * page_bytes)})",
                limit=f"{gigabytes(room * page_bytes)} are left for it beside the weights",
                remedy=f"use {flag} {most} or less, or raise --mem-fraction-static",
            )
        )
    if config.context_length > pages * size:
        found.append(
            Refusal(
                who="KV cache",
                asked=f"--context-length {config.context_length}",
                limit=f"the KV cache holds {pages * size} tokens",
                remedy=f"use --context-length {pages * size} or less, or raise "
                + ("--max-total-tokens" if config.max_total_tokens else "--mem-fraction-static"),
            )
        )
    return found


def _too_large(config: Config, memory: MemoryTable, hardware: Hardware, page_bytes: int) -> Refusal:
    parts = {
        "dense weights": memory.dense,
        "experts": memory.experts,
        "workspace": memory.workspace,
        "dispatch buffers": memory.dispatch,
        "logits": memory.logits,
        "one KV page": page_bytes,
    }
    remedies = []
    if (memory.total + page_bytes) <= hardware.memory_bytes:
        share = -(-100 * (memory.total + page_bytes) // hardware.memory_bytes) / 100
        remedies.append(f"raise --mem-fraction-static to {share:g} or more")
    if memory.workspace + memory.dispatch > memory.total // 4:
        remedies.append("lower --max-prefill-tokens and --chunked-prefill-size")
    remedies += ["use a quantised checkpoint (`turnout quantize`)", "take a device with more memory"]
    return Refusal(
        who="memory",
        asked=", ".join(f"{name} {gigabytes(size)}" for name, size in parts.items() if size),
        limit=f"{gigabytes(memory.available)} of {hardware.name} may be used "
        f"(--mem-fraction-static {config.mem_fraction_static:g})",
        remedy=", or ".join(remedies),
    )
