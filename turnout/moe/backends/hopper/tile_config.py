"""What the tile configurations of all Hopper kernels have in common.

A kernel is a subclass of `TileConfig`, in a file of kernels/, which owns all that is known of it: what its
rule takes, what is worth timing, what it refuses, its shared memory and its launch.

No torch here: plans hold these values. Legend: K columns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self, TypeVar

import msgspec

from turnout.moe.backends.hopper import launch
from turnout.moe.backends.hopper.launch import Batch, Gemm
from turnout.moe.backends.hopper.layer_shape import LayerShape
from turnout.parallel.hardware import PRESETS

MULTIPROCESSORS = PRESETS["h200"].multiprocessors  # of the device that rules and bounds were measured on
SHARED_BYTES = 227 * 1024  # of a multiprocessor, for one program
MIN_TOKENS = 8  # the smallest tile of the tensor cores
MOST_GROUP = 64


class TileConfig(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag_field="kernel"
):
    """How a kernel cuts one GEMM: tiles of `block_n` weight rows by `block_m` tokens of one expert.

    block_k: columns of one step. num_stages: steps whose operands have room in shared memory. group_m: tiles
    of tokens that take turns with the same weights, to find them in the L2 cache. Subclasses name themselves
    by `tag`, which is what tables on disk say.
    """

    block_n: int
    block_m: int
    block_k: int
    num_stages: int
    num_warps: int
    group_m: int = 1

    weights: ClassVar[tuple[str, ...]]  # as `LayerShape.weights`
    most_pairs: ClassVar[float] = math.inf  # of a batch
    batch_invariant: ClassVar[bool] = True  # adds a row's products in the same order as all others that are
    persistent: ClassVar[bool] = False  # as many programs as multiprocessors, each of which takes many tiles
    sorts_rows: ClassVar[bool] = False  # multiplies rows that lie in the order of experts
    adds_pairs: ClassVar[bool] = False  # GEMM2 adds up a token's pairs, and nothing is left to do
    leaves_pairs: ClassVar[bool] = True  # GEMM2 leaves a row for each pair, in the order of pairs

    @property
    def kernel(self) -> str:
        return str(self.__struct_config__.tag)

    @classmethod
    def takes(cls, shape: LayerShape) -> bool:
        """Whether the kernel has configurations for `shape`."""
        return shape.weights in cls.weights

    @classmethod
    def rule(cls, shape: LayerShape, tokens: int) -> LayerTiles | None:
        """For a batch of `tokens`; None if another kernel is better."""
        return None

    @classmethod
    def batched_experts_rule(cls, shape: LayerShape, capacity: int) -> LayerTiles | None:
        """For `capacity` rows per expert, of which an unknown number is filled; None if it takes none."""
        return None

    @classmethod
    def choices(cls, shape: LayerShape, tokens: int, ruled: LayerTiles) -> list[Choices]:
        """What to time for batches of `tokens`, where the rule takes `ruled`."""
        return []

    def refusal(self, shape: LayerShape, *, first: bool) -> str:
        """Why the kernel cannot run GEMM1 (`first`) or GEMM2 of `shape` like this; "" if it can."""
        if not self.takes(shape):
            return f"kernel {self.kernel} does not take {shape.format} weights of these sizes"
        reason = self.own_refusal(shape)
        if reason or not 1 <= self.group_m <= MOST_GROUP:
            return reason or f"group_m {self.group_m}"
        held = self.shared_bytes(shape, first=first)
        return f"{held} bytes of shared memory" if held > SHARED_BYTES else ""

    def own_refusal(self, shape: LayerShape) -> str:
        """The same of what only this kernel's code limits."""
        raise NotImplementedError

    def shared_bytes(self, shape: LayerShape, *, first: bool) -> int:
        """Of one program."""
        raise NotImplementedError

    def chooses(self, shape: LayerShape) -> bool:
        """Whether either GEMM takes a `LateChoice`, and chooses one token's experts."""
        return False

    def unsorted(self, shape: LayerShape, tokens: int) -> bool:
        """Whether it multiplies the pairs of a batch of `tokens` as they come, each as a tile of its own."""
        return False

    def widest_first(self, shape: LayerShape) -> bool:
        """Whether tiles are sorted by their tokens, so that none ends late. An expert's narrow one then reads
        its weights from memory a second time, which only those of 4 bits can afford."""
        return False

    def sort(self, batch: Batch, *, widest_first: bool) -> None:
        """Launch what makes the table of tiles in `batch.space`, before GEMM1."""
        launch.sort_pairs(batch, self.block_m, widest_first=widest_first, places=self.sorts_rows)

    def launch(self, g: Gemm) -> None:
        raise NotImplementedError

    def sum(self, batch: Batch) -> None:
        """Launch the sum over each token's pairs, after GEMM2."""
        launch.sum_pairs(batch)

    def with_rows(self, block_n: int) -> Self:
        return msgspec.structs.replace(self, block_n=block_n)


class LayerTiles(NamedTuple):
    """Both GEMMs of a layer. They share one table of tiles, hence `block_m`."""

    first: TileConfig
    second: TileConfig

    @property
    def block_m(self) -> int:
        return self.first.block_m

    def unsorted(self, shape: LayerShape, tokens: int) -> bool:
        return all(config.unsorted(shape, tokens) for config in self)

    def widest_first(self, shape: LayerShape) -> bool:
        return any(config.widest_first(shape) for config in self)


TileTable = tuple[tuple[int, LayerTiles], ...]  # tokens of a batch, ascending, and what was best there


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What to time for both GEMMs at one width of tiles, the most promising first."""

    first: tuple[TileConfig, ...]
    second: tuple[TileConfig, ...]

    @classmethod
    def same(cls, config: TileConfig) -> Choices:
        """One configuration for both."""
        return cls(first=(config,), second=(config,))


C = TypeVar("C", bound=TileConfig)
# Mean tokens of an expert, ascending, up to which each is best.
Rules = tuple[tuple[float, C], ...]


def by_mean_tokens(rules: Rules[C], per_expert: float) -> C:
    return next(config for most, config in rules if per_expert <= most)


def chunks(K: int, split_k: int, block_k: int) -> int:
    """Turns of a warp's loop where `split_k` warps share K columns."""
    return math.ceil(math.ceil(K / 64 / split_k) / (block_k // 64))
