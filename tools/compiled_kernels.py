"""Whether GPU kernels compile to the same PTX as before, on a machine without a GPU:

    python -m tools.compiled_kernels record OLD.json [--each N] [--only PATTERN] [--ptxas]
    python -m tools.compiled_kernels compare OLD.json NEW.json

`record` asks for the kernels of this checkout and compiles each variant for an H100 or H200, as far as PTX:
those outside the experts as tests of warming up ask for them, Hopper's expert kernels as the shipped tables
of tile configurations and the rule do, the exchanges over NVLink, those that load weights, and what only
tools time. `compare` prints
the variants whose PTX differs, and those that only one record has; it exits with 1 if there are any. Lines
and names of files do not count, nor does the kernel's name.

--each takes no more than N variants of each kernel; --only those of kernels whose module and name match a
regular expression; --ptxas also assembles them, for registers and spills, and `compare` shows where these
differ.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from triton import __version__, knobs
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.runtime.jit import JITFunction, create_function_from_signature

TARGET = GPUTarget("cuda", 90, 32)
BACKEND = make_backend(TARGET)
SIZES = (1, 2, 7, 16, 40, 64, 300, 4096)  # tokens of a step or a prompt, for kernels outside the experts
BATCHES = (1, 2, 8, 64, 512, 8192)  # tokens for which the rule is asked
SHOWN = 20
NVLINK = ((2, 4096), (4, 7168), (8, 2048))  # ranks, hidden size


@dataclass(frozen=True, kw_only=True, eq=False)
class Variant:
    """A kernel and all that Triton compiles it for."""

    kernel: Any
    signature: dict[str, str]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: Any
    asked: dict[str, Any]  # the options that the launch names

    @property
    def name(self) -> str:
        return str(self.kernel.fn.__name__)

    @property
    def made_of(self) -> str:
        """The kernel, its arguments' types and constants by name, and its options, in one line."""
        module, parts = self.kernel.fn.__module__.removeprefix("turnout.kernels."), []
        for place, (name, kind) in enumerate(self.signature.items()):
            if kind == "constexpr":
                parts.append(f"{name}={self.constants.get((place,))!r}")
            else:
                parts.append(f"{name}: {kind}" + "/16" * ((place,) in self.attributes))
        options = [f"{name}={value!r}" for name, value in sorted(self.asked.items())]
        return f"{module}.{self.name}({', '.join(parts)}) {' '.join(options)}".rstrip()


@contextmanager
def asking() -> Iterator[dict[str, Variant]]:
    """Calls of kernels launch and compile nothing: what they would have compiled is here, by what it is made
    of, as Triton's own binder has it."""
    found: dict[str, Variant] = {}
    binders: dict[JITFunction, Any] = {}

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        if self not in binders:
            binders[self] = create_function_from_signature(self.signature, self.params, BACKEND)
        named = {name: value for name, value in options.items() if name not in self.arg_names}
        options |= {"debug": False, "instrumentation_mode": ""}
        values, specialization, rest = binders[self](*args, **options)
        parsed, signature, constants, attributes = self._pack_args(
            BACKEND, options, values, specialization, rest
        )
        variant = Variant(
            kernel=self, signature=signature, constants=constants, attributes=attributes, options=parsed,
            asked=named,
        )  # fmt: skip
        found.setdefault(variant.made_of, variant)

    with patch.object(JITFunction, "run", run):
        yield found


@contextmanager
def early_launches() -> Iterator[None]:
    """Kernels are asked for as on Hopper, where they begin before their predecessors end."""
    import tests.kernels.common.test_warmup  # noqa: F401  the modules that import the function

    with ExitStack() as patches:
        for name, module in list(sys.modules.items()):
            if name.startswith("turnout.") and hasattr(module, "launches_early"):
                patches.enter_context(patch.object(module, "launches_early", lambda _: True))
        yield


def outside_experts() -> None:
    """Asks for the kernels of attention, norms, routing, sampling and dense products."""
    from tests.kernels.common.test_warmup import PARTS

    for part in PARTS:
        for size in SIZES:
            part(size)


