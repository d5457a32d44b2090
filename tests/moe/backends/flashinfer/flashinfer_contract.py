"""FlashInfer without a GPU: its Python runs as installed, its launches are computed here.

What is replaced is the last call before the device, nothing above it: the functions of its compiled modules,
the compiled masked GEMM, and the body of the CuTe DSL layer. So the library's own checks of shapes and dtypes
see what a runner hands over, and then each stand-in

* checks what kernels assume and Python does not: contiguity, strides, alignment, ids, padding;
* decodes weights and scales one element at a time by the documented layouts, not by Turnout's functions;
* computes in float32. `Launches.result` is what the layer comes to before it is rounded to bf16, and between
  the two masked GEMMs float32 is remembered next to the bf16 that is stored.

A launch whose parameters the installed library names otherwise is a broken contract too.

Legend: T tokens, k top-k, H hidden, I intermediate, N rows of W1, E local experts, C rows per expert,
G = K / 16 groups.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from turnout.formats import e2m1, nvfp4

GROUP = 16
BLACKWELL = (10, 0)
PROCESSORS = 148


class Broken(AssertionError):
    """Something a kernel of the library relies on does not hold."""


def require(holds: bool, what: str) -> None:
    if not holds:
        raise Broken(what)


def tensor(name: str, x: Tensor, dtype: torch.dtype, *shape: int, align: int = 16) -> Tensor:
    """`x`, which must be row-major and begin at a multiple of `align` bytes."""
    require(x.dtype == dtype, f"{name} is {x.dtype}, not {dtype}")
    require(tuple(x.shape) == shape, f"{name} has shape {tuple(x.shape)}, not {shape}")
    require(x.is_contiguous(), f"{name} is not contiguous: strides {x.stride()}")
    require(x.data_ptr() % align == 0, f"{name} is not aligned to {align} bytes")
    return x


def values(codes: Tensor, scales: Tensor) -> Tensor:
    """float32 [..., K] of codes uint8 [..., K/2] and the bytes of e4m3 scales [..., K/16]."""
    scales = scales.view(torch.float8_e4m3fn).float()
    return e2m1.decode(e2m1.unpack(codes)) * scales.repeat_interleave(GROUP, dim=-1)


def mma_scales(name: str, scales: Tensor, E: int, rows: int, K: int) -> Tensor:
    """Bytes [E, rows, K/16] of scales [32, 4, M, 4, L, E] over storage [E, M, L, 32, 4, 4]."""
    M, L, G = -(-rows // 128), -(-K // (4 * GROUP)), K // GROUP
    require(scales.element_size() == 1, f"{name} holds {scales.dtype}")
    require(tuple(scales.shape) == (32, 4, M, 4, L, E), f"{name} has shape {tuple(scales.shape)}")
    strides = (16, 4, 512 * L, 1, 512, 512 * L * M)
    lengths = zip(scales.stride(), strides, scales.shape, strict=True)
    require(
        all(size == 1 or mine == due for mine, due, size in lengths), f"{name}: strides {scales.stride()}"
    )
    require(scales.data_ptr() % 16 == 0, f"{name} is not aligned")
    r, g = torch.arange(rows)[:, None], torch.arange(G)[None]
    plain = scales.view(torch.uint8)[r % 32, r % 128 // 32, r // 128, g % 4, g // 4]
    return plain.permute(2, 0, 1).contiguous()


def tiled_scales(flat: Tensor, E: int, rows: int, K: int) -> Tensor:
    """The same of tiles one after the other, in a tensor of any shape."""
    M, L, G = -(-rows // 128), -(-K // (4 * GROUP)), K // GROUP
    r, g = torch.arange(rows)[:, None], torch.arange(G)[None]
    place = ((r // 128) * L + g // 4) * 512 + (r % 32) * 16 + r % 128 // 32 * 4 + g % 4
    return flat.reshape(E, M * L * 512).view(torch.uint8)[:, place]


def store_tiles(plain: Tensor, out: Tensor) -> None:
    """Write bytes [E, rows, G] into `out` as tiles, zeros as padding."""
    E, rows, G = plain.shape
    M, L = -(-rows // 128), -(-G // 4)
    tiles = out.view(torch.uint8).view(E, M * L * 512)
    r, g = torch.arange(rows)[:, None], torch.arange(G)[None]
    tiles.zero_()
    tiles[:, ((r // 128) * L + g // 4) * 512 + (r % 32) * 16 + r % 128 // 32 * 4 + g % 4] = plain


def swiglu(gate: Tensor, up: Tensor, alpha: float, beta: float, limit: float) -> Tensor:
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + beta)


def quantized(x: Tensor, a: Tensor) -> Tensor:
    """x rounded to NVFP4 by the quantiser's scale `a`, still multiplied by it."""
    codes, scales = nvfp4.quantize_activation(x, 1.0 / a.float())
    return values(codes, scales)


