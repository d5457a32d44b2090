"""What the Hopper runners of two checkouts launch: python -m tools.compare_kernels OLD [NEW]

Layers and batch sizes are drawn from a seed. Each checkout runs them in a process of its own, on tensors
without memory, and its launches are compared: kernel, grid, constants, numbers, shapes, and where in the
workspace each tensor lies; by rule, for rows by expert, and with every configuration that
`turnout tune` would time.
No GPU is needed. Whether the kernels compile to the same PTX: tools/compiled_kernels.py.

Prints the first differences and exits with 1 if there are any.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

if TYPE_CHECKING:
    from turnout.formats.experts import ExpertWeights
    from turnout.moe.spec import MoESpec
    from turnout.vocabulary import Format

ROOT = Path(__file__).parents[1]
SHOWN = 3
PROCESSORS = 132
EXPERTS = (8, 16, 32, 60, 64, 96, 128, 256, 512)
HIDDEN = (1024, 2048, 2816, 2880, 4096, 5120, 7168)
INNER = (512, 704, 768, 1408, 2048, 2880, 3072)


def launches(seed: int) -> dict[str, Any]:
    """Of one random layer in this process's checkout: by what was run."""
    import torch

    from tests.moe.build import make_plan
    from turnout.moe.backends.hopper import runner as hopper
    from turnout.moe.backends.hopper.kernels import candidates
    from turnout.moe.backends.hopper.tile_config import LayerTiles
    from turnout.moe.batch import ExpertsBatch, Hidden, TokensBatch
    from turnout.vocabulary import Format, Layout

    # The earlier name of the class, for checkouts that have it.
    kind = getattr(hopper, "HopperRunner", None) or hopper.TritonRunner
    draw = random.Random(seed)
    meta = torch.device("meta")
    format, activations = draw.choice(
        [(Format.BF16, "bf16"), (Format.FP8, "fp8"), (Format.MXFP4, "bf16"), (Format.NVFP4, "bf16"),
         (Format.MXFP4, "fp8")]
    )  # fmt: skip
    spec, local = _random_layer(draw, format)
    experts = _experts(spec, local)
    found: dict[str, Any] = {"layer": str((spec, local, activations))}
    deterministic = draw.random() < 0.2
    tokens = [1 << draw.randrange(14) for _ in range(3)]
    for layout in (Layout.TOKENS, Layout.BATCHED_EXPERTS):
        plan = make_plan(
            spec, runner="triton", layout=layout, activation_format=activations, weight_storage="packed",
            compute_dtype="bfloat16", first=spec.num_experts - local, count=local, max_tokens=8192,
        )  # fmt: skip
        runner = kind(spec, replace(plan, deterministic=deterministic), meta)
        runner.prepare(experts)
        if layout == Layout.BATCHED_EXPERTS:
            x = torch.empty(local, 64, spec.hidden_size, dtype=torch.bfloat16, device=meta)
            counts = torch.empty(local, dtype=torch.int32, device=meta)
            found["batched"] = _recorded(runner, ExpertsBatch(hidden=Hidden(data=x), counts=counts))
            continue
        for T in tokens:
            batch = TokensBatch(
                hidden=Hidden(data=torch.empty(T, spec.hidden_size, dtype=torch.bfloat16, device=meta)),
                topk_ids=torch.empty(T, spec.top_k, dtype=torch.int32, device=meta),
                topk_weights=torch.empty(T, spec.top_k, device=meta),
            )
            found[f"{T} tokens"] = _recorded(runner, batch)
            for choices in candidates(runner.shape, T):
                pairs = [(first, choices.second[0]) for first in choices.first]
                for tiles in (*pairs, *((choices.first[0], second) for second in choices.second)):
                    runner.use_tiles(((T, LayerTiles(*tiles)),))
                    found[f"{T} tokens, {tiles}"] = _recorded(runner, batch)
            runner.use_tiles(())
    return found


def _random_layer(draw: random.Random, format: Format) -> tuple[MoESpec, int]:
    """Its spec, and how many of its experts the rank holds."""
    from tests.moe.build import ACTIVATIONS
    from turnout.moe.spec import MoESpec
    from turnout.vocabulary import Format

    unit = 128 if format == Format.FP8 else 32
    E = draw.choice(EXPERTS)
    local = E // draw.choice([n for n in (1, 1, 2, 4, 8) if E % n == 0])
    spec = MoESpec(
        hidden_size=draw.choice(HIDDEN) // unit * unit,
        intermediate_size=draw.choice(INNER) // unit * unit,
        num_experts=E,
        top_k=draw.choice([1, 2, 4, 6]),
        activation=draw.choice(list(ACTIVATIONS.values())),
        expert_bias=draw.random() < 0.3,
        format=format,
    )
    return spec, local


