"""Turnout: a mixture-of-experts inference engine.

    from turnout import LLM, SamplingParams          # offline generation
    from turnout.moe import MoELayer, plan           # the MoE layer alone

Names are imported on first use, so that processes which need no torch never load it.
"""

from typing import TYPE_CHECKING

from turnout.lazy import lazy

if TYPE_CHECKING:
    from turnout.engine.llm import LLM as LLM
    from turnout.engine.sampling_params import SamplingParams as SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]

__getattr__ = lazy(__name__, {"LLM": "engine.llm", "SamplingParams": "engine.sampling_params"})
