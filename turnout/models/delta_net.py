"""A layer of Gated DeltaNet: its projections, and their rows as checkpoints store them.

All projections of the input are one matrix, whose rows are in the order that states expect
(`DeltaNetSpec.mixed`): queries, keys and values of all heads, z, b, a. Ranks that share requests divide key
heads, each with its value heads.

Legend: N tokens of a step, H hidden, X = `DeltaNetSpec.mixed`, C channels of the convolution, W its width,
Hk/Hv key/value heads, Dk/Dv their sizes, R = Hv / Hk.
"""

from __future__ import annotations

import torch
from torch import Tensor

from turnout.attention import interface
from turnout.attention.delta_rule import DeltaCell
from turnout.attention.kinds import DeltaNetSpec
from turnout.models.blocks import Rotaries
from turnout.models.dense import Linear
from turnout.models.shares import Share, whole
from turnout.models.spec import DecoderSpec
from turnout.models.weights import Weights
from turnout.parallel.groups import Group
from turnout.vocabulary import DeltaRows


class DeltaNet:
    """mixed: [X, H]; out: [H, Hv Dv]. cell: the rest. group: the ranks that have the other heads."""

    def __init__(
        self, layer: int, cell: DeltaCell, *, mixed: Tensor, out: Tensor, group: Group, linear: Linear
    ):
        self._layer, self._cell, self._group, self._linear = layer, cell, group, linear
        self._mixed, self._out = mixed, out

    def __call__(self, x_NH: Tensor, rotaries: Rotaries, attention: interface.Attention) -> Tensor:
        """[N, H]; positions count for nothing."""
        mixed_NX = self._linear(x_NH, self._mixed)
        y_NY = attention.recur(self._layer, mixed_NX, self._cell)
        return self._group.all_reduce(self._linear(y_NY, self._out))


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
        out=weights.linear(f"{prefix}.out_proj", H, values.times(layer.value_dim)),
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
) -> Tensor:
    """`in_proj_qkv`, `in_proj_z`, `in_proj_b`, `in_proj_a`."""
    qkv = weights.linear(f"{prefix}.in_proj_qkv", whole(layer.channels), H)
    rows = {f"{prefix}.in_proj_z": values.times(layer.value_dim)}
    rows |= {f"{prefix}.in_proj_{name}": values for name in "ba"}
    return torch.cat((_channels(qkv, layer, keys, values), weights.fused(rows, H)))


def _read_by_key_head(
    weights: Weights, prefix: str, layer: DeltaNetSpec, keys: Share, values: Share, H: Share
) -> Tensor:
    """`in_proj_qkvz`: for each key head Dk of query, Dk of key, R Dv of values, R Dv of z; `in_proj_ba`: R of
    b, R of a."""
    Dk, Dv, R = layer.head_dim, layer.value_dim, values.total // keys.total
    qkvz = weights.linear(f"{prefix}.in_proj_qkvz", keys.times(2 * Dk + 2 * R * Dv), H)
    ba = weights.linear(f"{prefix}.in_proj_ba", keys.times(2 * R), H)
    parts = [
        *qkvz.unflatten(0, (keys.size, -1)).split([Dk, Dk, R * Dv, R * Dv], dim=1),
        *ba.unflatten(0, (keys.size, -1)).split([R, R], dim=1),
    ]
    return torch.cat([part.flatten(0, 1) for part in parts])
