"""What makes keys and values of latent vectors, or instead goes to queries and results (latent.py).

Legend: N, L tokens, H query heads, Dn/Dr sizes of a key's part made from the latent vector and of its rotated
part, D = Dn + Dr, Dv of a value, Lc of the latent vector, C = Lc + Dr.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class UpProjection:
    """What makes keys and values of the heads from latent vectors. weight: [H, Dn + Dv, Lc], keys first."""

    weight_HXL: Tensor
    nope_dim: int

    @property
    def values_size(self) -> tuple[int, int]:
        """(H, Dv)"""
        H, X, _ = self.weight_HXL.shape
        return H, X - self.nope_dim

    @property
    def keys_HNL(self) -> Tensor:
        """[H, Dn, Lc]"""
        return self.weight_HXL[:, : self.nope_dim]

    @property
    def values_HVL(self) -> Tensor:
        """[H, Dv, Lc]"""
        return self.weight_HXL[:, self.nope_dim :]

    @property
    def _rank(self) -> int:
        return self.weight_HXL.shape[2]

    def made(self, latent_LC: Tensor) -> Tensor:
        """[L, H, Dn + Dv]: of each head the part of a key that is made of a latent vector, then its value."""
        H, X, Lc = self.weight_HXL.shape
        return F.linear(latent_LC[:, :Lc], self.weight_HXL.flatten(0, 1)).view(-1, H, X)

    def expand(self, latent_LC: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [H, L, D] and values [H, L, Dv] of L tokens."""
        H, made_LHX, rope_LR = len(self.weight_HXL), self.made(latent_LC), latent_LC[:, self._rank :]
        k_LHD = torch.cat((made_LHX[..., : self.nope_dim], rope_LR[:, None].expand(-1, H, -1)), dim=-1)
        return k_LHD.transpose(0, 1), made_LHX[..., self.nope_dim :].transpose(0, 1)

    def absorb(self, q_NHD: Tensor) -> Tensor:
        """Queries [N, H, C] that score kept vectors as `q` [N, H, D] scores keys."""
        nope_HND, rope_NHR = q_NHD[..., : self.nope_dim].transpose(0, 1), q_NHD[..., self.nope_dim :]
        N, H, Dr = rope_NHR.shape
        out_NHC = q_NHD.new_empty(N, H, self._rank + Dr)
        torch.bmm(nope_HND, self.keys_HNL, out=out_NHC[..., : self._rank].transpose(0, 1))
        out_NHC[..., self._rank :] = rope_NHR
        return out_NHC

    def values(self, mixed_NHL: Tensor) -> Tensor:
        """[N, H, Dv]: mixtures of values from those of latent vectors."""
        out_NHV = mixed_NHL.new_empty(len(mixed_NHL), *self.values_size)
        torch.bmm(mixed_NHL.transpose(0, 1), self.values_HVL.transpose(1, 2), out=out_NHV.transpose(0, 1))
        return out_NHV
