"""Draw what overlapped, as SVG and as a trace: timelines in results of tools.overlap and tools.two_batches,
and steps in a server's profiles.

    python -m tools.timeline RESULT.json ... --output timeline.svg --trace timeline.json
    python -m tools.timeline before.json after.json --steps 10 --output steps.svg
    python -m tools.timeline profile.json --all-ranks 700 --output ranks.svg

A profile, the Chrome trace that `/stop_profile` answers with, becomes two panels: the first --steps steps in
a row that did nothing but decode, and the first with prompts, as rank --rank saw them. Lanes are the steps on
the host and the GPU's streams with the kernels that these steps launched; on a CPU the operators of its
threads. The title says in which part of the time at least one of them ran. tools.step_timeline records such
profiles. With --all-ranks it becomes one panel instead: the first so many us of one decode step, with a lane
for each rank. Its title says how much longer an exchange took on the rank that waited most than on the one
that came last, on average, of all exchanges of the step: a rank that is late waits for none.

A row of a result that holds a `timeline`, kernels of one replay as torch's profiler saw them on rank 0,
becomes a panel: a lane for each stream, a box for each kernel, colours by what it belongs to. A stream on
which there are only dense products and elementwise kernels computes the shared expert. The trace is for
chrome://tracing or Perfetto.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

from tools.command_line import parser_for
from turnout.engine.profiling import PIDS, STEP
from turnout.vocabulary import Phase

ROLES = {  # what a kernel belongs to, by its name; the first that matches
    "dispatch": r"dispatch_rows|AllGather|SendRecv|pack_rows",
    "combine": r"combine_rows|ReduceScatter|AllReduce|sum_rows|sum_parts",
    "experts": r"expert_gemm|_pairs|sorted|quantize|tile_(?:slabs|batched_experts)|spread_rows|weigh_rows",
    "router": r"choose_experts",
    "attention": r"atten|paged|fmha|flash|join_spans|rope",
    "dense": r"nvjet|gemm|cutlass|splitK|multiply_|decode_tile|add_parts|aten::(linear|matmul|mm|addmm)",
}
LAUNCHES = ("cuda_runtime", "cuda_driver")  # categories of a trace
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
HOST = "host"
SHARED, OTHER = "shared expert", "other"
COLORS = {
    "dispatch": "#1b6ca8", "combine": "#2a9d8f", "experts": "#d1495b", "router": "#6a4c93",
    "attention": "#e09f3e", "dense": "#9c6644", SHARED: "#3a7d44", OTHER: "#b8bdc6",
}  # fmt: skip
WIDTH, LEFT, LANE, HEAD, FOOT = 960, 86, 22, 30, 26


class Kernel(NamedTuple):
    """Times in us from the beginning of what is shown."""

    name: str
    stream: int | str  # or what the lane is called
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


def panels_of_profile(
    content: Mapping[str, Any], name: str, steps: int, rank: int
) -> dict[str, list[Kernel]]:
    """Of a Chrome trace: `steps` steps in a row that only decode, and one with prompts, where there are any.

    Raises ValueError if the trace holds no step of `rank` with its phase.
    """
    events = [e for e in content["traceEvents"] if e.get("ph") == "X" and e["pid"] // PIDS == rank]
    spans = [e for e in events if e["name"] == STEP and e.get("cat") == "user_annotation"]
    found = sorted((e for e in spans if e["args"].get("phase")), key=lambda e: e["ts"])
    if not found:
        raise ValueError(f"{name}: no step of rank {rank} says its phase; record one with /start_profile")
    phases = [step["args"]["phase"] for step in found]
    runs = [i for i in range(len(found)) if phases[i : i + steps] == [Phase.DECODE] * steps]
    panels = {}
    if runs:
        panels[f"{steps} steps of decoding"] = found[runs[0] :][:steps]
    if Phase.PREFILL in phases:
        panels["a step with prompts"] = [found[phases.index(Phase.PREFILL)]]
    drawn = {about: _of_steps(events, chosen) for about, chosen in panels.items()}
    return {f"{name}: {about}, busy {busy(_spans(shown)):.1%}": shown for about, shown in drawn.items()}


def panel_of_ranks(content: Mapping[str, Any], name: str, us: float) -> dict[str, list[Kernel]]:
    """Of a Chrome trace: the kernels of one decode step in the middle, on all ranks, as far as they begin
    within its first `us`. Raises ValueError if a rank has no step that decodes."""
    events = [e for e in content["traceEvents"] if e.get("ph") == "X"]
    ranks = sorted({e["pid"] // PIDS for e in events if e["name"] == STEP})
    of_rank = {rank: [e for e in events if e["pid"] // PIDS == rank] for rank in ranks}
    chosen: dict[int, Mapping[str, Any]] = {}
    for rank in ranks:
        steps = [e for e in of_rank[rank] if e["name"] == STEP and e["args"].get("phase") == Phase.DECODE]
        if not steps:
            raise ValueError(f"{name}: no step of rank {rank} decodes")
        if not chosen:
            begin = sorted(e["ts"] for e in steps)[len(steps) // 2]
        chosen[rank] = min(steps, key=lambda e: abs(e["ts"] - begin))
    work = {rank: _launched(of_rank[rank], [step]) for rank, step in chosen.items()}
    first = min(e["ts"] for some in work.values() for e in some)
    waits = []
    for role in ("dispatch", "combine"):
        took = [[e["dur"] for e in some if _role(e["name"]) == role] for some in work.values()]
        waits += [max(same) - min(same) for same in zip(*took, strict=True)]
    waited = f", waits of {sum(waits) / len(waits):.1f} us in an exchange" if waits else ""
    shown = [
        Kernel(e["name"][:60], f"rank {rank}", e["ts"] - first, e["ts"] + e["dur"] - first, _role(e["name"]))
        for rank, some in work.items()
        for e in sorted(some, key=lambda e: e["ts"])
        if e["ts"] - first <= us
    ]
    return {f"{name}: a step of decoding on {len(ranks)} ranks{waited}": shown}


def busy(spans: Iterable[tuple[float, float]]) -> float:
    """The part of the time from the first start to the last end that lies in at least one span."""
    spans = sorted(spans)
    whole = max((stop for _, stop in spans), default=0.0) - (spans[0][0] if spans else 0.0)
    return covered(spans) / whole if whole > 0 else 0.0


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The time that lies in at least one span."""
    found, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        found += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return found


