"""Warm-up compiles every variant of a kernel that any batch needs: Triton's own binder says which those are.

Runners are made on the meta device and launch nothing, so that all batch sizes of real layers can be tried
here.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.kernels.bound import bound
from tests.models.keepers import Keeper
from turnout.bench.moe import SHAPES
from turnout.engine.warmup import compile_experts, empty_batch
from turnout.formats.experts import ExpertWeights
from turnout.formats.packed import PackedTensor
from turnout.kernels.common import compilation
from turnout.kernels.common.compilation import EVERY, covering
from turnout.moe.backends.hopper import fragments, fragments_fp8, weights
from turnout.moe.backends.hopper.runner import HopperRunner
from turnout.moe.batch import TokensBatch
from turnout.moe.plan import MoEPlan, PhasePlan
from turnout.moe.spec import MoESpec
from turnout.vocabulary import Layout

META = torch.device("meta")
MOST = 8192


def packed(format: str, *shape: int) -> PackedTensor:
    *lead, n, k = shape
    scales = {"fp8": (-(-n // 128), -(-k // 128)), "nvfp4": (n, k // 16), "mxfp4": (n, k // 32), "bf16": ()}
    types = {"fp8": torch.float32, "nvfp4": torch.float8_e4m3fn, "mxfp4": torch.uint8, "bf16": None}
    data = {"fp8": torch.float8_e4m3fn, "bf16": torch.bfloat16}.get(format, torch.uint8)
    columns = k // 2 if format.endswith("fp4") else k
    return PackedTensor(
        format=format,
        data=torch.empty(*lead, n, columns, dtype=data, device=META),
        scale=torch.empty(*lead, *scales[format], dtype=types[format], device=META)
        if scales[format]
        else None,
        global_scale=torch.empty(lead, device=META) if format == "nvfp4" else None,
    )


def make_runner(
    spec: MoESpec,
    count: int,
    activations: str,
    monkeypatch: pytest.MonkeyPatch,
    layout: Layout = Layout.TOKENS,
) -> Any:
    """The runner for Hopper, of an H200's size, with weights that hold nothing."""
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(fragments, "fill", lambda *_, **__: None)
    monkeypatch.setattr(fragments_fp8, "fill_fp8", lambda *_, **__: None)
    monkeypatch.setattr(weights.Matrix, "_load_rows", lambda *_, **__: None)
    phases = {
        name: PhasePlan(
            phase=name, runner="hopper", dispatcher="none", layout=layout, wire_format="bf16",
            reduce="none", max_tokens=MOST,
        )
        for name in ("prefill", "decode")
    }  # fmt: skip
    plan = MoEPlan(
        **phases, activation_format=activations, weight_storage="packed", compute_dtype="bfloat16",
        first_expert=0, num_local_experts=count, weight_bytes=0, workspace_bytes=0, dispatch_bytes=0,
    )  # fmt: skip
    runner = HopperRunner(spec, plan, META)
    H, N1, I = spec.hidden_size, spec.w13_rows, spec.intermediate_size
    runner.prepare(
        ExpertWeights(
            w13=packed(spec.format, count, N1, H), w2=packed(spec.format, count, H, I),
            b13=None, b2=None, first_expert=0, num_experts=spec.num_experts,
        )
    )  # fmt: skip
    return runner


@pytest.mark.parametrize(
    ("shape", "step"),
    [
        ("qwen3-30b", 13),
        pytest.param("qwen3-30b", 1, marks=pytest.mark.more),
        pytest.param("dsv3-ep8", 13, marks=pytest.mark.more),
    ],
)
@pytest.mark.parametrize(
    ("format", "activations"), [("bf16", "bf16"), ("nvfp4", "bf16"), ("mxfp4", "fp8"), ("fp8", "fp8")]
)
def test_no_batch_needs_what_was_not_warmed(
    shape: str, format: str, activations: str, step: int, monkeypatch: pytest.MonkeyPatch
):
    layer = SHAPES[shape]
    spec = layer.spec(format)
    runner = make_runner(spec, layer.local, activations, monkeypatch)

    def call(tokens: int) -> None:
        runner(empty_batch(spec, tokens, torch.bfloat16, META))

    warmed, needed = set(), set()
    sizes = covering(call, MOST)
    for size in sizes:
        with bound() as keys:
            call(size)
        warmed |= keys
    for size in (*range(1, EVERY), *range(EVERY, MOST + 1, step)):
        with bound() as keys:
            call(size)
        assert keys <= warmed, f"{size} tokens need {[name for name, _ in keys - warmed]}"
        needed |= keys
    assert needed == warmed
    assert len(sizes) < 80


def test_a_rank_that_starts_again_tries_no_sizes(monkeypatch: pytest.MonkeyPatch):
    spec = SHAPES["qwen3-30b"].spec("nvfp4")
    runner, tried = make_runner(spec, 128, "bf16", monkeypatch), []
    plan = SimpleNamespace(
        prefill=SimpleNamespace(max_tokens=40, layout=Layout.TOKENS),
        decode=SimpleNamespace(max_tokens=8, layout=Layout.TOKENS),
        compute_dtype="bfloat16",
    )
    forward = HopperRunner.__call__

    def noted(self: HopperRunner, batch: TokensBatch) -> Any:
        tried.append(len(batch.hidden.data))
        return forward(self, batch)

    monkeypatch.setattr(HopperRunner, "__call__", noted)
    monkeypatch.setattr(compilation, "compiling", lambda threads: compilation.variants())
    keeper = Keeper()
    try:
        sizes = compile_experts(runner, spec, plan, META, 1, keeper.view("cpu"), 3)
        assert tried == [*range(1, 41), 40, *sizes]
        assert len(sizes) > 4
        tried.clear()
        again = keeper.view("cpu")
        assert compile_experts(runner, spec, plan, META, 1, again, 3) == sizes
        assert tried == sizes
        assert (again.found, again.made) == (1, 0)
        assert compile_experts(runner, spec, plan, META, 1, again, 4) == sizes  # of another layer
        assert (again.found, again.made) == (1, 1)
    finally:
        keeper.door.close()
        assert keeper.ends() == 0
