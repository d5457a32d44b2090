"""Every way to arrange a number of ranks, in data-parallel groups and slices of the experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from turnout.config import Config
from turnout.engine.engine_plan import EnginePlan, ModelFolder, decide
from turnout.engine.parallel_config import attention_refusals
from turnout.errors import PlanRefused, Refusal
from turnout.formats.spec import FORMATS, ITEMSIZE
from turnout.moe.budget import moves
from turnout.moe.capabilities.declared import DISPATCHERS
from turnout.moe.capabilities.rank_share import DispatchShare
from turnout.moe.planning.backend_refusals import dispatcher_refusals
from turnout.moe.planning.sharding_rules import layer_refusals
from turnout.moe.spec import RankShape
from turnout.parallel.hardware import Hardware
from turnout.parallel.topology import Topology, divisors
from turnout.vocabulary import Layout, Phase


@dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """`config` with other --dp-size and --ep-size: its engine plan, or what is in its way."""

    topology: Topology
    engine_plan: EnginePlan | None
    refusals: tuple[Refusal, ...] = ()

    @property
    def flags(self) -> str:
        """What asks for it, in addition to --tp-size."""
        dp_size, ep_size = self.topology.dp_size, self.topology.ep_size
        if (dp_size, ep_size) == (1, 1):  # which are the defaults, whereas a model's may be others
            return "--no-enable-dp-attention"
        return (f"--dp {dp_size} --enable-dp-attention " if dp_size > 1 else "") + f"--ep {ep_size}"

    def describe(self) -> dict[str, Any]:
        """Plain values for JSON."""
        topology, engine_plan = self.topology, self.engine_plan
        sizes = {
            "dp_size": topology.dp_size,
            "ep_size": topology.ep_size,
            "attention_tp": topology.attention_tp,
            "expert_tp": topology.expert_tp,
            "flags": self.flags,
            "supported": engine_plan is not None,
        }
        if engine_plan is None:
            return sizes | {"refusals": [dataclasses.asdict(r) for r in self.refusals]}
        plan, memory = engine_plan.plan, engine_plan.memory
        return sizes | {
            "experts_per_rank": plan.num_local_experts,
            "prefill_dispatcher": plan.prefill.dispatcher,
            "decode_dispatcher": plan.decode.dispatcher,
            "weight_bytes": memory.dense + memory.experts,
            "dispatch_bytes": memory.dispatch,
            "workspace_bytes": memory.workspace,
            "kv_tokens": engine_plan.num_pages * engine_plan.page_size,
        }


def parallel_layouts(config: Config, model: ModelFolder, hardware: Hardware) -> Iterator[ParallelLayout]:
    """All sizes that divide --tp-size, attention groups first; the rest of `config` stays as asked.

    Most ways to arrange many ranks divide no heads or experts: of those, that is all that is said.
    """
    description = model.description
    sizes = divisors(config.tp_size)
    for dp_size, ep_size in product(sizes, sizes):
        asked = dataclasses.replace(config, dp_size=dp_size, ep_size=ep_size, enable_dp_attention=dp_size > 1)
        topology = Topology.of(asked)
        uneven = topology.refusals() or [
            *attention_refusals(description, topology),
            *layer_refusals(description.moe, topology),
        ]
        if uneven:
            yield ParallelLayout(topology=topology, engine_plan=None, refusals=tuple(uneven))
            continue
        try:
            yield ParallelLayout(topology=topology, engine_plan=decide(asked, model, hardware, topology))
        except PlanRefused as error:
            yield ParallelLayout(topology=topology, engine_plan=None, refusals=error.refusals)


@dataclass(frozen=True, kw_only=True)
class ReceiveBuffers:
    """What one dispatcher would keep on a rank for the largest step, for each of `experts` local experts."""

    dispatcher: str
    tokens: int
    experts: int
    sizes: dict[str, int]  # bytes by wire format; "bf16": the compute dtype

    def describe(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return dataclasses.asdict(self) | {"slabs": self.experts}  # its earlier name


def receive_buffers(engine_plan: EnginePlan) -> list[ReceiveBuffers]:
    """Of every dispatcher of this version that can move tokens between these ranks."""
    spec, plan, budget = engine_plan.description.moe, engine_plan.plan, engine_plan.budget
    shape = RankShape.of(
        spec, num_local_experts=plan.num_local_experts, expert_tp=engine_plan.topology.expert_tp
    )
    return [
        ReceiveBuffers(
            dispatcher=declared.name,
            tokens=declared.rows(Phase.PREFILL, budget, engine_plan.topology),
            experts=plan.num_local_experts if declared.layout == Layout.BATCHED_EXPERTS else 1,
            sizes={
                wire: declared.buffers(
                    DispatchShare(
                        shape=shape,
                        layout=declared.layout,
                        rows=declared.rows(Phase.PREFILL, budget, engine_plan.topology),
                        wire_format=wire,
                        itemsize=ITEMSIZE[engine_plan.compute_dtype],
                        ranks=engine_plan.topology.tp_size,
                        batches=2 if plan.two_batches else 1,
                    )
                )
                for wire in sorted(declared.on(engine_plan.hardware).wire_formats)
                if spec.hidden_size % FORMATS[wire].group == 0
            },
        )
        for declared in DISPATCHERS.values()
        if moves(declared.exchange, dp_size=budget.dp_size)
        and not dispatcher_refusals(
            declared, spec, engine_plan.topology, engine_plan.hardware, engine_plan.compute_dtype
        )
    ]
