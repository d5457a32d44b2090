"""spec + topology + budget + hardware + wishes -> plan, or all the reasons why not."""

from __future__ import annotations

from dataclasses import dataclass

from turnout.moe.capability import Refusal


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What the user asked for; "auto" may be anything that is allowed."""

    runner: str = "auto"
    dispatcher: str = "auto"
    dispatch_format: str = "auto"  # auto, bf16, fp8, nvfp4
    activation_format: str = "auto"  # auto, bf16 (weight-only), nvfp4 (W4A4)
    weight_storage: str = "auto"  # auto, packed, decoded


@dataclass(frozen=True, kw_only=True)
class PhasePlan:
    """Who does what in one phase ("prefill" or "decode")."""

    phase: str
    runner: str
    dispatcher: str
    layout: str  # "tokens" or "experts"
    wire_format: str  # "bf16", "fp8", "nvfp4"
    reduce: str  # who owes the sum over ranks: "none", "layer"
    max_tokens: int  # the largest batch the runner sees on this rank


@dataclass(frozen=True, kw_only=True)
class MoEPlan:
    """How every MoE layer of one model runs on this rank."""

    prefill: PhasePlan
    decode: PhasePlan
    activation_format: str  # what the GEMMs multiply with: "bf16" or "nvfp4"
    weight_storage: str  # "packed": decoded at each use; "decoded": once at load
    compute_dtype: str  # torch dtype name of hidden states: "float32", "bfloat16", "float16"
    first_expert: int
    num_local_experts: int
    weight_bytes: int  # of one layer on this rank, as stored for use
    workspace_bytes: int
    dispatch_bytes: int
    refused: tuple[Refusal, ...] = ()  # candidates that were considered and cannot run
    reasons: tuple[str, ...] = ()  # why each choice was made

    def phase(self, name: str) -> PhasePlan:
        return self.prefill if name == "prefill" else self.decode
