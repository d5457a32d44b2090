"""What the torch runner promises beyond the matrix: who keeps which memory, and equal bits in any batch."""

from __future__ import annotations

import weakref

import pytest
import torch

from tests.moe.bounds import assert_close
from tests.moe.build import make_experts, make_plan, make_spec
from turnout.formats import fp8, nvfp4
from turnout.formats.scales import ScaleError
from turnout.formats.spec import FORMATS
from turnout.moe.backends.torch.runner import GATHER_PAIRS_PER_EXPERT, Matrices, TorchRunner
from turnout.moe.batch import ExpertsBatch, Hidden, TokensBatch
from turnout.moe.reference import experts_reference
from turnout.moe.spec import MoESpec

CPU = torch.device("cpu")


def make_runner(spec: MoESpec, experts=None, **fields) -> TorchRunner:
    runner = TorchRunner(spec, make_plan(spec, **fields), CPU)
    runner.prepare(make_experts(spec) if experts is None else experts)
    return runner


def make_batch(
    spec: MoESpec, tokens: int, hidden: Hidden | None = None, *, dtype=torch.float32
) -> TokensBatch:
    draw = torch.Generator().manual_seed(3)
    x_TH = torch.randn(tokens, spec.hidden_size, generator=draw).to(dtype)
    weights_TK, ids_TK = torch.rand(tokens, spec.num_experts, generator=draw).topk(spec.top_k)
    return TokensBatch(hidden=hidden or Hidden(data=x_TH), topk_ids=ids_TK.int(), topk_weights=weights_TK)


def rows(batch: TokensBatch, index) -> TokensBatch:
    return TokensBatch(
        hidden=Hidden(data=batch.hidden.data[index]),
        topk_ids=batch.topk_ids[index],
        topk_weights=batch.topk_weights[index],
    )


