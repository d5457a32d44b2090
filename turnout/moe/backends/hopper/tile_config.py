"""How the Hopper kernels cut a layer's two GEMMs: the values, the rule that picks them, and what is possible.

Any tiling gives right results for any batch; which is fast depends on tokens per expert and sizes. `rule`
serves every layer. Where a layer was measured (tuning_tables.py), its table decides instead: tilings by
tokens of the batch, the nearest entry counts. Which tiling ran shows in no bit of a result: all of them add a
row's products in the same order (tests/moe/test_deterministic.py), as --deterministic needs. Only tilings
with `slices` do not, and are left out there.

No torch here: plans hold these values.

Legend: T tokens, P = T top_k pairs (token, expert), N weight rows, E local experts, C slab capacity.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from typing import NamedTuple

from turnout.moe.backends.hopper import tile_few, tile_fp8, tile_pairs
from turnout.moe.spec import MoESpec

MIN_TOKENS = 8  # the smallest tile
SORT_PAIRS = 16  # up to so many pairs, each is a tile of its own
SORT_PAIRS_PACKED = 40  # with 4-bit weights, which take less time to read twice
# Pairs are sorted sooner where a smaller share than this goes to experts of its own: 4 tokens of GPT-OSS-20B,
# of whose pairs 0.83 do, take 66 us sorted and 61 by kernels/hopper/gemm_pairs.py (MXFP4).
DISTINCT, DISTINCT_PACKED = 0.87, 0.8
FEW_TOKENS = 4  # of an expert, up to which kernels/hopper/gemm_few.py is fastest with 4-bit weights
# FP8 with more tokens per expert: rows stay sorted by expert (kernels/hopper/gemm_fp8_specialised.py).
SORTED_ABOVE = 18
W4A8 = "w4a8"  # MXFP4 weights by FP8 activations (kernels/hopper/gemm_w4a8.py)
SLAB_TOKENS = 96  # of an expert, the most that slabs' tiles of W4A8 are made for; room says little
SPECIALISED = 12  # warps, of which four load and eight multiply (kernels/hopper/gemm_specialised.py)
# Of the kernels, by `LayerShape.kernel`; raised when tables must be measured again.
REVISIONS = {"packed": 10, "bf16": 6, "fp8": 3, W4A8: 4}
SHARED_BYTES = 227 * 1024  # of a multiprocessor, for one program
_EPILOGUE_BYTES = 6 * 1024  # of them, for results and barriers of specialised warps
# Fewer 64-row programs than this leave multiprocessors idle (an H200 has 132, each holds several).
_FEW_PROGRAMS = 600
# Unsorted pairs of other ranks' experts are programs that end at once. Where those that are left do not even
# fill the multiprocessors, GEMM1, the deeper one, gains from narrower tiles: 55 us instead of 74 for 2 tokens
# of DeepSeek-V3 on one of eight ranks.
_IDLE_PROGRAMS = 100
# Programs that fill the multiprocessors once, and how long a row is (columns) that then gains from tiles with
# more of it in flight, in bf16: 46 us instead of 59 for the same two tokens, 38 instead of 42 for one.
_MULTIPROCESSORS = 132
_LONG = 6144


class Tiling(NamedTuple):
    """How a GEMM is cut (kernels/hopper/gemm.py): weight rows, tokens, column blocks a step (64 wide; FP8:
    128), stages, warps (SPECIALISED: another kernel), tiles of tokens that take turns with the same weights.
    """

    rows: int
    tokens: int
    k_blocks: int
    stages: int
    warps: int
    group: int
    slices: int = 0  # gemm_few.py: how many warps share the columns; 0: another kernel


class Tiles(NamedTuple):
    """Both GEMMs of a layer. They share one table of tiles, hence `tokens`.

    sorted: FP8 rows are put in the order of experts, for the TMA.
    """

    first: Tiling
    second: Tiling
    sorted: bool = False

    @property
    def tokens(self) -> int:
        return self.first.tokens

    @property
    def pairs(self) -> bool:
        """Whether nothing is sorted, and programs find their pairs (tile_pairs.py)."""
        return self.first.tokens == tile_pairs.PAIR

    @property
    def specialised(self) -> bool:
        return SPECIALISED in (self.first.warps, self.second.warps)


TileTable = tuple[tuple[int, Tiles], ...]  # tokens of a batch, ascending, and what was best there

SORTED = Tiles(Tiling(256, 128, 1, 4, 4, 8), Tiling(256, 128, 1, 4, 4, 8), sorted=True)

# Tilings of specialised warps, and the mean tokens per expert above which one serves best.
SPECIAL: dict[str, tuple[Tiling, ...]] = {
    "packed": (
        Tiling(256, 128, 2, 4, SPECIALISED, 8),
        Tiling(256, 144, 2, 4, SPECIALISED, 8),
    ),
    "bf16": (Tiling(256, 128, 1, 4, SPECIALISED, 8), Tiling(128, 256, 1, 4, SPECIALISED, 8)),
}
SPECIAL_ABOVE: dict[str, tuple[tuple[float, Tiling], ...]] = {
    "packed": ((64, SPECIAL["packed"][0]),),
    "bf16": ((48, SPECIAL["bf16"][0]),),
}

# Mean tokens per expert up to which a tiling is used; measured on an H200 (docs/performance.md).
RULES: dict[str, tuple[tuple[float, Tiling], ...]] = {
    "packed": (
        (4, Tiling(128, 8, 1, 5, 4, 1)),
        (13, Tiling(128, 16, 1, 5, 4, 1)),
        (27, Tiling(128, 32, 1, 5, 4, 1)),
        (36, Tiling(128, 64, 1, 5, 4, 1)),
        (72, Tiling(128, 64, 1, 5, 4, 8)),
        (math.inf, Tiling(128, 128, 1, 5, 4, 8)),
    ),
    "bf16": (
        (5, Tiling(64, 8, 2, 4, 4, 1)),
        (12, Tiling(64, 16, 2, 5, 4, 1)),
        (24, Tiling(128, 32, 1, 5, 4, 1)),
        (48, Tiling(128, 64, 1, 4, 4, 1)),
        (400, Tiling(256, 128, 1, 4, 8, 8)),
        (math.inf, Tiling(128, 256, 1, 4, 8, 8)),
    ),
    "fp8": tuple((bound, Tiling(*cut, 1)) for bound, cut in tile_fp8.RULES),
    W4A8: (
        (12, Tiling(256, 16, 1, 8, 4, 1)),
        (24, Tiling(256, 32, 1, 8, 4, 1)),
        (48, Tiling(256, 64, 1, 8, 4, 8)),
        (96, Tiling(256, 128, 1, 6, 4, 8)),
        (math.inf, Tiling(128, 256, 1, 5, 4, 8)),
    ),
}


_DEEP = Tiles(Tiling(64, 16, 2, 6, 4, 1), Tiling(128, 16, 2, 6, 4, 1))


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """One rank's share of a layer, as far as tilings depend on it."""

    format: str  # of the weights, or W4A8
    hidden: int  # columns of GEMM1, rows of GEMM2
    inner: int  # columns of GEMM2
    w13_rows: int
    num_experts: int  # of all ranks
    local_experts: int
    top_k: int

    @classmethod
    def of(
        cls, spec: MoESpec, *, num_local_experts: int, expert_tp: int, activations: str = "bf16"
    ) -> LayerShape:
        """One rank's share of `spec`. activations: what the GEMMs multiply with."""
        return cls(
            format=W4A8 if (spec.format, activations) == ("mxfp4", "fp8") else spec.format,
            hidden=spec.hidden_size,
            inner=spec.intermediate_size // expert_tp,
            w13_rows=spec.w13_rows // expert_tp,
            num_experts=spec.num_experts,
            local_experts=num_local_experts,
            top_k=spec.top_k,
        )

    @property
    def kernel(self) -> str:
        """Which of RULES."""
        return self.format if self.format in RULES else "packed"

    @property
    def sortable(self) -> bool:
        """Whether the TMA kernel, whose tiles are whole, can take both GEMMs."""
        return self.format == "fp8" and not (self.w13_rows % 256 or self.hidden % 256)

    def direct(self, tokens: int) -> bool:
        """Whether each pair is a tile of its own, and nothing is sorted."""
        return self._few_distinct(tokens, DISTINCT)

    def unsorted(self, tokens: int) -> bool:
        """The same where kernels/hopper/gemm_pairs.py takes them."""
        distinct = DISTINCT_PACKED if self.kernel == "packed" else DISTINCT
        return self.kernel in tile_pairs.KERNELS and self._few_distinct(tokens, distinct)

    def _few_distinct(self, tokens: int, share: float) -> bool:
        """Whether pairs are few, and as large a share of them goes to experts of its own."""
        most = SORT_PAIRS_PACKED if self.kernel == "packed" else SORT_PAIRS
        pairs, spread = tokens * self.top_k, (1 - self.top_k / self.num_experts) ** tokens
        return pairs <= most and self.num_experts * (1 - spread) >= share * pairs

    def widest_first(self, tiles: Tiles) -> bool:
        """Whether tiles are sorted by their tokens, so that none ends late. An expert's narrow one then reads
        its weights from memory a second time, which only those of 4 bits can afford."""
        return self.kernel == W4A8 or (tiles.specialised and self.kernel == "packed")

    def per_expert(self, tokens: int) -> float:
        """Mean tokens of an expert that got any."""
        return 1 if self.direct(tokens) else tokens * self.top_k / self.num_experts

    def touched(self, tokens: int) -> float:
        """Experts of this rank that get any, as expected of even routes; or, where it is direct, pairs."""
        if self.direct(tokens):
            return tokens * self.top_k * self.local_experts / self.num_experts
        return self.local_experts * (1 - (1 - self.top_k / self.num_experts) ** tokens)

    def most_tiles(self, tokens: int, width: int) -> int:
        """The most tiles of `width` tokens that a batch can fall into, whatever its routes."""
        pairs = tokens * self.top_k
        return pairs if self.direct(tokens) else min(self.local_experts, pairs) + pairs // width


