"""Gated DeltaNet decoding: the step kernel on slots, and torch's operations, in one run.

    python -m tools.delta_steps --output benchmarks/results/delta-steps-DEVICE-DATE.json

One token of each request through layers at Qwen3.5's heads in bfloat16, each with states and windows of its
own, more than the cache of a GPU holds. `us` is that of a layer in a CUDA graph; `share` is the time that
states and windows, read and written, and what goes in and out take at 4.2 TB/s, over it. Errors are relative,
in the root mean square, of outputs and of the states that are left, from a recurrence in float64.

--device cpu --heads 2 4 --head-dim 16 --requests 3 shows on any machine that it runs, in Triton's
interpreter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tools.delta_prompts import Case, recurrence
from tools.kernel_timing import (
    BYTES_PER_S,
    device_of,
    device_parser,
    keep,
    line,
    relative_error,
    seconds_of,
)
from turnout.attention.kinds import StateGroup
from turnout.attention.states import RequestStates, Rows
from turnout.parallel.hardware import L2_BYTES
from turnout.registry import ATTENTION_BACKENDS, load

PEERS = ("triton", "torch")
REQUESTS = (1, 8, 32, 64, 128, 256)
MODELS = (("35B-A3B", 16, 32), ("397B-A17B", 16, 64))
MOST_LAYERS = 30


class Bench:
    """Requests behind a context, in layers that all have the same cell."""

    def __init__(self, case: Case, device: torch.device, dtype: torch.dtype):
        draw = torch.Generator().manual_seed(0)
        self.case, self.device, self.dtype = case, device, dtype
        self.cell = case.cell(draw, device, dtype)
        self.rows_BX = torch.randn(case.requests, self.cell.spec.mixed, generator=draw).to(device, dtype)
        each = case.requests * self.cell.spec.state_bytes(dtype.itemsize)
        self.layers = max(2, min(MOST_LAYERS, -(-2 * L2_BYTES // each))) if device.type == "cuda" else 2

    @property
    def nbytes(self) -> int:
        """Of a layer, read and written."""
        spec, B = self.cell.spec, self.case.requests
        rows = spec.mixed + spec.num_heads * spec.value_dim
        return B * (2 * spec.state_bytes(self.dtype.itemsize) + rows * self.dtype.itemsize)

    def states(self, name: str) -> RequestStates:
        """By one of PEERS, full of noise."""
        group = StateGroup(layers=tuple(range(self.layers)), spec=self.cell.spec)
        made: RequestStates = load(ATTENTION_BACKENDS.get(name).states.implementation)(
            group, max_running=self.case.requests, device=self.device, dtype=self.dtype
        )
        torch.manual_seed(0)
        made.states.normal_(std=0.1)
        made.windows.normal_()
        return made

    def wanted(self, states: RequestStates) -> tuple[Tensor, Tensor]:
        """Of the first layer: (outputs, states), without changing these."""
        kept = (x[0, : self.case.requests] for x in (states.windows, states.states))
        y_B1Y, left = recurrence(self.cell, self.rows_BX[:, None], *kept)
        return y_B1Y[:, 0], left

    def measure(self, name: str) -> dict[str, Any]:
        states, B = self.states(name), self.case.requests
        slots = torch.arange(B, device=self.device)
        rows = Rows(states, slots, torch.full_like(slots, 1000))
        wanted = self.wanted(states)
        found = rows.recur(0, self.rows_BX, self.cell), states.states[0, :B]
        errors = [relative_error(*pair) for pair in zip(found, wanted, strict=True)]

        def run() -> None:
            for layer in range(self.layers):
                rows.recur(layer, self.rows_BX, self.cell)

        seconds = seconds_of(run, self.device)[0] / self.layers
        return {
            "peer": name, "model": self.case.model, "key_heads": self.case.key_heads,
            "value_heads": self.case.value_heads, "requests": B, "layers": self.layers,
            "error": errors[0], "state_error": errors[1], "us": seconds * 1e6,
            "share": self.nbytes / BYTES_PER_S / seconds,
        }  # fmt: skip


def main() -> None:
    parser = device_parser(__doc__)
    parser.add_argument("--peers", nargs="+", default=PEERS, choices=PEERS)
    parser.add_argument("--heads", type=int, nargs=2, metavar=("KEYS", "VALUES"), help="of no model")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--requests", type=int, nargs="+", default=REQUESTS)
    options = parser.parse_args()
    device = device_of(options)
    rows = []
    for model, key_heads, value_heads in [("", *options.heads)] if options.heads else MODELS:
        for requests in options.requests:
            case = Case(model, key_heads, value_heads, requests, 1, options.head_dim)
            bench = Bench(case, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
            with torch.no_grad():
                for name in options.peers:
                    rows.append(bench.measure(name))
                    print(line(rows[-1]), flush=True)
    keep("delta_steps", rows, options)


if __name__ == "__main__":
    main()
