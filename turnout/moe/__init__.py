"""The MoE layer: route -> dispatch -> experts -> combine, planned before it runs.

    from turnout.moe import MoELayer, plan

`MoELayer` is imported on first use: a plan needs no torch.
"""

from typing import TYPE_CHECKING

from turnout.lazy import lazy
from turnout.moe.plan import plan

if TYPE_CHECKING:
    from turnout.moe.layer import MoELayer

__all__ = ["MoELayer", "plan"]

__getattr__ = lazy(__name__, {"MoELayer": "layer"})
