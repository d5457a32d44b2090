"""Tables of docs/performance.md and docs/notes about whole steps of the engine and serving, on GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tools.tables import table

PARTS = {  # of a step: words in the names of its kernels
    "experts": ("expert_gemm",),
    "around the experts": ("choose_experts", "place_pairs", "count_pairs", "sum_pairs", "quantize"),
    "dense products": ("multiply_", "decode_tile", "add_parts", "nvjet", "gemm", "cutlass", "cublas"),
    "attention": ("attend", "join_spans", "flash", "fmha"),
    "norms, rotations": ("norm_rows", "rotate_heads", "norm_latents", "rotate_tails", "gate_rows"),
}

ATTENTION_PEERS = ("triton", "flash-attn-4", "sdpa")


def serving_on_gpu(content: dict[str, Any]) -> str:
    """What clients saw of each model at each concurrency."""
    lines = [
        [
            row["model"],
            f"{row['input_len']:,} / {row['output_len']}",
            str(row["max_concurrency"]),
            f"{row['output_throughput']:,.0f}",
            f"{row['median_ttft_ms']:.0f}",
            f"{row['p99_ttft_ms']:.0f}",
            f"{row['median_tpot_ms']:.2f}",
        ]
        for row in sorted(
            content["rows"], key=lambda row: (row["model"], row["input_len"], row["max_concurrency"])
        )
    ]
    head = f"`{content['command']}`.\n\n"
    columns = ["model", "in / out", "concurrency", "output tokens/s", "TTFT, ms", "its p99", "TPOT, ms"]
    return head + table(columns, lines)


def steps(content: dict[str, Any]) -> str:
    """Decode steps in graphs, with the parts that their kernels' time goes to, in ms."""
    lines = []
    for row in content["rows"]:
        if row.get("decode") != "graphs":
            continue
        shares = shares_of(row)
        lines.append(
            [
                Path(row["model"]).name,
                str(row["requests"]),
                f"{row['step_ms']:.2f}",
                *(f"{shares[part] / 1e3:.2f}" for part in (*PARTS, "other")),
                str(row["launches"]),
                f"{row['tokens_per_s']:,.0f}",
            ]
        )
    return table(["model", "requests", "step, ms", *PARTS, "other", "launches", "tokens/s"], lines)


def prompts(content: dict[str, Any]) -> str:
    """Prompts, with the parts that their kernels' time goes to, in ms."""
    lines = []
    for row in content["rows"]:
        if "prompt_tokens" not in row:
            continue
        shares = shares_of(row)
        lines.append(
            [
                Path(row["model"]).name,
                f"{row['requests']} of {row['prompt_tokens']}",
                f"{1e3 * row['seconds']:.0f}",
                *(f"{shares[part] / 1e3:.1f}" for part in (*PARTS, "other")),
                f"{row['tokens_per_s']:,.0f}",
            ]
        )
    return table(["model", "prompts", "all, ms", *PARTS, "other", "tokens/s"], lines)


def shares_of(row: dict[str, Any]) -> dict[str, float]:
    """us by part; "other": what is left of all kernels."""
    shares = dict.fromkeys((*PARTS, "other"), 0.0)
    for kernel in row["kernels"]:
        name = kernel["name"].lower()
        part = next((part for part, words in PARTS.items() if any(word in name for word in words)), "other")
        shares[part] += kernel["us"]
    shares["other"] += row["kernel_us"] - sum(kernel["us"] for kernel in row["kernels"])
    return shares


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
