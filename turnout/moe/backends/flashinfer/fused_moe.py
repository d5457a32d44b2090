"""One layer's experts through FlashInfer's `cutlass_fused_moe`: what the runners that end in it share.

It sorts, multiplies, activates and sums, on the device only. Ids outside this rank's experts, padding's -1
among them, are skipped: its source compares signed ids with a range. How experts are split over ranks
does not concern it: a shard is an expert, and a bias that another shard adds is zero here. The sum over a
token's experts is a kernel of its own (`use_fused_finalize=False`), for the fused one adds atomically, in an
order that changes from run to run.

On an H200 (FlashInfer 0.7.2): right in bf16, FP8 blocks and MXFP4, for 0 to 8192 tokens and for slices of the
experts, with the same bits from call to call, and as a graph
(tests/moe/backends/flashinfer/test_cutlass_gpu.py).

Legend: T tokens, k top-k, H hidden, Hp hidden as padded for the kernels, I intermediate, E local experts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from turnout.formats.experts import ExpertWeights
from turnout.moe import arena
from turnout.moe.batch import ExpertsBatch, TokensBatch
from turnout.moe.plan import MoEPlan
from turnout.moe.spec import MoESpec
from turnout.vocabulary import ActivationKind, Layout

SCRATCH = "cutlass_fused_moe"


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Weights as the library takes them.

    w13: [E, 2I or I, ...], up rows first; w2: [E, Hp, ...]; in the dtype that tells it the format
    scales: `quant_scales`, in the order of the format; options: the flags that select the format
    b13, b2: bf16 [E, 2I or I] and [E, Hp], both or neither
    """

    w13: Tensor
    w2: Tensor
    inner: int  # I, unpacked and padded
    scales: list[Tensor]
    options: dict[str, bool]
    b13: Tensor | None
    b2: Tensor | None

    @property
    def hidden(self) -> int:
        return self.w2.shape[1]

    def load(self, other: Prepared) -> None:
        """Take over another's values in the same storage."""
        pairs = [(self.w13, other.w13), (self.w2, other.w2), (self.b13, other.b13), (self.b2, other.b2)]
        for mine, new in (*pairs, *zip(self.scales, other.scales, strict=True)):
            if mine is not None and new is not None:
                mine.copy_(new)


def biases(
    experts: ExpertWeights, hidden: int, b13: Tensor | None, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """bf16 biases of both GEMMs, given W1's in the order of its rows; W2's are zero where others add them."""
    if b13 is None:
        return None, None
    b2 = torch.zeros(len(b13), hidden, dtype=torch.bfloat16, device=device)
    if experts.b2 is not None:
        b2[:, : experts.b2.shape[1]].copy_(experts.b2)
    return b13.to(device, torch.bfloat16).contiguous(), b2


class FusedMoe:
    """Calls the library with one layer's weights; scratch is shared by layers of the same sizes."""

    def __init__(self, spec: MoESpec, plan: MoEPlan, device: torch.device, prepared: Prepared) -> None:
        from flashinfer.tllm_enums import ActivationType

        self.weights = prepared
        self._spec, self._device = spec, device
        self._max_tokens = max(plan.prefill.max_tokens, plan.decode.max_tokens)
        held = plan.num_local_experts
        self._ranks = {"ep_size": spec.num_experts // held, "ep_rank": plan.first_expert // held}
        self._kind = ActivationType.Swiglu if spec.activation.gated else ActivationType.Relu2
        self._parameters = self._activation(held)
        self._size = self._workspace_bytes()
        self._arena = arena.shared(device, {Layout.TOKENS: {SCRATCH: self._size}})

    def __call__(self, batch: TokensBatch | ExpertsBatch) -> Tensor:
        assert isinstance(batch, TokensBatch), "declared for the layout of tokens only"
        T, H = len(batch.topk_ids), self._spec.hidden_size
        if self._max_tokens < T:
            raise ValueError(f"{T} tokens, but the plan bounds them by {self._max_tokens}")
        out = torch.empty(T, self.weights.hidden, dtype=torch.bfloat16, device=self._device)
        if T:
            self._launch(batch, out)
        return out if self.weights.hidden == H else out[:, :H].contiguous()

    def _launch(self, batch: TokensBatch, out_TH: Tensor) -> None:
        from flashinfer.fused_moe import cutlass_fused_moe

        w = self.weights
        x_TH = batch.hidden.data.to(torch.bfloat16)
        if x_TH.shape[1] != w.hidden:
            x_TH = F.pad(x_TH, (0, w.hidden - x_TH.shape[1]))
        cutlass_fused_moe(
            input=x_TH.contiguous(),
            token_selected_experts=batch.topk_ids.contiguous(),
            token_final_scales=batch.topk_weights.contiguous(),
            fc1_expert_weights=w.w13,
            fc2_expert_weights=w.w2,
            output_dtype=torch.bfloat16,
            quant_scales=w.scales,
            fc1_expert_biases=w.b13,
            fc2_expert_biases=w.b2,
            output=out_TH,
            use_fused_finalize=False,
            activation_type=self._kind,
            tune_max_num_tokens=self._max_tokens,
            workspace_buffer=self._arena.take(Layout.TOKENS, SCRATCH, self._size, dtype=torch.uint8),
            **self._parameters,
            **self._ranks,
            **w.options,
        )

    def _activation(self, held: int) -> dict[str, Tensor]:
        """Per expert; without any, the library computes silu(gate) * up, or relu2."""
        activation = self._spec.activation
        if activation.kind != ActivationKind.SWIGLU:
            return {}
        limit = float("inf") if activation.limit is None else activation.limit
        values = {"swiglu_alpha": activation.alpha, "swiglu_beta": activation.beta, "swiglu_limit": limit}
        return {name: torch.full((held,), value, device=self._device) for name, value in values.items()}

    def _workspace_bytes(self) -> int:
        """For the largest batch of the plan, which smaller ones fit in."""
        from flashinfer.fused_moe import cutlass_fused_moe_workspace_size

        w = self.weights
        options: dict[str, Any] = self._ranks | w.options
        return cutlass_fused_moe_workspace_size(
            self._max_tokens,
            w.hidden,
            w.inner,
            self._spec.num_experts,
            self._spec.top_k,
            x_dtype=torch.bfloat16,
            weight_dtype=w.w13.dtype,
            output_dtype=torch.bfloat16,
            activation_type=self._kind,
            use_fused_finalize=False,
            device=self._device,
            **options,
        )


class CutlassRunner(ABC):
    """A runner that ends in `cutlass_fused_moe`; `_prepared` is what each makes of the weights."""

    def __init__(self, spec: MoESpec, plan: MoEPlan, device: torch.device) -> None:
        self._spec, self._plan, self._device = spec, plan, device

    def prepare(self, experts: ExpertWeights) -> None:
        with torch.inference_mode(False):  # graphs captured later may write to what is made here
            self._moe = FusedMoe(self._spec, self._plan, self._device, self._prepared(experts))

    def update(self, experts: ExpertWeights) -> None:
        self._moe.weights.load(self._prepared(experts))

    def same_bits(self, tokens: int) -> range:
        return range(0)

    def __call__(self, batch: TokensBatch | ExpertsBatch) -> Tensor:
        return self._moe(batch)

    @abstractmethod
    def _prepared(self, experts: ExpertWeights) -> Prepared: ...
