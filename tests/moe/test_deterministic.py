"""Under --deterministic a token's result is the same bits in any batch; and who may be planned.

Sizes are no multiple of a vector, so that loops over several rows would end within one; and large enough
for a matrix library to sum by the number of rows, which the same layer without the promise shows.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.moe.build import make_experts, make_plan, make_spec
from tests.moe.made_up import dispatcher, make, runner
from turnout.errors import PlanRefused
from turnout.formats.fp8 import encode_activation
from turnout.kernels.common import rowwise
from turnout.moe.backends.hopper.kernels import Packed, Plain, specialised
from turnout.moe.backends.hopper.tile_config import LayerTiles
from turnout.moe.batch import ExpertsBatch, Hidden
from turnout.moe.capabilities.declared import RUNNERS
from turnout.moe.layer import MoELayer
from turnout.moe.plan import PlanRequest
from turnout.moe.spec import MoESpec

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
FORMATS = ("bf16", "fp8", "mxfp4", "nvfp4", "int4")


def layer_of(spec: MoESpec, device: torch.device = CPU, most: int = 64, **fields) -> MoELayer:
    plan = replace(make_plan(spec, **fields), deterministic=True)
    phases = {name: replace(plan.phase(name), max_tokens=most) for name in ("prefill", "decode")}
    draw = torch.Generator().manual_seed(7)
    router_EH = torch.randn(spec.num_experts, spec.hidden_size, generator=draw)
    return MoELayer(
        spec,
        replace(plan, **phases),
        router_weight=router_EH.to(device, getattr(torch, plan.compute_dtype)),
        experts=make_experts(spec),
    )


def assert_batch_invariant(layer: MoELayer, x_TH: Tensor, sizes: tuple[int, ...]) -> None:
    """Every token of the smallest batch, alone and among the first of each size, in another order too."""
    alone_TH = torch.cat([layer(row) for row in x_TH[: sizes[0]].split(1)])
    for size in sizes:
        assert torch.equal(layer(x_TH[:size])[: sizes[0]], alone_TH)
    assert torch.equal(layer(x_TH.flip(0)).flip(0)[: sizes[0]], alone_TH)


@pytest.mark.parametrize("storage", ["packed", "decoded"])
@pytest.mark.parametrize("format", FORMATS)
def test_a_layer_on_a_cpu(format: str, storage: str):
    sizes = {"hidden_size": 256, "intermediate_size": 128} if format == "fp8" else {"hidden_size": 288}
    layer = layer_of(make_spec("swiglu", format, **sizes), weight_storage=storage)
    x_TH = torch.randn(33, layer.spec.hidden_size, generator=torch.Generator().manual_seed(1))
    assert_batch_invariant(layer, x_TH, (3, 17, 33))
    layer._runner._batch_invariant = False
    assert not torch.equal(layer(x_TH), torch.cat([layer(row) for row in x_TH.split(1)]))


def test_batched_experts_on_a_cpu():
    spec = make_spec(format="nvfp4", hidden_size=128)
    runner = RUNNERS.load("torch")(spec, replace(make_plan(spec), deterministic=True), CPU)
    runner.prepare(make_experts(spec))
    codes, scale = encode_activation(torch.randn(8, 5, 128, generator=torch.Generator().manual_seed(1)))
    counts = torch.tensor([5, 0, 1, 2, 3, 4, 5, 5], dtype=torch.int32)
    whole = runner(ExpertsBatch(hidden=Hidden(data=codes, format="fp8", scale=scale), counts=counts))
    for expert, count in enumerate(counts.tolist()):
        for row in range(count):
            hidden = Hidden(data=codes[:, row : row + 1], format="fp8", scale=scale[:, row : row + 1])
            one = runner(ExpertsBatch(hidden=hidden, counts=(counts > row).int()))
            assert torch.equal(one[expert, 0], whole[expert, row])
        assert not whole[expert, count:].any()


def test_rows_of_a_product_on_a_cpu():
    draw = torch.Generator().manual_seed(0)
    x, w, bias = (torch.randn(*size, generator=draw) for size in ((37, 211), (53, 211), (53,)))
    y = rowwise.linear(x, w, bias)
    assert torch.allclose(y, x @ w.T + bias, atol=1e-4)
    assert torch.equal(y[5:6], rowwise.linear(x[5:6], w, bias))
    assert rowwise.linear(x[:0], w).shape == (0, 53)


def test_the_planner_takes_only_what_promises_it():
    request = PlanRequest(deterministic=True)
    invariant = {"batch_invariant": True}
    chosen = make(
        runners=[runner("oak", preference=5), runner("elm", **invariant)],
        dispatchers=[dispatcher(preference=5), dispatcher("yew", **invariant)],
        request=request,
    )
    assert chosen.deterministic
    assert (chosen.prefill.runner, chosen.prefill.dispatcher) == ("elm", "yew")
    assert {r.who for r in chosen.refused} == {"runner oak", "dispatcher ash"}
    with pytest.raises(PlanRefused) as error:
        make(request=request)
    assert {r.asked for r in error.value.refusals} == {"--deterministic"}
    assert "batch-invariant: asked for with --deterministic" in chosen.reasons
    assert not make().deterministic


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("format", "activations"),
    [*((f, "bf16") for f in ("bf16", "mxfp4", "nvfp4", "int4")), ("fp8", "fp8"), ("mxfp4", "fp8")],
)
@pytest.mark.parametrize("activation", ["silu", "swiglu"])
def test_a_layer_on_a_gpu(format: str, activations: str, activation: str):
    """Batches that take every tile there is, with an odd number of steps along the inner dimensions."""
    sizes = {"hidden_size": 640, "intermediate_size": 384 if format == "fp8" else 320, "top_k": 4}
    layer = layer_of(
        make_spec(activation, format, **sizes),
        CUDA,
        4096,
        runner="hopper",
        activation_format=activations,
        weight_storage="packed",
        compute_dtype="bfloat16",
    )
    x_TH = torch.randn(4096, 640, generator=torch.Generator().manual_seed(1)).bfloat16().to(CUDA)
    assert_batch_invariant(layer, x_TH, (3, 5, 9, 20, 40, 80, 160, 500, 1100, 4096))


@pytest.mark.gpu
@pytest.mark.parametrize("format", ["bf16", "mxfp4", "nvfp4", "int4"])
def test_every_tiling_of_specialised_warps_gives_the_same_bits_on_a_gpu(format: str):
    """Also those that tables alone take; with whole tiles and with narrow ones."""
    spec = make_spec("swiglu", format, hidden_size=640, intermediate_size=320, top_k=4)
    fields = {"runner": "hopper", "weight_storage": "packed", "compute_dtype": "bfloat16"}
    layer = layer_of(spec, CUDA, 1100, **fields)
    draw = torch.Generator().manual_seed(1)
    for tokens in (30, 290, 1100):
        x_TH = torch.randn(tokens, 640, generator=draw).bfloat16().to(CUDA)
        found = []
        shape = layer._runner.shape
        plain = (Plain if format == "bf16" else Packed).rule(shape, tokens)
        special = specialised.CHOICES[shape.weights]
        for tiles in (plain, *(LayerTiles(config, config) for config in special)):
            layer._runner.use_tiles(((tokens, tiles),))
            found.append(layer(x_TH))
        assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_of_a_product_on_a_gpu(dtype: torch.dtype):
    draw = torch.Generator().manual_seed(0)
    x, w, bias = (torch.randn(*size, generator=draw) for size in ((700, 712), (333, 712), (333,)))
    y = rowwise.linear(*(t.to(CUDA, dtype) for t in (x, w, bias)))
    wanted = torch.nn.functional.linear(*(t.to(dtype).double() for t in (x, w, bias)))
    assert torch.allclose(y.cpu().double(), wanted, rtol=2e-2, atol=2e-2)
    for size in (1, 3, 17, 40, 100, 699):
        assert torch.equal(rowwise.linear(*(t.to(CUDA, dtype) for t in (x[:size], w, bias))), y[:size])
