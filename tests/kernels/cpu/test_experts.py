"""Experts by compiled kernels against the layer in plain float32 torch, in every form of weights."""

from dataclasses import replace

import pytest
import torch

from turnout.formats.codec import encode
from turnout.formats.experts import ExpertWeights
from turnout.formats.packed import PackedTensor
from turnout.kernels.cpu import experts as kernels
from turnout.kernels.cpu.panels import Panels
from turnout.moe.reference import experts_reference
from turnout.moe.spec import Activation

E, H, I, K = 6, 64, 48, 3
SWIGLU = Activation(kind="swiglu", alpha=1.702, beta=1.0, limit=0.7)
CASES = [
    ("float32", Activation(), False),
    ("bfloat16", SWIGLU, True),
    ("float16", Activation(kind="relu2"), True),
    ("nvfp4", Activation(), False),
    ("mxfp4", SWIGLU, True),
    ("int4", Activation(), True),
    ("fp8", SWIGLU, True),
]


def weights(kind: str, activation: Activation, biased: bool) -> ExpertWeights:
    rows = 2 * I if activation.gated else I
    inner = 64 if kind in ("mxfp4", "int4") else I
    rows = rows // I * inner

    def matrix(n: int, k: int) -> PackedTensor:
        plain = torch.randn(E, n, k) / k**0.5
        return (
            encode(plain, kind)
            if kind in ("fp8", "nvfp4", "mxfp4", "int4")
            else PackedTensor(format="bf16", data=plain.to(getattr(torch, kind)))
        )

    return ExpertWeights(
        w13=matrix(rows, H),
        w2=matrix(H, inner),
        b13=torch.randn(E, rows) if biased else None,
        b2=torch.randn(E, H) if biased else None,
        num_experts=E,
    )


def panels(packed: PackedTensor) -> Panels:
    plain = packed.format == "bf16"
    store = Panels(packed.shape, packed.data.dtype if plain else packed.format)
    for e in range(E):
        if packed.format == "fp8":
            store.write_fp8(e, packed.data[e], packed.scale[e], packed.block_rows)
        elif not plain:
            factor = None if packed.global_scale is None else packed.global_scale[e]
            store.write_packed(e, packed.data[e], packed.scale[e], factor)
        else:
            store.write(e, packed.data[e])
    return store


def layer(experts: ExpertWeights, activation: Activation) -> kernels.Layer:
    return kernels.Layer(
        w13=panels(experts.w13),
        w2=panels(experts.w2),
        b13=experts.b13,
        b2=experts.b2,
        activation=activation.kind,
        alpha=activation.alpha,
        beta=activation.beta,
        limit=float("inf") if activation.limit is None else activation.limit,
    )


@pytest.mark.parametrize(("kind", "activation", "biased"), CASES, ids=[case[0] for case in CASES])
def test_as_the_reference_computes_them(kind, activation, biased):
    torch.manual_seed(1)
    experts = weights(kind, activation, biased)
    mine = layer(experts, activation)
    for tokens in (0, 1, 5, 40, 130):  # tiles of every height, and experts with many rows
        x = torch.randn(tokens, H)
        ids = torch.rand(tokens, E).topk(K).indices.int() if tokens else torch.empty(0, K, dtype=torch.int32)
        ids[::4, 1] = -1
        factors = torch.rand(tokens, K)
        got = kernels.run(mine, x, kernels.sort_pairs(ids, factors, 0, E), tokens)
        torch.testing.assert_close(
            got, experts_reference(x, ids, factors, experts, activation), rtol=1e-5, atol=1e-5
        )


def test_a_factor_kept_apart_from_decoded_weights():
    torch.manual_seed(4)
    packed = encode(torch.randn(E, 16, H), "nvfp4")
    unscaled = replace(packed, global_scale=torch.ones(E))
    inner = encode(torch.randn(E, H, 16), "nvfp4")
    kept = Panels((E, 16, H), torch.bfloat16), Panels((E, H, 16), torch.bfloat16)
    for store, weight in zip(kept, (unscaled, replace(inner, global_scale=torch.ones(E))), strict=True):
        for e in range(E):
            decoded = weight[e].decode()
            assert torch.equal(decoded.bfloat16().float(), decoded)
            store.write(e, decoded, (packed if store is kept[0] else inner).global_scale[e])
    relu2 = Activation(kind="relu2")
    x, ids, factors = torch.randn(5, H), torch.rand(5, E).topk(K).indices.int(), torch.rand(5, K)
    got = kernels.run(
        kernels.Layer(w13=kept[0], w2=kept[1], activation="relu2"),
        x,
        kernels.sort_pairs(ids, factors, 0, E),
        5,
    )
    experts = ExpertWeights(w13=packed, w2=inner, num_experts=E)
    expected = experts_reference(x, ids, factors, experts, relu2)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())


@pytest.mark.parametrize("kind", ["bfloat16", "fp8", "nvfp4"])
def test_threads_and_batches_change_no_bit(kind, monkeypatch):
    torch.manual_seed(2)
    experts = weights(kind, Activation(), False)
    mine = layer(experts, Activation())
    N = 130
    x, ids, factors = torch.randn(N, H), torch.rand(N, E).topk(K).indices.int(), torch.rand(N, K)

    def run(rows: slice) -> torch.Tensor:
        pairs = kernels.sort_pairs(ids[rows], factors[rows], 0, E)
        return kernels.run(mine, x[rows], pairs, len(x[rows]))

    whole = run(slice(None))
    for start, stop in ((0, 1), (7, 9), (11, 60)):
        assert torch.equal(run(slice(start, stop)), whole[start:stop])
    monkeypatch.setattr(kernels, "threads_for", lambda multiplications: 3)
    assert torch.equal(run(slice(None)), whole)


def test_rows_that_nobody_chose_are_not_read():
    torch.manual_seed(3)
    mine = layer(weights("float32", Activation(), False), Activation())
    x, ids = torch.randn(3, H), torch.tensor([[0], [-1], [5]], dtype=torch.int32)
    x[1] = float("nan")
    out = kernels.run(mine, x, kernels.sort_pairs(ids, torch.ones(3, 1), 0, E), 3)
    assert out.isfinite().all()
    assert out[1].eq(0).all()
