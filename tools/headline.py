"""The few measured numbers that README.md shows, each next to its peer in the same table."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.tables import table

Load = tuple[str, int, int, int]  # format, tokens in, tokens out, clients


def newest(
    folder: Path, pattern: str, takes: Callable[[dict[str, Any]], bool] = lambda content: True
) -> dict[str, Any]:
    """The last result of that name that `takes` takes; {} if there is none."""
    contents = (json.loads(file.read_text()) for file in sorted(folder.glob(pattern), reverse=True))
    return next(filter(takes, contents), {})


def gathered(content: dict[str, Any]) -> bool:
    """Whether an exchange was measured next to gathering (`none`), in one run."""
    return any(row["dispatcher"] == "none" for row in content["rows"])


def newest_of_cpus(folder: Path, benchmark: str) -> list[Path]:
    """The newest result of each kind of processor that it ran on.

    One that does not say what bfloat16 units it used, as before there were any, gives way to a newer one of
    the same device that does.
    """
    found: dict[str, tuple[str, bool, Path]] = {}
    for maker in ("amd", "intel"):
        for file in sorted(folder.glob(f"{benchmark}-{maker}-*.json")):
            content = json.loads(file.read_text())
            device, says = str(content["device"]), "bf16_units" in content
            if says:
                found = {of: kept for of, kept in found.items() if kept[1] or kept[0] != device}
            found[machine_of(content)] = device, says, file
    return [file for _, _, file in found.values()]


def machine_of(content: dict[str, Any]) -> str:
    """The device, of a CPU its cores and bfloat16 units, also where all units that it has were refused."""
    device, units = str(content["device"]), content.get("bf16_units", "none")
    if not device.startswith(("AMD", "Intel")):
        return device
    name, _, cores = device.partition(" x")
    about = [f"{cores} cores"] * bool(cores)
    if units != "none" or {"avx512_bf16", "amx_bf16"} & set(content.get("vector_flags", [])):
        about.append(f"bf16 units: {units}")
    return f"{name} ({', '.join(about)})" if about else name


def means(content: dict[str, Any]) -> dict[Load, dict[str, dict[str, Any]]]:
    """Of a run with two engines: by load and engine, tokens/s and time to first token over the rounds.

    Servers with other flags than the defaults ("turnout (--flag)") are left out.
    """
    rounds: dict[Load, dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for row in content["rows"]:
        if "(" not in row["engine"]:
            load = (row["format"], row["input"], row["output"], row["concurrency"])
            rounds[load][row["engine"]].append(row)
    return {
        load: {
            engine: {
                name: statistics.mean(row[name] for row in rows)
                for name in ("output_tok_s", "median_ttft_ms")
            }
            for engine, rows in engines.items()
        }
        for load, engines in rounds.items()
    }


def next_to_vllm(content: dict[str, Any]) -> str:
    """Both engines of one run, load by load."""
    lines = []
    for (format, given, made, clients), engines in means(content).items():
        ours, theirs = engines["turnout"], engines["vllm"]
        lines.append(
            [
                format,
                f"{given} / {made}",
                str(clients),
                f"{ours['output_tok_s']:,.0f}",
                f"{theirs['output_tok_s']:,.0f}",
                f"{ours['output_tok_s'] / theirs['output_tok_s']:.2f}",
                f"{ours['median_ttft_ms']:.0f}",
                f"{theirs['median_ttft_ms']:.0f}",
            ]
        )
    columns = ["weights", "in / out", "clients", "Turnout, tokens/s", "vLLM, tokens/s", "ratio"]
    head = f"{content['model'].split(' (')[0]}. {content['method']}"
    versions = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    where = f"{content['device']}, driver {content['driver']}; {versions}; {content['date']}."
    return f"{where}\n\n{head}\n\n" + table([*columns, "TTFT, ms", "vLLM's"], lines)


def headline(folder: Path) -> str:
    """One table: what was measured, ours, the peer's, how many times as fast."""
    lines = []
    if both := newest(folder, "serving-beside-vllm-nvidia-h200*.json"):
        peer = f"vLLM {both['versions']['vllm'].split()[0]}"
        for (format, given, made, clients), engines in means(both).items():
            if (given, clients) in ((128, 1), (128, 256), (1024, 32)):
                ours, theirs = (engines[name]["output_tok_s"] for name in ("turnout", "vllm"))
                what = f"serving Qwen3-30B-A3B's shape in {format}, {given} tokens in, {made} out, "
                what += f"{clients} client{'s' * (clients > 1)}"
                cells = [f"{ours:,.0f} tokens/s", f"{theirs:,.0f} ({peer})", f"{ours / theirs:.2f}"]
                lines.append(["1 x H200", what, *cells])
    ours, public = newest(folder, "moe-nvidia-h200*.json"), newest(folder, "moe-public-nvidia-h200*.json")
    if ours and public:
        for format, ratios in layer_ratios(ours, public).items():
            what = f"the MoE layer in {format}, {len(ratios)} sizes of six models"
            ratio = statistics.geometric_mean(ratios.values())
            lines.append(["1 x H200", what, "", "fastest public kernel of each size", f"{ratio:.2f}"])
    if exchange := newest(folder, "a2a-nvlink-nvidia-h200-x4*.json", gathered):
        rows = {(r["dispatcher"], r["format"], r["tokens"]): r["graph_us"] for r in exchange["rows"]}
        hidden = exchange["rows"][0]["hidden"]
        for tokens in (1, 128, 4096):
            us, peer_us = rows["nvlink", "bf16", tokens], rows["none", "bf16", tokens]
            what = f"dispatch and combine, hidden {hidden}, {tokens} token{'s' * (tokens > 1)} a rank"
            cells = [f"{us:.1f} us", f"{peer_us:.1f} us (NCCL)", f"{peer_us / us:.2f}"]
            lines.append(["4 x H200", what, *cells])
    for file in newest_of_cpus(folder, "serve"):
        cpu = json.loads(file.read_text())
        rows = [row for row in cpu["rows"] if row.get("output_len", 64) > 1]
        for row in rows:
            peers = [r for r in rows if r.get("batch") == row.get("concurrency", "none")]
            fastest = max((r["output_throughput"] for r in peers), default=0)
            if fastest:
                clients, own = row["concurrency"], row["output_throughput"]
                what = f"serving the bundled model, {clients} client{'s' * (clients > 1)}"
                cells = [f"{own:,.0f} tokens/s", f"{fastest:,.0f} (transformers' `generate`)"]
                lines.append([machine_of(cpu), what, *cells, f"{own / fastest:.2f}"])
    return table(["on", "what", "Turnout", "peer", "times as fast"], lines)


Point = tuple[str, str, int]  # format, shape, tokens


def layer_ratios(ours: dict[str, Any], public: dict[str, Any]) -> dict[str, dict[Point, float]]:
    """How many times as fast as the fastest public kernel, timed in another run, by format and point."""
    mine, theirs = (
        {
            (row["format"], row["shape"], row["tokens"]): row["time_us"]
            for row in content["rows"]
            if row["routing"] == "uniform" and not row.get("peer")
        }
        for content in (ours, public)
    )
    ratios: dict[str, dict[Point, float]] = defaultdict(dict)
    for point, us in theirs.items():
        ratios[point[0]][point] = us / mine[point]
    return ratios
