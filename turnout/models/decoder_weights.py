"""Reads a decoder's weights: which tensors make which part, in which order of rows, and this rank's share.

Legend: H hidden, V vocabulary, E experts, Hq/Hkv query/KV heads, G = Hq + Hkv, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

import torch
from torch import Tensor

from turnout.attention.kinds import CompressedSpec, DeltaNetSpec
from turnout.checkpoint import ExpertShape
from turnout.checkpoint.errors import CheckpointError
from turnout.formats.experts import ExpertWeights, shard
from turnout.malloc import release_freed_memory
from turnout.models.attention import read_attention
from turnout.models.blocks import (
    MLP,
    Embedding,
    GatedMLP,
    Head,
    Mixer,
    Norm,
    RotaryEmbedding,
)
from turnout.models.compressed_attention import compressor_tensors, read_compressed_attention
from turnout.models.decoder import Decoder, DecoderLayer, DraftLayer
from turnout.models.delta_net import read_delta_net
from turnout.models.interface import ProgressFn
from turnout.models.latent_attention import read_latent_attention
from turnout.models.moe_block import MoEBlock
from turnout.models.rope import NOPE, Rope
from turnout.models.shares import Heads, split, whole
from turnout.models.spec import COMPRESSED_ROPE, DecoderSpec, DraftNames, StreamSpec
from turnout.models.streams import StreamEmbedding, StreamLayer, StreamNorm, StreamWeights
from turnout.models.weights import Weights
from turnout.moe.interface import Experts, Keep
from turnout.moe.plan import MoEPlan
from turnout.parallel.groups import SINGLE_RANK, Groups, shares
from turnout.vocabulary import SharedExpert


class DecoderReader:
    """One decoder of what `spec` says, for the rank that `groups` and `plan` are of.

    make_runner: gives the runner of each MoE layer instead of the plan's. keep: gives what was prepared
    before under the same key (SharedWeights).
    """

    def __init__(
        self,
        spec: DecoderSpec,
        weights: Weights,
        plan: MoEPlan,
        groups: Groups,
        make_runner: Callable[[int], Experts] | None,
        keep: Keep,
    ):
        self._spec, self._weights, self._plan, self._groups = spec, weights, plan, groups
        self._ahead: dict[int, Future[ExpertWeights]] = {}  # by layer, those that are being read ahead
        self._shape, self._group, self._make_runner = spec.shape, groups.attention_tp, make_runner
        self._dense_group = self._group if groups.topology.dense_tp > 1 else SINGLE_RANK.world
        self._keep, self._share = keep, f"{self._group.rank} of {self._group.size}"
        self._moe_layers: list[MoEBlock] = []

    def read(self, progress: ProgressFn) -> Decoder:
        """Reads every weight, reporting each layer; raises CheckpointError for one that is wrong."""
        spec, weights, count = self._spec, self._weights, self._shape.num_layers
        local = tuple(layer.split(self._group.size) for layer in spec.shape.attention)
        self._check_small()
        self._tables = {i: self._read_hash(i) for i in spec.hash_layers}
        embed, head = self._keep(f"vocabulary {self._share}", self._read_vocabulary)
        ropes = self._ropes()
        layers: list[DecoderLayer | StreamLayer] = []
        for i in range(count):
            progress("loading layers", i, count)
            layers.append(self._layer(i))
            release_freed_memory()
        progress("loading layers", count, count)
        names, draft = spec.draft_names, None
        if spec.drafts and names:
            last = layers.pop()
            assert isinstance(last, DecoderLayer), "draft layers have one residual stream"
            draft = self._read_draft_layer(last, names)
        norm = self._read_norm(spec.names.outer("norm"))
        if spec.streams:
            embed = StreamEmbedding(embed, spec.streams.count)
            norm = StreamNorm(self._read_streams("hc_head", spec.streams, last=True), norm)
        return Decoder(
            replace(spec.shape, attention=local),
            embed=embed,
            head=head,
            ropes={
                name: RotaryEmbedding(ropes[name], device=weights.device, dtype=weights.dtype)
                for name in {layer.rope for layer in local}
            },
            layers=layers,
            moe_layers=self._moe_layers,
            norm=norm,
            draft=draft,
        )

    def _ropes(self) -> dict[str, Rope]:
        spec = self._spec
        found = {"default": spec.rope, NOPE: spec.rope.still()}
        return found | ({COMPRESSED_ROPE: spec.compressed_rope} if spec.compressed_rope else {})

    def _layer(self, i: int) -> DecoderLayer | StreamLayer:
        names = self._spec.names
        prefix = self._spec.layer_prefix(i)
        mlp: MLP
        if i in self._spec.moe_layers:
            mlp = moe = self._read_moe(i, f"{prefix}.{names.moe}")
            self._moe_layers.append(moe)
        else:
            dense = f"{prefix}.{names.dense}"
            share = f"{self._dense_group.rank} of {self._dense_group.size}"
            mlp = self._keep(f"{dense} {share}", lambda: self._read_dense(dense))
        attention_norm, attention, mlp_norm = self._keep(
            f"{prefix} {self._share}",
            lambda: (
                self._read_norm(f"{prefix}.{names.attention_norm}"),
                self._read_mixer(i, prefix),
                self._read_norm(f"{prefix}.{names.mlp_norm}"),
            ),
        )
        if spec := self._spec.streams:
            of_attention, of_mlp = self._keep(
                f"{prefix} streams",
                lambda: [self._read_streams(f"{prefix}.hc_{part}", spec) for part in ("attn", "ffn")],
            )
            return StreamLayer(
                attention_streams=of_attention,
                attention_norm=attention_norm,
                attention=attention,
                mlp_streams=of_mlp,
                mlp_norm=mlp_norm,
                mlp=mlp,
            )
        return DecoderLayer(attention_norm=attention_norm, attention=attention, mlp_norm=mlp_norm, mlp=mlp)

    def _read_streams(self, prefix: str, streams: StreamSpec, *, last: bool = False) -> StreamWeights:
        """last: behind all layers, where streams are only summed."""
        S, H = streams.count, self._shape.hidden_size
        sizes = (S, 1) if last else (S * (S + 2), 3)

        def read(name: str, *shape: int) -> Tensor:
            read = self._weights.checkpoint.tensor(f"{prefix}_{name}", shape, torch.float32)
            return read.to(self._weights.device)

        return StreamWeights(
            spec=streams,
            fn=read("fn", sizes[0], S * H),
            base=read("base", sizes[0]),
            scale=read("scale", sizes[1]),
            norm_eps=self._spec.norm_eps,
        )

    def _read_draft_layer(self, layer: DecoderLayer, names: DraftNames) -> DraftLayer:
        hidden = self._shape.hidden_size
        return DraftLayer(
            token_norm=self._read_norm(names.token_norm),
            hidden_norm=self._read_norm(names.hidden_norm),
            projection=self._weights.linear(names.projection, whole(hidden), whole(2 * hidden)),
            multiply=self._weights.multiply,
            layer=layer,
            norm=self._read_norm(names.norm),
        )

    def _read_vocabulary(self) -> tuple[Embedding, Head]:
        size, hidden = self._shape.vocab_size, whole(self._shape.hidden_size)
        rows = split(size, self._group)
        names = self._spec.names
        embedding_VH = self._weights.linear(names.outer(names.embedding), rows, hidden)
        head_VH = embedding_VH
        if not self._spec.tied_embeddings:
            head_VH = self._weights.linear(names.head, rows, hidden)
        embed = Embedding(embedding_VH, rows, self._group)
        head = Head(head_VH, shares(size, self._group.size), self._group, self._weights.multiply)
        return embed, head

    def _read_norm(self, prefix: str) -> Norm:
        around_one = self._spec.norms_around_one
        weight_H = self._weights.norm(prefix, self._shape.hidden_size, around_one=around_one)
        return Norm(weight_H, self._spec.norm_eps, self._weights.dtype)

    def _read_mixer(self, i: int, prefix: str) -> Mixer:
        spec, weights, group = self._spec, self._weights, self._group
        layer, H = spec.shape.attention[i], self._shape.hidden_size
        if isinstance(layer, DeltaNetSpec):
            return read_delta_net(i, f"{prefix}.{spec.names.recurrent}", spec, layer, weights, group)
        prefix = f"{prefix}.{spec.names.attention}"
        if isinstance(layer, CompressedSpec) and spec.compressed:
            return read_compressed_attention(
                i,
                prefix,
                layer,
                spec.compressed,
                rope=RotaryEmbedding(self._ropes()[layer.rope], device=weights.device, dtype=weights.dtype),
                norm_eps=spec.norm_eps,
                weights=weights,
                hidden=H,
                group=group,
            )
        if spec.latent is None:
            return read_attention(i, prefix, spec, layer, weights, group)
        return read_latent_attention(
            i,
            prefix,
            Heads.of(layer, group),
            spec.latent,
            order=spec.rope.order,
            weights=weights,
            hidden=H,
            group=group,
        )

    def _read_dense(self, prefix: str) -> GatedMLP:
        inner = split(self._spec.dense_intermediate_size, self._dense_group)
        return self._weights.gated_mlp(prefix, self._shape.hidden_size, inner, self._dense_group)

    def _read_moe(self, i: int, prefix: str) -> MoEBlock:
        spec, names, weights = self._spec.moe_of(i), self._spec.names, self._weights
        plan = self._plan.draft if self._spec.is_draft(i) and self._plan.draft else self._plan
        experts, hidden = whole(spec.num_experts), whole(spec.hidden_size)
        dtype = torch.float32 if self._spec.router_float32 else None
        bias_E = experts_of_token = None
        if i in self._spec.hash_layers:
            experts_of_token = self._tables[i]
        elif self._spec.correction_bias:
            name = f"{prefix}.{names.correction_bias}"
            bias_E = weights.checkpoint.tensor(name, (spec.num_experts,), torch.float32).to(weights.device)
        router = f"{prefix}.{names.router}"
        share = f"{self._groups.world.rank} of {plan}"
        return MoEBlock(
            spec,
            plan,
            router_weight=weights.linear(router, experts, hidden, dtype=dtype),
            router_bias=weights.fused_bias({router: experts}) if self._spec.router_bias else None,
            experts=lambda: self._next_experts(i),
            correction_bias=bias_E,
            experts_of_token=experts_of_token,
            shared_expert=self._keep(f"{prefix} shared {share}", lambda: self._read_shared(prefix, plan)),
            groups=self._groups,
            runner=self._make_runner(i) if self._make_runner else None,
            keep=lambda what, make: self._keep(f"{prefix} {what} {share}", make),
        )

    def _check_small(self) -> None:
        """Raises CheckpointError for a sink, correction bias or compressor that is missing; reads nothing."""
        names, meta = self._spec.names, self._weights.checkpoint.meta
        again = "The model cannot run without it: download the checkpoint again, or convert it with it"
        for i, layer in enumerate(self._shape.attention):
            prefix = self._spec.layer_prefix(i)
            attention = f"{prefix}.{names.attention}"
            small = [f"{attention}.sinks"] if layer.sinks else []
            if isinstance(layer, CompressedSpec):
                small = [f"{attention}.attn_sink", *compressor_tensors(attention, layer)]
            if self._spec.correction_bias and i in self._spec.moe_layers and i not in self._spec.hash_layers:
                small.append(f"{prefix}.{names.moe}.{names.correction_bias}")
            for name in small:
                meta(name, why=again)

    def _read_hash(self, i: int) -> Tensor:
        """int32 [V, k]: the experts of each token id in layer i."""
        names = self._spec.names
        name = f"{self._spec.layer_prefix(i)}.{names.moe}.{names.hash_table}"
        shape = self._shape.vocab_size, self._spec.moe.top_k
        table_VK = self._weights.checkpoint.tensor(name, shape).to(torch.int32)
        if not 0 <= int(table_VK.min()) <= int(table_VK.max()) < self._spec.moe.num_experts:
            raise CheckpointError(
                "names experts that the layer does not have",
                file=self._weights.checkpoint.meta(name).file,
                tensor=name,
                expected=f"ids from 0 to {self._spec.moe.num_experts - 1}",
                found=f"{int(table_VK.min())} to {int(table_VK.max())}",
            )
        return table_VK.to(self._weights.device)

    def _next_experts(self, i: int) -> ExpertWeights:
        """Of layer i; where a device prepares them, the host reads those of the next layer meanwhile."""
        thread = self._weights.read_ahead
        if thread is None:
            return self._read_experts(i)
        reading = self._ahead.pop(i, None) or thread.submit(self._read_experts, i)
        experts = reading.result()
        later = [layer for layer in self._spec.moe_layers if layer > i]
        self._ahead = {layer: thread.submit(self._read_experts, layer) for layer in later[:1]}
        return experts

    def _read_experts(self, i: int) -> ExpertWeights:
        prefix = self._spec.experts_prefix(i)
        spec, plan, topology = self._spec.moe, self._plan, self._groups.topology
        experts = self._weights.checkpoint.experts(
            prefix,
            ExpertShape(
                num_experts=spec.num_experts,
                hidden=spec.hidden_size,
                intermediate=spec.intermediate_size,
                gated=spec.activation.gated,
                biased=spec.expert_bias,
            ),
            first=plan.first_expert,
            count=plan.num_local_experts,
        )
        return shard(experts, topology.expert_tp_rank, topology.expert_tp)

    def _read_shared(self, prefix: str, plan: MoEPlan) -> GatedMLP | None:
        """Its output is not summed here: a shard of it is part of the sum that the MoE layer makes."""
        shared, H = self._spec.shared_expert, self._shape.hidden_size
        if shared is None:
            return None
        inner = split(shared.intermediate_size, self._groups.world)
        if plan.shared_expert == SharedExpert.WHOLE:
            inner = whole(shared.intermediate_size)
        name = f"{prefix}.{self._spec.names.shared_expert}"
        gate_1H = self._weights.linear(f"{name}_gate", whole(1), whole(H)) if shared.gated else None
        return self._weights.gated_mlp(
            name,
            H,
            inner,
            SINGLE_RANK.world,
            names=self._spec.names.gate_up_down,
            limit=self._spec.mlp_limit,
            token_gate=gate_1H,
        )
