"""Runner "flashinfer_trtllm": TensorRT-LLM's NVFP4 kernels for Blackwell, as FlashInfer ships them.

One call routes, multiplies, activates and sums; of its forms it takes the one with our top-k ids and weights.
Rows of both weights are shuffled for its output tiles, W1 with up and gate alternating.

The kernel's three scales per expert, in terms of formats.scales.resolve: GEMM1's sums times alpha1 are
what its gate is activated with (`output1_scale_gate_scalar`); the product with the linear half takes alpha1
once more and a2, which quantises it (`output1_scale_scalar`); GEMM2's sums take alpha2.

SwiGLU with parameters and relu2 are not declared: in which units the kernels take their limit and scales, the
library does not say.

Not run on hardware yet: tests/moe/backends/flashinfer/test_flashinfer_contract.py decodes what the library is
handed, and through that the demo answers with the torch runner's tokens (tests/engine/test_demo_in_fp4.py).

Legend: T tokens, k top-k, H hidden, I intermediate, E local experts, G = H / 16 groups.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from turnout.formats import fp8, layouts
from turnout.formats.experts import ExpertWeights
from turnout.formats.scales import resolve
from turnout.moe.backends.flashinfer.declaration import TRTLLM
from turnout.moe.backends.flashinfer.weights_blackwell import Nvfp4Matrix, shuffled_up_gate
from turnout.moe.batch import ExpertsBatch, Hidden, TokensBatch
from turnout.moe.plan import MoEPlan
from turnout.moe.spec import MoESpec
from turnout.vocabulary import Format


class TrtllmRunner:
    """An `Experts` (moe/interface.py) of NVFP4 weights and activations on Blackwell; tokens [T, H] in,
    their sums out."""

    capability = TRTLLM

    def __init__(self, spec: MoESpec, plan: MoEPlan, device: torch.device) -> None:
        self._spec, self._plan, self._device = spec, plan, device
        self._max_tokens = max(plan.prefill.max_tokens, plan.decode.max_tokens)

    def prepare(self, experts: ExpertWeights) -> None:
        with torch.inference_mode(False):  # graphs captured later may write to what is made here
            self._w13, self._w2 = self._matrices(experts)
            self._scales = self._resolved(experts)

    def update(self, experts: ExpertWeights) -> None:
        for mine, new in zip((self._w13, self._w2), self._matrices(experts), strict=True):
            mine.load(new)
        for name, scale in self._resolved(experts).items():
            self._scales[name].copy_(scale)

    def _matrices(self, experts: ExpertWeights) -> tuple[Nvfp4Matrix, Nvfp4Matrix]:
        return (
            Nvfp4Matrix(experts.w13, shuffled_up_gate, self._device),
            Nvfp4Matrix(experts.w2, layouts.shuffle_rows, self._device),
        )

    def _resolved(self, experts: ExpertWeights) -> dict[str, Tensor]:
        resolved = resolve(experts)
        scales = {
            "a1": resolved.a1.view(1),
            "gate": resolved.alpha1,
            "linear": resolved.alpha1 * resolved.a2,
            "output": resolved.alpha2,
            "ones": torch.ones_like(resolved.alpha1),
        }
        return {name: scale.to(self._device, torch.float32, copy=True) for name, scale in scales.items()}

    def same_bits(self, tokens: int) -> range:
        return range(0)

    def __call__(self, batch: TokensBatch | ExpertsBatch) -> Tensor:
        assert isinstance(batch, TokensBatch), "declared for the layout of tokens only"
        T, H = len(batch.topk_ids), self._w2.rows
        out_TH = torch.empty(T, H, dtype=torch.bfloat16, device=self._device)
        if self._max_tokens < T:
            raise ValueError(f"{T} tokens, but the plan bounds them by {self._max_tokens}")
        if T:
            self._launch(batch, out_TH)
        return out_TH

    def _launch(self, batch: TokensBatch, out_TH: Tensor) -> None:
        from flashinfer.fused_moe import trtllm_fp4_block_scale_routed_moe
        from flashinfer.tllm_enums import ActivationType, RoutingMethodType, SfLayout

        codes, scales = self._input(batch.hidden)
        plain: dict[str, Any] = dict.fromkeys(
            (
                "routing_bias",
                "gemm1_bias",
                "gemm1_beta",
                "gemm1_clamp_limit",
                "gemm2_bias",
                "n_group",
                "topk_group",
                "routed_scaling_factor",
            )
        )
        trtllm_fp4_block_scale_routed_moe(
            topk_ids=(batch.topk_ids.contiguous(), batch.topk_weights.contiguous()),
            hidden_states=codes,
            hidden_states_scale=scales,
            hidden_states_scale_layout=SfLayout.layout_linear,
            gemm1_weights=self._w13.codes,
            gemm1_weights_scale=self._w13.flat_scales,
            gemm1_alpha=self._scales["ones"],
            gemm2_weights=self._w2.codes,
            gemm2_weights_scale=self._w2.flat_scales,
            output1_scale_scalar=self._scales["linear"],
            output1_scale_gate_scalar=self._scales["gate"],
            output2_scale_scalar=self._scales["output"],
            num_experts=self._spec.num_experts,
            top_k=self._spec.top_k,
            intermediate_size=self._w2.inner,
            local_expert_offset=self._plan.first_expert,
            local_num_experts=self._plan.num_local_experts,
            routing_method_type=RoutingMethodType.Renormalize.value,  # which kernel sorts; ids are given
            activation_type=ActivationType.Swiglu.value,
            output=out_TH,
            tune_max_num_tokens=self._max_tokens,
            **plain,
        )

    def _input(self, hidden: Hidden) -> tuple[Tensor, Tensor]:
        """Codes uint8 [T, H/2] and scales e4m3 [T, G], row-major."""
        if hidden.format == Format.NVFP4:
            assert hidden.scale is not None, "nvfp4 hidden states carry scales"
            return hidden.data.contiguous(), hidden.scale.contiguous()
        from flashinfer import fp4_quantize

        codes, scales = fp4_quantize(
            hidden.data.contiguous(), self._scales["a1"], is_sf_swizzled_layout=False, nvfp4_4over6=None
        )
        return codes, scales.view(fp8.DTYPE)
