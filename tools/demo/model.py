"""Qwen3-MoE for training: every expert computed for every token, the unchosen ones weighted zero.

At this size that is one wide, dense matrix product, faster on a GPU than gathering tokens by expert,
and each kind of weight is one tensor over all layers, so the optimiser has a dozen tensors to step.

T tokens, L layers, H hidden, E experts, K experts per token, I expert width, N heads, G key-value
heads, D head size, V vocabulary
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import fakequant

# (layer, q [T,N,D], k [T,G,D], v [T,G,D]) -> [T,N,D]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Shape:
    vocab: int = 1536
    hidden: int = 256
    layers: int = 8
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 32
    experts: int = 32
    top_k: int = 4
    expert_width: int = 64
    max_positions: int = 1024
    rope_theta: float = 10_000.0
    eps: float = 1e-6

    @property
    def moe_layers(self) -> tuple[int, ...]:
        return tuple(range(self.layers))


@dataclass(frozen=True)
class Quantization:
    """mode int [L]: one of fakequant's formats per layer. amax float [L, 2]: the largest magnitude at
    the inputs of the gate/up and of the down projections, from which activation scales follow."""

    mode: Tensor
    amax: Tensor


@dataclass(frozen=True)
class Output:
    """hidden [T,H] after the last norm; balance: the load-balancing loss; amax [L,2] of this batch. drafted
    [T,H]: what a draft layer, if there is one, says of the token after next. load [L,E]: share of the tokens
    that chose each expert, where the model wants to know (`ReleasedModel.even_out`)."""

    hidden: Tensor
    balance: Tensor
    amax: Tensor
    drafted: Tensor | None = None
    load: Tensor | None = None


class DemoModel(nn.Module):
    rope: Tensor

    def __init__(self, shape: Shape, dtype: torch.dtype):
        super().__init__()
        self.shape, self.dtype = shape, dtype
        s = shape
        self.embed = matrix(s.vocab, s.hidden, std=0.02)
        self.q = matrix(s.layers, s.heads * s.head_dim, s.hidden)
        self.k = matrix(s.layers, s.kv_heads * s.head_dim, s.hidden)
        self.v = matrix(s.layers, s.kv_heads * s.head_dim, s.hidden)
        self.o = matrix(s.layers, s.hidden, s.heads * s.head_dim, std=0.02)
        self.router = matrix(s.layers, s.experts, s.hidden)
        self.gate = matrix(s.layers, s.experts, s.expert_width, s.hidden)
        self.up = matrix(s.layers, s.experts, s.expert_width, s.hidden)
        self.down = matrix(s.layers, s.experts, s.hidden, s.expert_width, std=0.02)
        self.attn_norm = nn.Parameter(torch.ones(s.layers, s.hidden))
        self.q_norm = nn.Parameter(torch.ones(s.layers, s.head_dim))
        self.k_norm = nn.Parameter(torch.ones(s.layers, s.head_dim))
        self.mlp_norm = nn.Parameter(torch.ones(s.layers, s.hidden))
        self.final_norm = nn.Parameter(torch.ones(s.hidden))
        self.register_buffer("rope", rope_table(s.max_positions, s.rope_theta, s.head_dim), persistent=False)

    def forward(
        self, ids_T: Tensor, position_T: Tensor, attend: Attend, quant: Quantization | None = None
    ) -> Output:
        cos_sin = self.rope[position_T].to(self.dtype)  # [T, 2, D]
        layers = [dict(zip(self._STACKED, parts, strict=True)) for parts in self._unbind()]
        x_TH = F.embedding(ids_T, self.embed).to(self.dtype)
        balance, amax = [], []
        for i, w in enumerate(layers):
            x_TH = x_TH + self._attention(i, w, x_TH, cos_sin, attend)
            mode_amax = None if quant is None else (quant.mode[i], quant.amax[i])
            y_TH, layer_balance, layer_amax = self._experts(w, x_TH, mode_amax)
            x_TH = x_TH + y_TH
            balance.append(layer_balance)
            amax.append(layer_amax)
        hidden = self._norm(x_TH, self.final_norm)
        return Output(hidden, torch.stack(balance).mean(), torch.stack(amax))

    def logits(self, hidden_TH: Tensor) -> Tensor:
        return F.linear(hidden_TH, self.embed.to(self.dtype))

    _STACKED = (
        "q", "k", "v", "o", "router", "gate", "up", "down", "attn_norm", "q_norm", "k_norm", "mlp_norm",
    )  # fmt: skip

    def _unbind(self) -> list[tuple[Tensor, ...]]:
        """Per layer, its slice of every stacked parameter. Unbinding makes one gradient per stack."""
        return list(zip(*(getattr(self, name).unbind(0) for name in self._STACKED), strict=True))

    def _attention(
        self, layer: int, w: dict[str, Tensor], x_TH: Tensor, cos_sin: Tensor, attend: Attend
    ) -> Tensor:
        s = self.shape
        x_TH = self._norm(x_TH, w["attn_norm"])
        q = self._linear(x_TH, w["q"]).unflatten(-1, (s.heads, s.head_dim))
        k = self._linear(x_TH, w["k"]).unflatten(-1, (s.kv_heads, s.head_dim))
        v = self._linear(x_TH, w["v"]).unflatten(-1, (s.kv_heads, s.head_dim))
        q = rotate(self._norm(q, w["q_norm"]), cos_sin)
        k = rotate(self._norm(k, w["k_norm"]), cos_sin)
        return self._linear(attend(layer, q, k, v).flatten(-2), w["o"])

    def _experts(
        self, w: dict[str, Tensor], x_TH: Tensor, quant: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(output [T,H], load-balancing loss, [2] largest magnitudes into gate/up and into down)."""
        x_TH = self._norm(x_TH, w["mlp_norm"])
        probability_TE = self._linear(x_TH, w["router"]).float().softmax(dim=-1)
        weight_TE = routed(probability_TE, probability_TE, self.shape.top_k)
        y_TH, amax = all_experts(x_TH, weight_TE, w["gate"], w["up"], w["down"], quant)
        return y_TH, switch_balance(weight_TE, probability_TE, self.shape.top_k), amax

    def _linear(self, x: Tensor, w: Tensor) -> Tensor:
        return F.linear(x, w.to(self.dtype))

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(dim=-1, keepdim=True) + self.shape.eps)
        return (y * weight).to(self.dtype)


