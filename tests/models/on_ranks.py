"""What one rank does in tests of models over ranks. Apart, so that ranks need not import transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from tests.models.running import PlainAttention, load
from tests.ranks import Rank

Chunks = Sequence[tuple[str, Sequence[int]]]  # sequence, the tokens that a step appends to it


def run(
    rank: Rank,
    folder: Path,
    sizes: dict[str, int],
    options: dict[str, str],
    steps: Sequence[Any],
    device: str = "cpu",
) -> list[list[Tensor]]:
    """By step: float32 logits [T, V] of every chunk of this rank's data-parallel group.

    steps: (phase, the chunks of each data-parallel rank), the ranks without any idling along.
    """
    groups = rank.groups(device, **sizes)
    attention = PlainAttention(load(folder, groups=groups, device=device, **options), device)
    results = []
    for phase, chunks_by_rank in steps:
        tokens = tuple(sum(len(ids) for _, ids in chunks) for chunks in chunks_by_rank)
        own = chunks_by_rank[groups.topology.dp_rank] or [("idle", [])]
        logits = attention.logits(*own, phase=phase, tokens=tokens)
        results.append(logits if tokens[groups.topology.dp_rank] else [])
    return results
