"""The arena of the Hopper kernels: what is planned, what is allocated, and that layers share it."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.moe.build import make_experts, make_plan, make_spec
from turnout.moe.arena import Arena, shared
from turnout.moe.backends.hopper.layer_shape import LayerShape
from turnout.moe.backends.hopper.workspace import regions, workspace_bytes
from turnout.moe.batch import Hidden, TokensBatch
from turnout.moe.budget import ARENA_ALIGN, arena_bytes
from turnout.moe.capabilities.declared import RUNNERS
from turnout.moe.capabilities.rank_share import Share
from turnout.moe.plan import MoEPlan
from turnout.moe.spec import MoESpec, RankShape

CPU = torch.device("cpu")
FORMATS = ["bf16", "fp8", "mxfp4", "nvfp4", "int4"]


def planned(spec: MoESpec, layout: str, rows: int) -> int:
    assert RUNNERS["hopper"].workspace is workspace_bytes
    share = Share(
        shape=RankShape.of(spec, num_local_experts=spec.num_experts),
        activation=spec.activation.kind,
        rows=rows,
        layout=layout,
        decoded=False,
        itemsize=2,
    )
    return workspace_bytes(share)


def test_regions_lie_apart_and_fill_the_arena():
    spec = make_spec(format="fp8", hidden_size=256, intermediate_size=256)
    shape = LayerShape.of(spec, num_local_experts=8, expert_tp=1)
    sets = {"tokens": regions(shape, "tokens", 100), "batched_experts": regions(shape, "batched_experts", 9)}
    arena = Arena(CPU, sets)
    for layout, sizes in sets.items():
        parts = {name: arena.take(layout, name, size, dtype=torch.uint8) for name, size in sizes.items()}
        for value, part in enumerate(parts.values(), start=1):
            part.fill_(value)
        assert [part.unique().tolist() for part in parts.values()] == [[v + 1] for v in range(len(parts))]
        assert all((part.data_ptr() - arena._bytes.data_ptr()) % ARENA_ALIGN == 0 for part in parts.values())
    assert arena.nbytes == max(arena_bytes(sizes) for sizes in sets.values())
    # What must stay zero between calls is the same memory in both layouts.
    assert next(iter(sets["tokens"])) == next(iter(sets["batched_experts"])) == "counts"
    assert sets["tokens"]["counts"] == sets["batched_experts"]["counts"] == 9 * 4 * 16


def test_more_than_planned_names_what_asked_for_it():
    arena = Arena(CPU, {"tokens": {"h": 64}})
    assert arena.take("tokens", "h", 4, 8, dtype=torch.bfloat16).shape == (4, 8)
    with pytest.raises(RuntimeError, match=r"workspace 'h' of layout 'tokens': 66 bytes wanted, 64 planned"):
        arena.take("tokens", "h", 33, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"'y' of layout 'batched_experts': 2 bytes wanted, 0 planned"):
        arena.take("batched_experts", "y", 1, dtype=torch.bfloat16)


def test_layers_share_an_arena_for_as_long_as_one_of_them_lives():
    first, second = (shared(CPU, {"tokens": {"h": 64}}) for _ in range(2))
    other = shared(CPU, {"tokens": {"h": 128}})
    assert first is second
    assert first is not other
    last = weakref.ref(first)
    del first
    gc.collect()
    assert last() is second
    del second
    gc.collect()
    assert last() is None


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("rows", [1, 2, 17, 5000])
def test_planned_bytes_grow_with_the_batch_and_count_what_is_quantised(format: str, rows: int):
    spec = make_spec(format=format, hidden_size=256, intermediate_size=256)
    pairs = rows * spec.top_k
    least = pairs * (2 * 256 + 2 * 256 + 4) + 2 * rows * 256  # h, y, order; the output
    least += pairs * (256 + 256 // 32 + 4) if format == "fp8" else 0  # quantised, place
    size = planned(spec, "tokens", rows)
    assert least <= size <= 1.1 * least + 4 * pairs + 8 * 256 + 4096
    assert planned(spec, "tokens", rows + 1) >= size
    batched = planned(spec, "batched_experts", rows)
    assert batched >= 8 * rows * (2 * 256 + 2 * 256)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("layout", "batched"), [("tokens", 1), ("batched_experts", 8)])
def test_a_runner_takes_the_arena_that_was_planned(
    format: str, layout: str, batched: int, monkeypatch: pytest.MonkeyPatch
):
    """Preparing needs no GPU but for the number of its multiprocessors."""
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=1)
    )
    spec = make_spec(format=format, hidden_size=256, intermediate_size=256)
    plan = make_plan(spec, runner="hopper", layout=layout, compute_dtype="bfloat16")
    plan = replace(plan, prefill=replace(plan.prefill, max_tokens=100))
    runners = [RUNNERS.load("hopper")(spec, plan, CPU) for _ in range(2)]
    for runner in runners:
        runner.prepare(make_experts(spec))
    assert runners[0]._arena is runners[1]._arena
    assert runners[0]._arena.nbytes + 2 * batched * 100 * 256 == planned(spec, layout, 100)
    with pytest.raises(ValueError, match=f"101 {layout}, but the plan bounds them by 100"):
        runners[0]._space(layout, 101)


def allocated(spec: MoESpec, plan: MoEPlan, tokens: int, calls: int) -> tuple[int, int]:
    """Bytes of the arena, and the most that a call allocates besides."""
    device = torch.device("cuda")
    runner = RUNNERS.load("hopper")(spec, plan, device)
    runner.prepare(make_experts(spec))
    draw = torch.Generator().manual_seed(0)
    weights_TK, ids_TK = torch.rand(tokens, spec.num_experts, generator=draw).topk(spec.top_k)
    batch = TokensBatch(
        hidden=Hidden(data=torch.randn(tokens, spec.hidden_size, generator=draw).bfloat16().cuda()),
        topk_ids=ids_TK.int().cuda(),
        topk_weights=weights_TK.cuda(),
    )
    most = 0
    for _ in range(calls):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        runner(batch)
        torch.cuda.synchronize()
        most = max(most, torch.cuda.max_memory_allocated() - before)
    return runner._arena.nbytes, most


@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMATS)
def test_a_call_allocates_what_was_planned(format: str):
    spec = make_spec(format=format, hidden_size=256, intermediate_size=256)
    plan = make_plan(
        spec,
        runner="hopper",
        activation_format="fp8" if format == "fp8" else "bf16",
        compute_dtype="bfloat16",
    )
    plan = replace(plan, prefill=replace(plan.prefill, max_tokens=1024))
    for tokens in (7, 1024):  # whatever comes first, the arena is that of the bound
        arena, besides = allocated(spec, plan, tokens, calls=2)
        assert arena + 2 * 256 * 1024 == planned(spec, "tokens", 1024)
        assert besides == max(512, 2 * 256 * tokens)
