"""Timelines as they are drawn, from a committed result and from profiles."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tools import step_timeline
from tools.timeline import (
    COLORS,
    HOST,
    busy,
    joined,
    panel_of_ranks,
    panels_of,
    panels_of_profile,
    svg,
    trace,
)
from turnout import LLM

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


@pytest.mark.parametrize("engine", ["before", "after"])
def test_steps_of_an_engine(tiny_folder: Path, engine: str):
    with LLM(str(tiny_folder), device="cpu", max_total_tokens=1024, overlap_schedule="on") as llm:
        core = llm._open()
        with step_timeline.before(core) if engine == "before" else nullcontext():
            content = step_timeline.record(core, steps=3, prompt=20, requests=2)
        assert (core.stats().overlapped_steps > 0) == (engine == "after")
        assert core._overlap
    decoding, prompt = panels_of_profile(content, engine, 3, rank=0).items()
    for (title, shown), about, count in (
        (decoding, "3 steps of decoding", 3),
        (prompt, "a step with prompts", 1),
    ):
        assert title.startswith(f"{engine}: {about}, busy ")
        steps = [k for k in shown if k.stream == HOST]
        work = [k for k in shown if k.stream != HOST]
        assert [k.name for k in steps] == ["decode step" if count > 1 else "prefill step"] * count
        assert all(any(step.start <= k.start <= step.end for step in steps) for k in work)
        assert sum("embedding" in k.name for k in work) == count  # a forward each
        assert len({k.name for k in work}) > 5
        boxes = joined(shown)
        assert len(steps) < len(boxes) < len(shown)
        assert {(k.stream, k.role) for k in boxes} == {(k.stream, k.role) for k in shown}
    with pytest.raises(ValueError, match="no step of rank 1 says its phase"):
        panels_of_profile(content, engine, 3, rank=1)


def test_kernels_belong_to_the_step_that_launched_them():
    """Two steps of a rank, each with a graph of two kernels, which run while the next step is on the host."""

    def event(name: str, cat: str, ts: float, dur: float, tid: int, **args: object) -> dict[str, object]:
        place = {"ph": "X", "ts": ts, "dur": dur, "pid": 1001, "tid": tid}
        return place | {"name": name, "cat": cat, "args": args}

    events = []
    for number, begin in enumerate((1000.0, 1100.0, 1200.0)):
        events.append(event("step", "user_annotation", begin, 90.0, 5, phase="decode"))
        events.append(event("cudaGraphLaunch", "cuda_runtime", begin + 40, 5.0, 5, correlation=number))
        for at, name, stream in ((60, "expert_gemm", 7), (100, "dispatch_rows", 8)):
            ran = event(name, "kernel", begin + at, 30.0, stream, correlation=number, stream=stream)
            events.append(ran)
    ((title, shown),) = panels_of_profile({"traceEvents": events}, "profile", 2, rank=1).items()
    assert title == "profile: 2 steps of decoding, busy 70.6%"
    assert [(k.name, k.stream, k.start, k.end, k.role) for k in shown] == [
        ("decode step", HOST, 0, 90, "other"),
        ("decode step", HOST, 100, 190, "other"),
        ("expert_gemm", 7, 60, 90, "experts"),
        ("dispatch_rows", 8, 100, 130, "dispatch"),
        ("expert_gemm", 7, 160, 190, "experts"),
        ("dispatch_rows", 8, 200, 230, "dispatch"),
    ]


def test_a_step_of_all_ranks_tells_who_waited():
    """Two ranks, of which the second comes late to the dispatch, so that the first waits, and the other way
    round in combine."""

    def event(rank: int, name: str, cat: str, ts: float, dur: float, **args: object) -> dict[str, object]:
        place = {"ph": "X", "ts": ts, "dur": dur, "pid": 1000 * rank, "tid": 1}
        return place | {"name": name, "cat": cat, "args": args}

    events = []
    for rank, (dispatch, combine) in enumerate(((30.0, 5.0), (10.0, 8.0))):
        for step, begin in enumerate((0.0, 1000.0, 2000.0)):
            base = begin + rank
            events.append(event(rank, "step", "user_annotation", base, 90.0, phase="decode"))
            events.append(event(rank, "cudaGraphLaunch", "cuda_runtime", base + 40, 5.0, correlation=step))
            for at, name, took in ((60, "dispatch_rows", dispatch), (300, "combine_rows", combine)):
                events.append(event(rank, name, "kernel", base + at, took, correlation=step, stream=7))
    ((title, shown),) = panel_of_ranks({"traceEvents": events}, "two", 100.0).items()
    assert title == "two: a step of decoding on 2 ranks, waits of 11.5 us in an exchange"
    assert [(k.name, k.stream, k.start, k.end) for k in shown] == [
        ("dispatch_rows", "rank 0", 0, 30), ("dispatch_rows", "rank 1", 1, 11)
    ]  # fmt: skip
    with pytest.raises(ValueError, match="no step of rank 0 decodes"):
        panel_of_ranks({"traceEvents": [events[0] | {"args": {"phase": "prefill"}}]}, "none", 100.0)


def test_busy_counts_overlapping_kernels_once():
    assert busy([]) == 0
    assert busy([(6.0, 8.0), (0.0, 2.0), (1.0, 4.0), (3.0, 3.5), (8.0, 10.0)]) == 0.8
