"""What kernels have in common whose programs multiply one tile each, of any number of tokens.

No torch here. Legend: T tokens, N weight rows, K columns.
"""

from __future__ import annotations

from itertools import product

from turnout.moe.backends.hopper.cost_model import worth_timing
from turnout.moe.backends.hopper.layer_shape import LayerShape
from turnout.moe.backends.hopper.tile_config import (
    MIN_TOKENS,
    Choices,
    LayerTiles,
    Rules,
    TileConfig,
    by_mean_tokens,
)

# Fewer programs of 64 rows than this leave multiprocessors idle (each holds several).
FEW_PROGRAMS = 600
# Unsorted pairs of other ranks' experts are programs that end at once. Where those that are left do not even
# fill the multiprocessors, GEMM1, the deeper one, gains from narrower tiles: 55 us instead of 74 for 2 tokens
# of DeepSeek-V3 on one of eight ranks.
IDLE_PROGRAMS = 100


class Tiled(TileConfig, frozen=True):
    """A kernel for any batch: whether its pairs are sorted or not, and for rows by expert."""

    @classmethod
    def rules(cls) -> Rules[Tiled]:
        """Measured on an H200 (docs/notes/hopper-kernels.md)."""
        raise NotImplementedError

    @classmethod
    def rule(cls, shape: LayerShape, tokens: int) -> LayerTiles:
        config = by_mean_tokens(cls.rules(), shape.per_expert(tokens))
        tiles = _narrowed(shape, config, shape.most_tiles(tokens, config.block_m))
        narrowest = shape.unsorted(tokens) and config.block_m == MIN_TOKENS
        if narrowest and programs(shape, tokens, tiles.first) < IDLE_PROGRAMS:
            return tiles._replace(first=tiles.first.with_rows(64))
        return tiles

    @classmethod
    def batched_experts_rule(cls, shape: LayerShape, capacity: int) -> LayerTiles:
        config = by_mean_tokens(cls.rules(), capacity)
        return _narrowed(shape, config, shape.local_experts * -(-capacity // config.block_m))

    @classmethod
    def choices(cls, shape: LayerShape, tokens: int, ruled: LayerTiles) -> list[Choices]:
        """What the model leaves of all that run, and of kernels with such programs what the rule takes."""
        axes = product((64, 128, 256), (8, 16, 32, 64, 128, 256), (64, 128), (3, 4, 5, 6), (4, 8), (8, 1))
        # Taking turns with the same weights matters only to tall stacks of tiles.
        possible = [cls(*fields) for fields in axes if fields[1] >= 64 or fields[-1] == 1]
        possible += [config for _, config in cls.rules()]
        other = ruled.first.persistent or ruled.second.adds_pairs
        return worth_timing(shape, tokens, possible, own=cls.rule(shape, tokens) if other else ruled)

    def unsorted(self, shape: LayerShape, tokens: int) -> bool:
        return shape.unsorted(tokens)

    def own_refusal(self, shape: LayerShape) -> str:
        n, m, warps = self.block_n, self.block_m, self.num_warps
        if n not in (64, 128, 256) or m not in (8, 16, 32, 64, 128, 256):
            return f"block_n {n}, block_m {m}"
        if warps not in (4, 8) or n < 16 * warps or not 3 <= self.num_stages <= 8:
            return f"block_n {n} with num_warps {warps}, num_stages {self.num_stages}"
        if n * m > 128 * 32 * warps:  # float32 sums, in registers
            return f"{n} x {m} sums in the registers of num_warps {warps}"
        return ""


def programs(shape: LayerShape, tokens: int, config: TileConfig) -> float:
    """Of GEMM1 in a batch whose tiles are those of one expert each."""
    return shape.touched(tokens) * -(-shape.w13_rows // config.block_n)


def _narrowed(shape: LayerShape, config: TileConfig, most_tiles: int) -> LayerTiles:
    """With half the rows where there would be few programs."""

    def one(rows: int) -> TileConfig:
        few = config.block_m == MIN_TOKENS and most_tiles * -(-rows // 64) < FEW_PROGRAMS
        return config.with_rows(64) if few else config

    return LayerTiles(one(shape.w13_rows), one(shape.hidden))
