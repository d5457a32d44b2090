"""Runner "torch": every format and activation in plain torch; fast on CPUs, correct on CUDA.

Each (token, expert) choice that this rank holds is a pair. Two ways through, chosen from the batch's
shape only:

* few pairs, weights decoded once, on a CPU: `kernels.panels.gather_product`, two calls in all, the second
  of which also applies the routing weights and sums over k. What a token gets does not depend on the
  tokens it shares the batch with.
* otherwise: pairs sorted by expert, one GEMM per expert that has any. GEMM libraries choose their order
  of summation by the number of rows, so here a token's last bits may vary with its batch.

A `deterministic` plan has tokens, and rows of experts, computed one by one: then it never does.

All are deterministic: the same batch gives the same bits. GEMMs on a CPU accumulate in float32, and
between them values stay float32, whatever the compute dtype; on CUDA they are of the compute dtype.

NVFP4 with `activation_format` "nvfp4" emulates FP4 tensor cores: inputs of both GEMMs are rounded to NVFP4
with the checkpoint's scales, then multiplied in the compute dtype. So does "fp8", per token and 128
columns with FP8 weights (W8A8), per token with MXFP4 ones (W4A8).

Legend: T tokens, k top-k, P pairs, H hidden, I intermediate, N outputs of GEMM1 (2I, or I when not gated),
E local experts, C rows per expert.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from turnout.formats import fp8, nvfp4
from turnout.formats.experts import ExpertWeights
from turnout.formats.packed import PackedTensor
from turnout.formats.scales import resolve
from turnout.kernels.common.panels import Panels, panel_width
from turnout.kernels.common.rowwise import one_by_one
from turnout.moe.backends.torch.declaration import TORCH
from turnout.moe.batch import ExpertsBatch, Hidden, TokensBatch
from turnout.moe.plan import MoEPlan
from turnout.moe.spec import MoESpec
from turnout.vocabulary import ActivationKind, Format, WeightStorage

# Up to so many pairs per local expert products are gathered. They read a matrix once per pair, but pay no
# call per expert. Measured on one AVX2 core with 4 pairs per expert, against a GEMM per expert: 64 experts of
# 1024 x 1024 and 1024 x 512 in bfloat16 33 and 46 ms, in float32 62 and 49 ms; 32 experts of 192 x 256 and
# 256 x 96 in float32 0.8 and 2.2 ms. With 8 pairs only the last still gains.
GATHER_PAIRS_PER_EXPERT = 4


def _as_it_is(x: Tensor, scale: Any) -> Tensor:
    return x


def _in_fp8(x: Tensor, scale: Any) -> Tensor:
    return fp8.fake_quantize(x)


def _rows_in_fp8(x: Tensor, scale: Any) -> Tensor:
    return fp8.fake_quantize_rows(x)


# What becomes of the inputs of both GEMMs, by what a plan has them multiply with. Functions have names, for a
# runner whose weights are kept is pickled.
ROUNDINGS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "bf16": _as_it_is,
    "nvfp4": nvfp4.fake_quantize,
    "fp8": _in_fp8,
    "w4a8": _rows_in_fp8,
}


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
    """An `Experts` (moe/interface.py) in plain torch, on any device, in either layout."""

    capability = TORCH

    def __init__(self, spec: MoESpec, plan: MoEPlan, device: torch.device) -> None:
        self._activation = spec.activation
        self._first, self._count, self._top_k = plan.first_expert, plan.num_local_experts, spec.top_k
        self._quantize = plan.activation_format == Format.NVFP4
        w4a8 = (spec.format, plan.activation_format) == (Format.MXFP4, Format.FP8)
        self._round = ROUNDINGS["w4a8" if w4a8 else plan.activation_format]
        self._decoded = plan.weight_storage == WeightStorage.DECODED
        self._batch_invariant = plan.deterministic
        self._dtype: torch.dtype = getattr(torch, plan.compute_dtype)
        self._device = device
        self._max_tokens = max(plan.prefill.max_tokens, plan.decode.max_tokens)
        self._gemm_dtype = torch.float32 if device.type == "cpu" else self._dtype

    # Weights

    def prepare(self, experts: ExpertWeights) -> None:
        halves = 2 if self._activation.gated else 1
        self._w13 = self._store(experts.w13, panel_width(experts.w13.shape[1] // halves))
        self._w2 = self._store(experts.w2, panel_width(experts.w2.shape[1]))
        self._b13 = None if experts.b13 is None else experts.b13.to(self._device, torch.float32)
        self._b2 = None if experts.b2 is None else experts.b2.to(self._device, torch.float32)
        if self._quantize:
            self._scales = self._resolve(experts)

    def update(self, experts: ExpertWeights) -> None:
        _load(self._w13, experts.w13)
        _load(self._w2, experts.w2)
        for mine, new in ((self._b13, experts.b13), (self._b2, experts.b2)):
            if mine is not None and new is not None:
                mine.copy_(new)
        if self._quantize:
            for mine, new in zip(self._scales, self._resolve(experts), strict=True):
                mine.copy_(new)

    def _store(self, weights: PackedTensor, width: int) -> Panels | Matrices:
        E, N, K = weights.shape
        if not self._decoded:
            return Matrices(weights.to(self._device), self._gemm_dtype)
        if self._device.type == "cpu":
            store: Panels | Matrices = Panels(E, N, K, width, self._dtype)
        else:
            plain = torch.empty(E, N, K, dtype=self._dtype, device=self._device)
            store = Matrices(PackedTensor(format=Format.BF16, data=plain), self._dtype)
        _load(store, weights)
        return store

    def _resolve(self, experts: ExpertWeights) -> tuple[Tensor, Tensor]:
        resolved = resolve(experts)
        return resolved.s1.to(self._device), resolved.s2.to(self._device)

    # Batches

    def same_bits(self, tokens: int) -> range:
        if self._batch_invariant:
            return range(self._max_tokens + 1)
        gathered = isinstance(self._w13, Panels) and isinstance(self._w2, Panels)
        most = GATHER_PAIRS_PER_EXPERT * self._count // self._top_k if gathered else 0
        return range(most + 1 if tokens <= most else 0)

    def __call__(self, batch: TokensBatch | ExpertsBatch) -> Tensor:
        if self._batch_invariant:
            out = self._each_token(batch) if isinstance(batch, TokensBatch) else self._each_row(batch)
        else:
            out = self._tokens(batch) if isinstance(batch, TokensBatch) else self._batched_experts(batch)
        return out.to(self._dtype)

    def _each_token(self, batch: TokensBatch) -> Tensor:
        def token(data: Tensor, ids: Tensor, weights: Tensor, *scale: Tensor) -> Tensor:
            hidden = replace(batch.hidden, data=data, scale=scale[0] if scale else None)
            return self._tokens(TokensBatch(hidden=hidden, topk_ids=ids, topk_weights=weights))

        scale = [] if batch.hidden.scale is None else [batch.hidden.scale]
        return one_by_one(token, batch.hidden.data, batch.topk_ids, batch.topk_weights, *scale)

    def _each_row(self, batch: ExpertsBatch) -> Tensor:
        """As `_batched_experts`, each row as if all other rows were unused."""
        hidden, counts = batch.hidden, batch.counts
        out = torch.zeros(*hidden.data.shape[:2], self._w2.outputs, device=self._device)
        for expert, count in enumerate(counts.tolist()):
            one_E = torch.zeros_like(counts)
            one_E[expert] = 1
            for row in range(count):
                scale = None if hidden.scale is None else hidden.scale[:, row : row + 1]
                one = replace(hidden, data=hidden.data[:, row : row + 1], scale=scale)
                out[expert, row] = self._batched_experts(ExpertsBatch(hidden=one, counts=one_E))[expert, 0]
        return out

    def _tokens(self, batch: TokensBatch) -> Tensor:
        s1, s2 = self._scales if self._quantize else (None, None)
        x_TH = self._plain(batch.hidden, s1)
        few = batch.topk_ids.numel() <= GATHER_PAIRS_PER_EXPERT * self._count
        if few and isinstance(self._w13, Panels) and isinstance(self._w2, Panels):
            return self._gathered(x_TH, batch, self._w13, self._w2, s2)
        return self._grouped(x_TH, batch, s2)

    def _gathered(
        self, x_TH: Tensor, batch: TokensBatch, w13: Panels, w2: Panels, s2: Tensor | None
    ) -> Tensor:
        """[T, H] by two gathered products; the sums of the second run over a token's pairs.

        Pairs that are not this rank's go to its first expert, with weight zero.
        """
        T, k = batch.topk_ids.shape
        weight_TK = batch.topk_weights
        wanted_TK = batch.topk_ids - self._first
        expert_TK = wanted_TK.clamp(0, self._count - 1)
        held_TK = expert_TK == wanted_TK
        all_held = bool(held_TK.all())
        expert_P = expert_TK.view(-1)
        x_P1H = x_TH.unsqueeze(1).expand(-1, k, -1).flatten(0, 1).unsqueeze(1)
        h_PN = w13.gather_product(expert_P.unsqueeze(1), x_P1H).float()
        if self._b13 is not None:
            h_PN = h_PN + self._b13.index_select(0, expert_P)
        a_TKI = self._round(self._activate(h_PN), s2).unflatten(0, (T, k))
        if not all_held:
            weight_TK = weight_TK * held_TK
            a_TKI = a_TKI.masked_fill(~held_TK.unsqueeze(2), 0.0)  # what padding rows hold may be no number
        out_TH = w2.gather_product(expert_TK, a_TKI.mul_(weight_TK.unsqueeze(2)))
        if self._b2 is not None:
            out_TH = out_TH + F.embedding_bag(expert_TK, self._b2, mode="sum", per_sample_weights=weight_TK)
        return out_TH

    def _grouped(self, x_TH: Tensor, batch: TokensBatch, s2: Tensor | None) -> Tensor:
        """[T, H] with this rank's pairs sorted by expert."""
        local_TK = batch.topk_ids - self._first
        held_TK = (local_TK >= 0) & (local_TK < self._count)
        token_P, slot_P = held_TK.nonzero(as_tuple=True)
        expert_P, order_P = local_TK[token_P, slot_P].sort(stable=True)
        y_PH = self._mlp(x_TH.index_select(0, token_P[order_P]), expert_P, s2)
        if self._b2 is not None:
            y_PH = y_PH + self._b2.index_select(0, expert_P)
        place_P = torch.empty_like(order_P).scatter_(
            0, order_P, torch.arange(len(order_P), device=order_P.device)
        )
        return F.embedding_bag(  # per token the weighted sum over its pairs, in their order
            place_P,
            y_PH.float(),
            F.pad(held_TK.sum(dim=1).cumsum(0), (1, 0)),
            mode="sum",
            per_sample_weights=batch.topk_weights[token_P, slot_P],
            include_last_offset=True,
        )

    def _batched_experts(self, batch: ExpertsBatch) -> Tensor:
        """Rows [E, C, H], of which the first counts[e] rows are in use; the others come out as zero."""
        E, C = batch.hidden.data.shape[:2]
        used_EC = torch.arange(C, device=self._device) < batch.counts.unsqueeze(1)
        row_P = used_EC.flatten().nonzero().squeeze(1)
        expert_P = row_P // C
        s1, s2 = self._scales if self._quantize else (None, None)
        x_PH = self._plain(_rows(batch.hidden, row_P), s1)
        y_PH = self._mlp(x_PH, expert_P, s2)
        if self._b2 is not None:
            y_PH = y_PH + self._b2[expert_P]
        out = y_PH.new_zeros(E * C, y_PH.shape[1])
        return out.index_copy_(0, row_P, y_PH).view(E, C, out.shape[1])

    def _mlp(self, x_PH: Tensor, expert_P: Tensor, s2: Tensor | None) -> Tensor:
        """[P, H], unweighted and without the second bias, for rows sorted by expert."""
        sizes = torch.bincount(expert_P, minlength=self._count).tolist()
        h_PN = self._products(self._w13, x_PH.to(self._gemm_dtype), sizes)
        if self._b13 is not None:
            h_PN = h_PN + self._b13.index_select(0, expert_P)
        a_PI = self._round(self._activate(h_PN), s2)
        return self._products(self._w2, a_PI.to(self._gemm_dtype), sizes)

    def _products(self, weights: Panels | Matrices, x_PK: Tensor, sizes: list[int]) -> Tensor:
        out_PN = x_PK.new_empty(len(x_PK), weights.outputs)
        start = 0
        for expert, size in enumerate(sizes):
            if size:
                weights.product(expert, x_PK[start : start + size], out_PN[start : start + size])
                start += size
        return out_PN

    def _plain(self, hidden: Hidden, scale: Tensor | None) -> Tensor:
        """Hidden states as numbers, rounded as the plan has it; `scale`: NVFP4's, a scalar."""
        x = hidden.decode()
        return x if hidden.format == Format.NVFP4 else self._round(x, scale)

    def _activate(self, h_PN: Tensor) -> Tensor:
        """GEMM1's output, gate then up, to GEMM2's input [P, I]; may overwrite `h_PN`."""
        kind = self._activation
        if kind.kind == ActivationKind.RELU2:
            return h_PN.relu_().square_()
        gate, up = h_PN.chunk(2, dim=1)
        if kind.kind == ActivationKind.SILU:
            return F.silu(gate).mul_(up)
        if kind.limit is not None:
            gate, up = gate.clamp_(max=kind.limit), up.clamp_(-kind.limit, kind.limit)
        return (gate * kind.alpha).sigmoid_().mul_(gate).mul_(up.add_(kind.beta))


def _load(store: Panels | Matrices, weights: PackedTensor) -> None:
    """Fill `store`, one expert at a time so that only one more is decoded at a time."""
    if isinstance(store, Matrices):
        store.load(weights)
    else:
        for expert in range(weights.shape[0]):
            store.write(expert, weights[expert].decode())


def _rows(hidden: Hidden, row_P: Tensor) -> Hidden:
    """Some rows of [E, C, ...], as [P, ...]."""
    scale = None if hidden.scale is None else hidden.scale.flatten(0, 1)[row_P]
    return replace(hidden, data=hidden.data.flatten(0, 1)[row_P], scale=scale)
