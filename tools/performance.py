"""The tables of docs/performance.md and docs/notes, from the newest results under benchmarks/results."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tools.engine_tables import attention, prompts, serving_on_gpu, steps, two_batches
from tools.headline import layer_ratios, machine_of, newest, newest_of_cpus, next_to_vllm
from tools.tables import table

HOPPER = ("hopper", "triton")  # the runner, and its name in older results
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384)


def tables(folder: Path, tuning: Path) -> dict[str, str]:
    """Marker name -> Markdown, for every result that is there, and for the tilings that are shipped."""
    found = {}
    for name, benchmark, device, render in (
        ("moe-h200", "moe", "nvidia-h200", layer_on_gpu),
        ("moe-flashinfer-h200", "moe-flashinfer", "nvidia-h200", next_to_hopper),
        ("a2a-h200", "a2a", "nvidia-h200", exchange),
        ("a2a-libraries-h200", "a2a-libraries", "nvidia-h200", exchange),
        ("a2a-nvlink-x2-h200", "a2a-nvlink", "nvidia-h200-x2", next_to_gathering),
        ("a2a-nvlink-x4-h200", "a2a-nvlink", "nvidia-h200-x4", next_to_gathering),
        ("row-gemm-h200", "row-gemm", "nvidia-h200", row_products),
        ("steps-h200", "steps", "nvidia-h200", steps),
        ("prompts-h200", "steps", "nvidia-h200", prompts),
        ("serve-h200", "serve", "nvidia-h200", serving_on_gpu),
        ("serve-gpt-oss-120b-h200", "serve-gpt-oss-120b", "nvidia-h200", serving_on_gpu),
        ("serve-qwen3-30b-h200", "serve-qwen3-30b", "nvidia-h200-2", serving_on_gpu),
        ("serve-qwen3-30b-x4-h200", "serve-qwen3-30b", "nvidia-h200-x4", serving_on_gpu),
        ("attention-h200", "attention", "nvidia-h200", attention),
        ("two-batches-h200", "two-batches", "nvidia-h200", two_batches),
        ("overlap-h200", "overlap", "nvidia-h200", shared_expert),
    ):
        files = sorted(folder.glob(f"{benchmark}-{device}*.json"))
        if files:
            content = json.loads(files[-1].read_text())
            found[name] = f"{provenance(content, files[-1])}\n\n{render(content)}"
    found |= {
        name: on_cpus(files, head, rows)
        for name, benchmark, head, rows in (
            ("moe-cpu", "moe", ["weights", "tokens"], layer_on_cpu),
            ("serve-cpu", "serve", ["concurrency"], serving),
        )
        if (files := newest_of_cpus(folder, benchmark))
    }
    if both := newest(folder, "serving-beside-vllm-nvidia-h200*.json"):
        found["serving-next-to-vllm"] = next_to_vllm(both)
    ours, public = (sorted(folder.glob(f"{name}-nvidia-h200*.json")) for name in ("moe", "moe-public"))
    if ours and public:
        contents = (json.loads(files[-1].read_text()) for files in (ours, public))
        found["moe-public-h200"] = next_to_public(*contents)
    for file in sorted(tuning.glob("*.json")):
        found[f"tiles-{file.stem}"] = tilings(file)
    return found


def tilings(file: Path) -> str:
    """Where the shipped tilings beat the rule's, of all batch sizes that were measured."""
    content = json.loads(file.read_text())
    lines, sizes = [], 0
    for table_ in content["tables"]:
        shape = table_["shape"]
        held = f"{shape['local_experts']} of {shape['num_experts']}"
        label = f"{shape['hidden']}, {shape['inner']}, {held}, {shape['top_k']}"
        sizes += len(table_["entries"])
        lines += [
            [shape["format"], label, str(entry["tokens"]), f"{entry['us']:.0f}", f"{entry['rule_us']:.0f}",
             f"{entry['rule_us'] / entry['us']:.2f}"]
            for entry in table_["entries"] if entry["us"] < entry["rule_us"]
        ]  # fmt: skip
    versions = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    measured = ", ".join(
        dict.fromkeys(f"{table_['date']}, commit `{table_['commit']}`" for table_ in content["tables"])
    )
    head = (
        f"{content['device']}; {versions}; {measured}; "
        f"`turnout/assets/tuning/{file.name}`. Of {sizes} batch sizes of {len(content['tables'])} layers, "
        f"{len(lines)} where the rule was beaten:\n\n"
    )
    columns = ["format", "hidden, intermediate, experts, top-k", "tokens", "tuned, us", "rule, us", "ratio"]
    return head + table(columns, lines)


