"""The MoE layer as the MLP of a decoder layer, in one kernel with the norm before it where there is one.

Legend: N tokens of a step, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from turnout.models.blocks import MLP, Norm
from turnout.models.dense import linear
from turnout.moe.layer import MoELayer
from turnout.vocabulary import Phase


class MoEBlock(MoELayer, MLP):
    """A `MoELayer` that a decoder layer calls on what precedes its norm.

    On CPUs a compiled kernel may compute norm, router and experts in one call (`MoELayer.of_sum`). On CUDA
    one launch may give the norm and parts of its product by the router's weight (`Norm.product`), and the
    next norm may add up a token's pairs.
    """

    def of_norm(
        self,
        norm: Norm,
        x_NH: Tensor,
        delta: Tensor | None,
        phase: Phase,
        tokens: Sequence[int] | None,
        real_N: Tensor | None,
        /,
    ) -> tuple[Tensor, Tensor]:
        """(x + delta, a call on its norm); delta as of `Norm.of_sum`."""
        if norm.on_cpu:
            done = self.of_sum(x_NH, delta, norm.weight, norm.eps, real_N)
            if done is not None:
                return done
        elif self.adds_parts_by is not None:
            found = norm.product(x_NH, delta, linear, self.adds_parts_by)
            if found is not None:
                x_NH, normed_NH, logits = found
                return x_NH, self(normed_NH, phase, tokens, real_N, logits)
        x_NH, normed_NH = norm.of_sum(x_NH, delta)
        return x_NH, self(normed_NH, phase, tokens, real_N, adds_parts=norm.adds_parts)