def routed(score_TE: Tensor, choice_TE: Tensor, top_k: int) -> Tensor:
    """[T,E]: of the `top_k` experts with the largest `choice` their scores, made to sum to 1; else zero."""
    expert_TK = choice_TE.topk(top_k, dim=-1).indices
    top_TK = score_TE.gather(1, expert_TK)
    return torch.zeros_like(score_TE).scatter(1, expert_TK, top_TK / top_TK.sum(dim=-1, keepdim=True))


def switch_balance(weight_TE: Tensor, probability_TE: Tensor, top_k: int) -> Tensor:
    """A loss that is 1 when load is even.

    That of Fedus et al., "Switch Transformers" (2021), equation 4, for top-k.
    """
    load_E = (weight_TE.detach() > 0).float().mean(dim=0) / top_k
    return weight_TE.shape[1] * (load_E * probability_TE.mean(dim=0)).sum()


def all_experts(
    x_TH: Tensor,
    weight_TE: Tensor,
    gate_EIH: Tensor,
    up_EIH: Tensor,
    down_EHI: Tensor,
    quant: tuple[Tensor, Tensor] | None,
    limit: float | None = None,
) -> tuple[Tensor, Tensor]:
    """(output [T,H], [2] largest magnitudes into gate/up and into down), in x's type. limit: gates are clamped to
    it from above, up projections to it on both sides.

    quant: (one of fakequant's formats, largest magnitudes seen lately).
    """
    gate_up = torch.stack((gate_EIH, up_EIH), dim=1)  # [E, 2, I, H]
    x_amax = x_TH.detach().abs().amax()
    if quant is not None:
        mode, amax = quant
        gate_up, down_EHI = (fakequant.weight(w, mode, lead=1) for w in (gate_up, down_EHI))
        x_TH = fakequant.activation(x_TH, mode, amax[0])
    both = F.linear(x_TH, gate_up.flatten(0, 2).to(x_TH.dtype))
    gate_TEI, up_TEI = both.unflatten(-1, gate_up.shape[:3]).unbind(2)
    if limit is not None:
        gate_TEI, up_TEI = gate_TEI.clamp(max=limit), up_TEI.clamp(-limit, limit)
    h_TEI = F.silu(gate_TEI) * up_TEI
    chosen_TE1 = (weight_TE > 0).unsqueeze(-1)
    h_amax = torch.where(chosen_TE1, h_TEI.detach(), 0.0).abs().amax()
    if quant is not None:
        h_TEI = fakequant.activation(h_TEI, mode, amax[1])
    h_TEI = h_TEI * weight_TE.to(x_TH.dtype).unsqueeze(-1)
    y_TH = F.linear(h_TEI.flatten(1), down_EHI.transpose(0, 1).flatten(1).to(x_TH.dtype))
    return y_TH, torch.stack((x_amax, h_amax)).float()


def attention_within(start_T: Tensor, starts: Tensor, longest: int) -> Attend:
    """Attention within documents, by what `data.Batch` says of them."""
    if start_T.is_cuda:
        return flash_attention(starts, longest)
    return causal_attention(len(start_T), start_T)


def causal_attention(length: int, start_T: Tensor) -> Attend:
    """Plain attention within documents. start_T: where each token's document begins."""
    at = torch.arange(length, device=start_T.device)
    mask = (at[None, :] <= at[:, None]) & (at[None, :] >= start_T[:, None])

    def attend(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return out.squeeze(0).transpose(0, 1)

    return attend


def flash_attention(starts: Tensor, longest: int) -> Attend:
    """Flash attention within documents. starts int32 [documents + 1], as `cu_seqlens`."""
    from torch.nn.attention.varlen import varlen_attn

    def attend(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        out = varlen_attn(q, k, v, starts, starts, longest, longest, window_size=(-1, 0))
        assert isinstance(out, Tensor), "nothing else was asked for"
        return out

    return attend


def matrix(*shape: int, std: float | None = None) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) * (std or shape[-1] ** -0.5))


def rope_table(max_positions: int, theta: float, dim: int) -> Tensor:
    """[positions, 2, dim]: cosine and sine of each position's angles, halves repeated."""
    frequency = theta ** (-torch.arange(0, dim, 2).float() / dim)
    angle = torch.outer(torch.arange(max_positions).float(), frequency).repeat(1, 2)
    return torch.stack((angle.cos(), angle.sin()), dim=1)


def rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotary position embedding of x [T, heads, D]: element i is paired with i + D/2."""
    cos, sin = cos_sin.unsqueeze(2).unbind(1)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
