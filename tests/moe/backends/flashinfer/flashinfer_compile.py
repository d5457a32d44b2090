"""FlashInfer's CuTe DSL kernels compiled for sm_100a, without a device, from what a runner hands over.

CuTe DSL needs a GPU to launch, not to compile: with CUTE_DSL_ARCH set it traces a kernel with the types,
sizes and constants of its arguments and assembles a cubin. All that the library asks a device for is how many
clusters may be active at once. Here every launch of W4A4 is preceded by that: what does not fit a kernel does
not trace.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from torch import Tensor

from tests.moe.backends.flashinfer.flashinfer_contract import PROCESSORS, Launches, bind

ARCHITECTURE = "sm_100a"


class Compiling(Launches):
    """Compiles what it stands in for. `kernels`: what came of it."""

    def __init__(self, originals: dict[str, Callable[..., Any]]) -> None:
        super().__init__(originals)
        self.kernels: list[Any] = []

    def moe_core(self, *args: Any, **kwargs: Any) -> Tensor:
        a = SimpleNamespace(**bind(self._originals["core"], args, kwargs))
        self.kernels += [_gemm1(a), _gemm2(a)]
        return super().moe_core(*args, **kwargs)

    def masked_gemm(self, **made: Any) -> Callable[..., Tensor]:
        import cuda.bindings.driver as cuda
        from flashinfer.gemm.kernels import grouped_gemm_masked_blackwell as masked

        stream = SimpleNamespace(current_stream=lambda: cuda.CUstream(0))
        with (
            patch.object(masked, "cutlass_torch", stream),
            patch.object(masked, "get_max_active_clusters", lambda size: PROCESSORS // size),
        ):
            launch = self._originals["masked"](**made)
        self.kernels.append(inspect.getclosurevars(launch).nonlocals["kernel"])
        return super().masked_gemm(**made)


def _pointers(**tensors: tuple[Any, Any, int]) -> dict[str, Any]:
    """Arguments of a kernel: name -> (type, tensor or None for one that the library allocates, alignment)."""
    import cutlass.cute as cute
    from flashinfer.cute_dsl.utils import make_ptr

    return {
        name: make_ptr(
            kind, align if x is None else x.data_ptr(), cute.AddressSpace.gmem, assumed_align=align
        )
        for name, (kind, x, align) in tensors.items()
    }


def _gemm1(a: SimpleNamespace) -> Any:
    import cuda.bindings.driver as cuda
    from cutlass import Float4E2M1FN, Float8E4M3FN, Float32, Int32
    from flashinfer.fused_moe.cute_dsl import blockscaled_contiguous_gather_grouped_gemm_act_fusion as library
    from flashinfer.tllm_enums import ActivationType, is_gated_activation

    return library._get_compiled_gather_kernel(
        orig_m=len(a.x),
        permuted_m=a.tile_size * a.num_local_experts,
        n=a.w1_weight.shape[1],
        k=2 * a.w1_weight.shape[2],
        num_experts=a.num_local_experts,
        a_per_token_scale_ptr=None,
        max_active_clusters=PROCESSORS,
        stream=cuda.CUstream(0),
        a_dtype="float4_e2m1fn",
        b_dtype="float4_e2m1fn",
        sf_dtype="float8_e4m3fn",
        c_dtype="float4_e2m1fn",
        quantize_output=True,
        sf_vec_size=16,
        tile_size=a.tile_size,
        topk=a.top_k,
        cluster_shape_mn=a.gemm1_cluster_shape_mn,
        vectorized_f32=True,
        raster_along_m=False,
        mma_tiler_mn=a.gemm1_mma_tiler_mn,
        enable_pdl=a.enable_pdl,
        activation_type=a.activation_type,
        swiglu_alpha=a.swiglu_alpha,
        swiglu_beta=a.swiglu_beta,
        swiglu_limit=a.swiglu_limit,
        gated=is_gated_activation(ActivationType(a.activation_type)),
        **_pointers(
            a_ptr=(Float4E2M1FN, a.x, 32),
            b_ptr=(Float4E2M1FN, a.w1_weight, 32),
            a_sf_ptr=(Float8E4M3FN, a.x_sf, 16),
            b_sf_ptr=(Float8E4M3FN, a.w1_weight_sf, 16),
            c_ptr=(Float4E2M1FN, None, 32),
            c_sf_ptr=(Float8E4M3FN, None, 16),
            alpha_ptr=(Float32, a.w1_alpha, 4),
            tile_idx_ptr=(Int32, None, 4),
            mn_limit_ptr=(Int32, None, 4),
            token_id_ptr=(Int32, None, 4),
            num_tiles_ptr=(Int32, None, 4),
            norm_const_ptr=(Float32, a.fc2_input_scale, 4),
        ),
    )


def _gemm2(a: SimpleNamespace) -> Any:
    import cuda.bindings.driver as cuda
    from cutlass import BFloat16, Float4E2M1FN, Float8E4M3FN, Float32, Int32
    from flashinfer.fused_moe.cute_dsl import blockscaled_contiguous_grouped_gemm_finalize_fusion as library

    return library._get_compiled_finalize_kernel(
        seq_len=len(a.x),
        permuted_m=a.tile_size * a.num_local_experts,
        n=a.w2_weight.shape[1],
        k=2 * a.w2_weight.shape[2],
        num_experts=a.num_local_experts,
        topk=a.top_k,
        a_per_token_scale_ptr=None,
        max_active_clusters=PROCESSORS,
        stream=cuda.CUstream(0),
        sf_vec_size=16,
        tile_size=a.tile_size,
        cluster_shape_mn=a.gemm2_cluster_shape_mn,
        raster_along_m=False,
        a_dtype=Float4E2M1FN,
        b_dtype=Float4E2M1FN,
        sf_dtype=Float8E4M3FN,
        out_dtype=BFloat16,
        final_scale_dtype=Float32,
        mma_tiler_mn=a.gemm2_mma_tiler_mn,
        enable_pdl=a.enable_pdl,
        use_fused_finalize=a.use_fused_finalize,
        **_pointers(
            a_ptr=(Float4E2M1FN, None, 32),
            b_ptr=(Float4E2M1FN, a.w2_weight, 32),
            a_sf_ptr=(Float8E4M3FN, None, 16),
            b_sf_ptr=(Float8E4M3FN, a.w2_weight_sf, 16),
            c_ptr=(BFloat16, a.moe_output, 16),
            alpha_ptr=(Float32, a.w2_alpha, 4),
            tile_idx_ptr=(Int32, None, 4),
            mn_limit_ptr=(Int32, None, 4),
            permuted_idx_ptr=(Int32, None, 4),
            num_tiles_ptr=(Int32, None, 4),
            token_scales_ptr=(Float32, a.token_final_scales, 4),
        ),
    )
