"""What a model with recurrent layers cannot have: whatever would need a state that is not kept. Torch-free.

A state holds all tokens before it at once. It cannot go back to an earlier token, as a list of pages can, so
each draft has a state of its own, and no prefix is taken up without the state at its end.
"""

from __future__ import annotations

from turnout.attention.kinds import state_groups
from turnout.config import Config
from turnout.errors import Refusal, standing
from turnout.models.interface import ModelDescription
from turnout.parallel.hardware import Hardware
from turnout.vocabulary import AttentionKind


def why_no_prefix_cache(config: Config, description: ModelDescription) -> str:
    """Why no request begins with pages of an earlier one, or "" if some may."""
    if config.disable_prefix_cache:
        return "asked for with --disable-prefix-cache"
    if compresses(description):
        return "compressed attention would need the state of its windows at the end of a prefix"
    if state_groups(description.shape.attention) and not config.state_snapshot_interval:
        return (
            "recurrent layers would need the state at the end of a prefix, which only "
            "--state-snapshot-interval keeps"
        )
    return ""


def state_refusals(config: Config, description: ModelDescription, hardware: Hardware) -> list[Refusal]:
    """Flags that recurrent layers do not permit, and those that only they do."""
    interval, size = config.state_snapshot_interval, config.page_size
    if compresses(description):
        return _compressed_refusals(config)
    if not state_groups(description.shape.attention):
        return [_no_states(interval)] if interval else []
    algorithm = config.speculative_algorithm
    obstacles = (
        (
            algorithm != "none" and config.deterministic,
            f"--speculative-algorithm {algorithm} with --deterministic",
            "a token at a time has one state, and a rejected draft cannot be taken out of it",
            "leave --deterministic out, or use --speculative-algorithm none",
        ),
        (
            interval % size > 0,
            f"--state-snapshot-interval {interval} with --page-size {size}",
            "a state is of use only where pages of attention end",
            f"use a multiple of {size}",
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
    return standing("recurrent layers", obstacles)


def compresses(description: ModelDescription) -> bool:
    return any(layer.kind == AttentionKind.COMPRESSED for layer in description.shape.attention)


def _compressed_refusals(config: Config) -> list[Refusal]:
    obstacles = (
        (
            config.speculative_algorithm != "none",
            f"--speculative-algorithm {config.speculative_algorithm}",
            "a rejected draft cannot be taken out of the last tokens and open windows of a request",
            "leave --speculative-algorithm out",
        ),
        (
            config.deterministic,
            "--deterministic",
            "entries are made of whole windows, in products that depend on how a prompt is cut",
            "leave --deterministic out",
        ),
        (
            config.state_snapshot_interval > 0,
            f"--state-snapshot-interval {config.state_snapshot_interval}",
            "snapshots are kept of recurrent layers only",
            "leave --state-snapshot-interval out",
        ),
        (
            config.disable_prefill_graph is False,
            "--no-disable-prefill-graph",
            "where windows end depends on where prompts begin and end",
            "leave --no-disable-prefill-graph out",
        ),
    )
    return standing("compressed attention", obstacles)


def _no_states(interval: int) -> Refusal:
    return Refusal(
        who="model",
        asked=f"--state-snapshot-interval {interval}",
        limit="none of its layers is recurrent: there is no state to keep",
        remedy="leave --state-snapshot-interval out",
    )
