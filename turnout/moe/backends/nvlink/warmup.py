"""Compiling the exchange's kernels before they are needed.

Which kernel a rank launches depends on what it brings and on the most that any rank does. First prompts bring
as much on every rank, while requests do not: a rank with few tokens next to one with many needs a kernel that
no such step launches.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from turnout.vocabulary import Format

if TYPE_CHECKING:  # Triton loads where the kernels are launched
    from turnout.kernels.nvlink.links import Links


def uneven_batches(few: int, capacity: int) -> Iterator[tuple[int, int]]:
    """(tokens of a rank, the most of any rank), which between them take every kernel that ranks with up to
    `capacity` tokens need. Beyond `few`, only whether a rank has more counts."""
    for most in {*range(1, few + 1), capacity}:
        for tokens in {0, min(few, most), most}:
            yield tokens, most


def compile_exchange(
    links: Links, capacity: int, dtype: torch.dtype, wire: Format, back: Format, threads: int
) -> list[tuple[int, int]]:
    """Compile all that `links` may launch for batches of `dtype`, in `threads`. Launches nothing.

    Returns the `uneven_batches` that need it all.
    """
    from turnout.kernels.common.compilation import can_record, compiling, needing

    if not can_record():
        return []

    def call(batch: tuple[int, int]) -> None:
        exchange(links, *batch, dtype, wire, back)

    batches = needing(call, uneven_batches(links.few, capacity))
    with compiling(threads):
        for batch in batches:
            call(batch)
    return batches


def exchange(links: Links, tokens: int, most: int, dtype: torch.dtype, wire: Format, back: Format) -> None:
    """Dispatch and combine once, with uninitialised values."""
    device, rows, k = links.epochs.device, most * len(links.addresses), links.top_k
    x_TH = torch.empty(tokens, links.hidden, dtype=dtype, device=device)
    ids_TK = torch.empty(tokens, k, dtype=torch.int32, device=device)
    weights_TK = torch.empty(tokens, k, device=device)
    received = torch.empty(rows, k, dtype=torch.int32, device=device)
    weights = torch.empty(rows, k, device=device)
    scale = torch.empty((), device=device) if wire == Format.NVFP4 else None
    links.dispatch(x_TH, ids_TK, weights_TK, scale, received, weights, most, str(wire))
    y = torch.empty(rows, links.hidden, dtype=dtype, device=device)
    links.combine(y, received, ids_TK, torch.empty_like(x_TH), most, str(back))
