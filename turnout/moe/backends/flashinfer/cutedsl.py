"""Runner "flashinfer_cutedsl": FlashInfer's CuTe DSL kernels for NVFP4 on Blackwell.

Two routes, taken by the layout of a batch. They share no weights, since their kernels want different orders:

* "tokens": `CuteDslMoEWrapper` sorts, multiplies, activates and sums in one call. W1 has up and gate in
  alternating blocks of 64 rows. W4A16 takes the same weights and bf16 tokens.
* "batched_experts": masked GEMMs, with a kernel between them that activates and quantises. W1
  keeps gate before up. The kernels take a scale per expert, which is the same for all. W4A4 only.

W4A4 quantises with the scales of formats.scales.resolve, tokens that arrive as NVFP4 before they are routed.

Padding is expert id -1 here and `num_experts` there. The library's sum over a token's experts is atomic, so
its last bits vary. Recipes of its quantisers that environment variables would choose are switched off.

Not run on hardware yet: tests/moe/backends/flashinfer/test_flashinfer_contract.py decodes what the library is
handed, and through that the demo answers with the torch runner's tokens (tests/engine/test_demo_in_fp4.py).

Legend: T tokens, k top-k, H hidden, I intermediate, N outputs of GEMM1, E local experts, C rows per expert,
G = H / 16 groups.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from turnout.formats import fp8, layouts, nvfp4
from turnout.formats.experts import ExpertWeights
from turnout.formats.scales import resolve, weight_scales
from turnout.moe.backends.flashinfer.declaration import CUTEDSL
from turnout.moe.backends.flashinfer.weights_blackwell import (
    Nvfp4Matrix,
    RowOrder,
    as_they_are,
)
from turnout.moe.batch import ExpertsBatch, Hidden, TokensBatch
from turnout.moe.plan import MoEPlan
from turnout.moe.spec import Activation, MoESpec
from turnout.vocabulary import ActivationKind, Format, Layout

MASKED_GEMM = {
    "ab_dtype": "float4_e2m1fn",
    "sf_dtype": "float8_e4m3fn",
    "c_dtype": "bfloat16",
    "sf_vec_size": nvfp4.GROUP,
    "alpha_dtype": "float32",
}


class Route(Protocol):
    """Weights in the order of one layout's kernels, and a call on a batch of it."""

    def prepare(self, experts: ExpertWeights) -> None: ...

    def update(self, experts: ExpertWeights) -> None: ...

    def __call__(self, batch: Any) -> Tensor: ...


class CuteDslRunner:
    """An `Experts` (moe/interface.py) of NVFP4 weights on Blackwell, by one route for each layout."""

    capability = CUTEDSL

    def __init__(self, spec: MoESpec, plan: MoEPlan, device: torch.device) -> None:
        kinds: dict[Layout, type[TokensRoute] | type[ExpertsRoute]] = {
            Layout.TOKENS: TokensRoute,
            Layout.BATCHED_EXPERTS: ExpertsRoute,
        }
        planned = {plan.prefill.layout, plan.decode.layout}
        self._routes: dict[str, Route] = {
            layout: kind(spec, plan, device) for layout, kind in kinds.items() if layout in planned
        }

    def prepare(self, experts: ExpertWeights) -> None:
        with torch.inference_mode(False):  # graphs captured later may write to what is made here
            for route in self._routes.values():
                route.prepare(experts)

    def update(self, experts: ExpertWeights) -> None:
        for route in self._routes.values():
            route.update(experts)

    def same_bits(self, tokens: int) -> range:
        return range(0)

    def __call__(self, batch: TokensBatch | ExpertsBatch) -> Tensor:
        return self._routes[batch.layout](batch)


class Weights:
    """Both matrices and the scales of one route, replaced in place by `load`."""

    def __init__(
        self, experts: ExpertWeights, w13_order: RowOrder, device: torch.device, scales: dict[str, Tensor]
    ) -> None:
        self.w13 = Nvfp4Matrix(experts.w13, w13_order, device)
        self.w2 = Nvfp4Matrix(experts.w2, as_they_are, device)
        self.scales = {name: scale.to(device, torch.float32, copy=True) for name, scale in scales.items()}

    def load(self, other: Weights) -> None:
        self.w13.load(other.w13)
        self.w2.load(other.w2)
        for name, scale in self.scales.items():
            scale.copy_(other.scales[name])


