"""How tests configure servers on the tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from turnout.config import ServerConfig

CONTEXT = 512


def tiny_config(folder: Path, **fields: Any) -> ServerConfig:
    defaults: dict[str, Any] = {
        "model": str(folder),
        "device": "cpu",
        "port": 0,
        "num_threads": 1,
        "max_total_tokens": 8192,
        "served_model_name": "tiny",
        "reasoning_parser": "none",  # random models, which might take any text for a thought
        "enable_expert_metrics": True,
    }
    return ServerConfig(**(defaults | fields))
