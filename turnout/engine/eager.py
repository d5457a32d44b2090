"""Whether decode steps can be CUDA graphs, told from the blueprint alone."""

from __future__ import annotations

from importlib.util import find_spec

from turnout.engine.blueprint import Blueprint
from turnout.moe.backends import DISPATCHER_CAPABILITIES, RUNNER_CAPABILITIES


def why_eager(blueprint: Blueprint) -> str:
    """Why decode steps cannot be graphs, or "" if they can."""
    config, decode = blueprint.config, blueprint.plan.decode
    if blueprint.hardware.device != "cuda":
        return "there are graphs on CUDA only"
    if config.disable_cuda_graph:
        return "asked for with --disable-cuda-graph"
    if config.speculative_algorithm != "none":
        return "drafts differ in number from step to step"
    if blueprint.hardware.present and find_spec("triton") is None:
        return "attention in a graph needs triton: pip install 'triton>=3.6'"
    for kind, declared in (
        ("runner", RUNNER_CAPABILITIES[decode.runner]),
        ("dispatcher", DISPATCHER_CAPABILITIES[decode.dispatcher]),
    ):
        if not declared.graph_safe:
            return f"{kind} {declared.name} waits for the host"
    return ""
