"""What an MoE layer is: sizes, activation, routing. Values only; no tensors, no backends."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

from turnout.vocabulary import ActivationKind, Format, RoutingKind


@dataclass(frozen=True, kw_only=True)
class Activation:
    """The expert MLP's non-linearity between GEMM1 and GEMM2.

    kind "silu":   silu(gate) * up
    kind "swiglu": g = min(gate, limit); u = clamp(up, -limit, limit) + beta; g * sigmoid(alpha * g) * u
                   (GPT-OSS: alpha 1.702, beta 1, limit 7; DeepSeek-V4: alpha 1, beta 0, a limit)
    kind "relu2":  relu(x) ** 2, not gated (Nemotron-H)
    """

    kind: ActivationKind = ActivationKind.SILU
    alpha: float = 1.0
    beta: float = 0.0
    limit: float | None = None

    @property
    def gated(self) -> bool:
        return self.kind != ActivationKind.RELU2


@dataclass(frozen=True, kw_only=True)
class Routing:
    """How logits [T, E] become topk_ids [T, k] and topk_weights [T, k].

    kind "softmax_topk":  softmax over all experts, then the k largest; `renormalize` divides by their
                          sum (Qwen2-MoE, Qwen3-MoE)
    kind "sigmoid_topk":  sigmoid scores; selection on score + correction bias, limited to the best
                          `topk_group` of `n_group` groups; weights are the unbiased scores (DeepSeek-V3)
    kind "topk_softmax":  the k largest logits, then softmax over those k (GPT-OSS)
    kind "sqrt_softplus_topk":  scores are the square root of softplus; otherwise as sigmoid_topk, without
                          groups; some layers have their choice by token id instead (DeepSeek-V4)

    `scaling_factor` multiplies the final weights, here and nowhere else. on_input: a token's weight
    multiplies what its expert reads instead of what it writes, which takes a top_k of 1 (Llama-4).
    """

    kind: RoutingKind = RoutingKind.SOFTMAX_TOPK
    renormalize: bool = True
    n_group: int = 1
    topk_group: int = 1
    scaling_factor: float = 1.0
    on_input: bool = False


@dataclass(frozen=True, kw_only=True)
class MoESpec:
    """One MoE layer. `intermediate_size` is the whole expert's, before any TP sharding."""

    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    activation: Activation = field(default_factory=Activation)
    routing: Routing = field(default_factory=Routing)
    expert_bias: bool = False  # both GEMMs carry a bias (GPT-OSS)
    format: Format = Format.BF16  # of the weights
    quantized_activations: bool = False  # NVFP4 checkpoint with input scales: W4A4 was intended

    @property
    def w13_rows(self) -> int:
        return (2 if self.activation.gated else 1) * self.intermediate_size


@dataclass(frozen=True, kw_only=True)
class RankShape:
    """The sizes of one rank's part of a layer: what weights, kernels, workspaces and buffers depend on."""

    format: str  # of the weights
    hidden: int  # columns of GEMM1, rows of GEMM2
    inner: int  # columns of GEMM2
    w13_rows: int
    num_experts: int  # of all ranks
    local_experts: int
    top_k: int

    @classmethod
    def of(cls, spec: MoESpec, *, num_local_experts: int, expert_tp: int = 1) -> Self:
        """expert_tp: ranks that divide the intermediate size of each expert."""
        return cls(
            format=spec.format,
            hidden=spec.hidden_size,
            inner=spec.intermediate_size // expert_tp,
            w13_rows=spec.w13_rows // expert_tp,
            num_experts=spec.num_experts,
            local_experts=num_local_experts,
            top_k=spec.top_k,
        )
