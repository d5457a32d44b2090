"""`bench moe`: the experts of one layer (no router), as planned, and torch's grouped GEMM and, where a
layer is whole and without biases, transformers' implementations.

Everything at a point, ours and peers, is timed in the same run, on inputs and routes that change from call
to call; a row holds the median. On a CPU, call by call in turn. On CUDA, as replays of a graph of calls, with
several sets of weights so that none stays in the L2 cache; what cannot be captured is called eagerly, and
says so (timing.py). `floor_us` is the larger of bytes touched over the measured copy bandwidth and
operations over the measured GEMM rate; bytes are those of the format, of experts that got a token. `error` is
relative to the float32 reference.

Under expert parallelism (shape names ending in -epN) routes are drawn over all experts and the rank's
share of them is computed, as behind a dispatcher that moves nothing. Format "w4a8" is MXFP4 with FP8
activations, whose error holds what quantising them costs.

Legend: T tokens, H hidden, E experts, k top-k.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from turnout.bench import timing
from turnout.bench.contender import Contender, Forward
from turnout.bench.moe_peers import PEERS, Layer
from turnout.bench.plot import efficiency
from turnout.bench.results import check_measured, check_output, device_of, result, save
from turnout.errors import UserError
from turnout.formats.codec import encode
from turnout.formats.experts import ExpertWeights
from turnout.formats.packed import PackedTensor
from turnout.formats.spec import WEIGHT_FORMATS, matrix_bytes
from turnout.moe.accuracy import relative_error
from turnout.moe.autotune import autotune
from turnout.moe.batch import Hidden, TokensBatch
from turnout.moe.budget import Budget
from turnout.moe.capabilities.declared import RUNNERS
from turnout.moe.plan import PlanRequest, plan
from turnout.moe.reference import experts_reference
from turnout.moe.spec import Activation, MoESpec
from turnout.parallel import hardware
from turnout.parallel.groups import SINGLE_RANK
from turnout.parallel.topology import Topology
from turnout.vocabulary import ActivationKind, ComputeDtype, Format

ROUTINGS = ("uniform", "zipf", "zipf-1.2")  # zipf-S: an expert's chance falls with its rank to the power S
W4A8 = "w4a8"  # as a format: MXFP4 weights that are multiplied with FP8 activations
INPUTS = 4  # sets of tokens and routes per point
TABLE_WIDTH = 110
GPT_OSS = Activation(kind=ActivationKind.SWIGLU, alpha=1.702, beta=1.0, limit=7.0)
PEER_BYTES = 2**31  # a peer that would gather more weights than this is not run


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One layer. `ep`: over how many ranks its experts are spread; the first rank's are measured."""

    hidden: int
    intermediate: int
    experts: int
    top_k: int
    ep: int = 1
    swiglu: bool = False  # GPT-OSS's clamped activation, and its biases

    @property
    def local(self) -> int:
        return self.experts // self.ep

    def spec(self, format: Format) -> MoESpec:
        return MoESpec(
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_experts=self.experts,
            top_k=self.top_k,
            format=format,
            activation=GPT_OSS if self.swiglu else Activation(),
            expert_bias=self.swiglu,
        )


SHAPES = {
    "cpu-small": Shape(hidden=1024, intermediate=512, experts=64, top_k=8),
    "qwen3-30b": Shape(hidden=2048, intermediate=768, experts=128, top_k=8),
    "qwen3-235b-ep4": Shape(hidden=4096, intermediate=1536, experts=128, top_k=8, ep=4),
    "gptoss-20b": Shape(hidden=2880, intermediate=2880, experts=32, top_k=4, swiglu=True),
    "gptoss-120b": Shape(hidden=2880, intermediate=2880, experts=128, top_k=4, swiglu=True),
    "dsv3-ep8": Shape(hidden=7168, intermediate=2048, experts=256, top_k=8, ep=8),
    "qwen35-397b-ep4": Shape(hidden=4096, intermediate=1024, experts=512, top_k=10, ep=4),
}