class Launches:
    """What was launched, and what the last layer came to in float32."""

    def __init__(self, originals: dict[str, Callable[..., Any]]) -> None:
        self._originals = originals  # what is replaced
        self.names: list[str] = []
        self.result: Tensor | None = None
        self._exact: dict[int, Tensor] = {}  # by address: what a bf16 tensor was rounded from

    def __getattr__(self, name: str) -> Callable[..., None]:
        """The compiled modules' other functions, which no runner of ours may reach."""
        if name.startswith("_"):
            raise AttributeError(name)

        def unexpected(*args: Any) -> None:
            raise Broken(f"{name} was launched")

        return unexpected

    def _exactly(self, x: Tensor) -> Tensor:
        return self._exact.pop(x.data_ptr(), x.float())

    def _decoded(self, codes: Tensor, decode: Callable[[], Tensor]) -> Tensor:
        """The weights that `codes` are part of."""
        return decode()

    # Quantisers

    def fp4_quantize(
        self, x: Tensor, a: Tensor, codes: Tensor, scales: Tensor, group: int, ue8m0: bool, swizzled: bool,
        small_tiles: bool, reciprocal: bool, pdl: bool, recipe: int,
    ) -> None:  # fmt: skip
        self.names.append("fp4_quantize")
        (T, H) = x.shape
        tensor("input", x, torch.bfloat16, T, H)
        tensor("global scale", a, torch.float32, 1, align=4)
        require((group, ue8m0, reciprocal, recipe) == (GROUP, False, False, 0), "not plain NVFP4")
        require(not swizzled and not small_tiles, "scales of tokens are row-major")
        new_codes, new_scales = nvfp4.quantize_activation(x, 1.0 / a[0])
        codes.copy_(new_codes)
        scales[: T * H // GROUP].view(T, H // GROUP).copy_(new_scales.view(torch.uint8))

    def silu_and_mul_scaled_nvfp4_experts_quantize(
        self, codes: Tensor, scales: Tensor, x: Tensor, a: Tensor, mask: Tensor, silu: bool, recipe: int
    ) -> None:
        """x [E C, K or 2K]; one scale `a` per expert; rows from mask[e] on are left alone."""
        self.names.append("silu_and_quantize" if silu else "grouped_quantize")
        E, rows = len(mask), len(x)
        C, K = rows // E, 2 * codes.shape[1]
        tensor("input", x, torch.bfloat16, rows, 2 * K if silu else K)
        tensor("mask", mask, torch.int32, E, align=4)
        tensor("global scales", a, torch.float32, E, align=4)
        require(recipe == 0, "the recipe must not come from the environment")
        exact = self._exactly(x)
        plain = swiglu(*exact.chunk(2, dim=-1), 1.0, 0.0, torch.inf) if silu else exact
        new_codes, new_scales = nvfp4.quantize_activation(plain.view(E, C, K), 1.0 / a)
        used = torch.arange(C) < mask[:, None]
        garbage = torch.full_like(new_codes, 0x77)  # as uninitialised as memory comes
        codes.copy_(torch.where(used[..., None], new_codes, garbage).view(rows, K // 2))
        nan = torch.full((), 0x7F, dtype=torch.uint8)
        store_tiles(torch.where(used[..., None], new_scales.view(torch.uint8), nan), scales)

    def block_scale_interleave_sm100(self, scales: Tensor, out: Tensor) -> None:
        self.names.append("block_scale_interleave")
        tensor("scales", scales, torch.uint8, *scales.shape)
        store_tiles(scales, out)

    # The CuTe DSL layer

    def moe_core(self, *args: Any, **kwargs: Any) -> Tensor:
        """Of `_moe_core_impl`: W4A4."""
        self.names.append("cutedsl_w4a4")
        a = SimpleNamespace(**bind(self._originals["core"], args, kwargs))
        T, H = len(a.x), 2 * a.x.shape[1]
        tensor("x", a.x, torch.uint8, T, H // 2, align=32)
        require(a.x_sf.element_size() == 1 and a.x_sf.is_contiguous(), "x_sf: row-major bytes")
        require(a.x_sf.numel() == T * H // GROUP, f"x_sf has {a.x_sf.numel()} elements")
        tensor("fc2_input_scale", a.fc2_input_scale, torch.float32, 1, align=4)
        x = values(a.x, a.x_sf.reshape(T, H // GROUP))
        return self._cutedsl(a, x, lambda h: quantized(h, a.fc2_input_scale[0]))

    def w4a16(self, *args: Any, **kwargs: Any) -> Tensor:
        self.names.append("cutedsl_w4a16")
        a = SimpleNamespace(**bind(self._originals["w4a16"], args, kwargs))
        tensor("x", a.x, torch.bfloat16, *a.x.shape)
        return self._cutedsl(a, a.x.float(), lambda h: h)

    def _cutedsl(self, a: SimpleNamespace, x_TH: Tensor, rounded: Callable[[Tensor], Tensor]) -> Tensor:
        from flashinfer.tllm_enums import ActivationType, is_gated_activation

        (T, H), k = x_TH.shape, a.token_selected_experts.shape[1]
        E, N = a.w1_weight.shape[:2]
        gated = is_gated_activation(ActivationType(int(a.activation_type)))
        I = N // 2 if gated else N
        require(a.num_local_experts == E, f"{E} experts, {a.num_local_experts} declared")
        tensor("token_selected_experts", a.token_selected_experts, torch.int32, T, k, align=4)
        tensor("token_final_scales", a.token_final_scales, torch.float32, T, k, align=4)
        ids = a.token_selected_experts
        require(bool(((ids >= 0) & (ids <= a.num_experts)).all()), "ids must lie in 0 .. num_experts")
        codes1 = tensor("w1_weight", a.w1_weight, torch.uint8, E, N, H // 2, align=32)
        codes2 = tensor("w2_weight", a.w2_weight, torch.uint8, E, H, I // 2, align=32)
        tensor("w1_alpha", a.w1_alpha, torch.float32, E, align=4)
        tensor("w2_alpha", a.w2_alpha, torch.float32, E, align=4)
        tensor("moe_output", a.moe_output, torch.bfloat16, T, H)
        w1 = self._decoded(
            codes1, lambda: values(codes1, mma_scales("w1_weight_sf", a.w1_weight_sf, E, N, H))
        )
        w2 = self._decoded(
            codes2, lambda: values(codes2, mma_scales("w2_weight_sf", a.w2_weight_sf, E, H, I))
        )

        def activated(h: Tensor) -> Tensor:
            if not gated:
                return h.relu().square()
            up, gate = h.unflatten(-1, (I // 64, 2, 64)).unbind(-2)
            return swiglu(gate.flatten(-2), up.flatten(-2), a.swiglu_alpha, a.swiglu_beta, a.swiglu_limit)

        def expert(e: int, x: Tensor) -> Tensor:
            h = rounded(activated(x @ w1[e].T * a.w1_alpha[e]))
            return h @ w2[e].T * a.w2_alpha[e]

        self.result = weighted(x_TH, ids, a.token_final_scales, a.local_expert_offset, E, expert)
        return a.moe_output.copy_(self.result)

    # The masked GEMM

    def masked_gemm(self, **made: Any) -> Callable[..., Tensor]:
        """Of `get_cute_dsl_compiled_masked_gemm_kernel`: the launch of one made for these sizes."""

        def launch(
            a_tensor_gpu: Tensor, b_tensor_gpu: Tensor, sfa_tensor_gpu: Tensor, sfb_tensor_gpu: Tensor,
            masked_m_tensor_gpu: Tensor, c_tensor_gpu: Tensor, alpha_tensor_gpu: Tensor, **fused: Any,
        ) -> Tensor:  # fmt: skip
            self.names.append("masked_gemm")
            require(not any(x is not None for x in fused.values()), "arguments of the fused combine")
            m, n, k, l = (made[size] for size in "mnkl")
            a = tensor("A", a_tensor_gpu.permute(2, 0, 1), torch.uint8, l, m, k // 2)
            b = tensor("B", b_tensor_gpu.permute(2, 0, 1), torch.uint8, l, n, k // 2)
            c = tensor("C", c_tensor_gpu.permute(2, 0, 1), torch.bfloat16, l, m, n)
            mask = tensor("masked_m", masked_m_tensor_gpu, torch.int32, l)
            alpha = tensor("alpha", alpha_tensor_gpu, torch.float32, l)
            require(made["sf_vec_size"] == GROUP, "groups of 16")
            product = values(a, mma_scales("SFA", sfa_tensor_gpu, l, m, k)) @ values(
                b, mma_scales("SFB", sfb_tensor_gpu, l, n, k)
            ).transpose(1, 2)
            product = product * alpha[:, None, None]
            used = (torch.arange(m) < mask[:, None])[..., None]
            self.result = torch.where(used, product, 0.0)
            c.copy_(torch.where(used, product.to(c.dtype), c))
            self._exact[c.data_ptr()] = self.result.view(l * m, n)
            return c_tensor_gpu

        return launch

    # TensorRT-LLM's layer

    def trtllm_fp4_block_scale_moe(self, *args: Any) -> list[Tensor]:
        self.names.append("trtllm")
        names = launcher_parameters("trtllm_fp4_block_scale_moe")
        require(len(args) == len(names), f"the module takes {len(names)} arguments, not {len(args)}")
        a = SimpleNamespace(**dict(zip(names, args, strict=True)))
        T, H = len(a.hidden_states), 2 * a.hidden_states.shape[1]
        E, I, k = a.local_num_experts, a.intermediate_size, a.top_k
        require(a.routing_logits is None and a.routing_bias is None, "routing is given")
        require(a.n_group is None and a.topk_group is None, "groups are none of its business")
        tensor("topk_ids", a.topk_ids, torch.int32, T, k, align=4)
        tensor("topk_weights", a.topk_weights, torch.float32, T, k, align=4)
        codes = tensor("hidden_states", a.hidden_states, torch.uint8, T, H // 2)
        fp8 = torch.float8_e4m3fn
        scales = tensor("hidden_states_scale", a.hidden_states_scale, fp8, T, H // GROUP)
        codes1 = tensor("gemm1_weights", a.gemm1_weights, torch.uint8, E, 2 * I, H // 2)
        codes2 = tensor("gemm2_weights", a.gemm2_weights, torch.uint8, E, H, I // 2)
        sf1 = tensor("gemm1_weights_scale", a.gemm1_weights_scale, fp8, E, 2 * I, H // GROUP)
        sf2 = tensor("gemm2_weights_scale", a.gemm2_weights_scale, fp8, E, H, I // GROUP)
        per_expert = ("output1_scales_scalar", "output1_scales_gate_scalar", "output2_scales_scalar")
        linear, gate_scale, down = (tensor(n, getattr(a, n), torch.float32, E, align=4) for n in per_expert)
        ones = tensor("gemm1_alpha", a.gemm1_alpha, torch.float32, E, align=4)
        require(bool((ones == 1).all()), "silu is a swiglu whose alpha is 1")
        tensor("output", a.output, torch.bfloat16, T, H)
        require(a.do_finalize, "the layer sums over a token's experts")
        w1 = self._decoded(codes1, lambda: unshuffled(values(codes1, tiled_scales(sf1, E, 2 * I, H))))
        w2 = self._decoded(codes2, lambda: unshuffled(values(codes2, tiled_scales(sf2, E, H, I))))

        def expert(e: int, x: Tensor) -> Tensor:
            up, gate = (x @ w1[e].T).unflatten(-1, (I, 2)).unbind(-1)
            gate = gate * gate_scale[e]
            h = gate * torch.sigmoid(gate) * up * linear[e]  # in units of the quantiser's scale
            codes, scales = nvfp4.quantize_activation(h, torch.ones(()))
            return values(codes, scales) @ w2[e].T * down[e]

        x = values(codes, scales)
        self.result = weighted(x, a.topk_ids, a.topk_weights, a.local_expert_offset, E, expert)
        a.output.copy_(self.result)
        return [a.output]


def unshuffled(rows: Tensor) -> Tensor:
    """[E, R, K] whose row `32 b + 8 (j % 4) + j / 4` is row `32 b + j` of the result."""
    R = rows.shape[1]
    old = torch.arange(R)
    j = old % 32
    return rows[:, old - j + 8 * (j % 4) + j // 4]


def weighted(
    x_TH: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    first: int,
    E: int,
    expert: Callable[[int, Tensor], Tensor],
) -> Tensor:
    """float32 [T, H]: every token's weighted sum over those of its experts that lie in first .. first + E."""
    out_TH = torch.zeros_like(x_TH)
    for e in range(E):
        token, slot = (ids_TK == first + e).nonzero(as_tuple=True)
        if len(token):
            out_TH.index_add_(0, token, expert(e, x_TH[token]) * weights_TK[token, slot, None])
    return out_TH


def bind(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Every parameter's value, by the names of the function that is installed."""
    try:
        bound = inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:
        raise Broken(f"the installed library takes other arguments: {error}") from error
    bound.apply_defaults()
    return bound.arguments


@cache
def launcher_parameters(function: str) -> list[str]:
    """Names of the parameters of a C++ function of the installed library's MoE launcher."""
    import flashinfer

    source = Path(flashinfer.__file__).parent / "data/csrc/trtllm_fused_moe_kernel_launcher.cu"
    declared = re.search(rf"Array<Tensor> {function}\(([^)]*)\)", source.read_text())
    require(declared is not None, f"{source} declares no {function}")
    assert declared is not None
    return [parameter.split()[-1] for parameter in declared[1].split(",")]


@contextmanager
def library(kind: type[Launches] = Launches) -> Iterator[Any]:
    """FlashInfer as on a Blackwell GPU, with its launches computed here, by an object of `kind`."""
    from flashinfer.fused_moe import core
    from flashinfer.fused_moe.cute_dsl import fused_moe, tuner
    from flashinfer.gemm.kernels import grouped_gemm_masked_blackwell as masked
    from flashinfer.quantization import fp4_quantization as quantization
    from flashinfer.utils import device_support_pdl, get_compute_capability

    launches = kind(
        {
            "core": fused_moe._moe_core_impl,
            "w4a16": tuner.launch_w4a16_moe,
            "masked": masked.get_cute_dsl_compiled_masked_gemm_kernel,
        }
    )
    compiled = SimpleNamespace(build_and_load=lambda: launches, get_library_paths=list)
    replaced: list[tuple[Any, str, Any]] = [
        (fused_moe, "_moe_core_impl", launches.moe_core),
        (tuner, "launch_w4a16_moe", launches.w4a16),
        (masked, "get_cute_dsl_compiled_masked_gemm_kernel", launches.masked_gemm),
        (quantization, "gen_fp4_quantization_sm100_module", lambda: compiled),
        (core, "gen_trtllm_gen_fused_moe_sm100_module", lambda enable_rubin: compiled),
        (core, "get_trtllm_moe_sm100_module", lambda: core._get_trtllm_moe_sm100_module_impl(False)),
    ]
    devices = (
        ("get_compute_capability", get_compute_capability, lambda device: BLACKWELL),
        ("device_support_pdl", device_support_pdl, lambda device: True),
        ("get_num_sm", masked.get_num_sm, lambda device: PROCESSORS),
    )
    for name, module in list(sys.modules.items()):
        if name.startswith("flashinfer"):
            replaced += [(module, n, new) for n, old, new in devices if vars(module).get(n) is old]
    caches = quantization.get_fp4_quantization_module, core._get_trtllm_moe_sm100_module_impl
    with ExitStack() as undo:
        for place, attribute, replacement in replaced:
            undo.enter_context(patch.object(place, attribute, replacement))
        for made in caches:
            made.cache_clear()
            undo.callback(made.cache_clear)
        yield launches
