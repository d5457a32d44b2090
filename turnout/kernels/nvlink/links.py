"""Launching the kernels: how a step is cut for the multiprocessors, and what they need to know.

Legend: T tokens of this rank, R ranks, k top-k, H hidden; room: tokens per rank for which a batch has rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from turnout.kernels.nvlink.combine import combine_rows
from turnout.kernels.nvlink.dispatch import dispatch_rows

PIECE = 1024  # the fewest columns that a program moves
IN_WORDS, FLAGGED = 8, 4  # pieces that a program moves at once at most, in words or after a flag
SUMMED = 16  # pieces of all ranks that it has at once, which registers hold
# Of a program: for what is polled (waiting.py) each thread has at least a word of a row. Twice as many move
# large batches in fewer, larger pieces: 1,024 tokens of 7,168 between four ranks in 274 us instead of 328.
WARPS, MANY_WARPS = 4, 8
THREADS = 512  # on a multiprocessor, which their registers are limited to allow
REGISTERS = 65536 // THREADS
BLOCK = 16  # rows that a program waits for at once
LAG = 1  # steps between sending results of a token and adding up those of another
POLLS = 1 << 20  # that the interpreter waits
INTERPRETED = not isinstance(dispatch_rows, triton.JITFunction)
KINDS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
GROUPS = {"fp8": 128, "nvfp4": 16}  # columns that share a scale


@dataclass(frozen=True, kw_only=True)
class Launch:
    """programs: as many as are started. parts: of a row. words: that a program moves at once."""

    programs: int
    parts: int
    words: int
    warps: int

    @property
    def options(self) -> dict[str, int]:
        """Triton's."""
        return {} if INTERPRETED else {"num_warps": self.warps, "maxnreg": REGISTERS}