def run(
    *,
    shapes: Sequence[str] = ("cpu-small",),
    formats: Sequence[str] = ("bf16", "nvfp4"),
    tokens: Sequence[int] = (1, 16, 256),
    runner: str = "auto",
    routing: str = "uniform",
    device: str = "auto",
    cpu_bf16_units: str = "auto",
    peers: bool = True,
    output: Path | None = None,
    plot: Path | None = None,
    command: str | None = None,
) -> dict[str, Any]:
    """Measure every shape, format and token count; print a table and return the result (and save or plot it).

    `shapes` ["all"]: those of published models. `plot`: an SVG of the efficiency.
    On a CPU each is run in float32 and in bfloat16, on CUDA in bfloat16. cpu_bf16_units: as the flag of
    `serve`. A point that fails is a row with an `error_message`. Raises UserError for a shape, format or
    routing that is not known, and at last if every point failed.
    """
    if list(shapes) == ["all"]:
        shapes = [name for name in SHAPES if name != "cpu-small"]
    for kind, asked, known in (
        ("shape", shapes, SHAPES),
        ("format", formats, (*WEIGHT_FORMATS, W4A8)),
        ("routing", [] if _skew(routing) is not None else [routing], ROUTINGS),
    ):
        for name in asked:
            if name not in known:
                raise UserError(f"unknown {kind} {name!r}; known: {', '.join(known)}")
    machine = hardware.detect(device).with_bf16_units(cpu_bf16_units)
    check_output(output, plot)
    ceilings = timing.measure_ceilings(machine.device)
    dtypes: tuple[ComputeDtype, ...] = ("bfloat16", "float32") if machine.device == "cpu" else ("bfloat16",)
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        for shape in shapes:
            for format in formats:
                bench = LayerBench(SHAPES[shape], format, machine, routing)
                contenders = bench.contenders(runner, dtypes, peers)
                for count in tokens:
                    point = {"shape": shape, "format": format, "tokens": count, "routing": routing}
                    rows += [point | row for row in bench.measure(count, contenders, ceilings)]
    content = result("moe", rows, ceilings=ceilings, command=command, **device_of(machine))
    show(content)
    if output is not None:
        save(content, output)
    if plot is not None:
        plot.write_text(efficiency(content))
    check_measured(rows)
    return content


