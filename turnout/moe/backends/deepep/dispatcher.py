"""DeepEP's all-to-all: normal kernels for throughput, low-latency kernels for small steps.

Normal: a token goes once to every rank that holds an expert of it, through queues over NVLink; the host waits
for how many arrive. Low-latency: every expert has a place for each token that any rank may send;
nothing waits, so it can be captured in a CUDA graph, and the weights are applied where the token came from.
One `deep_ep.Buffer` per process serves all layers, both kinds included.

What the library asks for, and how it is met:

* Expert ids are `topk_idx_t` (int64), with -1 for padding, as here. Those that arrive count from the rank's
  first expert.
* The normal kernels move rows of bfloat16, or FP8 with a float32 scale per 128 columns. They do not look into
  rows: NVFP4 is sent as rows of bytes, padded to 32, that are called bfloat16.
* The low-latency kernels take bfloat16 and quantise themselves: to FP8 by the same rule as `formats.fp8`, or,
  those of sgl-deep-ep, to NVFP4 by the scale that all experts share. Block scales arrive in the tiles of
  Blackwell's tensor cores, and are laid out in rows here. Options of a format are passed for it only.
* Both combine in bfloat16.

Legend: T tokens of this rank, H hidden, k top-k, N rows received, E experts held here, C rows per expert:
those that all ranks may send."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from turnout.errors import UserError
from turnout.formats import fp8, layouts, nvfp4
from turnout.moe.backends.deepep.declaration import LOW_LATENCY, NORMAL
from turnout.moe.batch import ExpertsBatch, Hidden, TokensBatch
from turnout.moe.interface import DispatchSetup
from turnout.moe.plan import PHASES, MoEPlan
from turnout.moe.spec import MoESpec
from turnout.moe.wire_format import Wire
from turnout.parallel.groups import Group
from turnout.vocabulary import Format

ROW = 32  # bytes of which a row of the normal kernels is a multiple: two halves in 16-byte words

_BUFFERS: WeakKeyDictionary[Group, dict[Needs, Any]] = WeakKeyDictionary()


class NormalDispatch:
    """A `Dispatcher` (moe/interface.py) for throughput: a token goes once to each rank that needs it; the
    host waits."""

    capability = NORMAL

    def __init__(self, setup: DispatchSetup) -> None:
        spec, plan = setup.spec, setup.plan
        self._wire = Wire(setup)
        self._first, self._experts = plan.first_expert, spec.num_experts
        self._world = setup.groups.world
        self._buffer, self._index_dtype = _buffer(spec, plan, self._world)

    def dispatch(
        self, x_TH: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor, tokens: Sequence[int]
    ) -> tuple[TokensBatch, Any]:
        self._world.calls += 1
        hidden = self._wire.encode(x_TH)
        ids_TK = topk_ids_TK.to(self._index_dtype)
        per_rank, per_host, per_expert, goes_TR, _ = self._buffer.get_dispatch_layout(ids_TK, self._experts)
        got, ids_NK, weights_NK, _, handle, _ = self._buffer.dispatch(
            _rows(hidden),
            topk_idx=ids_TK,
            topk_weights=topk_weights_TK.contiguous(),
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_host,
            is_token_in_rank=goes_TR,
            num_tokens_per_expert=per_expert,
        )
        elsewhere_NK = ids_NK < 0
        batch = TokensBatch(
            hidden=_hidden(got, hidden),
            topk_ids=ids_NK.add(self._first).masked_fill_(elsewhere_NK, -1).int(),
            topk_weights=weights_NK.masked_fill(elsewhere_NK, 0),
        )
        return batch, handle

    def combine(self, out_NH: Tensor, state: Any) -> Tensor:
        self._world.calls += 1
        out_TH, _, _ = self._buffer.combine(out_NH.contiguous(), state)
        return out_TH


class LowLatencyDispatch:
    """A `Dispatcher` (moe/interface.py) for small steps: rows by expert, without a wait of the host."""

    capability = LOW_LATENCY

    def __init__(self, setup: DispatchSetup) -> None:
        spec, plan, world = setup.spec, setup.plan, setup.groups.world
        self._format, self._input_scale = setup.wire_format, setup.input_scale
        self._most, self._experts = _needs(spec, plan, world.size).step, spec.num_experts
        self._world = world
        self._buffer, self._index_dtype = _buffer(spec, plan, world)

    def dispatch(
        self, x_TH: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor, tokens: Sequence[int]
    ) -> tuple[ExpertsBatch, Any]:
        self._world.calls += 1
        ids_TK = topk_ids_TK.to(self._index_dtype)
        got, counts_E, handle, _, _ = self._buffer.low_latency_dispatch(
            x_TH.contiguous(), ids_TK, self._most, self._experts, **self._options()
        )
        hidden = self._hidden(got)
        return ExpertsBatch(hidden=hidden, counts=counts_E), (ids_TK, topk_weights_TK.contiguous(), handle)

    def combine(self, out_ECH: Tensor, state: Any) -> Tensor:
        self._world.calls += 1
        ids_TK, weights_TK, handle = state
        out_TH, _, _ = self._buffer.low_latency_combine(out_ECH.contiguous(), ids_TK, weights_TK, handle)
        return out_TH

    def _options(self) -> dict[str, Any]:
        if self._format == Format.FP8:
            return {"use_fp8": True, "round_scale": False, "use_ue8m0": False}
        if self._format == Format.NVFP4:
            assert self._input_scale is not None, "planned for calibrated checkpoints only"
            return {
                "use_fp8": False,
                "use_nvfp4": True,
                "x_global_scale": self._input_scale.reciprocal().view(()),
            }
        return {"use_fp8": False}

    def _hidden(self, got: Tensor | tuple[Tensor, Tensor]) -> Hidden:
        """nvfp4: codes [C, H/2, E] over storage [E, C, H/2], scales as in `layouts.mma_view`."""
        if not isinstance(got, tuple):
            return Hidden(data=got)
        data, scale = got
        if self._format == Format.FP8:
            return Hidden(data=data, format=Format.FP8, scale=scale)
        data_ECH = data.permute(2, 0, 1)
        C, groups = data_ECH.shape[1], 2 * data_ECH.shape[2] // nvfp4.GROUP
        rows = layouts.unswizzle(layouts.from_mma_view(scale.view(torch.uint8)), C, groups)
        return Hidden(
            data=data_ECH, format=Format.NVFP4, scale=rows.view(fp8.DTYPE), global_scale=self._input_scale
        )


def _rows(hidden: Hidden) -> Tensor | tuple[Tensor, Tensor]:
    """As the normal kernels take them."""
    if hidden.format == Format.NVFP4:
        assert hidden.scale is not None, "nvfp4 hidden states carry scales"
        row = torch.cat((hidden.data, hidden.scale.view(torch.uint8)), dim=1)
        return F.pad(row, (0, -row.shape[1] % ROW)).view(torch.bfloat16)
    if hidden.scale is not None:
        return hidden.data, hidden.scale.contiguous()
    return hidden.data.contiguous()


def _hidden(got: Tensor | tuple[Tensor, Tensor], sent: Hidden) -> Hidden:
    """What arrived, in the format of `sent`."""
    if isinstance(got, tuple):
        return Hidden(data=got[0], format=sent.format, scale=got[1])
    if sent.format == Format.BF16 or sent.scale is None:
        return Hidden(data=got)
    packed, scales = sent.data.shape[1], sent.scale.shape[1]
    rows = got.view(torch.uint8)
    return Hidden(
        data=rows[:, :packed],
        format=sent.format,
        scale=rows[:, packed : packed + scales].view(fp8.DTYPE),
        global_scale=sent.global_scale,
    )


@dataclass(frozen=True)
class Needs:
    """What one buffer has to serve: `step` tokens a rank with low-latency kernels, if any; a row's bytes."""

    normal: bool
    step: int
    hidden: int
    experts: int

    @property
    def row(self) -> int:
        return 2 * self.hidden


