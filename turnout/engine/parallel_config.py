"""Where the ranks of a run are: the topology that the flags describe, and what stands in the way of it."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

from turnout.attention.kinds import CompressedSpec
from turnout.config import Config
from turnout.errors import Refusal, standing
from turnout.models.interface import ModelDescription
from turnout.parallel.hardware import Hardware
from turnout.parallel.topology import Topology, divisors, one_of, split_address
from turnout.vocabulary import AttentionKind

C = TypeVar("C", bound=Config)


def make_topology(config: Config, rank: int | None) -> Topology:
    """`rank` of all, or the first one of this host; the first of all where the hosts make no sense."""
    if rank is None:
        ranks_per_node, rest = divmod(config.tp_size, config.nnodes)
        rank = 0 if rest or config.node_rank >= config.nnodes else config.node_rank * ranks_per_node
    return Topology.of(config, rank)


def with_default_layout(config: C, description: ModelDescription) -> C:
    """`config` with data-parallel attention and experts over all ranks, where the flags leave that open and
    layers have compressed attention, whose caches are whole on each rank that shares a request."""
    ranks = config.tp_size
    if ranks == 1 or config.enable_dp_attention is not None or (config.dp_size, config.ep_size) != (1, 1):
        return config
    compressed = any(isinstance(layer, CompressedSpec) for layer in description.shape.attention)
    if not compressed or description.moe.num_experts % ranks:
        return config
    return dataclasses.replace(config, dp_size=ranks, ep_size=ranks, enable_dp_attention=True)


def host_refusals(config: Config, topology: Topology, hardware: Hardware, *, launched: bool) -> list[Refusal]:
    """What is wrong with the hosts. Where the ranks meet is up to the launcher once `launched`, and
    does not matter for hardware that is only named."""
    obstacles = (
        (
            config.node_rank >= config.nnodes,
            f"--node-rank {config.node_rank} with --nnodes {config.nnodes}",
            "hosts are numbered from 0",
            f"use --node-rank {config.nnodes - 1} or less, or --nnodes {config.node_rank + 1} or more",
        ),
        (
            bool(config.dist_init_addr) and split_address(config.dist_init_addr) is None,
            f"--dist-init-addr {config.dist_init_addr}",
            "must be HOST:PORT, with a port from 1 to 65535",
            "use --dist-init-addr HOST:PORT, such as 10.0.0.1:29500",
        ),
        (
            config.nnodes > 1 and not (config.dist_init_addr or launched) and hardware.present,
            f"--nnodes {config.nnodes} without --dist-init-addr",
            "the ranks of several hosts meet at an address of the first one",
            "give every host the same --dist-init-addr HOST:PORT, of the one with --node-rank 0 "
            "(to plan only: name the --hardware)",
        ),
    )
    return standing("hosts", obstacles) + _device_refusals(topology, hardware)


def _device_refusals(topology: Topology, hardware: Hardware) -> list[Refusal]:
    """A rank has a GPU of its own."""
    if topology.refusals() or not hardware.devices or topology.ranks_per_node <= hardware.devices:
        return []
    tp_size = topology.tp_size
    nnodes = next(n for n in divisors(tp_size) if tp_size // n <= hardware.devices)
    return [
        Refusal(
            who="hosts",
            asked=f"--tp-size {tp_size} on {topology.nnodes} host(s)",
            limit=f"a rank needs a GPU of its own, and this host has {hardware.devices} x {hardware.name}",
            remedy=f"use --tp-size {hardware.devices * topology.nnodes} or less, or --nnodes {nnodes} or "
            "more with as many hosts, or --device cpu",
        )
    ]


def attention_refusals(description: ModelDescription, topology: Topology) -> list[Refusal]:
    """Heads are split evenly over attention-TP ranks; KV heads are split or repeated evenly."""
    if topology.refusals() or _heads_fit(description, topology.attention_tp):
        return []
    fitting = [n for n in divisors(topology.tp_size) if _heads_fit(description, topology.tp_size // n)]
    layer = next(one for one in description.shape.attention if not one.splits(topology.attention_tp))
    return [
        Refusal(
            who="model",
            asked=f"{layer.heads()}, over {topology.attention_tp} attention-TP ranks",
            limit="heads divide evenly over ranks, and KV heads over ranks or ranks over KV heads"
            if layer.kind != AttentionKind.RECURRENT
            else "key heads divide evenly over ranks, each with its value heads",
            remedy=f"use --enable-dp-attention with --dp-size {one_of(fitting)}",
        )
    ]


def _heads_fit(description: ModelDescription, attention_tp: int) -> bool:
    return all(layer.splits(attention_tp) for layer in set(description.shape.attention))


def draft_layer_refusals(config: Config) -> list[Refusal]:
    """What a draft layer is not computed with."""
    if not (config.drafts_by_layer and config.deterministic):
        return []
    return [
        Refusal(
            who="draft layer",
            asked=f"--speculative-algorithm {config.speculative_algorithm} with --deterministic",
            limit="the draft layer computes all tokens of a step together",
            remedy="leave --deterministic out, or use --speculative-algorithm ngram",
        )
    ]


def target_refusals(config: Config, topology: Topology) -> list[Refusal]:
    """Why steps cannot be sized by how long they take."""
    if not config.target_tpot or topology.attention_tp == 1:
        return []
    return [
        Refusal(
            who="engine",
            asked=f"--target-tpot {config.target_tpot:g} where {topology.attention_tp} ranks share requests",
            limit="they must schedule alike, and each has a clock of its own",
            remedy="leave --target-tpot out and lower --max-prefill-tokens, or use --enable-dp-attention "
            f"--dp-size {topology.tp_size}",
        )
    ]


def delayer_refusals(config: Config, topology: Topology) -> list[Refusal]:
    """Why prompts cannot wait for those of other ranks."""
    obstacle = (
        config.prefill_delayer == "on" and topology.dp_size == 1,
        "--prefill-delayer on with --dp-size 1",
        "prompts wait for those of other data-parallel ranks, and there are none",
        "leave --prefill-delayer out, or use --enable-dp-attention --dp-size 2 or more",
    )
    return standing("engine", [obstacle])


def two_batch_refusals(config: Config, topology: Topology) -> list[Refusal]:
    """Why steps cannot be split into two micro-batches as asked."""
    if not config.enable_two_batch_overlap:
        return []
    flag, without = "--enable-two-batch-overlap", "leave --enable-two-batch-overlap out"
    obstacles = (
        (
            topology.dp_size == 1 or topology.attention_tp > 1,
            f"{flag} with --tp-size {topology.tp_size} --dp-size {topology.dp_size}",
            "only ranks that attend to requests of their own have nothing but their tokens to share",
            f"use --enable-dp-attention --dp-size {topology.tp_size} with several ranks, or {without}",
        ),
        (
            config.speculative,
            f"{flag} with --speculative-algorithm {config.speculative_algorithm}",
            "a request's drafts cannot be split",
            f"{without}, or use --speculative-algorithm none",
        ),
        (
            config.deterministic,
            f"{flag} with --deterministic",
            "--deterministic already splits steps in another way",
            "leave out either",
        ),
    )
    return standing("engine", obstacles)
