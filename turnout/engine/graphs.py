"""Decode steps as CUDA graphs: one launch instead of hundreds, for batches padded to a captured size.

Whatever a step brings is copied into tensors of fixed addresses, and the graph of the smallest size that
holds the largest rank's batch is replayed, so all ranks replay the same one. Rows beyond a rank's own are
padding: they have no context, write to a page of their own, and the MoE layers drop them.

Graphs are captured at start-up, largest first, and share one memory pool.

Legend: B rows of a captured batch, P pages of a row of the table, H hidden, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from turnout.engine.attention import PagedAttention
from turnout.engine.scheduler import Chunk
from turnout.models.interface import Model, ProgressFn, Step

FIELDS = 4  # of a row: token id, position, slot to write, context length
WARM_UPS = 2


@dataclass(frozen=True)
class Captured:
    graph: torch.cuda.CUDAGraph
    hidden_BH: Tensor


class DecodeGraphs:
    """Replays decode steps of one model; built after its KV cache, before any request."""

    def __init__(
        self,
        model: Model,
        attention: PagedAttention,
        *,
        max_batch: int,
        dp_size: int = 1,
        progress: ProgressFn | None = None,
    ):
        """Captures a graph per size up to `max_batch`; collective among the ranks of a model."""
        self._model, self._attention, self._dp_size = model, attention, dp_size
        self.sizes = sizes(max_batch)
        device, width = attention.device, attention.pages_per_row
        self._host = torch.zeros(FIELDS, self.sizes[-1], dtype=torch.int64).pin_memory()
        self._rows = torch.zeros(FIELDS, self.sizes[-1], dtype=torch.int64, device=device)
        self._table_BP = torch.zeros(self.sizes[-1], width, dtype=torch.int64, device=device)
        self._processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._graphs: dict[int, Captured] = {}
        pool = torch.cuda.graph_pool_handle()
        for done, size in enumerate(reversed(self.sizes)):
            if progress is not None:
                progress("capturing graphs", done, len(self.sizes))
            self._graphs[size] = self._capture(size, pool)

    def hold(self, tokens: int) -> bool:
        """Whether a batch of `tokens` on the largest rank has a graph."""
        return tokens <= self.sizes[-1]

    def run(self, chunks: Sequence[Chunk], largest: int) -> Tensor:
        """Hidden states [len(chunks), H] of chunks of one token each; `largest`: the most of any rank.

        The result lives until the next run.
        """
        size = next(size for size in self.sizes if size >= largest)
        count = len(chunks)
        ids_B, positions_B, slots_B, ends_B = self._host[:, :size]
        ids_B[:count] = torch.tensor([c.request.tokens[c.start] for c in chunks], dtype=torch.int64)
        starts_B = torch.tensor([c.start for c in chunks], dtype=torch.int64)
        positions_B[:count] = starts_B
        ends_B[:count] = starts_B + 1
        table_BP, slots_B[:count] = self._attention.place_singles(chunks)
        for field in (ids_B, positions_B, ends_B):
            field[count:] = 0
        slots_B[count:] = self._attention.spare_slot
        self._rows.copy_(self._host, non_blocking=True)
        if count:
            self._table_BP[:count, : table_BP.shape[1]] = table_BP.to(self._rows.device)
        captured = self._graphs[size]
        captured.graph.replay()
        return captured.hidden_BH[:count]

    def _capture(self, size: int, pool: Any) -> Captured:
        self._rows.zero_()
        self._rows[2] = self._attention.spare_slot
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):  # compiles kernels, settles their workspaces
                self._forward(size)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            hidden_BH = self._forward(size)
        return Captured(graph, hidden_BH)

    def _forward(self, size: int) -> Tensor:
        ids_B, positions_B, slots_B, ends_B = self._rows[:, :size]
        attention = PaddedAttention(self._attention, slots_B, self._table_BP[:size], ends_B, self._processors)
        return self._model.forward(
            Step(
                input_ids=ids_B,
                positions=positions_B,
                attention=attention,
                phase="decode",
                tokens=(size,) * self._dp_size,
                real=ends_B > 0,
            )
        )


class PaddedAttention:
    """An `interface.Attention` of one token per row, whose rows and lengths are read on the device."""

    def __init__(
        self, paged: PagedAttention, slots_B: Tensor, table_BP: Tensor, ends_B: Tensor, processors: int
    ):
        """slots, table, ends: int64; an end of 0 makes a row padding, which attends to nothing."""
        from turnout.kernels.paged_attention import spans

        self._paged, self._slots_B, self._table_BP, self._ends_B = paged, slots_B, table_BP, ends_B
        longest = paged.pages_per_row * paged.page_size
        self._splits = spans(len(slots_B), paged.cache.shape[1], longest, processors)

    def __call__(self, layer: int, q_NHD: Tensor, k_NHD: Tensor, v_NHD: Tensor) -> Tensor:
        from turnout.kernels.paged_attention import attend

        cache_HS2D = self._paged.cache[layer]
        cache_HS2D.index_copy_(1, self._slots_B, torch.stack((k_NHD, v_NHD), dim=2).transpose(0, 1))
        return attend(
            q_NHD.contiguous(),
            cache_HS2D,
            self._table_BP,
            self._ends_B,
            page_size=self._paged.page_size,
            splits=self._splits,
        )


def sizes(max_batch: int) -> list[int]:
    """1, 2, 4, then every 8 up to 256, then every 32: padding never costs much."""
    chosen = [1, 2, 4, *range(8, min(max_batch, 256) + 1, 8), *range(288, max_batch + 1, 32)]
    return sorted({size for size in chosen if size <= max_batch} | {max_batch})
