"""docs/backends.md: a table each of runners, dispatchers and attention backends, from what they declare."""

from __future__ import annotations

from collections.abc import Sequence

from tools.proven import Runs
from tools.tables import NOTICE, code, listed, table, yes
from turnout.attention import choose
from turnout.attention.capability import AttentionBackend, StateKernels
from turnout.moe.capabilities.capability import DispatcherCapability, RunnerCapability
from turnout.moe.capabilities.declared import DISPATCHERS, RUNNERS
from turnout.moe.planning.hardware_evidence import RUNS, evidence
from turnout.packages import Package
from turnout.parallel.hardware import PRESETS

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
            "and why others are refused.",
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
                        yes(p.has_fp4_units),
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
        "layouts": listed(r.layouts),
        "weight formats": listed(r.weight_formats),
        "weights kept": listed(r.weight_storages),
        "GEMMs multiply with": listed(r.activation_formats) + _emulated(r),
        "weights that it multiplies with fp8": listed(r.fp8_weight_formats)
        if "fp8" in r.activation_formats
        else "-",
        "tokens may arrive in": listed(r.wire_formats),
        "activations": listed(r.activations),
        "expert biases": yes(r.expert_bias),
        "devices": listed(r.devices),
        "compute capabilities": listed(str(a / 10) for a in r.architectures) if r.architectures else "any",
        "hidden size, multiple of": str(r.hidden_multiple),
        "a rank's intermediate size, multiple of": str(r.intermediate_multiple),
        "CUDA graphs": yes(r.graph_safe),
        "the same batch gives the same bits": yes(r.deterministic),
        "`--deterministic`": yes(r.batch_invariant),
        "needs": code(str(p) for p in r.requires) or "-",
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
        "tokens are dispatched in": listed(d.wire_formats),
        "results are combined in": listed(d.combine_formats),
        "prefill in chunks, where buffers hold less": yes(d.in_chunks),
        "devices": listed(d.devices),
        "several hosts": yes(d.multi_host),
        "compute capabilities": listed(f"{a / 10}" for a in d.architectures) if d.architectures else "any",
        "limits": d.limits.described(),
        "CUDA graphs": yes(d.graph_safe),
        "`--deterministic`": yes(d.batch_invariant),
        "needs": code(str(p) for p in d.requires) or "-",
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
        "computes in": listed(a.dtypes),
        "attention": listed(kind.replace("_", " ") for kind in a.implementations),
        "states of Gated DeltaNet": _states(a.states),
        "sinks": yes(a.sinks),
        "heads": (f"up to {a.most_head_dim}" if a.most_head_dim else "any size") + multiples,
        "pages": f"multiples of {a.page_multiple} tokens" if a.page_multiple > 1 else "any",
        "needs": f"`{a.package}`" if a.package else "-",
    }


def _states(kernels: StateKernels | None) -> str:
    if kernels is None:
        return "-"
    multiples = f", multiples of {kernels.head_multiple}" if kernels.head_multiple > 1 else ""
    heads = f", heads up to {kernels.most_head_dim}{multiples}" if kernels.most_head_dim else ""
    return f"in {listed(kernels.dtypes)}{heads}"


def _columns(backends: Sequence[dict[str, str]]) -> str:
    """One column per backend, one row per property."""
    first = "property"
    names = [backend[""] for backend in backends]
    keys = [key for key in backends[0] if key]
    return table((first, *names), [(key, *(backend[key] for backend in backends)) for key in keys])
