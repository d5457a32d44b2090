"""Plots of results as SVG, written by hand: lines over a logarithmic axis need no library."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

from turnout.vocabulary import Format

COLORS = ("#1b6ca8", "#d1495b", "#3a7d44", "#e09f3e", "#6a4c93", "#5c677d", "#2a9d8f", "#9c6644")
WIDTH, HEIGHT, LEFT, TOP, LEGEND = 340, 220, 40, 34, 18
Series = Mapping[str, Sequence[tuple[float, float]]]  # name -> points (x, y)


def efficiency(content: dict[str, Any]) -> str:
    """SVG of a layer benchmark: our share of the roofline by tokens, a panel per format and routing."""
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in content["rows"]:
        if "efficiency" in row and not row.get("peer") and row["tokens"] > 0:
            title = f"{row['format']}, {row['routing']} routing"
            name = row["shape"] + (" float32" if row["compute_dtype"] == "float32" else "")
            panels.setdefault(title, {}).setdefault(name, []).append((row["tokens"], row["efficiency"]))
    head = f"{content['device']}: share of the roofline, by tokens of a batch"
    return lines(head, panels)


def wire(content: dict[str, Any]) -> str:
    """SVG of `bench a2a`: what of the rate between ranks each dispatcher reaches, a panel per format."""
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in content["rows"]:
        if "wire_share" in row and row["tokens"] > 0:
            back = (
                f", back in {row['combine_format']}"
                if row.get("combine_format", "bf16") != Format.BF16
                else ""
            )
            series = panels.setdefault(f"{row['format']}{back}, {row['routing']} routing", {})
            series.setdefault(row["dispatcher"], []).append((row["tokens"], row["wire_share"]))
    head = f"{content['devices']} x {content['device']}: share of the wire, by tokens of a rank"
    return lines(head, panels)


def lines(head: str, panels: Mapping[str, Series]) -> str:
    """Panels side by side, two a row: y from 0 to 1 or the largest value, x by powers of two; one legend."""
    names = list(dict.fromkeys(name for series in panels.values() for name in series))
    color = {name: COLORS[i % len(COLORS)] for i, name in enumerate(names)}
    columns = min(2, max(1, len(panels)))
    rows = -(-len(panels) // columns)
    width, height = columns * WIDTH, TOP + rows * HEIGHT + LEGEND * -(-len(names) // (2 * columns)) + 12
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        _text(10, 20, head, size=13),
    ]
    for place, (title, series) in enumerate(panels.items()):
        x, y = WIDTH * (place % columns), TOP + HEIGHT * (place // columns)
        parts += _panel(x, y, title, series, color)
    for i, name in enumerate(names):
        x = 12 + (i % (2 * columns)) * WIDTH // 2
        y = TOP + rows * HEIGHT + LEGEND * (i // (2 * columns)) + 10
        parts.append(f'<rect x="{x}" y="{y - 8}" width="14" height="4" fill="{color[name]}"/>')
        parts.append(_text(x + 19, y - 2, name))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(x: int, y: int, title: str, series: Series, color: Mapping[str, str]) -> list[str]:
    points = [point for line in series.values() for point in line]
    low, high = (math.log2(f(point[0] for point in points)) for f in (min, max))
    top = max(1.0, *(point[1] for point in points))
    inner_width, inner_height = WIDTH - LEFT - 26, HEIGHT - 56

    def at(tokens: float, value: float) -> tuple[float, float]:
        share = (math.log2(tokens) - low) / (high - low or 1)
        return x + LEFT + share * inner_width, y + 24 + (1 - value / top) * inner_height

    parts = [_text(x + LEFT, y + 14, title, size=12)]
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        left, level = at(2**low, tick)
        parts.append(f'<path d="M{left:.1f} {level:.1f}h{inner_width}" stroke="#ddd"/>')
        parts.append(_text(x + 12, round(level) + 4, f"{tick:g}"))
    for tokens in sorted({point[0] for point in points}):
        across, _ = at(tokens, 0)
        parts.append(_text(round(across), y + HEIGHT - 16, f"{tokens:g}", anchor="middle"))
    for name, line in series.items():
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in (at(*point) for point in sorted(line)))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color[name]}" stroke-width="1.8"/>')
    return parts


def _text(x: int, y: int, text: str, *, size: int = 11, anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}">{escape(text)}</text>'
