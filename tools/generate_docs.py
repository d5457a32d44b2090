"""Write the parts of the documentation that are facts of the code or of results: docs/backends.md,
docs/formats.md, docs/interface.md, docs/metrics.md, docs/gpu-tests.md, docs/grafana.json, and between their
markers the tables of support, architectures and GPUs in README.md, the error bounds in docs/operations.md
and the results in docs/performance.md and docs/notes.

    python -m tools.generate_docs            write what is out of date
    python -m tools.generate_docs --check    exit with 1 if anything is (a test runs this)
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from tools import gpu_tests, interface
from tools.architectures import architectures
from tools.fitting import fitting
from tools.grafana import grafana
from tools.headline import headline
from tools.performance import tables
from tools.proven import Runs, backends_run, with_runs
from tools.tables import table
from turnout.attention import choose
from turnout.attention.capability import AttentionBackend, StateKernels
from turnout.formats.spec import FORMATS
from turnout.moe.accuracy import BOUNDS
from turnout.moe.capabilities.capability import DispatcherCapability, RunnerCapability
from turnout.moe.capabilities.declared import DISPATCHERS, RUNNERS
from turnout.moe.planning.hardware_evidence import RUNS, evidence
from turnout.packages import Package
from turnout.parallel.hardware import PRESETS
from turnout.server.metric_list import METRICS, Group

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- generated: {} -->", "<!-- end generated -->"
NOTICE = "<!-- Written by tools/generate_docs.py from what the code declares; edit that instead. -->"

# Whose checkpoints hold experts in a format, as turnout/checkpoint reads them.
WRITERS = {
    "bf16": "any unquantised checkpoint, experts one by one or stacked; decoded while they load: INT4 with "
    "zero points, FP8 with a scale per row of compressed-tensors (`float-quantized`, FP8_DYNAMIC) and "
    "ModelOpt (`FP8_PER_CHANNEL_PER_TOKEN`)",
    "fp8": "128 x 128 blocks: DeepSeek-V3's layout (`quant_method: fp8`), DeepSeek-V4's, compressed-tensors "
    "(`float-quantized`, FP8_BLOCK), ModelOpt (`FP8_PB_WO`); one scale per weight: ModelOpt (`FP8`), "
    "compressed-tensors (`float-quantized`), AutoFP8, Quark",
    "nvfp4": "ModelOpt (`NVFP4`, `W4A16_NVFP4`, `W4A8_NVFP4_FP8`), compressed-tensors "
    "(`nvfp4-pack-quantized`)",
    "mxfp4": "GPT-OSS's layout (`quant_method: mxfp4`), DeepSeek-V4's experts (`expert_dtype: fp4`), "
    "compressed-tensors (`mxfp4-pack-quantized`), "
    "ModelOpt (`MXFP4`, `W4A8_MXFP4_FP8`), Quark (`fp4` with `e8m0` scales of 32)",
    "int4": "compressed-tensors (`pack-quantized`, W4A16, symmetric), as Kimi-K2-Thinking has it",
}
# What exporting tools and engines make of NVFP4 input scales that differ between experts.
INPUT_SCALES = (
    ("ModelOpt", "calibration gives all experts the largest; so does its export from Megatron"),
    ("llm-compressor", "each expert keeps its own"),
    (
        "vLLM",
        "FlashInfer's kernels (TRT-LLM, CUTLASS, CuTe DSL) and the emulation: the largest of all experts, "
        "for both GEMMs; its own CUTLASS kernel: each expert's own",
    ),
    (
        "SGLang",
        "FlashInfer's TRT-LLM and CUTLASS: the largest, for both GEMMs; CuTe DSL: the largest for the first, "
        "each expert's own for the second; its own CUTLASS kernel: each expert's own",
    ),
)
EXCHANGES = {
    "gather": "tokens of all data-parallel groups; nothing of a single one, whose ranks hold the same",
    "all_to_all": "tokens to the ranks that hold their experts",
}
SUMS = {
    "gather": "the combine; for a single group the layer, by one all-reduce",
    "all_to_all": "the combine",
}
ROWS = {
    "gather": "dp x the step's bound",
    "all_to_all": "dp x `--max-dispatch-tokens-per-rank` in prefill, dp x the step's bound in decode",
}


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if out of date")
    check = parser.parse_args(arguments).check
    stale = {
        path: text for path, text in wanted(root).items() if not path.is_file() or path.read_text() != text
    }
    for path, text in stale.items():
        sys.stderr.write(f"{path.relative_to(root)}: {'out of date' if check else 'written'}\n")
        if not check:
            path.write_text(text)
    if check and stale:
        sys.stderr.write("run: python -m tools.generate_docs\n")
    return int(check and bool(stale))


def wanted(root: Path) -> dict[Path, str]:
    """What each generated file should hold. A page without markers stays as it is."""
    names = {name: name for name in (*RUNNERS, *DISPATCHERS)} | RUNNERS.aliases | DISPATCHERS.aliases
    runs = backends_run(root / "benchmarks" / "results", names)
    files = {
        root / "docs" / "backends.md": backends(runs),
        root / "docs" / "formats.md": formats(),
        root / "docs" / "interface.md": interface.page(NOTICE),
        root / "docs" / "metrics.md": metrics(),
        root / "docs" / "gpu-tests.md": gpu_tests.page(root),
        root / "docs" / "grafana.json": grafana(),
    }
    table_of_runs = root / "turnout" / "moe" / "planning" / "hardware_evidence.py"
    if table_of_runs.is_file():
        files[table_of_runs] = with_runs(table_of_runs.read_text(), runs)
    results = tables(root / "benchmarks" / "results", root / "turnout" / "assets" / "tuning")
    notes = sorted((root / "docs" / "notes").glob("*.md"))
    blocks = {
        root / "README.md": {
            "support": support(),
            "architectures": architectures(ROOT / "tests" / "models" / "published"),
            "fitting": fitting(ROOT / "tests" / "models" / "published"),
            "headline": headline(root / "benchmarks" / "results"),
        },
        root / "docs" / "operations.md": {"bounds": bounds()},
        **dict.fromkeys((root / "docs" / "performance.md", *notes), results),
    }
    for page, bodies in blocks.items():
        if page.is_file():
            files[page] = _filled(page.read_text(), bodies)
    return files


def metrics() -> str:
    """docs/metrics.md."""
    parts = [
        "# Metrics",
        NOTICE,
        "What `GET /metrics` says, in Prometheus' text format. What to watch, and what it means: "
        "[operations.md](operations.md#metrics).",
    ]
    for group in Group:
        rows = [
            (
                f"`{metric.series}`",
                metric.kind,
                ", ".join(f"`{label}`" for label in metric.labels),
                metric.help,
            )
            for metric in METRICS
            if metric.group == group
        ]
        parts += [f"## {group}", table(("metric", "kind", "labels", "what it says"), rows)]
    return "\n\n".join(parts) + "\n"


def _filled(text: str, bodies: dict[str, str]) -> str:
    """`text` with each body between the markers of its name, where it has them."""
    for name, body in bodies.items():
        begin = BEGIN.format(name)
        if begin in text and END in text.partition(begin)[2]:
            before, _, rest = text.partition(begin)
            text = f"{before}{begin}\n{body}\n{END}{rest.partition(END)[2]}"
    return text


def runners() -> list[RunnerCapability]:
    return list(RUNNERS.values())


def dispatchers() -> list[DispatcherCapability]:
    return list(DISPATCHERS.values())


def _packages() -> list[Package]:
    """Those of all backends, each once."""
    needed = [p for declared in (*runners(), *dispatchers()) for p in declared.requires]
    needed += [declared.package for declared in choose.backends() if declared.package]
    return list(dict.fromkeys(needed))


def _command(install: str) -> str:
    """A command as code; a sentence, which may hold one, as it is."""
    return f"`{install}`" if install.startswith("pip ") and ", or " not in install else install


def backends(runs: Runs = RUNS) -> str:
    return "\n\n".join(
        [
            "# Backends",
            NOTICE,
            "A plan joins a runner, which multiplies the experts' weights, with a dispatcher, which brings "
            "it its tokens. They fit together by what they declare: the layout of a batch, the formats in "
            "which tokens are dispatched, the devices. `turnout plan MODEL` says which it takes, why, "
            "and what stands against the others.",
            "## Runners (`--moe-runner-backend`)",
            _columns([_runner(r, runs) for r in runners()]),
            "## Dispatchers (`--moe-a2a-backend`)",
            _columns([_dispatcher(d, runs) for d in dispatchers()]),
            "## Attention (`--attention-backend`)",
            "Layers of one kind and shape get the first that takes them. One that computes prompts only "
            "leaves decoding to another; `auto` takes it from the length of prompts on from which it was "
            "measured faster.",
            _columns([_attention(declared) for declared in choose.backends()]),
            "## Packages that they need",
            "Imported when chosen, and looked for by the plan of a machine with GPUs. FlashInfer compiles "
            "most of its kernels on first use, for which it needs CUDA's compiler.",
            table(("package", "to install it"), [(f"`{p}`", _command(p.install)) for p in _packages()]),
            "## Hardware that `turnout plan --hardware` knows",
            table(
                ("name", "compute capability", "memory", "FP4 tensor cores"),
                [
                    (
                        f"`{p.name}`",
                        f"{p.architecture / 10}",
                        f"{p.memory_bytes // 10**9} GB",
                        _yes(p.has_fp4_units),
                    )
                    for p in PRESETS.values()
                ],
            ),
            "`cpu` is the machine that plans. Memory is the vendor's figure per GPU, in decimal gigabytes.\n",
        ]
    )


def _runner(r: RunnerCapability, runs: Runs) -> dict[str, str]:
    return {
        "": f"`{r.name}`",
        "what it is": r.summary,
        "layouts": _list(r.layouts),
        "weight formats": _list(r.weight_formats),
        "weights kept": _list(r.weight_storages),
        "GEMMs multiply with": _list(r.activation_formats) + _emulated(r),
        "weights that it multiplies with fp8": _list(r.fp8_weight_formats)
        if "fp8" in r.activation_formats
        else "-",
        "tokens may arrive in": _list(r.wire_formats),
        "activations": _list(r.activations),
        "expert biases": _yes(r.expert_bias),
        "devices": _list(r.devices),
        "compute capabilities": _list(str(a / 10) for a in r.architectures) if r.architectures else "any",
        "hidden size, multiple of": str(r.hidden_multiple),
        "a rank's intermediate size, multiple of": str(r.intermediate_multiple),
        "CUDA graphs": _yes(r.graph_safe),
        "the same batch gives the same bits": _yes(r.deterministic),
        "`--deterministic`": _yes(r.batch_invariant),
        "needs": _code(str(p) for p in r.requires) or "-",
        "proof": evidence(r.name, r.checked, runs),
    }


def _emulated(r: RunnerCapability) -> str:
    """Which of what it multiplies with are only numerics, without units for them."""
    units = {"fp8": r.fp8_units, "nvfp4": r.fp4_units}
    names = [name for name in sorted(r.activation_formats & units.keys()) if not units[name]]
    return f" ({', '.join(names)} emulated)" if names else ""


def _dispatcher(d: DispatcherCapability, runs: Runs) -> dict[str, str]:
    return {
        "": f"`{d.name}`",
        "what it is": d.summary,
        "chosen by": f"`{d.family}`, `--{d.family}-mode {d.mode}`" if d.family else "its name",
        "layout": d.layout,
        "moves": EXCHANGES[d.exchange],
        "sums over ranks": SUMS[d.exchange],
        "tokens a rank may receive": ROWS[d.exchange]
        + (", for every local expert" * (d.layout == "batched_experts")),
        "tokens are dispatched in": _list(d.wire_formats),
        "results are combined in": _list(d.combine_formats),
        "prefill in chunks, where buffers hold less": _yes(d.in_chunks),
        "devices": _list(d.devices),
        "several hosts": _yes(d.multi_host),
        "compute capabilities": _list(f"{a / 10}" for a in d.architectures) if d.architectures else "any",
        "limits": d.limits.described(),
        "CUDA graphs": _yes(d.graph_safe),
        "`--deterministic`": _yes(d.batch_invariant),
        "needs": _code(str(p) for p in d.requires) or "-",
        "proof": evidence(d.name, d.checked, runs),
    }


def _attention(a: AttentionBackend) -> dict[str, str]:
    generations = " and ".join(f"{major}.x" for major in sorted(a.architectures))
    capability = f", compute capability {generations}" if generations else ""
    multiples = f", multiples of {a.head_multiple}" if a.head_multiple > 1 else ""
    return {
        "": f"`{a.name}`",
        "computes": f"prompts, for `{a.prompts_for}`" if a.prompts_for else "prompts and decoding",
        "devices": ", ".join(sorted(a.devices)) + capability,
        "computes in": _list(a.dtypes),
        "attention": _list(kind.replace("_", " ") for kind in a.implementations),
        "of that on request only": _list(kind.replace("_", " ") for kind in a.on_request) or "-",
        "states of Gated DeltaNet": _states(a.states),
        "sinks": _yes(a.sinks),
        "heads": (f"up to {a.most_head_dim}" if a.most_head_dim else "any size") + multiples,
        "pages": f"multiples of {a.page_multiple} tokens" if a.page_multiple > 1 else "any",
        "needs": f"`{a.package}`" if a.package else "-",
    }


def _states(kernels: StateKernels | None) -> str:
    if kernels is None:
        return "-"
    multiples = f", multiples of {kernels.head_multiple}" if kernels.head_multiple > 1 else ""
    heads = f", heads up to {kernels.most_head_dim}{multiples}" if kernels.most_head_dim else ""
    return f"in {_list(kernels.dtypes)}{heads}"


def formats() -> str:
    rows = [
        (
            f"`{info.format}`",
            info.values,
            info.shares_scale,
            info.scale,
            f"{info.bits_per_weight:.4g}",
            f"{info.k_multiple}",
            info.needs,
        )
        for info in FORMATS.values()
    ]
    head = ("format", "values", "values per scale", "scale", "bits per weight", "columns, multiple of")
    return "\n\n".join(
        [
            "# Number formats of expert weights",
            NOTICE,
            "Every format is read from its publishers' checkpoints as they are, and written by "
            "`turnout quantize MODEL OUT --format NAME`. Weights are kept packed and decoded at each use, or "
            "decoded once at load, whichever the plan finds right (`--moe-weight-storage`).",
            table((*head, "to multiply in it, hardware needs"), rows),
            "A value is its code times its scale, and for NVFP4 times a float32 scale of the whole matrix. "
            "Of INT4 that product is rounded to bfloat16, which is what compressed-tensors decompresses to.",
            "## Checkpoints that are read",
            table(
                ("format", "published by or as", "runners"),
                [
                    (f"`{f}`", WRITERS[f], _code(r.name for r in runners() if f in r.weight_formats))
                    for f in FORMATS
                ],
            ),
            "Dense layers are decoded to the compute dtype while they load, from every one of these formats, "
            "but for FP8 on CUDA GPUs of compute capability 9.0 or later: there projections of attention and "
            "of Gated DeltaNet, dense MLPs and shared experts stay FP8 in memory, and are decoded where they "
            "are multiplied. "
            "Decoded at load are also experts in FP8 with a scale per row, in INT4 with zero points, with "
            "columns that GPTQ reordered (`weight_g_idx`), or with float16 or float32 scales, as no runner "
            "multiplies in those: they then take the memory of unquantised ones, which `turnout plan` counts "
            "and the log says. Other INT4 stays packed: a scale for 64 or 128 columns or for a row is "
            "repeated for every 32. Activations are quantised only in formats that the table above has a "
            "scheme for, whatever else their writers meant: the result is the more exact. Attention, dense "
            "MLPs, shared experts and the head may each be in a format of their own, as ModelOpt's "
            "`MIXED_PRECISION`, several `config_groups` of compressed-tensors and Quark's "
            "`layer_quant_config` say. A checkpoint whose MoE layers differ in format is refused.",
            "An NVFP4 checkpoint with calibrated input scales was made for W4A4: activations in NVFP4 too. "
            "Where a device has no FP4 tensor cores, only the weights stay quantised (W4A16); "
            "`--moe-activation-dtype nvfp4` emulates W4A4 there, to measure its accuracy.",
            "## Input scales of W4A4",
            "Checkpoints carry an input scale for every expert and projection. The input of each of a "
            "layer's two GEMMs is quantised with one of them: the largest of all experts of the layer, in "
            "every layout of batches and on every rank, whichever experts it holds. Who else does what:",
            table(("", "input scales of the experts of one layer"), INPUT_SCALES),
            "The largest is what most of them do, and the only choice with which a token can be quantised "
            "once, before it is dispatched, and results do not depend on how experts are spread over ranks. "
            "It costs no accuracy: the scale of a group of 16 values is an e4m3 number of its own, whose "
            "normal range spans 2^14.8, so a global scale several times too large leaves it there, while an "
            "expert's own clips what its calibration did not see. Against activations that are not rounded, "
            "logits of a small model are off by 5.8 % with either; from each other, being other roundings, "
            "they differ by 3.8 % (`tests/models/test_formats.py`). A comparison with an engine that takes "
            "each expert's own shows that difference.\n",
        ]
    )


def bounds() -> str:
    return table(
        ("GEMMs multiply with", "computing in", "largest relative error"),
        [
            ("plain numbers" if activations == "bf16" else f"{activations} activations", dtype, f"{most:.0e}")
            for (activations, dtype), most in BOUNDS.items()
        ],
    )


def support() -> str:
    return table(
        ("", "in this version"),
        [
            ("checkpoints", "; ".join(f"**{f}**: {WRITERS[f]}" for f in FORMATS)),
            ("runners", "; ".join(f"`{r.name}`: {r.summary}" for r in runners())),
            ("dispatchers", "; ".join(f"`{d.name}`: {d.summary}" for d in dispatchers())),
            ("plans for", "`cpu`, " + _code(PRESETS)),
        ],
    )


def _columns(backends: Sequence[dict[str, str]]) -> str:
    """One column per backend, one row per property."""
    first = "property"
    names = [backend[""] for backend in backends]
    keys = [key for key in backends[0] if key]
    return table((first, *names), [(key, *(backend[key] for backend in backends)) for key in keys])


def _list(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _yes(value: bool) -> str:
    return "yes" if value else "no"


if __name__ == "__main__":
    sys.exit(main())
