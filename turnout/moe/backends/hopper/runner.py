"""Runner "triton": the fused layer on Hopper, its kernels written in Gluon and Triton.

Two to four launches, none of which waits for the host: sort the pairs by expert (left out when there are so
few that sorting costs more than it saves), GEMM1 with the activation, GEMM2 with the routing weights, and the
sum over a token's pairs (where none is sorted and weights are of 4 bits or bf16, GEMM2 adds them up). FP8's
tokens are quantised beside the sort, or in the GEMM that takes them; with 16 tokens a tile or more, GEMM2's
by a launch of their own. Each is launched before its predecessor has ended (programmatic dependent launch),
so that their beginnings overlap.

The same batch gives the same bits, and a token's do not depend on the tokens it shares the batch with as long
as the batch stays within one entry of the table of tiles. Under a deterministic plan they never do: no kernel
splits the inner dimension, and all add a row's products in the order of columns, as many at a time, into one
sum, whatever the tile. The tensor cores keep to that: every tile of every format gave the same bits
(tests/moe/test_deterministic.py, on an H200). In which order atomics place an expert's rows changes none.

Legend: T tokens, k top-k, P = T k pairs, H hidden, I intermediate, N outputs of GEMM1, E local experts,
C slab capacity.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from turnout.formats.experts import ExpertWeights
from turnout.moe.arena import Arena, shared
from turnout.moe.backends.hopper import launch
from turnout.moe.backends.hopper.declaration import RUNNER
from turnout.moe.backends.hopper.launch import Gemm
from turnout.moe.backends.hopper.tile_config import (
    SPECIALISED,
    W4A8,
    LayerShape,
    Tiles,
    TileTable,
    choose,
    quantizes,
    slab_rule,
)
from turnout.moe.backends.hopper.weights import FP8_GROUP, Matrix
from turnout.moe.backends.hopper.workspace import regions
from turnout.moe.batch import ExpertsBatch, TokensBatch
from turnout.moe.plan import MoEPlan
from turnout.moe.spec import MoESpec

COUNT_PAIRS = 4096  # up to so many pairs, one program sorts them


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """An arena's regions (workspace.py) for batches of one layout, flat; empty where the layout has none.

    quantized: e4m3 and float32 scales.
    """

    rows: int  # the most tokens of a batch, or rows of a slab
    counts: Tensor
    tiles: Tensor
    order: Tensor
    place: Tensor
    h: Tensor
    y: Tensor
    quantized: tuple[Tensor, Tensor]


def workspaces(shape: LayerShape, plan: MoEPlan, device: torch.device) -> tuple[Arena, dict[str, Workspace]]:
    """The arena of a plan's layers, and what each of its layouts uses of it."""
    rows: dict[str, int] = {}
    for phase in (plan.prefill, plan.decode):
        rows[phase.layout] = max(phase.max_tokens, rows.get(phase.layout, 0))
    sets = {layout: regions(shape, layout, most) for layout, most in rows.items()}
    arena = shared(device, sets)

    def all_of(layout: str, name: str, dtype: torch.dtype) -> Tensor:
        return arena.take(layout, name, sets[layout].get(name, 0) // dtype.itemsize, dtype=dtype)

    def codes(layout: str, name: str) -> tuple[Tensor, Tensor]:
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


class TritonRunner:
    capability = RUNNER

    def __init__(self, spec: MoESpec, plan: MoEPlan, device: torch.device) -> None:
        self._spec = spec
        self._first, self._count = plan.first_expert, plan.num_local_experts
        self._dtype: torch.dtype = getattr(torch, plan.compute_dtype)
        self._device = device
        self._deterministic = plan.deterministic
        self._w4a8 = (spec.format, plan.activation_format) == ("mxfp4", "fp8")
        self._plan, self._table = plan, plan.tiles
        self._max_tokens = max(plan.prefill.max_tokens, plan.decode.max_tokens)
        self._padded_count = _power_of_two(self._count + 1)
        self._processors = torch.cuda.get_device_properties(device).multi_processor_count

    def prepare(self, experts: ExpertWeights) -> None:
        gated = self._spec.activation.gated
        self._w13 = Matrix(experts.w13, experts.b13, gated, self._device, w4a8=self._w4a8)
        self._w2 = Matrix(experts.w2, experts.b2, False, self._device, w4a8=self._w4a8)
        self.shape = LayerShape(
            format=W4A8 if self._w4a8 else self._w13.format,
            hidden=self._w2.rows, inner=self._w2.inner, w13_rows=self._w13.rows,
            num_experts=self._spec.num_experts, local_experts=self._count, top_k=self._spec.top_k,
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
        return self._tokens(batch) if isinstance(batch, TokensBatch) else self._slabs(batch)

    def _tokens(self, batch: TokensBatch) -> Tensor:
        x_TH = batch.hidden.data.to(torch.bfloat16).contiguous()
        ids_TK, weights_TK = batch.topk_ids.contiguous(), batch.topk_weights.contiguous()
        (T, H), k = x_TH.shape, ids_TK.shape[1]
        out_TH = torch.empty(T, H, dtype=self._dtype, device=self._device)
        P = T * k
        if P == 0:
            return out_TH
        space = self._space("tokens", T)
        tiles = self._tiles(T)
        if tiles.pairs:
            h_PI = space.h[: P * self._w2.inner].view(P, -1)
            for first, w, x, out in ((True, self._w13, x_TH, h_PI), (False, self._w2, h_PI, out_TH)):
                self._gemm(space, w, x, out, ids_TK, weights_TK, P, k, tiles, first=first, direct=True)
            return out_TH
        sort = not self.shape.direct(T) or self._w4a8 or tiles.specialised or tiles.first.slices > 0
        if sort:
            self._sort(space, ids_TK, x_TH, tiles)
        if tiles.sorted:
            self._fp8_by_expert(space, x_TH, ids_TK, weights_TK, out_TH, tiles)
            return out_TH
        bound = self.shape.most_tiles(T, tiles.tokens)
        table = space.tiles if sort else ids_TK
        h_PI, y_PH = space.h[: P * self._w2.inner].view(P, -1), space.y[: P * H].view(P, H)
        self._gemm(
            space, self._w13, x_TH, h_PI, table, weights_TK, bound, k, tiles, first=True, direct=not sort
        )
        self._gemm(
            space, self._w2, h_PI, y_PH, table, weights_TK, bound, k, tiles, first=False, direct=not sort
        )
        self._sum(space, ids_TK, out_TH, k, clear=P > COUNT_PAIRS)
        return out_TH

    def _tiles(self, tokens: int) -> Tiles:
        return choose(self.shape, self._table, tokens, one_order=self._deterministic)

    def _slabs(self, batch: ExpertsBatch) -> Tensor:
        from turnout.kernels.hopper.sort import tile_slabs

        E, C, H = batch.hidden.data.shape
        out_ECH = torch.zeros(E, C, H, dtype=torch.bfloat16, device=self._device)
        if C == 0:
            return out_ECH.to(self._dtype)
        space = self._space("experts", C)
        x_RH = batch.hidden.data.to(torch.bfloat16).reshape(E * C, H)
        tiles = slab_rule(self.shape, C)
        bound = E * -(-C // tiles.tokens)
        table = space.tiles
        tile_slabs[(1,)](batch.counts, table, C, E, tiles.tokens, self._padded_count)
        h_RI = space.h[: E * C * self._w2.inner].view(E * C, -1)
        out_RH = out_ECH.view(E * C, H)
        self._gemm(space, self._w13, x_RH, h_RI, table, None, bound, 1, tiles, first=True, direct=False)
        self._gemm(space, self._w2, h_RI, out_RH, table, None, bound, 1, tiles, first=False, direct=False)
        return out_ECH.to(self._dtype)

    def _space(self, layout: str, rows: int) -> Workspace:
        space = self._spaces.get(layout)
        if space is None:
            raise ValueError(f"a batch of layout {layout!r}, which the plan does not have")
        if space.rows < rows:
            raise ValueError(f"{rows} {layout}, but the plan bounds them by {space.rows}")
        return space

    def _sort(self, space: Workspace, ids_TK: Tensor, x_TH: Tensor, tiles: Tiles) -> None:
        """FP8, unless for many tokens: also quantise x_TH."""
        from turnout.kernels.hopper.quantize_groups import sort_and_quantize
        from turnout.kernels.hopper.sort import count_pairs, place_pairs

        P = ids_TK.numel()
        alone = P <= COUNT_PAIRS
        block = max(16, _power_of_two(P)) if alone else 1024
        programs = -(-P // block)
        if not alone:
            count_pairs[(programs,)](
                ids_TK, space.counts, P, self._first, self._count, block, self._padded_count, True,
                num_warps=8, launch_pdl=True,
            )  # fmt: skip
        warps = 4 if block <= 256 else 8 if block <= 1024 else 16
        if self.shape.format == "fp8" and not tiles.sorted:
            (T, H), at_once = x_TH.shape, 4 * warps
            groups = -(-H // FP8_GROUP)
            sort_and_quantize[(programs + -(-T * groups // at_once),)](
                ids_TK, space.counts, space.order, space.tiles, x_TH, *space.quantized,
                P, self._first, self._count, tiles.tokens, programs, T, H, x_TH.stride(0),
                block, self._padded_count, alone, groups, at_once, True,
                num_warps=warps, launch_pdl=True,
            )  # fmt: skip
            return
        place_pairs[(programs,)](
            ids_TK, space.counts, space.order, space.place, space.tiles, P, self._first, self._count,
            tiles.tokens, programs, block, self._padded_count, alone, self.shape.widest_first(tiles),
            tiles.sorted or self._w4a8, True,
            num_warps=warps, launch_pdl=True,
        )  # fmt: skip

    def _gemm(
        self, space: Workspace, w: Matrix, x: Tensor, out: Tensor, table: Tensor, weights: Tensor | None,
        bound: int, k: int, tiles: Tiles, *, first: bool, direct: bool,
    ) -> None:  # fmt: skip
        cut = tiles.first if first else tiles.second
        gemm = Gemm(
            first=first, w=w, x=x, out=out, columns=self._w2.inner if first else w.rows, order=space.order,
            table=table, weights=weights, top_k=k, cut=cut, bound=bound, direct=direct,
            held=(self._first, self._count), activation=self._spec.activation, processors=self._processors,
        )  # fmt: skip
        if self._w4a8:
            launch.w4a8(gemm, *self._quantize_rows(space, gemm))
        elif w.format == "fp8":
            launch.fp8(gemm, self._fp8_rows(space, gemm))
        elif cut.warps == SPECIALISED:
            launch.specialised(gemm)
        elif tiles.pairs:
            launch.pairs(gemm)
        elif cut.slices:
            launch.few(gemm)
        elif w.format != "bf16":
            launch.packed(gemm)
        else:
            launch.plain(gemm)

    def _fp8_by_expert(
        self, space: Workspace, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, out_TH: Tensor, tiles: Tiles
    ) -> None:
        """For many tokens, by other kernels: rows stay sorted by expert until they are summed."""
        from turnout.kernels.hopper.gemm_fp8_specialised import gemm
        from turnout.kernels.hopper.quantize_groups import quantize_places
        from turnout.kernels.hopper.sort import sum_places

        (T, H), k, I, P = x_TH.shape, ids_TK.shape[1], self._w2.inner, ids_TK.numel()
        kind, groups = self._spec.activation, H // FP8_GROUP
        limit = math.inf if kind.limit is None else kind.limit
        # y is not yet written while x is read.
        x = space.y.view(torch.float8_e4m3fn)[: P * H].view(P, H)
        x_scale = space.y.view(torch.float32)[P * H // 4 :][: P * groups]
        row = _power_of_two(H)
        quantize_places[(T,)](
            x_TH, space.place, x, x_scale, H, x_TH.stride(0), k, row, True,
            num_warps=min(16, max(4, row // 512)), launch_pdl=True,
        )  # fmt: skip
        h_PI = space.h.view(torch.float8_e4m3fn)[: P * I].view(P, I)
        h_scale = space.h.view(torch.float32)[P * I // 4 : P * I // 4 + P * I // FP8_GROUP]
        y_PH = space.y[: P * H].view(P, H)
        for first, w, rows, out in (
            (True, self._w13, (x, x_scale), h_PI),
            (False, self._w2, (h_PI, h_scale), y_PH),
        ):
            cut = tiles.first if first else tiles.second
            gemm(
                *rows, w.codes, w.scales, w.bias, out, h_scale, space.order, space.tiles, weights_TK,
                first=first, activation=(kind.kind, kind.alpha, kind.beta, limit),
                stages=cut.stages, group=cut.group, programs=self._processors,
            )  # fmt: skip
        few, counters, block = 2 * self._count <= self._spec.num_experts, space.counts.numel(), 1024
        sum_places[(T, -(-H // block))](
            y_PH, space.place, out_TH, space.counts, H, counters, k, block, few, True,
            num_warps=2 if few else 4, launch_pdl=True,
        )  # fmt: skip

    def _quantize_rows(self, space: Workspace, g: Gemm) -> tuple[Tensor, Tensor]:
        """e4m3 [R, K'] and float32 [R] of a GEMM's rows by expert, K' being K up to a multiple of 128."""
        from turnout.kernels.hopper.quantize_rows import quantize_rows, quantize_tokens

        R, (rows, K), columns = len(g.out), g.x.shape, g.w.blocks[1] * FP8_GROUP
        codes_RK, scales_R = space.quantized[0][: R * columns].view(R, columns), space.quantized[1]
        padded = _power_of_two(columns)
        at_once = max(1, 4096 // padded)
        programs = -(-rows // at_once)
        if g.pairs and g.first:
            quantize_tokens[(programs,)](
                g.x, space.place, codes_RK, scales_R, rows, K, g.x.stride(0), g.top_k, columns, padded,
                at_once, True, launch_pdl=True,
            )  # fmt: skip
        else:
            quantize_rows[(min(programs, 16 * self._processors),)](
                g.x, g.table, codes_RK, scales_R, rows, K, g.x.stride(0), columns, padded, at_once, g.pairs,
                g.pairs, launch_pdl=g.pairs,
            )  # fmt: skip
        return codes_RK, scales_R

    def _fp8_rows(self, space: Workspace, g: Gemm) -> tuple[Tensor, Tensor] | None:
        """g.x as e4m3 [R, K'] and float32 [R, K' / 128], flat, K' being K up to a multiple of 128. None: the
        GEMM quantises it."""
        from turnout.kernels.hopper.quantize_groups import quantize_rows

        R, K = g.x.shape
        if quantizes(g.cut, K, first=g.first, direct=g.direct):
            return None
        codes, scales = space.quantized
        if g.first and g.pairs and not g.direct:
            return codes, scales  # as `_sort` left it
        groups = -(-K // FP8_GROUP)
        block = 64 if R * groups > 1 << 16 else 16
        quantize_rows[(-(-R * groups // block),)](
            g.x, codes, scales, R, K, g.x.stride(0), groups, block, g.pairs, launch_pdl=g.pairs
        )
        return codes, scales

    def _sum(self, space: Workspace, ids_TK: Tensor, out_TH: Tensor, k: int, *, clear: bool) -> None:
        from turnout.kernels.hopper.sort import sum_pairs

        T, H = out_TH.shape
        block = 1024 if T > 64 else 256
        sum_pairs[(T, -(-H // block))](
            space.y, ids_TK, out_TH, space.counts, H, H, self._first, self._count, k, block,
            self._padded_count, clear, True, num_warps=4 if block > 256 else 2, launch_pdl=True,
        )  # fmt: skip


def _power_of_two(n: int) -> int:
    """The smallest that is at least n."""
    return 1 << max(0, n - 1).bit_length()
