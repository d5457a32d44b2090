"""The projections of latent attention (MLA): queries, and what is kept of a token, from the hidden state.

    q = up(norm(down(x)));  c, rope = split(down(x));  kept: [norm(c) | rotate(rope)]

Sparse latent attention also makes, of the same norm(down(x)) and of x, what it chooses by (`Indexer`).

What makes keys and values of kept vectors is handed to the engine's attention, which chooses where to apply
it (attention/latent.py). Only the last `rope_dim` of each head are rotated.

Legend: N tokens of a step, H hidden, Hq query heads, D = Dn + Dr: size of a key without and with its rotated
part, Dv of a value, Lq/Lc ranks of queries and of the latent vector, C = Lc + Dr.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from turnout.attention.indexing import Index, rounded
from turnout.attention.kinds import AttentionSpec, SparseLatentSpec
from turnout.attention.up_projection import UpProjection
from turnout.models import interface
from turnout.models.blocks import Mixer, Norm, Rotaries, rotate
from turnout.models.dense import Dense, Linear, linear, ordered_rows, product, summed_product
from turnout.models.shares import Heads, whole
from turnout.models.spec import LatentProjections
from turnout.models.weights import Weights
from turnout.packages import runs_triton
from turnout.parallel.groups import Group

EPS = 1e-6  # of norms in these layers, whatever the others have


class Indexer:
    """Index queries, keys and weights of a layer (attention/indexing.py), of all its index heads.

    query_up: [Hi Di, Lq]; key: [Di, H]; key_norm: weight and bias [Di] of a layer norm, float32; weights:
    float32 [Hi, H]. The first `rope_dim` of each query and key are rotated.
    """

    def __init__(
        self,
        spec: SparseLatentSpec,
        *,
        query_up: Dense,
        key: Dense,
        key_norm: tuple[Tensor, Tensor],
        weights: Tensor,
        linear: Linear,
    ):
        self._spec, self._linear = spec, linear
        self._query_up, self._key, self._key_norm, self._weights = query_up, key, key_norm, weights
        self._scale = (spec.index_heads * spec.index_dim) ** -0.5

    def __call__(self, x_NH: Tensor, normed_NX: Tensor, rotary: tuple[Tensor, Tensor]) -> Index:
        """normed: [N, Lq], what queries are made of."""
        spec = self._spec
        q_NHD = self._linear(normed_NX, self._query_up).view(-1, spec.index_heads, spec.index_dim)
        key_ND = F.layer_norm(self._linear(x_NH, self._key).float(), (spec.index_dim,), *self._key_norm, EPS)
        key_ND = self._rotate(key_ND.to(x_NH.dtype)[:, None], *rotary)[:, 0]
        return Index(
            self._rotate(q_NHD, *rotary),
            rounded(key_ND) if spec.index_fp8 else key_ND,
            self._linear(x_NH.float(), self._weights) * self._scale,
        )

    def _rotate(self, x_NGD: Tensor, cos_N1R: Tensor, sin_N1R: Tensor) -> Tensor:
        size = self._spec.rope_dim
        return torch.cat((rotate(x_NGD[..., :size], cos_N1R, sin_N1R), x_NGD[..., size:]), dim=-1)


class LatentAttention(Mixer):
    """spec: of this layer, with the heads of this rank.

    down: [Lq + C, H], rows of queries first; without a query_norm these are the queries themselves, [Hq D +
    C, H]. query_up: [Hq D, Lq]. up: of keys and values. out: [H, Hq Dv]. indexer: of a layer that makes a
    choice of its own. group: the ranks that have the other heads.
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
        indexer: Indexer | None = None,
        group: Group,
        linear: Linear = linear,
    ):
        self._indexer = indexer
        self._layer, self._spec, self._group, self._linear = layer, spec, group, linear
        self._down, self._query_norm, self._query_up = down, query_norm, query_up
        self._latent_norm, self._up, self._out = latent_norm, up, out
        sizes = spec.latent_dim, spec.rope_dim
        self._sizes = [len(down) - sum(sizes), *sizes]
        self._on_gpu = runs_triton(down.device)

    def __call__(self, x_NH: Tensor, rotaries: Rotaries, attention: interface.Attention) -> Tensor:
        """[N, H]; or, for a norm that adds them up (`Norm.of_sum`), parts [P, N, H]."""
        make, rotary = self._fused if self._on_gpu else self._composed, rotaries[self._spec.rope]
        q_NHD, latent_NC, normed_NX = make(x_NH, *rotary)
        index = None
        if self._indexer is not None and normed_NX is not None:
            index = self._indexer(x_NH, normed_NX, rotary)
        out_NX = attention.latent(self._layer, q_NHD, latent_NC, self._up, index).flatten(1)
        return summed_product(self._linear, out_NX, self._out, None, self._group)

    def _composed(
        self, x_NH: Tensor, cos_N1R: Tensor, sin_N1R: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Queries [N, Hq, D], rotated, what is kept [N, C], and [N, Lq] that queries are made of."""
        N, spec, normed_NX = len(x_NH), self._spec, None
        q_NX, c_NL, rope_NR = self._linear(x_NH, self._down).split(self._sizes, dim=-1)
        if self._query_norm is not None and self._query_up is not None:
            normed_NX = self._query_norm(q_NX)
            q_NX = self._linear(normed_NX, self._query_up)
        nope_NHD, turned_NHR = q_NX.reshape(N, spec.num_heads, spec.head_dim).split(
            [spec.head_dim - spec.rope_dim, spec.rope_dim], dim=-1
        )
        q_NHD = torch.cat((nope_NHD, rotate(turned_NHR, cos_N1R, sin_N1R)), dim=-1)
        key_N1R = rotate(rope_NR[:, None], cos_N1R, sin_N1R)
        return q_NHD, torch.cat((self._latent_norm(c_NL), key_N1R[:, 0]), dim=-1), normed_NX

    def _fused(self, x_NH: Tensor, cos_N1R: Tensor, sin_N1R: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """The same in a launch each after the products."""
        from turnout.kernels.common.latent_rows import latents, rotated

        spec, norm, turn = self._spec, self._query_norm, (cos_N1R[:, 0], sin_N1R[:, 0])
        down, latent_norm = product(self._linear, x_NH, self._down, None), self._latent_norm
        gain = None if norm is None else norm.weight
        latent_NC, q_NL = latents(down, gain, latent_norm.weight, *turn, latent_norm.eps)
        if q_NL is not None and self._query_up is not None:
            down = product(self._linear, q_NL, self._query_up, None)
        return rotated(down, spec.num_heads, spec.head_dim, *turn), latent_NC, q_NL


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
    spec, rank, eps = heads.spec, projections.query_rank, EPS
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
    indexer = None
    if isinstance(spec, SparseLatentSpec) and not spec.shares_choice:
        indexer = _read_indexer(f"{prefix}.indexer", spec, projections, order, weights, hidden)
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
        indexer=indexer,
        group=group,
        linear=weights.multiply,
    )


def _read_indexer(
    prefix: str,
    spec: SparseLatentSpec,
    projections: LatentProjections,
    order: Sequence[int] | None,
    weights: Weights,
    hidden: int,
) -> Indexer:
    """From the tensors at `prefix`, whole on each rank."""
    heads, dim, outer = spec.index_heads, spec.index_dim, whole(hidden)
    query_up = weights.dense({f"{prefix}.wq_b": whole(heads * dim)}, whole(projections.query_rank))
    key = weights.dense({f"{prefix}.wk": whole(dim)}, outer)
    norm = [weights.tensor(f"{prefix}.k_norm.{name}", dim).float() for name in ("weight", "bias")]
    if order is not None and projections.index_interleaved:
        query_up = query_up[ordered_rows(query_up, range(0, heads * dim, dim), order)]
        key = key[ordered_rows(key, [0], order)]
        places = [*order, *range(spec.rope_dim, dim)]
        norm = [part[places] for part in norm]
    return Indexer(
        spec,
        query_up=query_up,
        key=key,
        key_norm=(norm[0], norm[1]),
        weights=weights.linear(f"{prefix}.weights_proj", whole(heads), outer, dtype=torch.float32),
        linear=weights.multiply,
    )
