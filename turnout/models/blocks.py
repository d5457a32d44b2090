"""The parts of a decoder: embedding, norm, rotary embedding, gated MLP, head.

Weights that read the same input are fused into one matrix when they are loaded, since at one token a
matrix product costs mostly its call. For the same reason what lies between products is one kernel each
(kernels/common/rows.py on CUDA, kernels/cpu/rows.py in float32 on a CPU). Parts that ranks share take the
`Group` of these ranks, which may be only this one; their sizes are then this rank's.

Legend: N tokens of a step, S rows whose logits are wanted, H hidden, V vocabulary, Hq/Hkv query/KV heads,
G = Hq + Hkv, D head size, I intermediate size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from turnout.attention import interface
from turnout.kernels import cpu
from turnout.models.dense import (
    Dense,
    Linear,
    gated_product,
    linear,
    normed_product,
    product,
    product_of_both,
    summed_product,
)
from turnout.models.rope import Rope
from turnout.models.shares import Share
from turnout.moe.in_flight import Finished, InFlight
from turnout.packages import runs_triton
from turnout.parallel.groups import SINGLE_RANK, Group
from turnout.vocabulary import Phase

# By the name of a rotary embedding: cos and sin of the positions of a step (`RotaryEmbedding`).
Rotaries = Mapping[str, tuple[Tensor, Tensor]]


def one_kernel(device: torch.device, dtype: torch.dtype, size: int) -> ModuleType | None:
    """The kernels, one each for what torch composes, for activations of this type; None if there are none.

    size: of what they go through; on a CPU it must be a multiple of 16.
    """
    if runs_triton(device):
        from turnout.kernels.common import rows

        return rows
    if device.type == "cpu" and dtype == torch.float32 and size % 16 == 0 and cpu.available():
        from turnout.kernels.cpu import rows as rows_on_cpu

        return rows_on_cpu
    return None


class Embedding:
    """Rows of a table by token id. weight: [V, H], or the rows of it that are this rank's of `group`."""

    def __init__(self, weight_VH: Tensor, rows: Share, group: Group):
        self._weight_VH, self._rows, self._group = weight_VH, rows, group

    def __call__(self, ids_N: Tensor) -> Tensor:
        if self._group.size == 1:
            return F.embedding(ids_N, self._weight_VH)
        row_N = ids_N - self._rows.start
        elsewhere_N = (row_N < 0) | (row_N >= self._rows.size)
        x_NH = F.embedding(row_N.masked_fill_(elsewhere_N, 0), self._weight_VH)
        return self._group.all_reduce(x_NH.masked_fill_(elsewhere_N[:, None], 0))


class Head:
    """Logits of the whole vocabulary. weight: [V, H], or counts[rank] rows of it on each rank of `group`."""

    def __init__(self, weight_VH: Tensor, counts: Sequence[int], group: Group, linear: Linear):
        self._weight_VH, self._counts, self._group = weight_VH, counts, group
        self._linear = linear

    def __call__(self, hidden_SH: Tensor) -> Tensor:
        """float32 [S, V]."""
        return self._narrow(hidden_SH).float().contiguous()

    def best(self, hidden_SH: Tensor, logits_SV: Tensor) -> Tensor:
        """See `interface.Model.best`."""
        from turnout.kernels.common.best_token import widen_and_choose

        return widen_and_choose(self._narrow(hidden_SH), logits_SV)

    def _narrow(self, hidden_SH: Tensor) -> Tensor:
        """Logits [S, V] in the type of activations."""
        if self._group.size == 1:
            return self._linear(hidden_SH, self._weight_VH)
        logits_VS = self._linear(hidden_SH, self._weight_VH).T
        return self._group.all_gather(logits_VS, self._counts).T


