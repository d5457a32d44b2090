"""Which steps are rehearsed, and on what; that rehearsals leave no trace is test_cuda_graphs.py's."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.engine import planned
from tests.engine.toy import ToyModel, make_core
from turnout.engine import warmup
from turnout.engine.engine_plan import resolve
from turnout.engine.step.rehearsal import Zeros, compiles_ahead, rehearsal
from turnout.parallel.hardware import named

LIKE = torch.full((3, 5), 7.0)
ALLOCATE: dict[str, Callable[[], Tensor]] = {
    "empty": lambda: torch.empty(3, 5),
    "empty_like": lambda: torch.empty_like(LIKE),
    "empty_strided": lambda: torch.empty_strided((3, 5), (5, 1)),
    "new_empty": lambda: LIKE.new_empty(3, 5),
    "indices": lambda: torch.empty(3, 5, dtype=torch.int32),
}


@pytest.mark.parametrize("name", ALLOCATE)
@pytest.mark.parametrize("inference", [True, False])
def test_what_kernels_would_have_written_is_zeros(name: str, inference: bool):
    with torch.inference_mode(inference), Zeros():
        for _ in range(8):
            spoilt = LIKE.clone()  # its memory is what the next allocation may get
            del spoilt
            assert torch.equal(ALLOCATE[name](), torch.zeros(3, 5).to(ALLOCATE[name]().dtype))
        assert torch.equal(LIKE + 1, torch.full((3, 5), 8.0))


def test_a_rehearsal_does_not_import_torchs_compiler():
    code = (
        "import sys, torch\n"
        "from turnout.engine.step.rehearsal import Zeros\n"
        "with Zeros():\n"
        "    assert torch.equal(torch.empty(3), torch.zeros(3))\n"
        "assert not {'torch._dynamo', 'torch._inductor'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize(
    ("hardware", "flags", "rehearsed"),
    [
        ("h200", {}, True),
        ("h200", {"moe_runner_backend": "torch"}, False),
        ("h200", {"deterministic": True}, False),
        ("h200", {"tp_size": 2}, False),
        ("cpu", {"device": "cpu"}, False),
    ],
)
def test_steps_of_triton_and_torch_alone_are_rehearsed(
    hardware: str, flags: dict, rehearsed: bool, tmp_path: Path
):
    fields = planned.SMALL | ({} if hardware == "cpu" else planned.NVFP4)
    plan = resolve(planned.write(tmp_path, fields, **flags), named(hardware))
    assert compiles_ahead(plan) is rehearsed
    if not rehearsed:
        with rehearsal(plan, ToyModel())() as may:
            assert not may


def test_first_prompts_of_every_size_are_rehearsed(monkeypatch: pytest.MonkeyPatch):
    model = ToyModel()
    core = make_core(model, num_pages=64, max_context=128, max_prefill_tokens=40, max_running_requests=6)
    blocks: list[list[int]] = []

    @contextmanager
    def rehearsing() -> Iterator[bool]:
        with Zeros():
            yield True
        blocks.append(list(model.steps))

    monkeypatch.setattr(warmup, "rehearsal", lambda plan, model: rehearsing)
    monkeypatch.setattr(model, "reset_counts", lambda: blocks.append(list(model.steps)))
    warmup.first_prompts(core.engine_plan, core._forward, model, core._scheduler.kv, None)
    [rehearsed, both] = blocks
    assert both == 2 * rehearsed
    assert set(rehearsed) >= set(warmup.prompt_sizes(40, 1))