def provenance(content: dict[str, Any], file: Path) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    driver = f", driver {content['driver']}" if content["driver"] else ""
    return (
        f"{machine_of(content)}{driver}; {versions}; {content['date']}, commit `{content['commit']}`; "
        f"`benchmarks/results/{file.name}`."
    )


def layer_on_gpu(content: dict[str, Any]) -> str:
    """us (efficiency) by shape and tokens, and how many times as fast as the fastest peer that ran; one table
    per format and routing."""
    parts = []
    for format, routing in dict.fromkeys((row["format"], row["routing"]) for row in content["rows"]):
        rows = [row for row in content["rows"] if (row["format"], row["routing"]) == (format, routing)]
        ours = {(row["shape"], row["tokens"]): row for row in rows if not row.get("peer")}
        peers: dict[tuple[str, int], float] = {}
        for row in rows:
            if row.get("peer") and "time_us" in row:
                at = row["shape"], row["tokens"]
                peers[at] = min(row["time_us"], peers.get(at, math.inf))
        efficiency = [row["efficiency"] for row in ours.values() if "efficiency" in row]
        mean = statistics.geometric_mean(efficiency)
        error = max(row["error"] for row in ours.values() if "error" in row)
        sizes = [tokens for tokens in TOKENS if any(tokens == at[1] for at in ours)]
        lines = [
            [shape, *(_cell(ours.get((shape, tokens)), peers.get((shape, tokens))) for tokens in sizes)]
            for shape in dict.fromkeys(shape for shape, _ in ours)
        ]
        routes = "" if routing == "uniform" else f", routing {routing}"
        about = f"geometric mean of the efficiency {mean:.2f}; largest error {error:.1e}"
        body = table(["shape", *(f"T={tokens}" for tokens in sizes)], lines)
        parts.append(f"**{format}**{routes} ({about})\n\n{body}")
    return "\n\n".join(parts)


def next_to_public(content: dict[str, Any], public: dict[str, Any]) -> str:
    """How many times as fast as the fastest public kernel of each point, which was timed in another run."""
    lines = []
    for format, ratios in layer_ratios(content, public).items():
        behind = [f"{shape} T={T} {ratio:.2f}" for (_, shape, T), ratio in ratios.items() if ratio < 1]
        cells = [f"{of(ratios.values()):.2f}" for of in (statistics.geometric_mean, min, max)]
        lines.append([format, *cells, ", ".join(behind) or "none"])
    return table(["format", "geometric mean", "least", "most", "where the public kernel is ahead"], lines)


def next_to_hopper(content: dict[str, Any]) -> str:
    """us of a library's runner and of ours for Hopper, at the same points."""
    ours = {
        (row["format"], row["shape"], row["tokens"]): row["time_us"]
        for row in content["rows"]
        if row["runner"] in HOPPER
    }
    lines = []
    for row in content["rows"]:
        if row["runner"] not in HOPPER:
            format, shape, tokens = point = row["format"], row["shape"], row["tokens"]
            times = row["time_us"], ours[point]
            cells = [f"{time:.0f}" for time in times] + [f"{times[0] / times[1]:.2f}"]
            lines.append([f"`{row['runner']}`", format, shape, str(tokens), row["tactics"], *cells])
    return table(["runner", "format", "shape", "tokens", "tactics", "us", "hopper, us", "ratio"], lines)


