"""The projections of compressed attention (attention/compressed.py), by the names of DeepSeek-V4's release.

    q = turn(unit(up(norm(down(x)))));  kv = turn(norm(wkv(x)));  out = out_b(out_a(turn back(attention)))

Vectors are keys and values at once, so values carry rotations, which are taken back by the query's angle. All
that reads x is one matrix. Heads are divided into groups, each with an output projection of its own (out_a).

Legend: N tokens of a step, H hidden, Hq query heads, D head size, R its rotated end, Lq rank of queries, G
groups of outputs, Z rows of each group's projection, Hi/Di number/size of index heads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from turnout.attention import interface
from turnout.attention.entries import Compressible, Compressor
from turnout.attention.kinds import CompressedSpec
from turnout.models.blocks import Mixer, Norm, Rotaries, RotaryEmbedding
from turnout.models.dense import Dense, Linear, product, summed_product
from turnout.models.shares import Share, whole
from turnout.models.spec import CompressedProjections
from turnout.models.weights import Weights
from turnout.packages import runs_triton
from turnout.parallel.groups import Group


def turned(
    x_NGD: Tensor, rotary: tuple[Tensor, Tensor], *, norm: Norm | None = None, back: bool = False
) -> Tensor:
    """The last R of each head rotated in pairs of neighbours, by cos and sin [N, 1, R] of halves, after a
    norm. x: or, on CUDA, parts [P, N, G, D] of it."""
    cos_N1R, sin_N1R = rotary
    if _by_kernel(x_NGD):
        from turnout.kernels.common.turned import turn

        of_norm: Any = {"weight_D": norm.weight, "eps": norm.eps} if norm else {}
        rotated: Tensor = turn(x_NGD, cos_N1R[:, 0], sin_N1R[:, 0], back=back, **of_norm)
        return rotated
    if norm:
        x_NGD = norm(x_NGD)
    half = cos_N1R.shape[-1] // 2
    cos, sin = cos_N1R[..., :half], sin_N1R[..., half:]
    if back:
        sin = -sin
    still, first, second = x_NGD[..., : -2 * half], x_NGD[..., -2 * half :: 2], x_NGD[..., 1 - 2 * half :: 2]
    pairs = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((still, pairs.flatten(-2).to(x_NGD.dtype)), dim=-1)


def _by_kernel(x: Tensor) -> bool:
    return runs_triton(x.device)


class TurnAt:
    """Rotates [M, D] by positions [M]; an object, so that it can be shared between processes."""

    def __init__(self, rope: RotaryEmbedding):
        self._rope = rope

    def __call__(self, x_MD: Tensor, positions_M: Tensor) -> Tensor:
        return turned(x_MD[:, None], self._rope(positions_M))[:, 0]

    def cos_sin(self, positions_M: Tensor) -> tuple[Tensor, Tensor]:
        cos_M1R, sin_M1R = self._rope(positions_M)
        return cos_M1R[:, 0], sin_M1R[:, 0]


class CompressedProjection(Mixer):
    """spec: of this layer, with the heads of this rank. down: Lq rows of queries, D of kv, X of what entries
    are made of, Hi of index weights. out_a: [G, Z, Hq D / G]. compressors: of entries, of the index's, none
    in layers without entries. index_up: [Hi Di, Lq]. group: the ranks that have the other heads.
    """

    def __init__(
        self,
        layer: int,
        spec: CompressedSpec,
        *,
        down: Dense,
        query_norm: Norm,
        query_up: Dense,
        query_unit: Norm,
        kv_norm: Norm,
        sinks: Tensor,
        compressors: tuple[Compressor, ...],
        index_up: Dense | None,
        out_a_GZX: Tensor,
        out_b: Dense,
        group: Group,
        linear: Linear,
    ):
        self._layer, self._spec, self._group, self._linear = layer, spec, group, linear
        self._down, self._query_norm, self._query_up = down, query_norm, query_up
        self._query_unit, self._kv_norm, self._sinks = query_unit, kv_norm, sinks
        self._compressors, self._index_up = compressors, index_up
        self._out_a_GZX, self._out_b = out_a_GZX, out_b
        rank = query_norm.weight.shape[-1]
        self._sizes = [rank, spec.head_dim, spec.open_dim, spec.index_heads]

    def __call__(self, x_NH: Tensor, rotaries: Rotaries, attention: interface.Attention) -> Tensor:
        """[N, H]; or, for whoever adds them up, parts [P, N, H]."""
        N, spec, rotary = len(x_NH), self._spec, rotaries[self._spec.rope]
        q_NL, kv_ND, raw_NX, weights_NI = self._divided(product(self._linear, x_NH, self._down, None), rotary)
        q_NHD = self._heads(q_NL, self._query_up, spec.num_heads)
        q_NHD = turned(q_NHD, rotary, norm=self._query_unit)
        rest = None
        if self._index_up is not None:
            rest = Compressible(
                raw_NX=raw_NX,
                entries=self._compressors[0],
                index_entries=self._compressors[1],
                index_queries=turned(self._heads(q_NL, self._index_up, spec.index_heads), rotary),
                index_weights=weights_NI,
            )
        elif self._compressors:
            rest = Compressible(raw_NX=raw_NX, entries=self._compressors[0])
        out_NHD = attention.compressed(self._layer, q_NHD, kv_ND, self._sinks, rest)
        out_NGX = turned(out_NHD, rotary, back=True).reshape(N, spec.output_groups, self._out_a_GZX.shape[-1])
        out_GNZ = torch.bmm(out_NGX.transpose(0, 1), self._out_a_GZX.transpose(1, 2))
        out_NX = out_GNZ.transpose(0, 1).flatten(1)
        return summed_product(self._linear, out_NX, self._out_b, None, self._group)

    def _divided(self, down: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What queries are made of [N, Lq], kv [N, D], what entries are made of [N, X], float32 index weights
        [N, Hi]. down: [N, ...], or parts of it."""
        spec, query_norm, kv_norm = self._spec, self._query_norm, self._kv_norm
        scale = (spec.index_heads * spec.index_dim or 1) ** -0.5
        if _by_kernel(down):
            from turnout.kernels.common.turned import divide

            cos_NR, sin_NR = (part_N1R[:, 0] for part_N1R in rotary)
            gains = query_norm.weight, kv_norm.weight
            found: tuple[Tensor, Tensor, Tensor, Tensor] = divide(
                down, self._sizes, *gains, cos_NR, sin_NR, scale=scale, eps=kv_norm.eps
            )
            return found
        q_NL, kv_ND, raw_NX, weights_NI = down.split(self._sizes, dim=-1)
        kv_ND = turned(kv_ND[:, None], rotary, norm=kv_norm)[:, 0]
        return query_norm(q_NL), kv_ND, raw_NX, weights_NI.float() * scale

    def _heads(self, x_NL: Tensor, up: Dense, heads: int) -> Tensor:
        """[N, heads, size], or parts of it."""
        return product(self._linear, x_NL, up, None).unflatten(-1, (heads, -1))