def timed_by_tools() -> None:
    """Asks for the tiles of dense FP8 products that tools time, also those that models never take."""
    from tests.kernels.common.test_warmup import b16
    from tools.dense_fp8 import TILES
    from turnout.kernels.hopper import dense_fp8

    H = 4096
    weight, scale = torch.empty(H, H, dtype=torch.float8_e4m3fn), torch.empty(H // 128, H)
    for tile in TILES:
        if isinstance(tile, dense_fp8.Tile):
            dense_fp8.parts(b16(128, H), weight, scale, tile)


def of_experts() -> None:
    """Asks for Hopper's expert kernels: by the shipped tables and by the rule, of bench's layers."""
    from tests.moe.backends.hopper.test_warmup import META, MOST, make_runner
    from turnout.bench.moe import SHAPES
    from turnout.engine.warmup import empty_batch
    from turnout.moe.backends.hopper import tuning_tables
    from turnout.moe.batch import ExpertsBatch, Hidden
    from turnout.vocabulary import Format, Layout

    tables = [
        table for file in sorted(tuning_tables.SHIPPED.glob("*.json"))
        for table in tuning_tables.msgspec.json.decode(file.read_bytes(), type=tuning_tables.TileFile).tables
    ]  # fmt: skip
    formats = [("bf16", "bf16"), ("nvfp4", "bf16"), ("mxfp4", "bf16"), ("mxfp4", "fp8"), ("fp8", "fp8")]
    with pytest.MonkeyPatch.context() as patched:
        for layer in SHAPES.values():
            for format, activations in formats:
                spec = layer.spec(Format(format))
                runner = make_runner(spec, layer.local, activations, patched)
                table = next((table for table in tables if table.shape == runner.shape), None)
                for tokens in BATCHES:
                    runner(empty_batch(spec, tokens, torch.bfloat16, META))
                for entry in table.entries if table else ():
                    runner.use_tiles(((entry.tokens, entry.tiles),))
                    runner(empty_batch(spec, min(entry.tokens, MOST), torch.bfloat16, META))
                runner = make_runner(spec, layer.local, activations, patched, Layout.BATCHED_EXPERTS)
                for capacity in (16, 256):
                    x = torch.empty(
                        layer.local, capacity, spec.hidden_size, dtype=torch.bfloat16, device=META
                    )
                    counts = torch.empty(layer.local, dtype=torch.int32, device=META)
                    runner(ExpertsBatch(hidden=Hidden(data=x), counts=counts))


def of_nvlink() -> None:
    """Asks for the exchanges of ranks by NVLink, in all formats, of few tokens and of many."""
    from turnout.kernels.nvlink import batched_experts, links
    from turnout.moe.backends.nvlink.warmup import exchange
    from turnout.vocabulary import Format

    one = torch.zeros(1, dtype=torch.int64)
    names = ("counts", "meta", "arrived", "hidden", "scales", "landing", "returned", "results", "landed")
    with patch.object(links.Links, "_programs", lambda _, warps: 132 * 16 // warps):
        for ranks, hidden in NVLINK:
            some = links.Links(
                rank=1, addresses=torch.zeros(ranks, dtype=torch.int64), failed=one, told=one.clone(),
                epochs=torch.zeros(2, dtype=torch.int64), starts=dict.fromkeys(names, 4096),
                rows=8192 * ranks, few=64, hidden=hidden, top_k=8, experts_per_slice=32, expert_tp=1,
                limit_seconds=30.0,
            )  # fmt: skip
            for wire in (Format.BF16, Format.FP8, Format.NVFP4):
                for tokens, most in ((8, 8), (8, 8192), (8192, 8192)):
                    for back in (Format.BF16, Format.FP8):
                        exchange(some, tokens, most, torch.bfloat16, wire, back)
    rows, ids = torch.empty(64, 4096, dtype=torch.bfloat16), torch.empty(64, 8, dtype=torch.int32)
    places, _ = batched_experts.places(ids, 32, 32)
    y = batched_experts.spread(rows, ids, places, 32)
    batched_experts.weigh(y, ids, places, torch.empty(64, 8))


def of_loading() -> None:
    """Asks for the kernel that puts 4-bit weights into Hopper's order, of each format."""
    from turnout.kernels.hopper.fold import fold

    packed = torch.empty(1, 64, 32, dtype=torch.uint8)
    codes, scales, top = (torch.empty(1, 1, 1, size, dtype=torch.int32) for size in (512, 64, 1))
    for format, group in (("nvfp4", 16), ("mxfp4", 32), ("int4", 32)):
        scale = torch.empty(1, 64, 64 // group, dtype=torch.int16 if format == "int4" else torch.uint8)
        fold(packed, scale, top, codes, scales, format=format, group=group, paired=True)


def variants(only: str, each: int) -> list[Variant]:
    """What this checkout asks for, in one order. each: of a kernel so many at most, apart from each other; 0:
    all."""
    with torch.inference_mode(), early_launches(), asking() as found:
        for ask in (outside_experts, timed_by_tools, of_experts, of_nvlink, of_loading):
            ask()
    by_name: dict[str, list[Variant]] = {}
    for made_of, variant in sorted(found.items()):
        name = made_of.split("(")[0]
        if re.search(only, name):
            by_name.setdefault(name, []).append(variant)
    return [
        variant for of_one in by_name.values()
        for variant in of_one[:: -(-len(of_one) // (each or len(of_one)))]
    ]  # fmt: skip


def ptx(variant: Variant) -> tuple[str, int]:
    """What Triton compiles it to, without line numbers and with its name left out, and the bytes of shared
    memory that it needs."""
    gluon = isinstance(variant.kernel, GluonJITFunction)
    language = GluonASTSource if gluon else ASTSource
    source = language(variant.kernel, variant.signature, variant.constants, variant.attributes)
    options, context = variant.options, ir.context()
    ir.load_dialects(context)
    BACKEND.load_dialects(context)
    stages: dict[str, Any] = {}
    BACKEND.add_stages(stages, options, source.language)
    metadata: dict[str, Any] = {"target": TARGET, **options.__dict__}
    codegen = BACKEND.get_codegen_implementation(options)
    with knobs.compilation.scope():
        knobs.compilation.disable_line_info = True
        module = source.make_ir(TARGET, options, codegen, BACKEND.get_module_map(), context)
        for name in list(stages)[list(stages).index(source.ext) :]:
            if name != "cubin":
                module = stages[name](module, metadata)
    text = re.sub(r"//.*|^\s*\.(loc|file)\b.*", "", module.replace(metadata["name"], "kernel"), flags=re.M)
    return re.sub(r"\s*\n\s*", "\n", text), metadata["shared"]


def assembled(text: str) -> dict[str, int]:
    """What ptxas says of it: registers, and bytes that are spilled."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.ptx"
        file.write_text(text)
        command = [knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", file, "-o", file.with_suffix(".o")]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spills = sum(int(n) for n in re.findall(r"(\d+) bytes spill", said))
    return {"registers": max(int(n) for n in re.findall(r"Used (\d+) registers", said)), "spills": spills}


def record(chosen: list[Variant], ptxas: bool) -> dict[str, Any]:
    kernels = {}
    began = time.monotonic()
    for done, variant in enumerate(chosen, 1):
        text, shared = ptx(variant)
        found = {"ptx": hashlib.sha256(text.encode()).hexdigest(), "shared": shared}
        kernels[variant.made_of] = found | (assembled(text) if ptxas else {})
        if done % 50 == 0:
            print(f"{done} of {len(chosen)}, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return {"triton": __version__, "target": "sm_90a", "kernels": kernels}


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """A line for each variant that is not the same in both records."""
    if old["triton"] != new["triton"]:
        return [f"compiled by Triton {old['triton']} and {new['triton']}: record both with the same"]
    before, after = old["kernels"], new["kernels"]
    lines = [f"only in the first: {made_of}" for made_of in before if made_of not in after]
    lines += [f"only in the second: {made_of}" for made_of in after if made_of not in before]
    for made_of in before.keys() & after.keys():
        a, b = before[made_of], after[made_of]
        if a["ptx"] != b["ptx"]:
            moved = [f"{k} {a[k]} -> {b[k]}" for k in a if k != "ptx" and k in b and a[k] != b[k]]
            lines.append(f"differs{''.join(f', {change}' for change in moved)}: {made_of}")
    return sorted(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    recording = verbs.add_parser("record")
    recording.add_argument("file", type=Path)
    recording.add_argument("--each", type=int, default=0, metavar="N")
    recording.add_argument("--only", default="", metavar="PATTERN")
    recording.add_argument("--ptxas", action="store_true")
    comparing = verbs.add_parser("compare")
    comparing.add_argument("old", type=Path)
    comparing.add_argument("new", type=Path)
    args = parser.parse_args()
    if args.verb == "record":
        chosen = variants(args.only, args.each)
        began = time.monotonic()
        content = record(chosen, args.ptxas)
        args.file.write_text(json.dumps(content, indent=1) + "\n")
        print(f"{len(content['kernels'])} variants compiled in {time.monotonic() - began:.0f} s: {args.file}")
        return 0
    old, new = (json.loads(file.read_text()) for file in (args.old, args.new))
    lines = differences(old, new)
    print("\n".join(line[:1000] for line in lines[:SHOWN]))
    print(f"{len(old['kernels'])} and {len(new['kernels'])} variants; {len(lines)} differences")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
