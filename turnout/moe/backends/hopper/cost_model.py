"""Which tile configurations are worth timing: those that a model of the hardware leaves of all that run.

The model takes a grouped GEMM as five streams that overlap, each with what an H200 was seen to reach in these
kernels (docs/notes/hopper-kernels.md), and adds the depth of a program's own loop, which alone counts where
programs are few. It says which configurations cannot be fast, not which is fastest: it is right within a
factor of two, and what it keeps is timed (autotune.py).

No torch here. Legend: T tokens, N weight rows, K columns, n tokens of one expert.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

import msgspec

from turnout.moe.backends.hopper.layer_shape import PACKED, LayerShape
from turnout.moe.backends.hopper.tile_config import (
    MULTIPROCESSORS,
    SHARED_BYTES,
    Choices,
    LayerTiles,
    TileConfig,
)
from turnout.vocabulary import Format

MEMORY_BPUS = 4.2e6  # bytes per us
L2_BPUS = 5.5e6
PRODUCTS_PUS: dict[str, float] = {PACKED: 660e6, Format.BF16: 750e6}  # operations per us
DECODED_PUS = 12.9e6  # 4-bit weights: 2.3 instructions each on 128 lanes of a multiprocessor at 1.75 GHz
LATENCY_US = 0.9  # of a load, under load
STEP_US = 0.12  # of a turn of the loop: a barrier, a product, its wait
START_US = 1.5
REGISTERS = 65536
KEPT_WIDTHS, KEPT_CONFIGS, KEPT_ALIKE, WITHIN = 2, 5, 2, 1.7  # alike: of the same block_n and num_warps
WEIGHT_BYTES: dict[str, float] = {
    Format.BF16: 2,
    Format.MXFP4: 0.53,
    Format.NVFP4: 0.5625,
    Format.INT4: 0.5625,
}


def worth_timing(
    shape: LayerShape, tokens: int, possible: Iterable[TileConfig], own: LayerTiles
) -> list[Choices]:
    """Those of `possible` that may be fast, by block_m, the most promising first; and always `own`."""
    by_width: dict[int, list[TileConfig]] = {}
    for config in dict.fromkeys(possible):
        if not config.refusal(shape, first=True):
            by_width.setdefault(config.block_m, []).append(config)
    found: list[tuple[float, Choices]] = []
    for width, configs in by_width.items():
        first_own, second_own = own if own.block_m == width else (None, None)
        first_us, first = _best(shape, tokens, configs, first_own, first=True)
        second_us, second = _best(shape, tokens, configs, second_own, first=False)
        found.append((first_us + second_us, Choices(first=first, second=second)))
    found.sort(key=lambda entry: entry[0])
    kept = [entry for entry in found if entry[0] <= WITHIN * found[0][0]][:KEPT_WIDTHS]
    kept += [entry for entry in found if entry[1].first[0].block_m == own.block_m and entry not in kept]
    return [choices for _, choices in kept]


def modelled_us(shape: LayerShape, config: TileConfig, tokens: int, *, first: bool) -> float:
    """About what GEMM1 (`first`) or GEMM2 takes, uniformly routed."""
    N, K = shape.rows(first=first), shape.columns(first=first)
    touched, tiles = _tiles(shape, tokens, config.block_m)
    programs = max(1.0, tiles * -(-N // config.block_n))
    resident = _resident(shape, config, first=first)
    at_once = MULTIPROCESSORS * resident
    weight = WEIGHT_BYTES[shape.format]
    read = programs * K * (config.block_n * weight + config.block_m * 2)
    step_bytes = config.block_k * (config.block_n * weight + config.block_m)
    in_flight = min(programs, at_once) * (config.num_stages - 2) * step_bytes / LATENCY_US
    operations = 2.0 * programs * config.block_n * config.block_m * K
    waves = math.ceil(programs / at_once)
    even = waves * at_once / programs if programs > MULTIPROCESSORS else 1.0
    steps = math.ceil(K / config.block_k)
    streams = (
        touched * N * K * weight / MEMORY_BPUS,
        read / L2_BPUS,
        read / in_flight,
        even * operations / PRODUCTS_PUS[shape.weights],
        even * programs * config.block_n * K / DECODED_PUS if shape.weights == PACKED else 0.0,
        waves * (START_US + steps * STEP_US * (1 + 0.5 * (config.block_k // 64 - 1))),
    )
    # A program alone on its multiprocessor decodes, waits and multiplies by turns.
    return sum(stream**4 for stream in streams) ** 0.25 * (1 + 0.4 / resident)


def _best(
    shape: LayerShape, tokens: int, configs: list[TileConfig], own: TileConfig | None, *, first: bool
) -> tuple[float, tuple[TileConfig, ...]]:
    """The modelled time of the best, and those near it; `own` is always one of them."""

    def order(timed: tuple[float, TileConfig]) -> tuple[Any, ...]:
        return timed[0], msgspec.structs.astuple(timed[1])

    timed = sorted(((modelled_us(shape, c, tokens, first=first), c) for c in configs), key=order)
    best, kept, alike = timed[0][0], [], Counter[tuple[int, int]]()
    for time, config in timed:
        alike[config.block_n, config.num_warps] += 1
        if time <= WITHIN * best and alike[config.block_n, config.num_warps] <= KEPT_ALIKE:
            kept.append(config)
    kept = kept[:KEPT_CONFIGS]
    if own is not None and own not in kept:
        kept.append(own)
    return best, tuple(kept)


def _tiles(shape: LayerShape, tokens: int, width: int) -> tuple[float, float]:
    """Experts of this rank that get a token, and tiles that these fall into, as expected of even routes."""
    touched, chance = shape.touched(tokens), shape.top_k / shape.num_experts
    if shape.unsorted(tokens):
        return touched, touched
    if chance == 1:
        return touched, touched * -(-tokens // width)
    mean, spread = tokens * chance, math.sqrt(tokens * chance * (1 - chance))
    if mean > 100:
        return touched, shape.local_experts * max(1.0, mean / width + 0.5)
    most, tiles, probability = int(mean + 6 * spread) + 2, 0.0, (1 - chance) ** tokens
    for n in range(1, min(most, tokens) + 1):
        probability *= (tokens - n + 1) / n * chance / (1 - chance)
        tiles += probability * -(-n // width)
    return touched, shape.local_experts * tiles


def _resident(shape: LayerShape, config: TileConfig, *, first: bool) -> int:
    """Programs that one multiprocessor holds."""
    threads = 32 * config.num_warps
    others = 48 * config.block_n // 64 if shape.weights == PACKED else 64
    registers = threads * min(255, config.block_n * config.block_m // threads + others)
    shared = config.shared_bytes(shape, first=first) + 2048
    return max(1, min(SHARED_BYTES // shared, REGISTERS // registers, 16))
