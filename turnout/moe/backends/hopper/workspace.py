"""What the Hopper kernels need in addition to weights, region by region: what plans count and arenas hold.

No torch here. All sizes are bytes.

Legend: R rows of a batch, P = R top_k pairs (token, expert), H hidden, I inner, E local experts, C rows
per expert.
"""

from __future__ import annotations

from turnout.formats.spec import FORMATS
from turnout.moe.backends.hopper.kernels.fp8_sorted import Fp8Sorted
from turnout.moe.backends.hopper.layer_shape import W4A8, LayerShape
from turnout.moe.backends.hopper.tile_config import MIN_TOKENS
from turnout.moe.budget import arena_bytes
from turnout.moe.capabilities.rank_share import Share
from turnout.vocabulary import Format, Layout

FP8_GROUP = FORMATS[Format.FP8].group  # columns that share a float32 scale


def regions(shape: LayerShape, layout: Layout, rows: int) -> dict[str, int]:
    """For a batch of at most `rows` tokens, or at most `rows` rows per expert.

    counts: int32, nine for each of a power of two above E (kernels/hopper/sort.py), zero between calls, hence
    first. tiles: int32 [1 + tiles, 4]. h: GEMM1's output, bf16. order: int32 [P], pairs sorted by expert. y:
    what GEMM2 gives for each pair, bf16 [P, H]. FP8: quantized, the input of either GEMM in e4m3, with a
    float32 scale per group; place int32 [P], where sorted rows are, for which y has GEMM1's input before
    GEMM2's output, and h GEMM1's output in e4m3. W4A8: quantized, sorted rows, with columns up to a whole
    group, and a scale each; place.
    """
    fp8, w4a8, H, I = shape.format == Format.FP8, shape.format == W4A8, shape.hidden, shape.inner
    columns = FP8_GROUP * -(-max(H, I) // FP8_GROUP)
    found = {"counts": 9 * 4 * (1 << shape.local_experts.bit_length())}
    if layout == Layout.BATCHED_EXPERTS:
        held = shape.local_experts * rows
        found["tiles"] = 16 * (1 + shape.local_experts * -(-rows // MIN_TOKENS))
        found["h"] = 2 * held * I
        if w4a8:
            found |= {"quantized": held * columns, "quantized_scales": 4 * held}
        return found | (_quantized("quantized", held * max(H, I)) if fp8 else {})
    pairs = rows * shape.top_k
    found["tiles"] = 16 * (1 + shape.most_tiles(rows, MIN_TOKENS))
    found |= {"order": 4 * pairs, "h": 2 * pairs * I, "y": 2 * pairs * H}
    if w4a8:
        found |= {"quantized": pairs * columns, "quantized_scales": 4 * pairs, "place": 4 * pairs}
    if fp8:
        found |= _quantized("quantized", max(rows * H, pairs * I))
        found |= {"place": 4 * pairs} if Fp8Sorted.takes(shape) else {}
    return found


def layer_shape(share: Share) -> LayerShape:
    """What of `share` the kernels' sizes follow from."""
    sizes = vars(share.shape)
    w4a8 = (share.shape.format, share.activations) == (Format.MXFP4, Format.FP8)
    return LayerShape(**sizes | ({"format": W4A8} if w4a8 else {}))


def workspace_bytes(share: Share) -> int:
    """The arena for batches in one layout, and the output that a call hands out."""
    shape = layer_shape(share)
    rows_out = share.rows * (shape.local_experts if share.layout == Layout.BATCHED_EXPERTS else 1)
    output = share.itemsize * rows_out * shape.hidden
    return arena_bytes(regions(shape, share.layout, share.rows)) + output


def _quantized(name: str, values: int) -> dict[str, int]:
    return {name: values, f"{name}_scales": 4 * values // FP8_GROUP}
