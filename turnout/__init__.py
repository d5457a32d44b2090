"""Turnout: a mixture-of-experts inference engine.

    from turnout import LLM, SamplingParams          # offline generation
    from turnout.moe import MoELayer, plan           # the MoE layer alone

Names are imported on first use, so that processes which need no torch never load it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from turnout.engine.llm import LLM as LLM
    from turnout.engine.sampling_params import SamplingParams as SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]

_LAZY = {"LLM": "turnout.engine.llm", "SamplingParams": "turnout.engine.sampling_params"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'turnout' has no attribute {name!r}")
