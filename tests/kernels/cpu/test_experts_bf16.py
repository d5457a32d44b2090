"""Experts on bfloat16 units, those of them that this machine has, against the layer in plain float32 torch.

Numbers are rounded to bfloat16 where the units have them rounded: tokens, weights, and between the matrices.
On a machine without such units the same layers go through the kernels that it would run in their place.
"""

import pytest
import torch

from tests.kernels.cpu.test_experts import panels
from turnout.formats.experts import ExpertWeights
from turnout.formats.packed import PackedTensor
from turnout.kernels.cpu import experts as kernels
from turnout.kernels.cpu import experts_bf16
from turnout.kernels.cpu.panels import PAIRS, Panels
from turnout.moe.accuracy import BOUNDS, relative_error
from turnout.moe.reference import experts_reference
from turnout.moe.spec import Activation
from turnout.parallel.hardware import detect
from turnout.vocabulary import Bf16Units

E, K = 6, 3
HERE = detect("cpu").known_bf16_units
# hidden and intermediate: multiples of 32, and of 16 alone, which are padded
SIZES = [(64, 32), (80, 48)]
ACTIVATIONS = [
    (Activation(), False),
    (Activation(kind="swiglu", alpha=1.702, beta=1.0, limit=0.7), True),
    (Activation(kind="relu2"), True),
]

# Float32 on ties of bfloat16 (to an even and to an odd one) and next to them, at every exponent
# but that of subnormal numbers; infinities and NaN.
_TIES = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x17FFF, 0x18000, 0x18001, 0x7F8000, 0x7FFFFF])
_BITS = (torch.arange(1, 255)[:, None] * 2**23 + _TIES).flatten()
_OTHERS = torch.tensor([0, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF])
_UNSIGNED = torch.cat((_BITS, _OTHERS)).int().view(torch.float32)
SUMS = torch.cat((_UNSIGNED, -_UNSIGNED[_UNSIGNED != 0]))


def made(hidden: int, inner: int, activation: Activation, biased: bool) -> ExpertWeights:
    rows = 2 * inner if activation.gated else inner

    def matrix(n: int, k: int) -> PackedTensor:
        return PackedTensor(format="bf16", data=(torch.randn(E, n, k) / k**0.5).bfloat16())

    return ExpertWeights(
        w13=matrix(rows, hidden),
        w2=matrix(hidden, inner),
        b13=torch.randn(E, rows) if biased else None,
        b2=torch.randn(E, hidden) if biased else None,
        num_experts=E,
    )


def in_pairs(packed: PackedTensor) -> Panels:
    store = Panels(packed.shape, PAIRS)
    for e in range(E):
        store.write(e, packed.data[e])
    return store


def layer(experts: ExpertWeights, activation: Activation, units: Bf16Units) -> kernels.Layer:
    store = panels if units == Bf16Units.NONE else in_pairs
    return kernels.Layer(
        w13=store(experts.w13),
        w2=store(experts.w2),
        b13=experts.b13,
        b2=experts.b2,
        activation=str(activation.kind),
        alpha=activation.alpha,
        beta=activation.beta,
        limit=float("inf") if activation.limit is None else activation.limit,
    )


def run(mine: kernels.Layer, units: Bf16Units, x, ids, factors) -> torch.Tensor:
    pairs = kernels.sort_pairs(ids, factors, 0, E)
    if units == Bf16Units.NONE:
        return kernels.run(mine, x.float(), pairs, len(x)).bfloat16()
    return experts_bf16.run(mine, x, pairs, len(x), str(units))


def choices(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.rand(tokens, E).topk(K).indices.int() if tokens else torch.empty(0, K, dtype=torch.int32)
    return ids, torch.rand(tokens, K)


@pytest.mark.parametrize("units", HERE)
@pytest.mark.parametrize(("hidden", "inner"), SIZES)
@pytest.mark.parametrize(("activation", "biased"), ACTIVATIONS, ids=["silu", "swiglu", "relu2"])
def test_as_the_reference_computes_them(units, hidden, inner, activation, biased):
    torch.manual_seed(1)
    experts = made(hidden, inner, activation, biased)
    mine = layer(experts, activation, units)
    for tokens in (0, 1, 5, 40, 300):  # up to 150 rows of an expert: parts of a tile, and several gathers
        x = torch.randn(tokens, hidden).bfloat16()
        ids, factors = choices(tokens)
        ids[::4, 1] = -1
        reference = experts_reference(x.float(), ids, factors, experts, activation)
        assert relative_error(run(mine, units, x, ids, factors), reference) < BOUNDS["bf16", "bfloat16"] / 2


@pytest.mark.parametrize("units", HERE)
def test_a_tokens_bits_do_not_depend_on_its_batch_or_the_threads(units, monkeypatch):
    torch.manual_seed(2)
    mine = layer(made(64, 32, Activation(), False), Activation(), units)
    x, (ids, factors) = torch.randn(70, 64).bfloat16(), choices(70)
    whole = run(mine, units, x, ids, factors)
    for start, stop in ((0, 1), (7, 9), (11, 52)):
        rows = slice(start, stop)
        assert torch.equal(run(mine, units, x[rows], ids[rows], factors[rows]), whole[rows])
    monkeypatch.setattr(experts_bf16, "threads_that_wait", lambda multiplications: 3)
    assert torch.equal(run(mine, units, x, ids, factors), whole)


@pytest.mark.parametrize("units", HERE)
def test_rows_that_nobody_chose_are_not_read(units):
    torch.manual_seed(3)
    mine = layer(made(64, 32, Activation(), False), Activation(), units)
    x, ids = torch.randn(3, 64).bfloat16(), torch.tensor([[0], [-1], [5]], dtype=torch.int32)
    x[1] = float("nan")
    out = run(mine, units, x, ids, torch.ones(3, 1))
    assert out.isfinite().all()
    assert out[1].eq(0).all()


@pytest.mark.parametrize("units", HERE)
@pytest.mark.parametrize("threads", [1, 3])
def test_sums_are_rounded_as_torch_rounds(units, threads, monkeypatch):
    """Experts that put 1 out everywhere, so that a token's sum is its weight, of any bits."""
    monkeypatch.setattr(experts_bf16, "threads_that_wait", lambda multiplications: threads)
    hidden, inner = 144, 32
    ones = ExpertWeights(
        w13=PackedTensor(format="bf16", data=torch.ones(E, inner, hidden).bfloat16()),
        w2=PackedTensor(format="bf16", data=torch.ones(E, hidden, inner).bfloat16()),
        num_experts=E,
    )
    ones.w13.data[:, 1:] = 0
    x = torch.zeros(len(SUMS), hidden).bfloat16()
    x[:, 3] = 1
    ids = torch.arange(len(SUMS), dtype=torch.int32)[:, None] % E
    out = run(layer(ones, Activation(kind="relu2"), units), units, x, ids, SUMS[:, None])
    assert out.dtype == torch.bfloat16
    expected = SUMS.bfloat16()[:, None].expand_as(out)
    number = ~SUMS.isnan()
    assert torch.equal(out[number].view(torch.int16), expected[number].contiguous().view(torch.int16))
    assert out[~number].isnan().all()
