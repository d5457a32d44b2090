"""All-to-all-v: every token to the ranks that hold an expert it chose, and the results back.

A token goes once to a rank, however many of its experts are there, and to all ranks that share them
(expert TP), each of which computes its shard's part. Ranks that share tokens (attention TP) send an even
share each. Results come back as one row per token and rank, and are summed in the order of ranks, in
float32: the same bits every time.

Counts are sent ahead, since torch.distributed needs sizes on the host. What does not depend on them is queued
before the wait for them, so that a GPU packs while the host waits.

Legend: T tokens of this rank's share, k top-k, H hidden, W words of a row, R ranks, S rows sent: one per
token and rank wanted, rank by rank; N rows received.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from turnout.moe.backends.collective.results import Results
from turnout.moe.interface import DispatchSetup
from turnout.moe.wire_format import Wire
from turnout.packages import runs_triton
from turnout.parallel.groups import own_share
from turnout.parallel.transfers import HostCopy


@dataclass(frozen=True)
class Receipt:
    """What is needed to bring the results of one exchange home.

    send, receive: rows by rank. order_S: the rows sent, token by token; bags_T1: where each token's begin.
    shares: tokens of each rank that shares them.
    """

    send: Sequence[int]
    receive: Sequence[int]
    order_S: Tensor
    bags_T1: Tensor
    shares: Sequence[int]


class AllToAllVExchange:
    """An `exchange.Exchange` that sends only what is needed."""

    def __init__(self, setup: DispatchSetup) -> None:
        groups, device = setup.groups, setup.device
        self.wire, self._results = Wire(setup), Results(setup)
        self._groups = groups
        self._dtype = setup.dtype
        self._fused = runs_triton(device)
        self._experts_per_slice = setup.plan.num_local_experts
        slice_of_rank = [rank // groups.topology.expert_tp for rank in range(groups.world.size)]
        self._slice_R = torch.tensor(slice_of_rank, dtype=torch.int32, device=device)
        # A token is wanted by no more ranks than hold its k experts.
        self._most = min(setup.spec.top_k, groups.topology.ep_size) * groups.topology.expert_tp

    def send(
        self, x_TH: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor, tokens: Sequence[int]
    ) -> tuple[Tensor, Receipt]:
        """The tokens sent to this rank, packed rows [N, W], and the receipt for their results.

        How many others bring, `tokens`, does not say how many of them are sent here.
        """
        share, mine = own_share(len(x_TH), self._groups.attention_tp)
        wanted_RT = self._wanted(topk_ids_TK[mine])
        world = self._groups.world
        sent_R = wanted_RT.sum(1)
        one_each = [1] * world.size
        counts = HostCopy(torch.stack((sent_R, world.all_to_all(sent_R, one_each, one_each))))

        most = self._most * wanted_RT.shape[1]
        token_S = torch.nonzero_static(wanted_RT, size=most, fill_value=0)[:, 1]
        rows_SW = self.wire.pack_some(x_TH[mine], topk_ids_TK[mine], topk_weights_TK[mine], token_S)
        order_S = _by_token(wanted_RT, most)
        bags_T1 = F.pad(wanted_RT.sum(0).cumsum(0), (1, 0))

        send, receive = counts.tolist()
        total = sum(send)
        received_NW = world.all_to_all(rows_SW[:total], send, receive)
        receipt = Receipt(send, receive, order_S[:total], bags_T1, share)
        return received_NW, receipt

    def bring_back(self, out_NH: Tensor, receipt: Receipt) -> Tensor:
        rows_S = self._groups.world.all_to_all(self._results.encode(out_NH), receipt.receive, receipt.send)
        own_TH = self._sum(self._results.decode(rows_S), receipt)
        return self._groups.attention_tp.all_gather(own_TH.to(self._dtype), receipt.shares)

    def _sum(self, back_SH: Tensor, receipt: Receipt) -> Tensor:
        if self._fused:
            from turnout.kernels.common.pack import sum_rows

            return sum_rows(back_SH, receipt.order_S, receipt.bags_T1)
        return F.embedding_bag(
            receipt.order_S, back_SH.float(), receipt.bags_T1, mode="sum", include_last_offset=True
        )

    def _wanted(self, topk_ids_TK: Tensor) -> Tensor:
        """bool [R, T]: whether rank r holds (a shard of) an expert that token t chose."""
        slice_TK = topk_ids_TK.div(self._experts_per_slice, rounding_mode="floor")  # padding, -1, stays so
        return (slice_TK == self._slice_R[:, None, None]).any(-1)


def _by_token(wanted_RT: Tensor, most: int) -> Tensor:
    """int64 [most]: places of the rows sent, which are in the order of `wanted_RT`, token by token."""
    R, T = wanted_RT.shape
    place_RT = wanted_RT.flatten().cumsum(0).view(R, T) - 1
    token_P, rank_P = torch.nonzero_static(wanted_RT.t(), size=most, fill_value=0).unbind(1)
    return place_RT[rank_P, token_P]
