"""What plain torch needs in addition to weights.

Legend: H hidden.
"""

from __future__ import annotations

from turnout.moe.capabilities.rank_share import Share
from turnout.vocabulary import Layout


def workspace_bytes(share: Share) -> int:
    """What a runner needs in addition to its weights.

    Every (token, local expert) pair holds its input and output in the compute dtype, GEMM1's output and
    the activated value in float32; packed weights add one expert decoded at a time, in float32 and in the
    compute dtype. Measured peaks of runner "torch" on a CPU, 2048 tokens, lie within 5 % of this.
    """
    shape, itemsize = share.shape, share.itemsize
    H, columns, experts = shape.hidden, shape.w13_rows + shape.inner, shape.local_experts
    pairs = share.rows * (experts if share.layout == Layout.BATCHED_EXPERTS else min(shape.top_k, experts))
    total = pairs * (2 * H * itemsize + 4 * columns)
    return total if share.decoded else total + columns * H * (itemsize + 4)
