"""Weights in the form of the Hopper kernels: what they hold, that they change in place, what that takes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.moe.backends.hopper.unfold import from_fragments, unpair_rows
from tests.moe.build import make_experts, make_spec
from turnout.moe.backends.hopper import fragments
from turnout.moe.backends.hopper.fragments import Fragments
from turnout.moe.backends.hopper.weights import Matrix

CPU = torch.device("cpu")
FORMATS = ["bf16", "fp8", "mxfp4", "nvfp4", "int4"]


def matrices(format: str, seed: int = 0, device: torch.device = CPU, **sizes) -> list[Matrix]:
    spec = make_spec("swiglu", format, **({"hidden_size": 192, "intermediate_size": 128} | sizes))
    experts = make_experts(spec, dtype=torch.bfloat16, seed=seed)
    return [Matrix(experts.w13, experts.b13, True, device), Matrix(experts.w2, experts.b2, False, device)]


def plain(matrix: Matrix) -> torch.Tensor:
    """float32 [E, N, K], rows in the order they came in; FP8 without its scales."""
    if matrix.format in ("mxfp4", "nvfp4", "int4"):
        folded = Fragments(
            format=matrix.format, codes=matrix.codes, scales=matrix.scales, alpha=matrix.alpha,
            rows=matrix.rows, columns=matrix.inner,
        )  # fmt: skip
        return from_fragments(folded, paired=matrix.paired)
    codes = matrix.codes.float()
    return unpair_rows(codes) if matrix.paired else codes


@pytest.mark.parametrize("format", FORMATS)
def test_weights_are_those_that_came_in_and_change_in_place(format: str):
    spec = make_spec("swiglu", format, hidden_size=192, intermediate_size=128)
    mine = matrices(format)
    places = [(m.codes.data_ptr(), m.scales.data_ptr(), m.bias.data_ptr()) for m in mine]
    for seed in (0, 1):
        experts = make_experts(spec, dtype=torch.bfloat16, seed=seed)
        if seed:
            mine[0].load(experts.w13, experts.b13)
            mine[1].load(experts.w2, experts.b2)
        made = zip(mine, matrices(format, seed), (experts.w13, experts.w2), strict=True)
        for matrix, fresh, packed in made:
            wanted = packed.data.float() if format in ("bf16", "fp8") else packed.decode()
            torch.testing.assert_close(plain(matrix), wanted, rtol=1e-6, atol=0)
            for name in ("codes", "scales", "alpha", "bias"):
                ours, theirs = getattr(matrix, name), getattr(fresh, name)
                assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)), name
    assert places == [(m.codes.data_ptr(), m.scales.data_ptr(), m.bias.data_ptr()) for m in mine]


def peak(action) -> int:
    """Bytes that are allocated meanwhile at most, beyond what is allocated afterwards."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    kept = action()
    torch.cuda.synchronize()
    most = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    del kept
    return most


@pytest.mark.gpu
@pytest.mark.parametrize("source", ["cpu", "cuda"])
@pytest.mark.parametrize("format", FORMATS)
def test_preparing_and_changing_weights_takes_as_many_bytes_as_are_copied_at_once(
    format: str, source: str, monkeypatch: pytest.MonkeyPatch
):
    """However large the layer is: some are larger than the memory that is left."""
    monkeypatch.setattr(fragments, "COPY_BYTES", 1 << 24)
    spec = make_spec("swiglu", format, hidden_size=1024, intermediate_size=1024, num_experts=64)
    experts = make_experts(spec, dtype=torch.bfloat16)
    experts = replace(
        experts, w13=experts.w13.to(source), w2=experts.w2.to(source), b13=experts.b13.to(source),
        b2=experts.b2.to(source),
    )  # fmt: skip
    device = torch.device("cuda")
    bound = 1 << 25  # of 72 MB of packed weights, or more
    for weights, bias, paired in ((experts.w13, experts.b13, True), (experts.w2, experts.b2, False)):
        matrix = Matrix(weights, bias, paired, device)
        assert peak(lambda: Matrix(weights, bias, paired, device)) < bound  # noqa: B023
        assert peak(lambda: matrix.load(weights, bias)) < bound  # noqa: B023
