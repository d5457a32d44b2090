"""Attention with keys and values of its own: projections, norms, rotation; and how their weights are read.

Legend: N tokens of a step, H hidden, Hq/Hkv query/KV heads, G = Hq + Hkv, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from turnout.attention import interface
from turnout.attention.kinds import AttentionSpec
from turnout.models.blocks import Mixer, Norm, Rotaries, one_kernel, rotate
from turnout.models.dense import Dense, Linear, ordered_rows, product, summed_product
from turnout.models.rope import NOPE
from turnout.models.shares import Heads, whole
from turnout.models.spec import DecoderSpec
from turnout.models.weights import Weights
from turnout.parallel.groups import Group
from turnout.vocabulary import QKNorm

if TYPE_CHECKING:  # numba, which not every machine has
    from turnout.kernels.cpu.decoder_layer import AttentionHalf


class WholeNorm:
    """RMS norm of all query heads of a token as one vector, and of all its key heads as another.

    weight: [G, D], of this rank's heads. total_q, total_k: how many heads the model has. group: the ranks
    that have the others; where ranks outnumber key heads, each of `copies` ranks has the same one.
    """

    def __init__(
        self,
        weight_GD: Tensor,
        eps: float,
        *,
        num_q: int,
        total_q: int,
        total_k: int,
        copies: int,
        group: Group,
    ):
        D = weight_GD.shape[-1]
        self._weight_GD, self._eps, self._num_q, self._group = weight_GD, eps, num_q, group
        self._each = [Norm(weight.flatten(), eps) for weight in (weight_GD[:num_q], weight_GD[num_q:])]
        self._sizes_2 = torch.tensor([total_q * D, total_k * D * copies], device=weight_GD.device)

    def __call__(self, x_NGD: Tensor) -> Tensor:
        """Computed in float32; the sums of squares are those of all ranks, two numbers a token."""
        N, G, D = x_NGD.shape
        parts = x_NGD[:, : self._num_q], x_NGD[:, self._num_q :]
        if self._group.size == 1:
            normed = [norm.of_sum(x.flatten(1), None)[1] for norm, x in zip(self._each, parts, strict=True)]
            return torch.cat(normed, dim=1).view(N, G, D)
        # In float64, so that the order of a sum, which a GPU chooses by the number of rows, does not show.
        sums = [x.float().square().sum((1, 2), dtype=torch.float64) for x in parts]
        sums_N2 = self._group.all_reduce(torch.stack(sums, dim=1).float())
        scale_N2 = torch.rsqrt(sums_N2 / self._sizes_2 + self._eps)
        scaled = [x.float() * scale_N2[:, i, None, None] for i, x in enumerate(parts)]
        return (torch.cat(scaled, dim=1) * self._weight_GD).to(x_NGD.dtype)


class Attention(Mixer):
    """Projections, optional norm of queries and keys, rotary embedding; the rest is the engine's.

    spec: of this layer, with the heads of this rank. qkv: [(Hq + 2 Hkv) D, H], rows of queries first, then
    keys, then values; out: [H, Hq D]. qk_norm: norm of [N, G, D]: every query and key head with its weight,
    or all of them together; or None. sinks: float32 [Hq], where the layer has them. gate: [Hq D, H], of a
    projection whose sigmoid multiplies what attention gives, or None. group: the ranks that have the other
    heads. Only one of them has `out_bias`.
    """

    def __init__(
        self,
        layer: int,
        spec: AttentionSpec,
        *,
        qkv: Dense,
        qkv_bias: Tensor | None,
        out: Dense,
        out_bias: Tensor | None,
        qk_norm: Norm | WholeNorm | None,
        sinks: Tensor | None,
        gate: Dense | None,
        group: Group,
        linear: Linear,
    ):
        self._layer, self._group, self._linear = layer, group, linear
        self._num_q, self._head_dim, self._rope = spec.num_heads, spec.head_dim, spec.rope
        self._num_qk = spec.num_heads + spec.num_kv_heads
        self._num_qkv = self._num_qk + spec.num_kv_heads
        self._qkv, self._qkv_bias = qkv, qkv_bias
        self._out, self._out_bias = out, out_bias
        self._qk_norm, self._sinks, self._gate = qk_norm, sinks, gate
        self._fused = one_kernel(qkv.device, qkv.dtype, spec.head_dim // 2)
        self._in_one_call = self._bind()

    def of_sum(
        self,
        norm: Norm,
        x_NH: Tensor,
        delta: Tensor | None,
        rotaries: Rotaries,
        attention: interface.Attention,
    ) -> tuple[Tensor, Tensor]:
        compiled = attention.compiled(self._layer)
        if compiled is not None and self._in_one_call is not None and norm.on_cpu:
            cos, sin = rotaries[self._rope]
            done = self._in_one_call(x_NH, delta, norm.weight, norm.eps, cos, sin, *compiled)
            if done is not None:
                return done
        adds_parts = self._qk_norm is None or isinstance(self._qk_norm, Norm)
        if self._fused and adds_parts and self._qkv_bias is None and attention.place(self._layer) is not None:
            found = norm.product(x_NH, delta, self._linear, self._qkv)
            if found is not None:
                total_NH, normed_NH, heads = found
                return total_NH, self(normed_NH, rotaries, attention, heads)
        return super().of_sum(norm, x_NH, delta, rotaries, attention)

    def __call__(
        self,
        x_NH: Tensor,
        rotaries: Rotaries,
        attention: interface.Attention,
        heads: Tensor | None = None,
    ) -> Tensor:
        """[N, H]; or, for a norm that adds them up (`Norm.of_sum`), parts [P, N, H].

        heads: parts of x's queries, keys and values, where `of_sum` has them.
        """
        N, D, rotary = x_NH.shape[0], self._head_dim, rotaries[self._rope]
        if self._fused:
            out_NHD = self._attend_fused(self._fused, x_NH, rotary, attention, heads)
        else:
            heads_NGD = self._linear(x_NH, self._qkv, self._qkv_bias).view(N, self._num_qkv, D)
            q_NHD, k_NHD = self._compose(heads_NGD, *rotary)
            out_NHD = attention(self._layer, q_NHD, k_NHD, heads_NGD[:, self._num_qk :], self._sinks)
        flat_NX = out_NHD.reshape(N, self._num_q * D)
        if self._gate is not None and self._fused and x_NH.device.type == "cuda":
            flat_NX = self._fused.gated(flat_NX, product(self._linear, x_NH, self._gate, None))
        elif self._gate is not None:
            flat_NX = flat_NX * torch.sigmoid(self._linear(x_NH, self._gate))
        return summed_product(self._linear, flat_NX, self._out, self._out_bias, self._group)

    def _bind(self) -> AttentionHalf | None:
        """This and the norm before it as one kernel for few tokens on a CPU, where there is one."""
        each, gate = self._qk_norm, self._gate
        others = self._qkv_bias, self._out_bias
        plain = all(other is None for other in others) and self._group.size == 1
        if not plain or not isinstance(self._qkv, Tensor) or not isinstance(self._out, Tensor):
            return None
        if not (gate is None or isinstance(gate, Tensor)):
            return None
        on_cpu = self._fused is not None and self._qkv.device.type == "cpu"
        if not on_cpu or not (each is None or isinstance(each, Norm)):
            return None
        from turnout.kernels.cpu.decoder_layer import AttentionHalf

        return AttentionHalf(
            qkv_XH=self._qkv,
            head_gain_GD=None if each is None else each.weight,
            head_eps=0.0 if each is None else each.eps,
            out_HY=self._out,
            sinks_H=self._sinks,
            num_q=self._num_q,
            num_kv=self._num_qk - self._num_q,
            head_dim=self._head_dim,
            gate_YH=gate,
        )

    def _compose(self, heads_NGD: Tensor, cos_N1D: Tensor, sin_N1D: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys, normed and rotated."""
        qk_NGD = heads_NGD[:, : self._num_qk]
        if self._qk_norm is not None:
            qk_NGD = self._qk_norm(qk_NGD)
        qk_NGD = rotate(qk_NGD, cos_N1D, sin_N1D)
        return qk_NGD[:, : self._num_q], qk_NGD[:, self._num_q :]

    def _attend_fused(
        self,
        rows: ModuleType,
        x_NH: Tensor,
        rotary: tuple[Tensor, Tensor],
        attention: interface.Attention,
        heads: Tensor | None,
    ) -> Tensor:
        """Norm, rotation and, where the cache is there to be written, the store in one launch."""
        norm, num_k = self._qk_norm, self._num_qk - self._num_q
        each = norm if isinstance(norm, Norm) else None
        weight_GD, eps = (None, 0.0) if each is None else (each.weight, each.eps)
        cos_ND, sin_ND = (x_N1D[:, 0] for x_N1D in rotary)
        place = attention.place(self._layer)
        given = self._num_q, num_k, cos_ND, sin_ND, weight_GD, eps
        if place is not None and norm is each:
            if heads is None:
                heads = product(self._linear, x_NH, self._qkv, self._qkv_bias)
            projected = interface.ProjectedHeads(heads, *given)
            out_NHD = attention.attend_projected(self._layer, projected, self._sinks)
            if out_NHD is not None:
                return out_NHD
            q_NHD = attention.queries((len(x_NH), self._num_q, self._head_dim))
            q_NHD, _ = rows.rotate(heads, *given, store=place, q_NHD=q_NHD)
            return attention.attend(self._layer, q_NHD, self._sinks)
        heads_NX = self._linear(x_NH, self._qkv, self._qkv_bias)
        if isinstance(norm, WholeNorm):
            qk_NGD = heads_NX.view(len(x_NH), self._num_qkv, self._head_dim)[:, : self._num_qk]
            qk_NGD.copy_(norm(qk_NGD))
            if place is not None:
                q_NHD, _ = rows.rotate(heads_NX, *given, store=place)
                return attention.attend(self._layer, q_NHD, self._sinks)
        q_NHD, k_NHD = rows.rotate(heads_NX, *given)
        assert k_NHD is not None, "keys are returned unless stored"
        v_NHD = heads_NX.view(len(x_NH), self._num_qkv, self._head_dim)[:, self._num_qk :]
        return attention(self._layer, q_NHD, k_NHD, v_NHD, self._sinks)


