"""How many GPUs the README says that a model needs."""

from __future__ import annotations

from pathlib import Path

from tools.fitting import least

PUBLISHED = Path(__file__).parents[1] / "models" / "published"


def test_a_model_takes_as_many_gpus_as_its_weights_need():
    """65 GB of weights and 16 contexts do not fit into 0.85 x 80 GB, but do into 0.85 x 141."""
    assert [least(PUBLISHED / "gpt-oss-120b.json", gpu) for gpu in ("h100", "h200")] == ["2", "1"]


def test_what_a_host_cannot_hold_is_said():
    assert least(PUBLISHED / "kimi-k2.json", "h100") == "-"  # 1 TB of weights; 8 x 80 GB
