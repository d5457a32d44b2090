"""A layer of Gated DeltaNet: its projections, and their rows as checkpoints store them.

All projections of the input are one matrix, whose rows are in the order that states expect
(`DeltaNetSpec.mixed`): queries, keys and values of all heads, z, b, a. Ranks that share requests divide key
heads, each with its value heads.

Legend: N tokens of a step, H hidden, X = `DeltaNetSpec.mixed`, C channels of the convolution, W its width,
Hk/Hv key/value heads, Dk/Dv their sizes, R = Hv / Hk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from turnout.attention import interface
from turnout.attention.delta_rule import DeltaCell
from turnout.attention.kinds import DeltaNetSpec
from turnout.models.blocks import Mixer, Norm, Rotaries, one_kernel
from turnout.models.dense import Dense, Linear, linear, product, product_of_both, summed_product
from turnout.models.shares import Share, whole
from turnout.models.spec import DecoderSpec
from turnout.models.weights import Weights
from turnout.parallel.groups import Group
from turnout.vocabulary import DeltaRows

if TYPE_CHECKING:  # numba, which not every machine has
    from turnout.kernels.cpu.recurrent_layer import RecurrentHalf


class DeltaNet(Mixer):
    """mixed: [X, H], in parts of its rows; out: [H, Hv Dv]. cell: the rest. group: the ranks that have the
    other heads."""

    def __init__(
        self,
        layer: int,
        cell: DeltaCell,
        *,
        mixed: Sequence[Dense],
        out: Dense,
        group: Group,
        linear: Linear,
    ):
        self._layer, self._cell, self._group, self._linear = layer, cell, group, linear
        self._mixed, self._out = mixed, out
        self._in_one_call = self._bind()

    def of_sum(
        self,
        norm: Norm,
        x_NH: Tensor,
        delta: Tensor | None,
        rotaries: Rotaries,
        attention: interface.Attention,
    ) -> tuple[Tensor, Tensor]:
        requests = attention.compiled_states(self._layer)
        if requests is not None and self._in_one_call is not None and norm.on_cpu:
            done = self._in_one_call(x_NH, delta, norm.weight, norm.eps, requests)
            if done is not None:
                return done
        return super().of_sum(norm, x_NH, delta, rotaries, attention)

    def __call__(self, x_NH: Tensor, rotaries: Rotaries, attention: interface.Attention) -> Tensor:
        """[N, H], or parts [P, N, H] for a norm that adds them up; positions count for nothing."""
        y_NY = attention.recur(self._layer, self._projected(x_NH, attention), self._cell)
        return summed_product(self._linear, y_NY, self._out, None, self._group)

    def _projected(self, x_NH: Tensor, attention: interface.Attention) -> Tensor:
        """[N, X], or parts of it where `recur` adds them up."""
        if attention.adds_parts(self._layer, len(x_NH)):
            if len(self._mixed) == 1:
                return product(self._linear, x_NH, self._mixed[0], None)
            large, small = self._mixed
            if isinstance(small, Tensor):
                mixed_PNX = product_of_both(self._linear, x_NH, large, small)
                if mixed_PNX is not None:
                    return mixed_PNX
        parts = [self._linear(x_NH, rows) for rows in self._mixed]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _bind(self) -> RecurrentHalf | None:
        """This and the norm before it as one kernel for few tokens on a CPU, where there is one."""
        cell, out, mixed = self._cell, self._out, self._mixed[0]
        if len(self._mixed) > 1 or not isinstance(mixed, Tensor) or not isinstance(out, Tensor):
            return None
        on_cpu = mixed.device.type == "cpu" and one_kernel(mixed.device, mixed.dtype, mixed.shape[1])
        if self._group.size > 1 or self._linear is not linear or not on_cpu or out.shape[1] % 16:
            return None
        from turnout.kernels.cpu.recurrent_layer import RecurrentHalf

        return RecurrentHalf(
            mixed_XH=mixed,
            out_HY=out,
            conv_WC=cell.conv_WC,
            decay_H=cell.decay_H,
            bias_H=cell.bias_H,
            norm_D=cell.norm_D,
            norm_eps=cell.eps,
            key_heads=cell.spec.num_kv_heads,
        )


def read_delta_net(
    i: int, prefix: str, decoder: DecoderSpec, layer: DeltaNetSpec, weights: Weights, group: Group
) -> DeltaNet:
    """layer: with the heads of the whole model."""
    local, H = layer.split(group.size), whole(decoder.shape.hidden_size)
    assert isinstance(local, DeltaNetSpec)
    keys = Share(layer.num_kv_heads, group.rank * local.num_kv_heads, local.num_kv_heads)
    values = keys.times(layer.num_heads // layer.num_kv_heads)
    by_kind = decoder.delta_rows == DeltaRows.BY_KIND
    read = _read_by_kind if by_kind else _read_by_key_head
    checkpoint, device = weights.checkpoint, weights.device

    def of_heads(name: str) -> Tensor:
        whole_H = checkpoint.tensor(f"{prefix}.{name}", (values.total,), torch.float32)
        return whole_H.narrow(0, values.start, values.size).to(device)

    conv_C1W = checkpoint.tensor(
        f"{prefix}.conv1d.weight", (layer.channels, 1, layer.conv_width), weights.dtype
    )
    cell = DeltaCell(
        spec=local,
        conv_WC=_channels(conv_C1W[:, 0], layer, keys, values).T.contiguous().to(device),
        decay_H=-of_heads("A_log").exp(),
        bias_H=of_heads("dt_bias"),
        norm_D=weights.tensor(f"{prefix}.norm.weight", layer.value_dim),
        eps=decoder.norm_eps,
    )
    return DeltaNet(
        i,
        cell,
        mixed=read(weights, prefix, layer, keys, values, H),
        out=weights.dense({f"{prefix}.out_proj": H}, values.times(layer.value_dim)),
        group=group,
        linear=weights.multiply,
    )


def _channels(rows: Tensor, layer: DeltaNetSpec, keys: Share, values: Share) -> Tensor:
    """Those of this rank's heads, of [C of all heads, ...]: queries, keys, values."""
    Dk, Dv = layer.head_dim, layer.value_dim
    sizes = [keys.total * Dk, keys.total * Dk, values.total * Dv]
    shares = keys.times(Dk), keys.times(Dk), values.times(Dv)
    parts = zip(rows.split(sizes), shares, strict=True)
    return torch.cat([part.narrow(0, share.start, share.size) for part, share in parts])


