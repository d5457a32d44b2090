"""Memory of DeepEP's all-to-all, in bytes, by the formulas of its source.

No torch here.
"""

from __future__ import annotations

from turnout.moe.budget import aligned
from turnout.moe.capabilities.rank_share import DispatchShare, received_bytes


def normal_bytes(share: DispatchShare) -> int:
    """Queues that tokens pass through, and what is received."""
    return nvl_size_hint(share.result, share.ranks) + received_bytes(share)


def low_latency_bytes(share: DispatchShare) -> int:
    """Queues hold whole steps, and the batch is a copy."""
    shape = share.shape
    queues = low_latency_size_hint(share.capacity, shape.hidden, shape.num_experts)
    return queues + share.rows * shape.local_experts * share.token


def nvl_size_hint(row: int, ranks: int) -> int:
    """DeepEP's queues between `ranks` of one host, for rows of so many bytes: its `get_nvl_buffer_size_hint`.

    Ten channels to every rank of 256 slots, with room for 128 ids (8 bytes), weights and scales (4 each).
    """
    slots = 10 * ranks * 256
    return aligned(10 * ranks * 5 * 4 + slots * (row + 8 + 128 * (8 + 4 + 4)))


def low_latency_size_hint(tokens: int, hidden_size: int, num_experts: int) -> int:
    """DeepEP's low-latency buffers: its `get_low_latency_rdma_size_hint`.

    Two of each, used in turn: messages out and in, a slot per expert and token, for dispatch (16 bytes and
    the row in bf16) or combine (the row, and two bf16 per 128 columns), whichever is more; and signals.
    """
    scales = hidden_size // 128
    there, back = 16 + max(2 * hidden_size, hidden_size + 4 * scales), 4 * scales + 2 * hidden_size
    out = max(tokens * there, num_experts * tokens * back)
    into = num_experts * tokens * max(there, back)
    return (2 * (out + into + aligned(4 * num_experts)) // 128 + 1) * 128