class LayerBench:
    """One layer's weights in one format, and all that is measured on them."""

    def __init__(self, shape: Shape, format: str, machine: hardware.Hardware, routing: str) -> None:
        self._shape, self._machine, self._routing = shape, machine, routing
        self._format = Format.MXFP4 if format == W4A8 else Format(format)
        self._activations = "fp8" if format == W4A8 else "auto"
        self._rate = "fp8" if format == W4A8 else format  # of the products
        self._spec = shape.spec(self._format)
        self._sets = [draw_experts(shape, self._format, machine.device, 0)]
        if machine.device == "cuda":
            seeds = range(1, hardware.copies_beyond_cache(self._sets[0].nbytes))
            self._sets += [draw_experts(shape, self._format, machine.device, seed) for seed in seeds]

    def contenders(self, runner: str, dtypes: Sequence[ComputeDtype], peers: bool) -> list[Contender]:
        found = [self._ours(runner, dtype) for dtype in dtypes]
        if not peers:
            return found
        return found + [peer for dtype in dtypes for peer in self._peers(dtype)]

    def measure(
        self, tokens: int, contenders: list[Contender], ceilings: dict[str, float]
    ) -> list[dict[str, Any]]:
        """One row per contender."""
        inputs = [
            draw_inputs(self._shape, tokens, seed, self._routing, self._machine.device)
            for seed in range(INPUTS)
        ]
        rows, runnable = [], []
        reference = experts_reference(*inputs[0], self._sets[0], self._spec.activation)
        floor = self._floor_us(inputs, ceilings)
        for contender in contenders:
            row: dict[str, Any] = {"runner": contender.runner, "compute_dtype": contender.dtype}
            refusal = contender.refusal
            if contender.gathered_bytes * tokens > PEER_BYTES:
                refusal = f"it gathers {contender.gathered_bytes * tokens / 1e9:.1f} GB of weights"
            if refusal:
                rows.append(row | {"error_message": f"not run: {refusal}", "peer": contender.peer})
                continue
            dtype = getattr(torch, contender.dtype)
            try:
                cast = [(x.to(dtype), *contender.routes(ids, w)) for x, ids, w in inputs]
                error = relative_error(contender.forwards[0](*cast[0]), reference)
            except Exception as failure:  # a failed point is a row, never an absent one
                rows.append(
                    row | {"error_message": f"{type(failure).__name__}: {failure}", "peer": contender.peer}
                )
                continue
            rows.append(row | {"floor_us": floor, "error": error, "peer": contender.peer})
            forwards = contender.forwards
            calls = [
                partial(forwards[i % len(forwards)], *cast[i % INPUTS])
                for i in range(max(INPUTS, len(forwards)))
            ]
            runnable.append((rows[-1], calls))
        if self._machine.device == "cpu":
            times = timing.interleaved([calls for _, calls in runnable])
            for (row, _), time_us in zip(runnable, times, strict=True):
                row["time_us"] = time_us
        else:
            for row, calls in runnable:
                row["time_us"], row["timing"] = timing.on_gpu(calls)
        for row, _ in runnable:
            row["efficiency"] = row["floor_us"] / row["time_us"]
        return rows

    def _ours(self, name: str, dtype: ComputeDtype) -> Contender:
        budget = Budget.from_limits(
            chunked_prefill_size=2048, max_prefill_tokens=16384, max_running_requests=1024
        )
        chosen = plan(
            self._spec,
            topology=Topology(tp_size=self._shape.ep, ep_size=self._shape.ep),
            budget=budget,
            hardware=self._machine,
            request=PlanRequest(moe_runner_backend=name, moe_activation_dtype=self._activations),
            compute_dtype=dtype,
        )
        name, device = chosen.decode.runner, torch.device(self._machine.device)

        def forward(experts: ExpertWeights) -> Forward:
            runner = RUNNERS.load(name)(self._spec, chosen, device)
            runner.prepare(experts)
            if experts is self._sets[0]:  # as a server's start would
                autotune(
                    runner,
                    self._spec,
                    chosen,
                    device=device,
                    device_name=self._machine.name,
                    world=SINGLE_RANK.world,
                )
            return lambda x_TH, ids_TK, weights_TK: runner(
                TokensBatch(hidden=Hidden(data=x_TH), topk_ids=ids_TK, topk_weights=weights_TK)
            )

        return Contender(runner=name, dtype=dtype, forwards=tuple(map(forward, self._sets)))

    def _peers(self, dtype: str) -> list[Contender]:
        """Those that are installed, and take such a layer."""
        layer = Layer(spec=self._spec, sets=tuple(self._sets), ranks=self._shape.ep, dtype=dtype)
        found = []
        for peer in PEERS:
            try:
                found += peer(layer)
            except Exception as failure:  # as of a point: a row, and the others go on
                name, why = peer.__name__, f"{type(failure).__name__}: {failure}"
                found.append(Contender(runner=name, dtype=dtype, forwards=(), peer=True, refusal=why))
        return found

    def _floor_us(self, inputs: list[tuple[Tensor, Tensor, Tensor]], ceilings: dict[str, float]) -> float:
        """Averaged over the inputs, whose routes touch more experts or fewer."""
        shape, rates = self._shape, [name for name in ceilings if name.endswith("_TFLOPs")]
        gemm = f"{self._rate}_TFLOPs" if f"{self._rate}_TFLOPs" in rates else rates[0]
        one = matrix_bytes(self._format, 2 * shape.intermediate, shape.hidden)
        one += matrix_bytes(self._format, shape.hidden, shape.intermediate)
        floors = []
        for _, ids_TK, _ in inputs:
            local = ids_TK[ids_TK < shape.local]
            bytes_us = len(local.unique()) * one / ceilings["copy_GBps"] / 1e3
            flops_us = len(local) * 6 * shape.hidden * shape.intermediate / ceilings[gemm] / 1e6
            floors.append(max(bytes_us, flops_us))
        return statistics.fmean(floors)