Cells = dict[str, str]  # by column


def on_cpus(
    files: Sequence[Path], head: list[str], rows: Callable[[dict[str, Any]], dict[tuple[str, ...], Cells]]
) -> str:
    """A table of each machine's results, below what it is and what was run."""
    parts = []
    for file in files:
        content = json.loads(file.read_text())
        cells = rows(content)
        columns = list(next(iter(cells.values())))
        lines = [[*point, *(row[name] for name in columns)] for point, row in cells.items()]
        parts.append(f"{provenance(content, file)}\n\n{table([*head, *columns], lines)}")
    return "\n\n".join(parts)


def layer_on_cpu(content: dict[str, Any]) -> dict[tuple[str, ...], Cells]:
    """By format and tokens, our faster compute type next to the fastest peer of any."""
    found: dict[tuple[str, ...], Cells] = {}
    for format, tokens in dict.fromkeys((row["format"], row["tokens"]) for row in content["rows"]):
        rows = [
            row
            for row in content["rows"]
            if (row["format"], row["tokens"]) == (format, tokens) and "time_us" in row
        ]
        ours = min((row for row in rows if not row["peer"]), key=lambda row: row["time_us"])
        peer = min((row for row in rows if row["peer"]), key=lambda row: row["time_us"])
        found[format, str(tokens)] = {
            "Turnout, ms": f"{ours['time_us'] / 1e3:.2f} ({ours['compute_dtype']})",
            "transformers' fastest, ms": f"{peer['time_us'] / 1e3:.2f} "
            f"({peer['runner'].removeprefix('transformers ')}, {peer['compute_dtype']})",
            "ratio": f"{peer['time_us'] / ours['time_us']:.2f}",
        }
    return found


def serving(content: dict[str, Any]) -> dict[tuple[str, ...], Cells]:
    """By concurrency, output tokens per second next to transformers' best at the same batch; of long prompts
    that end with their first token, prompts per second."""
    rows = [row for row in content["rows"] if "output_throughput" in row]
    peers: dict[tuple[int, int], dict[str, Any]] = {}
    for row in rows:
        if row["system"] != "turnout":
            load = row["batch"], row.get("input_len", 64)
            if load not in peers or row["output_throughput"] > peers[load]["output_throughput"]:
                peers[load] = row
    found: dict[tuple[str, ...], Cells] = {}
    for row in rows:
        if row["system"] != "turnout":
            continue
        clients, length, rate = row["concurrency"], row["input_len"], row["output_throughput"]
        peer = peers.get((clients, length))
        digits = 0 if row["output_len"] > 1 else 1
        name = str(clients) if row["output_len"] > 1 else f"{clients}, prompts of {length} to one token"
        theirs = (
            f"{peer['output_throughput']:.{digits}f} ({peer['experts']}, {peer['dtype']})" if peer else ""
        )
        found[(name,)] = {
            "output tokens/s": f"{rate:.{digits}f}",
            "TTFT, ms": f"{row['median_ttft_ms']:.0f}",
            "TPOT, ms": f"{row['median_tpot_ms']:.1f}" if "median_tpot_ms" in row else "",
            "server memory, MB": f"{row['pss_mb']:.0f}",
            "transformers' `generate`, tokens/s": theirs,
            "ratio": f"{rate / peer['output_throughput']:.2f}" if peer else "",
        }
    return found


