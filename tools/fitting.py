"""The table of how many GPUs published models need, as `turnout plan` computes it."""

from __future__ import annotations

import functools
from pathlib import Path

from tools.tables import table
from turnout.config import Config
from turnout.engine.engine_plan import resolve
from turnout.errors import PlanRefused
from turnout.parallel.hardware import named

MODELS = (
    "gpt-oss-20b",
    "gpt-oss-120b",
    "qwen3.5-35b-a3b",
    "qwen3-next-80b-a3b",
    "glm-4.5-air",
    "deepseek-v4-flash",
    "minimax-m2",
    "deepseek-r1-nvfp4",
    "deepseek-v3",
)
GPUS = ("h100", "h200", "b200")
RANKS = (1, 2, 4, 8)  # of one host
TOKENS, REQUESTS = 8192, 16  # what a rank should hold at once, at the least


@functools.cache  # seconds
def fitting(published: Path) -> str:
    """published: the folder of the models' configurations."""
    rows = [(name, *(least(published / f"{name}.json", gpu) for gpu in GPUS)) for name in MODELS]
    return table(("model", *(gpu.upper() for gpu in GPUS)), rows)


def least(configuration: Path, gpu: str) -> str:
    """How many GPUs of a host hold model and requests, with a star where experts run in plain torch."""
    for ranks in RANKS:
        try:
            plan = resolve(Config(model=str(configuration), tp_size=ranks), named(gpu))
        except PlanRefused:
            continue
        if plan.requests_at_once()[TOKENS] >= REQUESTS:
            return f"{ranks}{' *' if plan.plan.decode.runner == 'torch' else ''}"
    return "-"
