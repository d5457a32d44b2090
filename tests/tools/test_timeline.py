"""Timelines as they are drawn, from a committed result."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

from tools.timeline import COLORS, panels_of, svg, trace

RESULT = Path(__file__).parents[2] / "benchmarks/results/overlap-nvidia-h200-x2-2026-11-22.json"


def test_a_shared_expert_during_the_others():
    content = json.loads(RESULT.read_text())
    panels = panels_of(content)
    assert len(panels) == 3, "none, nvlink, nvlink-experts"
    panels = dict(list(panels.items())[:1])
    (shown,) = panels.values()
    roles = {kernel.role for kernel in shown}
    assert {"dispatch", "experts", "combine", "router", "shared expert"} <= roles
    shared = [kernel for kernel in shown if kernel.role == "shared expert"]
    assert len({kernel.stream for kernel in shared}) == 1
    experts = [kernel for kernel in shown if kernel.role == "experts"]
    assert any(one.start < other.end and other.start < one.end for one in shared for other in experts)

    drawn = ElementTree.fromstring(svg(panels)).findall("{*}rect")
    colors = [rect.get("fill") for rect in drawn if rect.find("{*}title") is not None]
    assert colors == [COLORS[kernel.role] for kernel in shown]
    events = [event for event in trace(panels)["traceEvents"] if event["ph"] == "X"]
    assert [(e["name"], e["ts"], round(e["ts"] + e["dur"], 6), e["tid"]) for e in events] == [
        (k.name, k.start, round(k.end, 6), k.stream) for k in shown
    ]
