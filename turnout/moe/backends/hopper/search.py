"""Which tilings are worth timing: all that kernels run, pruned by a model of the hardware.

The model takes a grouped GEMM as five streams that overlap, each with what an H200 was seen to reach in these
kernels (docs/performance.md), and adds the depth of a program's own loop, which alone counts where programs
are few. It says which tilings cannot be fast, not which is fastest: within a factor of two it is right, and
what it keeps is timed (autotune.py).

No torch here. Legend: T tokens, N weight rows, K columns, n tokens of one expert.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from itertools import product

from turnout.moe.backends.hopper import tile_few, tile_fp8, tile_pairs
from turnout.moe.backends.hopper.tile_config import (
    FEW_TOKENS,
    MIN_TOKENS,
    RULES,
    SHARED_BYTES,
    SORTED,
    SPECIAL,
    W4A8,
    LayerShape,
    Tiles,
    Tiling,
    plain_rule,
    refuse,
    rule,
    shared_bytes,
)

MULTIPROCESSORS = 132
MEMORY_BPUS = 4.2e6  # bytes per us
L2_BPUS = 5.5e6
PRODUCTS_PUS = {"packed": 660e6, "bf16": 750e6, "fp8": 1100e6}  # operations per us
DECODED_PUS = 12.9e6  # 4-bit weights: 2.3 instructions each on 132 x 128 lanes at 1.75 GHz
LATENCY_US = 0.9  # of a load, under load
STEP_US = 0.12  # of a turn of the loop: a barrier, a product, its wait
START_US = 1.5
REGISTERS = 65536
KEPT_WIDTHS, KEPT_TILINGS, KEPT_ALIKE, WITHIN = 2, 5, 2, 1.7  # alike: of the same rows and warps
WEIGHT_BYTES = {"bf16": 2, "fp8": 1, "mxfp4": 0.53, "nvfp4": 0.5625}


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What to time for both GEMMs at one width of tiles, the most promising first."""

    first: tuple[Tiling, ...]
    second: tuple[Tiling, ...]


def candidates(shape: LayerShape, tokens: int) -> list[Choices]:
    """For batches of `tokens`: by width, the most promising first; what the rule says is among them. The W4A8
    kernel has few enough tilings to time them all."""
    said = rule(shape, tokens)
    if shape.kernel == W4A8:
        near = [tiling for _, tiling in RULES[W4A8] if 0.5 <= tiling.tokens / said.tokens <= 2]
        return [Choices(first=(tiling,), second=(tiling,)) for tiling in near]
    if shape.kernel == "fp8":
        return _fp8_choices(shape, tokens)
    plain = plain_rule(shape, tokens) if said.specialised or said.pairs else said
    by_width: dict[int, list[tuple[float, Tiling]]] = {}
    found: list[tuple[float, Choices]] = []
    for tiling in _possible(shape):
        by_width.setdefault(tiling.tokens, []).append((0.0, tiling))
    for width, entries in by_width.items():
        tilings = [tiling for _, tiling in entries]
        own = (plain.first, plain.second) if plain.tokens == width and not plain.sorted else (None, None)
        first_us, first = _best(shape, tokens, tilings, shape.w13_rows, shape.hidden, own[0])
        second_us, second = _best(shape, tokens, tilings, shape.hidden, shape.inner, own[1])
        found.append((first_us + second_us, Choices(first=first, second=second)))
    found.sort(key=lambda entry: entry[0])
    kept = [entry for entry in found if entry[0] <= WITHIN * found[0][0]][:KEPT_WIDTHS]
    kept += [entry for entry in found if entry[1].first[0].tokens == plain.tokens and entry not in kept]
    special = [t for t in SPECIAL.get(shape.kernel, ()) if 4 * shape.per_expert(tokens) > t.tokens]
    choices = [Choices(first=(tiling,), second=(tiling,)) for tiling in special]
    choices += [choice for _, choice in kept]
    if shape.kernel == "packed" and shape.per_expert(tokens) <= FEW_TOKENS and not said.pairs:
        choices.insert(0, _few_choices(said, shape))
    if shape.kernel in tile_pairs.KERNELS and tokens * shape.top_k <= tile_pairs.MOST_PAIRS:
        choices.insert(0, _pair_choices(said, shape))
    return choices