def draw_experts(shape: Shape, format: Format, device: str, seed: int) -> ExpertWeights:
    """The experts of the first rank, normal with a standard deviation of K^-0.5."""
    draw = torch.Generator(device).manual_seed(seed)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(shape.local, *sizes, generator=draw, device=device)

    def weights(rows: int, columns: int) -> PackedTensor:
        return encode(normal(rows, columns).mul_(columns**-0.5), format)

    return ExpertWeights(
        w13=weights(2 * shape.intermediate, shape.hidden),
        w2=weights(shape.hidden, shape.intermediate),
        b13=normal(2 * shape.intermediate) if shape.swiglu else None,
        b2=normal(shape.hidden) if shape.swiglu else None,
        num_experts=shape.experts,
    )


def draw_inputs(
    shape: Shape, tokens: int, seed: int, routing: str, device: str
) -> tuple[Tensor, Tensor, Tensor]:
    """x float32 [T, H], ids int32 [T, k], weights float32 [T, k] summing to 1."""
    draw = torch.Generator(device).manual_seed(seed)
    # Weights drawn with the same seed begin with the same numbers: reversed, or tokens would be their rows.
    x_TH = torch.randn(tokens, shape.hidden, generator=draw, device=device).flip(-1)
    E, k = shape.experts, shape.top_k
    skew = _skew(routing) or 0.0
    rank_E = torch.zeros(E, device=device)
    if skew:
        rank_E = torch.randperm(E, generator=draw, device=device)
    ids_TK = torch.multinomial((1.0 + rank_E).pow(-skew).expand(tokens, E), k, generator=draw)
    weights_TK = torch.rand(tokens, k, generator=draw, device=device).softmax(dim=-1)
    return x_TH, ids_TK.int(), weights_TK


def _skew(routing: str) -> float | None:
    """The exponent of Zipf's law, 0 for uniform routes; None for a routing that is not known."""
    if routing in ("uniform", "zipf"):
        return float(routing == "zipf")
    name, _, exponent = routing.partition("-")
    try:
        return float(exponent) if name == "zipf" and 0 < float(exponent) < math.inf else None
    except ValueError:
        return None


def show(content: dict[str, Any]) -> None:
    """The rows, and against each group's fastest peer how many times faster a runner is."""
    table = Table(
        "shape", "format", "tokens", "runner", "dtype", "us", "of floor", "error", "x fastest peer",
        title=f"MoE layer, {content['device']}",
    )  # fmt: skip
    groups: dict[tuple, list[float]] = {}
    for row in content["rows"]:
        if row.get("peer") and "time_us" in row:
            groups.setdefault((row["shape"], row["format"], row["tokens"]), []).append(row["time_us"])
    for row in content["rows"]:
        head = [row["shape"], row["format"], str(row["tokens"]), row["runner"], row["compute_dtype"]]
        if "error_message" in row:
            table.add_row(*head, "failed", "", "", row["error_message"])
            continue
        best = min(groups.get((row["shape"], row["format"], row["tokens"]), []), default=None)
        ratio = "" if best is None else f"{best / row['time_us']:.2f}"
        table.add_row(
            *head, f"{row['time_us']:.0f}", f"{row['efficiency']:.2f}", f"{row['error']:.1e}", ratio
        )
    console = Console()
    console.width = max(console.width, TABLE_WIDTH)  # a pipe has 80 columns
    console.print(table)
