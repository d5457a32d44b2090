"""The tables of docs/performance.md and docs/notes, from the newest results under benchmarks/results."""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tools.engine_tables import attention, decode_blocks, server_cost, serving_on_gpu, two_batches
from tools.headline import gathered, layer_ratios, machine_of, newest, newest_of_cpus, next_to_vllm
from tools.tables import table

HOPPER = ("hopper", "triton")  # the runner, and its name in older results
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384)
# Rows that docs/performance.md shows of a result which a note has whole.
SHORT: dict[str, Callable[[dict[str, Any]], bool]] = {
    "a2a-libraries-h200": lambda row: row["tokens"] == 128,
    "a2a-nvlink-x4-h200": lambda row: row["tokens"] in (1, 128, 4096),
    "attention-h200": lambda row: (
        (row["shape"] != "64/8 x 64" and row["page_size"] == 16)
        and (row["requests"], row["tokens"], row["context"])
        in ((1, 2048, 2048), (1, 1, 1024), (128, 1, 1024), (16, 1, 8192))
    ),
    "overlap-h200": lambda row: row["dispatcher"] == "nvlink",
}


def tables(folder: Path, tuning: Path) -> dict[str, str]:
    """Marker name -> Markdown, for every result that is there, and for the tilings that are shipped."""
    found = {}
    for name, benchmark, device, render, *takes in (
        ("moe-h200", "moe", "nvidia-h200", layer_on_gpu),
        ("moe-flashinfer-h200", "moe-flashinfer", "nvidia-h200", next_to_hopper),
        ("a2a-h200", "a2a", "nvidia-h200", exchange),
        ("a2a-libraries-h200", "a2a-libraries", "nvidia-h200", exchange),
        ("a2a-nvlink-x2-h200", "a2a-nvlink", "nvidia-h200-x2", next_to_gathering),
        ("a2a-nvlink-x4-h200", "a2a-nvlink", "nvidia-h200-x4", next_to_gathering, gathered),
        ("row-gemm-h200", "row-gemm", "nvidia-h200", row_products),
        ("attention-h200", "attention", "nvidia-h200", attention),
        ("attention-decode-blocks-h200", "attention-decode-blocks", "nvidia-h200", decode_blocks),
        ("server-cost-cpu", "server-cost", "", server_cost),
        ("two-batches-h200", "two-batches", "nvidia-h200", two_batches),
        ("overlap-h200", "overlap", "nvidia-h200", shared_expert),
    ):
        files = sorted(folder.glob(f"{benchmark}-{device}*.json"))
        measured = [(json.loads(file.read_text()), file) for file in files]
        measured = [(content, file) for content, file in measured if all(take(content) for take in takes)]
        if measured:
            content, file = measured[-1]
            found[name] = f"{provenance(content, file)}\n\n{render(content)}"
            if name in SHORT:
                shown = content | {"rows": [row for row in content["rows"] if SHORT[name](row)]}
                found[f"{name}-short"] = f"{provenance(content, file)}\n\n{render(shown)}"
    for name, benchmark, columns, lines_of in (
        ("moe-cpu", "moe", LAYER_ON_CPU, layer_on_cpu),
        ("serve-cpu", "serve", SERVING, serving),
    ):
        if files := newest_of_cpus(folder, benchmark):
            contents = [json.loads(file.read_text()) for file in files]
            runs = [f"* {provenance(*run)}" for run in zip(contents, files, strict=True)]
            lines = [[machine_of(content), *line] for content in contents for line in lines_of(content)]
            found[name] = "\n".join(runs) + "\n\n" + table(["machine", *columns], lines)
    served = sorted(folder.glob("serve-*nvidia-h200*.json"), key=lambda file: file.stem[-10:])
    # The newest run of each name, but for those that compare settings of the server.
    if runs_of := {file.stem[:-11]: file for file in served if not file.name.startswith("serve-s")}:
        found["serve-h200"] = serving_on_gpu(list(runs_of.values()))
    if both := newest(folder, "serving-beside-vllm-nvidia-h200*.json"):
        found["serving-next-to-vllm"] = next_to_vllm(both)
    ours, public = (sorted(folder.glob(f"{name}-nvidia-h200*.json")) for name in ("moe", "moe-public"))
    if ours and public:
        contents = [json.loads(files[-1].read_text()) for files in (ours, public)]
        found["moe-public-h200"] = f"{provenance(contents[0], ours[-1])}\n\n{next_to_public(*contents)}"
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
        f"[{file.name}](../benchmarks/results/{file.name})."
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
        mean, error = efficiency_and_error(ours.values())
        sizes = [tokens for tokens in TOKENS if any(tokens == at[1] for at in ours)]
        lines = [
            [shape, *(_cell(ours.get((shape, tokens)), peers.get((shape, tokens))) for tokens in sizes)]
            for shape in dict.fromkeys(shape for shape, _ in ours)
        ]
        routes = "" if routing == "uniform" else f", routing {routing}"
        about = f"geometric mean of the efficiency {mean}; largest error {error}"
        body = table(["shape", *(f"T={tokens}" for tokens in sizes)], lines)
        parts.append(f"**{format}**{routes} ({about})\n\n{body}")
    return "\n\n".join(parts)


