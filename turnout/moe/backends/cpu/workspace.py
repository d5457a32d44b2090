"""What the kernels for CPUs need in addition to weights."""

from __future__ import annotations

from turnout.moe.capabilities.rank_share import Share
from turnout.vocabulary import Layout


def workspace_bytes(share: Share) -> int:
    """For a batch of `rows` tokens, or of as many per expert: input and output in float32, and for each pair
    the activation's output, its token and its weight. What threads unpack a panel into is not counted."""
    held = share.rows
    pairs = held * min(share.shape.top_k, share.shape.local_experts)
    if share.layout == Layout.BATCHED_EXPERTS:
        pairs = held = share.rows * share.shape.local_experts
    return pairs * (4 * share.shape.inner + 8 + 4) + 2 * held * share.shape.hidden * 4