def _fp8_choices(shape: LayerShape, tokens: int) -> list[Choices]:
    """What small tiles are fast is known, whatever the model says (tile_fp8.py), one is for the TMA."""
    plain = plain_rule(shape, tokens)

    def those(own: Tiling, cuts: tuple[tile_fp8.Cut, ...]) -> tuple[Tiling, ...]:
        found = [Tiling(*cut, 1) for cut in cuts]
        return tuple(dict.fromkeys([own, *found] if own.tokens == found[0].tokens else found))

    found = [
        Choices(first=those(plain.first, first), second=those(plain.second, second))
        for first, second in tile_fp8.choices(plain.tokens, direct=shape.direct(tokens))
    ]
    if shape.sortable and shape.per_expert(tokens) > 8:
        found.append(Choices(first=(SORTED.first,), second=(SORTED.second,)))
    return found


def _pair_choices(said: Tiles, shape: LayerShape) -> Choices:
    """For so few pairs that none need be sorted."""
    held = shape.top_k * shape.local_experts / shape.num_experts

    def those(own: Tiling, cuts: list[tile_pairs.Cut]) -> tuple[Tiling, ...]:
        found = [own] if said.pairs else []
        return tuple(dict.fromkeys(found + [Tiling(*cut) for cut in cuts]))

    first = those(said.first, tile_pairs.first_choices(shape.kernel))
    second = those(said.second, tile_pairs.second_choices(shape.top_k, held, shape.kernel))
    return Choices(
        first=tuple(t for t in first if not refuse(shape, Tiles(t, second[0]))),
        second=tuple(t for t in second if not refuse(shape, Tiles(first[0], t))),
    )


def _few_choices(said: Tiles, shape: LayerShape) -> Choices:
    """For few tokens per expert: what may be best at any number of programs is few enough to time it all."""

    def one(K: int, own: Tiling) -> tuple[Tiling, ...]:
        found = [own] if own.slices else []
        for rows, warps, slices in ((64, 4, 1), (128, 4, 1), (64, 8, 2)):
            whole = tile_few.chunks(K, slices, tile_few.CHUNK)
            stages = whole if 2 * MIN_TOKENS * K <= tile_few.WHOLE_BYTES and slices > 1 else tile_few.STAGES
            found.append(Tiling(rows, MIN_TOKENS, tile_few.CHUNK, max(2, stages), warps, 1, slices))
        return tuple(t for t in dict.fromkeys(found) if not refuse(shape, Tiles(t, t)))

    return Choices(first=one(shape.hidden, said.first), second=one(shape.inner, said.second))


def as_tiles(first: Tiling, second: Tiling) -> Tiles:
    """The TMA kernel's tiling is no other kernel's."""
    return SORTED if first == SORTED.first else Tiles(first, second)


