"""The pictures of the documentation, from code and committed results.

    python -m tools.pictures            write docs/pipeline.svg and docs/moe-h200.svg

docs/pipeline.svg: the parts of a server and the MoE layer. docs/moe-h200.svg: ours as a line, the fastest
public kernel of each size dashed, both as shares of the floor that bytes and operations set.
"""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import escape

from tools.headline import newest

ROOT = Path(__file__).parents[1]
COLORS = ("#1b6ca8", "#d1495b", "#3a7d44", "#e09f3e", "#6a4c93", "#2a9d8f")
TOP = 1.2  # of the axis: weights are read faster than the copy that the floor is measured with
INK, LINE, PALE, STRONG = "#1f2933", "#7b8794", "#f0f4f8", "#d9e8f5"


def text(
    x: float, y: float, words: str, size: int = 12, anchor: str = "middle", weight: str = "normal"
) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" font-weight="{weight}" '
        f'fill="{INK}">{escape(words)}</text>'
    )


def box(
    x: float, y: float, width: float, height: float, title: str, *lines: str, fill: str = PALE
) -> list[str]:
    parts = [
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" fill="{fill}" '
        f'stroke="{LINE}"/>',
        text(x + width / 2, y + 19, title, 13, weight="bold"),
    ]
    return parts + [text(x + width / 2, y + 37 + 15 * i, line, 11) for i, line in enumerate(lines)]


def arrow(x: float, y: float, dx: float, dy: float = 0) -> str:
    return f'<path d="M{x:g} {y:g}l{dx:g} {dy:g}" stroke="{INK}" stroke-width="1.4" marker-end="url(#head)"/>'


def frame(width: int, height: int, parts: list[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">'
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" '
        'markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0L8 4L0 8z" fill="{INK}"/></marker></defs>'
        f'<rect width="{width}" height="{height}" fill="white"/>'
    )
    return "\n".join([head, *parts, "</svg>"]) + "\n"


def pipeline() -> str:
    """A request's way through the server above, the MoE layer inside a forward below."""
    parts: list[str] = []
    stages = (
        ("HTTP", "OpenAI routes", "limits, template"),
        ("router", "load and prefix", "of each rank"),
        ("scheduler", "decode first,", "prefill in chunks"),
        ("forward", "attention, KV pages", "experts"),
        ("sample", "on the device,", "per seed, position"),
        ("stream", "detokenise,", "stop, usage"),
    )
    for i, (title, *lines) in enumerate(stages):
        parts += box(14 + 146 * i, 36, 124, 70, title, *lines)
        if i:
            parts.append(arrow(14 + 146 * i - 21, 71, 18))
    parts.append(text(14, 22, "server process (no torch)", 11, "start"))
    parts.append(text(306, 22, "one process per rank, all in step", 11, "start"))
    parts += [
        f'<path d="M296 28v86" stroke="{LINE}" stroke-dasharray="4 3"/>',
        f'<path d="M734 28v86" stroke="{LINE}" stroke-dasharray="4 3"/>',
        f'<path d="M452 106L14 150M576 106L866 150" stroke="{LINE}" stroke-dasharray="2 3" fill="none"/>',
        f'<rect x="14" y="150" width="852" height="150" rx="8" fill="white" stroke="{LINE}"/>',
        text(26, 168, "the MoE layer", 11, "start"),
    ]
    layer = (
        ("route", "softmax or sigmoid,", "top-k, correction bias", "one kernel"),
        ("dispatch", "tokens to the ranks", "of their experts:", "NVLink stores, NCCL, DeepEP"),
        ("experts", "grouped GEMMs in bf16,", "FP8, MXFP4, NVFP4:", "Hopper, CPU, FlashInfer"),
        ("combine", "results back, weighted", "and summed in", "a fixed order"),
    )
    for i, (title, *lines) in enumerate(layer):
        parts += box(30 + 212 * i, 180, 184, 84, title, *lines, fill=STRONG)
        if i:
            parts.append(arrow(30 + 212 * i - 26, 222, 23))
    words = "the planner joins them by layout and format, sizes every buffer, "
    words += "and refuses with reasons before weights load"
    parts.append(text(440, 286, words, 11))
    return frame(880, 312, parts)


def layer_plot(folder: Path) -> str:
    """A panel per format: by tokens of a batch, the share of the floor that ours and public kernels reach."""
    ours, public = newest(folder, "moe-nvidia-h200*.json"), newest(folder, "moe-public-nvidia-h200*.json")
    theirs = {(r["format"], r["shape"], r["tokens"]): r["time_us"] for r in public["rows"]}
    rows = [r for r in ours["rows"] if r["routing"] == "uniform" and not r.get("peer") and "efficiency" in r]
    formats = [f for f in dict.fromkeys(r["format"] for r in rows) if any(f == key[0] for key in theirs)]
    shapes = list(dict.fromkeys(r["shape"] for r in rows))
    sizes = sorted({r["tokens"] for r in rows})
    width, height, left, above = 430, 250, 36, 60
    head = f"{ours['device']}: share of the floor (bytes over bandwidth, operations over rate), by tokens"
    parts = [
        text(12, 20, head, 13, "start", "bold"),
        text(12, 40, "line: Turnout; dashed: the fastest public kernel of that size", 12, "start"),
    ]
    for place, format in enumerate(formats):
        x0, y0 = left + width * (place % 2), above + height * (place // 2)
        wide, tall = width - 60, height - 60
        parts.append(text(x0, y0 + 12, format, 12, "start", "bold"))
        for tick in (0, 0.25, 0.5, 0.75, 1):
            y = y0 + 20 + (1 - tick / TOP) * tall
            parts.append(f'<path d="M{x0:g} {y:g}h{wide:g}" stroke="#e4e7eb"/>')
            parts.append(text(x0 - 6, y + 4, f"{tick:g}", 10, "end"))
        for i, size in enumerate(sizes):
            parts.append(text(x0 + wide * i / (len(sizes) - 1), y0 + tall + 36, f"{size:,}", 10))
        for shape, color in zip(shapes, COLORS, strict=False):
            mine = sorted(
                (r["tokens"], r["efficiency"], r["time_us"])
                for r in rows
                if (r["format"], r["shape"]) == (format, shape)
            )
            peer = [
                (n, e * us / theirs[format, shape, n]) for n, e, us in mine if (format, shape, n) in theirs
            ]
            for points, dashes in (([(n, e) for n, e, _ in mine], ""), (peer, ' stroke-dasharray="5 4"')):
                path = " ".join(
                    f"{x0 + wide * sizes.index(n) / (len(sizes) - 1):.1f},"
                    f"{y0 + 20 + (1 - e / TOP) * tall:.1f}"
                    for n, e in points
                )
                parts.append(
                    f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.7"{dashes}/>'
                )
    bottom = above + height * -(-len(formats) // 2) + 6
    for i, (shape, color) in enumerate(zip(shapes, COLORS, strict=False)):
        x = 36 + 138 * i
        parts.append(f'<rect x="{x}" y="{bottom}" width="16" height="4" fill="{color}"/>')
        parts.append(text(x + 21, bottom + 6, shape, 11, "start"))
    return frame(2 * width, bottom + 20, parts)


def pictures(root: Path) -> dict[Path, str]:
    return {
        root / "docs" / "pipeline.svg": pipeline(),
        root / "docs" / "moe-h200.svg": layer_plot(root / "benchmarks" / "results"),
    }


if __name__ == "__main__":
    for path, content in pictures(ROOT).items():
        path.write_text(content)
        print(path.relative_to(ROOT))