def _compressors(prefix: str, spec: CompressedSpec) -> dict[str, int]:
    """Those of the layer, and the size of the entries that each makes."""
    made = {f"{prefix}.compressor": spec.head_dim} if spec.rate else {}
    return made | ({f"{prefix}.indexer.compressor": spec.index_dim} if spec.index_heads else {})


def compressor_tensors(prefix: str, spec: CompressedSpec) -> list[str]:
    """What a checkpoint must have for the layer at `prefix` to make entries."""
    parts = ("wkv.weight", "wgate.weight", "ape", "norm.weight")
    return [f"{name}.{part}" for name in _compressors(prefix, spec) for part in parts]


def read_compressed_attention(
    layer: int,
    prefix: str,
    spec: CompressedSpec,
    projections: CompressedProjections,
    *,
    rope: RotaryEmbedding,
    norm_eps: float,
    weights: Weights,
    hidden: int,
    group: Group,
) -> CompressedProjection:
    """From the tensors at `prefix`. spec: with the heads of the whole model; rope: of the layer."""
    local, outer, rank = spec.split(group.size), whole(hidden), projections.query_rank
    D, Z = spec.head_dim, projections.output_rank
    heads = Share(spec.num_heads, group.rank * local.num_heads, local.num_heads)
    groups = Share(spec.output_groups, group.rank * local.output_groups, local.output_groups)
    rows = {f"{prefix}.wq_a": whole(rank), f"{prefix}.wkv": whole(D)}
    index, made = f"{prefix}.indexer", _compressors(prefix, spec)
    for name, dim in made.items():
        rows |= {f"{name}.{part}": whole(spec.series * dim) for part in ("wkv", "wgate")}
    index_up = None
    if spec.index_heads:
        rows[f"{index}.weights_proj"] = whole(spec.index_heads)
        index_up = weights.dense({f"{index}.wq_b": whole(spec.index_heads * spec.index_dim)}, whole(rank))
    sinks_H = weights.tensor(f"{prefix}.attn_sink", spec.num_heads)
    out_a = weights.linear(f"{prefix}.wo_a", groups.times(Z), whole(spec.num_heads * D // spec.output_groups))

    def norm(name: str, size: int) -> Norm:
        return Norm(weights.tensor(f"{name}.weight", size), norm_eps)

    compressors = tuple(
        Compressor(
            spec=spec,
            bias_RX=weights.tensor(f"{name}.ape", spec.rate, spec.series * dim),
            norm=norm(f"{name}.norm", dim),
            turn=TurnAt(rope),
        )
        for name, dim in made.items()
    )
    return CompressedProjection(
        layer,
        local,
        down=weights.fused(rows, outer),
        query_norm=norm(f"{prefix}.q_norm", rank),
        query_up=weights.dense({f"{prefix}.wq_b": heads.times(D)}, whole(rank)),
        query_unit=Norm(torch.ones(D, dtype=weights.dtype, device=weights.device), norm_eps),
        kv_norm=norm(f"{prefix}.kv_norm", D),
        sinks=sinks_H.narrow(0, heads.start, heads.size).float(),
        compressors=compressors,
        index_up=index_up,
        out_a_GZX=out_a.unflatten(0, (groups.size, Z)),
        out_b=weights.dense({f"{prefix}.wo_b": outer}, groups.times(Z)),
        group=group,
        linear=weights.multiply,
    )
