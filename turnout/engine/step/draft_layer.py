"""Draft tokens by a checkpoint's own draft layer (multi-token prediction: MTP, also called NEXTN or EAGLE).

Behind its last layer such a model has one more, trained to foretell the token after next: from the final
hidden state of position i and the token at i + 1, the one at i + 2. After a step it computes all tokens of
that step, the token that followed each now being known, so that its keys and values are there for the whole
sequence; they lie in the pages of the model's own layers, as those of one more layer. What it says at a
request's last position is the first draft. Further ones feed its own output back, a position at a time; what
that leaves behind the request's last token is overwritten by the next step.

The model verifies drafts as it does others (commit.py): a wrong one costs time, never a token.

The host waits for drafts when it needs them, before the next step: it hands out tokens meanwhile.

Ranks that share requests draft alike, for they get the same bits. Ranks with requests of their own tell each
other, before each further pass, how many tokens the layer's experts get from them; one without requests takes
part with none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from turnout.engine.ranks.step_sync import StepSync
from turnout.engine.scheduler.kv_cache import KVCache
from turnout.engine.scheduler.request import Request
from turnout.engine.scheduler.scheduler import Chunk
from turnout.engine.speculative.switch import DraftSwitch
from turnout.engine.step.cuda_graphs import Computed
from turnout.engine.step.forward import Forward
from turnout.models.interface import DraftingModel
from turnout.parallel.transfers import HostCopy, on_device


class LayerDrafter:
    """num_steps: drafts of a request and step."""

    def __init__(
        self,
        model: DraftingModel,
        forward: Forward,
        kv: KVCache,
        step_sync: StepSync,
        *,
        num_steps: int,
        max_context: int,
    ):
        self._model, self._forward, self._kv, self._step_sync = model, forward, kv, step_sync
        self._num_steps, self._max_context = num_steps, max_context
        self._drafted: list[tuple[list[Request], HostCopy]] = []  # and not read yet

    def read(self) -> None:
        """Give requests the drafts of the last step."""
        for requests, drafts in self._drafted:
            for request, token in zip(requests, drafts.tolist(), strict=True):
                request.proposed.append(token)
        self._drafted.clear()

    def propose(
        self, rows: Sequence[tuple[Chunk, int]], computed: Computed, switch: DraftSwitch | None = None
    ) -> None:
        """Draft what may follow the tokens that this step gave requests, unless `switch` lets drafts rest;
        `read` tells them.

        rows: all chunks of the step with the row of their first token in `computed`. Collective.
        """
        step, hidden_NH = computed.step, computed.hidden_NH
        assert step is not None, "a draft layer goes over the tokens of every step"
        following = [_following(chunk.request, place) for chunk, _ in rows for place in _places(chunk)]
        ids_N = on_device(following, torch.int64, hidden_NH.device)
        hidden_NH = self._model.draft(replace(step, input_ids=ids_N), hidden_NH)
        drafting: list[Request] = []
        last: list[int] = []
        for chunk, first_row in rows:
            request = chunk.request
            request.proposed = []
            place = len(request.tokens) - 2  # of the newest token that is computed
            if self._drafts_for(request) and place in _places(chunk):
                drafting.append(request)
                last.append(first_row + place - chunk.start)
        if switch and not switch.drafts(sum(_decodes(chunk.request) for chunk, _ in rows)):
            drafting, last = [], []
        hidden_SH = hidden_NH[on_device(last, torch.int64, hidden_NH.device)]
        ids_S = self._choose(drafting, hidden_SH)
        for count in range(1, self._num_steps):
            drafting, ids_S, hidden_SH = self._once_more(drafting, ids_S, hidden_SH, count)
            ids_S = self._choose(drafting, hidden_SH)

    def _choose(self, drafting: list[Request], hidden_SH: Tensor) -> Tensor:
        """int64 [S]: the next draft of each request, from the layer's hidden state [S, H]."""
        if not drafting:
            return hidden_SH.new_empty(0, dtype=torch.int64)
        ids_S = self._model.logits(hidden_SH).argmax(dim=-1)
        self._drafted.append((drafting, HostCopy(ids_S)))
        return ids_S

    def _drafts_for(self, request: Request) -> bool:
        return _decodes(request) and request.most_drafts > 0 and len(request.tokens) > 1

    def _once_more(
        self, drafting: Sequence[Request], ids_S: Tensor, hidden_SH: Tensor, count: int
    ) -> tuple[list[Request], Tensor, Tensor]:
        """Requests that have a page for one more position, their last drafts, and the layer's hidden states
        there. count: of drafts that each has. Collective."""
        kept: list[int] = []
        chunks: list[Chunk] = []
        for i, request in enumerate(drafting):
            place = len(request.tokens) - 2 + count
            wanted = count < request.most_drafts and place < self._max_context
            if wanted and self._kv.grow(request, place + 1):
                kept.append(i)
                chunks.append(Chunk(request, place, place + 1))
        requests = [drafting[i] for i in kept]
        rows_S = on_device(kept, torch.int64, hidden_SH.device)
        ids_S, hidden_SH = ids_S[rows_S], hidden_SH[rows_S]
        tokens = self._step_sync.share_count(len(requests))
        if not any(tokens):
            return [], ids_S, hidden_SH
        hidden_SH = self._model.draft(self._forward.draft_step(chunks, ids_S, tokens), hidden_SH)
        for request in requests:
            self._kv.trim(request)  # the pages are others' until the drafts are verified
        return requests, ids_S, hidden_SH


def _places(chunk: Chunk) -> range:
    return range(chunk.start, chunk.end)


def _decodes(request: Request) -> bool:
    """In the next step."""
    return request.row >= 0 and not request.ended and request.remaining == 1


def _following(request: Request, place: int) -> int:
    """The token after that at `place`; any where it is not known, behind a draft that was wrong."""
    return request.tokens[place + 1] if place + 1 < len(request.tokens) else 0