def read_attention(
    i: int, prefix: str, decoder: DecoderSpec, layer: AttentionSpec, weights: Weights, group: Group
) -> Attention:
    """From the tensors at `prefix`. layer: with the heads of the whole model."""
    H, heads = decoder.shape.hidden_size, Heads.of(layer, group)
    rows = {f"{prefix}.q_proj": heads.queries, f"{prefix}.k_proj": heads.keys}
    rows[f"{prefix}.v_proj"] = heads.values
    out_bias = weights.tensor(f"{prefix}.o_proj.bias", H) if decoder.out_bias else None
    order = None if layer.rope == NOPE else decoder.rope.order
    if decoder.output_gate:
        rows[f"{prefix}.q_proj"] = heads.queries.times(2)
    qkv, gate = weights.dense(rows, whole(H)), None
    qkv_bias = weights.fused_bias(rows) if decoder.qkv_bias else None
    if decoder.output_gate:
        qkv, gate = _without_gate(qkv, heads.spec)
    if order is not None:
        D = layer.head_dim
        starts = range(0, (heads.spec.num_heads + heads.spec.num_kv_heads) * D, D)
        turned = ordered_rows(qkv, starts, order)
        qkv, qkv_bias = qkv[turned], None if qkv_bias is None else qkv_bias[turned]
    sinks = None
    if layer.sinks:
        of_all = weights.tensor(f"{prefix}.sinks", heads.heads.total)
        sinks = of_all.narrow(0, heads.heads.start, heads.heads.size).float()
    return Attention(
        i,
        heads.spec,
        qkv=qkv,
        qkv_bias=qkv_bias,
        out=weights.dense({f"{prefix}.o_proj": whole(H)}, heads.outputs),
        out_bias=out_bias if group.rank == 0 else None,
        qk_norm=_read_qk_norm(prefix, decoder, layer, heads, order, weights, group),
        sinks=sinks,
        gate=gate,
        group=group,
        linear=weights.multiply,
    )


