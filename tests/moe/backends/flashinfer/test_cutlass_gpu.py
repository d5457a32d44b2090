"""FlashInfer's `cutlass_fused_moe` on Hopper, at the sizes of published models, against the oracle."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.moe.build import expert_slice, make_plan
from turnout.formats import codec
from turnout.formats.experts import ExpertWeights
from turnout.formats.packed import PackedTensor
from turnout.moe.accuracy import BOUNDS, relative_error
from turnout.moe.backends.flashinfer.declaration import FLASHINFER
from turnout.moe.backends.flashinfer.workspace_cutlass import workspace_bytes
from turnout.moe.batch import Hidden, TokensBatch
from turnout.moe.capabilities.declared import RUNNERS
from turnout.moe.capabilities.rank_share import Share
from turnout.moe.reference import experts_reference
from turnout.moe.spec import Activation, MoESpec, RankShape

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(FLASHINFER.lacking()), reason="asks for FlashInfer"),
]

SILU = Activation()
GPT_OSS = Activation(kind="swiglu", alpha=1.702, beta=1.0, limit=7.0)
DEEPSEEK_V4 = Activation(kind="swiglu", limit=10.0)
TOKENS = (0, 1, 3, 17, 128, 1024, 8192)
NUMERICS = {"mxfp4": "bf16", "bf16": "bf16", "fp8": "fp8"}


def spec_of(
    hidden: int, inner: int, experts: int, top_k: int, activation: Activation, format: str
) -> MoESpec:
    return MoESpec(
        hidden_size=hidden,
        intermediate_size=inner,
        num_experts=experts,
        top_k=top_k,
        activation=activation,
        format=format,
        expert_bias=activation is GPT_OSS,
    )


SPECS = {
    "gptoss-20b": spec_of(2880, 2880, 32, 4, GPT_OSS, "mxfp4"),
    "gptoss-120b": spec_of(2880, 2880, 128, 4, GPT_OSS, "mxfp4"),
    "deepseek-v4": spec_of(4096, 2048, 64, 6, DEEPSEEK_V4, "mxfp4"),
    "qwen3-30b": spec_of(2048, 768, 128, 8, SILU, "bf16"),
    "qwen3-30b-fp8": spec_of(2048, 768, 128, 8, SILU, "fp8"),
}


def weights_of(spec: MoESpec) -> ExpertWeights:
    draw = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, device="cuda")

    def packed(rows: int, columns: int) -> PackedTensor:
        each = [
            codec.encode(normal(rows, columns) * columns**-0.5, spec.format) for _ in range(spec.num_experts)
        ]
        scales = [one.scale for one in each if one.scale is not None]
        data = torch.stack([one.data.bfloat16() if spec.format == "bf16" else one.data for one in each])
        return replace(each[0], data=data, scale=torch.stack(scales) if scales else None)

    E, H, bias = spec.num_experts, spec.hidden_size, spec.expert_bias
    return ExpertWeights(
        w13=packed(spec.w13_rows, H),
        w2=packed(H, spec.intermediate_size),
        b13=normal(E, spec.w13_rows) if bias else None,
        b2=normal(E, H) if bias else None,
        num_experts=E,
    )


def batch_of(spec: MoESpec, T: int, seed: int = 1) -> TokensBatch:
    """The second token is padding."""
    draw = torch.Generator("cuda").manual_seed(seed)
    x_TH = torch.randn(T, spec.hidden_size, generator=draw, device="cuda").bfloat16()
    weights_TK, ids_TK = torch.rand(T, spec.num_experts, generator=draw, device="cuda").topk(spec.top_k)
    ids_TK[1:2], weights_TK[1:2] = -1, 0
    return TokensBatch(hidden=Hidden(data=x_TH), topk_ids=ids_TK.int(), topk_weights=weights_TK)


def runner_of(spec: MoESpec, experts: ExpertWeights):
    name = "flashinfer_mxfp4" if spec.format == "mxfp4" else "flashinfer_cutlass"
    plan = make_plan(
        spec,
        runner=name,
        weight_storage="packed",
        activation_format=NUMERICS[spec.format],
        compute_dtype="bfloat16",
        first=experts.first_expert,
        count=experts.num_local_experts,
    )
    plan = replace(plan, prefill=replace(plan.prefill, max_tokens=TOKENS[-1]))
    runner = RUNNERS.load(name)(spec, plan, torch.device("cuda"))
    runner.prepare(experts)
    return runner


@pytest.mark.parametrize("name", SPECS)
def test_published_sizes_in_slices_of_experts(name: str):
    spec = SPECS[name]
    whole = weights_of(spec)
    numerics = NUMERICS[spec.format]
    for ep in (1, 2, 4):
        count = spec.num_experts // ep
        experts = expert_slice(whole, (ep - 1) * count, count)
        runner = runner_of(spec, experts)
        for tokens in TOKENS if ep == 1 else TOKENS[:-2]:
            batch = batch_of(spec, tokens)
            out_TH = runner(batch)
            wanted_TH = experts_reference(
                batch.hidden.data.float(),
                batch.topk_ids,
                batch.topk_weights,
                experts,
                spec.activation,
                activation_format=numerics,
            )
            assert out_TH.shape == wanted_TH.shape
            error = relative_error(out_TH.float(), wanted_TH)
            assert error <= BOUNDS[numerics, "bfloat16"], f"EP {ep}, {tokens} tokens: {error:.1e}"
            assert torch.equal(out_TH, runner(batch)), "not deterministic"
            assert not out_TH[1:2].any(), "padding counts"


@pytest.mark.parametrize("name", ["gptoss-20b", "qwen3-30b", "qwen3-30b-fp8"])
def test_a_graph_replays_what_runs_eagerly(name: str):
    spec = SPECS[name]
    runner, batch = runner_of(spec, weights_of(spec)), batch_of(spec, 16)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        runner(batch)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out_TH = runner(batch)
    fresh = batch_of(spec, 16, seed=2)
    batch.hidden.data.copy_(fresh.hidden.data)
    batch.topk_ids.copy_(fresh.topk_ids)
    batch.topk_weights.copy_(fresh.topk_weights)
    graph.replay()
    assert torch.equal(out_TH, runner(batch))


@pytest.mark.parametrize("name", ["gptoss-20b", "qwen3-30b", "qwen3-30b-fp8"])
def test_the_planned_workspace_covers_what_the_library_asks(name: str):
    spec = SPECS[name]
    runner = runner_of(spec, weights_of(spec))
    share = Share(
        shape=RankShape.of(spec, num_local_experts=spec.num_experts),
        activation=spec.activation.kind,
        rows=TOKENS[-1],
        layout="tokens",
        decoded=False,
        itemsize=2,
    )
    planned = workspace_bytes(share)
    outside = 2 * TOKENS[-1] * spec.hidden_size  # the output, which is not of the workspace
    assert 0.5 * planned < runner._moe._size <= planned - outside


def test_codes_are_interleaved_as_the_library_interleaves_them():
    from flashinfer.fused_moe import interleave_moe_weights_for_sm90_mixed_gemm

    from turnout.moe.backends.flashinfer import weights_cutlass

    codes = torch.randint(0, 256, (2, 256, 192), dtype=torch.uint8, device="cuda")
    assert torch.equal(
        weights_cutlass.interleave_mxfp4(codes), interleave_moe_weights_for_sm90_mixed_gemm(codes)
    )
