"""The decoder that all families share, of parts that models/decoder_weights.py reads.

    x = embed(ids);  per layer: x += attention(norm(x)); x += mlp(norm(x));  logits = head(norm(x))

What is added to x is handed, next to x, to the next norm, which on CUDA adds it too.

An MLP is an MoE layer (with a shared expert where the model has one) or a dense gated MLP; the
expert computation is the planned `MoELayer`'s (models/moe_block.py).

Plain objects rather than `nn.Module`: the weights are frozen, and per-step Python overhead is most of
the time of a small model on a CPU.

Ranks that share requests (attention TP) split heads, dense MLPs and the vocabulary, and sum what they get
wherever the residual stream is added to, so that it is whole, and the same bits, on each of them.

Legend: N tokens of a step, S rows whose logits are wanted, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from turnout.models.blocks import MLP, Embedding, Head, Mixer, Norm, Rotaries, RotaryEmbedding
from turnout.models.dense import Linear
from turnout.models.interface import ModelShape, Step
from turnout.moe.in_flight import InFlight
from turnout.moe.interface import Experts
from turnout.moe.layer import MoELayer

# What is to be added to a residual stream, [N, H], or parts of it, or to several (`streams.Added`).
Delta = Any
# The residual stream of a micro-batch [N, H], and what gives that which is to be added to it.
Flow = tuple[Tensor, Callable[[], Delta]]


class Layer(Protocol):
    """One layer of a decoder. x, delta: a residual [N, H], or several streams of it [N, S, H], and what is to
    be added to them."""

    @property
    def attention(self) -> Mixer: ...
    @property
    def mlp(self) -> MLP: ...

    def __call__(self, x: Tensor, delta: Delta, rotary: Rotaries, step: Step, /) -> tuple[Tensor, Delta]: ...

    def overlapped(
        self, flows: Sequence[Flow], rotaries: Sequence[Rotaries], steps: Sequence[Step]
    ) -> list[Flow]:
        """A call for each of several micro-batches."""
        ...


@dataclass(frozen=True, kw_only=True)
class DecoderLayer:
    """Attention, then an MLP, each on the normed residual stream."""

    attention_norm: Norm
    attention: Mixer
    mlp_norm: Norm
    mlp: MLP

    def __call__(
        self, x_NH: Tensor, delta_NH: Tensor | None, rotary: Rotaries, step: Step
    ) -> tuple[Tensor, Tensor]:
        """The residual stream and what is to be added to it, [N, H] each, to the same after this layer."""
        x_NH, delta_NH = self._attend(x_NH, delta_NH, rotary, step)
        return self.mlp.of_norm(self.mlp_norm, x_NH, delta_NH, step.phase, step.tokens, step.real)

    def _attend(
        self, x_NH: Tensor, delta_NH: Tensor | None, rotary: Rotaries, step: Step
    ) -> tuple[Tensor, Tensor]:
        """The residual stream up to attention, and what that adds."""
        return self.attention.of_sum(self.attention_norm, x_NH, delta_NH, rotary, step.attention)

    def overlapped(
        self, flows: Sequence[Flow], rotaries: Sequence[Rotaries], steps: Sequence[Step]
    ) -> list[Flow]:
        """A call for each of several micro-batches: one computes while another exchanges its tokens."""
        residuals: list[Tensor] = []
        batches: list[InFlight] = []
        for (x_NH, delta), rotary, step in zip(flows, rotaries, steps, strict=True):
            x_NH, normed_NH = self.mlp_norm.of_sum(*self._attend(x_NH, delta(), rotary, step))
            residuals.append(x_NH)
            batches.append(self.mlp.begin(normed_NH, step.phase, step.tokens, step.real))
        for batch in batches:
            batch.compute()
        return [(x_NH, batch.result) for x_NH, batch in zip(residuals, batches, strict=True)]


@dataclass(frozen=True, kw_only=True)
class DraftLayer:
    """A layer on what a token's embedding and the hidden state before it are projected to.

    projection: [H, 2H], the embedding's columns first.
    """

    token_norm: Norm
    hidden_norm: Norm
    projection: Tensor
    multiply: Linear
    layer: DecoderLayer
    norm: Norm

    def __call__(self, token_NH: Tensor, hidden_NH: Tensor, rotary: Rotaries, step: Step) -> Tensor:
        both_N2H = torch.cat((self.token_norm(token_NH), self.hidden_norm(hidden_NH)), dim=-1)
        x_NH, delta_NH = self.layer(self.multiply(both_N2H, self.projection), None, rotary, step)
        return self.norm.of_sum(x_NH, delta_NH)[1]


class Decoder:
    """An `interface.DraftingModel` (with `draft`; else an `interface.Model`): the decoder of one rank."""

    def __init__(
        self,
        shape: ModelShape,
        *,
        embed: Embedding,
        head: Head,
        ropes: Mapping[str, RotaryEmbedding],
        layers: Sequence[Layer],
        moe_layers: Sequence[MoELayer],
        norm: Norm,
        draft: DraftLayer | None = None,
    ):
        """shape: with this rank's heads. ropes: by name, as `AttentionSpec.rope` has it. moe_layers: those
        among `layers` and the draft layer."""
        self.shape, self._embed, self._head, self._ropes = shape, embed, head, ropes
        self._layers, self._moe_layers, self._norm, self._draft = layers, moe_layers, norm, draft
        self.layers_begun = 0

    def forward(self, step: Step) -> Tensor:
        """See `interface.Model.forward`."""
        if step.other is not None:
            return self._forward_overlapped(step, step.other)
        x_NH, delta = self._embed(step.input_ids), None
        rotary = self._rotary(step.positions)
        for layer in self._layers:
            self.layers_begun += 1
            x_NH, delta = layer(x_NH, delta, rotary, step)
        return self._norm.of_sum(x_NH, delta)[1]

    def _forward_overlapped(self, *steps: Step) -> Tensor:
        flows: list[Flow] = [(self._embed(step.input_ids), lambda: None) for step in steps]
        rotaries = [self._rotary(step.positions) for step in steps]
        for layer in self._layers:
            self.layers_begun += 1
            flows = layer.overlapped(flows, rotaries, steps)
        return torch.cat([self._norm.of_sum(x_NH, delta())[1] for x_NH, delta in flows])

    @contextmanager
    def shortened(self) -> Iterator[None]:
        """See `interface.Model.shortened`."""
        layers, kinds = self._layers, dict[Hashable, Layer]()
        for spec, layer in zip(self.shape.attention, layers, strict=False):  # one more, of a draft layer
            kinds.setdefault((spec, type(layer), _kind(layer.attention), _kind(layer.mlp)), layer)
        self._layers = list(kinds.values())
        try:
            yield
        finally:
            self._layers = layers

    def draft(self, step: Step, hidden_NH: Tensor) -> Tensor:
        """See `interface.DraftingModel.draft`."""
        assert self._draft is not None, "the model was loaded without its draft layer"
        self.layers_begun += 1
        return self._draft(self._embed(step.input_ids), hidden_NH, self._rotary(step.positions), step)

    def logits(self, hidden_SH: Tensor) -> Tensor:
        """See `interface.Model.logits`."""
        return self._head(hidden_SH)

    def best(self, hidden_SH: Tensor, logits_SV: Tensor) -> Tensor:
        """See `interface.Model.best`."""
        return self._head.best(hidden_SH, logits_SV)

    @property
    def experts(self) -> list[Experts]:
        """Of every MoE layer."""
        return [layer.experts for layer in self._moe_layers]

    def expert_counts(self) -> list[list[int]]:
        """See `interface.Model.expert_counts`; waits for the device."""
        return torch.stack([layer.expert_counts for layer in self._moe_layers]).tolist()

    def reset_counts(self) -> None:
        """See `interface.Model.reset_counts`."""
        for layer in self._moe_layers:
            layer.reset_counts()

    def _rotary(self, positions_N: Tensor) -> Rotaries:
        return {name: rope(positions_N) for name, rope in self._ropes.items()}


def _kind(part: Mixer | MLP) -> Hashable:
    """The same of parts that hold the same things: their types, those of weights in particular, and what
    experts are like."""
    held = ((name, type(x), getattr(x, "dtype", None)) for name, x in vars(part).items())
    return type(part), part.spec if isinstance(part, MoELayer) else None, *held
