"""Runner "torch": every format and activation in plain torch; fast on CPUs, correct on CUDA.

Each (token, expert) choice that this rank holds is a pair. Two ways through, chosen from the batch's
shape alone:

* few pairs, weights decoded once, on a CPU: `kernels.panels.gather_product`, two calls in all, the second
  of which also applies the routing weights and sums over k. What a token gets does not depend, in any
  bit, on the tokens it shares the batch with.
* otherwise: pairs sorted by expert, one GEMM per expert that has any. GEMM libraries choose their order
  of summation by the number of rows, so here a token's last bits may vary with its company.

Both are deterministic: the same batch gives the same bits. GEMMs on a CPU accumulate in float32, and
between them values stay float32, whatever the compute dtype; on CUDA they are of the compute dtype.

NVFP4 with `activation_format` "nvfp4" emulates FP4 tensor cores: inputs of both GEMMs are rounded to NVFP4
with the checkpoint's scales, then multiplied in the compute dtype.

Legend: T tokens, k top-k, P pairs, H hidden, I intermediate, N outputs of GEMM1 (2I, or I when not gated),
E local experts, C slab capacity, B panels of W outputs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from turnout.formats import fp8, nvfp4
from turnout.formats.experts import ExpertWeights
from turnout.formats.packed import FORMATS, PackedTensor
from turnout.formats.scales import ActivationScales, resolve_per_expert, resolve_shared
from turnout.kernels.panels import Panels, panel_width
from turnout.moe.batch import ExpertsBatch, Hidden, TokensBatch
from turnout.moe.capability import RunnerCapability
from turnout.moe.plan import MoEPlan
from turnout.moe.spec import MoESpec

# Up to so many pairs per local expert the gathered product is faster than a GEMM per expert: it reads a
# matrix once per pair, but pays no call per expert. Measured crossovers (2 AVX2 cores): 4 to 8 for
# 1024 x 1024, above 32 for 256 x 192.
GATHER_PAIRS_PER_EXPERT = 4


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """The (token, expert) choices of a batch that this rank holds, in token order."""

    token_P: Tensor  # int32
    expert_P: Tensor  # int32, local
    weight_P: Tensor  # float32
    starts_T1: Tensor  # int32 [T + 1]: token t's pairs are starts[t] .. starts[t + 1]


class Matrices:
    """Row-major weights [E, N, K], decoded at each use; unquantised ones as they are."""

    def __init__(self, weights: PackedTensor, dtype: torch.dtype) -> None:
        self._weights, self._dtype = weights, dtype
        self.outputs = weights.shape[1]

    def load(self, weights: PackedTensor) -> None:
        if weights.format == self._weights.format:
            for mine, new in zip(self._weights.parts(), weights.parts(), strict=True):
                mine.copy_(new)
        else:
            for expert, matrix_NK in enumerate(self._weights.data):
                matrix_NK.copy_(weights[expert].decode())

    def product(self, expert: int, x_MK: Tensor, out_MN: Tensor) -> None:
        torch.mm(x_MK, self._weights[expert].decode(self._dtype).t(), out=out_MN)


class TorchRunner:
    capability = RunnerCapability(
        name="torch",
        summary="plain torch; every format and activation, fast on CPUs, correct on CUDA",
        layouts=frozenset({"tokens", "experts"}),
        weight_formats=frozenset(FORMATS),
        wire_formats=frozenset({"bf16", "fp8", "nvfp4"}),
        activation_formats=frozenset({"bf16", "nvfp4"}),
        graph_safe=False,
    )

    def __init__(self, spec: MoESpec, plan: MoEPlan, device: torch.device) -> None:
        self._activation = spec.activation
        self._first, self._count = plan.first_expert, plan.num_local_experts
        self._quantize = plan.activation_format == "nvfp4"
        self._decoded = plan.weight_storage == "decoded"
        self._dtype: torch.dtype = getattr(torch, plan.compute_dtype)
        self._device = device
        self._gemm_dtype = torch.float32 if device.type == "cpu" else self._dtype

    # Weights

    def prepare(self, experts: ExpertWeights) -> None:
        halves = 2 if self._activation.gated else 1
        self._w13 = self._store(experts.w13, panel_width(experts.w13.shape[1] // halves))
        self._w2 = self._store(experts.w2, panel_width(experts.w2.shape[1]))
        self._b13 = None if experts.b13 is None else experts.b13.to(self._device, torch.float32)
        self._b2 = None if experts.b2 is None else experts.b2.to(self._device, torch.float32)
        if self._quantize:
            self._shared = self._scales(resolve_shared(experts))
            self._per_expert = self._scales(resolve_per_expert(experts))

    def update(self, experts: ExpertWeights) -> None:
        _load(self._w13, experts.w13)
        _load(self._w2, experts.w2)
        for mine, new in ((self._b13, experts.b13), (self._b2, experts.b2)):
            if mine is not None and new is not None:
                mine.copy_(new)
        if self._quantize:
            for scales, resolve in ((self._shared, resolve_shared), (self._per_expert, resolve_per_expert)):
                for mine, new in zip(scales, self._scales(resolve(experts)), strict=True):
                    mine.copy_(new)

    def _store(self, weights: PackedTensor, width: int) -> Panels | Matrices:
        E, N, K = weights.shape
        if not self._decoded:
            return Matrices(weights.to(self._device), self._gemm_dtype)
        if self._device.type == "cpu":
            store: Panels | Matrices = Panels(E, N, K, width, self._dtype)
        else:
            plain = torch.empty(E, N, K, dtype=self._dtype, device=self._device)
            store = Matrices(PackedTensor(format="bf16", data=plain), self._dtype)
        _load(store, weights)
        return store

    def _scales(self, resolved: ActivationScales) -> tuple[Tensor, Tensor]:
        return resolved.s1.to(self._device), resolved.s2.to(self._device)

    # Batches

    def __call__(self, batch: TokensBatch | ExpertsBatch) -> Tensor:
        out = self._tokens(batch) if isinstance(batch, TokensBatch) else self._slabs(batch)
        return out.to(self._dtype)

    def _tokens(self, batch: TokensBatch) -> Tensor:
        s1, s2 = self._shared if self._quantize else (None, None)
        x_TH = _plain(batch.hidden, s1)
        pairs = self._pairs(batch.topk_ids, batch.topk_weights)
        few = batch.topk_ids.numel() <= GATHER_PAIRS_PER_EXPERT * self._count
        if few and isinstance(self._w13, Panels) and isinstance(self._w2, Panels):
            out_TH = self._gathered(x_TH, pairs, self._w13, self._w2, s2)
        else:
            out_TH = self._grouped(x_TH, pairs, s2)
        if self._b2 is not None:
            out_TH = out_TH + _weighted_sum(self._b2, pairs.expert_P, pairs)
        return out_TH

    def _pairs(self, ids_TK: Tensor, weights_TK: Tensor) -> Pairs:
        """Padding and other ranks' experts are left out, so nothing is computed for them."""
        local_TK = ids_TK - self._first
        held_TK = (local_TK >= 0) & (local_TK < self._count)
        T, k = ids_TK.shape
        if ids_TK.device.type == "cpu" and held_TK.all():  # the common case, in few calls
            starts = torch.arange(0, T * k + 1, k, dtype=torch.int32)
            token = torch.arange(T, dtype=torch.int32).repeat_interleave(k)
            return Pairs(
                token_P=token, expert_P=local_TK.flatten(), weight_P=weights_TK.flatten(), starts_T1=starts
            )
        token_P, slot_P = held_TK.nonzero(as_tuple=True)
        return Pairs(
            token_P=token_P.int(),
            expert_P=local_TK[token_P, slot_P],
            weight_P=weights_TK[token_P, slot_P],
            starts_T1=F.pad(held_TK.sum(dim=1).cumsum(0), (1, 0)).int(),
        )

    def _gathered(self, x_TH: Tensor, pairs: Pairs, w13: Panels, w2: Panels, s2: Tensor | None) -> Tensor:
        """[T, H] by two gathered products; the second one's sums run over a token's pairs."""
        x_PH = x_TH.index_select(0, pairs.token_P)
        each_P1 = torch.arange(len(pairs.expert_P) + 1, dtype=torch.int32)
        h_BPW = w13.gather_product(pairs.expert_P, x_PH, each_P1).float()
        B, P, W = h_BPW.shape
        if self._b13 is not None:
            h_BPW = h_BPW + self._b13.index_select(0, pairs.expert_P).view(P, B, W).transpose(0, 1)
        a_BPW = self._activate(h_BPW, dim=0)
        a_PI = _quantized(a_BPW.transpose(0, 1).flatten(1), s2)
        out_BTW = w2.gather_product(pairs.expert_P, a_PI.mul_(pairs.weight_P.unsqueeze(1)), pairs.starts_T1)
        return out_BTW.transpose(0, 1).flatten(1)

    def _grouped(self, x_TH: Tensor, pairs: Pairs, s2: Tensor | None) -> Tensor:
        """[T, H] with the pairs sorted by expert."""
        expert_P, order_P = pairs.expert_P.sort(stable=True)
        y_PH = self._mlp(x_TH.index_select(0, pairs.token_P[order_P]), expert_P, s2)
        place_P = torch.empty_like(order_P).scatter_(
            0, order_P, torch.arange(len(order_P), device=order_P.device)
        )
        return _weighted_sum(y_PH.float(), place_P.int(), pairs)

    def _slabs(self, batch: ExpertsBatch) -> Tensor:
        """Slabs [E, C, H], of which the first counts[e] rows are in use; the others come out as zero."""
        E, C = batch.hidden.data.shape[:2]
        used_EC = torch.arange(C, device=self._device) < batch.counts.unsqueeze(1)
        row_P = used_EC.flatten().nonzero().squeeze(1)
        expert_P = row_P // C
        s1, s2 = (s[expert_P] for s in self._per_expert) if self._quantize else (None, None)
        x_PH = _plain(_rows(batch.hidden, row_P), s1)
        y_PH = self._mlp(x_PH, expert_P, s2)
        if self._b2 is not None:
            y_PH = y_PH + self._b2[expert_P]
        out = y_PH.new_zeros(E * C, y_PH.shape[1])
        return out.index_copy_(0, row_P, y_PH).view(E, C, -1)

    def _mlp(self, x_PH: Tensor, expert_P: Tensor, s2: Tensor | None) -> Tensor:
        """[P, H], unweighted and without the second bias, for rows sorted by expert."""
        sizes = torch.bincount(expert_P, minlength=self._count).tolist()
        h_PN = self._products(self._w13, x_PH.to(self._gemm_dtype), sizes)
        if self._b13 is not None:
            h_PN = h_PN + self._b13.index_select(0, expert_P)
        a_PI = _quantized(self._activate(h_PN, dim=1), s2)
        return self._products(self._w2, a_PI.to(self._gemm_dtype), sizes)

    def _products(self, weights: Panels | Matrices, x_PK: Tensor, sizes: list[int]) -> Tensor:
        out_PN = x_PK.new_empty(len(x_PK), weights.outputs)
        start = 0
        for expert, size in enumerate(sizes):
            if size:
                weights.product(expert, x_PK[start : start + size], out_PN[start : start + size])
                start += size
        return out_PN

    def _activate(self, h: Tensor, dim: int) -> Tensor:
        """GEMM1's output, gate then up along `dim`, to GEMM2's input; may overwrite `h`."""
        kind = self._activation
        if kind.kind == "relu2":
            return h.relu_().square_()
        gate, up = h.chunk(2, dim=dim)
        if kind.kind == "silu":
            return F.silu(gate).mul_(up)
        if kind.limit is not None:
            gate, up = gate.clamp_(max=kind.limit), up.clamp_(-kind.limit, kind.limit)
        return (gate * kind.alpha).sigmoid_().mul_(gate).mul_(up.add_(kind.beta))