def _read_by_kind(
    weights: Weights, prefix: str, layer: DeltaNetSpec, keys: Share, values: Share, H: Share
) -> list[Dense]:
    """`in_proj_qkv`, `in_proj_z`, `in_proj_b`, `in_proj_a`."""
    all_values = whole(values.total * layer.value_dim)
    large = {f"{prefix}.in_proj_qkv": whole(layer.channels), f"{prefix}.in_proj_z": all_values}
    small = {f"{prefix}.in_proj_{name}": values for name in "ba"}
    rows = torch.arange(layer.channels + all_values.size)
    z = values.times(layer.value_dim)
    mine = torch.cat(
        (
            _channels(rows[: layer.channels], layer, keys, values),
            rows[layer.channels :].narrow(0, z.start, z.size),
        )
    )
    return _together(weights.dense(large, H), mine, weights.dense(small, H), None)


def _together(large: Dense, mine: Tensor, small: Dense, order: Tensor | None) -> list[Dense]:
    """Rows `mine` of `large`, then rows `order` of `small`: one matrix unless either is kept in FP8."""
    parts = [large[mine.to(large.device)], small if order is None else small[order.to(small.device)]]
    plain = [part for part in parts if isinstance(part, Tensor)]
    return [torch.cat(plain)] if len(plain) == len(parts) else parts


def _read_by_key_head(
    weights: Weights, prefix: str, layer: DeltaNetSpec, keys: Share, values: Share, H: Share
) -> list[Dense]:
    """`in_proj_qkvz`: for each key head Dk of query, Dk of key, R Dv of values, R Dv of z; `in_proj_ba`: R of
    b, R of a."""
    Dk, Dv, R = layer.head_dim, layer.value_dim, values.total // keys.total
    large = {f"{prefix}.in_proj_qkvz": keys.times(2 * Dk + 2 * R * Dv)}
    small = {f"{prefix}.in_proj_ba": keys.times(2 * R)}

    def by_kind(sizes: list[int]) -> Tensor:
        rows = torch.arange(keys.size * sum(sizes)).view(keys.size, -1)
        return torch.cat([part.flatten() for part in rows.split(sizes, dim=1)])

    qkvz, ba = by_kind([Dk, Dk, R * Dv, R * Dv]), by_kind([R, R])
    return _together(weights.dense(large, H), qkvz, weights.dense(small, H), ba)
