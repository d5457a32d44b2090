"""`turnout plan` for Blackwell with FlashInfer behind each dispatcher, and for what cannot be so."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.commands.test_plan import cells, run
from tests.engine.planned import NVFP4, QWEN3_30B, write

FLAGS = {
    "quantization": "modelopt_fp4",
    "moe_runner_backend": "flashinfer_cutedsl",
    "tp_size": 4,
    "dp_size": 4,
    "ep_size": 4,
    "enable_dp_attention": True,
}


@pytest.fixture
def model(tmp_path: Path):
    return partial(write, tmp_path, QWEN3_30B | NVFP4, **FLAGS)


@pytest.mark.parametrize(
    ("dispatcher", "phases"),
    [
        ("none", ["none", "none"]),
        ("flashinfer", ["flashinfer", "flashinfer"]),
        ("deepep", ["deepep-normal", "deepep-low-latency"]),
    ],
)
def test_the_published_arrangements_are_accepted(model, dispatcher: str, phases: list[str]):
    code, text = run(model(moe_a2a_backend=dispatcher), hardware="b200")
    assert code == 0
    found = cells(text)
    assert found["runner"] == ["flashinfer_cutedsl", "flashinfer_cutedsl"]
    assert found["dispatcher"] == phases


def test_a_wrong_one_prints_every_reason(tmp_path: Path):
    config = write(
        tmp_path,
        QWEN3_30B | NVFP4,
        **(FLAGS | {"dp_size": 2, "moe_a2a_backend": "flashinfer", "moe_dispatch_dtype": "fp8"}),
    )
    code, text = run(config, hardware="h200")
    assert code != 0
    for reason in (
        "--dp-size 2 and --ep-size 4 with --tp-size 4",
        "use --dp-size 4 --ep-size 4 --enable-dp-attention",
        "h200 (compute capability 9.0)",
        "--moe-dispatch-dtype fp8 at hidden size 2048",
    ):
        assert reason in text
