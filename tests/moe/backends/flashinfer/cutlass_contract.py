"""FlashInfer's `cutlass_fused_moe` without a GPU: its Python runs as installed, its launch is computed here.

The compiled module is replaced, nothing above it. The stand-in checks what the library's binding checks
(dtypes, dimensions, sizes that must agree: flashinfer_cutlass_fused_moe_binding.cu), decodes weights and
scales one element at a time, as its kernels read them, and computes in float32. `Launches.result` is what the
layer comes to before it is rounded.

Legend: T tokens, k top-k, H hidden, I intermediate, N rows, K columns, E local experts.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from tests.moe.backends.flashinfer.flashinfer_contract import (
    Broken,
    require,
    swiglu,
    tensor,
    tiled_scales,
    weighted,
)
from turnout.formats import e2m1, fp8, nvfp4

HOPPER, BLACKWELL = (9, 0), (10, 0)
WORKSPACE = 4096
TACTICS = 3  # of each GEMM

# Where a bit of four bytes goes: bytes 0 to 3 are W[r, b], W[r + 8, b], W[r, b + 4], W[r + 8, b + 4], as in
# interleave_fp4_weights_for_sm90_mixed_gemm_kernel, whose masks and shifts these are.
MOVED = {7: 31, 4: 22, 5: 23, 6: 24, 3: 15, 0: 6, 1: 7, 2: 8,
         15: 28, 12: 19, 13: 20, 14: 21, 11: 12, 8: 3, 9: 4, 10: 5,
         23: 25, 20: 16, 21: 17, 22: 18, 19: 9, 16: 0, 17: 1, 18: 2,
         31: 30, 28: 29, 29: 26, 30: 27, 27: 14, 24: 13, 25: 10, 26: 11}  # fmt: skip


@cache
def interleaved_places(N: int, K: int) -> tuple[Tensor, Tensor]:
    """For each bit of each code, [N, K, 4]: in which byte of the matrix it lies, and where in that."""
    n, k, b = torch.arange(N)[:, None, None], torch.arange(K)[:, None], torch.arange(4)
    source = k // 2
    partition, mma, late, lane = source // 32, source % 32 // 8, source % 8 // 4, source % 4
    which = 2 * late + n % 16 // 8  # of the word's four bytes
    row = n // 16 * 16 + n % 8 + 8 * (mma % 2)
    word = row * K // 2 + partition * 32 + mma // 2 * 16 + lane * 4
    moved = torch.tensor([MOVED[bit] for bit in range(32)])[8 * which + 4 * (k % 2) + b]
    return word + moved // 8, moved % 8


def mxfp4_weights(name: str, codes: Tensor, scales: Tensor, E: int, N: int, K: int) -> Tensor:
    """float32 [E, N, K] of interleaved codes and folded scales."""
    tensor(name, codes, torch.uint8, E, N, K // 2)
    require(N % 64 == 0 and K % 128 == 0, f"{name} is {N} x {K}")
    byte, bit = interleaved_places(N, K)
    bits = codes.reshape(E, -1).long()[:, byte] >> bit & 1
    values = e2m1.decode((bits << torch.arange(4)).sum(-1).to(torch.uint8))
    require(scales.is_contiguous() and scales.numel() * scales.element_size() == E * N * K // 32, name)
    flat = scales.view(torch.uint8).view(E, N // 64, K // 128, 16, 16)
    n, g = torch.arange(N)[:, None], torch.arange(K // 32)[None]
    exponent = flat[:, n // 64, g // 4, n % 16, n % 64 // 16 * 4 + g % 4].float() - 127
    return values * torch.exp2(exponent).repeat_interleave(32, dim=-1)


class Launches:
    """In the place of the compiled module and of the runner it makes."""

    def __init__(self) -> None:
        self.result: Tensor | None = None
        self.tactics: list[tuple[int, ...]] = []  # of each launch, by GEMM
        self._dtypes: tuple[Any, ...] = ()

    def set_deepgemm_jit_include_dirs(self, folders: list[str]) -> None:
        pass

    def interleave_moe_weights_for_sm90_mixed_gemm(self, *args: Any) -> None:
        raise Broken("the interleaving kernel is not needed")

    def init(self, x: Any, weight: Any, output: Any, *flags: bool) -> Launches:
        names = "block fp8", "w4", "mxfp8", "packed", "fused finalize", "humming"
        self._dtypes, self._flags = (x, weight, output), dict(zip(names, flags, strict=True))
        return self

    def get_gemm1_tactic_count(self) -> int:
        return TACTICS

    get_gemm2_tactic_count = get_gemm1_tactic_count

    def get_tactic_occupancy(self, tactic: int) -> int:
        return 1

    def get_valid_tactics_for_shape(self, gemm: int, n: int, k: int) -> list[int]:
        return list(range(2 * TACTICS))

    def get_workspace_size(self, *args: Any) -> int:
        return WORKSPACE

    def run_gemm_profile(self, x: Tensor, *rest: Any) -> None:
        """Before tactics are timed, once for each GEMM and batch size."""
        require(x.dtype == self._dtypes[0], f"made for {self._dtypes}")

    def run_moe(
        self, out, x, ids, weights, w13, b13, w2, b2, scales, input_sf, alpha, beta, limit, relu2_limit,
        situ_beta, situ_linear, swizzled, tp_size, tp_rank, ep_size, ep_rank, cluster_size, cluster_rank,
        alltoall, min_latency, tactics, pdl, kind, workspace,
    ) -> None:  # fmt: skip
        from flashinfer.tllm_enums import ActivationType

        T, k = ids.shape
        E, N = w13.shape[:2]
        H = w2.shape[1]
        I = N // (2 if kind == ActivationType.Swiglu else 1)
        self.tactics.append(tuple(tactics))
        require((x.dtype, w13.dtype, out.dtype) == self._dtypes, f"made for {self._dtypes}")
        require(not self._flags["fused finalize"], "the fused sum is atomic")
        require((tp_size, tp_rank, cluster_size, min_latency) == (1, 0, 1, False), "not how it is called")
        tensor("x", x, torch.bfloat16, T, H)
        tensor("ids", ids, torch.int32, T, k)
        tensor("weights", weights, torch.float32, T, k)
        tensor("out", out, torch.bfloat16, T, H)
        require(
            workspace.numel() >= WORKSPACE and workspace.dtype == torch.uint8, "the workspace is too small"
        )
        require((b13 is None) == (b2 is None), "one bias of two")
        if b13 is not None:
            tensor("b13", b13, torch.bfloat16, E, N)
            tensor("b2", b2, torch.bfloat16, E, H)
        for name, values in (("alpha", alpha), ("beta", beta), ("limit", limit)):
            if values is not None:
                tensor(name, values, torch.float32, E, align=4)
        require(all(v is None for v in (input_sf, relu2_limit, situ_beta, situ_linear)), "unexpected")
        plain13, plain2, a1, a2 = self._weights(w13, w2, scales, E, N, H, I)

        def expert(e: int, x_MH: Tensor) -> Tensor:
            h = self._rounded(x_MH, a1) @ plain13[e].t()
            if b13 is not None:
                h = h + b13[e].float()
            if kind == ActivationType.Swiglu:
                up, gate = h.chunk(2, dim=1)
                given = [float(v[e]) if v is not None else d for v, d in ((alpha, 1), (beta, 0))]
                h = swiglu(gate, up, *given, float(limit[e]) if limit is not None else float("inf"))
            else:
                require(kind == ActivationType.Relu2, f"activation {kind}")
                h = h.relu() ** 2
            y = self._rounded(h, a2) @ plain2[e].t()
            return y if b2 is None else y + b2[e].float()

        self.result = weighted(x.float(), ids, weights, E * ep_rank, E, expert)
        require(0 <= ep_rank < ep_size, "rank of a larger group")
        out.copy_(self.result)

    def _rounded(self, x: Tensor, a: Tensor | None) -> Tensor:
        if self._flags["block fp8"]:
            return fp8.fake_quantize(x)
        return x if a is None else nvfp4.fake_quantize(x, 1.0 / a)

    def _weights(
        self, w13: Tensor, w2: Tensor, scales: list[Tensor], E: int, N: int, H: int, I: int
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Decoded [E, N, H] and [E, H, I], and what inputs of the GEMMs are quantised by."""
        if w13.dtype == torch.uint8:
            require(self._flags["w4"] and len(scales) == 2, "MXFP4 is asked for by a flag")
            first = mxfp4_weights("w13", w13, scales[0], E, N, H)
            return first, mxfp4_weights("w2", w2, scales[1], E, H, I), None, None
        if w13.dtype == torch.bfloat16:
            tensor("w13", w13, torch.bfloat16, E, N, H)
            tensor("w2", w2, torch.bfloat16, E, H, I)
            require(not scales, "bf16 weights have no scales")
            return w13.float(), w2.float(), None, None
        if w13.dtype == torch.float8_e4m3fn:
            require(self._flags["block fp8"], "FP8 blocks are asked for by a flag")
            tensor("w13", w13, torch.float8_e4m3fn, E, N, H)
            tensor("w2", w2, torch.float8_e4m3fn, E, H, I)
            blocks = [tensor("scales", s, torch.float32, E, *(-(-n // 128) for n in shape))
                      for s, shape in zip(scales, ((N, H), (H, I)), strict=True)]  # fmt: skip
            first, second = (
                w.float()
                * s.repeat_interleave(128, 1).repeat_interleave(128, 2)[:, : w.shape[1], : w.shape[2]]
                for w, s in zip((w13, w2), blocks, strict=True)
            )
            return first, second, None, None
        a1, b1, alpha1, a2, b2, alpha2 = scales
        tensor("w13", w13, torch.int64, E, N, H // 16)
        tensor("w2", w2, torch.int64, E, H, I // 16)
        for name, a in (("a1", a1), ("a2", a2)):
            require(a.ndim == 0 and a.dtype == torch.float32, f"{name} is a scalar")
        tensor("alpha1", alpha1, torch.float32, E, align=4)
        tensor("alpha2", alpha2, torch.float32, E, align=4)
        plain = []
        for w, s, alpha, a, rows, columns in ((w13, b1, alpha1, a1, N, H), (w2, b2, alpha2, a2, H, I)):
            tensor("block scales", s, torch.int32, E, -(-rows // 128) * 128, -(-columns // 64))
            tiles = tiled_scales(s.view(torch.uint8), E, rows, columns).view(torch.float8_e4m3fn).float()
            values = e2m1.decode(e2m1.unpack(w.view(torch.uint8)))
            plain.append(values * tiles.repeat_interleave(16, dim=-1) * (alpha * a)[:, None, None])
        return plain[0], plain[1], a1, a2


@contextmanager
def library(capability: tuple[int, int] = HOPPER) -> Iterator[Launches]:
    """FlashInfer as on a GPU of `capability`, with `cutlass_fused_moe` computed here."""
    import flashinfer.fused_moe as public
    from flashinfer.fused_moe import core
    from flashinfer.utils import device_support_pdl, get_compute_capability

    launches = Launches()
    compiled = SimpleNamespace(build_and_load=lambda: launches)

    def workspace_size(*args: Any, device: Any, **options: Any) -> int:
        inspect.signature(original).bind(*args, device=device, **options)
        return WORKSPACE

    original = public.cutlass_fused_moe_workspace_size
    replaced: list[tuple[Any, str, Any]] = [
        (core, f"gen_cutlass_fused_moe_sm{arch}_module", lambda fast: compiled) for arch in (90, 100)
    ]
    replaced.append((public, "cutlass_fused_moe_workspace_size", workspace_size))
    replaced.append((torch.cuda, "device", lambda device: ExitStack()))
    for name, module in list(sys.modules.items()):
        if name.startswith("flashinfer"):
            for n, old, new in (
                ("get_compute_capability", get_compute_capability, lambda device: capability),
                ("device_support_pdl", device_support_pdl, lambda device: True),
            ):
                if vars(module).get(n) is old:
                    replaced.append((module, n, new))
    with ExitStack() as undo:
        for place, attribute, replacement in replaced:
            undo.enter_context(patch.object(place, attribute, replacement))
        core.get_cutlass_fused_moe_module.cache_clear()
        undo.callback(core.get_cutlass_fused_moe_module.cache_clear)
        yield launches
