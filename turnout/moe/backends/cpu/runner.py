"""Runner "numba": the experts on a CPU by kernels compiled on the spot (kernels/cpu).

Weights lie in panels that products read in order. "decoded": in the compute dtype, but 4-bit ones in
bfloat16, which holds them exactly once their global scale is kept apart, and with half the bytes to read is
faster than float32. "packed": as the checkpoint has them, which costs bfloat16 ones no time, and 4-bit ones
their unpacking once per batch. Of 64 experts of 1024 x 512, 16 tokens take 12 ms of one core in bfloat16,
20 in float32 and 24 packed, 256 tokens 81, 93 and 88. Everything is computed in float32, but under compute
type bfloat16, where the processor has units for it and weights are decoded, products are those
of the units, added up in float32. Of the same experts, one core of an Intel Xeon takes 19 ms for 256 tokens
with AMX and 100 without, and 40 and 326 for 1024. What a token gets does not depend on the other tokens of
its batch.

Legend: T tokens, k top-k, H hidden, E local experts, N outputs, C rows per expert.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from turnout.formats.experts import ExpertWeights
from turnout.formats.packed import PackedTensor
from turnout.kernels.cpu import experts as kernels
from turnout.kernels.cpu.decoder_layer import COLUMNS, ExpertsHalf
from turnout.kernels.cpu.panels import PAIRS, Panels
from turnout.moe.backends.cpu.declaration import RUNNER
from turnout.moe.batch import ExpertsBatch, TokensBatch
from turnout.moe.interface import PlainWeights
from turnout.moe.plan import MoEPlan
from turnout.moe.spec import MoESpec, Routing
from turnout.vocabulary import Bf16Units, Format, RoutingKind, WeightStorage


class NumbaRunner:
    """An `Experts` (moe/interface.py) by kernels that numba compiles for the CPU, in either layout."""

    capability = RUNNER

    def __init__(self, spec: MoESpec, plan: MoEPlan, device: torch.device) -> None:
        self._activation = spec.activation
        self._first, self._count = plan.first_expert, plan.num_local_experts
        self._decoded = plan.weight_storage == WeightStorage.DECODED
        self._dtype: torch.dtype = getattr(torch, plan.compute_dtype)
        unpacks = not self._decoded and spec.format != Format.BF16
        self._units = Bf16Units.NONE if unpacks else plan.bf16_units
        self._max_tokens = max(plan.prefill.max_tokens, plan.decode.max_tokens)

    def prepare(self, experts: ExpertWeights) -> None:
        kind = self._activation
        self._layer = kernels.Layer(
            w13=self._store(experts.w13),
            w2=self._store(experts.w2),
            b13=_bias(experts.b13),
            b2=_bias(experts.b2),
            activation=str(kind.kind),
            alpha=kind.alpha,
            beta=kind.beta,
            limit=float("inf") if kind.limit is None else kind.limit,
        )

    def update(self, experts: ExpertWeights) -> None:
        _load(self._layer.w13, experts.w13)
        _load(self._layer.w2, experts.w2)
        for mine, new in ((self._layer.b13, experts.b13), (self._layer.b2, experts.b2)):
            if mine is not None and new is not None:
                mine.copy_(new)

    def with_router(
        self,
        router_weight: Tensor,
        routing: Routing,
        top_k: int,
        counts: Tensor,
        shared: PlainWeights | None = None,
    ) -> ExpertsHalf | None:
        """See `RoutedExperts`."""
        kinds = RoutingKind.SOFTMAX_TOPK, RoutingKind.TOPK_SOFTMAX
        if self._units != Bf16Units.NONE or routing.kind not in kinds or routing.on_input:
            return None
        if router_weight.dtype != torch.float32 or self._dtype != torch.float32:
            return None
        if shared is not None and not _takes(shared):
            return None
        return ExpertsHalf(
            self._layer,
            router_EH=router_weight,
            counts_E=counts,
            top_k=top_k,
            of_all=routing.kind == RoutingKind.SOFTMAX_TOPK,
            renormalize=routing.renormalize,
            scaling=routing.scaling_factor,
            first=self._first,
            shared=shared,
        )

    def same_bits(self, tokens: int) -> range:
        return range(self._max_tokens + 1)

    def __call__(self, batch: TokensBatch | ExpertsBatch) -> Tensor:
        x = batch.hidden.data
        if isinstance(batch, TokensBatch):
            pairs = kernels.sort_pairs(batch.topk_ids, batch.topk_weights, self._first, self._count)
            return self._run(x, pairs)
        E, C, H = x.shape
        pairs = kernels.batched_pairs(batch.counts, C)
        return self._run(x.flatten(0, 1), pairs).view(E, C, H)

    def _run(self, x_RH: Tensor, pairs: kernels.Pairs) -> Tensor:
        """[R, H] in the compute type; bfloat16 units are for bfloat16 only."""
        if self._units == Bf16Units.NONE:
            return kernels.run(self._layer, x_RH.float(), pairs, len(x_RH)).to(self._dtype)
        from turnout.kernels.cpu import experts_bf16

        return experts_bf16.run(self._layer, x_RH.bfloat16(), pairs, len(x_RH), str(self._units))

    def _store(self, weights: PackedTensor) -> Panels:
        store = Panels(weights.shape, self._kind(weights))
        _load(store, weights)
        return store

    def _kind(self, weights: PackedTensor) -> torch.dtype | str:
        if self._units != Bf16Units.NONE:
            return PAIRS
        if not self._decoded:
            return weights.data.dtype if weights.format == Format.BF16 else weights.format
        return torch.bfloat16 if weights.format in self.capability.decoded_as_bf16 else self._dtype


def _takes(shared: PlainWeights) -> bool:
    """Whether the kernel of a layer takes a shared expert."""
    gate_up, down, _ = shared
    float32 = all(w is None or (w.dtype == torch.float32 and w.is_contiguous()) for w in shared)
    return float32 and down.shape[1] % COLUMNS == 0 and gate_up.shape[1] % COLUMNS == 0


def _load(store: Panels, weights: PackedTensor) -> None:
    """Fill `store`, one expert at a time so that only one more is decoded at a time."""
    for expert in range(store.experts):
        one = weights[expert]
        if store.packed:
            assert one.scale is not None, f"{one.format} weights carry a scale"
            if one.format == Format.FP8:
                store.write_fp8(expert, one.data, one.scale, one.block_rows)
                continue
            store.write_packed(expert, one.data, one.scale, one.global_scale)
        elif one.global_scale is not None:
            unscaled = replace(one, global_scale=torch.ones_like(one.global_scale))
            store.write(expert, unscaled.decode(), one.global_scale)
        else:
            store.write(expert, one.decode())


def _bias(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.float().contiguous()