@dataclass(frozen=True, kw_only=True, eq=False)
class Links:
    """What the kernels need to know of a layer's exchanges; each call is one launch.

    addresses int64 [R], failed and told int64 [1]: of the symmetric memory. epochs int64 [2]. starts: where
    the parts of the region begin; rows: its capacity in all; few: tokens of a rank that are sent in words.
    """

    rank: int
    addresses: Tensor
    failed: Tensor
    told: Tensor
    epochs: Tensor
    starts: dict[str, int]
    rows: int
    few: int
    hidden: int
    top_k: int
    experts_per_slice: int
    expert_tp: int
    limit_seconds: float

    def dispatch(
        self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, scale: Tensor | None, out_ids: Tensor,
        out_weights: Tensor, room: int, format: str,
    ) -> None:  # fmt: skip
        """x of the compute dtype, its rows at any 16-byte stride; ids int32, weights float32; out_ids and
        out_weights [room * R, k]. Afterwards `hidden` and `scales` hold the rows whose ids are not -1."""
        T, R, itemsize = len(x_TH), len(self.addresses), x_TH.dtype.itemsize
        if format == "bf16":
            columns, row, scale_row, x_TH = 4 // itemsize, self.hidden * itemsize // 4, 0, _words(x_TH)
        else:
            columns = {"fp8": 4, "nvfp4": 8}[format]
            row = self.hidden // columns
            scale_row = self.hidden // GROUPS[format] * (4 if format == "fp8" else 1) // 4
        most = IN_WORDS if room <= self.few else FLAGGED
        launch = self._launch(room * max(1, R - 1), room, most, columns)
        starts = self.starts
        dispatch_rows[(launch.programs,)](
            x_TH, ids_TK, weights_TK.view(torch.int32), self.epochs if scale is None else scale,
            self.addresses, self.epochs, self.failed, self.told, out_ids, out_weights, T, room, self.few,
            self.rows, self.experts_per_slice, x_TH.stride(0), self._limit(), starts["counts"],
            starts["meta"], starts["arrived"], starts["hidden"], starts["scales"], starts["landing"],
            **self._constants(), H=self.hidden, ROW=row, SCALE_ROW=scale_row,
            STRIDE=16 * triton.cdiv(row + scale_row, 4), PARTS=launch.parts, W=launch.words,
            S=max(1, launch.words * scale_row // row), BLOCK=BLOCK, FORMAT=format, WORDS=self.few >= T,
            ALL_WORDS=room <= self.few, **launch.options,
        )  # fmt: skip

    def combine(
        self, y: Tensor, received_ids: Tensor, ids_TK: Tensor, out_TH: Tensor, room: int, format: str
    ) -> None:
        """y [room * R, H] and out of the compute dtype, the latter contiguous; received_ids as `dispatch`
        left them. format: what results are sent in, "bf16" (the compute dtype) or "fp8"."""
        T, itemsize = len(out_TH), out_TH.dtype.itemsize
        y, out, columns = y.to(out_TH.dtype), out_TH, 4
        stride = self.hidden + self.hidden // GROUPS["fp8"] * 4
        if format == "bf16":
            y, out, columns, stride = _words(y), _words(out), 4 // itemsize, self.hidden * itemsize
        launch = self._launch(room, room, max(1, SUMMED // len(self.addresses)), columns)
        combine_rows[(launch.programs,)](
            y, received_ids, ids_TK, out, self.addresses, self.epochs, self.failed, self.told, T, room,
            self.few, self.rows, self.experts_per_slice, y.stride(0), self._limit(), self.starts["counts"],
            self.starts["meta"], self.starts["returned"], self.starts["results"], self.starts["landed"],
            **self._constants(), H=self.hidden, ROW=self.hidden // columns, STRIDE=-(-stride // 16) * 16,
            PARTS=launch.parts, W=launch.words, LAG=LAG, KIND=KINDS[out_TH.dtype], BACK=format,
            WORDS=self.few >= T, ALL_WORDS=room <= self.few, **launch.options,
        )  # fmt: skip

    def _constants(self) -> dict[str, int | bool]:
        R = len(self.addresses)
        return {
            "RANK": self.rank, "RANKS": R, "RP": triton.next_power_of_2(R), "TP": self.expert_tp,
            "K": self.top_k, "KP": triton.next_power_of_2(self.top_k), "INTERPRETED": INTERPRETED,
        }  # fmt: skip

    def _launch(self, rows: int, room: int, most: int, columns: int) -> Launch:
        """How programs share `rows`, each moving at most `most` pieces at once, `columns` of a row in a word.

        In words, parts of a row may go to several programs, as many as let each move one part of `rows`.
        """
        whole = triton.next_power_of_2(triton.cdiv(self.hidden, PIECE))
        sizes = [size for size in (1, 2, 4, 8) if size <= min(whole, most)]
        pieces, in_words = sizes[-1], room <= self.few
        warps = WARPS if in_words or pieces * PIECE // columns < 32 * MANY_WARPS else MANY_WARPS
        together = self._programs(warps)
        if in_words:
            pieces = _fewest(lambda n: rows * triton.cdiv(self.hidden, n * PIECE) <= together, sizes)
        parts = triton.cdiv(self.hidden, pieces * PIECE)
        work = rows * parts if in_words else rows
        # Interpreted, programs run one after another, so that none may wait for the next.
        programs = 1 if INTERPRETED else min(max(work, 1), together)
        return Launch(programs=programs, parts=parts, words=pieces * PIECE // columns, warps=warps)

    def _limit(self) -> int:
        return POLLS if INTERPRETED else round(1e9 * self.limit_seconds)

    def _programs(self, warps: int) -> int:
        """As many as run together."""
        if INTERPRETED:
            return 8
        device = self.epochs.device
        return THREADS // (32 * warps) * torch.cuda.get_device_properties(device).multi_processor_count


def _words(x: Tensor) -> Tensor:
    """x [., H] as int32 words: two values of 16 bits each, or one of 32."""
    return x.view(torch.int32)


def _fewest(enough: Callable[[int], bool], sizes: list[int]) -> int:
    """The first of `sizes` that is `enough`, or else the last: few, since each is compiled for itself."""
    return next((size for size in sizes if enough(size)), sizes[-1])
