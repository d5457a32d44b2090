"""What `bench a2a` shows of a result."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console
from rich.table import Table

TABLE_WIDTH = 140


def progress(row: dict[str, Any]) -> None:
    """A line as soon as a point is measured."""
    graph = f", {row['graph_us']:.1f} us in a graph" if "graph_us" in row else ""
    found = row.get("error_message") or f"{row['dispatch_us']:.1f} + {row['combine_us']:.1f} us{graph}"
    formats = f"{row['format']}, back in {row['combine_format']}"
    head = f"{row['dispatcher']} {formats}, {row['routing']}, {row['tokens']} tokens"
    sys.stderr.write(f"{head}: {found}\n")


def show(content: dict[str, Any]) -> None:
    table = Table(
        "dispatcher", "routing", "format", "back", "tokens", "dispatch us", "x raw", "combine us", "x raw",
        "graph us", "MB sent", "of wire", "error",
        title=f"Dispatch and combine, {content['devices']} x {content['device']}",
    )  # fmt: skip
    failed: dict[str, list[str]] = {}  # message -> points
    for row in content["rows"]:
        head = [row["dispatcher"], row["routing"], row["format"], row["combine_format"], str(row["tokens"])]
        if "error_message" in row:
            table.add_row(*head, "failed")
            failed.setdefault(row["error_message"], []).append(" ".join(head))
            continue
        cells = []
        for part in ("dispatch", "combine"):
            mine, raw = row[f"{part}_us"], row[f"raw_{part}_us"]
            cells += [f"{mine:.0f}", f"{mine / raw:.2f}"]
        graph = f"{row['graph_us']:.1f}" if "graph_us" in row else ""
        sent = [f"{row['wire_bytes'] / 1e6:.2f}", f"{row['wire_share']:.0%}"]
        table.add_row(*head, *cells, graph, *sent, f"{row['error']:.1e}")
    console = Console()
    console.width = max(console.width, TABLE_WIDTH)  # a pipe has 80 columns
    console.print(table)
    for message, points in failed.items():
        console.print(f"failed: {'; '.join(points)}: {message}", highlight=False, markup=False)
