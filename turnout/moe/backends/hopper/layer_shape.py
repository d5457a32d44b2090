"""What the Hopper kernels ask of a layer's sizes, and what even routes make of a batch there.

No torch here: plans hold these values.
"""

from __future__ import annotations

from dataclasses import dataclass

from turnout.formats.spec import FORMATS
from turnout.moe.spec import RankShape
from turnout.vocabulary import Format

PACKED, W4A8 = "packed", "w4a8"  # 4-bit weights by bf16 activations; MXFP4 weights by FP8 activations
# By `LayerShape.weights`: raise it when tables must be measured again with the kernels that take those.
REVISIONS = {PACKED: 10, Format.BF16: 6, Format.FP8: 3, W4A8: 4}
# The most pairs of a batch that are not sorted, each being a tile of its own; 4-bit weights take less time to
# read twice. And the least part of them that goes to experts which no other pair chose.
UNSORTED_PAIRS, UNSORTED_PAIRS_PACKED = 16, 40
DISTINCT = 0.87


@dataclass(frozen=True, kw_only=True)
class LayerShape(RankShape):
    """One rank's part of a layer, with what its kernels ask of it. `format`: of the weights, or W4A8."""

    @property
    def weights(self) -> str:
        """The form in which kernels take the weights: PACKED, "bf16", "fp8" or W4A8."""
        bits = FORMATS[Format(self.format)].bits if self.format != W4A8 else 0
        return PACKED if bits == 4 else self.format

    def rows(self, *, first: bool) -> int:
        """Weight rows N of GEMM1 (`first`) or GEMM2."""
        return self.w13_rows if first else self.hidden

    def columns(self, *, first: bool) -> int:
        """Columns K of GEMM1 (`first`) or GEMM2."""
        return self.hidden if first else self.inner

    def unsorted(self, tokens: int, distinct: float = DISTINCT) -> bool:
        """Whether pairs are few, and at least the part `distinct` of them goes to experts of its own, as
        expected of even routes: sorting them would cost more than it saves."""
        most = UNSORTED_PAIRS_PACKED if self.weights == PACKED else UNSORTED_PAIRS
        pairs, untouched = tokens * self.top_k, (1 - self.top_k / self.num_experts) ** tokens
        return pairs <= most and self.num_experts * (1 - untouched) >= distinct * pairs

    def per_expert(self, tokens: int) -> float:
        """Mean tokens of an expert that got any."""
        return 1 if self.unsorted(tokens) else tokens * self.top_k / self.num_experts

    def touched(self, tokens: int) -> float:
        """Experts of this rank that get any token, as expected of even routes; where unsorted, pairs."""
        if self.unsorted(tokens):
            return tokens * self.top_k * self.local_experts / self.num_experts
        return self.local_experts * (1 - (1 - self.top_k / self.num_experts) ** tokens)

    def most_tiles(self, tokens: int, block_m: int) -> int:
        """The most tiles of `block_m` tokens that a batch can fall into, whatever its routes."""
        pairs = tokens * self.top_k
        return pairs if self.unsorted(tokens) else min(self.local_experts, pairs) + pairs // block_m