def _within(event: Mapping[str, Any], steps: Sequence[Mapping[str, Any]]) -> bool:
    """Whether it began during one of `steps`."""
    return any(step["ts"] <= event["ts"] <= step["ts"] + step["dur"] for step in steps)


def _launched(
    events: Sequence[Mapping[str, Any]], steps: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """What `steps` launched on a GPU."""
    launches = {
        e["args"].get("correlation") for e in events if e.get("cat") in LAUNCHES and _within(e, steps)
    }
    return [e for e in events if e.get("cat") in ON_GPU and e["args"].get("correlation") in launches]


def _of_steps(events: Sequence[Mapping[str, Any]], steps: Sequence[Mapping[str, Any]]) -> list[Kernel]:
    """The kernels that `steps` launched, or else their operators, and the steps themselves."""
    work = _launched(events, steps)
    lanes = {id(e): e["args"].get("stream", e["tid"]) for e in work}
    if not work:
        work = _outermost([e for e in events if e.get("cat") == "cpu_op" and _within(e, steps)])
        lanes = {id(e): f"thread {e['tid']}" for e in work}
    first = min(e["ts"] for e in (*work, *steps))
    timeline = [
        {
            "kernel": e["name"][:60],
            "stream": lanes[id(e)],
            "start_us": e["ts"] - first,
            "end_us": e["ts"] + e["dur"] - first,
        }
        for e in work
    ]
    host = [Kernel(f"{e['args']['phase']} step", HOST, e["ts"], e["ts"] + e["dur"], OTHER) for e in steps]
    return [k._replace(start=k.start - first, end=k.end - first) for k in host] + kernels(timeline)


def joined(shown: Sequence[Kernel]) -> list[Kernel]:
    """With neighbours as one box where a drawing could not tell them apart: of one role, in one lane."""
    pixel = max(k.end for k in shown) / (WIDTH - LEFT - 20)
    boxes: list[Kernel] = []
    last: dict[int | str, int] = {}  # lane -> its last box
    for k in shown:
        at = last.get(k.stream)
        if at is None or boxes[at].role != k.role or k.stream == HOST or k.start - boxes[at].end > pixel / 2:
            last[k.stream] = len(boxes)
            boxes.append(k)
        elif k.end > boxes[at].end:
            first = boxes[at].name.partition(" to ")[0]
            boxes[at] = boxes[at]._replace(name=f"{first} to {k.name}", end=k.end)
    return boxes


def _outermost(events: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Without those that another one of their thread called."""
    found: list[Mapping[str, Any]] = []
    ends: dict[Any, float] = {}
    for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        if event["ts"] >= ends.get(event["tid"], 0.0):
            ends[event["tid"]] = event["ts"] + event["dur"]
            found.append(event)
    return found


def _spans(shown: Iterable[Kernel]) -> list[tuple[float, float]]:
    return [(k.start, k.end) for k in shown if k.stream != HOST]


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
        name = f"stream {stream}" if isinstance(stream, int) else stream
        parts.append(_text(10, y + HEAD + LANE * lane + 15, name))
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
    parser = parser_for(__doc__)
    parser.add_argument("results", type=Path, nargs="+", help="JSON: results or profiles")
    parser.add_argument("--steps", type=int, default=10, help="of decoding, in a panel")
    parser.add_argument("--rank", type=int, default=0, help="whose steps of a profile")
    parser.add_argument("--all-ranks", type=float, metavar="US", help="so much of one step, of all ranks")
    parser.add_argument("--output", type=Path, help="SVG")
    parser.add_argument("--trace", type=Path, help="JSON")
    options = parser.parse_args()
    panels: dict[str, list[Kernel]] = {}
    try:
        for file in options.results:
            content = json.loads(file.read_text())
            if "traceEvents" in content and options.all_ranks:
                panels |= panel_of_ranks(content, file.stem, options.all_ranks)
            elif "traceEvents" in content:
                panels |= panels_of_profile(content, file.stem, options.steps, options.rank)
            else:
                panels |= panels_of(content)
    except ValueError as error:
        parser.error(str(error))
    if not panels:
        parser.error("none of these results holds a timeline")
    if options.output is not None:
        options.output.write_text(svg({title: joined(shown) for title, shown in panels.items()}))
    if options.trace is not None:
        options.trace.write_text(json.dumps(trace(panels)))


if __name__ == "__main__":
    main()
