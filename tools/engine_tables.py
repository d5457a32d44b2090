"""Tables of docs/performance.md and docs/notes about whole steps of the engine and serving, on GPUs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.tables import table

ATTENTION_PEERS = ("triton", "flash-attn-4", "sdpa")
SERVERS = ("own", "baseline")
COST_FIGURES = (("server_share_of_a_core", ".2f"), ("tokens_per_s", ",.0f"))


def serving_on_gpu(files: Sequence[Path]) -> str:
    """What clients saw of each model, GPUs and load. The oldest file comes first, the newest counts."""
    newest = {}
    for file in files:
        content = json.loads(file.read_text())
        link = f"[{content['date']}](../benchmarks/results/{file.name})"
        for row in content["rows"]:
            load = row["input_len"], row["output_len"], row["max_concurrency"]
            newest[row["model"], content["devices"], *load] = row, link
    lines = [
        [
            model,
            str(gpus),
            f"{given:,} / {made}",
            str(clients),
            f"{row['output_throughput']:,.0f}",
            *(f"{row[name]:.0f}" for name in ("median_ttft_ms", "p99_ttft_ms")),
            f"{row['median_tpot_ms']:.2f}",
            link,
        ]
        for (model, gpus, given, made, clients), (row, link) in sorted(newest.items())
    ]
    columns = ["model", "GPUs", "in / out", "clients", "output tokens/s", "TTFT, ms", "its p99", "TPOT, ms"]
    return table([*columns, "measured"], lines)


def two_batches(content: dict[str, Any]) -> str:
    """Steps as one batch and as two."""
    lines = [
        [
            f"`{row['dispatcher']}`",
            row["phase"],
            str(row["tokens"]),
            f"{row['one_batch_ms']:.2f}",
            f"{row['two_batches_ms']:.2f}",
            f"{row['one_batch_ms'] / row['two_batches_ms']:.2f}",
        ]
        for row in content["rows"]
    ]
    columns = ["dispatcher", "phase", "tokens of a rank", "one batch, ms", "two micro-batches, ms", "ratio"]
    return table(columns, lines)


def attention(content: dict[str, Any]) -> str:
    """us of one layer's attention by kernel, and the rate at which decoding reads keys and values."""
    found: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for row in content["rows"]:
        load = f"{row['requests']} of {row['tokens']}" if row["tokens"] > 1 else f"{row['requests']} decode"
        found.setdefault((row["shape"], load, row["context"], row["page_size"]), {})[row["peer"]] = row
    lines = []
    for (shape, load, context, page_size), rows in found.items():
        times = [f"{row['us']:,.0f}" if (row := rows[peer]).get("us") else "" for peer in ATTENTION_PEERS]
        rate = rows["triton"].get("kv_tb_per_s")
        lines.append([shape, load, f"{context:,}", str(page_size), *times, f"{rate:.2f}" if rate else ""])
    columns = ["heads x size", "requests", "context", "page", "Triton, us", "flash-attn-4, us", "SDPA, us"]
    return table([*columns, "Triton, TB/s of KV"], lines)


def decode_blocks(content: dict[str, Any]) -> str:
    """us of one layer's decoding, by how many tokens a program attends to at a time."""
    found: dict[tuple[Any, ...], dict[int, float]] = {}
    for row in content["rows"]:
        if "decode_block" in row:
            load = (row["shape"], row["requests"], row["context"], row["page_size"])
            found.setdefault(load, {})[row["decode_block"]] = row["us"]
    blocks = sorted({block for of_load in found.values() for block in of_load})
    lines = [
        [
            shape,
            str(requests),
            f"{context:,}",
            str(page_size),
            *(f"{us[block]:.1f}" if block in us else "" for block in blocks),
        ]
        for (shape, requests, context, page_size), us in found.items()
    ]
    columns = ["heads x size", "requests", "context", "page"]
    return table([*columns, *(f"{block} tokens, us" for block in blocks)], lines)


def server_cost(content: dict[str, Any]) -> str:
    """CPU time of the server process for a streamed token, next to another commit's in turns."""
    lines = [
        [
            str(row["clients"]),
            str(row["tokens"]),
            *(f"{row[name]['server_us_per_token']:.0f} ({_range(row['rounds'][name])})" for name in SERVERS),
            f"{row['cpu_ratio']:.2f}",
            *(f"{row['own'][figure]:{digits}}" for figure, digits in COST_FIGURES),
        ]
        for row in content["rows"]
        if "baseline" in row
    ]
    before = f"at `{content['rows'][0]['baseline_commit']}`"
    columns = ["clients", "tokens of an answer", "us a token", before, "ratio", "of a core", "tokens/s"]
    return table(columns, lines)


def _range(rounds: Sequence[dict[str, float]]) -> str:
    costs = [one["server_us_per_token"] for one in rounds]
    return f"{min(costs):.0f} to {max(costs):.0f}"
