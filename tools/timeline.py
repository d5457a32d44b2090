"""Draw what overlapped: timelines in results of tools.overlap and tools.two_batches, as SVG and as a trace.

    python -m tools.timeline RESULT.json ... --output timeline.svg --trace timeline.json

A row of a result that holds a `timeline`, kernels of one replay as torch's profiler saw them on rank 0,
becomes a panel: a lane for each stream, a box for each kernel, colours by what it belongs to. A stream on
which there are only dense products and elementwise kernels computes the shared expert. The trace is for
chrome://tracing or Perfetto.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

ROLES = {  # what a kernel belongs to, by its name; the first that matches
    "dispatch": r"dispatch_rows|AllGather|SendRecv|pack_rows",
    "combine": r"combine_rows|ReduceScatter|AllReduce|sum_rows|sum_parts",
    "experts": r"expert_gemm|_pairs|sorted|quantize|tile_slabs|spread_rows|weigh_rows",
    "router": r"choose_experts",
    "attention": r"atten|paged|fmha|flash|join_spans|rope",
    "dense": r"nvjet|gemm|cutlass|splitK|multiply_|decode_tile|add_parts",
}
SHARED, OTHER = "shared expert", "other"
COLORS = {
    "dispatch": "#1b6ca8", "combine": "#2a9d8f", "experts": "#d1495b", "router": "#6a4c93",
    "attention": "#e09f3e", "dense": "#9c6644", SHARED: "#3a7d44", OTHER: "#b8bdc6",
}  # fmt: skip
WIDTH, LEFT, LANE, HEAD, FOOT = 960, 86, 22, 30, 26


class Kernel(NamedTuple):
    """Times in us from the beginning of what is shown."""

    name: str
    stream: int
    start: float
    end: float
    role: str


def on_gpu(seen: Any) -> list[Any]:
    """The kernels that torch's profiler saw there, by start."""
    events = (event for event in seen.events() or () if event.device_type.name == "CUDA")
    return sorted(events, key=lambda event: event.time_range.start)


def recorded(shown: Sequence[Any]) -> list[dict[str, Any]]:
    """Some of them, as a result's row holds them."""
    begin = shown[0].time_range.start
    return [
        {
            "kernel": kernel.name[:60],
            "stream": kernel.device_resource_id,
            "start_us": kernel.time_range.start - begin,
            "end_us": kernel.time_range.end - begin,
        }
        for kernel in shown
    ]


def kernels(timeline: Iterable[Mapping[str, Any]]) -> list[Kernel]:
    """Of a row, by start, with their roles."""
    found = [
        Kernel(k["kernel"], k["stream"], k["start_us"], k["end_us"], _role(k["kernel"])) for k in timeline
    ]
    busy = {k.stream for k in found if k.role not in ("dense", OTHER)}
    dense = {k.stream for k in found if k.role == "dense"}
    apart = dense - busy
    named = [k._replace(role=SHARED) if k.stream in apart else k for k in found]
    return sorted(named, key=lambda k: k.start)


def svg(panels: Mapping[str, Sequence[Kernel]]) -> str:
    """Panels one below the other; titles -> kernels."""
    parts, y = [], 10
    for title, shown in panels.items():
        drawn, height = _panel(title, shown, y)
        parts += drawn
        y += height
    for i, (role, color) in enumerate(COLORS.items()):
        x = LEFT + i * 105
        parts += [
            f'<rect x="{x}" y="{y}" width="12" height="10" fill="{color}"/>',
            _text(x + 17, y + 9, role),
        ]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 24}" font-family="sans-serif" '
        f'font-size="11"><rect width="{WIDTH}" height="{y + 24}" fill="white"/>'
    )
    return "\n".join([head, *parts, "</svg>"]) + "\n"


def trace(panels: Mapping[str, Sequence[Kernel]]) -> dict[str, Any]:
    """The same as events of a trace, a process for each panel and a thread for each stream."""
    events: list[dict[str, Any]] = []
    for process, (title, shown) in enumerate(panels.items()):
        events.append({"name": "process_name", "ph": "M", "pid": process, "args": {"name": title}})
        events += [
            {
                "name": k.name,
                "cat": k.role,
                "ph": "X",
                "ts": k.start,
                "dur": k.end - k.start,
                "pid": process,
                "tid": k.stream,
            }
            for k in shown
        ]
    return {"traceEvents": events, "displayTimeUnit": "ns"}


def panels_of(content: Mapping[str, Any]) -> dict[str, list[Kernel]]:
    """Of all rows of a result that hold a timeline."""
    found = {}
    for row in content["rows"]:
        if row.get("timeline"):
            about = [content["benchmark"], row["dispatcher"], row.get("phase", ""), f"{row['tokens']} tokens"]
            title = f"{content['devices']} x {content['device']}: {', '.join(filter(None, about))}"
            found[title] = kernels(row["timeline"])
    return found


def _role(name: str) -> str:
    return next((role for role, pattern in ROLES.items() if re.search(pattern, name)), OTHER)


def _panel(title: str, shown: Sequence[Kernel], y: int) -> tuple[list[str], int]:
    """Elements, and the height that they take."""
    streams = list(dict.fromkeys(k.stream for k in shown))
    last = max(k.end for k in shown)
    scale = (WIDTH - LEFT - 20) / last
    bottom = y + HEAD + LANE * len(streams)
    parts = [_text(10, y + 14, title)]
    for lane, stream in enumerate(streams):
        parts.append(_text(10, y + HEAD + LANE * lane + 15, f"stream {stream}"))
    for tick in range(6):
        us = last * tick / 5
        parts.append(f'<path d="M{LEFT + us * scale:.1f} {y + HEAD}V{bottom}" stroke="#ddd"/>')
        parts.append(_text(round(LEFT + us * scale), bottom + 13, f"{us:.0f} us", anchor="middle"))
    for k in shown:
        top = y + HEAD + LANE * streams.index(k.stream) + 3
        place = f'x="{LEFT + k.start * scale:.1f}" y="{top}" height="{LANE - 6}"'
        size = f'width="{max(0.8, (k.end - k.start) * scale):.1f}" fill="{COLORS[k.role]}"'
        about = escape(f"{k.name}: {k.start:.0f} to {k.end:.0f} us, {k.role}")
        parts.append(f"<rect {place} {size}><title>{about}</title></rect>")
    return parts, bottom - y + FOOT


def _text(x: int, y: int, text: str, *, anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--output", type=Path, help="SVG")
    parser.add_argument("--trace", type=Path, help="JSON")
    options = parser.parse_args()
    panels: dict[str, list[Kernel]] = {}
    for file in options.results:
        panels |= panels_of(json.loads(file.read_text()))
    if not panels:
        parser.error("none of these results holds a timeline")
    if options.output is not None:
        options.output.write_text(svg(panels))
    if options.trace is not None:
        options.trace.write_text(json.dumps(trace(panels)))


if __name__ == "__main__":
    main()
