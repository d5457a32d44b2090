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
from typing import NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from turnout.formats.experts import ExpertWeights
from turnout.formats.fragments import pair_rows, to_fragments
from turnout.formats.packed import PackedTensor
from turnout.moe.backends import RUNNER_CAPABILITIES
from turnout.moe.batch import ExpertsBatch, TokensBatch
from turnout.moe.plan import MoEPlan
from turnout.moe.spec import MoESpec

MIN_TOKENS = 8  # the smallest tile
SORT_PAIRS = 16  # up to so many pairs, each is a tile of its own
COUNT_PAIRS = 4096  # up to so many pairs, one program sorts them


class Tiling(NamedTuple):
    """How a GEMM is cut (kernels/expert_gemm.py): weight rows, tokens, 64-wide steps, stages, warps."""

    rows: int
    tokens: int
    k_blocks: int
    stages: int
    warps: int
    group: int


# Tokens per expert up to which a tiling is used; measured on an H200 (docs/performance.md).
_TILINGS: dict[str, tuple[tuple[float, Tiling], ...]] = {
    "packed": (
        (5, Tiling(128, 8, 2, 5, 4, 1)),
        (12, Tiling(128, 16, 2, 4, 4, 1)),
        (24, Tiling(128, 32, 1, 5, 4, 1)),
        (72, Tiling(128, 64, 1, 5, 4, 1)),
        (math.inf, Tiling(128, 128, 1, 5, 4, 8)),
    ),
    "bf16": (
        (5, Tiling(64, 8, 2, 4, 4, 1)),
        (12, Tiling(64, 16, 2, 5, 4, 1)),
        (24, Tiling(128, 32, 1, 5, 4, 1)),
        (48, Tiling(128, 64, 1, 4, 4, 1)),
        (400, Tiling(256, 128, 1, 4, 8, 8)),
        (math.inf, Tiling(128, 256, 1, 4, 8, 8)),
    ),
}
# Fewer programs than this leave multiprocessors idle (an H200 has 132, each holds several): halve the rows.
_FEW_PROGRAMS = 300


def tiling(format: str, tokens_per_expert: float) -> Tiling:
    """The tiling for a weight format and the mean number of tokens of an expert."""
    table = _TILINGS["bf16" if format == "bf16" else "packed"]
    return next(t for bound, t in table if tokens_per_expert <= bound)


