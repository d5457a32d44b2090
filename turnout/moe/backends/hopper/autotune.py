"""Which tile configurations are fastest for a layer, by measurement: the tables of tuning_tables.py.

For each batch size the candidates of kernels/ are timed as whole layers, in CUDA graphs over several
copies of the weights, so that no copy stays in the L2 cache. The GEMMs are tuned one after the other: the
first with the second as the rule has it, then the second with the best first. Last, the best and the rule's
take turns, and the rule's stays unless it is beaten by more than the noise. Batch sizes in between get the
better of their neighbours' choices, or the rule's.

Legend: T tokens.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import Tensor

from turnout.moe.backends.hopper.kernels import AnyConfig, candidates, holds, rule
from turnout.moe.backends.hopper.layer_shape import LayerShape
from turnout.moe.backends.hopper.tile_config import LayerTiles, TileTable
from turnout.moe.backends.hopper.tuning_tables import Entry
from turnout.moe.batch import ExpertsBatch, TokensBatch

if TYPE_CHECKING:
    from turnout.kernels.common.compilation import Record

TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384)
BETWEEN = (2, 8, 32, 128, 512, 2048, 8192)
WORTH = 0.985  # of the rule's time
GRAPH_US = 250.0  # a graph of calls lasts about so long at least
REPLAYS, TURNS = 3, 5

Progress = Callable[[int, int], None]
Batches = Callable[[int], Sequence[TokensBatch]]

log = logging.getLogger("turnout.moe")


class Tiled(Protocol):
    """A runner whose tile configurations can be chosen."""

    @property
    def shape(self) -> LayerShape: ...

    def use_tiles(self, table: TileTable) -> None:
        """Cut by `table` from now on; empty: by rule."""
        ...

    def __call__(self, batch: TokensBatch | ExpertsBatch) -> Tensor: ...


def sizes_up_to(most: int) -> list[int]:
    return [tokens for tokens in TOKENS if tokens <= most] or [most]


def to_compile(runner: Tiled, batches: Batches, most: int) -> list[Record]:
    """The kernels that `tile_times` will ask for and that are not compiled yet; none where Triton's internals
    are not known, so that they are compiled when asked for."""
    from turnout.kernels.common.compilation import can_record, recording

    if not can_record():
        return []
    with recording() as records:
        for tokens in sizes_up_to(most):
            for choices in candidates(runner.shape, tokens):
                pairs = [(first, choices.second[0]) for first in choices.first]
                pairs += [(choices.first[0], second) for second in choices.second]
                for first, second in pairs:
                    runner.use_tiles(((tokens, LayerTiles(first, second)),))
                    runner(batches(tokens)[0])
    return list(records)


def tile_times(runners: Sequence[Tiled], batches: Batches, most: int, progress: Progress) -> list[Entry]:
    """By ascending tokens, up to `most`. runners: the same layer, each with weights of its own; batches: for
    a number of tokens at least one, used in turn. Runners are left with the table that was found."""
    shape, sizes = runners[0].shape, sizes_up_to(most)
    timer = _Timer(runners, batches)
    found: dict[int, Entry] = {}
    for done, tokens in enumerate(sizes):
        progress(done, len(sizes))
        found[tokens] = _tune(timer, shape, tokens)
    for tokens in BETWEEN:
        below, above = (found.get(size) for size in (tokens // 2, 2 * tokens))
        if below is not None and above is not None:
            near = (tiles for tiles in (below.tiles, above.tiles) if holds(shape, tiles, tokens))
            found[tokens] = _settle(timer, shape, tokens, near)
    progress(len(sizes), len(sizes))
    entries = [found[tokens] for tokens in sorted(found)]
    timer.use(tuple((entry.tokens, entry.tiles) for entry in entries))
    return entries


def _tune(timer: _Timer, shape: LayerShape, tokens: int) -> Entry:
    ruled = rule(shape, tokens)
    best, best_us = ruled, timer.time(tokens, ruled)
    for choices in candidates(shape, tokens):
        second = ruled.second if ruled.block_m == choices.second[0].block_m else choices.second[0]
        by_first = {first: timer.time(tokens, LayerTiles(first, second)) for first in choices.first}
        first = min(by_first, key=by_first.__getitem__)
        by_second = {second: by_first[first]} | {
            other: timer.time(tokens, LayerTiles(first, other)) for other in choices.second if other != second
        }
        second = min(by_second, key=by_second.__getitem__)
        if by_second[second] < best_us:
            best, best_us = LayerTiles(first, second), by_second[second]
    return _settle(timer, shape, tokens, (best,))


def _settle(timer: _Timer, shape: LayerShape, tokens: int, found: Iterable[LayerTiles]) -> Entry:
    ruled = rule(shape, tokens)
    times = timer.in_turn(tokens, list(dict.fromkeys((ruled, *found))))
    best = min(times, key=times.__getitem__)
    if times[best] > WORTH * times[ruled]:
        best = ruled
    return Entry(
        tokens=tokens,
        first=cast(AnyConfig, best.first),
        second=cast(AnyConfig, best.second),
        us=round(times[best], 2),
        rule_us=round(times[ruled], 2),
    )


def calls_in_graph(once_us: float, runners: int, batches: int) -> int:
    """How many calls of `once_us` each are timed together: GRAPH_US at least, and all runners alike; of short
    ones all batches alike too, since a rank's few tokens may choose none of its experts, or many.
    """
    turn = math.lcm(runners, batches) if once_us < GRAPH_US else runners
    return turn * max(1, math.ceil(GRAPH_US / once_us / turn))


class _Timer:
    """Times of calls in graphs, by tokens and tiles."""

    def __init__(self, runners: Sequence[Tiled], batches: Batches) -> None:
        self._runners, self._batches = runners, batches

    def use(self, table: TileTable) -> None:
        for runner in self._runners:
            runner.use_tiles(table)

    def time(self, tokens: int, tiles: LayerTiles) -> float:
        """us of a call; infinite if no kernel can be made of `tiles`."""
        from turnout.kernels.common.compilation import FAILURES

        try:
            replay = self._graph(tokens, tiles)
        except FAILURES as error:
            log.info("no kernel for %s: %s", tiles, error)
            return math.inf
        return min(replay() for _ in range(REPLAYS))

    def in_turn(self, tokens: int, choices: Sequence[LayerTiles]) -> dict[LayerTiles, float]:
        """Medians of turns that each had alike."""
        replays = {tiles: self._graph(tokens, tiles) for tiles in choices}
        turns = [{tiles: replay() for tiles, replay in replays.items()} for _ in range(TURNS)]
        return {tiles: statistics.median(turn[tiles] for turn in turns) for tiles in choices}

    def _graph(self, tokens: int, tiles: LayerTiles) -> Callable[[], float]:
        self.use(((tokens, tiles),))
        batches, runners = self._batches(tokens), self._runners
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        runners[0](batches[0])  # compiles
        start.record()
        runners[-1](batches[0])
        end.record()
        end.synchronize()
        once_us = 1e3 * start.elapsed_time(end)
        calls = calls_in_graph(once_us, len(runners), len(batches))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(calls):
                runners[i % len(runners)](batches[i % len(batches)])
        graph.replay()

        def replay() -> float:
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            return 1e3 * start.elapsed_time(end) / calls

        return replay