def _needs(spec: MoESpec, plan: MoEPlan, ranks: int) -> Needs:
    used = {plan.phase(name).dispatcher for name in PHASES}
    steps = [p.max_tokens // ranks for p in map(plan.phase, PHASES) if p.dispatcher == LOW_LATENCY.name]
    return Needs(NORMAL.name in used, max(steps, default=0), spec.hidden_size, spec.num_experts)


def _buffer(spec: MoESpec, plan: MoEPlan, world: Group) -> tuple[Any, torch.dtype]:
    """The buffer of these ranks for such a plan, which they make together; the dtype of expert ids."""
    library, needs = _library(), _needs(spec, plan, world.size)
    kept = _BUFFERS.setdefault(world, {})
    if needs not in kept:
        kept[needs] = _made(library.Buffer, needs, world.size)
    return kept[needs], getattr(library, "topk_idx_t", torch.int64)


def _made(kind: Any, needs: Needs, ranks: int) -> Any:
    queues = low_latency = 0
    if needs.normal:
        configs = kind.get_dispatch_config(ranks), kind.get_combine_config(ranks)
        queues = max(config.get_nvl_buffer_size_hint(needs.row, ranks) for config in configs)
    if needs.step:
        low_latency = kind.get_low_latency_rdma_size_hint(needs.step, needs.hidden, ranks, needs.experts)
    return kind(
        dist.group.WORLD,
        num_nvl_bytes=queues,
        num_rdma_bytes=low_latency,
        low_latency_mode=needs.step > 0,
        num_qps_per_rank=needs.experts // ranks,
    )


def _library() -> Any:
    try:
        import deep_ep
    except (ImportError, AssertionError, OSError) as error:  # it asserts which NCCL it finds
        raise UserError(
            f"DeepEP cannot be imported: {error}. Repair it, or choose another --moe-a2a-backend"
        ) from error
    return deep_ep
