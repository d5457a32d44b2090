"""The projections of latent attention (MLA): queries, and what is kept of a token, from the hidden state.

    q = up(norm(down(x)));  c, rope = split(down(x));  kept: [norm(c) | rotate(rope)]

What makes keys and values of kept vectors is handed to the engine's attention, which chooses where to apply
it (attention/latent.py). Only the last `rope_dim` of each head are rotated.

Legend: N tokens of a step, H hidden, Hq query heads, D = Dn + Dr: size of a key without and with its rotated
part, Dv of a value, Lq/Lc ranks of queries and of the latent vector, C = Lc + Dr.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from turnout.attention.kinds import AttentionSpec
from turnout.attention.up_projection import UpProjection
from turnout.models import interface
from turnout.models.blocks import Norm, Rotaries, rotate
from turnout.models.dense import Dense, Linear, linear, ordered_rows
from turnout.models.shares import Heads, whole
from turnout.models.spec import LatentProjections
from turnout.models.weights import Weights
from turnout.parallel.groups import Group


class LatentAttention:
    """spec: of this layer, with the heads of this rank.

    down: [Lq + C, H], rows of queries first; without a query_norm these are the queries themselves, [Hq D +
    C, H]. query_up: [Hq D, Lq]. up: of keys and values. out: [H, Hq Dv]. group: the ranks that have the other
    heads.
    """

    def __init__(
        self,
        layer: int,
        spec: AttentionSpec,
        *,
        down: Dense,
        query_norm: Norm | None,
        query_up: Dense | None,
        latent_norm: Norm,
        up: UpProjection,
        out: Dense,
        group: Group,
        linear: Linear = linear,
    ):
        self._layer, self._spec, self._group, self._linear = layer, spec, group, linear
        self._down, self._query_norm, self._query_up = down, query_norm, query_up
        self._latent_norm, self._up, self._out = latent_norm, up, out
        sizes = spec.latent_dim, spec.rope_dim
        self._sizes = [len(down) - sum(sizes), *sizes]

    def __call__(self, x_NH: Tensor, rotaries: Rotaries, attention: interface.Attention) -> Tensor:
        """[N, H]."""
        N, spec = len(x_NH), self._spec
        cos_N1R, sin_N1R = rotaries[spec.rope]
        q_NX, c_NL, rope_NR = self._linear(x_NH, self._down).split(self._sizes, dim=-1)
        if self._query_norm is not None and self._query_up is not None:
            q_NX = self._linear(self._query_norm(q_NX), self._query_up)
        nope_NHD, turned_NHR = q_NX.reshape(N, spec.num_heads, spec.head_dim).split(
            [spec.head_dim - spec.rope_dim, spec.rope_dim], dim=-1
        )
        q_NHD = torch.cat((nope_NHD, rotate(turned_NHR, cos_N1R, sin_N1R)), dim=-1)
        key_N1R = rotate(rope_NR[:, None], cos_N1R, sin_N1R)
        latent_NC = torch.cat((self._latent_norm(c_NL), key_N1R[:, 0]), dim=-1)
        out_NHV = attention.latent(self._layer, q_NHD, latent_NC, self._up)
        return self._group.all_reduce(self._linear(out_NHV.flatten(1), self._out))


def read_latent_attention(
    layer: int,
    prefix: str,
    heads: Heads,
    projections: LatentProjections,
    *,
    order: Sequence[int] | None,
    weights: Weights,
    hidden: int,
    group: Group,
) -> LatentAttention:
    """From the tensors at `prefix`. order: of the rotated dimensions (`Rope.order`)."""
    spec, rank, eps = heads.spec, projections.query_rank, projections.norm_eps
    nope, made = spec.head_dim - spec.rope_dim, spec.head_dim - spec.rope_dim + spec.value_dim
    queries = {f"{prefix}.q_a_proj": whole(rank)} if rank else {f"{prefix}.q_proj": heads.queries}
    kept = {f"{prefix}.kv_a_proj_with_mqa": whole(spec.latent_dim + spec.rope_dim)}
    down = weights.dense(queries | kept, whole(hidden))
    query_up = weights.dense({f"{prefix}.q_b_proj": heads.queries}, whole(rank)) if rank else None
    if order is not None:
        ends = range(spec.head_dim, heads.queries.size + 1, spec.head_dim)
        of_heads = [end - spec.rope_dim for end in ends]
        of_down = [len(down) - spec.rope_dim]
        if query_up is None:
            of_down += of_heads
        else:
            query_up = query_up[ordered_rows(query_up, of_heads, order)]
        down = down[ordered_rows(down, of_down, order)]
    weight = weights.linear(f"{prefix}.kv_b_proj", heads.heads.times(made), whole(spec.latent_dim))
    return LatentAttention(
        layer,
        spec,
        down=down,
        query_norm=Norm(weights.tensor(f"{prefix}.q_a_layernorm.weight", rank), eps) if rank else None,
        query_up=query_up,
        latent_norm=Norm(weights.tensor(f"{prefix}.kv_a_layernorm.weight", spec.latent_dim), eps),
        up=UpProjection(weight.unflatten(0, (spec.num_heads, made)), nope),
        out=weights.dense({f"{prefix}.o_proj": whole(hidden)}, heads.outputs),
        group=group,
        linear=weights.multiply,
    )
