"""What a model whose layers keep states cannot have: whatever would need one that is not kept. Torch-free.

No prefix is taken up without the state at its end. That of recurrent layers holds all tokens before it at
once and cannot go back to an earlier token, as a list of pages can, so each draft has a state of its own.
That of compressed attention is a list of the last tokens, long enough to go back over a step's drafts.
"""

from __future__ import annotations

from turnout.attention.kinds import keeps_states, state_groups
from turnout.config import Config
from turnout.errors import Refusal, standing
from turnout.models.interface import ModelDescription
from turnout.parallel.hardware import Hardware

Obstacle = tuple[bool, str, str, str]  # of `standing`


def why_no_prefix_cache(config: Config, description: ModelDescription) -> str:
    """Why no request begins with pages of an earlier one, or "" if some may."""
    if config.disable_prefix_cache:
        return "asked for with --disable-prefix-cache"
    layers = description.shape.attention
    if keeps_states(layers) and not config.state_snapshot_interval:
        who = "recurrent layers" if state_groups(layers) else "compressed attention"
        return (
            f"{who} would need the state at the end of a prefix, which only --state-snapshot-interval keeps"
        )
    return ""


def state_refusals(config: Config, description: ModelDescription, hardware: Hardware) -> list[Refusal]:
    """Flags that layers with states do not permit, and those that only they do."""
    interval, layers = config.state_snapshot_interval, description.shape.attention
    if not keeps_states(layers):
        return [_no_states(interval)] if interval else []
    if state_groups(layers):
        return standing("recurrent layers", (_between_pages(config), *_of_recurrence(config, hardware)))
    return standing("compressed attention", (_between_pages(config), *_of_compression(config, hardware)))


def _between_pages(config: Config) -> Obstacle:
    interval, size = config.state_snapshot_interval, config.page_size
    return (
        interval % size > 0,
        f"--state-snapshot-interval {interval} with --page-size {size}",
        "a state is of use only where pages of attention end",
        f"use a multiple of {size}",
    )


def _of_recurrence(config: Config, hardware: Hardware) -> tuple[Obstacle, ...]:
    algorithm = config.speculative_algorithm
    return (
        (
            config.speculative and config.deterministic,
            f"--speculative-algorithm {algorithm} with --deterministic",
            "a token at a time has one state, and a rejected draft cannot be taken out of it",
            "leave --deterministic out, or use --speculative-algorithm none",
        ),
        (
            config.deterministic and hardware.device == "cuda",
            "--deterministic on CUDA",
            "tokens of a prompt go through recurrent layers in blocks, and round as these are cut",
            "leave --deterministic out, or use --device cpu",
        ),
    )


def _of_compression(config: Config, hardware: Hardware) -> tuple[Obstacle, ...]:
    return (
        (
            config.deterministic and hardware.device == "cuda",
            "--deterministic on CUDA",
            "entries are made of whole windows, in products that depend on how a prompt is cut",
            "leave --deterministic out, or use --device cpu",
        ),
    )


def _no_states(interval: int) -> Refusal:
    return Refusal(
        who="model",
        asked=f"--state-snapshot-interval {interval}",
        limit="none of its layers is recurrent or compresses: there is no state to keep",
        remedy="leave --state-snapshot-interval out",
    )