def modelled_us(shape: LayerShape, tiling: Tiling, tokens: int, N: int, K: int) -> float:
    """About what one GEMM takes, uniformly routed."""
    touched, tiles = _tiles(shape, tokens, tiling.tokens)
    programs = max(1.0, tiles * -(-N // tiling.rows))
    resident = _resident(shape.kernel, tiling)
    weight = WEIGHT_BYTES[shape.format]
    read = programs * K * (tiling.rows * weight + tiling.tokens * (1 if shape.format == "fp8" else 2))
    together = min(programs, MULTIPROCESSORS * resident)
    block = 128 if shape.format == "fp8" else 64
    step_bytes = block * tiling.k_blocks * (tiling.rows * weight + tiling.tokens)
    in_flight = together * (tiling.stages - 2) * step_bytes / LATENCY_US
    operations = 2.0 * programs * tiling.rows * tiling.tokens * K
    waves = math.ceil(programs / (MULTIPROCESSORS * resident))
    even = waves * MULTIPROCESSORS * resident / programs if programs > MULTIPROCESSORS else 1.0
    steps = math.ceil(K / block / tiling.k_blocks)
    streams = (
        touched * N * K * weight / MEMORY_BPUS,
        read / L2_BPUS,
        read / in_flight,
        even * operations / PRODUCTS_PUS[shape.kernel],
        even * programs * tiling.rows * K / DECODED_PUS if shape.kernel == "packed" else 0.0,
        waves * (START_US + steps * STEP_US * (1 + 0.5 * (tiling.k_blocks - 1))),
    )
    # A program alone on its multiprocessor decodes, waits and multiplies by turns.
    return sum(stream**4 for stream in streams) ** 0.25 * (1 + 0.4 / resident)


def _possible(shape: LayerShape) -> list[Tiling]:
    """All that this kernel runs; sharing weights in turn matters only to tall stacks of tiles."""
    axes = product((64, 128, 256), (8, 16, 32, 64, 128, 256), (1, 2), (3, 4, 5, 6), (4, 8))
    found = [
        Tiling(rows, tokens, k_blocks, stages, warps, 8 if tokens >= 64 else 1)
        for rows, tokens, k_blocks, stages, warps in axes
    ]
    found += [tiling._replace(group=1) for tiling in found if tiling.group > 1]
    found += [tiling for _, tiling in RULES[shape.kernel]]
    return [tiling for tiling in dict.fromkeys(found) if not refuse(shape, Tiles(tiling, tiling))]


def _best(
    shape: LayerShape, tokens: int, tilings: list[Tiling], N: int, K: int, own: Tiling | None
) -> tuple[float, tuple[Tiling, ...]]:
    """The modelled time of the best, and those near it; `own` is always one of them."""
    timed = sorted((modelled_us(shape, tiling, tokens, N, K), tiling) for tiling in tilings)
    best, kept, alike = timed[0][0], [], Counter[tuple[int, int]]()
    for time, tiling in timed:
        alike[tiling.rows, tiling.warps] += 1
        if time <= WITHIN * best and alike[tiling.rows, tiling.warps] <= KEPT_ALIKE:
            kept.append(tiling)
    kept = kept[:KEPT_TILINGS]
    if own is not None and own not in kept:
        kept.append(own)
    return best, tuple(kept)


def _tiles(shape: LayerShape, tokens: int, width: int) -> tuple[float, float]:
    """Experts of this rank that get a token, and tiles that these fall into, as expected of even routes."""
    if tokens * shape.top_k <= 16:
        pairs = tokens * shape.top_k * shape.local_experts / shape.num_experts
        return pairs, pairs
    chance = shape.top_k / shape.num_experts
    mean, spread = tokens * chance, math.sqrt(tokens * chance * (1 - chance))
    touched = shape.local_experts * (1 - (1 - chance) ** tokens)
    if mean > 100:
        return touched, shape.local_experts * max(1.0, mean / width + 0.5)
    most, tiles, probability = int(mean + 6 * spread) + 2, 0.0, (1 - chance) ** tokens
    for n in range(1, min(most, tokens) + 1):
        probability *= (tokens - n + 1) / n * chance / (1 - chance)
        tiles += probability * -(-n // width)
    return touched, shape.local_experts * tiles


def _resident(kernel: str, tiling: Tiling) -> int:
    """Programs that one multiprocessor holds."""
    threads = 32 * tiling.warps
    others = 48 * tiling.rows // 64 if kernel == "packed" else 64
    registers = threads * min(255, tiling.rows * tiling.tokens // threads + others)
    return max(1, min(SHARED_BYTES // (shared_bytes(kernel, tiling) + 2048), REGISTERS // registers, 16))
