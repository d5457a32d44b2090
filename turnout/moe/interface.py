"""What the layer asks of runners and dispatchers: the protocols that a backend implements.

A runner computes the experts' GEMMs. It is chosen by the layouts and formats it declares, turns the canonical
expert weights into its own frozen form once and then maps batches to outputs. A dispatcher brings tokens to
the ranks that hold their experts and sums what comes back. What `combine` needs beyond the runner's output is
in the state that `dispatch` returned with the batch, so several batches may be in flight at once. No backend
knows another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from turnout.formats.experts import ExpertWeights
from turnout.moe.batch import ExpertsBatch, TokensBatch
from turnout.moe.capabilities.capability import DispatcherCapability, RunnerCapability
from turnout.moe.plan import MoEPlan
from turnout.moe.spec import MoESpec, Routing
from turnout.parallel.groups import Groups
from turnout.vocabulary import Format, Phase

T = TypeVar("T")
# gate_up [2 S, H], gate rows first, down [H, S] and token gate [1, H] of a shared expert.
PlainWeights = tuple[Tensor, Tensor, Tensor | None]


class Keep(Protocol):
    """Gives what was made before under the same key, or else makes and keeps it."""

    def __call__(self, key: str, make: Callable[[], T], /) -> T: ...


def prepare_anew(key: str, make: Callable[[], T], /) -> T:
    """A `Keep` that keeps nothing."""
    return make()


class Experts(Protocol):
    """The experts of one layer, as the layer uses them."""

    def prepare(self, experts: ExpertWeights) -> None:
        """Take the weights into this runner's own form. It keeps no reference to what it converted, so
        that the canonical tensors go when the caller drops them."""
        ...

    def update(self, experts: ExpertWeights) -> None:
        """Replace all weights by `experts`, of the same shapes and format, in the same storage: captured
        graphs hold addresses."""
        ...

    def __call__(self, batch: TokensBatch | ExpertsBatch) -> Tensor:
        """tokens: [T, H], weighted and summed over k, of this rank's experts, or parts of it where the
        batch's reader adds them; experts: [E_loc, C, H], unweighted, zero beyond the counts. In the plan's
        compute dtype, parts in any of 16 or 32 bits."""
        ...


class Runner(Experts, Protocol):
    """What a plan may choose: built from plain values; it holds weights only after `prepare`."""

    capability: ClassVar[RunnerCapability]

    def __init__(self, spec: MoESpec, plan: MoEPlan, device: torch.device) -> None: ...

    def same_bits(self, tokens: int) -> range:
        """Sizes of "tokens" batches, around `tokens`, between which a token gets the same bits,
        whatever else is in the batch; empty where nothing is promised. Known after `prepare`."""
        ...


@runtime_checkable
class RoutedExperts(Protocol):
    """A runner that can compute a whole layer of few tokens at once, norm and router included."""

    def with_router(
        self,
        router_weight: Tensor,
        routing: Routing,
        top_k: int,
        counts: Tensor,
        shared: PlainWeights | None = None,
    ) -> LayerInOneCall | None:
        """None where it has no kernel for this. router_weight: [E, H]; counts: int64 [E], grows by the
        choices; shared: of a shared expert whose output is added. Called after `prepare`; what it gives sees
        updates."""
        ...


@runtime_checkable
class ChoosingExperts(Protocol):
    """A runner whose kernels may choose one token's experts themselves."""

    def chooses(self) -> bool:
        """Whether a batch of one token may come with a `LateChoice`."""
        ...


@runtime_checkable
class PlainExpert(Protocol):
    """A shared expert that may be no more than its weights."""

    @property
    def plain(self) -> PlainWeights | None:
        """Of down(silu(gate(x)) * up(x)), scaled by the sigmoid of the token gate, if there is one. None: it
        has to be called."""
        ...


@runtime_checkable
class RowExpert(Protocol):
    """A shared expert that adds itself to what routed ones gave a row. adds_row: whether it does."""

    @property
    def adds_row(self) -> bool: ...

    def begin_row(self, x_1H: Tensor) -> Callable[[Tensor], Tensor]:
        """Begin with a row. What is returned adds the rest to a row [1, H]: float32 parts [P, 1, H]."""
        ...


class LayerInOneCall(Protocol):
    def __call__(
        self, x_NH: Tensor, delta_NH: Tensor | None, gain_H: Tensor, eps: float
    ) -> tuple[Tensor, Tensor] | None:
        """(x + delta, the layer's output for its RMS norm times gain), [N, H]; None for a step that is better
        computed in several calls."""
        ...


@dataclass(frozen=True, kw_only=True)
class DispatchSetup:
    """What a dispatcher is made of: a layer in one phase, and this rank among the others.

    input_scale: float32 scalar on the device, `amax / (6 * 448)` of the layer's input over all experts, for
    plans that quantise to NVFP4 before the wire; its value may change in place.
    """

    spec: MoESpec
    plan: MoEPlan
    phase: Phase
    groups: Groups
    device: torch.device
    input_scale: Tensor | None = None

    @property
    def wire_format(self) -> Format:
        """Of dispatched hidden states."""
        return self.plan.phase(self.phase).wire_format

    @property
    def combine_format(self) -> Format:
        """Of results on their way back."""
        return self.plan.phase(self.phase).combine_format

    @property
    def dtype(self) -> torch.dtype:
        """That of hidden states."""
        return getattr(torch, self.plan.compute_dtype)


class Dispatcher(Protocol):
    """Built once per layer and phase; every rank calls it for every batch, with tokens or without."""

    capability: ClassVar[DispatcherCapability]

    def __init__(self, setup: DispatchSetup) -> None: ...

    def dispatch(
        self, x_TH: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor, tokens: Sequence[int]
    ) -> tuple[TokensBatch | ExpertsBatch, Any]:
        """This rank's tokens to the batch its runner sees, and the state for `combine`.

        tokens: how many each data-parallel rank brings, T being this one's.
        """
        ...

    def combine(self, out: Tensor, state: Any) -> Tensor:
        """The runner's output for that batch to [T, H] of this rank's tokens."""
        ...