def _load(store: Panels | Matrices, weights: PackedTensor) -> None:
    """Fill `store`, one expert at a time so that only one is decoded beside it."""
    if isinstance(store, Matrices):
        store.load(weights)
    else:
        for expert in range(weights.shape[0]):
            store.write(expert, weights[expert].decode())


def _plain(hidden: Hidden, scale: Tensor | None) -> Tensor:
    """Hidden states as plain numbers, rounded to NVFP4 first if a scale is given (scalar or per row)."""
    if hidden.format == "bf16":
        return _quantized(hidden.data, scale)
    assert hidden.scale is not None, f"{hidden.format} hidden states carry scales"
    if hidden.format == "fp8":
        return _quantized(fp8.decode_activation(hidden.data, hidden.scale), scale)
    assert hidden.global_scale is not None, "nvfp4 hidden states carry a global scale"
    return nvfp4.decode(hidden.data, hidden.scale, hidden.global_scale)


def _quantized(x: Tensor, scale: Tensor | None) -> Tensor:
    return x if scale is None else nvfp4.fake_quantize(x, scale)


def _rows(hidden: Hidden, row_P: Tensor) -> Hidden:
    """Some rows of slabs [E, C, ...], as [P, ...]."""
    scale = None if hidden.scale is None else hidden.scale.flatten(0, 1)[row_P]
    return replace(hidden, data=hidden.data.flatten(0, 1)[row_P], scale=scale)


def _weighted_sum(values: Tensor, index_P: Tensor, pairs: Pairs) -> Tensor:
    """[T, N]: for every token the sum over its pairs of weight times `values[index]`, in their order."""
    return F.embedding_bag(
        index_P,
        values,
        pairs.starts_T1,
        mode="sum",
        per_sample_weights=pairs.weight_P,
        include_last_offset=True,
    )
