"""What a model with recurrent layers cannot have: whatever would need a state that is not kept. Torch-free.

A state holds all tokens before it at once. It cannot go back to an earlier token, as a list of pages can, so
nothing may be computed that is then given up, and no prefix be taken up without the state at its end.
"""

from __future__ import annotations

from turnout.attention.kinds import state_groups
from turnout.config import Config
from turnout.errors import Refusal
from turnout.models.interface import ModelDescription
from turnout.parallel.hardware import Hardware


def why_no_prefix_cache(config: Config, description: ModelDescription) -> str:
    """Why no request begins with pages of an earlier one, or "" if some may."""
    if config.disable_prefix_cache:
        return "asked for with --disable-prefix-cache"
    if state_groups(description.shape.attention):
        return "recurrent layers would need the state at the end of a prefix, which is not kept"
    return ""


def state_refusals(config: Config, description: ModelDescription, hardware: Hardware) -> list[Refusal]:
    """Flags that recurrent layers do not permit."""
    if not state_groups(description.shape.attention):
        return []
    algorithm = config.speculative_algorithm
    obstacles = (
        (
            algorithm != "none",
            f"--speculative-algorithm {algorithm}",
            "a rejected draft cannot be taken out of a recurrent layer's state",
            "use --speculative-algorithm none",
        ),
        (
            config.disable_prefill_graph is False,
            "--no-disable-prefill-graph",
            "what recurrent layers launch for prompts depends on where these begin and end",
            "leave --no-disable-prefill-graph out",
        ),
        (
            config.deterministic and hardware.device == "cuda",
            "--deterministic on CUDA",
            "tokens of a prompt go through recurrent layers in blocks, and round as these are cut",
            "leave --deterministic out, or use --device cpu",
        ),
    )
    return [
        Refusal(who="recurrent layers", asked=asked, limit=limit, remedy=remedy)
        for stands, asked, limit, remedy in obstacles
        if stands
    ]
