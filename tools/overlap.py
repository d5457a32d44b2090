"""What a shared expert costs: one MoE layer with it in a CUDA graph, on one stream and on two.

    python -m tools.overlap --world-size 2 --output benchmarks/results/overlap-nvidia-h200-x2-DATE.json

The layer is Qwen2-57B-A14B's, its experts spread over the GPUs with random bf16 weights, each GPU with tokens
of its own. Times are medians over replays of the slowest rank's. The timeline is one replay's kernels on rank
0 as torch's profiler saw them: on the two streams, from the layer's first to its last, in microseconds.

Legend: T tokens of a rank, H hidden, E experts.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import multiprocessing as processes
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from tools.command_line import parser_for
from tools.timeline import on_gpu, recorded
from turnout.bench.results import gpu_driver, result, save
from turnout.errors import PlanRefused
from turnout.formats.experts import ExpertWeights
from turnout.formats.packed import PackedTensor
from turnout.moe import MoELayer, plan
from turnout.moe.budget import Budget
from turnout.moe.capabilities.declared import DISPATCHERS
from turnout.moe.plan import PlanRequest
from turnout.moe.spec import MoESpec
from turnout.parallel import hardware
from turnout.parallel.group_exchange import gather_values
from turnout.parallel.groups import Groups, connect, disconnect
from turnout.parallel.topology import Topology

HIDDEN, INNER, SHARED, EXPERTS, TOP_K = 3584, 2560, 20480, 64, 8  # Qwen2-57B-A14B
TOKENS = (1, 16, 64, 256)  # of each rank
SHOWN = 16  # tokens of the timelines
MOST = 256
LAYERS = 4  # in a graph, so that what lies between replays does not count
REPLAYS = 30


class SharedExpert:
    """A gated MLP; weights [2S, H] and [H, S]."""

    def __init__(self, device: torch.device) -> None:
        self._gate_up = torch.randn(2 * SHARED, HIDDEN, device=device).bfloat16() * HIDDEN**-0.5
        self._down = torch.randn(HIDDEN, SHARED, device=device).bfloat16() * SHARED**-0.5

    def __call__(self, x_TH: Tensor) -> Tensor:
        gate, up = F.linear(x_TH, self._gate_up).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self._down)


class Bench:
    """One rank. Layers of one dispatcher share weights."""

    def __init__(self, groups: Groups, device: torch.device) -> None:
        self._groups, self._device = groups, device
        held = EXPERTS // groups.topology.ep_size
        self._spec = MoESpec(hidden_size=HIDDEN, intermediate_size=INNER, num_experts=EXPERTS, top_k=TOP_K)
        self._experts = ExpertWeights(
            w13=self._weights(held, 2 * INNER, HIDDEN),
            w2=self._weights(held, HIDDEN, INNER),
            first_expert=groups.world.rank * held,
            num_experts=EXPERTS,
        )
        self._shared = SharedExpert(device)
        self._router_EH = torch.randn(EXPERTS, HIDDEN, device=device).bfloat16()

    def rows(self, dispatcher: str) -> list[dict[str, Any]]:
        layer = {overlap: self._layer(dispatcher, overlap) for overlap in (False, True)}
        found = []
        for tokens in TOKENS:
            x_TH = torch.randn(tokens, HIDDEN, device=self._device).bfloat16()
            graphs = {overlap: self._capture(layer[overlap], x_TH) for overlap in layer}
            outs = {overlap: out.clone() for overlap, (_, out) in graphs.items()}
            times = {overlap: self._median_us(graph.replay) for overlap, (graph, _) in graphs.items()}
            found.append(
                {
                    "dispatcher": dispatcher,
                    "tokens": tokens,
                    "one_stream_us": times[False],
                    "two_streams_us": times[True],
                    "same": bool(torch.equal(outs[False], outs[True])),
                }
            )
            if tokens == SHOWN:
                found[-1]["timeline"] = self._timeline(graphs[True][0].replay)
        return found

    def _weights(self, *shape: int) -> PackedTensor:
        data = torch.empty(shape, dtype=torch.bfloat16, device=self._device).normal_(0, shape[-1] ** -0.5)
        return PackedTensor(format="bf16", data=data)

    def _layer(self, dispatcher: str, overlap: bool) -> MoELayer:
        topology = self._groups.topology
        budget = Budget.from_limits(
            chunked_prefill_size=MOST,
            max_prefill_tokens=MOST,
            max_running_requests=MOST,
            dp_size=topology.dp_size,
        )
        chosen = plan(
            self._spec,
            topology=topology,
            budget=budget,
            hardware=hardware.detect("cuda"),
            request=PlanRequest(moe_a2a_backend=dispatcher),
            compute_dtype="bfloat16",
        )
        return MoELayer(
            self._spec,
            replace(chosen, overlap_shared_expert=overlap),
            router_weight=self._router_EH,
            experts=self._experts,
            shared_expert=self._shared,
            groups=self._groups,
        )

    def _capture(self, layer: MoELayer, x_TH: Tensor) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        tokens = [len(x_TH)] * self._groups.topology.dp_size

        def run() -> Tensor:
            out_TH = x_TH
            for _ in range(LAYERS):
                out_TH = F.rms_norm(layer(out_TH, "decode", tokens), (HIDDEN,))
            return out_TH

        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(2):
                run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            out_TH = run()
        graph.replay()
        torch.cuda.synchronize()  # what follows may load kernels, which waits for those that wait for peers
        return graph, out_TH

    def _median_us(self, replay: Callable[[], None]) -> float:
        """Of a layer, on the slowest rank."""
        times = []
        for _ in range(REPLAYS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._groups.world.all_reduce(torch.zeros(1, device=self._device))  # begin together
            start.record()
            replay()
            end.record()
            torch.cuda.synchronize()
            times.append(1000 * start.elapsed_time(end) / LAYERS)
        slowest = map(max, zip(*gather_values(self._groups.world, times), strict=True))
        return sorted(slowest)[REPLAYS // 2]

    def _timeline(self, replay: Callable[[], None]) -> list[dict[str, Any]]:
        """Kernels of the second of the graph's layers, by start."""
        replay()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            replay()
            torch.cuda.synchronize()
        kernels = on_gpu(seen)
        ends = [i for i, kernel in enumerate(kernels) if "layer_norm" in kernel.name or "rms" in kernel.name]
        shown = kernels[ends[0] + 1 : ends[1] + 1] if len(ends) > 1 else kernels
        return recorded(shown)


