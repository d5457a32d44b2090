"""Several residual streams in place of one (manifold-constrained hyper-connections, DeepSeek-V4).

    x = sum_j pre_j X_j;  y = block(x);  X_k = post_k y + sum_j M[j, k] X_j

pre, post and M follow from all streams of a token; M is made doubly stochastic by Sinkhorn's iterations. At
first all streams are the token's embedding; behind the last layer they are summed by weights of their own.

Legend: N tokens of a step, S streams, H hidden, C = S (S + 2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from turnout.kernels import cpu
from turnout.models.blocks import MLP, Embedding, Mixer, Norm, Rotaries
from turnout.models.decoder import Flow
from turnout.models.interface import Step
from turnout.models.spec import StreamSpec
from turnout.moe.in_flight import InFlight
from turnout.packages import runs_triton

# To streams: post [N, S] times what a block gave, [N, H] or parts [P, N, H] of it; None: nothing.
Added = tuple[Tensor, Tensor] | None


@dataclass(frozen=True, kw_only=True)
class StreamWeights:
    """Of one connection: fn [C, S H] (or [S, S H] of the last one), base [C], scale [3] (or [1]), float32."""

    spec: StreamSpec
    fn: Tensor
    base: Tensor
    scale: Tensor
    norm_eps: float

    def products(self, x_NSH: Tensor) -> Tensor:
        """float32 [N, C], of the normed streams."""
        flat_NX = x_NSH.flatten(1).float()
        return F.linear(F.rms_norm(flat_NX, flat_NX.shape[-1:], eps=self.norm_eps), self.fn)

    def collapsed(self, x_NSH: Tensor, added: Added, norm: Norm) -> tuple[Tensor, Tensor]:
        """(the streams [N, S, H] with what is added, their sum [N, H], normed) behind the last layer."""
        if self._by_kernels:
            from turnout.kernels.common.streams import connect_last

            weights, eps = (self.fn, self.base, self.scale, norm.weight), self._eps(norm)
            found: tuple[Tensor, Tensor] = connect_last(x_NSH, added, *weights, **eps)
            return found
        x_NSH = with_added(x_NSH, added)
        pre_NS = torch.sigmoid(self.products(x_NSH) * self.scale + self.base) + self.spec.eps
        return x_NSH, norm(_sum(pre_NS, x_NSH))

    def of_sum(self, x_NSH: Tensor, added: Added, norm: Norm) -> tuple[Tensor, Tensor, Tensor]:
        """(the input [N, H] of a block, normed, float32 post [N, S], the streams [N, S, H] mixed by M), of x
        and what is added to it."""
        if self._by_kernels:
            from turnout.kernels.common.streams import connect

            weights, eps = (self.fn, self.base, self.scale, norm.weight), self._eps(norm)
            found: tuple[Tensor, Tensor, Tensor] = connect(
                x_NSH, added, *weights, iterations=self.spec.iterations, **eps
            )
            return found
        x_NH, post_NS, mixed_NSH = self(with_added(x_NSH, added))
        return norm(x_NH), post_NS, mixed_NSH

    @property
    def _by_kernels(self) -> bool:
        return runs_triton(self.fn.device)

    def _eps(self, norm: Norm) -> dict[str, Any]:
        return {"eps": self.spec.eps, "norm_eps": self.norm_eps, "gain_eps": norm.eps}

    def __call__(self, x_NSH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As `of_sum` of x alone, and without the norm; by no kernel for GPUs."""
        pre_NS, post_NS, mix_NSS = self._weights(self.products(x_NSH))
        mixed_NSH = torch.matmul(mix_NSS.transpose(1, 2), x_NSH.float()).to(x_NSH.dtype)
        return _sum(pre_NS, x_NSH), post_NS, mixed_NSH

    def _weights(self, products_NC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """float32 (pre [N, S], post [N, S], M [N, S, S]) of float32 products [N, C]."""
        spec = self.spec
        if products_NC.device.type == "cpu" and cpu.available():
            from turnout.kernels.cpu.streams import weights

            found: tuple[Tensor, Tensor, Tensor] = weights(
                products_NC, self.base, self.scale, count=spec.count, iterations=spec.iterations, eps=spec.eps
            )
            return found
        return composed(products_NC, self.base, self.scale, spec)


def composed(
    products_NC: Tensor, base_C: Tensor, scale: Tensor, spec: StreamSpec
) -> tuple[Tensor, Tensor, Tensor]:
    """`StreamWeights._weights` with torch: what kernels are compared with."""
    S, eps = spec.count, spec.eps
    sizes = [S, S, S * S]
    (pre, post, mix), (pre_b, post_b, mix_b) = (
        products_NC.split(sizes, dim=-1),
        base_C.split(sizes),
    )
    pre_NS = torch.sigmoid(pre * scale[0] + pre_b) + eps
    post_NS = 2 * torch.sigmoid(post * scale[1] + post_b)
    mix_NSS = (mix * scale[2] + mix_b).unflatten(-1, (S, S)).softmax(dim=-1) + eps
    mix_NSS = mix_NSS / (mix_NSS.sum(dim=-2, keepdim=True) + eps)
    for _ in range(spec.iterations - 1):
        mix_NSS = mix_NSS / (mix_NSS.sum(dim=-1, keepdim=True) + eps)
        mix_NSS = mix_NSS / (mix_NSS.sum(dim=-2, keepdim=True) + eps)
    return pre_NS, post_NS, mix_NSS


def _sum(weights_NS: Tensor, x_NSH: Tensor) -> Tensor:
    return (weights_NS[..., None] * x_NSH).sum(dim=1).to(x_NSH.dtype)


def with_added(x_NSH: Tensor, added: Added) -> Tensor:
    """[N, S, H]"""
    if added is None:
        return x_NSH
    post_NS, y_NH = added
    return x_NSH + (post_NS[..., None] * y_NH[:, None]).to(x_NSH.dtype)


@dataclass(frozen=True, kw_only=True)
class StreamLayer:
    """A `DecoderLayer` on several streams: attention, then an MoE layer, each between two connections."""

    attention_streams: StreamWeights
    attention_norm: Norm
    attention: Mixer
    mlp_streams: StreamWeights
    mlp_norm: Norm
    mlp: MLP

    def __call__(
        self, x_NSH: Tensor, added: Added, rotary: Rotaries, step: Step
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The streams [N, S, H] and what is to be added to them, to the same after this layer."""
        mixed_NSH, post_NS, normed_NH = self._attend(x_NSH, added, rotary, step)
        y_NH = self.mlp(normed_NH, step.phase, step.tokens, step.real, None, step.input_ids)
        return mixed_NSH, (post_NS, y_NH)

    def _attend(
        self, x_NSH: Tensor, added: Added, rotary: Rotaries, step: Step
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The streams [N, S, H] as the MLP's connection mixed them, its post [N, S], and the MLP's input."""
        normed_NH, post_NS, mixed_NSH = self.attention_streams.of_sum(x_NSH, added, self.attention_norm)
        y_NH = self.attention(normed_NH, rotary, step.attention)
        normed_NH, post_NS, mixed_NSH = self.mlp_streams.of_sum(mixed_NSH, (post_NS, y_NH), self.mlp_norm)
        return mixed_NSH, post_NS, normed_NH

    def overlapped(
        self, flows: Sequence[Flow], rotaries: Sequence[Rotaries], steps: Sequence[Step]
    ) -> list[Flow]:
        """As `DecoderLayer.overlapped`."""
        begun: list[tuple[Tensor, Tensor, InFlight]] = []
        for (x_NSH, added), rotary, step in zip(flows, rotaries, steps, strict=True):
            mixed_NSH, post_NS, normed_NH = self._attend(x_NSH, added(), rotary, step)
            batch = self.mlp.begin(normed_NH, step.phase, step.tokens, step.real, step.input_ids)
            begun.append((mixed_NSH, post_NS, batch))
        for _, _, batch in begun:
            batch.compute()
        return [(mixed, _Spreading(post, batch)) for mixed, post, batch in begun]


@dataclass(frozen=True)
class _Spreading:
    """Gives what a block that is in flight adds to streams."""

    post_NS: Tensor
    batch: InFlight

    def __call__(self) -> tuple[Tensor, Tensor]:
        return self.post_NS, self.batch.result()


class StreamEmbedding(Embedding):
    """The embedding of a token in each stream."""

    def __init__(self, embed: Embedding, count: int):
        self._embed, self._count = embed, count

    def __call__(self, ids_N: Tensor) -> Tensor:
        """[N, S, H]"""
        return self._embed(ids_N)[:, None].expand(-1, self._count, -1)


class StreamNorm(Norm):
    """The last norm, of the sum of the streams."""

    def __init__(self, streams: StreamWeights, norm: Norm):
        self._streams, self._norm = streams, norm

    def of_sum(self, x_NSH: Tensor, added: Any) -> tuple[Tensor, Tensor]:
        """(the streams with what is added, the norm [N, H] of their sum)."""
        return self._streams.collapsed(x_NSH, added, self._norm)
