"""The inverse of a layout that only tests undo."""

from __future__ import annotations

from torch import Tensor

from turnout.formats.layouts import BLOCK_ROWS


def deinterleave_up_gate(blocks: Tensor, block: int = BLOCK_ROWS) -> Tensor:
    """The inverse of `layouts.interleave_up_gate`."""
    pairs = blocks.unflatten(-2, (-1, 2, block)).flip(-3)
    return pairs.transpose(-4, -3).flatten(-4, -2)
