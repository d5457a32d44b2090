"""A dispatcher of the "batched_experts" layout for tests: C rows per local expert, nothing exchanged.

Written with plain loops, so that what it hands a runner is plain to see.
"""

from __future__ import annotations

import torch

from turnout.moe.batch import ExpertsBatch, Hidden
from turnout.moe.capabilities.capability import DispatcherCapability


class BatchedDispatch:
    capability = DispatcherCapability(
        name="batched", summary="for tests", layout="batched_experts", graph_safe=False
    )

    def __init__(self, setup):
        self._first, self._count = setup.plan.first_expert, setup.plan.num_local_experts
        self._capacity = setup.plan.phase(setup.phase).max_tokens

    def dispatch(self, x_TH, topk_ids_TK, topk_weights_TK, tokens):
        batched = torch.full((self._count, self._capacity, x_TH.shape[1]), torch.nan).to(
            x_TH
        )  # unused: garbage
        counts = [0] * self._count
        places = []
        for token, ids in enumerate(topk_ids_TK.tolist()):
            for slot, expert in enumerate(ids):
                local = expert - self._first
                if expert >= 0 and 0 <= local < self._count:
                    batched[local, counts[local]] = x_TH[token]
                    places.append((token, slot, local, counts[local]))
                    counts[local] += 1
        batch = ExpertsBatch(
            hidden=Hidden(data=batched), counts=torch.tensor(counts, dtype=torch.int32, device=x_TH.device)
        )
        return batch, (x_TH, topk_weights_TK, places)

    def combine(self, out, state):
        x_TH, weights_TK, places = state
        y_TH = torch.zeros_like(x_TH, dtype=torch.float32)
        for token, slot, local, row in places:
            y_TH[token] += weights_TK[token, slot] * out[local, row].float()
        return y_TH.to(x_TH.dtype)
