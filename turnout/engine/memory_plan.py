"""Bytes of one rank: weights, KV cache and buffers.

Everything here follows from the configuration, the sizes of the groups and the hardware, never from a
rank's number: ranks that share requests need the same pages, and all ranks get the same.

Layers with a sliding window have KV pages of their own, far fewer than those that keep whole contexts.
Layers that keep states have a slot of fixed size for each of --max-running-requests, one for padding, and as
many again as the former for snapshots where --state-snapshot-interval asks for them.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from turnout.attention.capability import Chosen, Place
from turnout.attention.choose import choose
from turnout.attention.kinds import (
    AttentionSpec,
    CacheGroup,
    StateGroup,
    cache_groups,
    keeps_states,
    most_handed_bytes,
    state_groups,
)
from turnout.attention.workspace import workspace_bytes
from turnout.config import Config
from turnout.engine.cuda_graph_policy import prefill_graph_sizes, why_no_prefill_graphs
from turnout.formats.spec import FORMATS, ITEMSIZE
from turnout.models.interface import DenseParameters, ModelDescription
from turnout.moe.budget import Budget, logits_bytes
from turnout.moe.plan import MoEPlan
from turnout.parallel.hardware import Hardware
from turnout.parallel.topology import Topology
from turnout.registry import ATTENTION_BACKENDS
from turnout.vocabulary import ComputeDtype, Format, SharedExpert

PIECE_BYTES = 256 * 2**10  # of a piece of a prefill graph, as the driver keeps it; measured on an H200
POOL_MARGIN = 1.25  # sizes share a pool, whose blocks fit the largest
REUSED_SHARE = 16  # of the pages of whole contexts: as many of a window's are kept for prefixes, over this


@dataclass(frozen=True, kw_only=True)
class MemoryTable:
    """Planned bytes of one rank. `available` is --mem-fraction-static of the device."""

    dense: int  # all parameters but the routed experts', in the compute dtype or as stored in FP8
    experts: int  # routed experts of all layers, as stored for use
    kv: int
    attention: int  # of one layer's attention, beyond queries and results
    workspace: int  # of the runner; shared by the layers
    dispatch: int  # of the dispatcher; shared by the layers
    logits: int
    prefill_graphs: int  # with what their pieces hand to attention; 0 where there are none
    available: int
    states: int = 0  # of layers that keep some: of all running requests, and snapshots

    @property
    def total(self) -> int:
        weights = self.dense + self.experts
        buffers = self.attention + self.workspace + self.dispatch + self.logits + self.prefill_graphs
        return weights + self.kv + self.states + buffers


def share_host(hardware: Hardware, topology: Topology) -> Hardware:
    """What each rank has of `hardware`: GPUs are whole, but a host's memory is that of all its CPU ranks."""
    if hardware.device != "cpu" or topology.ranks_per_node < 1:
        return hardware
    return dataclasses.replace(hardware, memory_bytes=hardware.memory_bytes // topology.ranks_per_node)


def whole_host(hardware: Hardware, topology: Topology) -> Hardware:
    """The inverse, but for a remainder that no rank has."""
    if hardware.device != "cpu" or topology.ranks_per_node < 1:
        return hardware
    return dataclasses.replace(hardware, memory_bytes=hardware.memory_bytes * topology.ranks_per_node)


@dataclass(frozen=True, kw_only=True)
class Rank:
    """One rank before its MoE backends are chosen. hardware: its share of the host's."""

    config: Config
    description: ModelDescription
    topology: Topology
    hardware: Hardware
    compute_dtype: ComputeDtype

    @cached_property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """With the KV heads of this rank."""
        return rank_cache_groups(self.description, self.topology)

    @cached_property
    def state_groups(self) -> tuple[StateGroup, ...]:
        """With the heads of this rank."""
        return state_groups(_local_layers(self.description, self.topology))

    @property
    def num_snapshots(self) -> int:
        """States kept for prefixes that may be asked for again: as many as of running requests."""
        snapshots = self.config.state_snapshot_interval and self.keeps_states
        return self.config.max_running_requests if snapshots else 0

    @property
    def states_per_request(self) -> int:
        """Slots of a running request. Of recurrent layers: a state for each token that a step may verify."""
        return (self.config.verified_tokens or 1) if self.state_groups else 1

    @property
    def num_state_slots(self) -> int:
        """Of running requests."""
        return self.config.max_running_requests * self.states_per_request

    @property
    def request_bytes(self) -> int:
        """One state of a request in all layers that have one."""
        itemsize, drafts = ITEMSIZE[self.compute_dtype], max(0, self.config.verified_tokens - 1)
        kept = sum(group.request_bytes(itemsize, drafts) for group in self.cache_groups)
        return kept + sum(group.state_bytes(itemsize) for group in self.state_groups)

    @property
    def keeps_states(self) -> bool:
        """Whether requests have states of fixed size."""
        return keeps_states(self.description.shape.attention)

    @property
    def attention_place(self) -> Place:
        """What attention is to run on."""
        return Place(
            device=self.hardware.device,
            dtype=self.compute_dtype,
            page_size=self.config.page_size,
            architecture=self.hardware.architecture,
            present=self.hardware.present,
            asked=self.config.attention_backend,
        )

    @property
    def attention_backends(self) -> tuple[Chosen, ...]:
        """What computes each cache group, once none is refused."""
        found = (choose(group.spec, self.attention_place) for group in self.cache_groups)
        return tuple(chosen for chosen in found if chosen is not None)

    @property
    def stores_in_place(self) -> bool:
        """Whether kernels that make keys and values of any layer may store them (`Attention.place`)."""
        return all(ATTENTION_BACKENDS.get(chosen.backend).device_tables for chosen in self.attention_backends)

    def group_bytes(self, num_pages: int, budget: Budget) -> tuple[int, ...]:
        """Of each cache group, where those of whole contexts have so many pages."""
        page_size, itemsize = self.config.page_size, ITEMSIZE[self.compute_dtype]
        pages = pages_by_group(self.cache_groups, num_pages, self.config, budget)
        return tuple(
            count * group.page_bytes(page_size, itemsize)
            for group, count in zip(self.cache_groups, pages, strict=True)
        )

    def most_pages(self, room: int, budget: Budget) -> int:
        """The most pages of whole contexts that fit, with those of the other groups, in `room` bytes."""
        most = (
            max(0, room) // sum(self.group_bytes(1, budget)) + 1
        )  # a page of each group; fewer of windows later
        while sum(self.group_bytes(most, budget)) <= room:
            most *= 2
        return bisect_right(range(most), room, key=lambda pages: sum(self.group_bytes(pages, budget))) - 1

    def most_requests(self, memory: MemoryTable, budget: Budget) -> int:
        """Of how many running requests states and logits fit next to the rest and a page of KV."""
        least = memory.total - memory.states - memory.logits - memory.kv + sum(self.group_bytes(1, budget))
        logits = logits_bytes(budget.tokens_per_request, self.description.shape.vocab_size)
        each = logits + self.request_bytes * (self.states_per_request + bool(self.num_snapshots))
        return (memory.available - least - self.request_bytes) // each

    def without_kv(self, budget: Budget, moe: MoEPlan) -> MemoryTable:
        """All but the KV cache."""
        config, description = self.config, self.description
        rows = config.max_running_requests * budget.tokens_per_request
        return MemoryTable(
            dense=sum(dense_bytes(self, moe).values()),
            experts=moe.weight_bytes * (len(description.moe_layers) - len(moe.parts))
            + sum(part.weight_bytes for part in moe.parts),
            kv=0,
            attention=workspace_bytes(
                self.cache_groups,
                budget.local,
                ITEMSIZE[self.compute_dtype],
                config.context_length or description.shape.max_position_embeddings,
            ),
            workspace=sum(part.workspace_bytes for part in moe.parts),
            dispatch=sum({_buffers(part): part.dispatch_bytes for part in moe.parts}.values()),
            logits=logits_bytes(rows, description.shape.vocab_size),
            prefill_graphs=self._prefill_graph_bytes(budget, moe),
            available=int(self.hardware.memory_bytes * config.mem_fraction_static),
            states=(self.num_state_slots + 1 + self.num_snapshots) * self.request_bytes,
        )

    def _prefill_graph_bytes(self, budget: Budget, moe: MoEPlan) -> int:
        """Of the tensors of fixed addresses, of the pool, which has what a layer of the largest size holds at
        a time, and of the graphs themselves."""
        if why_no_prefill_graphs(self.config, self.hardware, moe):
            return 0
        sizes, H = prefill_graph_sizes(budget), self.description.shape.hidden_size
        specs = [group.spec for group in self.cache_groups]
        layers = [*specs, *(group.spec for group in self.state_groups)]
        itemsize, last = ITEMSIZE[self.compute_dtype], max(spec.output_size for spec in layers)
        given, handed_over = (
            sum(most_handed_bytes(layers, itemsize, stored=stored)) // itemsize
            for stored in (False, self.stores_in_place)
        )
        handed = handed_over + last + H
        rotaries = 2 * len({spec.rope for spec in specs}) * max(spec.head_dim for spec in specs)
        attention = 2 * given  # products of a layer, and queries turned
        experts = (
            3 * H + 2 * self.description.moe.num_experts
        )  # routed, combined; logits and what they become
        streams = 4 * H * self.description.shape.residual_streams
        values = (
            handed + rotaries + POOL_MARGIN * (streams + max(attention, experts, 4 * self._widest_mlp(moe)))
        )
        integers = 8 * (3 + len(specs)) + 8 * self.description.moe.top_k + 1
        pieces = len(sizes) * (self.description.shape.num_layers + 1)
        tokens = sizes[-1] * (int(values * itemsize) + integers)
        return tokens + pieces * PIECE_BYTES

    def _widest_mlp(self, moe: MoEPlan) -> int:
        """Columns of this rank's part of a dense layer, or of a shared expert if that is wider."""
        dense, H, layers = (
            self.description.dense,
            self.description.shape.hidden_size,
            len(self.description.moe_layers),
        )
        split = self.topology.tp_size if moe.shared_expert == SharedExpert.SHARDED else 1
        of_dense = dense.mlps // (3 * H * max(1, self.description.shape.num_layers - layers))
        of_shared = dense.shared_experts // (3 * H * max(1, layers))
        return max(-(-of_dense // self.topology.dense_tp), -(-of_shared // split))


def _buffers(moe: MoEPlan) -> tuple[object, ...]:
    """What plans have in common whose layers share buffers of dispatchers."""
    return tuple(
        (phase.dispatcher, phase.wire_format, phase.combine_format, phase.max_tokens)
        for phase in (moe.prefill, moe.decode)
    )


def dense_bytes(rank: Rank, moe: MoEPlan) -> dict[str, int]:
    """Of all parameters of one rank but the routed experts', by the fields of `DenseParameters`."""
    description, itemsize = rank.description, ITEMSIZE[rank.compute_dtype]
    held = dense_parameters(description, description.dense, rank.topology, moe)
    found = {name: count * itemsize for name, count in held.items()}
    found["replicated"] += description.dense.in_float32 * (4 - itemsize)
    if not (rank.hardware.device == "cuda" and rank.hardware.architecture >= 90 and itemsize == 2):
        return found
    fp8 = FORMATS[Format.FP8]  # each row has scales of its own (kernels/common/fp8_weights.py)
    kept = dense_parameters(description, description.dense_in_fp8, rank.topology, moe)
    return {
        name: size - kept[name] * (itemsize - fp8.bits // 8) + kept[name] * fp8.scale_bytes // fp8.group
        for name, size in found.items()
    }


def dense_parameters(
    description: ModelDescription, dense: DenseParameters, topology: Topology, moe: MoEPlan
) -> dict[str, int]:
    """How many of these parameters one rank has, by their fields.

    Matrices of attention and the vocabulary are split over attention TP, as evenly as can be, dense MLPs
    too or whole. A KV head is whole, and held by several ranks where there are more of them than heads. A
    shared expert is split over all ranks, or whole, as the plan says.
    """
    shape = description.shape
    split = topology.attention_tp
    kv, local_kv = (
        sum(layer.token_bytes(1) for layer in layers)
        for layers in (shape.attention, _local_layers(description, topology))
    )
    sharded = moe.shared_expert == SharedExpert.SHARDED
    return {
        "vocabulary": dense.vocabulary // shape.vocab_size * vocabulary_rows(description, topology),
        "queries": -(-dense.queries // split),
        "keys_values": dense.keys_values * local_kv // kv,
        "mlps": -(-dense.mlps // topology.dense_tp),
        "shared_experts": -(-dense.shared_experts // (topology.tp_size if sharded else 1)),
        "replicated": dense.replicated,
    }


def vocabulary_rows(description: ModelDescription, topology: Topology) -> int:
    """The most that a rank has of the embedding and of the head: ranks that share requests divide them."""
    return -(-description.shape.vocab_size // topology.attention_tp)


def rank_cache_groups(description: ModelDescription, topology: Topology) -> tuple[CacheGroup, ...]:
    """The cache groups of a model with the heads of one rank."""
    return cache_groups(_local_layers(description, topology))


def _local_layers(description: ModelDescription, topology: Topology) -> list[AttentionSpec]:
    layers = description.shape.attention
    local = {layer: layer.split(topology.attention_tp) for layer in set(layers)}
    return [local[layer] for layer in layers]


def pages_by_group(
    groups: Sequence[CacheGroup], num_pages: int, config: Config, budget: Budget
) -> tuple[int, ...]:
    """Pages of each group, where those that keep whole contexts have `num_pages`.

    A group with a window has what all running requests can need at a time, so that none waits for it, and a
    share of `num_pages` for prefixes that may be asked for again; never more than `num_pages`.
    """
    size, running = config.page_size, config.max_running_requests
    found = []
    for group in groups:
        seen = group.spec.window + budget.tokens_per_request - 1
        # In pages that begin and end anywhere, one of them spare, and one begun by a chunk.
        needed = running * (-(-seen // size) + 3) + -(-config.max_prefill_tokens // size)
        reusable = num_pages // REUSED_SHARE
        found.append(min(num_pages, needed + reusable) if group.spec.window else num_pages)
    return tuple(found)
