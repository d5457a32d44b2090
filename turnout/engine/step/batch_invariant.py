"""Steps under --deterministic: a token's result does not depend on what else is in the step, to the bit.

Nor on how its prompt was cut into chunks, nor on what was found in the prefix cache: all of it follows from
the request's own tokens, so that every computation of them gives the same bits.

* On a CPU each token is a forward of its own. Every call of torch then has the shapes it would have if
  nothing else ran, whatever library makes it; nothing rests on how those treat a row among others. Batches
  gain no speed.
* On CUDA a step is one forward. Products come from kernels whose rows are independent
  (kernels/common/rowwise.py, and the experts' runner), and each token, of a prompt too, attends by itself to
  its context in pages, cut into the same number of spans for every batch. Whatever else a model does treats
  rows, or single values, apart. Decode graphs run the same kernels.

Legend: N tokens of a step, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from turnout.attention.caches import AttentionCaches
from turnout.attention.paged import to_device
from turnout.engine.ranks.step_sync import SyncedStep
from turnout.engine.scheduler.scheduler import Chunk
from turnout.models.interface import Model, Step

SPANS = 8  # that kernels cut a context into; never from the batch


def forward(model: Model, attention: AttentionCaches, chunks: Sequence[Chunk], synced: SyncedStep) -> Tensor:
    """Hidden states [N, H] of the tokens of `chunks`, in their order; keys and values are stored."""
    ids_N = torch.tensor([token for chunk in chunks for token in chunk.tokens], dtype=torch.int64)
    if attention.device.type == "cpu":
        singles = [Chunk(c.request, place, place + 1) for c in chunks for place in range(c.start, c.end)]
        return _one_by_one(model, attention, singles, synced, ids_N)
    parts = []
    for group in attention.groups:
        rows = to_device(group.place_rows(chunks), attention.device)
        places_N, slots_N, table_BP, owners_N = rows
        parts.append(group.rows(slots_N, table_BP[owners_N], places_N + 1))
    (ids_N,) = to_device([ids_N], attention.device)
    step = Step(
        input_ids=ids_N,
        positions=places_N,
        attention=attention.together(parts),
        phase=synced.step_phase,
        tokens=synced.tokens,
    )
    return model.forward(step)


def _one_by_one(
    model: Model,
    attention: AttentionCaches,
    singles: Sequence[Chunk],
    synced: SyncedStep,
    ids_N: Tensor,
) -> Tensor:
    """A forward for each token of the rank that brings most; other ranks take part without one."""
    hidden = []
    places_N = torch.tensor([single.start for single in singles], dtype=torch.int64)
    for i in range(max(synced.tokens)):
        step = Step(
            input_ids=ids_N[i : i + 1].clone(),
            positions=places_N[i : i + 1].clone(),
            attention=attention.laid_out(singles[i : i + 1], []),
            phase=synced.step_phase,
            tokens=tuple(int(i < count) for count in synced.tokens),
        )
        hidden.append(model.forward(step))
    return torch.cat(hidden)
