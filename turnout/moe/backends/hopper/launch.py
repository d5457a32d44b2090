"""What the launches of a layer take: its workspace, a batch of tokens, and one GEMM of it.

No torch here. Legend: T tokens, k top-k, P = T k pairs, H hidden, R rows of x or out (tokens, pairs or rows
per expert), K inner size, N outputs, E local experts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from turnout.kernels.common.sizes import power_of_two
from turnout.moe.backends.hopper.layer_shape import LayerShape
from turnout.moe.spec import Activation

if TYPE_CHECKING:
    from torch import Tensor

    from turnout.moe.backends.hopper.weights import Matrix
    from turnout.moe.batch import LateChoice

COUNT_PAIRS = 4096  # up to so many pairs, one program sorts them


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """An arena's regions (workspace.py) for batches of one layout, flat; empty where the layout has none.

    quantized: e4m3 and float32 scales.
    """

    rows: int  # the most tokens of a batch, or rows per expert
    counts: Tensor
    tiles: Tensor
    order: Tensor
    place: Tensor
    h: Tensor
    y: Tensor
    quantized: tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """At least one token, and where its results go. held: the first local expert, and how many."""

    shape: LayerShape
    space: Workspace
    x_TH: Tensor  # bf16
    ids_TK: Tensor  # int32
    weights_TK: Tensor  # float32
    out_TH: Tensor
    held: tuple[int, int]

    @property
    def at_once(self) -> bool:
        """Whether one program sorts all pairs."""
        return self.ids_TK.numel() <= COUNT_PAIRS

    @property
    def padded_count(self) -> int:
        return power_of_two(self.held[1] + 1)


@dataclass(frozen=True, kw_only=True)
class Gemm:
    """GEMM1 (`first`: with the activation, of tokens' rows) or GEMM2 (times the routing weights) of a batch.

    weights None: of rows by expert, which rows are neither gathered nor scattered. choice: of the one token's
    experts, which table and weights do not hold then. unsorted: the table holds the expert ids of pairs; else
    tiles, at most `most_tiles`, of rows in the order `order` (kernels/hopper/sort.py).
    """

    first: bool
    w: Matrix
    x: Tensor  # bf16 [R, K]
    out: Tensor  # bf16 [R, N]
    columns: int  # N
    table: Tensor
    weights: Tensor | None
    top_k: int
    most_tiles: int
    unsorted: bool
    space: Workspace
    held: tuple[int, int]  # the first local expert, and how many
    activation: Activation
    processors: int
    choice: LateChoice | None = None

    @property
    def order(self) -> Tensor:
        return self.space.order

    @property
    def pairs(self) -> bool:
        return self.weights is not None

    @property
    def any_weights(self) -> Tensor:
        """The routing weights, or something in their place for a kernel that is told to leave them."""
        return self.w.alpha if self.weights is None else self.weights

    @property
    def numbers(self) -> tuple[float, float, float]:
        """alpha, beta and limit of the activation."""
        limit = self.activation.limit
        return self.activation.alpha, self.activation.beta, math.inf if limit is None else limit

    @property
    def kind(self) -> str:
        return str(self.activation.kind) if self.first else "none"


def count_pairs(batch: Batch) -> tuple[int, int, int]:
    """Launch the count of each expert's pairs, where that takes a launch of its own: (pairs of a program,
    programs, warps of each) for the launch that sorts them."""
    from turnout.kernels.hopper import sort

    P = batch.ids_TK.numel()
    block = max(16, power_of_two(P)) if batch.at_once else 1024
    programs = -(-P // block)
    if not batch.at_once:
        sort.count_pairs[(programs,)](
            batch.ids_TK, batch.space.counts, P, *batch.held, block, batch.padded_count, True,
            num_warps=8, launch_pdl=True,
        )  # fmt: skip
    return block, programs, 4 if block <= 256 else 8 if block <= 1024 else 16


def sort_pairs(batch: Batch, block_m: int, *, widest_first: bool, places: bool) -> None:
    """The table of tiles of `block_m` tokens, and pairs by expert. places: also where each pair's row is."""
    from turnout.kernels.hopper import sort

    block, programs, warps = count_pairs(batch)
    space = batch.space
    sort.place_pairs[(programs,)](
        batch.ids_TK, space.counts, space.order, space.place, space.tiles, batch.ids_TK.numel(), *batch.held,
        block_m, programs, block, batch.padded_count, batch.at_once, widest_first, places, True,
        num_warps=warps, launch_pdl=True,
    )  # fmt: skip


def sum_pairs(batch: Batch) -> None:
    from turnout.kernels.hopper import sort

    (T, H), k = batch.out_TH.shape, batch.ids_TK.shape[1]
    block = 1024 if T > 64 else 256
    sort.sum_pairs[(T, -(-H // block))](
        batch.space.y, batch.ids_TK, batch.out_TH, H, H, *batch.held, k, block, True,
        num_warps=4 if block > 256 else 2, launch_pdl=True,
    )  # fmt: skip


def boxes_of(rows: Tensor, box: list[int], *, bits: int) -> Any:
    """A descriptor by which the TMA copies boxes of `rows`, whose values have so many `bits`."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor.from_tensor(rows, box, NVMMASharedLayout(128, bits, 2))