def next_to_gathering(content: dict[str, Any]) -> str:
    """An exchange by stores, as a graph, next to gathering as `none` does and NCCL's bare collectives
    in bf16, of one run."""
    found: dict[tuple[str, str, str, int], dict[str, dict[str, Any]]] = {}
    for row in content["rows"]:
        if "graph_us" in row:
            key = (row["routing"], row["format"], row["combine_format"], row["tokens"])
            found.setdefault(key, {})[row["dispatcher"]] = row
    bare = {
        tokens: rows["none"]["raw_graph_us"]
        for (routing, format, _, tokens), rows in found.items()
        if (routing, format) == ("uniform", "bf16") and "none" in rows
    }
    lines = []
    for (routing, format, back, tokens), rows in found.items():
        ours = rows["nvlink"]
        us = ours["graph_us"]
        others = [rows["none"]["graph_us"] if "none" in rows else None, bare.get(tokens)]
        best = min(other for other in others if other)
        gathered = [f"{other:.1f}" if other else "" for other in others]
        sent = [f"{ours['wire_bytes'] / 1e6:.2f}", f"{ours['wire_bytes'] / 1e3 / us:.0f}"]
        lines.append([routing, format, back, str(tokens), f"{us:.1f}", *gathered, f"{best / us:.2f}", *sent])
    first = content["rows"][0]
    head = f"{content['devices']} ranks, hidden {first['hidden']}, top-{first['topk']} of {first['experts']}."
    columns = [
        "routing",
        "there",
        "back",
        "tokens of a rank",
        "`nvlink`, us",
        "`none`, us",
        "NCCL, us",
        "ratio",
    ]
    return f"{head}\n\n" + table([*columns, "MB sent", "GB/s"], lines)


def exchange(content: dict[str, Any]) -> str:
    """Dispatch and combine in us, how many times the bare collectives they take, and a graph of both."""
    lines = [
        [
            row["dispatcher"],
            str(row["tokens"]),
            *(
                f"{row[f'{part}_us']:.0f} ({row[f'{part}_us'] / row[f'raw_{part}_us']:.2f})"
                for part in ("dispatch", "combine")
            ),
            f"{row['graph_us']:.0f}" if row.get("graph_us") else "",
        ]
        for row in content["rows"]
        if "error_message" not in row
    ]
    first = content["rows"][0]
    head = (
        f"{first['devices']} ranks, hidden {first['hidden']}, top-{first['topk']} of {first['experts']}, "
        f"{first['format']}.\n\n"
    )
    return head + table(
        ["dispatcher", "tokens of a rank", "dispatch, us (x bare)", "combine, us (x bare)", "as a graph"],
        lines,
    )


def shared_expert(content: dict[str, Any]) -> str:
    """us of a layer with its shared expert after the routed ones, and on a second stream."""
    lines = [
        [f"`{row['dispatcher']}`", str(row["tokens"])]
        + [f"{row[name]:.0f}" for name in ("one_stream_us", "two_streams_us")]
        + [f"{row['one_stream_us'] / row['two_streams_us']:.2f}"]
        for row in content["rows"]
    ]
    return table(["dispatcher", "tokens of a rank", "one stream, us", "two streams, us", "ratio"], lines)


def row_products(content: dict[str, Any]) -> str:
    """us (times cuBLAS) by product and rows."""
    rows = content["rows"]
    cells = {
        (row["what"], row["rows"]): f"{row['ours_us']:.0f} ({row['ours_us'] / row['cublas_us']:.2f})"
        for row in rows
    }
    counts = sorted({row["rows"] for row in rows})
    products = {row["what"]: f"{row['what']}, {row['inputs']} to {row['outputs']}" for row in rows}
    lines = [[title, *(cells[what, count] for count in counts)] for what, title in products.items()]
    return table(["product", *(f"{count} rows" if count > 1 else "1 row" for count in counts)], lines)


def _cell(row: dict[str, Any] | None, peer_us: float | None) -> str:
    if row is None or "time_us" not in row:
        return "-"
    faster = "" if peer_us is None else f", {peer_us / row['time_us']:.2f}x"
    return f"{row['time_us']:.0f} ({row['efficiency']:.2f}{faster})"
