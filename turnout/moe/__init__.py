"""The MoE layer: route -> dispatch -> experts -> combine, planned before it runs.

    from turnout.moe import MoELayer, plan

`MoELayer` is imported on first use: a plan needs no torch.
"""

from typing import TYPE_CHECKING, Any

from turnout.moe.plan import plan

if TYPE_CHECKING:
    from turnout.moe.layer import MoELayer

__all__ = ["MoELayer", "plan"]


def __getattr__(name: str) -> Any:
    if name == "MoELayer":
        from turnout.moe.layer import MoELayer

        return MoELayer
    raise AttributeError(f"module 'turnout.moe' has no attribute {name!r}")
