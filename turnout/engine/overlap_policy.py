"""Whether a step is launched before the tokens of the one before it are read. All ranks decide alike.

Where it may, a step that brings drafts, or comes after one that did, still waits (core.py).
"""

from __future__ import annotations

from turnout.engine.engine_plan import EnginePlan


def why_no_overlap(engine_plan: EnginePlan) -> str:
    """Why steps wait for the tokens of the one before, or "" if they do not."""
    config = engine_plan.config
    if config.drafts_by_layer:
        return "a draft layer goes over tokens that the host has to know first"
    has_near_ties = engine_plan.compute_dtype == "float32"
    if config.speculative and has_near_ties and engine_plan.topology.dp_size > 1:
        return "ranks decide near-ties together after each step, and each has drafts of its own"
    if config.deterministic:
        return "--deterministic computes each token apart, from what the host knows"
    if engine_plan.keeps_states and has_near_ties:
        return "a near-tie decided late would have taken the states of requests over a wrong token"
    if config.disable_overlap_schedule:
        return "asked for with --disable-overlap-schedule"
    if config.overlap_schedule == "off":
        return "asked for with --overlap-schedule off"
    if config.overlap_schedule == "auto" and engine_plan.hardware.device == "cpu":
        return "--overlap-schedule auto: on a CPU the host is what computes"
    return ""
