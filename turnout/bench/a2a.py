"""`bench a2a`: how long tokens take to their experts and back, and how long the collectives alone.

Every rank brings as many tokens (data-parallel attention, one slice of the experts each). For every routing,
format there and back, number of tokens and dispatcher, `dispatch` and its `combine` are timed, and then the
very collectives that they made, with the same sizes and nothing in between: `raw_dispatch_us`,
`raw_combine_us`. What a dispatcher adds is packing, and for the all-to-all a wait for the counts. For a
dispatcher that makes no collectives, they are those of `collective`. On CUDA `graph_us` is an exchange, there
and back, replayed as a graph, for dispatchers that can be captured, and `raw_graph_us` their collectives so.
`wire_bytes` is what a rank sends to others in both, on average over the ranks; `wire_share` is its rate, in
the graph if there is one, over that of a large all-to-all of equal parts.

Each call starts on all ranks at once, behind a collective. On CUDA that is queued behind a large product,
as in a model, so that launching kernels costs time only where the host has to wait. A row holds the median
of the slowest rank.

First a layer with a few intermediate columns is compared with the float32 reference, at uneven numbers of
tokens: `error`. A point that is refused, or wrong, is a row with an `error_message`.

Legend: T tokens, H hidden, E experts, k top-k.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from turnout.bench.a2a_layers import CHECKED_TOKENS, ROUTINGS, Formats, Layers, Settings
from turnout.bench.a2a_table import progress, show
from turnout.bench.collectives import Clock, Recorded, repeat
from turnout.bench.plot import wire
from turnout.bench.results import check_measured, check_output, device_of, result, save
from turnout.config import launched
from turnout.engine.ranks.local_launcher import leave_with_launcher
from turnout.errors import PlanRefused, UserError
from turnout.formats.spec import WIRE_FORMATS, token_bytes
from turnout.moe import MoELayer
from turnout.moe.accuracy import BOUNDS, relative_error
from turnout.moe.capabilities.declared import DISPATCHERS
from turnout.moe.capabilities.rank_share import received_bytes
from turnout.moe.plan import MoEPlan
from turnout.moe.reference import experts_reference
from turnout.moe.routing import route
from turnout.moe.spec import MoESpec
from turnout.moe.wire_format import Wire
from turnout.parallel import hardware
from turnout.parallel.groups import Groups, connect, disconnect
from turnout.parallel.topology import Topology
from turnout.vocabulary import Format, Phase

INPUTS = 4  # sets of tokens and routes, taken in turn
GRAPH_EXCHANGES = 20  # dispatch and combine, in the graph that is replayed
MANY_TOKENS, GRAPH_MANY = 1024, 8  # from so many tokens on, fewer
COMBINE_FORMATS = ("bf16", "fp8")
ROWS = "rows.jsonl"
LARGE_BYTES = {"cpu": 1 << 22, "cuda": 1 << 28}  # of the exchange that tells the rate between ranks


def run(
    *,
    world_size: int = 2,
    hidden: int = 1024,
    experts: int = 64,
    top_k: int = 8,
    tokens: Sequence[int] = (16, 256),
    dispatchers: Sequence[str] = (),
    formats: Sequence[str] = ("bf16",),
    combine_formats: Sequence[str] = ("bf16",),
    routings: Sequence[str] = ("uniform",),
    device: str = "auto",
    output: Path | None = None,
    plot: Path | None = None,
    command: str | None = None,
) -> dict[str, Any]:
    """Measure on `world_size` ranks of this machine, which it starts, or on those that torchrun started.

    `tokens` are per rank; no `dispatchers`: all for the device. Returns the result, on rank 0 after printing
    a table and saving it, with a `plot` as SVG; other ranks of torchrun get none of its rows. Raises
    UserError for names that are not known, for more ranks than GPUs, and at last if every point failed.
    """
    ranks = launched()
    machine = hardware.detect(device)
    settings = Settings(
        world_size=ranks.size if ranks else world_size,
        hidden=hidden,
        experts=experts,
        top_k=top_k,
        tokens=tuple(tokens),
        dispatchers=tuple(dispatchers) or _dispatchers(machine.device),
        formats=tuple(formats),
        combine_formats=tuple(combine_formats),
        routings=tuple(routings),
        device=machine.device,
    )
    _check(settings, machine.devices, ranks.ranks_per_node if ranks else world_size)
    check_output(output, plot)
    if ranks is None:
        rows = _on_ranks_of_our_own(settings)
    else:
        rows = rank_rows(
            settings, ranks.rank, local_rank=ranks.rank % ranks.ranks_per_node, init_method=ranks.init_method
        )
    content = result(
        "a2a",
        rows,
        devices=settings.world_size,
        **device_of(machine),
        command=command,
    )
    if ranks is None or ranks.rank == 0:
        show(content)
        if output is not None:
            save(content, output)
        if plot is not None:
            plot.write_text(wire(content))
        check_measured(rows)
    return content


def rank_rows(
    settings: Settings,
    rank: int,
    *,
    local_rank: int,
    init_method: str,
    keep: Callable[[dict[str, Any]], object] = lambda row: None,
) -> list[dict[str, Any]]:
    """One rank's part; rank 0 returns the rows, the others none. keep: called with each row."""
    device = torch.device("cpu")
    if settings.device == "cuda":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    n = settings.world_size
    topology = Topology(tp_size=n, dp_size=n, ep_size=n, enable_dp_attention=n > 1, rank=rank)
    groups = connect(topology, init_method=init_method, device=device)
    try:
        with torch.inference_mode():
            bench = RankBench(settings, groups, device)
            rows = []
            points = product(
                settings.routings,
                settings.combine_formats,
                settings.formats,
                settings.tokens,
                settings.dispatchers,
            )
            for routing, back, format, tokens, dispatcher in points:
                rows.append(bench.point(dispatcher, Formats(Format(format), Format(back)), tokens, routing))
                keep(rows[-1])
                if rank == 0:
                    progress(rows[-1])
    finally:
        disconnect()
    return rows if rank == 0 else []


