"""A peer of the layer benchmark that needs nothing but torch: its grouped GEMM on decoded weights.

Pairs are sorted by expert, as any implementation on this function must; pairs of experts that other ranks
hold go last, where no group reaches them. Routes stay on the device.

Legend: T tokens, k top-k, P pairs, E local experts, H hidden, I intermediate.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from turnout.formats.experts import ExpertWeights
from turnout.moe.spec import Activation


def grouped_mm(
    experts: ExpertWeights, activation: Activation, dtype: torch.dtype
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """forward(x [T, H], ids [T, k], weights [T, k]) -> [T, H] in x's dtype, of the experts held."""
    w13, w2 = experts.w13.decode(dtype), experts.w2.decode(dtype)
    b13, b2 = (None if b is None else b.to(dtype) for b in (experts.b13, experts.b2))
    first, E = experts.first_expert, len(w13)

    def forward(x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        local_P = ids_TK.flatten() - first
        local_P = torch.where((local_P >= 0) & (local_P < E), local_P, E)
        expert_P, order_P = local_P.sort()
        ends_E = torch.searchsorted(expert_P, torch.arange(E, device=x_TH.device), right=True).int()
        token_P = order_P // ids_TK.shape[1]
        held_P1 = (expert_P < E)[:, None]
        h_PI = F.grouped_mm(x_TH[token_P], w13.transpose(1, 2), offs=ends_E)
        if b13 is not None:
            h_PI = h_PI + b13[expert_P.clamp(max=E - 1)]
        y_PH = F.grouped_mm(_activate(h_PI, activation), w2.transpose(1, 2), offs=ends_E)
        if b2 is not None:
            y_PH = y_PH + b2[expert_P.clamp(max=E - 1)]
        y_PH = y_PH * weights_TK.flatten()[order_P, None].to(dtype)
        return torch.zeros_like(x_TH).index_add_(0, token_P, y_PH.masked_fill(~held_P1, 0))

    return forward


def _activate(h: Tensor, activation: Activation) -> Tensor:
    gate, up = h.chunk(2, dim=-1)
    if activation.kind == "silu":
        return F.silu(gate) * up
    limit = activation.limit
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(activation.alpha * gate) * (up + activation.beta)