@pytest.mark.parametrize("numerics", ["bf16", "nvfp4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_small_batches_leave_no_trace_in_a_token(numerics, dtype):
    """Bit-equal in any batch, order or padding included."""
    spec = make_spec("swiglu", "nvfp4")
    runner = make_runner(spec, compute_dtype=dtype, activation_format=numerics)
    most = GATHER_PAIRS_PER_EXPERT * spec.num_experts // spec.top_k
    batch = make_batch(spec, most, dtype=getattr(torch, dtype))
    batch.topk_ids[3] = -1
    together = runner(batch)
    for token in range(most):
        assert torch.equal(runner(rows(batch, slice(token, token + 1)))[0], together[token])
    backwards = list(range(most))[::-1]
    assert torch.equal(runner(rows(batch, backwards)), together[backwards])


@pytest.mark.parametrize("format", FORMATS)
def test_decoded_weights_let_the_canonical_ones_go(format):
    spec = make_spec("silu", format)
    experts = make_experts(spec)
    alive = [weakref.ref(t) for t in (*experts.w13.parts(), *experts.w2.parts())]
    runner = make_runner(spec, experts)
    del experts
    assert not any(ref() is not None for ref in alive)
    assert runner(make_batch(spec, 2)).isfinite().all()


@pytest.mark.parametrize("format", FORMATS)
def test_packed_weights_are_kept_without_a_copy(format):
    spec = make_spec("silu", format)
    experts = make_experts(spec)
    runner = make_runner(spec, experts, weight_storage="packed")
    assert isinstance(runner._w13, Matrices)
    held = [t.data_ptr() for t in runner._w13._weights.parts()]
    assert held == [t.data_ptr() for t in experts.w13.parts()]


@pytest.mark.parametrize("numerics", ["bf16", "nvfp4"])
@pytest.mark.parametrize("storage", ["decoded", "packed"])
@pytest.mark.parametrize("format", FORMATS)
def test_update_writes_into_the_same_storage(format, storage, numerics):
    if numerics not in ("bf16", format):
        numerics = "bf16"
    spec = make_spec("swiglu", format)
    runner = make_runner(spec, weight_storage=storage, activation_format=numerics)
    before = storage_of(runner)
    new = make_experts(spec, seed=7)
    runner.update(new)
    assert storage_of(runner) == before
    batch = make_batch(spec, 5)
    ref = experts_reference(
        batch.hidden.data,
        batch.topk_ids,
        batch.topk_weights,
        new,
        spec.activation,
        activation_format=numerics,
    )
    assert_close(runner(batch), ref, activation_format=numerics, compute_dtype="float32")


def storage_of(runner: TorchRunner) -> list[int]:
    """Addresses of every tensor the runner holds, however deep."""
    found: list[int] = []

    def visit(value) -> None:
        if isinstance(value, torch.Tensor):
            found.append(value.data_ptr())
        elif isinstance(value, tuple):
            for item in value:
                visit(item)
        elif type(value).__module__.startswith("turnout.") and hasattr(value, "__dict__"):
            for name in sorted(vars(value)):
                visit(vars(value)[name])

    visit(runner)
    return found


def encoded(wire: str, x: torch.Tensor, scale: torch.Tensor) -> tuple[Hidden, torch.Tensor]:
    """x as it is sent, and the numbers that arrive."""
    if wire == "fp8":
        data, block = fp8.encode_activation(x)
        return Hidden(data=data, format="fp8", scale=block), fp8.decode_activation(data, block)
    data, block = nvfp4.quantize_activation(x, scale)
    hidden = Hidden(data=data, format="nvfp4", scale=block, global_scale=scale)
    return hidden, nvfp4.decode(data, block, scale)


@pytest.mark.parametrize("wire", ["fp8", "nvfp4"])
def test_quantised_hidden_states_of_tokens(wire):
    spec = make_spec("silu", "nvfp4")
    experts = make_experts(spec)
    plain = make_batch(spec, 3)
    hidden, decoded_TH = encoded(wire, plain.hidden.data, experts.input_scales.w13.max())
    y_TH = make_runner(spec)(make_batch(spec, 3, hidden))
    ref_TH = experts_reference(decoded_TH, plain.topk_ids, plain.topk_weights, experts, spec.activation)
    assert_close(y_TH, ref_TH, activation_format="bf16", compute_dtype="float32")


def test_w4a4_does_not_quantise_again_what_the_wire_did():
    spec = make_spec("silu", "nvfp4")
    experts = make_experts(spec)
    plain = make_batch(spec, 3)
    hidden, _ = encoded("nvfp4", plain.hidden.data, experts.input_scales.w13.max())
    runner = make_runner(spec, activation_format="nvfp4")
    assert torch.equal(runner(make_batch(spec, 3, hidden)), runner(plain))


@pytest.mark.parametrize("wire", ["fp8", "nvfp4"])
def test_quantised_hidden_states_of_batched_experts(wire):
    """The reference gives one expert at a time."""
    spec = make_spec("silu", "nvfp4")
    experts = make_experts(spec)
    x_EMH = torch.randn(spec.num_experts, 3, spec.hidden_size)
    hidden, decoded_EMH = encoded(wire, x_EMH, experts.input_scales.w13.max())
    y_EMH = make_runner(spec)(
        ExpertsBatch(hidden=hidden, counts=torch.full((spec.num_experts,), 3, dtype=torch.int32))
    )
    for expert in range(spec.num_experts):
        ids, ones = torch.full((3, 1), expert, dtype=torch.int32), torch.ones(3, 1)
        ref_MH = experts_reference(decoded_EMH[expert], ids, ones, experts, spec.activation)
        assert_close(y_EMH[expert], ref_MH, activation_format="bf16", compute_dtype="float32")


def test_w4a4_without_input_scales_is_refused():
    spec = make_spec("silu", "mxfp4")
    with pytest.raises(ScaleError, match="input_scale"):
        make_runner(spec, activation_format="nvfp4")


@pytest.mark.parametrize("counts", [(0, 0, 0, 0), (5, 0, 2, 1)])
def test_rows_beyond_the_counts_come_out_zero(counts):
    spec = make_spec("swiglu", num_experts=4)
    x_ECH = torch.randn(4, 5, spec.hidden_size)
    runner = make_runner(spec)
    out_ECH = runner(ExpertsBatch(hidden=Hidden(data=x_ECH), counts=torch.tensor(counts)))
    for expert, count in enumerate(counts):
        assert out_ECH[expert, :count].any(dim=1).all()
        assert not out_ECH[expert, count:].any()