def run(rank: int, size: int, init_method: str, output: Path | None) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    topology = Topology(tp_size=size, dp_size=size, ep_size=size, enable_dp_attention=size > 1, rank=rank)
    groups = connect(topology, init_method=init_method, device=device)
    rows = []
    with torch.inference_mode():
        torch.manual_seed(rank)
        bench = Bench(groups, device)
        for name, declared in DISPATCHERS.entries.items():
            with suppress(PlanRefused):  # what is not for this machine is left out
                rows += bench.rows(name) if declared.graph_safe else []
    if rank == 0:
        name = torch.cuda.get_device_name(device)
        content = result("overlap", rows, device=name, devices=size, driver=gpu_driver())
        for row in rows:
            print({key: value for key, value in row.items() if key != "timeline"}, flush=True)
        if output is not None:
            save(content, output)
    torch.cuda.synchronize()
    disconnect()


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if torch.cuda.device_count() < options.world_size:
        parser.error(f"needs {options.world_size} GPUs, and torch finds {torch.cuda.device_count()}")
    with tempfile.TemporaryDirectory() as folder:
        init_method = f"file://{folder}/rendezvous"
        arguments = (options.world_size, init_method, options.output)
        processes.spawn(run, arguments, nprocs=options.world_size)


if __name__ == "__main__":
    main()
