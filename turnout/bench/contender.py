"""What the layer benchmark times: one of our runners, or a peer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

# x [T, H] and a call's routes, as the contender takes them -> [T, H]
Forward = Callable[[Tensor, Tensor, Tensor], Tensor]
Routes = tuple[Tensor, Tensor]


def as_drawn(ids_TK: Tensor, weights_TK: Tensor) -> Routes:
    return ids_TK, weights_TK


@dataclass(frozen=True, kw_only=True)
class Contender:
    """Something that computes the layer. One forward per set of weights.

    routes: expert ids and weights in the form that `forwards` take, made before anything is timed.
    """

    runner: str
    dtype: str
    forwards: tuple[Forward, ...]
    routes: Callable[[Tensor, Tensor], Routes] = as_drawn
    gathered_bytes: int = 0  # of weights, per token
    peer: bool = False
    refusal: str = ""  # why it is not run
