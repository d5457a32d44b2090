"""Muon for the weight matrices, AdamW for everything else.

Muon (K. Jordan et al., 2024) replaces each matrix's momentum by the nearest orthogonal matrix, found
by Newton-Schulz iteration; the update is scaled to the size of AdamW's (J. Liu et al., "Muon is
scalable for LLM training", 2025), so one learning rate serves both.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

MATRICES = ("q", "k", "v", "o", "gate", "up", "down")  # of model.py
# Ends of names in released.py, then in released_v4.py.
PROJECTIONS = ("_proj", "_proj_with_mqa", "_qkvz", *"wq_a wq_b wkv wgate wo_a wo_b w1 w2 w3".split())
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


class Muon(torch.optim.Optimizer):
    """Parameters of shape [..., rows, columns]: each matrix is orthogonalised on its own."""

    def __init__(self, params: list[nn.Parameter], weight_decay: float, momentum: float = 0.95):
        super().__init__(params, {"lr": 0.0, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = {}
            for p in group["params"]:
                by_shape.setdefault(p.shape, []).append(p)
            for shape, params in by_shape.items():
                for p in params:
                    if not self.state[p]:
                        self.state[p]["momentum"] = torch.zeros_like(p)
                    self.state[p]["momentum"].lerp_(p.grad, 1 - group["momentum"])
                looking_ahead = [p.grad.lerp(self.state[p]["momentum"], group["momentum"]) for p in params]
                updates = orthogonalize(torch.stack(looking_ahead)).unbind()
                torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(params, updates, alpha=-group["lr"] * 0.2 * max(shape[-2:]) ** 0.5)


def orthogonalize(g: Tensor, steps: int = 5) -> Tensor:
    """About `U V^T` of each matrix `U S V^T` in g [..., rows, columns]: singular values near 1."""
    a, b, c = _COEFFICIENTS
    x = g.bfloat16()
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x if wide else x.mT).to(g.dtype)


def make_optimizers(model: nn.Module, weight_decay: float) -> list[torch.optim.Optimizer]:
    matrices, others = [], []
    for name, p in model.named_parameters():
        matrix = name in MATRICES or name.removesuffix(".weight").endswith(PROJECTIONS)
        (matrices if matrix else others).append(p)
    cuda = others[0].is_cuda
    adam = torch.optim.AdamW(others, lr=0.0, betas=(0.9, 0.95), weight_decay=0.0, fused=cuda)
    return [Muon(matrices, weight_decay), adam]
