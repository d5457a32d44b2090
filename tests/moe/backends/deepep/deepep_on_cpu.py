"""DeepEP between CPU ranks: `deep_ep.Buffer` by what its documentation says of each argument and result.

The library is a compiled extension that needs GPUs to be imported; names, order and defaults of parameters
are those of its 1.2, and for NVFP4 those of sgl-deep-ep 0.1.2, whose tests say how it lays out what arrives:
codes [C, H/2, E] and scales [32, 4, C/128, 4, H/64, E], by which 1 / x_global_scale is multiplied. Rows
are sent as pickled objects. Rows of experts beyond the counts hold NaN.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor

from turnout.formats import nvfp4

BLOCK = 128


@contextmanager
def installed() -> Iterator[None]:
    library = ModuleType("deep_ep")
    library.Buffer, library.topk_idx_t = Buffer, torch.int64
    sys.modules["deep_ep"] = library
    try:
        yield
    finally:
        del sys.modules["deep_ep"]


@dataclass
class Config:
    received: int  # slots of a queue

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        channels = 10
        slots = channels * num_ranks * self.received
        size = channels * num_ranks * 5 * 4 + slots * (hidden_bytes + 8 + 128 * 8 + 128 * 4 + 128 * 4)
        return (size + 127) // 128 * 128


class Buffer:
    def __init__(
        self,
        group: dist.ProcessGroup,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        use_fabric: bool = False,
        explicitly_destroy: bool = False,
    ) -> None:
        self.rank, self.ranks = group.rank(), group.size()
        self.nvl, self.rdma, self.low_latency, self.qps = (
            num_nvl_bytes,
            num_rdma_bytes,
            low_latency_mode,
            num_qps_per_rank,
        )

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        return {2: Config(256), 4: Config(256), 8: Config(256)}[num_ranks]

    get_combine_config = get_dispatch_config

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        scales, tokens = hidden // BLOCK, num_max_dispatch_tokens_per_rank
        message = 16 + max(hidden * 2, hidden + scales * 4)
        result = scales * 4 + hidden * 2
        send = max(tokens * message, num_experts * tokens * result)
        receive = max(num_experts * tokens * message, num_experts * tokens * result)
        signals = (num_experts * 4 + 127) // 128 * 128
        return (2 * send + 2 * receive + 2 * signals + 128) // 128 * 128

    def get_dispatch_layout(
        self, topk_idx: Tensor, num_experts: int, previous_event=None, async_finish=False,
        allocate_on_comm_stream=False,
    ):  # fmt: skip
        assert topk_idx.dtype == torch.int64
        assert topk_idx.is_contiguous()
        held = num_experts // self.ranks
        ranks = torch.where(topk_idx >= 0, topk_idx // held, -1)
        goes = (ranks[..., None] == torch.arange(self.ranks)).any(1)
        per_expert = torch.bincount(topk_idx[topk_idx >= 0], minlength=num_experts).int()
        return goes.sum(0).int(), None, per_expert, goes, object()

    def dispatch(
        self, x, handle=None, num_tokens_per_rank=None, num_tokens_per_rdma_rank=None, is_token_in_rank=None,
        num_tokens_per_expert=None, topk_idx=None, topk_weights=None, expert_alignment=1, num_worst_tokens=0,
        config=None, previous_event=None, async_finish=False, allocate_on_comm_stream=False,
    ):  # fmt: skip
        assert self.nvl, "made without queues"
        data, scales = x if isinstance(x, tuple) else (x, None)
        assert data.dtype == (torch.bfloat16 if scales is None else torch.float8_e4m3fn)
        assert data.is_contiguous()
        assert data.shape[1] * data.itemsize % 32 == 0
        assert data.shape[1] * data.itemsize * 10 * self.ranks * 256 <= self.nvl
        if scales is not None:
            assert scales.shape == (len(data), data.shape[1] // BLOCK)
            assert scales.dtype == torch.float32
            assert scales.is_contiguous()
        assert topk_weights.dtype == torch.float32
        assert num_tokens_per_rank.dtype == num_tokens_per_expert.dtype == torch.int32
        held = len(num_tokens_per_expert) // self.ranks
        letters = []
        for rank in range(self.ranks):
            rows = is_token_in_rank[:, rank]
            ids = topk_idx[rows] - rank * held
            ids = ids.masked_fill((topk_idx[rows] < 0) | (ids < 0) | (ids >= held), -1)
            letters.append(
                (_bytes(data[rows]), None if scales is None else scales[rows], ids, topk_weights[rows])
            )
        got = [letter for letter, _ in _exchange(letters)]
        received = torch.cat([part[0] for part in got]).view(data.dtype)
        ids, weights = (torch.cat([part[i] for part in got]) for i in (2, 3))
        counts = torch.bincount(ids[ids >= 0], minlength=held).tolist()
        out = received if scales is None else (received, torch.cat([part[1] for part in got]))
        weights = weights.masked_fill(ids < 0, torch.nan)  # of experts held elsewhere: nothing is promised
        return out, ids, weights, counts, ([len(part[0]) for part in got], is_token_in_rank), object()

    def combine(
        self, x, handle, topk_weights=None, bias=None, config=None, previous_event=None, async_finish=False,
        allocate_on_comm_stream=False,
    ):  # fmt: skip
        counts, goes = handle
        assert x.dtype == torch.bfloat16
        assert x.is_contiguous()
        assert len(x) == sum(counts)
        out = torch.zeros(len(goes), x.shape[1])
        for rank, (rows, _) in enumerate(_exchange(list(x.split(counts)))):
            out[goes[:, rank]] += rows.float()
        return out.to(torch.bfloat16), None, object()

    def low_latency_dispatch(
        self, x, topk_idx, num_max_dispatch_tokens_per_rank, num_experts,
        cumulative_local_expert_recv_stats=None, dispatch_wait_recv_cost_stats=None, x_global_scale=None,
        use_fp8=True, round_scale=False, use_ue8m0=False, use_nvfp4=False, async_finish=False,
        return_recv_hook=False,
    ):  # fmt: skip
        most = num_max_dispatch_tokens_per_rank
        assert self.low_latency
        assert self.rdma >= self.get_low_latency_rdma_size_hint(most, x.shape[1], self.ranks, num_experts)
        assert self.qps == num_experts // self.ranks
        assert x.dtype == torch.bfloat16
        assert x.is_contiguous()
        assert len(x) <= most <= 1024
        assert not (use_fp8 and use_nvfp4)
        assert (x_global_scale is not None) == use_nvfp4
        assert topk_idx.dtype == torch.int64
        assert topk_idx.is_contiguous()
        held = num_experts // self.ranks
        batched = torch.full((held, most * self.ranks, x.shape[1]), torch.nan, dtype=torch.bfloat16)
        counts = torch.zeros(held, dtype=torch.int32)
        origin = []  # of all rows: expert, row, source, token, slot
        for source, (letter, _) in enumerate(_exchange([(x, topk_idx)] * self.ranks)):
            rows, ids = letter
            token, slot = (ids // held == self.rank).logical_and(ids >= 0).nonzero(as_tuple=True)
            expert = ids[token, slot] - self.rank * held
            same = expert[:, None] == torch.arange(held)
            row = counts[expert] + same.cumsum(0)[torch.arange(len(token)), expert] - 1
            batched[expert, row] = rows[token]
            counts += same.sum(0).int()
            origin.append(torch.stack((expert, row, torch.full_like(token, source), token, slot)))
        handle = (torch.cat(origin, dim=1), most, x.shape[1], num_experts)
        if use_nvfp4:
            assert (x_global_scale.dtype, x_global_scale.ndim) == (torch.float32, 0)
            return _nvfp4(batched, counts, x_global_scale), counts, handle, object(), None
        return (_fp8(batched) if use_fp8 else batched), counts, handle, object(), None

    def low_latency_combine(
        self, x, topk_idx, topk_weights, handle, use_logfmt=False, zero_copy=False, async_finish=False,
        return_recv_hook=False, out=None, combine_wait_recv_cost_stats=None,
    ):  # fmt: skip
        origin, most, hidden, num_experts = handle
        assert x.dtype == torch.bfloat16
        assert x.is_contiguous()
        assert x.shape == (num_experts // self.ranks, most * self.ranks, hidden)
        assert topk_weights.dtype == torch.float32
        assert topk_weights.shape == topk_idx.shape
        expert, row, source, token, slot = origin
        letters = [
            (token[source == rank], slot[source == rank], x[expert[source == rank], row[source == rank]])
            for rank in range(self.ranks)
        ]
        total = torch.zeros(len(topk_idx), hidden)
        for (token, slot, rows), _ in _exchange(letters):
            total.index_add_(0, token, topk_weights[token, slot, None] * rows.float())
        return total.to(torch.bfloat16), object(), None


def _fp8(batched: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 and float32 scales per 128 columns, which lie column by column."""
    blocks = batched.float().unflatten(-1, (-1, BLOCK))
    scales = blocks.abs().amax(-1).clamp(min=1e-4) / 448
    data = (blocks / scales[..., None]).flatten(-2).to(torch.float8_e4m3fn)
    return data, scales.transpose(1, 2).contiguous().transpose(1, 2)


def _nvfp4(batched: Tensor, counts: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and e4m3 scales, each scale where the hardware reads it; garbage beyond counts."""
    E, C, H = batched.shape
    assert C % 128 == 0
    used = torch.arange(C) < counts[:, None]
    codes, scales = nvfp4.quantize_activation(batched.nan_to_num(), 1 / scale)
    codes = torch.where(used[..., None], codes, 0x77)
    scales = torch.where(used[..., None], scales.view(torch.uint8), 0x7F)
    tiles = torch.zeros(E, C // 128, H // 64, 32, 4, 4, dtype=torch.uint8)
    r, g = torch.arange(C)[:, None], torch.arange(H // 16)[None]
    tiles[:, r // 128, g // 4, r % 32, r % 128 // 32, g % 4] = scales
    return codes.permute(1, 2, 0), tiles.view(torch.float8_e4m3fn).permute(3, 4, 1, 5, 2, 0)


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def _exchange(letters: list) -> list[tuple]:
    """letters[i] to rank i; what every rank sent here, with its number."""
    everyones: list = [None] * len(letters)
    dist.all_gather_object(everyones, letters)
    own = dist.get_rank()
    return [(sent[own], rank) for rank, sent in enumerate(everyones)]