def _experts(spec: MoESpec, local: int) -> ExpertWeights:
    """Weights without memory."""
    import torch

    from turnout.formats.experts import ExpertWeights

    format, E, meta = spec.format, spec.num_experts, torch.device("meta")
    bias = [torch.empty(local, rows, device=meta) for rows in (spec.w13_rows, spec.hidden_size)]
    return ExpertWeights(
        w13=_weights(format, local, spec.w13_rows, spec.hidden_size),
        w2=_weights(format, local, spec.hidden_size, spec.intermediate_size),
        b13=bias[0] if spec.expert_bias else None,
        b2=bias[1] if spec.expert_bias else None,
        num_experts=E,
    )


def _weights(format: str, *shape: int) -> Any:
    import torch

    from turnout.formats.packed import PackedTensor
    from turnout.formats.spec import FORMATS

    E, N, K = shape
    rows, group = FORMATS[format].block_rows, FORMATS[format].group
    types = {
        "bf16": (torch.bfloat16, None),
        "fp8": (torch.float8_e4m3fn, torch.float32),
        "nvfp4": (torch.uint8, torch.float8_e4m3fn),
        "mxfp4": (torch.uint8, torch.uint8),
    }
    values, scales = types[format]
    columns = K * FORMATS[format].bits // (8 * values.itemsize)
    return PackedTensor(
        format=format,
        data=torch.empty(E, N, columns, dtype=values, device="meta"),
        scale=scales and torch.empty(E, -(-N // rows), -(-K // group), dtype=scales, device="meta"),
        global_scale=torch.empty(E, device="meta") if format == "nvfp4" else None,
    )


def _recorded(runner: Any, batch: Any) -> list[Any]:
    """[kernel, grid, arguments, options] of every launch of one call."""
    from triton.runtime.jit import JITFunction

    found: list[Any] = []
    storages: dict[int, int] = {}
    kept: list[Any] = []  # no address is used twice

    def plain(value: Any) -> Any:
        import torch
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        kept.append(value)
        if isinstance(value, TensorDescriptor):
            return ["box", plain(value.base), list(value.block_shape), repr(value.layout)]
        if isinstance(value, torch.Tensor):
            storage = storages.setdefault(value.untyped_storage()._cdata, len(storages))
            place = [storage, value.storage_offset() * value.element_size()]
            return [str(value.dtype), list(value.shape), list(value.stride()), *place]
        return repr(value)

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        named = {param.name: plain(value) for param, value in zip(self.params, args, strict=False)}
        found.append([self.fn.__name__, list(grid), named, {k: plain(v) for k, v in sorted(options.items())}])

    with patch.object(JITFunction, "run", run):
        runner(batch)
    return found


def record_launches(count: int) -> None:
    """A line of JSON for each layer, to standard output."""
    import torch

    from turnout.moe.backends.hopper import fragments, fragments_fp8
    from turnout.moe.backends.hopper.weights import Matrix

    device = SimpleNamespace(multi_processor_count=PROCESSORS)
    with (
        torch.inference_mode(),
        patch.object(torch.cuda, "get_device_properties", lambda _: device),
        patch.object(fragments, "fill", lambda *_, **__: None),  # there are no values
        patch.object(fragments_fp8, "fill_fp8", lambda *_, **__: None),
        patch.object(Matrix, "_load_rows", lambda *_: None),
    ):
        for seed in range(count):
            print(json.dumps(launches(seed)), flush=True)


def recorded(checkout: Path, *arguments: str) -> list[Any]:
    """What this file, run on the packages of `checkout`, prints."""
    command = [sys.executable, __file__, *arguments, str(checkout)]
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    done = subprocess.run(command, cwd=checkout, env=environment, stdout=subprocess.PIPE, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("old", type=Path, help="a checkout")
    parser.add_argument("new", type=Path, nargs="?", default=ROOT)
    parser.add_argument("--layers", type=int, default=200)
    parser.add_argument("--record", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.record:
        record_launches(args.layers)
        return 0
    what = ["--record", "--layers", str(args.layers)]
    old, new = (recorded(checkout.resolve(), *what) for checkout in (args.old, args.new))
    launched = sum(len(run) for layer in old for key, run in layer.items() if key != "layer")
    differing = [(a, b) for a, b in zip_longest(old, new) if a != b]
    for a, b in differing[:SHOWN]:
        print(f"old: {json.dumps(a)[:2000]}\nnew: {json.dumps(b)[:2000]}\n")
    print(f"{len(old)} layers, {launched} launches; {len(differing)} differ")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
