"""What FlashInfer's `cutlass_fused_moe` needs in addition to weights, by the formulas of its source (0.7.2).

No torch here. All sizes are bytes.

Legend: R rows of a batch, P = R top_k pairs (token, expert), H hidden, I a rank's shard of the intermediate
size, both padded where the format asks for it; E local experts.
"""

from __future__ import annotations

from turnout.formats.spec import FORMATS
from turnout.moe.budget import aligned
from turnout.moe.capabilities.rank_share import Share
from turnout.vocabulary import Format

PADDED = {"mxfp4": 128}  # to multiples of what H and I are brought
FP8_GROUP = FORMATS[Format.FP8].group
# Arguments and descriptors of the grouped GEMMs, and the tiles they are cut into.
GEMM_BYTES = 32 * 2**20


def padded(size: int, weight_format: str) -> int:
    multiple = PADDED.get(weight_format, 1)
    return aligned(size, multiple)


def workspace_bytes(share: Share) -> int:
    """Two buffers that inputs and outputs of both GEMMs take in turn, maps of the pairs, what the GEMMs
    themselves ask for; then the output that a call hands out, and the input where it is padded."""
    shape, rows, num_local_experts = share.shape, share.rows, share.shape.local_experts
    pairs = rows * shape.top_k
    hidden = padded(shape.hidden, shape.format)
    inner = padded(shape.inner, shape.format)
    gemm1 = inner * (shape.w13_rows // shape.inner)
    buffers = 2 * pairs * (max(hidden, inner) + max(hidden, gemm1))
    maps = 4 * (4 * pairs + rows * num_local_experts)
    outside = 2 * rows * (hidden + (2 * shape.hidden if hidden != shape.hidden else 0))
    total = buffers + maps + outside + GEMM_BYTES
    if shape.format == Format.FP8:  # inputs of a GEMM in e4m3, with a scale per row and 128 columns
        slots = pairs + 32 * num_local_experts
        total += slots * max(hidden, inner) + 4 * slots * max(hidden, inner) // FP8_GROUP
    if shape.format == Format.MXFP4:  # two inputs of a GEMM in bf16, for a smoothing that is not asked for
        total += 4 * pairs * max(hidden, inner)
    if shape.format == Format.NVFP4:
        total += (pairs + 128 * num_local_experts) * max(hidden, inner) // 16
    return total
