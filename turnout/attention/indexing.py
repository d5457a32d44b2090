"""Which tokens sparse attention attends to: the indexer's scores, and the largest of them (DSA).

    score[n, l] = sum over heads h of weights[n, h] * relu(q[n, h] . key[l])

A token chooses the K largest scores among itself and those before it, all of them where there are no more
than K. Of equal scores, and zeros are common, those at the lowest positions are chosen, so that the choice
does not depend on how scores were computed together.

Legend: N tokens, H index heads, D their size, L tokens of a context, K how many are chosen.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from turnout.attention.workspace import INDEX_SPAN
from turnout.formats import fp8


@dataclass(frozen=True)
class Index:
    """Of the tokens of a step: index queries [N, H, D] and keys [N, D], rotated, and float32 weights [N, H],
    into which the scale of the products has gone."""

    q_NHD: Tensor
    key_ND: Tensor
    weights_NH: Tensor

    def rows(self, rows: slice) -> Index:
        return Index(self.q_NHD[rows], self.key_ND[rows], self.weights_NH[rows])


class Fp8Keys:
    """Index keys of S slots in FP8. data: uint8 [S, D], the bits of e4m3; scale: float32 [S], powers of two,
    so that keys which `rounded` gave come back as they were."""

    def __init__(self, data_SD: Tensor, scale_S: Tensor):
        self.data_SD, self.scale_S = data_SD, scale_S

    def store(self, slots_N: Tensor, key_ND: Tensor) -> None:
        data_ND, scale_N1 = _encoded(key_ND)
        self.data_SD.index_copy_(0, slots_N, data_ND.view(torch.uint8))
        self.scale_S.index_copy_(0, slots_N, scale_N1[:, 0])

    def __getitem__(self, slots: Tensor) -> Tensor:
        """float32 [..., D] of slots [...]."""
        return self.data_SD[slots].view(fp8.DTYPE).float() * self.scale_S[slots][..., None]


def rounded(key_ND: Tensor) -> Tensor:
    """Keys as FP8 keeps them."""
    data_ND, scale_N1 = _encoded(key_ND)
    return (data_ND.float() * scale_N1).to(key_ND.dtype)


def _encoded(key_ND: Tensor) -> tuple[Tensor, Tensor]:
    """(e4m3 [N, D], the least power of two by which a row fits it, float32 [N, 1])"""
    ratio_N1 = key_ND.float().abs().amax(dim=-1, keepdim=True) / fp8.MAX
    mantissa_N1, exponent_N1 = torch.frexp(ratio_N1)
    power_N1 = torch.where(mantissa_N1 > 0.5, exponent_N1, exponent_N1 - 1).clamp(min=-126)
    scale_N1 = torch.ldexp(torch.ones_like(ratio_N1), power_N1)
    return fp8.saturate(key_ND.float() / scale_N1), scale_N1


def index_scores(index: Index, keys: Tensor) -> Tensor:
    """float32 [N, L] of the tokens of `index`. keys: [L, D] of one context, or [N, L, D] of each token's."""
    parts = []
    for keys_LD in keys.split(INDEX_SPAN, dim=-2):
        products_NHL = torch.matmul(index.q_NHD.float(), keys_LD.float().transpose(-1, -2)).relu_()
        parts.append(torch.matmul(index.weights_NH[:, None], products_NHL)[:, 0])
    return torch.cat(parts, dim=-1)


def largest(scores_NL: Tensor, seen_NL: Tensor, count: int) -> Tensor:
    """bool [N, L]: the `count` largest scores of what each row sees, or all that it sees."""
    if scores_NL.shape[-1] <= count:
        return seen_NL
    scores_NL = scores_NL.masked_fill(~seen_NL, float("-inf"))
    least_N1 = scores_NL.topk(count, dim=-1, sorted=True).values[:, -1:]
    above_NL = scores_NL > least_N1
    equal_NL = (scores_NL == least_N1) & seen_NL
    room_N1 = count - above_NL.sum(-1, keepdim=True)
    return above_NL | (equal_NL & (equal_NL.cumsum(-1) <= room_N1))


def places(chosen_NL: Tensor, count: int) -> Tensor:
    """int64 [N, K]: the places of what is chosen, ascending, at most `count` of them; then -1."""
    N, L = chosen_NL.shape
    # What is not chosen goes into a last column.
    to_NL = torch.where(chosen_NL, chosen_NL.cumsum(-1) - 1, count)
    out_NK = torch.full((N, count + 1), -1, dtype=torch.int64, device=chosen_NL.device)
    out_NK.scatter_(1, to_NL, torch.arange(L, device=chosen_NL.device).expand(N, L))
    return out_NK[:, :count]
