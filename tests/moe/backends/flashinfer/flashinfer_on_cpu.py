"""FlashInfer's one-sided all-to-all between CPU ranks: the library's own Python over kernels in plain torch.

What is put in place is what needs a GPU: the compiled module, by what its source documents, and the memory
that ranks map, by a file. All that the library's Python does with arguments and workspace stays its own. Rows
that no rank sent hold NaN, and ids of experts. Writes are announced by a barrier where the kernels use flags.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor

MAX_TOP_K, COUNTERS, PAYLOAD = 22, 3, 9  # kMaxTopK; places in the metainfo


_kept: dict[str, ModuleType] = {}  # ours, between uses


@contextmanager
def installed() -> Iterator[None]:
    """The library with the substitutes in it, imported again without the parts that take seconds."""
    others = {name: sys.modules.pop(name) for name in list(sys.modules) if _ours(name)}
    sys.modules.update(_kept)
    try:
        if not _kept:
            _substitute()
        yield
    finally:
        _kept.update({name: sys.modules.pop(name) for name in list(sys.modules) if _ours(name)})
        sys.modules.update(others)


def _ours(name: str) -> bool:
    return name.partition(".")[0] == "flashinfer"


def _substitute() -> None:
    folder = Path(find_spec("flashinfer").origin).parent
    for name, path in (("flashinfer", folder), ("flashinfer.comm", folder / "comm")):
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = [str(path)]
    library = import_module("flashinfer.comm.trtllm_moe_alltoall")
    kernels = Kernels()
    library.get_moe_alltoall_module = lambda backend="trtllm": kernels.module
    library.device_support_pdl = lambda device: False
    import_module("flashinfer.comm.mnnvl").MnnvlMemory = SharedFile


class SharedFile:
    """In the place of `MnnvlMemory`: one file that all ranks map."""

    comm = None

    @staticmethod
    def initialize() -> None:
        pass

    @classmethod
    def set_comm_from_config(cls, mapping, config) -> None:
        cls.comm = config.comm_backend

    def __init__(self, mapping, size: int) -> None:
        assert (mapping.moe_ep_rank, mapping.moe_ep_size) == (dist.get_rank(), dist.get_world_size())
        self.size, self.ranks = size, mapping.moe_ep_size
        path = tempfile.mkstemp(prefix="turnout-one-sided-")[1] if mapping.rank == 0 else None
        path = self.comm.bcast(path, 0)
        assert set(self.comm.allgather(size)) == {size}
        self.bytes = torch.from_file(path, shared=True, size=size * self.ranks, dtype=torch.uint8)
        self.comm.barrier()
        if mapping.rank == 0:
            Path(path).unlink()

    def as_torch_strided_tensor(self, dtype: torch.dtype) -> Tensor:
        return self.bytes.view(dtype).view(self.ranks, self.size)


def offsets(ranks: int, tokens: int) -> list[int]:
    """The ten places of the metainfo, walked as the library walks them."""
    places, at = [], 0
    for size, aligned in (
        (4, False), (4, False), (4 * ranks, False), (4 * ranks, True), (4 * ranks, True), (4 * ranks, True),
        (4 * MAX_TOP_K * tokens, True), (4 * MAX_TOP_K * tokens, True), (0, True),
    ):  # fmt: skip
        places.append(at)
        at += size
        if aligned:
            at = (at + 127) // 128 * 128
    return [*places, at]


class Kernels:
    """One rank's kernels, and what they remember between a dispatch and its combine."""

    def __init__(self) -> None:
        self.module = SimpleNamespace(
            moe_a2a_initialize=self.initialize,
            moe_a2a_get_aux_data_size=lambda ranks, tokens, stats: offsets(ranks, tokens)[PAYLOAD],
            moe_a2a_dispatch=self.dispatch,
            moe_a2a_combine=self.combine,
            moe_a2a_sanitize_expert_ids=self.sanitize,
        )
        self.sent: list[list[tuple[int, int]]] = []  # by token: rank and row there
        self.dispatched_up_to = 0

    def initialize(self, workspace, rank, ranks, tokens, stats) -> Tensor:
        assert workspace.dtype == torch.uint8
        assert workspace.shape[0] == ranks
        workspace[rank], self.dispatched_up_to = 0, 0
        return torch.tensor(offsets(ranks, tokens))

    def dispatch(
        self, routes, payloads, workspace, metainfo, rows, rank, ranks, top_k, experts, pdl, stats, masks,
        mask,
    ):  # fmt: skip
        assert routes.dtype == torch.int32
        assert routes.is_contiguous()
        assert routes.shape[1] == top_k <= MAX_TOP_K
        assert 0 < len(payloads) <= 6
        assert len(routes) <= rows
        assert rows > 0
        assert ((routes >= 0) & (routes < experts)).all(), (
            "the kernel would write to a rank that is not there"
        )
        places, at = [], int(metainfo[PAYLOAD])
        for payload in payloads:
            assert payload.is_contiguous()
            assert payload.dim() == 2
            assert len(payload) == len(routes)
            places.append(at)
            at += ranks * rows * payload.shape[1] * payload.itemsize
            assert (at - metainfo[PAYLOAD]) % payload.itemsize == 0
        assert at <= workspace.shape[1]
        self.dispatched_up_to = max(self.dispatched_up_to, at)
        workspace[rank, places[0] : at] = 0xFF
        for payload, place in zip(payloads, places, strict=True):
            if payload.dtype == torch.int32:  # leftovers may be any expert's
                workspace[rank, place:][: ranks * rows * payload.shape[1] * 4] = 0
        dist.barrier()
        counts = [0] * ranks
        self.sent = []
        for token, chosen in enumerate(routes.tolist()):
            targets = []
            for to in dict.fromkeys(expert * ranks // experts for expert in chosen):
                row = rank * rows + counts[to]
                counts[to] += 1
                targets.append((to, row))
                for payload, place in zip(payloads, places, strict=True):
                    line = payload[token].view(torch.uint8)
                    workspace[to, place + row * len(line) :][: len(line)] = line
            self.sent.append(targets)
        for to, count in enumerate(counts):
            self._counter(workspace, metainfo, to, rank).fill_(count)
        dist.barrier()
        base = rank * workspace.stride(0)
        sizes = [ranks * rows * p.shape[1] * p.itemsize for p in payloads]
        return [base + place for place in places], sizes, (at + 127) // 128 * 128, -1, 0

    def sanitize(self, ids, workspace, metainfo, rank, invalid, pdl) -> None:
        assert ids.dtype == torch.int32
        for source, rows in enumerate(ids):
            rows[int(self._counter(workspace, metainfo, rank, source)) :] = invalid

    def combine(
        self, payload, tokens, workspace, metainfo, rows, rank, ranks, top_k, place, in_place, dtype, scales,
        scale, layout, low, pdl, masks, mask,
    ) -> Tensor:  # fmt: skip
        assert payload.is_contiguous()
        assert payload.shape[:2] == (ranks, rows)
        assert (in_place, dtype, scales, low) == (False, None, None, False)
        assert tokens == len(self.sent)
        assert place + payload.nbytes <= workspace.shape[1]
        # A peer that has read all it needs may dispatch again while others still read here.
        assert place >= self.dispatched_up_to, "results lie where the next tokens may arrive"
        size = payload.shape[2] * payload.itemsize
        for source in range(ranks):
            used = int(self._counter(workspace, metainfo, rank, source))
            results = payload[source, :used].reshape(-1).view(torch.uint8)
            workspace[rank, place + source * rows * size :][: len(results)] = results
        dist.barrier()
        out = torch.zeros(tokens, payload.shape[2])
        for token, targets in enumerate(self.sent):
            for to, row in targets:
                out[token] += workspace[to, place + row * size :][:size].view(payload.dtype).float()
        return out.to(payload.dtype)

    def _counter(self, workspace, metainfo, of: int, source: int) -> Tensor:
        at = int(metainfo[COUNTERS]) + 4 * source
        return workspace[of, at : at + 4].view(torch.int32)