class Norm:
    """RMS norm over the last dimension, x / sqrt(mean(x^2) + eps) * weight, computed in float32.

    weight: [K], or [..., K] where other dimensions have weights of their own; float32 or of the type of
    activations, which is `dtype`, or the weight's if None. Torch composes `rms_norm` of many small calls on a
    CPU. There, with |x| the Euclidean norm, weight sqrt(K) x / hypot(|x|,
    sqrt(K eps)) is the same in less than half the time.
    """

    def __init__(self, weight: Tensor, eps: float, dtype: torch.dtype | None = None):
        K = weight.shape[-1]
        self.weight, self.eps, self._shape = weight, eps, (K,)
        self._fused = one_kernel(weight.device, dtype or weight.dtype, K) if weight.dim() == 1 else None
        self._composed = weight.device.type == "cpu"
        self._scaled = weight.float() * math.sqrt(K)
        self._floor = torch.tensor(math.sqrt(K * eps), device=weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        if self._composed:
            length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
            return (x * self._scaled).div_(length.hypot_(self._floor)).to(x.dtype)
        if self.weight.dtype != x.dtype:
            return (F.rms_norm(x.float(), self._shape, eps=self.eps) * self.weight).to(x.dtype)
        if self.weight.dim() == 1:
            return F.rms_norm(x, self._shape, self.weight, self.eps)
        return F.rms_norm(x, self._shape, eps=self.eps) * self.weight

    @property
    def on_cpu(self) -> bool:
        """Whether it is a kernel of float32 rows on a CPU."""
        return self._fused is not None and self._composed

    @property
    def adds_parts(self) -> bool:
        """Whether a delta may come in parts of any 16- or 32-bit type."""
        return self._fused is not None and not self._composed

    def of_sum(self, x_NH: Tensor, delta_NH: Tensor | None) -> tuple[Tensor, Tensor]:
        """(x + delta, its norm); x [N, H] itself without a delta, which may come in parts [P, N, H]."""
        if self._fused:
            normed: tuple[Tensor, Tensor] = self._fused.norm(x_NH, self.weight, self.eps, delta_NH)
            return normed
        total_NH = x_NH if delta_NH is None else x_NH + delta_NH
        return total_NH, self(total_NH)

    def product(
        self, x_NH: Tensor, delta: Tensor | None, multiply: Linear, weight_MH: Dense
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """`of_sum`, and parts [P, N, M] of its product, in one launch; None where there is none for that."""
        if self.weight.dim() != 1:
            return None
        return normed_product(multiply, x_NH, delta, self.weight, self.eps, weight_MH)


class RotaryEmbedding:
    """Turns the positions of a step into what `rotate` needs, once per step for all layers.

    Computed rather than looked up: a table of 256 k positions takes 128 MB and saves 0.1 % of a step.
    """

    def __init__(self, rope: Rope, *, device: torch.device, dtype: torch.dtype):
        exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
        self._frequencies = rope.adjust(1.0 / rope.theta**exponents).to(device)
        # Of each dimension, in the order of a head; pairs that are not rotated have an angle of 0.
        still = (rope.head_dim - rope.rotary_dim) // 2
        self._frequencies_D = F.pad(self._frequencies, (0, still)).repeat(2)
        scaling = F.pad(torch.full_like(self._frequencies, rope.scaling), (0, still), value=1.0)
        self._scaling_D, self._signs_D = scaling.repeat(2), torch.cat((-scaling, scaling))
        self._scaled, self._dtype = rope.scaling != 1, dtype
        self._by_kernel = runs_triton(device)

    def __call__(self, positions_N: Tensor) -> tuple[Tensor, Tensor]:
        """int64 [N] -> (cos, sin), each [N, 1, D]; sin carries the sign of the rotation."""
        if self._by_kernel:
            from turnout.kernels.common.rows import angles

            of_pairs = self._frequencies_D, self._scaling_D, self._signs_D
            cos_ND, sin_ND = angles(positions_N, *of_pairs, self._dtype)
            return cos_ND[:, None], sin_ND[:, None]
        angles_N1D = positions_N.to(torch.float32)[:, None, None] * self._frequencies_D
        cos_N1D, sin_N1D = angles_N1D.cos(), angles_N1D.sin().mul_(self._signs_D)
        if self._scaled:
            cos_N1D.mul_(self._scaling_D)
        return cos_N1D.to(self._dtype), sin_N1D.to(self._dtype)


def rotate(x_NGD: Tensor, cos_N1D: Tensor, sin_N1D: Tensor) -> Tensor:
    """Rotate the pairs (d, d + D/2) of every head by the angles of its token."""
    swapped_NGD = x_NGD.roll(x_NGD.shape[-1] // 2, -1)
    return torch.addcmul(x_NGD * cos_N1D, swapped_NGD, sin_N1D)


class Mixer(Protocol):
    """What lets a token see those before it: attention, or a recurrent layer."""

    def __call__(self, x_NH: Tensor, rotaries: Rotaries, attention: interface.Attention, /) -> Tensor:
        """[N, H] to [N, H], or to parts [P, N, H] of it for a norm that adds them up."""
        ...

    def of_sum(
        self,
        norm: Norm,
        x_NH: Tensor,
        delta: Tensor | None,
        rotaries: Rotaries,
        attention: interface.Attention,
    ) -> tuple[Tensor, Tensor]:
        """(x + delta, a call on its norm)."""
        total_NH, normed_NH = norm.of_sum(x_NH, delta)
        return total_NH, self(normed_NH, rotaries, attention)


class MLP(Protocol):
    """What follows attention: an MoE layer, or a dense MLP, which needs only x.

    phase, tokens and real are the step's (`interface.Step`); logits and token_ids as of `MoELayer`.
    """

    def __call__(
        self,
        x_NH: Tensor,
        phase: Phase,
        tokens: Sequence[int] | None,
        real_N: Tensor | None,
        logits: Tensor | None = None,
        token_ids_N: Tensor | None = None,
        /,
    ) -> Tensor:
        """[N, H] to [N, H]."""
        ...

    def begin(
        self,
        x_NH: Tensor,
        phase: Phase,
        tokens: Sequence[int] | None,
        real_N: Tensor | None,
        token_ids_N: Tensor | None = None,
        /,
    ) -> InFlight:
        """A call in stages, which lets those of two micro-batches overlap."""
        ...

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
        total_NH, normed_NH = norm.of_sum(x_NH, delta)
        return total_NH, self(normed_NH, phase, tokens, real_N)


class GatedMLP(MLP):
    """down(silu(gate(x)) * up(x)). gate_up: [2I, H], gate rows first; down: [H, I].

    group: the ranks whose results are summed, each having a share of I. limit: gate is at most this, up is at
    most as large either way; None: they are as they come. token_gate: [1, H], of a number of each token whose
    sigmoid scales its result; it is whole on each rank, as it scales each part of the sum.
    """

    def __init__(
        self,
        gate_up: Dense,
        down: Dense,
        group: Group = SINGLE_RANK.attention_tp,
        linear: Linear = linear,
        limit: float | None = None,
        token_gate: Tensor | None = None,
    ):
        self._inner, self._token_gate = len(gate_up) // 2, token_gate
        self._rows = one_kernel(gate_up.device, gate_up.dtype, self._inner)
        self._on_cuda = self._rows is not None and gate_up.device.type == "cuda"
        # One product gives the token's number too; rows of zeros keep those of its result aligned.
        self._gate_rows: Tensor | None = None
        if self._on_cuda and token_gate is not None:
            self._gate_rows = torch.cat((token_gate, token_gate.new_zeros(15, token_gate.shape[1])))
        self._joined = self._gate_rows is not None and isinstance(gate_up, Tensor)
        if self._gate_rows is not None and isinstance(gate_up, Tensor):
            gate_up = torch.cat((gate_up, self._gate_rows))
        self._gate_up, self._down, self._group, self._linear = gate_up, down, group, linear
        self._limit = limit

    def __call__(self, x_NH: Tensor, *step: object) -> Tensor:
        """[N, H] to [N, H], or to float32 parts [P, N, H] where a kernel will add them up (`dense.product`).
        step: for the arguments of an MoE layer, which is called in the same way."""
        if self._rows and self._on_cuda:
            gate_up, token = self._products(x_NH)
            h_NI = self._rows.gate(gate_up, x_NH.dtype, self._limit, self._inner, token)
        else:
            gate_NI, up_NI = self._linear(x_NH, self._gate_up).chunk(2, dim=-1)
            if self._limit is not None:
                gate_NI, up_NI = gate_NI.clamp(max=self._limit), up_NI.clamp(-self._limit, self._limit)
            h_NI = F.silu(gate_NI) * up_NI
            if self._token_gate is not None:
                h_NI = h_NI * torch.sigmoid(self._linear(x_NH, self._token_gate))
        return summed_product(self._linear, h_NI, self._down, None, self._group)

    def begin(self, x_NH: Tensor, *step: object) -> Finished:
        """A call, where an MoE layer begins to exchange tokens."""
        return Finished(self(x_NH))

    @property
    def plain(self) -> tuple[Tensor, Tensor, Tensor | None] | None:
        """See `PlainExpert`."""
        gate_up, down = self._gate_up, self._down
        whole = self._group.size == 1 and self._limit is None and self._linear is linear
        if not whole or not isinstance(gate_up, Tensor) or not isinstance(down, Tensor):
            return None
        return gate_up, down, self._token_gate

    @property
    def adds_row(self) -> bool:
        """Whether `begin_row` may be called: it has a token gate, and its weights are on a GPU."""
        if not self._on_cuda or self._token_gate is None or self._limit is not None or self._group.size > 1:
            return False
        from turnout.kernels.common.gated_row import width

        outputs, dtype = len(self._down), self._token_gate.dtype
        return self._linear is linear and width(self._inner, outputs, dtype) > 0

    def begin_row(self, x_1H: Tensor) -> Callable[[Tensor], Tensor]:
        """Begin a call on one row. What is returned adds it to a row [1, H], and gives float32 parts
        [P, 1, H] of the sum."""
        gate_up, token = self._products(x_1H)
        assert token is not None, "it has a token gate"

        def added(more_1H: Tensor) -> Tensor:
            return gated_product(gate_up, token, self._down, more_1H)

        return added

    def _products(self, x_NH: Tensor) -> tuple[Tensor, Tensor | None]:
        """On CUDA: what is gated, gate first, and the numbers of tokens; or parts of them."""
        both = None
        if self._joined:
            both = product(self._linear, x_NH, self._gate_up, None)
        elif self._gate_rows is not None:
            both = product_of_both(self._linear, x_NH, self._gate_up, self._gate_rows)
        if both is not None:
            return both, both[..., 2 * self._inner :][..., :1]
        gate_up, token = product(self._linear, x_NH, self._gate_up, None), None
        if self._token_gate is not None:
            token = product(self._linear, x_NH, self._token_gate, None)
        return gate_up, token
