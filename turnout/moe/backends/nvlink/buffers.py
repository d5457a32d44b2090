"""Symmetric memory of the all-to-all over NVLink: what a rank's region holds, in bytes.

No torch here: plans count by the formula that memory is made by.
"""

from __future__ import annotations

from collections.abc import Iterable

from turnout.formats.spec import token_bytes, token_parts
from turnout.moe.budget import aligned
from turnout.moe.capabilities.rank_share import DispatchShare
from turnout.vocabulary import Format, Layout

FEW_TOKENS = 128  # of a rank, that are sent in words (kernels/nvlink)


def buffer_bytes(share: DispatchShare) -> int:
    """For each batch that may be in flight a region, and its ids and weights; rows by expert are copies."""
    parts = region_parts(
        hidden=share.shape.hidden,
        top_k=share.shape.top_k,
        ranks=share.ranks,
        capacity=share.capacity,
        wire_formats=(share.wire_format,),
        combine_format=share.combine_format,
        itemsize=share.itemsize,
    )
    batched = 0
    if share.layout == Layout.BATCHED_EXPERTS:
        batched = share.rows * share.shape.local_experts * (share.token + share.result)
    return share.batches * (sum(parts.values()) + share.rows * 8 * share.shape.top_k + batched)


def region_parts(
    *,
    hidden: int,
    top_k: int,
    ranks: int,
    capacity: int,
    wire_formats: Iterable[Format],
    combine_format: Format,
    itemsize: int,
) -> dict[str, int]:
    """What a rank's region of symmetric memory holds, in this order, for `capacity` tokens of each rank.

    Per row the token as dispatched and its result, and a flag for each; twice, for a step and the next, its
    ids and weights (8 k). Where a rank's first FEW_TOKENS land, both again, at 16 bytes. And counts.
    """
    rows, few = ranks * capacity, ranks * min(capacity, FEW_TOKENS)
    sent = [token_parts(f, hidden, itemsize=itemsize) for f in wire_formats]
    result = aligned(token_bytes(combine_format, hidden, itemsize=itemsize), 16)
    sizes = {
        "counts": 2 * 8 * ranks,
        "meta": 2 * 8 * rows * top_k,
        "arrived": 8 * rows,
        "returned": 8 * rows,
        "scales": rows * max(scales for _, scales in sent),
        "hidden": rows * max(data for data, _ in sent),
        "results": rows * result,
        "landing": few * max(aligned(data + scales, 16) for data, scales in sent),
        "landed": few * result,
    }
    return {name: aligned(size) for name, size in sizes.items()}
