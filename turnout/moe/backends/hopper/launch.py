"""One GEMM of the Hopper runner's layer, launched on the kernel that its format and tiling take.

Legend: R rows of x or out (tokens, pairs or rows of slabs), K inner size, N outputs, E local experts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from turnout.moe.backends.hopper.tile_config import Tiling
from turnout.moe.backends.hopper.tile_few import chunks
from turnout.moe.backends.hopper.tile_pairs import LATE, whole_chunks
from turnout.moe.backends.hopper.weights import FP8_GROUP, Matrix
from turnout.moe.spec import Activation


@dataclass(frozen=True, kw_only=True)
class Gemm:
    """GEMM1 (`first`: with the activation, of tokens' rows) or GEMM2 (times the routing weights) of a batch.

    weights None: of slabs, whose rows are neither gathered nor scattered. direct: the table holds expert ids
    of pairs that are not sorted; else tiles, at most `bound`, of rows in the order `order`
    (kernels/hopper/sort.py).
    """

    first: bool
    w: Matrix
    x: Tensor  # bf16 [R, K]
    out: Tensor  # bf16 [R, N]
    columns: int  # N
    order: Tensor
    table: Tensor
    weights: Tensor | None
    top_k: int
    cut: Tiling
    bound: int
    direct: bool
    held: tuple[int, int]  # the first local expert, and how many
    activation: Activation
    processors: int

    @property
    def pairs(self) -> bool:
        return self.weights is not None

    @property
    def any_weights(self) -> Tensor:
        """The routing weights, or something in their place for a kernel that is told to leave them."""
        return self.w.alpha if self.weights is None else self.weights

    @property
    def numbers(self) -> tuple[float, float, float]:
        """alpha, beta and limit of the activation."""
        limit = self.activation.limit
        return self.activation.alpha, self.activation.beta, math.inf if limit is None else limit

    @property
    def kind(self) -> str:
        return self.activation.kind if self.first else "none"


def plain(g: Gemm) -> None:
    """Weights in bf16, any number of tokens."""
    from turnout.kernels.hopper.gemm import expert_gemm

    w, cut = g.w, g.cut
    n_blocks, k_blocks = w.blocks
    expert_gemm[(g.bound * -(-n_blocks // (cut.rows // 64)),)](
        g.x, w.codes, w.any_bias, g.out, g.order, g.table, g.any_weights,
        w.inner, w.padded_rows, g.columns, k_blocks, n_blocks, g.x.stride(0), g.out.stride(0), g.top_k,
        *g.held, *g.numbers,
        g.kind, g.pairs and g.first, g.pairs and not g.first, g.direct, w.bias is not None,
        cut.rows, cut.tokens, cut.k_blocks, cut.stages, cut.group, g.pairs,
        num_warps=cut.warps, launch_pdl=g.pairs,
    )  # fmt: skip


def pairs(g: Gemm) -> None:
    """So few pairs that none is sorted. GEMM2 gives the sums of tokens, in the dtype of `out`."""
    from turnout.kernels.hopper.gemm_pairs import gemm_of_pairs, gemm_of_tokens

    w, cut, ids = g.w, g.cut, g.table
    (T, k), (n_blocks, k_blocks) = ids.shape, w.blocks
    n_tiles = -(-w.padded_rows // cut.rows)
    whole = whole_chunks(w.inner, cut.slices, cut.k_blocks) if w.format == "bf16" else 0
    found = 32 if (T * k if g.first else k) <= 32 else 64
    sizes = w.padded_rows, g.columns, k_blocks, n_blocks, g.x.stride(0), g.out.stride(0), k, *g.held
    count = chunks(w.inner, cut.slices, cut.k_blocks)
    if g.first:
        gemm_of_pairs[(T * k * n_tiles,)](
            g.x, w.codes, w.scales, w.alpha, w.any_bias, g.out, ids, w.inner, T * k, *sizes, *g.numbers,
            w.format, g.kind, w.bias is not None, found, cut.rows, cut.k_blocks, count, whole, cut.slices,
            cut.stages, cut.group == LATE, True, num_warps=cut.warps, launch_pdl=True,
        )  # fmt: skip
    else:
        gemm_of_tokens[(T * n_tiles,)](
            g.x, w.codes, w.scales, w.alpha, w.any_bias, g.out, ids, g.any_weights, w.inner, *sizes,
            w.format, w.bias is not None, found, cut.rows, cut.k_blocks, count, whole, cut.group, cut.slices,
            cut.stages, cut.group >= k, True, num_warps=cut.warps, launch_pdl=True,
        )  # fmt: skip


def packed(g: Gemm) -> None:
    """Weights of 4 bits, any number of tokens."""
    from turnout.kernels.hopper.gemm_packed import expert_gemm_packed, most_registers, rest_of

    w, cut = g.w, g.cut
    n_blocks, k_blocks = w.blocks
    expert_gemm_packed[(g.bound * -(-n_blocks // (cut.rows // 64)),)](
        g.x, w.codes, w.scales, w.alpha, w.any_bias, g.out, g.order, g.table, g.any_weights,
        w.inner, w.padded_rows, g.columns, k_blocks, n_blocks, g.x.stride(0), g.out.stride(0), g.top_k,
        *g.held, *g.numbers,
        w.format, g.kind, g.pairs and g.first, g.pairs and not g.first, g.direct, w.bias is not None,
        cut.rows, cut.tokens, cut.stages, rest_of(k_blocks, cut.stages), w.inner % 64 == 0, cut.group,
        g.pairs,
        num_warps=4, maxnreg=most_registers(cut.rows, cut.tokens), launch_pdl=g.pairs,
    )  # fmt: skip


def few(g: Gemm) -> None:
    """The same for few tokens per expert."""
    from turnout.kernels.hopper.gemm_few import expert_gemm_few

    assert g.pairs, "slabs are cut by slab_rule"
    w, cut = g.w, g.cut
    n_blocks, k_blocks = w.blocks
    expert_gemm_few[(g.bound * -(-n_blocks * 64 // cut.rows),)](
        g.x, w.codes, w.scales, w.alpha, w.any_bias, g.out, g.order, g.table, g.any_weights,
        w.inner, w.padded_rows, g.columns, k_blocks, n_blocks, g.x.stride(0), g.out.stride(0), g.top_k,
        *g.held, *g.numbers,
        w.format, g.kind, g.first, not g.first, w.bias is not None,
        cut.rows, cut.tokens, cut.k_blocks, cut.stages, cut.group, cut.slices,
        chunks(w.inner, cut.slices, cut.k_blocks) <= cut.stages, True,
        num_warps=cut.warps, launch_pdl=True,
    )  # fmt: skip


def specialised(g: Gemm) -> None:
    """Weights of 4 bits or bf16, many tokens per expert."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from turnout.kernels.hopper.gemm_specialised import expert_gemm_specialised

    w, cut = g.w, g.cut
    gather, codes = g.pairs and g.first, w.codes
    n_blocks, k_blocks = w.blocks
    tile = NVMMASharedLayout(128, 16, 2)
    if w.format == "bf16":
        codes = TensorDescriptor.from_tensor(codes.view(-1, w.inner), [cut.rows, 64], tile)
    tokens = 1 << cut.tokens.bit_length() - 1
    extra = cut.tokens - tokens
    # Narrow tiles of bf16 wait for their weights, however few their products.
    widths = 4 if w.format == "bf16" else min(8, tokens // 16)

    def rows(count: int) -> Tensor | TensorDescriptor:
        return g.x if gather or not count else TensorDescriptor.from_tensor(g.x, [count, 64], tile)

    expert_gemm_specialised[(g.processors,)](
        rows(tokens), rows(extra), codes, w.scales, w.alpha, w.any_bias, g.out, g.order, g.table,
        g.any_weights,
        w.inner, w.padded_rows, g.columns, k_blocks, n_blocks, g.x.stride(0), g.out.stride(0), g.top_k,
        *g.numbers,
        w.format, g.kind, gather, g.pairs and not g.first, w.bias is not None,
        cut.rows, tokens, extra, widths, cut.k_blocks, cut.stages, cut.group, k_blocks % cut.k_blocks > 0,
        g.pairs,
        num_warps=4, launch_pdl=g.pairs,
    )  # fmt: skip


def fp8(g: Gemm, quantized: tuple[Tensor, Tensor] | None) -> None:
    """W8A8. quantized: x as `quantize_rows` leaves it; without, programs quantise their own rows of it."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from turnout.kernels.hopper.gemm_fp8 import expert_gemm_fp8

    w, cut = g.w, g.cut
    rows, scales = (g.x, w.scales) if quantized is None else quantized
    box, tile = [cut.rows, FP8_GROUP], NVMMASharedLayout(128, 8, 2)
    expert_gemm_fp8[(g.bound * -(-w.rows // cut.rows),)](
        rows, scales, TensorDescriptor.from_tensor(w.codes.view(-1, w.inner), box, tile), w.scales,
        w.any_bias, g.out, g.order, g.table, g.any_weights,
        w.rows, g.columns, g.x.stride(0), g.out.stride(0), g.top_k, *g.held, *g.numbers,
        w.inner // FP8_GROUP, quantized is None, g.kind, g.pairs and g.first, g.pairs and not g.first,
        g.direct, w.paired, w.bias is not None,
        cut.rows, cut.tokens, cut.k_blocks, cut.stages, cut.group, g.pairs,
        num_warps=cut.warps, launch_pdl=g.pairs,
    )  # fmt: skip


def w4a8(g: Gemm, codes: Tensor, scales: Tensor) -> None:
    """codes e4m3 [R, K'] in the order of experts or slabs; scales float32 [R]."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from turnout.kernels.hopper.gemm_w4a8 import expert_gemm_w4a8

    w, cut = g.w, g.cut
    n_blocks, groups = w.blocks
    tile, weight_tile = NVMMASharedLayout(128, 8, 2), NVMMASharedLayout(128, 32, 2)
    expert_gemm_w4a8[(g.processors,)](
        TensorDescriptor.from_tensor(codes, [cut.tokens, FP8_GROUP], tile), scales,
        TensorDescriptor.from_tensor(w.codes.view(-1, 32), [cut.rows // 2, 32], weight_tile),
        w.scales, w.alpha, w.any_bias, g.out, g.order, g.table, g.any_weights,
        n_blocks, g.columns, groups, g.out.stride(0), *g.numbers,
        g.kind, not g.first, g.pairs and not g.first, w.bias is not None, cut.rows // 64, cut.tokens,
        4 if cut.tokens > 32 else 1, cut.stages, cut.group, g.pairs,
        num_warps=cut.warps, launch_pdl=g.pairs,
    )  # fmt: skip