class TokensRoute:
    """[T, H], weighted and summed over k."""

    def __init__(self, spec: MoESpec, plan: MoEPlan, device: torch.device) -> None:
        self._spec, self._plan, self._device = spec, plan, device
        self._order = layouts.interleave_up_gate if spec.activation.gated else as_they_are
        self._quantized = plan.activation_format == Format.NVFP4
        self._max_tokens = max(p.max_tokens for p in (plan.prefill, plan.decode) if p.layout == Layout.TOKENS)

    def prepare(self, experts: ExpertWeights) -> None:
        self._weights = self._prepared(experts)
        self._moe = self._wrapper()

    def update(self, experts: ExpertWeights) -> None:
        self._weights.load(self._prepared(experts))

    def _wrapper(self) -> Any:
        """The library's layer for this shard; it keeps a stream and events, no buffers."""
        from flashinfer import CuteDslMoEWrapper
        from flashinfer.tllm_enums import ActivationType

        activation, plan = self._spec.activation, self._plan
        kind = ActivationType.Swiglu if activation.gated else ActivationType.Relu2
        limit = {} if activation.limit is None else {"swiglu_limit": activation.limit}
        return CuteDslMoEWrapper(
            num_experts=self._spec.num_experts,
            top_k=self._spec.top_k,
            hidden_size=self._weights.w2.rows,
            intermediate_size=self._weights.w2.inner,
            use_cuda_graph=self._device.type == "cuda",
            num_local_experts=plan.num_local_experts,
            local_expert_offset=plan.first_expert,
            output_dtype=getattr(torch, plan.compute_dtype),
            device=str(self._device),
            activation_type=kind.value,
            swiglu_alpha=activation.alpha,
            swiglu_beta=activation.beta,
            quant_mode="w4a4" if self._quantized else "w4a16",
            **limit,
        )

    def _prepared(self, experts: ExpertWeights) -> Weights:
        if not self._quantized:
            alpha1, alpha2 = weight_scales(experts)
            return Weights(experts, self._order, self._device, {"alpha1": alpha1, "alpha2": alpha2})
        resolved = resolve(experts)
        scales = {"alpha1": resolved.alpha1, "alpha2": resolved.alpha2}
        scales |= {"a1": resolved.a1.view(1), "a2": resolved.a2.view(1)}
        return Weights(experts, self._order, self._device, scales)

    def __call__(self, batch: TokensBatch) -> Tensor:
        T, H = len(batch.topk_ids), self._weights.w2.rows
        if T == 0:
            return torch.empty(0, H, dtype=self._moe.output_dtype, device=self._device)
        if self._max_tokens < T:
            raise ValueError(f"{T} tokens, but the plan bounds them by {self._max_tokens}")
        x, x_sf = self._input(batch.hidden)
        ids_TK = batch.topk_ids
        w, scales = self._weights, self._weights.scales
        return self._moe.run(
            x=x,
            x_sf=x_sf,
            token_selected_experts=ids_TK.masked_fill(ids_TK < 0, self._spec.num_experts),
            token_final_scales=batch.topk_weights.contiguous(),
            w1_weight=w.w13.codes,
            w1_weight_sf=w.w13.mma_scales,
            w1_alpha=scales["alpha1"],
            fc2_input_scale=scales.get("a2"),
            w2_weight=w.w2.codes,
            w2_weight_sf=w.w2.mma_scales,
            w2_alpha=scales["alpha2"],
        )

    def _input(self, hidden: Hidden) -> tuple[Tensor, Tensor | None]:
        """W4A4: codes uint8 [T, H/2] and scales uint8 [T, G, 1], row-major; W4A16: bf16 [T, H]."""
        if not self._quantized:
            return hidden.decode().to(torch.bfloat16).contiguous(), None
        if hidden.format == Format.NVFP4:
            assert hidden.scale is not None, "nvfp4 hidden states carry scales"
            codes, scales = hidden.data.contiguous(), hidden.scale.contiguous().view(torch.uint8)
        else:
            from flashinfer import fp4_quantize

            codes, scales = fp4_quantize(
                hidden.data.contiguous(),
                self._weights.scales["a1"],
                is_sf_swizzled_layout=False,
                nvfp4_4over6=None,
            )
        return codes, scales.unsqueeze(-1)


