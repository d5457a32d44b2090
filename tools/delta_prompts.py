"""Gated DeltaNet over prompts: our kernels, fla-core's and torch's operations, in one run.

    python -m tools.delta_prompts --output benchmarks/results/delta-prompts-DEVICE-DATE.json

Of one layer at Qwen3.5's heads in bfloat16, all between its two products: convolution, gates, delta rule and
gated norm. fla-core (0.6) has one kernel or several for each of them. `us` is the mean over whole calls
without graphs, as steps with prompts run them; `kernel_us` adds up the GPU's kernels of a call. Errors are
relative, in the root mean square, of outputs and of the states that are left, from a recurrence in float64,
token by token.

--device cpu --heads 2 4 --head-dim 16 --tokens 70 shows on any machine that it runs, in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from tools.attention import interpret_kernels
from turnout.attention import delta_rule
from turnout.attention.delta_rule import DeltaCell
from turnout.attention.kinds import DeltaNetSpec
from turnout.bench.results import check_output, gpu_driver, result, save
from turnout.packages import Package, versions_of
from turnout.parallel.hardware import cpu_name

FLA = Package(module="fla", distribution="fla-core", minimum="0.6", install="pip install fla-core")
PEERS = ("triton", "fla-core", "torch")
WARM_UPS, CALLS, KERNELS = 3, 10, 12
WIDTH = 4  # of the convolution
Peer = Callable[[Tensor, Tensor], Tensor]


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


class Bench:
    """A case on a device, whose states and windows all begin empty."""

    def __init__(self, case: Case, device: torch.device, dtype: torch.dtype):
        draw = torch.Generator().manual_seed(0)
        self.device, self.cell = device, case.cell(draw, device, dtype)
        self._sizes = case.requests, case.tokens
        mixed = torch.randn(*self._sizes, self.cell.spec.mixed, generator=draw)
        self.mixed_BTX = mixed.to(device, dtype)

    def empty(self) -> tuple[Tensor, Tensor]:
        """(windows [B, W - 1, C], states float32 [B, Hv, Dk, Dv])."""
        spec, B = self.cell.spec, self._sizes[0]
        states = torch.zeros(B, spec.num_heads, spec.head_dim, spec.value_dim, device=self.device)
        return self.mixed_BTX.new_zeros(B, WIDTH - 1, spec.channels), states

    def peer(self, name: str) -> Peer | str:
        """What takes windows and states over the prompts, and gives [B, T, Hv Dv]; or why there is none."""
        if name == "fla-core":
            return FLA.lacking() or (self._library() if self.device.type == "cuda" else "runs on GPUs")
        cell = self.cell
        if name == "triton":
            from turnout.kernels.attention.delta_prompt import advance

            def one(mixed_TX: Tensor, window_WC: Tensor, state_HKV: Tensor) -> Tensor:
                y_TY: Tensor = advance(mixed_TX, window_WC, state_HKV, *cell.learned)
                return y_TY
        else:

            def one(mixed_TX: Tensor, window_WC: Tensor, state_HKV: Tensor) -> Tensor:
                return delta_rule.advance(cell, mixed_TX, window_WC, state_HKV)

        def run(windows: Tensor, states: Tensor) -> Tensor:
            return torch.stack([one(*of) for of in zip(self.mixed_BTX, windows, states, strict=True)])

        return run

    def _library(self) -> Peer:
        """fla-core's kernels in the order of transformers' layer, with gates and lengths inside them."""
        from fla.modules.causal_conv1d import causal_conv1d
        from fla.modules.norm.fused_norm_gate import rms_norm_gated
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        cell, spec = self.cell, self.cell.spec
        conv_CW, a_log_H = cell.conv_WC.T.contiguous(), (-cell.decay_H).log()
        norm_D = cell.norm_D.to(self.mixed_BTX.dtype)
        keys = spec.num_kv_heads * spec.head_dim
        rest: Any = {
            "output_final_state": True, "use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True, "A_log": a_log_H, "dt_bias": cell.bias_H,
        }  # fmt: skip

        def run(windows: Tensor, states: Tensor) -> Tensor:
            qkv, z, b, a = cell.parts(self.mixed_BTX)
            windows.copy_(qkv[:, 1 - WIDTH :])
            convolved, _ = causal_conv1d(qkv, weight=conv_CW, activation="silu", backend="triton")
            q, k, v = convolved.split([keys, keys, spec.num_heads * spec.value_dim], dim=-1)
            q, k = (x.unflatten(-1, (-1, spec.head_dim)) for x in (q, k))
            v, z = (x.unflatten(-1, (-1, spec.value_dim)) for x in (v, z))
            o, ends = chunk_gated_delta_rule(q, k, v, a, b, initial_state=states, **rest)
            states.copy_(ends)
            found: Tensor = rms_norm_gated(o, z, norm_D, None, activation="swish", eps=cell.eps)
            return found.flatten(-2)

        return run

    def reference(self) -> tuple[Tensor, Tensor]:
        """float64 (outputs [B, T, Hv Dv], states), token by token."""
        cell, spec = self.cell, self.cell.spec
        qkv, z, b, a = cell.parts(self.mixed_BTX.double())
        padded = F.pad(qkv.transpose(1, 2), (WIDTH - 1, 0))
        weight = cell.conv_WC.double().T[:, None]
        convolved = F.silu(F.conv1d(padded, weight, groups=spec.channels).transpose(1, 2))
        keys = spec.num_kv_heads * spec.head_dim
        q, k, v = convolved.split([keys, keys, spec.num_heads * spec.value_dim], dim=-1)
        q, k = (x.unflatten(-1, (-1, spec.head_dim)) for x in (q, k))
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        repeat = spec.num_heads // spec.num_kv_heads
        q, k = (x.repeat_interleave(repeat, dim=2) for x in (q * spec.head_dim**-0.5, k))
        v = v.unflatten(-1, (-1, spec.value_dim))
        beta, kept = b.sigmoid(), (cell.decay_H.double() * F.softplus(a + cell.bias_H.double())).exp()
        S = self.empty()[1].double()
        o = torch.empty_like(v)
        for t in range(v.shape[1]):
            S *= kept[:, t, :, None, None]
            known = (k[:, t, :, None] @ S)[:, :, 0]
            S += k[:, t, :, :, None] * (beta[:, t, :, None] * (v[:, t] - known))[:, :, None]
            o[:, t] = (q[:, t, :, None] @ S)[:, :, 0]
        normed = o / (o.square().mean(-1, keepdim=True) + cell.eps).sqrt() * cell.norm_D.double()
        return normed.flatten(-2) * F.silu(z), S

    def measure(self, name: str, wanted: tuple[Tensor, Tensor]) -> dict[str, Any]:
        """What a row says of a peer."""
        run = self.peer(name)
        if isinstance(run, str):
            return {"error_message": run}
        windows, states = self.empty()
        try:
            y_BTY = run(windows, states)
        except (AssertionError, NotImplementedError, RuntimeError) as error:
            if name == PEERS[0]:
                raise
            return {"error_message": f"{type(error).__name__}: {error}"[:300]}
        errors = (relative_error(*pair) for pair in zip((y_BTY, states), wanted, strict=True))
        row = dict(zip(("error", "state_error"), errors, strict=True))
        on_gpu = self.device.type == "cuda"
        for _ in range(WARM_UPS if on_gpu else 0):
            run(windows, states)
        self._wait()
        calls = CALLS if on_gpu else 1
        began = time.perf_counter()
        for _ in range(calls):
            run(windows, states)
        self._wait()
        row["us"] = (time.perf_counter() - began) / calls * 1e6
        row["tokens_per_s"] = self._sizes[0] * self._sizes[1] / row["us"] * 1e6
        return row | (self._kernels(run, windows, states) if on_gpu else {})

    def _kernels(self, run: Peer, windows: Tensor, states: Tensor) -> dict[str, Any]:
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            run(windows, states)
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


def relative_error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).square().mean().sqrt() / wanted.square().mean().sqrt())


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


def show(row: dict[str, Any]) -> None:
    print(*(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--peers", nargs="+", default=PEERS, choices=PEERS)
    parser.add_argument("--heads", type=int, nargs=2, metavar=("KEYS", "VALUES"), help="of one case")
    parser.add_argument("--head-dim", type=int, default=128, help="of that case")
    parser.add_argument("--requests", type=int, default=2, help="of that case")
    parser.add_argument("--tokens", type=int, default=2048, help="of that case")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    check_output(options.output)
    device = torch.device(options.device)
    if device.type == "cpu":
        interpret_kernels()
    rows = []
    for case in chosen_cases(options):
        bench = Bench(case, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
        with torch.no_grad():
            wanted = bench.reference()
            for name in options.peers:
                rows.append({"peer": name, **vars(case), **bench.measure(name, wanted)})
                show(rows[-1])
        del bench
    if options.output:
        name = torch.cuda.get_device_name() if device.type == "cuda" else cpu_name()
        content = result("delta_prompts", rows, device=name, driver=gpu_driver())
        content["versions"] |= versions_of([FLA.distribution])
        save(content, options.output)


if __name__ == "__main__":
    main()