class RankBench:
    """Everything that one rank measures; all ranks call `point` in the same order."""

    def __init__(self, settings: Settings, groups: Groups, device: torch.device) -> None:
        self._settings, self._groups, self._device = settings, groups, device
        self._dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        self._layers = Layers(
            settings=settings,
            groups=groups,
            device=device,
            dtype=self._dtype,
            hardware=hardware.detect(device.type),
        )
        if device.type == "cpu":
            torch.set_num_threads(max(1, torch.get_num_threads() // settings.world_size))
        self._clock = Clock(groups.world, device)
        self._errors: dict[tuple[str, Formats], float] = {}
        self.exchange_GBps = self._exchange_GBps()

    def point(self, dispatcher: str, formats: Formats, tokens: int, routing: str) -> dict[str, Any]:
        row: dict[str, Any] = {
            "dispatcher": dispatcher,
            "devices": self._settings.world_size,
            "tokens": tokens,
            "hidden": self._settings.hidden,
            "topk": self._settings.top_k,
            "experts": self._settings.experts,
            "format": formats.there,
            "combine_format": formats.back,
            "routing": routing,
        }
        spec = self._layers.spec(formats.there)
        try:
            chosen = self._layers.plan(spec, dispatcher, formats)
        except PlanRefused as refused:
            return row | {"error_message": " ".join(str(refused).split())}
        if (dispatcher, formats) not in self._errors:
            self._errors[dispatcher, formats] = self._check(spec, chosen)
        row["error"] = self._errors[dispatcher, formats]
        if (
            row["error"]
            > BOUNDS[formats.back, "bfloat16" if formats.back == Format.FP8 else chosen.compute_dtype]
        ):
            return row | {"error_message": f"wrong by {row['error']:.1e} against the reference"}
        return row | self._times(spec, chosen, tokens, routing)

    def _times(self, spec: MoESpec, chosen: MoEPlan, tokens: int, routing: str) -> dict[str, float]:
        setup = self._layers.setup(spec, chosen)

        def make(groups: Groups, name: str = chosen.prefill.dispatcher) -> Any:
            return DISPATCHERS.load(name)(replace(setup, groups=groups))

        world = [tokens] * self._settings.world_size
        inputs = [self._layers.inputs(tokens, routing, seed) for seed in range(INPUTS)]
        dispatcher = make(self._groups)
        outs = []
        for given in inputs:
            batch, state = dispatcher.dispatch(*given, world)
            outs.append(self._out(batch, state))
            dispatcher.combine(outs[-1], state)
        world_group, parallel = Recorded(self._groups.world), Recorded(self._groups.data_parallel)
        recorded = replace(self._groups, world=world_group, data_parallel=parallel)
        by_itself = DISPATCHERS[chosen.prefill.dispatcher].buffers is not received_bytes
        recording = make(recorded, "collective") if by_itself else make(recorded)
        batch, state = recording.dispatch(*inputs[0], world)
        there = [*world_group.taken(), *parallel.taken()]
        recording.combine(self._out(batch, state), state)
        back = [*world_group.taken(), *parallel.taken()]
        dispatch_us, combine_us = self._clock.median_pair_us(
            [partial(dispatcher.dispatch, *given, world) for given in inputs],
            [partial(_combine, dispatcher, out) for out in outs],
        )
        sent = world_group.sent_bytes + parallel.sent_bytes
        if by_itself:
            sent = self._one_sided_bytes(spec, chosen, inputs[0][1])
        wire_bytes = self._mean(sent)
        times = {
            "dispatch_us": dispatch_us,
            "combine_us": combine_us,
            "wire_bytes": wire_bytes,
            "raw_dispatch_us": self._clock.median_us([partial(repeat, there)]),
            "raw_combine_us": self._clock.median_us([partial(repeat, back)]),
        }
        if self._device.type == "cuda" and dispatcher.capability.graph_safe:
            times["graph_us"] = self._graph_us(dispatcher, inputs, outs, world)
            if not by_itself:
                both = [partial(repeat, [*there, *back])] * _exchanges(tokens)
                times["raw_graph_us"] = self._clock.median_graph_us(both)
        both_us = times.get("graph_us", dispatch_us + combine_us)
        return times | {"wire_share": wire_bytes / 1e3 / both_us / self.exchange_GBps}

    def _graph_us(self, dispatcher: Any, inputs: Any, outs: Sequence[Tensor], world: Sequence[int]) -> float:
        """A dispatch and its combine, replayed as parts of one graph, on the slowest rank."""

        def exchange(given: Any, out: Tensor) -> None:
            _, state = dispatcher.dispatch(*given, world)
            dispatcher.combine(out, state)

        pairs = [partial(exchange, *pair) for pair in zip(inputs, outs, strict=True)]
        return self._clock.median_graph_us(pairs * (_exchanges(world[0]) // INPUTS))

    def _one_sided_bytes(self, spec: MoESpec, chosen: MoEPlan, ids_TK: Tensor) -> int:
        """What these tokens cost to and fro: a token, its ids and weights, once to each other rank that holds
        an expert it chose, and a result from there."""
        per_token = token_bytes(chosen.prefill.wire_format, spec.hidden_size, itemsize=self._dtype.itemsize)
        back = chosen.prefill.combine_format
        per_token += 8 * spec.top_k + token_bytes(back, spec.hidden_size, itemsize=self._dtype.itemsize)
        holder_TK = ids_TK.long() // (spec.num_experts // self._settings.world_size)
        wanted_TR = torch.zeros(len(ids_TK), self._settings.world_size, device=ids_TK.device)
        wanted_TR.scatter_(1, holder_TK, 1.0)
        wanted_TR[:, self._groups.world.rank] = 0
        return int(wanted_TR.sum()) * per_token

    def _exchange_GBps(self) -> float:
        """What a rank sends to others per second in a large all-to-all of equal parts."""
        n = self._groups.world.size
        rows = torch.zeros(n, LARGE_BYTES[self._device.type] // n, dtype=torch.uint8, device=self._device)
        one_each = [1] * n
        us = self._clock.median_us([partial(self._groups.world.all_to_all, rows, one_each, one_each)])
        return rows.nbytes * (n - 1) / n / us / 1e3 if n > 1 else float("inf")

    def _out(self, batch: Any, state: Any) -> Tensor:
        """Something in the place of a runner's output for `batch`, which is then combined."""
        shape = (*batch.hidden.data.shape[:-1], self._settings.hidden)
        return torch.randn(shape, device=self._device).to(self._dtype)

    def _check(self, spec: MoESpec, chosen: MoEPlan) -> float:
        """The largest relative error of any rank's tokens through a layer."""
        s, topology = self._settings, self._groups.topology
        experts, router_EH = self._layers.experts(spec)
        span = topology.expert_range(s.experts)
        held = slice(span.start, span.stop)
        own = replace(experts, w13=experts.w13[held], w2=experts.w2[held], first_expert=span.start)
        layer = MoELayer(spec, chosen, router_weight=router_EH, experts=own, groups=self._groups)
        tokens = [CHECKED_TOKENS[i % len(CHECKED_TOKENS)] for i in range(s.world_size)]
        x_TH = self._layers.inputs(tokens[topology.rank], ROUTINGS[0], 0)[0]
        y_TH = layer(x_TH, Phase.PREFILL, tokens)
        ids_TK, weights_TK = route(x_TH.float() @ router_EH.T, spec.routing, spec.top_k)
        sent_TH = Wire(self._layers.setup(spec, chosen)).encode(x_TH).decode()
        reference = experts_reference(sent_TH, ids_TK, weights_TK, experts, spec.activation)
        return max(self._everyones(relative_error(y_TH, reference)))

    def _everyones(self, value: float) -> list[float]:
        own = torch.tensor([value], dtype=torch.float64, device=self._device)
        return self._groups.world.all_gather(own, [1] * self._groups.world.size).tolist()

    def _mean(self, value: float) -> int:
        return round(statistics.fmean(self._everyones(value)))


def _exchanges(tokens: int) -> int:
    """In a graph."""
    return GRAPH_EXCHANGES if tokens < MANY_TOKENS else GRAPH_MANY


def _dispatchers(device: str) -> tuple[str, ...]:
    return tuple(d.name for d in DISPATCHERS.values() if device in d.devices)


def _check(settings: Settings, gpus: int, local_ranks: int) -> None:
    for kind, asked, known in (
        ("dispatcher", settings.dispatchers, list(DISPATCHERS)),
        ("format", settings.formats, list(WIRE_FORMATS)),
        ("combine format", settings.combine_formats, COMBINE_FORMATS),
        ("routing", settings.routings, ROUTINGS),
    ):
        for name in asked:
            if name not in known:
                raise UserError(f"unknown {kind} {name!r}; known: {', '.join(known)}")
    if settings.device == "cuda" and local_ranks > gpus:
        raise UserError(
            f"{local_ranks} ranks on {gpus} GPU(s): use --world-size {gpus}, or --device cpu for any number"
        )


def _on_ranks_of_our_own(settings: Settings) -> list[dict[str, Any]]:
    """Interrupted: what was measured until then; raises KeyboardInterrupt if that is nothing."""
    with tempfile.TemporaryDirectory(prefix="turnout-a2a-") as folder:
        kept = Path(folder) / ROWS
        # Ranks inherit what is blocked: an interrupt is the parent's to deal with, also while they import.
        # Python's resource tracker unblocks interrupts when it has started, so it starts first.
        resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        ranks = torch.multiprocessing.spawn(
            _rank_main, args=(settings, folder), nprocs=settings.world_size, join=False
        )
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            while not ranks.join():
                continue
        except KeyboardInterrupt:
            for process in ranks.processes:
                process.kill()
                process.join()
            if not (kept.exists() and kept.read_text()):
                sys.stderr.write("interrupted: nothing is measured\n")
                raise
            sys.stderr.write("interrupted: the rest is not measured\n")
        return [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []


def _rank_main(rank: int, settings: Settings, folder: str) -> None:
    """Rank 0 keeps each row as soon as it is measured."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    leave_with_launcher(parent.sentinel, folder)
    with (Path(folder) / ROWS if rank == 0 else Path(os.devnull)).open("w", buffering=1) as kept:
        rank_rows(
            settings,
            rank,
            local_rank=rank,
            init_method=f"file://{folder}/rendezvous",
            keep=lambda row: kept.write(json.dumps(row) + "\n"),
        )


def _combine(dispatcher: Any, out: Tensor, dispatched: tuple[Any, Any]) -> Tensor:
    return dispatcher.combine(out, dispatched[1])