class ExpertsRoute:
    """[E, C, H], unweighted, zero beyond the counts."""

    def __init__(self, spec: MoESpec, plan: MoEPlan, device: torch.device) -> None:
        self._device, self._activation = device, spec.activation
        self._dtype: torch.dtype = getattr(torch, plan.compute_dtype)

    def prepare(self, experts: ExpertWeights) -> None:
        self._weights = self._prepared(experts)

    def update(self, experts: ExpertWeights) -> None:
        self._weights.load(self._prepared(experts))

    def _prepared(self, experts: ExpertWeights) -> Weights:
        resolved, E = resolve(experts), experts.num_local_experts
        scales = {"a1": resolved.a1.expand(E), "a2": resolved.a2.expand(E)}
        scales |= {"alpha1": resolved.alpha1, "alpha2": resolved.alpha2}
        return Weights(experts, as_they_are, self._device, scales)

    def __call__(self, batch: ExpertsBatch) -> Tensor:
        from flashinfer import silu_and_mul_scaled_nvfp4_experts_quantize
        from flashinfer.quantization import scaled_fp4_grouped_quantize

        (E, C), w = batch.hidden.data.shape[:2], self._weights
        out_ECH = torch.zeros(E, C, w.w2.rows, dtype=self._dtype, device=self._device)
        if C == 0:
            return out_ECH
        counts, scales = batch.counts.contiguous(), w.scales
        h_ECN = torch.empty(E, C, w.w13.rows, dtype=self._dtype, device=self._device)
        if batch.hidden.format == Format.NVFP4:
            x = _arrived(batch.hidden)
        else:
            x = scaled_fp4_grouped_quantize(
                batch.hidden.data.contiguous(), counts, scales["a1"], nvfp4_4over6=None
            )
        self._gemm(x, w.w13, scales["alpha1"], counts, h_ECN)
        if self._activation.kind == ActivationKind.SILU:
            a = silu_and_mul_scaled_nvfp4_experts_quantize(h_ECN, counts, scales["a2"], nvfp4_4over6=None)
        else:
            activated_ECI = _activate(h_ECN, self._activation).contiguous()
            a = scaled_fp4_grouped_quantize(activated_ECI, counts, scales["a2"], nvfp4_4over6=None)
        self._gemm(a, w.w2, scales["alpha2"], counts, out_ECH)
        return out_ECH

    def _gemm(
        self, x: tuple[Tensor, Tensor], w: Nvfp4Matrix, alpha: Tensor, counts: Tensor, out_ECN: Tensor
    ) -> None:
        """x: codes [C, K/2, E] over storage [E, C, K/2], and its scales as `mma_scales`."""
        from flashinfer.gemm import grouped_gemm_nt_masked

        weights = w.codes.permute(1, 2, 0), w.mma_scales.view(fp8.DTYPE)
        grouped_gemm_nt_masked(x, weights, out_ECN.permute(1, 2, 0), counts, alpha=alpha, **MASKED_GEMM)


def _arrived(hidden: Hidden) -> tuple[Tensor, Tensor]:
    """Rows [E, C, .] quantised before the wire, as a masked GEMM takes them."""
    from flashinfer import block_scale_interleave

    assert hidden.scale is not None, "nvfp4 hidden states carry scales"
    E, C, G = hidden.scale.shape
    flat = block_scale_interleave(hidden.scale.contiguous().view(torch.uint8))
    tiles = flat.view(E, -(-C // layouts.TILE_ROWS), -(-G // layouts.TILE_GROUPS), 32, 4, layouts.TILE_GROUPS)
    return hidden.data.contiguous().permute(1, 2, 0), layouts.mma_view(tiles).view(fp8.DTYPE)


def _activate(h_ECN: Tensor, activation: Activation) -> Tensor:
    """What the library's masked kernel does not activate; [E, C, I] in the dtype of `h_ECN`."""
    if activation.kind == ActivationKind.RELU2:
        return h_ECN.relu().square()
    gate, up = h_ECN.float().chunk(2, dim=-1)
    if activation.limit is not None:
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    return (gate * (activation.alpha * gate).sigmoid() * (up + activation.beta)).to(h_ECN.dtype)