class Matrix:
    """One GEMM's weights [E, N, K] in the form its kernel takes, with the bias in the same row order."""

    def __init__(
        self, weights: PackedTensor, bias: Tensor | None, paired: bool, device: torch.device
    ) -> None:
        self.format, self.paired = weights.format, paired
        self.rows, self.inner = weights.shape[1:]
        self.codes: Tensor
        self.scales: Tensor
        self.alpha: Tensor
        if weights.format == "bf16":
            plain = weights.data.to(device, torch.bfloat16)
            self.codes = pair_rows(plain) if paired else plain.contiguous()
            self.scales = self.alpha = torch.zeros(1, device=device)
            self.blocks = -(-self.rows // 64), -(-self.inner // 64)
            self.padded_rows = self.rows
        else:
            fragments = to_fragments(weights, paired=paired, device=device)
            self.codes, self.scales, self.alpha = fragments.codes, fragments.scales, fragments.alpha
            self.blocks = fragments.codes.shape[1], fragments.codes.shape[2]
            self.padded_rows = 64 * self.blocks[0]
        self.bias = None if bias is None else self._bias(bias.to(device, torch.float32))

    def load(self, other: Matrix) -> None:
        """Take over another's values in the same storage."""
        for mine, new in (
            (self.codes, other.codes),
            (self.scales, other.scales),
            (self.alpha, other.alpha),
            (self.bias, other.bias),
        ):
            if mine is not None and new is not None:
                mine.copy_(new)

    def _bias(self, bias_EN: Tensor) -> Tensor:
        E, N = bias_EN.shape
        out = bias_EN.new_zeros(E, self.padded_rows)
        if not self.paired:
            out[:, :N] = bias_EN
            return out
        half, padded = N // 2, self.padded_rows // 2
        out[:, :half], out[:, padded : padded + half] = bias_EN[:, :half], bias_EN[:, half:]
        return pair_rows(out.unsqueeze(-1)).squeeze(-1)


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """Buffers for P pairs. Layers run one after another, so those of equal sizes share one."""

    h_PI: Tensor
    y_PH: Tensor
    order_P: Tensor
    counts: Tensor  # int32 [2, power of two above E]: zero between calls
    tiles: Tensor


# Kept as long as a layer holds it.
_WORKSPACES: WeakValueDictionary[tuple[object, ...], Workspace] = WeakValueDictionary()


def workspace(device: torch.device, pairs: int, hidden: int, inner: int, experts: int) -> Workspace:
    key = (device, pairs, hidden, inner, experts)
    found = _WORKSPACES.get(key)
    if found is None:
        found = _WORKSPACES[key] = _allocate(*key)
    return found


def _allocate(device: torch.device, pairs: int, hidden: int, inner: int, experts: int) -> Workspace:
    def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(*shape, dtype=dtype, device=device)

    return Workspace(
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
        self._max_tokens = max(plan.prefill.max_tokens, plan.decode.max_tokens)
        self._padded_count = _power_of_two(self._count + 1)

    def prepare(self, experts: ExpertWeights) -> None:
        self._w13, self._w2 = self._matrices(experts)
        self._space = workspace(
            self._device,
            self._max_tokens * self._spec.top_k,
            self._spec.hidden_size,
            self._w2.inner,
            self._count,
        )

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
        same = [T for T in range(self._max_tokens + 1) if self._tiling(T) == self._tiling(tokens)]
        return range(same[0], same[-1] + 1)  # batches that grow go through the table once

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
        sort, tiles = P > SORT_PAIRS, self._tiling(T)
        if sort:
            self._sort(ids_TK, P, tiles.tokens)
        bound = min(self._count, P) + P // tiles.tokens if sort else P
        table = self._space.tiles if sort else ids_TK
        h_PI, y_PH = self._space.h_PI, self._space.y_PH
        self._gemm(self._w13, x_TH, h_PI, table, weights_TK, bound, k, tiles, first=True, direct=not sort)
        self._gemm(self._w2, h_PI, y_PH, table, weights_TK, bound, k, tiles, first=False, direct=not sort)
        self._sum(ids_TK, out_TH, k, clear=P > COUNT_PAIRS)
        return out_TH

    def _tiling(self, tokens: int) -> Tiling:
        pairs = tokens * self._spec.top_k
        return tiling(self._spec.format, pairs / self._spec.num_experts if pairs > SORT_PAIRS else 1)

    def _slabs(self, batch: ExpertsBatch) -> Tensor:
        from turnout.kernels.sort import tile_slabs

        E, C, H = batch.hidden.data.shape
        out_ECH = torch.zeros(E, C, H, dtype=torch.bfloat16, device=self._device)
        if C == 0:
            return out_ECH.to(self._dtype)
        x_RH = batch.hidden.data.to(torch.bfloat16).reshape(E * C, H)
        tiles = tiling(self._w13.format, C)
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
        tiles: Tiling, *, first: bool, direct: bool,
    ) -> None:  # fmt: skip
        """weights None: slabs, whose rows are neither gathered nor scattered."""
        from turnout.kernels.expert_gemm import expert_gemm

        activation = self._spec.activation
        pairs = weights is not None
        n_blocks, k_blocks = w.blocks
        if tiles.tokens == MIN_TOKENS and bound * n_blocks < 2 * _FEW_PROGRAMS:
            tiles = tiles._replace(rows=64)
        grid = bound * -(-n_blocks // (tiles.rows // 64))
        expert_gemm[(grid,)](
            x, w.codes, w.scales, w.alpha, w.alpha if w.bias is None else w.bias, out, self._space.order_P,
            table,
            weights if weights is not None else w.alpha,
            w.inner, w.padded_rows, self._w2.inner if first else w.rows, k_blocks, n_blocks, x.stride(0),
            out.stride(0), k, self._first, self._count,
            activation.alpha, activation.beta, math.inf if activation.limit is None else activation.limit,
            w.format, activation.kind if first else "none", pairs and first, pairs and not first, direct,
            w.bias is not None, tiles.rows, tiles.tokens, tiles.k_blocks, tiles.stages,
            tiles.group, pairs, num_warps=tiles.warps, launch_pdl=pairs,
        )  # fmt: skip

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
