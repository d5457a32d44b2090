"""Runner "hopper": the fused layer on Hopper, its kernels written in Gluon and Triton.

Two to four launches, none of which waits for the host: sort the pairs by expert (left out when there are so
few that sorting costs more than it saves), GEMM1 with the activation, GEMM2 with the routing weights, and the
sum over a token's pairs (where none is sorted and weights are of 4 bits or bf16, GEMM2 adds them up; of few
tokens the norm that comes next may do it). FP8's tokens are quantised next to the sort, or in the GEMM that
takes them; with 16 tokens a tile or more, GEMM2's by a launch of their own. Each is launched before its
predecessor has ended (programmatic dependent launch), so that their beginnings overlap.

The same batch gives the same bits, and a token's do not depend on the tokens it shares the batch with as long
as the batch stays within one entry of the table of tiles. Under a deterministic plan they never do: no kernel
splits the inner dimension, and all add a row's products in the order of columns, as many at a time, into one
sum, whatever the tile. The tensor cores keep to that: every tile of every format gave the same bits
(tests/moe/test_deterministic.py, on an H200). In which order atomics place an expert's rows changes none.

Legend: T tokens, k top-k, P = T k pairs, H hidden, I intermediate, N outputs of GEMM1, E local experts,
C rows per expert.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from turnout.formats.experts import ExpertWeights
from turnout.kernels.common.sizes import power_of_two
from turnout.moe.arena import Arena, shared
from turnout.moe.backends.hopper.declaration import RUNNER
from turnout.moe.backends.hopper.kernels import batched_experts_rule, choose
from turnout.moe.backends.hopper.launch import Batch, Gemm, Workspace
from turnout.moe.backends.hopper.layer_shape import W4A8, LayerShape
from turnout.moe.backends.hopper.tile_config import LayerTiles, TileTable
from turnout.moe.backends.hopper.weights import Matrix
from turnout.moe.backends.hopper.workspace import regions
from turnout.moe.batch import ExpertsBatch, LateChoice, TokensBatch
from turnout.moe.plan import MoEPlan
from turnout.moe.spec import MoESpec
from turnout.parallel.hardware import multiprocessors
from turnout.vocabulary import Format, Layout


def workspaces(
    shape: LayerShape, plan: MoEPlan, device: torch.device
) -> tuple[Arena, dict[Layout, Workspace]]:
    """The arena of a plan's layers, and what each of its layouts uses of it."""
    rows: dict[Layout, int] = {}
    for phase in (plan.prefill, plan.decode):
        rows[phase.layout] = max(phase.max_tokens, rows.get(phase.layout, 0))
    sets = {layout: regions(shape, layout, most) for layout, most in rows.items()}
    arena = shared(device, sets)

    def all_of(layout: Layout, name: str, dtype: torch.dtype) -> Tensor:
        return arena.take(layout, name, sets[layout].get(name, 0) // dtype.itemsize, dtype=dtype)

    def codes(layout: Layout, name: str) -> tuple[Tensor, Tensor]:
        return all_of(layout, name, torch.float8_e4m3fn), all_of(layout, f"{name}_scales", torch.float32)

    return arena, {
        layout: Workspace(
            rows=most,
            counts=all_of(layout, "counts", torch.int32),
            tiles=all_of(layout, "tiles", torch.int32),
            order=all_of(layout, "order", torch.int32),
            place=all_of(layout, "place", torch.int32),
            h=all_of(layout, "h", torch.bfloat16),
            y=all_of(layout, "y", torch.bfloat16),
            quantized=codes(layout, "quantized"),
        )
        for layout, most in rows.items()
    }


class HopperRunner:
    """An `Experts` (moe/interface.py) of one layer on Hopper: two to four kernel launches a batch, in
    either layout."""

    capability = RUNNER

    def __init__(self, spec: MoESpec, plan: MoEPlan, device: torch.device) -> None:
        self._spec = spec
        self._held = plan.first_expert, plan.num_local_experts
        self._dtype: torch.dtype = getattr(torch, plan.compute_dtype)
        self._device = device
        self._deterministic = plan.deterministic
        self._w4a8 = (spec.format, plan.activation_format) == (Format.MXFP4, Format.FP8)
        self._plan, self._table = plan, plan.tiles
        self._max_tokens = max(plan.prefill.max_tokens, plan.decode.max_tokens)
        self._processors = multiprocessors(device)

    def prepare(self, experts: ExpertWeights) -> None:
        gated = self._spec.activation.gated
        self._w13 = Matrix(experts.w13, experts.b13, gated, self._device, w4a8=self._w4a8)
        self._w2 = Matrix(experts.w2, experts.b2, False, self._device, w4a8=self._w4a8)
        self.shape = LayerShape(
            format=W4A8 if self._w4a8 else self._w13.format,
            hidden=self._w2.rows, inner=self._w2.inner, w13_rows=self._w13.rows,
            num_experts=self._spec.num_experts, local_experts=self._plan.num_local_experts,
            top_k=self._spec.top_k,
        )  # fmt: skip
        self._arena, self._spaces = workspaces(self.shape, self._plan, self._device)

    def update(self, experts: ExpertWeights) -> None:
        self._w13.load(experts.w13, experts.b13)
        self._w2.load(experts.w2, experts.b2)

    def use_tiles(self, table: TileTable) -> None:
        """Cut GEMMs by `table` from now on; empty: by rule."""
        self._table = table
        for space in self._spaces.values():
            space.counts.zero_()  # a call that failed midway leaves some

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
        return self._tokens(batch) if isinstance(batch, TokensBatch) else self._batched_experts(batch)

    def _tokens(self, batch: TokensBatch) -> Tensor:
        x_TH = batch.hidden.data.to(torch.bfloat16).contiguous()
        ids_TK, weights_TK = batch.topk_ids.contiguous(), batch.topk_weights.contiguous()
        (T, H), k = x_TH.shape, ids_TK.shape[1]
        out_TH = torch.empty(T, H, dtype=self._dtype, device=self._device)
        P = T * k
        if P == 0:
            return out_TH
        space, tiles = self._space(Layout.TOKENS, T), self._tiles(T)
        pairs = Batch(
            shape=self.shape, space=space, x_TH=x_TH, ids_TK=ids_TK, weights_TK=weights_TK, out_TH=out_TH,
            held=self._held,
        )  # fmt: skip
        unsorted = tiles.unsorted(self.shape, T)
        if not unsorted:
            tiles.first.sort(pairs, widest_first=tiles.widest_first(self.shape))
        self._gemms(
            tiles, space, x_TH, out_TH if tiles.second.adds_pairs else space.y[: P * H].view(P, H), pairs=P,
            table=ids_TK if unsorted else space.tiles, weights=weights_TK, top_k=k, unsorted=unsorted,
            most_tiles=self.shape.most_tiles(T, tiles.block_m), choice=batch.choice,
        )  # fmt: skip
        if batch.adds_parts and tiles.second.leaves_pairs:
            return space.y[: P * H].view(T, k, H).transpose(0, 1)
        tiles.second.sum(pairs)
        return out_TH

    def chooses(self) -> bool:
        """Whether kernels choose the experts of one token (`moe.interface.ChoosingExperts`)."""
        tiles = self._tiles(1)
        return tiles.first.chooses(self.shape) and tiles.second.chooses(self.shape)

    def _tiles(self, tokens: int) -> LayerTiles:
        return choose(self.shape, self._table, tokens, batch_invariant=self._deterministic)

    def _batched_experts(self, batch: ExpertsBatch) -> Tensor:
        from turnout.kernels.hopper.sort import tile_batched_experts

        E, C, H = batch.hidden.data.shape
        out_ECH = torch.zeros(E, C, H, dtype=torch.bfloat16, device=self._device)
        if C == 0:
            return out_ECH.to(self._dtype)
        space = self._space(Layout.BATCHED_EXPERTS, C)
        x_RH = batch.hidden.data.to(torch.bfloat16).reshape(E * C, H)
        tiles = batched_experts_rule(self.shape, C)
        tile_batched_experts[(1,)](batch.counts, space.tiles, C, E, tiles.block_m, power_of_two(E + 1))
        self._gemms(
            tiles, space, x_RH, out_ECH.view(E * C, H), pairs=E * C, table=space.tiles, weights=None, top_k=1,
            unsorted=False, most_tiles=E * -(-C // tiles.block_m),
        )  # fmt: skip
        return out_ECH.to(self._dtype)

    def _space(self, layout: Layout, rows: int) -> Workspace:
        space = self._spaces.get(layout)
        if space is None:
            raise ValueError(f"a batch of layout {layout!r}, which the plan does not have")
        if space.rows < rows:
            raise ValueError(f"{rows} {layout}, but the plan bounds them by {space.rows}")
        return space

    def _gemms(
        self, tiles: LayerTiles, space: Workspace, x: Tensor, out: Tensor, *, pairs: int, table: Tensor,
        weights: Tensor | None, top_k: int, unsorted: bool, most_tiles: int, choice: LateChoice | None = None,
    ) -> None:  # fmt: skip
        """`out` from `x` by way of h, which has a row for each of `pairs`, or of [E, C] rows."""
        h = space.h[: pairs * self._w2.inner].view(pairs, -1)
        first = Gemm(
            first=True, w=self._w13, x=x, out=h, columns=self._w2.inner, table=table, weights=weights,
            top_k=top_k, most_tiles=most_tiles, unsorted=unsorted, space=space, held=self._held,
            activation=self._spec.activation, processors=self._processors, choice=choice,
        )  # fmt: skip
        tiles.first.launch(first)
        tiles.second.launch(replace(first, first=False, w=self._w2, x=h, out=out, columns=self._w2.rows))
