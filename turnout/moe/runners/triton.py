"""Runner "triton": the fused layer on Hopper, its kernels written in Gluon and Triton.

Three or four launches, none of which waits for the host: sort the pairs by expert (left out when there are
so few that sorting costs more than it saves), GEMM1 with the activation, GEMM2 with the routing weights,
and the sum over a token's pairs. Each is launched before its predecessor has ended (programmatic dependent
launch), so that their beginnings overlap.

A token's result does not depend, in any bit, on the tokens it shares the batch with as long as the batch
stays within one entry of the table of tiles; between entries nothing is promised. The same batch gives
the same bits.

Legend: T tokens, k top-k, P = T k pairs, H hidden, I intermediate, N outputs of GEMM1, E local experts,
C slab capacity.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from turnout.formats.experts import ExpertWeights
from turnout.formats.hopper import FP8_GROUP, Matrix
from turnout.moe.backends import RUNNER_CAPABILITIES
from turnout.moe.batch import ExpertsBatch, TokensBatch
from turnout.moe.plan import MoEPlan
from turnout.moe.spec import MoESpec
from turnout.moe.tiles import MIN_TOKENS, SORT_PAIRS, ExpertShape, Tiles, Tiling, choose, slab_rule

COUNT_PAIRS = 4096  # up to so many pairs, one program sorts them


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """Buffers for P pairs. Layers run one after another, so those of equal sizes share one.

    For FP8 only, else empty; e4m3 and float32 scales, flat. quantized: of the widest input of a GEMM of up to
    UNSORTED_TOKENS tokens per expert, or of the layer's. sorted: of either GEMM, rows sorted by expert.
    """

    quantized: tuple[Tensor, Tensor]
    sorted: tuple[Tensor, Tensor]
    h_PI: Tensor
    y_PH: Tensor
    order_P: Tensor
    counts: Tensor  # int32 [2, power of two above E]: zero between calls
    tiles: Tensor


# Kept as long as a layer holds it.
_WORKSPACES: WeakValueDictionary[tuple[object, ...], Workspace] = WeakValueDictionary()


def workspace(
    device: torch.device, pairs: int, hidden: int, inner: int, experts: int, quantized: int, sorted: int
) -> Workspace:
    key = (device, pairs, hidden, inner, experts, quantized, sorted)
    found = _WORKSPACES.get(key)
    if found is None:
        found = _WORKSPACES[key] = _allocate(*key)
    return found


def _allocate(
    device: torch.device, pairs: int, hidden: int, inner: int, experts: int, quantized: int, sorted: int
) -> Workspace:
    def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(*shape, dtype=dtype, device=device)

    def codes(size: int) -> tuple[Tensor, Tensor]:
        return zeros(size, dtype=torch.float8_e4m3fn), zeros(size // FP8_GROUP, dtype=torch.float32)

    return Workspace(
        quantized=codes(quantized),
        sorted=codes(sorted),
        h_PI=zeros(pairs, inner, dtype=torch.bfloat16),
        y_PH=zeros(pairs, hidden, dtype=torch.bfloat16),
        order_P=zeros(pairs, dtype=torch.int32),
        counts=zeros(2 * _power_of_two(experts + 1), dtype=torch.int32),
        tiles=zeros(4 + 4 * (experts + pairs // MIN_TOKENS + 1), dtype=torch.int32),
    )


class TritonRunner:
    capability = RUNNER_CAPABILITIES["triton"]

    def __init__(self, spec: MoESpec, plan: MoEPlan, device: torch.device) -> None:
        self._spec = spec
        self._first, self._count = plan.first_expert, plan.num_local_experts
        self._dtype: torch.dtype = getattr(torch, plan.compute_dtype)
        self._device = device
        self._deterministic = plan.deterministic
        self._max_tokens = max(plan.prefill.max_tokens, plan.decode.max_tokens)
        self._table = plan.tiles
        self._padded_count = _power_of_two(self._count + 1)
        self._processors = torch.cuda.get_device_properties(device).multi_processor_count

    def prepare(self, experts: ExpertWeights) -> None:
        self._w13, self._w2 = self._matrices(experts)
        pairs, H, I = self._max_tokens * self._spec.top_k, self._spec.hidden_size, self._w2.inner
        fp8 = self._w13.format == "fp8"
        self._shape = ExpertShape(
            format=self._w13.format, hidden=H, inner=I, w13_rows=self._w13.rows,
            num_experts=self._spec.num_experts, local_experts=self._count, top_k=self._spec.top_k,
        )  # fmt: skip
        quantized, by_expert = (max(self._max_tokens * H, pairs * I), pairs * max(H, I)) if fp8 else (0, 0)
        self._space = workspace(self._device, pairs, H, I, self._count, quantized, by_expert)

    def update(self, experts: ExpertWeights) -> None:
        for mine, new in zip((self._w13, self._w2), self._matrices(experts), strict=True):
            mine.load(new)

    def _matrices(self, experts: ExpertWeights) -> tuple[Matrix, Matrix]:
        gated = self._spec.activation.gated
        return (
            Matrix(experts.w13, experts.b13, gated, self._device),
            Matrix(experts.w2, experts.b2, False, self._device),
        )

    def same_bits(self, tokens: int) -> range:
        if self._deterministic:
            return range(self._max_tokens + 1)
        tiles, first, end = self._tiles(tokens), tokens, tokens + 1
        while first > 0 and self._tiles(first - 1) == tiles:
            first -= 1
        while end <= self._max_tokens and self._tiles(end) == tiles:
            end += 1
        return range(first, end)

    def __call__(self, batch: TokensBatch | ExpertsBatch) -> Tensor:
        return self._tokens(batch) if isinstance(batch, TokensBatch) else self._slabs(batch)

    def _tokens(self, batch: TokensBatch) -> Tensor:
        x_TH = batch.hidden.data.to(torch.bfloat16).contiguous()
        ids_TK, weights_TK = batch.topk_ids.contiguous(), batch.topk_weights.contiguous()
        (T, H), k = x_TH.shape, ids_TK.shape[1]
        out_TH = torch.empty(T, H, dtype=self._dtype, device=self._device)
        P = T * k
        if P == 0:
            return out_TH
        if self._max_tokens < T:
            raise ValueError(f"{T} tokens, but the plan bounds them by {self._max_tokens}")
        sort, tiles = P > SORT_PAIRS, self._tiles(T)
        if sort:
            self._sort(ids_TK, P, tiles.tokens)
        bound = self._shape.most_tiles(T, tiles.tokens)
        table = self._space.tiles if sort else ids_TK
        h_PI, y_PH = self._space.h_PI[:P], self._space.y_PH[:P]
        self._gemm(self._w13, x_TH, h_PI, table, weights_TK, bound, k, tiles, first=True, direct=not sort)
        self._gemm(self._w2, h_PI, y_PH, table, weights_TK, bound, k, tiles, first=False, direct=not sort)
        self._sum(ids_TK, out_TH, k, clear=P > COUNT_PAIRS)
        return out_TH

    def _tiles(self, tokens: int) -> Tiles:
        return choose(self._shape, self._table, tokens)

    def _slabs(self, batch: ExpertsBatch) -> Tensor:
        from turnout.kernels.sort import tile_slabs

        E, C, H = batch.hidden.data.shape
        out_ECH = torch.zeros(E, C, H, dtype=torch.bfloat16, device=self._device)
        if C == 0:
            return out_ECH.to(self._dtype)
        x_RH = batch.hidden.data.to(torch.bfloat16).reshape(E * C, H)
        tiles = slab_rule(self._shape, C)
        bound = E * -(-C // tiles.tokens)
        table = torch.empty(4 + 4 * bound, dtype=torch.int32, device=self._device)
        tile_slabs[(1,)](batch.counts, table, C, E, tiles.tokens, self._padded_count)
        h_RI = torch.empty(E * C, self._w2.inner, dtype=torch.bfloat16, device=self._device)
        out_RH = out_ECH.view(E * C, H)
        self._gemm(self._w13, x_RH, h_RI, table, None, bound, 1, tiles, first=True, direct=False)
        self._gemm(self._w2, h_RI, out_RH, table, None, bound, 1, tiles, first=False, direct=False)
        return out_ECH.to(self._dtype)

    def _sort(self, ids_TK: Tensor, P: int, width: int) -> None:
        from turnout.kernels.sort import count_pairs, place_pairs

        space, alone = self._space, P <= COUNT_PAIRS
        block = max(16, _power_of_two(P)) if alone else 1024
        programs = -(-P // block)
        if not alone:
            count_pairs[(programs,)](
                ids_TK, space.counts, P, self._first, self._count, block, True, num_warps=8, launch_pdl=True
            )
        warps = 4 if block <= 256 else 8 if block <= 1024 else 16
        place_pairs[(programs,)](
            ids_TK, space.counts, space.order_P, space.tiles, P, self._first, self._count, width, programs,
            block, self._padded_count, alone, True, num_warps=warps, launch_pdl=True,
        )  # fmt: skip

    def _gemm(
        self, w: Matrix, x: Tensor, out: Tensor, table: Tensor, weights: Tensor | None, bound: int, k: int,
        tiles: Tiles, *, first: bool, direct: bool,
    ) -> None:  # fmt: skip
        """weights None: slabs, whose rows are neither gathered nor scattered."""
        cut = tiles.first if first else tiles.second
        if tiles.sorted:
            assert weights is not None, "slabs are cut by slab_rule"
            self._gemm_fp8_sorted(w, x, out, table, weights, k, cut, first=first)
            return
        if w.format == "fp8":
            self._gemm_fp8(w, x, out, table, weights, bound, k, cut, first=first, direct=direct)
            return
        from turnout.kernels.expert_gemm import expert_gemm

        activation = self._spec.activation
        pairs = weights is not None
        n_blocks, k_blocks = w.blocks
        grid = bound * -(-n_blocks // (cut.rows // 64))
        expert_gemm[(grid,)](
            x, w.codes, w.scales, w.alpha, w.any_bias, out, self._space.order_P,
            table,
            weights if weights is not None else w.alpha,
            w.inner, w.padded_rows, self._w2.inner if first else w.rows, k_blocks, n_blocks, x.stride(0),
            out.stride(0), k, self._first, self._count,
            activation.alpha, activation.beta, math.inf if activation.limit is None else activation.limit,
            w.format, activation.kind if first else "none", pairs and first, pairs and not first, direct,
            w.bias is not None, cut.rows, cut.tokens, cut.k_blocks, cut.stages,
            cut.group, pairs, num_warps=cut.warps, launch_pdl=pairs,
        )  # fmt: skip

    def _gemm_fp8(
        self, w: Matrix, x: Tensor, out: Tensor, table: Tensor, weights: Tensor | None, bound: int, k: int,
        cut: Tiling, *, first: bool, direct: bool,
    ) -> None:  # fmt: skip
        from turnout.kernels.expert_gemm_fp8 import expert_gemm_fp8

        activation, pairs = self._spec.activation, weights is not None
        codes, scales = self._quantize(x, pairs)
        expert_gemm_fp8[(bound * -(-w.rows // cut.rows),)](
            codes, scales, w.codes, w.scales, w.any_bias, out, self._space.order_P,
            table,
            weights if weights is not None else w.alpha,
            w.inner, w.rows, self._w2.inner if first else w.rows, w.inner // FP8_GROUP, w.inner,
            out.stride(0), k, self._first, self._count,
            activation.alpha, activation.beta, math.inf if activation.limit is None else activation.limit,
            activation.kind if first else "none", pairs and first, pairs and not first, direct, w.paired,
            w.bias is not None, cut.rows, cut.tokens, cut.k_blocks, cut.stages, cut.group, pairs,
            num_warps=cut.warps, launch_pdl=pairs,
        )  # fmt: skip

    def _gemm_fp8_sorted(
        self, w: Matrix, x: Tensor, out: Tensor, table: Tensor, weights: Tensor, k: int, cut: Tiling, *,
        first: bool,
    ) -> None:  # fmt: skip
        """As `_gemm_fp8`, over quantised rows that lie sorted by expert."""
        from triton.experimental.gluon.language import NVMMASharedLayout
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        from turnout.kernels.expert_gemm_fp8_tma import expert_gemm_fp8_tma, gather_sorted, quantize_sorted

        activation, space, programs = self._spec.activation, self._space, 16 * self._processors
        P, K = len(out), w.inner
        groups = K // FP8_GROUP
        codes, scales = space.sorted[0][: P * K], space.sorted[1][: P * groups]
        if first:
            token_codes, token_scales = self._quantize(x, True)
            gather_sorted[(programs,)](
                token_codes.view(torch.int64), token_scales, space.order_P, table, codes.view(torch.int64),
                scales, P, k, K // 8, groups, _power_of_two(groups), 8, True, launch_pdl=True,
            )  # fmt: skip
        else:
            quantize_sorted[(programs,)](
                x, table, codes, scales, K, x.stride(0), P, groups, 32, True, launch_pdl=True
            )
        tile = NVMMASharedLayout(128, 8, 2)
        expert_gemm_fp8_tma[(self._processors,)](
            TensorDescriptor.from_tensor(codes.view(P, K), [cut.tokens, FP8_GROUP], tile), scales,
            TensorDescriptor.from_tensor(w.codes.view(-1, K), [cut.rows, FP8_GROUP], tile),
            w.scales, w.any_bias, out, space.order_P, table, weights,
            w.rows, self._w2.inner if first else w.rows, groups, P, out.stride(0), self._first, self._count,
            activation.alpha, activation.beta, math.inf if activation.limit is None else activation.limit,
            activation.kind if first else "none", not first, w.paired, w.bias is not None, cut.stages,
            cut.group, True, num_warps=cut.warps, launch_pdl=True,
        )  # fmt: skip

    def _quantize(self, x_RK: Tensor, dependent: bool) -> tuple[Tensor, Tensor]:
        """x as e4m3 [R, K] and float32 [R, K / 128], in the workspace where it is large enough."""
        from turnout.kernels.expert_gemm_fp8 import quantize_rows

        R, K = x_RK.shape
        groups = K // FP8_GROUP
        codes, scales = self._space.quantized
        if codes.numel() < R * K:  # slabs, whose number the plan does not bound
            codes = torch.empty(R * K, dtype=torch.float8_e4m3fn, device=self._device)
            scales = torch.empty(R * groups, dtype=torch.float32, device=self._device)
        block = 64 if R * groups > 1 << 16 else 16
        quantize_rows[(-(-R * groups // block),)](
            x_RK, codes, scales, R, K, x_RK.stride(0), groups, block, dependent, launch_pdl=dependent
        )
        return codes, scales

    def _sum(self, ids_TK: Tensor, out_TH: Tensor, k: int, *, clear: bool) -> None:
        from turnout.kernels.sort import sum_pairs

        (T, H), space = out_TH.shape, self._space
        block = 1024 if T > 64 else 256
        sum_pairs[(T, -(-H // block))](
            space.y_PH, ids_TK, out_TH, space.counts, H, H, self._first, self._count, k, block,
            self._padded_count, clear, True, num_warps=4 if block > 256 else 2, launch_pdl=True,
        )  # fmt: skip


def _power_of_two(n: int) -> int:
    """The smallest that is at least n."""
    return 1 << max(0, n - 1).bit_length()
