"""Whether a step is launched before the tokens of the one before it are read. All ranks decide alike."""

from __future__ import annotations

from turnout.engine.engine_plan import EnginePlan


def why_no_overlap(engine_plan: EnginePlan) -> str:
    """Why steps wait for the tokens of the one before, or "" if they do not."""
    config = engine_plan.config
    if config.speculative_algorithm != "none":
        return "drafts follow from tokens that the host has to know first"
    if config.deterministic:
        return "--deterministic computes each token apart, from what the host knows"
    if engine_plan.keeps_states and engine_plan.compute_dtype == "float32":
        return "a near-tie decided late would have taken the states of requests over a wrong token"
    if config.disable_overlap_schedule:
        return "asked for with --disable-overlap-schedule"
    if config.overlap_schedule == "off":
        return "asked for with --overlap-schedule off"
    if config.overlap_schedule == "auto" and engine_plan.hardware.device == "cpu":
        return "--overlap-schedule auto: on a CPU the host is what computes"
    return ""
