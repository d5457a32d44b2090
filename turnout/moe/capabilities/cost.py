"""What it takes to bring tokens to their experts and back, as measured: which way a large prompt goes.

A dispatcher that passes a step in chunks pays for each, and runners read their weights again for each; one
that gathers takes all at once, more slowly. Both are lines through times on two H200s, of one layer's
dispatch and combine in a CUDA graph (benchmarks/results/a2a-nvlink-nvidia-h200-x2-2026-11-21.json, to which a
test holds them): so many microseconds however few tokens, and the rate at which bytes leave a rank. Between
other GPUs both differ, and which of two ways is faster less so.
"""

from __future__ import annotations

from dataclasses import dataclass

READ_GBps = 4156.0  # of an H200's memory, as a copy reads and writes it (bench moe)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """An exchange, there and back: call_us of one without tokens, GBps that leave a rank in both together."""

    call_us: float
    GBps: float

    def us(self, sent_bytes: float, *, chunks: int = 1, weight_bytes: int = 0) -> float:
        """Of `chunks` exchanges that send so much together, and weights read once more for all but one."""
        again = (chunks - 1) * weight_bytes / READ_GBps
        return chunks * self.call_us + (sent_bytes / self.GBps + again) / 1e3