def choose(shape: LayerShape, table: TileTable, tokens: int, *, one_order: bool = False) -> Tiles:
    """For a batch of `tokens`: the nearest entry of `table`, as a ratio; without one, what `rule` says."""
    if not table:
        return rule(shape, tokens, one_order=one_order)
    after = bisect_left(table, tokens, key=lambda entry: entry[0])
    if after == len(table) or (after and tokens**2 < table[after - 1][0] * table[after][0]):
        after -= 1
    tiles = table[after][1]
    return tiles if holds(shape, tiles, tokens) else rule(shape, tokens, one_order=one_order)


def holds(shape: LayerShape, tiles: Tiles, tokens: int) -> bool:
    """Whether `tiles` are for batches as large as `tokens`."""
    return not tiles.pairs or tokens * shape.top_k <= tile_pairs.MOST_PAIRS


def rule(shape: LayerShape, tokens: int, *, one_order: bool = False) -> Tiles:
    """By the mean number of tokens of an expert. one_order: of a row's sums, whatever the batch."""
    per_expert = shape.per_expert(tokens)
    if shape.unsorted(tokens) and not one_order:
        return _pairs(shape, tokens)
    if shape.kernel == "packed" and per_expert <= FEW_TOKENS and not one_order:
        return _few(shape, tokens)
    if shape.sortable and per_expert > SORTED_ABOVE:
        return SORTED
    for above, special in SPECIAL_ABOVE.get(shape.kernel, ()):
        if per_expert > above:
            return Tiles(special, special)
    return plain_rule(shape, tokens)


