"""What FlashInfer's kernels for Blackwell need in addition to weights, by the formulas of its source (0.7.2).

No torch here. The library takes its scratch from torch's allocator in each call and gives it back, so layers
share it. All sizes are bytes.

Legend: R rows of a batch, P = R top_k pairs, S slots: pairs by expert, each expert's padded to whole tiles;
H hidden, I a rank's shard of the intermediate size, N rows of W1, E local experts.
"""

from __future__ import annotations

from turnout.formats.spec import FORMATS
from turnout.moe.budget import aligned
from turnout.moe.capabilities.rank_share import Share
from turnout.vocabulary import ActivationKind, Format, Layout

TILE = 256  # the tallest of the tiles that the libraries' tuners choose between
SCALE_ROWS = 128  # block scales of experts' rows come in tiles of as many rows
GROUP = FORMATS[Format.NVFP4].group


def slots(pairs: int, experts: int) -> int:
    """The most rows that `pairs` become when each expert's are padded to whole tiles."""
    if pairs <= experts:
        return TILE * pairs
    return TILE * ((pairs + (TILE - 1) * experts) // TILE)


def nvfp4(rows: int, columns: int) -> int:
    """Codes and block scales."""
    return rows * (columns // 2 + columns // GROUP)


def cutedsl_workspace_bytes(share: Share) -> int:
    """Tokens: the input quantised, maps of the pairs, the output, and of W4A4 or W4A16 what is more: GEMM1's
    output in NVFP4, or both GEMMs' inputs in bf16. By expert: the input quantised, GEMM1's output, the same
    activated and quantised, the output; other activations than silu pass through float32."""
    shape, rows, itemsize = share.shape, share.rows, share.itemsize
    H, I, E = shape.hidden, shape.inner, shape.local_experts
    if share.layout == Layout.TOKENS:
        pairs = rows * shape.top_k
        S = slots(pairs, E)
        maps = 4 * (pairs + S + 2 * S // TILE)
        return nvfp4(rows, H) + maps + max(nvfp4(S, I), 2 * S * (H + I)) + itemsize * rows * H
    held, N = E * rows, shape.w13_rows
    tiled = E * aligned(rows, SCALE_ROWS)  # rows that have scales
    plain = 0 if share.activation == ActivationKind.SILU else held * (4 * N + (4 * 3 + itemsize) * I)
    return nvfp4(tiled, H) + itemsize * held * N + plain + nvfp4(tiled, I) + itemsize * held * H


def trtllm_workspace_bytes(share: Share) -> int:
    """The input quantised, maps of the pairs, GEMM1's output in NVFP4, GEMM2's in bf16, the output."""
    shape, rows, itemsize = share.shape, share.rows, share.itemsize
    H, I, pairs = shape.hidden, shape.inner, rows * shape.top_k
    S = slots(pairs, shape.num_experts)
    maps = 4 * (pairs + 2 * S + 2 * S // TILE + 2 * shape.num_experts)
    return nvfp4(rows, H) + maps + nvfp4(S, I) + 2 * S * H + itemsize * rows * H
