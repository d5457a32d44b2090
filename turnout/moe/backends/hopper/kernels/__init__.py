"""The kernels of the Hopper runner: which of them a batch takes, by rule or by a layer's table.

Any configuration gives right results for any batch; which is fast depends on tokens per expert and sizes. The
rule serves every layer. Where a layer was measured (tuning_tables.py), its table decides instead:
configurations by tokens of the batch, the nearest entry counts. Kernels that are `batch_invariant` all add a
row's products in the same order, so that results have the same bits whichever ran
(tests/moe/test_deterministic.py).

No torch here: plans hold configurations.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import get_args

from turnout.moe.backends.hopper.kernels.few_tokens import FewTokens
from turnout.moe.backends.hopper.kernels.fp8 import Fp8
from turnout.moe.backends.hopper.kernels.fp8_sorted import Fp8Sorted
from turnout.moe.backends.hopper.kernels.packed import Packed
from turnout.moe.backends.hopper.kernels.pairs import Pairs
from turnout.moe.backends.hopper.kernels.plain import Plain
from turnout.moe.backends.hopper.kernels.specialised import Specialised
from turnout.moe.backends.hopper.kernels.w4a8 import W4A8
from turnout.moe.backends.hopper.layer_shape import LayerShape
from turnout.moe.backends.hopper.tile_config import Choices, LayerTiles, TileConfig, TileTable

# In this order they are asked for their rule; those at the end take any number of tokens.
AnyConfig = Pairs | FewTokens | Fp8Sorted | Specialised | W4A8 | Fp8 | Packed | Plain
KERNELS: tuple[type[TileConfig], ...] = get_args(AnyConfig)


def choose(shape: LayerShape, table: TileTable, tokens: int, *, batch_invariant: bool = False) -> LayerTiles:
    """For a batch of `tokens`: the nearest entry of `table`, as a ratio; without one, what `rule` says."""
    if not table:
        return rule(shape, tokens, batch_invariant=batch_invariant)
    after = bisect_left(table, tokens, key=lambda entry: entry[0])
    if after == len(table) or (after and tokens**2 < table[after - 1][0] * table[after][0]):
        after -= 1
    tiles = table[after][1]
    if holds(shape, tiles, tokens):
        return tiles
    return rule(shape, tokens, batch_invariant=batch_invariant)


def holds(shape: LayerShape, tiles: LayerTiles, tokens: int) -> bool:
    """Whether `tiles` are for batches as large as `tokens`."""
    return all(tokens * shape.top_k <= config.most_pairs for config in tiles)


def rule(shape: LayerShape, tokens: int, *, batch_invariant: bool = False) -> LayerTiles:
    """By the mean number of tokens of an expert. batch_invariant: only by kernels that are."""
    asked = (k for k in KERNELS if k.takes(shape) and (k.batch_invariant or not batch_invariant))
    return next(tiles for tiles in (kernel.rule(shape, tokens) for kernel in asked) if tiles)


def batched_experts_rule(shape: LayerShape, capacity: int) -> LayerTiles:
    """For `capacity` rows per expert, of which an unknown number is filled."""
    asked = (kernel.batched_experts_rule(shape, capacity) for kernel in KERNELS if kernel.takes(shape))
    return next(tiles for tiles in asked if tiles)


def candidates(shape: LayerShape, tokens: int) -> list[Choices]:
    """What to time for batches of `tokens`; what the rule says is among them."""
    ruled = rule(shape, tokens)
    asked = (kernel for kernel in KERNELS if kernel.takes(shape))
    return [choices for kernel in asked for choices in kernel.choices(shape, tokens, ruled)]


def refuse(shape: LayerShape, tiles: LayerTiles) -> str:
    """Why no kernel runs `tiles`; "" if one does."""
    first, second = tiles
    if first.block_m != second.block_m:
        return "the two GEMMs share a table of tiles, and differ in block_m"
    if first.sorts_rows != second.sorts_rows:
        return f"rows in the order of experts for one of the kernels {first.kernel} and {second.kernel}"
    return first.refusal(shape, first=True) or second.refusal(shape, first=False)
