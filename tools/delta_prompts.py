"""Gated DeltaNet over prompts: our kernels, fla-core's and torch's operations, in one run.

    python -m tools.delta_prompts --output benchmarks/results/delta-prompts-DEVICE-DATE.json

Of one layer at Qwen3.5's heads in bfloat16, all between its two products: convolution, gates, delta rule and
gated norm, as the engine's backends (turnout/attention/backends/) compute it in a step. `us` is the mean over
whole calls without graphs, as steps with prompts run them; `kernel_us` adds up the GPU's kernels of a call.
Errors are relative, in the root mean square, of outputs and of the states that are left, from a recurrence in
float64, token by token.

--device cpu --heads 2 4 --head-dim 16 --tokens 70 shows on any machine that it runs, in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from tools.kernel_timing import device_of, device_parser, keep, line, relative_error
from turnout.attention.backends.fla_core.declaration import PACKAGE as FLA
from turnout.attention.capability import Place
from turnout.attention.delta_rule import DeltaCell
from turnout.attention.interface import Attention
from turnout.attention.kinds import DeltaNetSpec, StateGroup
from turnout.attention.states import RequestStates, request_states, state_size, window_size
from turnout.registry import ATTENTION_BACKENDS, load

PEERS = ("triton", "fla-core", "torch")
WARM_UPS, CALLS, KERNELS = 3, 10, 12
WIDTH = 4  # of the convolution


@dataclass(frozen=True)
class Case:
    """Prompts of so many tokens each. key_heads, value_heads: of a model or of one rank."""

    model: str
    key_heads: int
    value_heads: int
    requests: int
    tokens: int
    head_dim: int = 128

    def cell(self, draw: torch.Generator, device: torch.device, dtype: torch.dtype) -> DeltaCell:
        Hk, Hv, D = self.key_heads, self.value_heads, self.head_dim
        spec = DeltaNetSpec(
            num_heads=Hv, num_kv_heads=Hk, head_dim=D, value_dim=D, scale=D**-0.5, conv_width=WIDTH
        )
        values = (
            torch.randn(WIDTH, spec.channels, generator=draw).to(dtype) / 2,
            -torch.empty(Hv).uniform_(0.001, 16, generator=draw),  # as A_log begins in training
            torch.randn(Hv, generator=draw) - 2,
            1 + torch.randn(D, generator=draw) / 4,
        )
        conv_WC, decay_H, bias_H, norm_D = (x.to(device) for x in values)
        return DeltaCell(spec=spec, conv_WC=conv_WC, decay_H=decay_H, bias_H=bias_H, norm_D=norm_D, eps=1e-6)


CASES = (
    Case("35B-A3B", 16, 32, 1, 2048),
    Case("35B-A3B", 16, 32, 8, 2048),
    Case("35B-A3B", 16, 32, 1, 16384),
    Case("397B-A17B", 16, 64, 1, 2048),
)


@dataclass(frozen=True)
class Prompt:
    state_slots: tuple[int, ...]


@dataclass(frozen=True)
class Span:
    """A whole prompt, as a step has it."""

    request: Any
    length: int
    start: int = 0


class Bench:
    """A case on a device."""

    def __init__(self, case: Case, device: torch.device, dtype: torch.dtype):
        draw = torch.Generator().manual_seed(0)
        self.case, self.device, self.cell = case, device, case.cell(draw, device, dtype)
        mixed = torch.randn(case.requests, case.tokens, self.cell.spec.mixed, generator=draw)
        self.mixed_BTX = mixed.to(device, dtype)

    def peer(self, name: str) -> RequestStates | str:
        """A slot of each prompt, which begins it again in each call; or why there is none."""
        if name == "fla-core" and (FLA.lacking() or self.device.type != "cuda"):
            return FLA.lacking() or "runs on GPUs"
        place = Place(
            device=self.device.type,
            dtype=str(self.mixed_BTX.dtype).removeprefix("torch."),
            page_size=16,
            architecture=90,
            present=True,
            asked=name,
        )
        group = StateGroup(layers=(0,), spec=self.cell.spec)
        rest: Any = {"device": self.device, "dtype": self.mixed_BTX.dtype, "max_running": self.case.requests}
        if name == "fla-core":
            return request_states(group, place, **rest)
        made: RequestStates = load(ATTENTION_BACKENDS.get(name).states.implementation)(group, **rest)
        return made

    def run(self, states: RequestStates) -> Tensor:
        """As a layer of a step does: [B, T, Hv Dv]."""
        rows_NX = self.mixed_BTX.flatten(0, 1)
        return self.laid_out(states).recur(0, rows_NX, self.cell).unflatten(0, self.mixed_BTX.shape[:2])

    def laid_out(self, states: RequestStates) -> Attention:
        spans = [Span(Prompt((slot,)), self.case.tokens) for slot in range(self.case.requests)]
        return states.laid_out([], spans)

    def reference(self) -> tuple[Tensor, Tensor]:
        """float64 (outputs [B, T, Hv Dv], states)."""
        B, spec = self.case.requests, self.cell.spec
        sizes = window_size(spec), state_size(spec)
        return recurrence(self.cell, self.mixed_BTX, *(self.mixed_BTX.new_zeros(B, *size) for size in sizes))

    def measure(self, name: str, wanted: tuple[Tensor, Tensor]) -> dict[str, Any]:
        """What a row says of a peer."""
        states = self.peer(name)
        if isinstance(states, str):
            return {"error_message": states}
        try:
            y_BTY = self.run(states)
        except (AssertionError, NotImplementedError, RuntimeError) as error:
            if name == PEERS[0]:
                raise
            return {"error_message": f"{type(error).__name__}: {error}"[:300]}
        left = states.states[0, : self.case.requests]
        errors = (relative_error(*pair) for pair in zip((y_BTY, left), wanted, strict=True))
        row = dict(zip(("error", "state_error"), errors, strict=True))
        laid_out, rows_NX, on_gpu = (
            self.laid_out(states),
            self.mixed_BTX.flatten(0, 1),
            self.device.type == "cuda",
        )
        for _ in range(WARM_UPS if on_gpu else 0):
            laid_out.recur(0, rows_NX, self.cell)
        self._wait()
        calls = CALLS if on_gpu else 1
        began = time.perf_counter()
        for _ in range(calls):
            laid_out.recur(0, rows_NX, self.cell)
        self._wait()
        row["us"] = (time.perf_counter() - began) / calls * 1e6
        row["tokens_per_s"] = len(rows_NX) / row["us"] * 1e6
        return row | (self._kernels(laid_out) if on_gpu else {})

    def _kernels(self, laid_out: Attention) -> dict[str, Any]:
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            laid_out.recur(0, self.mixed_BTX.flatten(0, 1), self.cell)
            self._wait()
        us: dict[str, float] = {}
        events = [event for event in seen.events() or () if event.device_type.name == "CUDA"]
        for event in events:
            us[event.name[:80]] = us.get(event.name[:80], 0.0) + event.device_time
        most = sorted(us.items(), key=lambda item: -item[1])[:KERNELS]
        return {"kernel_us": sum(us.values()), "launches": len(events), "kernels": dict(most)}

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def recurrence(
    cell: DeltaCell, mixed_BTX: Tensor, windows_BWC: Tensor, states_BHKV: Tensor
) -> tuple[Tensor, Tensor]:
    """float64 (outputs [B, T, Hv Dv], states), token by token, after these windows and states."""
    spec, S = cell.spec, states_BHKV.double()
    qkv, z, b, a = cell.parts(mixed_BTX.double())
    seen = torch.cat((windows_BWC.double(), qkv), dim=1).transpose(1, 2)
    weight = cell.conv_WC.double().T[:, None]
    convolved = F.silu(F.conv1d(seen, weight, groups=spec.channels).transpose(1, 2))
    keys = spec.num_kv_heads * spec.head_dim
    q, k, v = convolved.split([keys, keys, spec.num_heads * spec.value_dim], dim=-1)
    q, k = (x.unflatten(-1, (-1, spec.head_dim)) for x in (q, k))
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    repeat = spec.num_heads // spec.num_kv_heads
    q, k = (x.repeat_interleave(repeat, dim=2) for x in (q * spec.head_dim**-0.5, k))
    v = v.unflatten(-1, (-1, spec.value_dim))
    beta, kept = b.sigmoid(), (cell.decay_H.double() * F.softplus(a + cell.bias_H.double())).exp()
    o = torch.empty_like(v)
    for t in range(v.shape[1]):
        S = S * kept[:, t, :, None, None]
        known = (k[:, t, :, None] @ S)[:, :, 0]
        S += k[:, t, :, :, None] * (beta[:, t, :, None] * (v[:, t] - known))[:, :, None]
        o[:, t] = (q[:, t, :, None] @ S)[:, :, 0]
    normed = o / (o.square().mean(-1, keepdim=True) + cell.eps).sqrt() * cell.norm_D.double()
    return normed.flatten(-2) * F.silu(z), S


def chosen_cases(options: argparse.Namespace) -> tuple[Case, ...]:
    """CASES, or the one that options name."""
    if options.heads is None:
        return CASES
    key_heads, value_heads = options.heads
    return (
        Case(
            model="",
            key_heads=key_heads,
            value_heads=value_heads,
            requests=options.requests,
            tokens=options.tokens,
            head_dim=options.head_dim,
        ),
    )


def main() -> None:
    parser = device_parser(__doc__)
    parser.add_argument("--peers", nargs="+", default=PEERS, choices=PEERS)
    parser.add_argument("--heads", type=int, nargs=2, metavar=("KEYS", "VALUES"), help="of one case")
    parser.add_argument("--head-dim", type=int, default=128, help="of that case")
    parser.add_argument("--requests", type=int, default=2, help="of that case")
    parser.add_argument("--tokens", type=int, default=2048, help="of that case")
    options = parser.parse_args()
    device = device_of(options)
    rows = []
    for case in chosen_cases(options):
        bench = Bench(case, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
        with torch.no_grad():
            wanted = bench.reference()
            for name in options.peers:
                rows.append({"peer": name, **vars(case), **bench.measure(name, wanted)})
                print(line(rows[-1]), flush=True)
        del bench
    keep("delta_prompts", rows, options, [FLA.distribution])


if __name__ == "__main__":
    main()
