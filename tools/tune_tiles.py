"""Measure the tables of tilings that ship with the package: python -m tools.tune_tiles OUT.json

For this machine's GPU, the benchmark's shapes and every format of weights that they hold, or some of them.
Each layer is written as it ends, and what OUT.json holds of these kernels already is not measured again. What
was measured in parts, on another day or GPU of the same name, is put together by

    python -m tools.tune_tiles turnout/assets/tuning/DEVICE.json --merge OLD.json NEW.json ...

which keeps of each layer the last table, and none of kernels that have changed since (layer_shape.REVISIONS).
"""

from __future__ import annotations

import argparse
import subprocess
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import msgspec
import torch

from turnout.bench.moe import SHAPES, draw_experts, draw_inputs
from turnout.errors import UserError
from turnout.kernels.common.compilation import compilers, submit
from turnout.moe.backends.hopper import tuning_tables
from turnout.moe.backends.hopper.autotune import TOKENS, tile_times, to_compile
from turnout.moe.backends.hopper.layer_shape import REVISIONS, LayerShape
from turnout.moe.backends.hopper.runner import HopperRunner
from turnout.moe.backends.hopper.tuning_tables import Table, TileFile
from turnout.moe.batch import Hidden, TokensBatch
from turnout.moe.budget import Budget
from turnout.moe.plan import PlanRequest, plan
from turnout.parallel import hardware
from turnout.parallel.topology import Topology

FORMATS = ("mxfp4", "nvfp4", "bf16", "fp8")
AHEAD = 4  # layers whose kernels are compiled while one is timed


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer to tune, with weights on the GPU, and the kernels that are being compiled for it."""

    name: str
    runners: list[HopperRunner]
    batches: Callable[[int], list[TokensBatch]]
    compiling: list[Future[None]]


def prepare(name: str, format: str, machine: hardware.Hardware, most: int, pool: Executor) -> Layer:
    shape = SHAPES[name]
    spec = shape.spec(format)
    chosen = plan(
        spec,
        topology=Topology(tp_size=shape.ep, ep_size=shape.ep),
        budget=Budget.from_limits(chunked_prefill_size=most, max_prefill_tokens=most, max_running_requests=1),
        hardware=machine,
        request=PlanRequest(moe_runner_backend="hopper"),
        compute_dtype="bfloat16",
        tiles=(),
    )
    experts = draw_experts(shape, format, machine.device, 0)
    runners = []
    for _ in range(hardware.copies_beyond_cache(experts.nbytes)):
        runners.append(HopperRunner(spec, chosen, torch.device(machine.device)))
        runners[-1].prepare(experts)

    @cache
    def batches(tokens: int) -> list[TokensBatch]:
        inputs = [draw_inputs(shape, tokens, seed, "uniform", machine.device) for seed in range(4)]
        return [
            TokensBatch(hidden=Hidden(data=x.bfloat16()), topk_ids=ids, topk_weights=weights)
            for x, ids, weights in inputs
        ]

    compiling = submit(pool, to_compile(runners[0], batches, most))
    return Layer(name=f"{name} {format}", runners=runners, batches=batches, compiling=compiling)


def measure(layer: Layer, most: int) -> Table:
    started = time.monotonic()
    wait(layer.compiling)
    compiled = time.monotonic()
    entries = tile_times(layer.runners, layer.batches, most, lambda done, of: None)
    gains = ", ".join(f"{entry.tokens}: {entry.rule_us / entry.us:.2f}" for entry in entries)
    waited, took = compiled - started, time.monotonic() - compiled
    print(f"{layer.name}: {len(layer.compiling)} kernels, {waited:.1f} + {took:.1f} s; {gains}", flush=True)
    return Table.now(layer.runners[0].shape, entries, _commit())


def begun(output: Path, device: str) -> list[Table]:
    """What an earlier call measured, as far as it counts with these kernels on `device`."""
    if not output.exists():
        return []
    content = msgspec.json.decode(output.read_bytes(), type=TileFile)
    return list(merged([content]).tables) if content.device == device else []


def merged(files: Sequence[TileFile]) -> TileFile:
    """All tables that count here, the later ones in place of earlier ones of the same layer. Raises
    UserError for files of more than one device."""
    devices = {content.device for content in files}
    if len(devices) != 1:
        raise UserError(f"tables of more than one device: {', '.join(sorted(devices))}")
    tables: dict[LayerShape, Table] = {}
    for content in files:
        if content.versions == tuning_tables.versions():
            fresh = (table for table in content.tables if table.revision == REVISIONS[table.shape.weights])
            tables |= {table.shape: table for table in fresh}
    return TileFile(device=devices.pop(), versions=tuning_tables.versions(), tables=tuple(tables.values()))


def left_of(formats: Sequence[str], names: Sequence[str], tables: Sequence[Table]) -> list[tuple[str, str]]:
    """The layers, by name and format, that no table is of."""
    done = {table.shape for table in tables}
    every = [(name, format) for format in formats for name in names if _holds(name, format)]
    return [layer for layer in every if layer_shape(*layer) not in done]


def layer_shape(name: str, format: str) -> LayerShape:
    """As the runner of the layer has it."""
    shape = SHAPES[name]
    return LayerShape.of(shape.spec(format), num_local_experts=shape.local, expert_tp=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--most", type=int, default=TOKENS[-1])
    parser.add_argument("--shape", action="append", choices=SHAPES)
    parser.add_argument("--format", action="append", choices=FORMATS)
    parser.add_argument("--merge", nargs="+", type=Path, metavar="PART", help="measure nothing")
    args = parser.parse_args()
    if args.merge:
        parts = [msgspec.json.decode(part.read_bytes(), type=TileFile) for part in args.merge]
        tuning_tables.write(args.output, merged(parts))
        return
    machine = hardware.detect("cuda")
    names = args.shape or [name for name in SHAPES if name != "cpu-small"]
    tables = begun(args.output, machine.name)
    todo = left_of(args.format or FORMATS, names, tables)
    with compilers() as pool, torch.inference_mode():
        ahead: deque[Layer] = deque()
        while todo or ahead:
            while todo and len(ahead) < AHEAD:
                ahead.append(prepare(*todo.pop(0), machine, args.most, pool))
            tables.append(measure(ahead.popleft(), args.most))
            content = TileFile(device=machine.name, versions=tuning_tables.versions(), tables=tuple(tables))
            tuning_tables.write(args.output, content)


def _holds(name: str, format: str) -> bool:
    return format != "fp8" or not (SHAPES[name].hidden % 128 or SHAPES[name].intermediate % 128)


def _commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


if __name__ == "__main__":
    main()