def plain_rule(shape: LayerShape, tokens: int) -> Tiles:
    """Among tilings for any number of tokens per expert."""
    tiling = _by_tokens(shape, shape.per_expert(tokens))
    if shape.format == W4A8:
        return Tiles(tiling, tiling)
    tiles = _narrow(shape, tiling, shape.most_tiles(tokens, tiling.tokens))

    def programs(first: Tiling) -> float:
        return shape.touched(tokens) * -(-shape.w13_rows // first.rows)

    if not shape.direct(tokens):
        if shape.format == "fp8" and tiles.tokens in tile_fp8.WIDER:
            wider = Tiling(*tile_fp8.WIDER[tiles.tokens], 1)
            if shape.most_tiles(tokens, wider.tokens) * shape.hidden > tile_fp8.WIDER_PROGRAMS * wider.rows:
                return tiles._replace(second=wider)
        return tiles
    if shape.format == "bf16" and shape.hidden >= _LONG and programs(_DEEP.first) <= _MULTIPROCESSORS:
        return _DEEP
    if tiles.tokens == MIN_TOKENS and programs(tiles.first) < _IDLE_PROGRAMS:
        tiles = tiles._replace(first=tiles.first._replace(rows=64))
    return tiles


def slab_rule(shape: LayerShape, capacity: int) -> Tiles:
    """For slabs of `capacity` rows, of which nobody knows how many are filled."""
    tiling = _by_tokens(shape, min(capacity, SLAB_TOKENS) if shape.format == W4A8 else capacity)
    if shape.format == W4A8:
        return Tiles(tiling, tiling)
    return _narrow(shape, tiling, shape.local_experts * -(-capacity // tiling.tokens))


def refuse(shape: LayerShape, tiles: Tiles) -> str:
    """Why no kernel runs `tiles`; "" if one does."""
    if tiles.first.tokens != tiles.second.tokens:
        return "the two GEMMs share a table of tiles, and differ in their tokens"
    if shape.format == W4A8:
        known = not tiles.sorted and all(_runs_w4a8(tiling) for tiling in tiles[:2])
        return "" if known else "no tiling of W4A8"
    if tiles.sorted:
        return "" if shape.sortable and tiles == SORTED else "the TMA kernel has one tiling, and whole tiles"
    if tiles.pairs:
        return _refuse_pairs(shape, tiles)
    for tiling in tiles[:2]:
        reason = _refuse_one(shape.kernel, tiling)
        if reason:
            return reason
    return ""


def shared_bytes(kernel: str, tiling: Tiling) -> int:
    """Shared memory of one program: STAGES * K_BLOCKS slots of weights, tokens and scales."""
    if tiling.slices:
        return tile_few.shared_bytes(tiling.tokens, tiling.k_blocks, tiling.stages, tiling.slices)
    rows, tokens = tiling.rows, tiling.tokens
    one = {
        "packed": rows // 64 * (2048 + 256) + 128 * tokens,
        "bf16": 128 * (rows + tokens),
        "fp8": 128 * (rows + tokens) + 4 * tokens,
    }[kernel]
    return tiling.stages * tiling.k_blocks * one + _EPILOGUE_BYTES * (tiling.warps == SPECIALISED)


def quantizes(tiling: Tiling, K: int, *, first: bool, direct: bool) -> bool:
    """As `tile_fp8.quantizes`, of a whole multiprocessor."""
    return tile_fp8.quantizes(tiling, K, SHARED_BYTES, first=first, direct=direct)


def _refuse_one(kernel: str, tiling: Tiling) -> str:
    if tiling.slices:
        return _refuse_few(kernel, tiling)
    if tiling.warps == SPECIALISED:
        return _refuse_specialised(kernel, tiling)
    rows, tokens, k_blocks, stages, warps, group, _ = tiling
    if rows not in (64, 128, 256) or tokens not in (8, 16, 32, 64, 128, 256):
        return f"tiles of {rows} weight rows by {tokens} tokens"
    if warps not in (4, 8) or rows < 16 * warps or k_blocks not in (1, 2, 4) or not 3 <= stages <= 8:
        return f"{rows} rows with {warps} warps, {k_blocks} blocks a step and {stages} stages"
    if rows * tokens > 128 * 32 * warps:  # float32 sums, in registers
        return f"{rows} x {tokens} sums in the registers of {warps} warps"
    if shared_bytes(kernel, tiling) > SHARED_BYTES:
        return f"{shared_bytes(kernel, tiling)} bytes of shared memory"
    if not 1 <= group <= 64:
        return f"{group} tiles taking turns"
    if kernel == "packed" and (rows, k_blocks, warps) not in ((64, 1, 4), (128, 1, 4)):
        return f"4-bit weights in {rows} rows with {warps} warps, {k_blocks} blocks a step"
    return ""


def _refuse_specialised(kernel: str, tiling: Tiling) -> str:
    rows, tokens, k_blocks, stages, _, group, _ = tiling
    if kernel not in SPECIAL or k_blocks not in (1, 2) or not 3 <= stages <= 12:
        return f"{kernel} weights with specialised warps, {k_blocks} blocks a step and {stages} stages"
    widths = (64, 128, 144, 160) if kernel == "packed" else (64, 128, 256)
    if rows not in (128, 256) or tokens not in widths or rows * tokens > 256 * 160:
        return f"tiles of {rows} weight rows by {tokens} tokens with specialised warps"
    if shared_bytes(kernel, tiling) > SHARED_BYTES:
        return f"{shared_bytes(kernel, tiling)} bytes of shared memory"
    return "" if 1 <= group <= 64 else f"{group} tiles taking turns"


def _runs_w4a8(tiling: Tiling) -> bool:
    rows, tokens, k_blocks, stages, warps, group, _ = tiling
    sums = rows * tokens <= 256 * 128
    known = rows in (128, 256) and tokens in (16, 32, 64, 128, 256) and (k_blocks, warps) == (1, 4)
    # beside the stages, room for results on their way to memory
    held = stages * (128 * tokens + rows // 64 * (4096 + 256)) + 5 * 1024
    return known and sums and stages >= 3 and held <= SHARED_BYTES and 1 <= group <= 64


def _refuse_few(kernel: str, tiling: Tiling) -> str:
    if kernel != "packed":
        return f"{kernel} weights with columns in slices"
    rows, tokens, k_blocks, stages, warps, group, slices = tiling
    reason = tile_few.refuse(rows, tokens, k_blocks, stages, warps, slices)
    if not reason and shared_bytes(kernel, tiling) > SHARED_BYTES:
        reason = f"{shared_bytes(kernel, tiling)} bytes of shared memory"
    return reason or ("" if 1 <= group <= 64 else f"{group} tiles taking turns")


def _refuse_pairs(shape: LayerShape, tiles: Tiles) -> str:
    if shape.kernel not in tile_pairs.KERNELS:
        return f"{shape.kernel} weights of pairs that are not sorted"
    if tiles.first.group not in (tile_pairs.SOON, tile_pairs.LATE):
        return f"{tiles.first.group} is no time for GEMM2 to start"
    one = tiles.first._replace(group=1)
    for tiling, K in ((one, shape.hidden), (tiles.second, shape.inner)):
        reason = tile_pairs.refuse(tiling)
        if reason:
            return reason
        if tile_pairs.shared_bytes(tiling, K) > SHARED_BYTES:
            return f"{tile_pairs.shared_bytes(tiling, K)} bytes of shared memory"
    return ""


def _pairs(shape: LayerShape, tokens: int) -> Tiles:
    held = shape.top_k * shape.local_experts / shape.num_experts
    strips = shape.touched(tokens) * shape.w13_rows / 16
    shared = shape.local_experts < shape.num_experts
    first = tile_pairs.cut_first(strips, shape.hidden, shape.kernel, shared=shared)
    second = tile_pairs.cut_second(tokens, shape.top_k, held, shape.hidden, shape.inner, shape.kernel)
    return Tiles(Tiling(*first), Tiling(*second))


def _few(shape: LayerShape, tokens: int) -> Tiles:
    touched = shape.touched(tokens)

    def one(N: int, K: int) -> Tiling:
        rows, stages, warps, slices = tile_few.cut(touched * N / 16, MIN_TOKENS, K)
        return Tiling(rows, MIN_TOKENS, tile_few.CHUNK, stages, warps, 1, slices)

    return Tiles(one(shape.w13_rows, shape.hidden), one(shape.hidden, shape.inner))


def _by_tokens(shape: LayerShape, per_expert: float) -> Tiling:
    return next(tiling for bound, tiling in RULES[shape.kernel] if per_expert <= bound)


def _narrow(shape: LayerShape, tiling: Tiling, most_tiles: int) -> Tiles:
    """With half the rows where there would be few programs."""

    def one(rows: int) -> Tiling:
        narrow = tiling.tokens == MIN_TOKENS and most_tiles * -(-rows // 64) < _FEW_PROGRAMS
        return tiling._replace(rows=64) if narrow else tiling

    return Tiles(one(shape.w13_rows), one(shape.hidden))