def efficiency_and_error(rows: Iterable[dict[str, Any]]) -> tuple[str, str]:
    """The geometric mean of the one and the largest of the other."""
    rows = [row for row in rows if "efficiency" in row]
    mean = statistics.geometric_mean(row["efficiency"] for row in rows)
    return f"{mean:.2f}", f"{max(row['error'] for row in rows):.1e}"


def next_to_public(content: dict[str, Any], public: dict[str, Any]) -> str:
    """By format, with equally loaded experts: how near to the floor, the largest error, and how many times as
    fast as the fastest public kernel of each point, which was timed in another run."""
    ours: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in content["rows"]:
        if row["routing"] == "uniform" and not row.get("peer"):
            ours[row["format"]].append(row)
    faster, lines = layer_ratios(content, public), []
    for format, rows in ours.items():
        cells = [""] * 4
        if ratios := faster.get(format):
            behind = [f"{shape} T={T} {ratio:.2f}" for (_, shape, T), ratio in ratios.items() if ratio < 1]
            cells = [f"{of(ratios.values()):.2f}" for of in (statistics.geometric_mean, min, max)]
            cells.append(", ".join(behind) or "none")
        lines.append([format, *efficiency_and_error(rows), *cells])
    columns = ["format", "efficiency", "largest error", "geometric mean", "least", "most"]
    return table([*columns, "where the public kernel is ahead"], lines)


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


LAYER_ON_CPU = ["weights", *(f"T={tokens}" for tokens in (1, 16, 64, 256, 1024))]


def layer_on_cpu(content: dict[str, Any]) -> list[list[str]]:
    """By format and tokens, ms of our faster compute type, and how many times as fast as the fastest peer of
    any."""
    found: dict[tuple[str, int], dict[bool, float]] = defaultdict(dict)
    for row in content["rows"]:
        if "time_us" in row:
            at = found[row["format"], row["tokens"]]
            at[row["peer"]] = min(row["time_us"], at.get(row["peer"], math.inf))
    cells = {
        (format, f"T={tokens}"): f"{us[False] / 1e3:.2f} ({us[True] / us[False]:.2f}x)"
        for (format, tokens), us in found.items()
    }
    formats = dict.fromkeys(format for format, _ in cells)
    return [[format, *(cells.get((format, size), "") for size in LAYER_ON_CPU[1:])] for format in formats]


SERVING = [
    "clients",
    "output tokens/s",
    "TTFT, ms",
    "TPOT, ms",
    "memory, MB",
    "transformers, tokens/s",
    "ratio",
]


def serving(content: dict[str, Any]) -> list[list[str]]:
    """By concurrency, output tokens per second next to transformers' best at the same batch; of long prompts
    that end with their first token, prompts per second."""
    peers: dict[tuple[int, int], dict[str, Any]] = {}
    for row in content["rows"]:
        if "output_throughput" in row and row["system"] != "turnout":
            load = row["batch"], row.get("input_len", 64)
            if load not in peers or row["output_throughput"] > peers[load]["output_throughput"]:
                peers[load] = row
    lines = []
    for row in content["rows"]:
        if "output_throughput" not in row or row["system"] != "turnout":
            continue
        clients, length, rate = row["concurrency"], row["input_len"], row["output_throughput"]
        peer = peers.get((clients, length))
        digits = 0 if row["output_len"] > 1 else 1
        lines.append(
            [
                str(clients) if row["output_len"] > 1 else f"{clients}, {length} in, 1 out",
                f"{rate:.{digits}f}",
                f"{row['median_ttft_ms']:.0f}",
                f"{row['median_tpot_ms']:.1f}" if "median_tpot_ms" in row else "",
                f"{row['pss_mb']:.0f}",
                f"{peer['output_throughput']:.{digits}f} ({peer['experts']}, {peer['dtype']})"
                if peer
                else "",
                f"{rate / peer['output_throughput']:.2f}" if peer else "",
            ]
        )
    return lines


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
    formats = dict.fromkeys(row["format"] for row in content["rows"])
    several = len(formats) > 1
    lines = [
        [
            row["dispatcher"],
            *([row["format"]] if several else []),
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
    head = f"{first['devices']} ranks, hidden {first['hidden']}, top-{first['topk']} of {first['experts']}"
    columns = ["dispatcher", *["format"][: int(several)], "tokens of a rank"]
    columns += ["dispatch, us (x bare)", "combine, us (x bare)", "as a graph"]
    return f"{head}{'' if several else ', ' + first['format']}.\n\n" + table(columns, lines)


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
