"""Which decode steps are CUDA graphs, and of which size: decided alike by all ranks, with no device.

A replay is collective. Whether there are graphs follows from the engine plan, which ranks compare at their
rendezvous; which one a step replays follows from their synchronisation before it only: all of them must be
decoding, and the graph is the smallest that holds the batch of the largest, also where a rank has no tokens.
"""

from __future__ import annotations

from importlib.util import find_spec

from turnout.config import Config
from turnout.engine.engine_plan import EnginePlan
from turnout.moe.capabilities.declared import DISPATCHERS, RUNNERS


def why_no_graphs(engine_plan: EnginePlan) -> str:
    """Why decode steps cannot be graphs, or "" if they can."""
    config, decode = engine_plan.config, engine_plan.plan.decode
    if engine_plan.hardware.device != "cuda":
        return "there are graphs on CUDA only"
    if config.disable_cuda_graph:
        return "asked for with --disable-cuda-graph"
    if config.speculative_algorithm != "none":
        return "drafts differ in number from step to step"
    if engine_plan.hardware.present and find_spec("triton") is None:
        return "attention in a graph needs triton: pip install 'triton>=3.6'"
    safe = {f"runner {name}": RUNNERS[name].graph_safe for name in engine_plan.plan.runners}
    safe[f"dispatcher {decode.dispatcher}"] = DISPATCHERS[decode.dispatcher].graph_safe
    waiting = [name for name, captured in safe.items() if not captured]
    if waiting:
        return f"{waiting[0]} waits for the host"
    return ""


def graph_sizes(config: Config) -> list[int]:
    """Batches of one rank that are captured: 1, 2, 4, then every 8 up to 256, then every 32, and the most
    that can be: padding never costs much."""
    most = min(config.cuda_graph_max_bs, config.max_running_requests)
    chosen = [1, 2, 4, *range(8, min(most, 256) + 1, 8), *range(288, most + 1, 32)]
    return sorted({size for size in chosen if size <= most} | {most})