def _read_qk_norm(
    prefix: str,
    decoder: DecoderSpec,
    layer: AttentionSpec,
    heads: Heads,
    order: Sequence[int] | None,
    weights: Weights,
    group: Group,
) -> Norm | WholeNorm | None:
    kind, eps, local, D = decoder.qk_norm, decoder.norm_eps, heads.spec, layer.head_dim
    if kind == QKNorm.NONE or (kind == QKNorm.UNIT and layer.rope == NOPE):
        return None
    if kind == QKNorm.UNIT:
        num_qk = local.num_heads + local.num_kv_heads
        return Norm(torch.ones(num_qk, D, dtype=weights.dtype, device=weights.device), eps)
    parts = []
    for name, share in ((f"{prefix}.q_norm", heads.queries), (f"{prefix}.k_norm", heads.keys)):
        if kind == QKNorm.WHOLE:
            weight = weights.tensor(f"{name}.weight", share.total)
            parts.append(weight.narrow(0, share.start, share.size).view(-1, D))
        else:
            weight = weights.norm(name, D, around_one=decoder.norms_around_one)
            parts.append(weight.expand(share.size // D, D))
    weight_GD = torch.cat(parts)
    if order is not None:
        weight_GD = weight_GD[:, list(order)].contiguous()
    if kind == QKNorm.HEAD:
        return Norm(weight_GD, eps, weights.dtype)
    return WholeNorm(
        weight_GD,
        eps,
        num_q=local.num_heads,
        total_q=layer.num_heads,
        total_k=layer.num_kv_heads,
        copies=group.size * local.num_kv_heads // layer.num_kv_heads,
        group=group,
    )


def _without_gate(weight: Dense, layer: AttentionSpec) -> tuple[Dense, Dense]:
    """(queries, keys and values; gates), of rows in which each query head is followed by its gate."""
    D, num_q = layer.head_dim, layer.num_heads
    rows = torch.arange(len(weight), device=weight.device)
    queries, gates = rows[: 2 * num_q * D].view(num_q, 2, D).unbind(1)
    return weight[torch.cat((queries.flatten(), rows[2 * num_q * D :]))], weight[gates.flatten()]
