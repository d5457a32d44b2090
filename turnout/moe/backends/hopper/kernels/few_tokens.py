"""Weights of 4 bits, few tokens per expert (kernels/hopper/gemm_few.py).

Its warps hold whole strips of 16 weight rows and may share the columns of a strip. Where strips are few, more
warps per strip keep a GPU busy; where they are many, one is best, for sums over warps cost a barrier. Bounds
are those seen on an H200 (docs/notes/hopper-kernels.md).

No torch here. Legend: N weight rows, K columns.
"""

from __future__ import annotations

from turnout.moe.backends.hopper.launch import Gemm
from turnout.moe.backends.hopper.layer_shape import PACKED, LayerShape
from turnout.moe.backends.hopper.tile_config import MIN_TOKENS, Choices, LayerTiles, TileConfig, chunks

FEW_TOKENS = 4  # of an expert in the mean, up to which this kernel is fastest
BLOCK_K = 256
STAGES = 4
WHOLE_BYTES = 64 * 1024  # of tokens in shared memory, up to which all of them are copied first
# Strips, over all experts that got a token, up to which four or two warps share the columns of each.
SPLIT_4, SPLIT_2 = 400, 2200
FEW_STRIPS = 740  # up to which programs are of two strips, to be more
LEAST_COLUMNS = 512  # of a warp that shares them
# So many strips, of so many columns and in whole chunks, gain 2 % from warps that hold two.
MANY_STRIPS, DEEP_COLUMNS = 7000, 2048
MOST_STAGES = 16


class FewTokens(TileConfig, frozen=True, tag="few_tokens"):
    """block_k: columns that a warp takes at once. split_k: warps that share a strip's columns."""

    split_k: int = 1

    weights = (PACKED,)
    batch_invariant = False

    @classmethod
    def rule(cls, shape: LayerShape, tokens: int) -> LayerTiles | None:
        if shape.per_expert(tokens) > FEW_TOKENS:
            return None
        touched = shape.touched(tokens)
        first = _rule(touched * shape.w13_rows / 16, shape.hidden)
        return LayerTiles(first, _rule(touched * shape.hidden / 16, shape.inner))

    @classmethod
    def choices(cls, shape: LayerShape, tokens: int, ruled: LayerTiles) -> list[Choices]:
        """What may be best at any number of programs is few enough to time it all."""
        own = cls.rule(shape, tokens)
        if own is None or ruled.second.adds_pairs:
            return []

        def of(config: TileConfig, *, first: bool) -> tuple[TileConfig, ...]:
            K = shape.columns(first=first)
            found = [config]
            for block_n, num_warps, split_k in ((64, 4, 1), (128, 4, 1), (64, 8, 2)):
                whole = 2 * MIN_TOKENS * K <= WHOLE_BYTES and split_k > 1
                stages = chunks(K, split_k, BLOCK_K) if whole else STAGES
                found.append(cls(block_n, MIN_TOKENS, BLOCK_K, max(2, stages), num_warps, 1, split_k))
            return tuple(c for c in dict.fromkeys(found) if not c.refusal(shape, first=first))

        return [Choices(first=of(own.first, first=True), second=of(own.second, first=False))]

    def own_refusal(self, shape: LayerShape) -> str:
        n, m, warps, split = self.block_n, self.block_m, self.num_warps, self.split_k
        if m not in (8, 16, 32) or n not in (16, 32, 64, 128, 256):
            return f"block_n {n}, block_m {m} for few tokens per expert"
        if warps not in (4, 8) or split not in (1, 2, 4, 8) or self.block_k not in (64, 128, 256):
            return f"num_warps {warps}, split_k {split}, block_k {self.block_k}"
        strips = n // 16 * split / warps  # of a warp
        if strips not in (1, 2, 4) or warps < split or strips * self.block_k > 512:
            return f"block_n {n} with num_warps {warps}, split_k {split}, block_k {self.block_k}"
        return "" if 2 <= self.num_stages <= MOST_STAGES else f"num_stages {self.num_stages}"

    def shared_bytes(self, shape: LayerShape, *, first: bool) -> int:
        return 2 * self.num_stages * self.split_k * self.block_k * self.block_m

    def launch(self, g: Gemm) -> None:
        from turnout.kernels.hopper.gemm_few import expert_gemm_few

        w = g.w
        n_blocks, k_blocks = w.blocks
        expert_gemm_few[(g.most_tiles * -(-n_blocks * 64 // self.block_n),)](
            g.x, w.codes, w.scales, w.alpha, w.any_bias, g.out, g.order, g.table, g.any_weights,
            w.inner, w.padded_rows, g.columns, k_blocks, n_blocks, g.x.stride(0), g.out.stride(0), g.top_k,
            *g.held, *g.numbers,
            w.format, g.kind, g.first, not g.first, w.bias is not None,
            self.block_n, self.block_m, self.block_k // 64, self.num_stages, self.group_m, self.split_k,
            chunks(w.inner, self.split_k, self.block_k) <= self.num_stages, True,
            num_warps=self.num_warps, launch_pdl=True,
        )  # fmt: skip


def _rule(strips: float, K: int) -> FewTokens:
    split = 4 if strips < SPLIT_4 else 2 if strips < SPLIT_2 else 1
    while split > 1 and LEAST_COLUMNS * split > K:
        split //= 2
    all_at_once = 2 * MIN_TOKENS * K <= WHOLE_BYTES
    whole = chunks(K, split, BLOCK_K)
    if split == 1:
        deep = K >= DEEP_COLUMNS and K % BLOCK_K == 0 and strips >= MANY_STRIPS
        block_n, stages, warps = 128 if deep else 64, STAGES, 4
    elif split == 4:
        block_n, stages, warps = (16, whole, 4) if all_at_once else (32, min(whole, MOST_STAGES), 8)
    else:
        block_n, warps = (32, 4) if strips < FEW_STRIPS else (64, 8)
        stages = whole if all_at_once else STAGES
    return FewTokens(block_n, MIN_TOKENS, BLOCK_K, stages, warps, 1, split)
