"""FlashInfer's one-sided all-to-all over NVLink: ranks write tokens straight into each other's memory.

Every rank has a workspace of a fixed size that its peers can write to and read from. `dispatch` puts each of
its tokens once into the workspace of every rank that holds an expert of it, at a place of its own per sender;
`combine` reads a token's partial results from those ranks and sums them in float32. The host waits for
nothing, so both can be captured in a CUDA graph.

What the library asks for, and how it is met:

* All ranks name the same number of rows per sender for a batch: that of the largest rank, at least one. Rows
  that a sender leaves unused carry garbage, and get expert ids -1.
* Experts of routes exist. Padding, -1, is routed to an expert of the sender's own, and costs no wire; the ids
  that are sent say -1 still.
* Results are kept behind the largest dispatch, not behind this batch's, where the library would put them: a
  rank that is done with one batch may write the next, larger one while its peers still read results.
* One workspace serves all layers and phases, one batch at a time: `combine` follows its `dispatch`.

Legend: T tokens of this rank, H hidden, k top-k, n ranks, R rows per sender, N = n R.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from turnout.formats.spec import ITEMSIZE, token_bytes
from turnout.moe.backends.flashinfer.buffers import WorkspaceSizes
from turnout.moe.backends.flashinfer.declaration import ALL_TO_ALL
from turnout.moe.batch import Hidden, TokensBatch
from turnout.moe.interface import DispatchSetup
from turnout.moe.plan import PHASES, MoEPlan
from turnout.moe.spec import MoESpec
from turnout.moe.wire_format import Wire
from turnout.parallel.groups import Group

_WORKSPACES: WeakKeyDictionary[Group, dict[WorkspaceSizes, Workspace]] = WeakKeyDictionary()


class FlashInferDispatch:
    """A `Dispatcher` (moe/interface.py): tokens written over NVLink into the memory of the ranks of one
    host."""

    capability = ALL_TO_ALL

    def __init__(self, setup: DispatchSetup) -> None:
        spec, plan, world = setup.spec, setup.plan, setup.groups.world
        self._wire = Wire(setup)
        self._own_expert, self._experts, self._top_k = plan.first_expert, spec.num_experts, spec.top_k
        kept = _WORKSPACES.setdefault(world, {})
        sizes = _sizes(spec, plan, world.size)
        if sizes not in kept:
            kept[sizes] = Workspace(sizes, world)
        self._workspace = kept[sizes]

    def dispatch(
        self, x_TH: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor, tokens: Sequence[int]
    ) -> tuple[TokensBatch, tuple[int, int]]:
        hidden = self._wire.encode(x_TH)
        scales = [] if hidden.scale is None else [hidden.scale]
        parts = [hidden.data, *scales, topk_ids_TK, topk_weights_TK]
        R = max(1, *tokens)
        routes_TK = topk_ids_TK.where(topk_ids_TK >= 0, self._own_expert)
        data, *scale, ids_NK, weights_NK = self._workspace.send(routes_TK, parts, R, self._experts)
        batch = TokensBatch(
            hidden=Hidden(
                data=data,
                format=hidden.format,
                scale=scale[0] if scale else None,
                global_scale=hidden.global_scale,
            ),
            topk_ids=ids_NK,
            topk_weights=weights_NK,
        )
        return batch, (len(x_TH), R)

    def combine(self, out_NH: Tensor, state: tuple[int, int]) -> Tensor:
        T, R = state
        return self._workspace.bring_back(out_NH.contiguous(), T, R, self._top_k)


def _sizes(spec: MoESpec, plan: MoEPlan, ranks: int) -> WorkspaceSizes:
    """Those of one workspace for the phases that use it."""
    phases = [plan.phase(name) for name in PHASES]
    mine = [phase for phase in phases if phase.dispatcher == FlashInferDispatch.capability.name]
    itemsize = ITEMSIZE[plan.compute_dtype]
    return WorkspaceSizes(
        ranks=ranks,
        capacity=max(phase.max_tokens for phase in mine) // ranks,
        sent=max(token_bytes(p.wire_format, spec.hidden_size, itemsize=itemsize) for p in mine)
        + 8 * spec.top_k,
        returned=itemsize * spec.hidden_size,
    )


class Workspace:
    """Memory of all ranks that each of them has mapped; made together, by every rank of a group of all."""

    def __init__(self, sizes: WorkspaceSizes, world: Group) -> None:
        from flashinfer.comm.comm_backend import TorchDistBackend
        from flashinfer.comm.mapping import Mapping
        from flashinfer.comm.mnnvl import MnnvlConfig, MnnvlMemory
        from flashinfer.comm.trtllm_moe_alltoall import moe_a2a_initialize

        n = sizes.ranks
        mapping = Mapping(world_size=n, rank=world.rank, tp_size=n, moe_ep_size=n)
        MnnvlMemory.initialize()
        MnnvlMemory.set_comm_from_config(mapping, MnnvlConfig(comm_backend=TorchDistBackend()))
        self._sizes, self._world = sizes, world
        self._owner = MnnvlMemory(mapping, sizes.total_bytes)
        self._shared = self._owner.as_torch_strided_tensor(torch.uint8)
        self._places = moe_a2a_initialize(self._shared, world.rank, n, sizes.capacity)
        world.all_reduce(torch.zeros(1, device=self._shared.device))  # no rank writes before all are cleared

    def send(self, routes_TK: Tensor, parts: Sequence[Tensor], R: int, experts: int) -> list[Tensor]:
        """Rows of `parts` to the ranks of experts `routes`; the N rows of each part that this rank got.

        The last part but one are int32 ids [T, k], -1 in rows that no rank sent. Views of the workspace.
        """
        from flashinfer.comm.trtllm_moe_alltoall import moe_a2a_dispatch, moe_a2a_sanitize_expert_ids

        self._world.calls += 1
        raw = [part.contiguous().view(_carried_as(part)) for part in parts]
        got, _, _ = moe_a2a_dispatch(
            routes_TK.contiguous(),
            raw,
            self._shared,
            self._places,
            R,
            self._world.rank,
            self._sizes.ranks,
            routes_TK.shape[1],
            experts,
        )
        moe_a2a_sanitize_expert_ids(got[-2], self._shared, self._places, self._world.rank, -1)
        return [rows.flatten(0, 1).view(part.dtype) for rows, part in zip(got, parts, strict=True)]

    def bring_back(self, out_NH: Tensor, T: int, R: int, top_k: int) -> Tensor:
        """[T, H]: the sum of a token's results over the ranks that it was sent to, in their dtype."""
        from flashinfer.comm.trtllm_moe_alltoall import moe_a2a_combine

        self._world.calls += 1
        return moe_a2a_combine(
            out_NH.unflatten(0, (self._sizes.ranks, R)),
            T,
            self._shared,
            self._places,
            R,
            self._world.rank,
            self._sizes.ranks,
            top_k,
            self._sizes.results_at,
        )


def _carried_as(part: Tensor) -> torch.dtype:
    """FP8 is sent as bytes, which all versions of DLPack know."""
    return torch.uint8 if part.itemsize == 1 else part.dtype
