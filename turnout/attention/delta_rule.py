"""Gated DeltaNet with torch alone: the reference, and what computes wherever there is no kernel.

Of each token a layer computes queries and keys of Hk heads, values and gates z of Hv heads, and two numbers
of each value head, b and a. Then, with a state S [Dk, Dv] of each value head and request, all in float32:

    q, k, v = silu(causal convolution of queries, keys and values, each channel by itself)
    q, k    = q / |q| / sqrt(Dk), k / |k|      of each key head, repeated for its value heads
    beta    = sigmoid(b)
    g       = decay * softplus(a + bias)       decay = -exp(A_log), so g <= 0
    S       = exp(g) S + k d^T                 d = beta (v - exp(g) S^T k)
    y       = norm(S^T q) * silu(z)            RMS norm of each value head

`step` is that for one token of each of several requests. `advance` takes one request over many tokens, in
blocks of BLOCK: with G the running sum of g in a block and S the state before it, its D [BLOCK, Dv] solve

    (I + tril(beta_i exp(G_i - G_j) k_i k_j, -1)) D = beta (V - exp(G) K S)
    O = exp(G) Q S + tril(exp(G_i - G_j) q_i k_j) D
    S = exp(G_end) S + (exp(G_end - G) K)^T D

so that only the product with S goes from block to block. Exponents are differences of a falling sum: no
intermediate overflows, however strong the decay. Blocks begin where a call begins; a prompt cut elsewhere
rounds differently.

Legend: T tokens of one request, B requests of one token each, X = `DeltaNetSpec.mixed`, C = `channels`, W the
convolution's width, Hk/Hv key/value heads, Dk/Dv their sizes, n blocks, L tokens of a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from turnout.attention.kinds import DeltaNetSpec

BLOCK = 64
SPAN = 1024  # tokens whose blocks are prepared together: bounds the memory that a prompt takes
FLOOR = 1e-6  # added to squares of lengths


@dataclass(frozen=True, kw_only=True)
class DeltaCell:
    """What a layer of Gated DeltaNet learned apart from its projections. spec: with this rank's heads.

    conv [W, C] in the compute type; decay, bias float32 [Hv]; norm [Dv].
    """

    spec: DeltaNetSpec
    conv_WC: Tensor
    decay_H: Tensor
    bias_H: Tensor
    norm_D: Tensor
    eps: float

    @property
    def learned(self) -> tuple[Tensor, Tensor, Tensor, Tensor, float]:
        """As kernels take them."""
        return self.conv_WC, self.decay_H, self.bias_H, self.norm_D, self.eps

    def parts(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(queries, keys and values [..., C], z [..., Hv Dv], b and a [..., Hv]) of mixed [..., X]."""
        spec = self.spec
        sizes = [spec.channels, spec.num_heads * spec.value_dim, spec.num_heads, spec.num_heads]
        qkv, z, b, a = mixed.split(sizes, dim=-1)
        return qkv, z, b, a

    def heads(self, convolved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """float32 queries and keys [..., Hv, Dk] of length 1 / sqrt(Dk) and 1, and values [..., Hv, Dv]."""
        spec = self.spec
        Hk, Dk = spec.num_kv_heads, spec.head_dim
        q, k, v = F.silu(convolved.float()).split([Hk * Dk, Hk * Dk, spec.num_heads * spec.value_dim], dim=-1)
        q, k = (_unit(x.unflatten(-1, (Hk, Dk))) for x in (q, k))
        repeat = spec.num_heads // Hk
        q, k = (x.repeat_interleave(repeat, dim=-2) for x in (q * Dk**-0.5, k))
        return q, k, v.unflatten(-1, (spec.num_heads, spec.value_dim))

    def rates(self, b: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        """float32 (beta, g), each [..., Hv]."""
        return torch.sigmoid(b.float()), self.decay_H * F.softplus(a.float() + self.bias_H)

    def gated(self, o: Tensor, z: Tensor) -> Tensor:
        """[..., Hv Dv] in z's type, of float32 o [..., Hv, Dv]."""
        normed = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + self.eps) * self.norm_D
        return (normed.flatten(-2) * F.silu(z.float())).to(z.dtype)


def step(cell: DeltaCell, mixed_BX: Tensor, windows_BWC: Tensor, states_BHKV: Tensor) -> Tensor:
    """One token of each request: [B, Hv Dv]. Changes windows [B, W - 1, C] and float32 states."""
    qkv_BC, z_BY, b_BH, a_BH = cell.parts(mixed_BX)
    seen_BWC = torch.cat((windows_BWC, qkv_BC[:, None]), dim=1)
    windows_BWC.copy_(seen_BWC[:, 1:])
    q_BHK, k_BHK, v_BHV = cell.heads((seen_BWC * cell.conv_WC).sum(1))
    beta_BH, g_BH = cell.rates(b_BH, a_BH)
    states_BHKV.mul_(g_BH.exp()[..., None, None])
    known_BHV = torch.einsum("bhkv,bhk->bhv", states_BHKV, k_BHK)
    d_BHV = beta_BH[..., None] * (v_BHV - known_BHV)
    states_BHKV.addcmul_(k_BHK[..., None], d_BHV[..., None, :])
    return cell.gated(torch.einsum("bhkv,bhk->bhv", states_BHKV, q_BHK), z_BY)


def advance(cell: DeltaCell, mixed_TX: Tensor, window_WC: Tensor, state_HKV: Tensor) -> Tensor:
    """T tokens of one request: [T, Hv Dv]. Changes its window [W - 1, C] and state float32 [Hv, Dk, Dv]."""
    return torch.cat([_advance_span(cell, span, window_WC, state_HKV) for span in mixed_TX.split(SPAN)])


def _advance_span(cell: DeltaCell, mixed_TX: Tensor, window_WC: Tensor, state_HKV: Tensor) -> Tensor:
    qkv_TC, z_TY, b_TH, a_TH = cell.parts(mixed_TX)
    T, seen_TC = len(qkv_TC), torch.cat((window_WC, qkv_TC))
    window_WC.copy_(seen_TC[T:])
    convolved_TC = seen_TC[:T] * cell.conv_WC[0]
    for w, weight_C in enumerate(cell.conv_WC[1:], 1):
        convolved_TC.addcmul_(seen_TC[w : w + T], weight_C)
    q_THK, k_THK, v_THV = cell.heads(convolved_TC)
    beta_TH, g_TH = cell.rates(b_TH, a_TH)
    o_THV = delta_rule(q_THK, k_THK, v_THV, beta_TH, g_TH, state_HKV)
    return cell.gated(o_THV, z_TY)


def delta_rule(
    q_THK: Tensor,
    k_THK: Tensor,
    v_THV: Tensor,
    beta_TH: Tensor,
    g_TH: Tensor,
    state_HKV: Tensor,
) -> Tensor:
    """S^T q of every token [T, Hv, Dv], in blocks; everything is float32. Changes state [Hv, Dk, Dv]."""
    T = len(q_THK)
    q, k, v, beta, g = (_blocks(x) for x in (q_THK, k_THK, v_THV, beta_TH[..., None], g_TH[..., None]))
    sums = g.cumsum(2)  # G [Hv, n, L, 1]
    lower_LL = torch.ones(BLOCK, BLOCK, dtype=torch.bool, device=q.device).tril()
    decay = (sums - sums.transpose(2, 3)).masked_fill(~lower_LL, float("-inf")).exp()  # [Hv, n, L, L]
    mixing = beta * decay * (k @ k.transpose(2, 3))  # solved as if its diagonal were 1
    right = torch.cat((beta * v, beta * sums.exp() * k), dim=-1)
    solved = torch.linalg.solve_triangular(mixing.tril(-1), right, upper=False, unitriangular=True)
    scores = decay * (q @ k.transpose(2, 3))
    ends = sums[:, :, -1:]
    decayed = q * sums.exp(), k * (ends - sums).exp()
    out = _carry_states(solved, scores, *decayed, ends.exp()[:, :, 0, 0], state_HKV)
    return out.flatten(1, 2)[:, :T].transpose(0, 1)


def _carry_states(
    solved_HnLX: Tensor,
    scores_HnLL: Tensor,
    q_HnLK: Tensor,
    k_HnLK: Tensor,
    ends_Hn: Tensor,
    state_HKV: Tensor,
) -> Tensor:
    """Take the state over one block after the other: [Hv, n, L, Dv], S^T q of every token.

    solved: of each token beta V and beta exp(G) K, [Dv + Dk], solved; scores: what its query takes of each D;
    q, k: decayed from the block's begin and to its end; ends: exp(G_end) of each block.
    """
    Dk, Dv = state_HKV.shape[1:]
    values, keys = solved_HnLX.split([Dv, Dk], dim=-1)
    out = torch.empty_like(values)
    for n in range(solved_HnLX.shape[1]):
        d_HLV = values[:, n] - keys[:, n] @ state_HKV
        torch.baddbmm(scores_HnLL[:, n] @ d_HLV, q_HnLK[:, n], state_HKV, out=out[:, n])
        state_HKV.mul_(ends_Hn[:, n, None, None]).baddbmm_(k_HnLK[:, n].transpose(1, 2), d_HLV)
    return out


def _blocks(x_THD: Tensor) -> Tensor:
    """[H, n, BLOCK, D], padded with zeros, which leave states as they are."""
    short = -len(x_THD) % BLOCK
    return F.pad(x_THD.transpose(0, 1), (0, 0, 0, short)).unflatten(1, (-1, BLOCK))


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + FLOOR)
