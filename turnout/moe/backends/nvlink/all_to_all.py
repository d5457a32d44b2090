"""The all-to-all by stores into peers' memory: GPUs of one host, no collective, no wait of the host.

How tokens are sent and results summed is `kernels.nvlink`; here a layer's calls become launches. The batch
has a row for every token that a rank may bring, `room` of each, of which those that chose an expert of this
rank are filled in and the others are padding. A captured step may be replayed for as long as the process
lives, with more or fewer tokens on every rank.

All layers share a region: each dispatch is followed by its combine before the next. Plans that have two
batches in flight have two regions, taken in turn, or whichever is free where one batch is sent in chunks.

Legend: T tokens of this rank's share, k top-k, H hidden, R ranks.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from turnout.formats import fp8, nvfp4
from turnout.moe.backends.nvlink import buffers
from turnout.moe.backends.nvlink.declaration import BACKEND
from turnout.moe.backends.nvlink.warmup import compile_exchange
from turnout.moe.batch import Hidden, TokensBatch
from turnout.moe.interface import DispatchSetup
from turnout.moe.plan import PHASES, MoEPlan
from turnout.moe.spec import MoESpec
from turnout.parallel.groups import Group, Groups, own_share, shares
from turnout.parallel.symmetric import SPIN_SECONDS, SymmetricMemory, agree, allocate
from turnout.vocabulary import Format


@dataclass(frozen=True, eq=False)
class Region:
    """Symmetric memory for `capacity` tokens of each rank, and where its parts begin.

    epochs: int64 [2] on the device: the last exchange that was combined, and the one in flight.
    """

    memory: SymmetricMemory
    capacity: int
    starts: dict[str, int]
    epochs: Tensor

    @property
    def rows(self) -> int:
        return self.capacity * self.memory.size

    @property
    def few(self) -> int:
        """Tokens of a rank that are sent in words."""
        return min(self.capacity, buffers.FEW_TOKENS)

    def part(self, name: str, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """[rows, columns]: the beginning of a part."""
        start = self.starts[name]
        size = rows * columns * dtype.itemsize
        return self.memory.own_B[start : start + size].view(dtype).view(rows, columns)


@dataclass(eq=False)
class Regions:
    """A region for each batch that may be in flight.

    begun: how many exchanges were dispatched, the same on all ranks. away: indices of regions whose dispatch
    has not been combined yet. compiled: wire formats whose kernels are compiled.
    """

    each: tuple[Region, ...]
    begun: int = 0
    away: set[int] = field(default_factory=set)
    compiled: set[Format] = field(default_factory=set)

    def next(self) -> int:
        """The index of the next free region, taken from now on. RuntimeError if none is free."""
        turns = [(self.begun + i) % len(self.each) for i in range(1, 1 + len(self.each))]
        free = [place for place in turns if place not in self.away]
        if not free:
            raise RuntimeError(
                f"a dispatch over NVLink was not followed by its combine, and {len(self.each)} may be in "
                "flight: what ranks know of each other no longer fits; restart all ranks"
            )
        self.begun += 1
        self.away.add(free[0])
        return free[0]


@dataclass(frozen=True)
class Sent:
    """What `combine` needs of a dispatch.

    place: index of the region. received_ids: int32 [room * R, k]. own_ids: int32 [T, k], of this rank's share
    of tokens. room: rows per rank. shares: tokens of each rank that shares its requests.
    """

    place: int
    received_ids: Tensor
    own_ids_TK: Tensor
    room: int
    shares: Sequence[int]


# Kept as long as a layer holds it.
_REGIONS: WeakValueDictionary[tuple[object, ...], Regions] = WeakValueDictionary()


def _regions(spec: MoESpec, plan: MoEPlan, groups: Groups, device: torch.device) -> Regions:
    """The regions that layers of these sizes share; the first layer allocates them, collectively.

    Raises UserError if ranks differ.
    """
    phases = [plan.phase(name) for name in PHASES]
    ours = {declared.name for declared in BACKEND.dispatchers}
    served = [phase for phase in phases if phase.dispatcher in ours]
    world = groups.world
    capacity = max(phase.max_tokens for phase in served) // world.size
    wire_formats = tuple(sorted({phase.wire_format for phase in served}))
    formats = wire_formats, served[0].combine_format
    batches = 2 if plan.two_batches else 1
    key = (world, device, batches, capacity, spec.hidden_size, spec.top_k, formats, plan.compute_dtype)
    found = _REGIONS.get(key)
    if found is None:
        each = tuple(_make(spec, plan, world, capacity, formats, device) for _ in range(batches))
        found = _REGIONS[key] = Regions(each)
    return found


def _make(
    spec: MoESpec,
    plan: MoEPlan,
    world: Group,
    capacity: int,
    formats: tuple[tuple[Format, ...], Format],
    device: torch.device,
) -> Region:
    wire_formats, combine_format = formats
    sizes = buffers.region_parts(
        hidden=spec.hidden_size,
        top_k=spec.top_k,
        ranks=world.size,
        capacity=capacity,
        wire_formats=wire_formats,
        combine_format=combine_format,
        itemsize=getattr(torch, plan.compute_dtype).itemsize,
    )
    agree(
        world,
        {
            "--max-dispatch-tokens-per-rank and limits of a step": capacity,
            "hidden size": spec.hidden_size,
            "top-k": spec.top_k,
            "bytes of symmetric memory": sum(sizes.values()),
        },
        device,
        "Start all ranks with the same flags, or use --moe-a2a-backend collective",
    )
    starts = dict(zip(sizes, accumulate([0, *sizes.values()]), strict=False))
    return Region(
        memory=allocate(world, sum(sizes.values()), device),
        capacity=capacity,
        starts=starts,
        epochs=torch.zeros(2, dtype=torch.int64, device=device),
    )


class NvlinkAllToAll:
    """One layer's exchange over all ranks; every rank calls `send` and `bring_back` for every batch."""

    def __init__(self, setup: DispatchSetup) -> None:
        spec, plan, groups = setup.spec, setup.plan, setup.groups
        from turnout.kernels.nvlink.links import Links

        self._format, self._combine_format = setup.wire_format, setup.combine_format
        if self._format == Format.NVFP4 and setup.input_scale is None:
            raise ValueError("nvfp4 on the wire needs the input scales of a calibrated checkpoint")
        self._input_scale = setup.input_scale
        self._spec, self._groups, self._device = spec, groups, setup.device
        self._dtype = setup.dtype
        self._regions = _regions(spec, plan, groups, setup.device)
        self._links = [
            Links(
                rank=region.memory.rank,
                addresses=region.memory.addresses_R,
                failed=region.memory.failed,
                told=region.memory.told,
                epochs=region.epochs,
                starts=region.starts,
                rows=region.rows,
                few=region.few,
                hidden=spec.hidden_size,
                top_k=spec.top_k,
                experts_per_slice=plan.num_local_experts,
                expert_tp=groups.topology.expert_tp,
                limit_seconds=SPIN_SECONDS,
            )
            for region in self._regions.each
        ]
        if setup.device.type == "cuda" and self._format not in self._regions.compiled:
            self._regions.compiled.add(self._format)
            threads = max(1, (os.cpu_count() or 1) // groups.topology.ranks_per_node)
            capacity = self._regions.each[0].capacity
            formats = self._format, self._combine_format
            compile_exchange(self._links[0], capacity, self._dtype, *formats, threads)

    def send(
        self, x_TH: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor, tokens: Sequence[int]
    ) -> tuple[TokensBatch, Sent]:
        self.check()
        group = self._groups.attention_tp
        split, mine = own_share(len(x_TH), group)
        room = max(shares(most, group.size)[0] for most in tokens)
        capacity = self._regions.each[0].capacity
        if room > capacity or split[group.rank] > room:
            raise ValueError(
                f"{max(tokens)} tokens of a data-parallel rank, {len(x_TH)} of this one, in a step for "
                f"which buffers hold {capacity * group.size}: plan with larger limits"
            )
        place = self._regions.next()
        region = self._regions.each[place]
        ids_TK = topk_ids_TK[mine].contiguous()
        rows, k = room * region.memory.size, self._spec.top_k
        out_ids = torch.empty(rows, k, dtype=torch.int32, device=self._device)
        out_weights = torch.empty(rows, k, dtype=torch.float32, device=self._device)
        self._links[place].dispatch(
            x_TH[mine], ids_TK, topk_weights_TK[mine].contiguous(), self._input_scale, out_ids, out_weights,
            room, str(self._format),
        )  # fmt: skip
        batch = TokensBatch(hidden=self._hidden(region, rows), topk_ids=out_ids, topk_weights=out_weights)
        return batch, Sent(place, out_ids, ids_TK, room, split)

    def bring_back(self, out: Tensor, state: Sent) -> Tensor:
        """Results [room * R, H] to sums [T, H] of this rank's tokens."""
        out_TH = torch.empty(
            len(state.own_ids_TK), self._spec.hidden_size, dtype=self._dtype, device=self._device
        )
        self._regions.away.discard(state.place)
        self._links[state.place].combine(
            out, state.received_ids, state.own_ids_TK, out_TH, state.room, str(self._combine_format)
        )
        return self._groups.attention_tp.all_gather(out_TH, state.shares)

    def check(self) -> None:
        """Raise PeerError if a kernel has given up waiting."""
        for region in self._regions.each:
            region.memory.check()

    def _hidden(self, region: Region, rows: int) -> Hidden:
        H = self._spec.hidden_size
        if self._format == Format.BF16:
            return Hidden(data=region.part("hidden", rows, H, self._dtype))
        if self._format == Format.FP8:
            return Hidden(
                data=region.part("hidden", rows, H, fp8.DTYPE),
                format=Format.FP8,
                scale=region.part("scales", rows, H // fp8.BLOCK, torch.float32),
            )
        return Hidden(
            data=region.part("hidden", rows, H // 2, torch.uint8),
            format=Format.NVFP4,
            scale=region.part("scales", rows, H // nvfp4.GROUP, fp8.DTYPE),
            global_scale=self._input_scale,
        )
