"""What the runners and the dispatcher over FlashInfer declare."""

from __future__ import annotations

from functools import partial

from turnout.formats.spec import WIRE_FORMATS
from turnout.moe.backends.flashinfer.buffers import buffer_bytes
from turnout.moe.backends.flashinfer.workspace_blackwell import (
    cutedsl_workspace_bytes,
    trtllm_workspace_bytes,
)
from turnout.moe.backends.flashinfer.workspace_cutlass import workspace_bytes as cutlass_workspace_bytes
from turnout.moe.capabilities.capability import Backend, DispatcherCapability, RunnerCapability
from turnout.moe.capabilities.limits import Limits
from turnout.packages import Package
from turnout.vocabulary import ActivationKind, Exchange, Format, Layout, WeightStorage

FLASHINFER = Package(
    module="flashinfer",
    distribution="flashinfer-python",
    minimum="0.7.2",  # CuteDslMoEWrapper takes quant_mode and no longer preallocates
    install="pip install 'turnout[flashinfer]'",
)
AUTOTUNER = "turnout.moe.backends.flashinfer.autotune:tune"
HOPPER, BLACKWELL = frozenset({90}), frozenset({100, 103})

CHECKED = "what FlashInfer is handed is decoded and computed on a CPU"
CHECKED_BY_DEMO = f"{CHECKED}, where the demo answers as through torch"

_runner = partial(  # what all runners share
    RunnerCapability,
    compute_dtypes=frozenset({"bfloat16"}),
    devices=frozenset({"cuda"}),
    weight_storages=frozenset({WeightStorage.PACKED}),
    autotuner=AUTOTUNER,
    requires=(FLASHINFER,),
)
_blackwell_runner = partial(
    _runner,
    weight_formats=frozenset({Format.NVFP4}),
    wire_formats=frozenset({Format.BF16, Format.NVFP4}),
    fp4_units=True,
    expert_bias=False,
    architectures=BLACKWELL,
    hidden_multiple=128,  # rows of W2 in whole tiles of scales
    intermediate_multiple=64,  # up and gate in blocks of as many rows
)

CUTEDSL = _blackwell_runner(
    name="flashinfer_cutedsl",
    summary="FlashInfer's CuTe DSL kernels: NVFP4 W4A4 and W4A16 on Blackwell, masked ones too",
    implementation="turnout.moe.backends.flashinfer.cutedsl:CuteDslRunner",
    layouts=frozenset({Layout.TOKENS, Layout.BATCHED_EXPERTS}),
    activation_formats=frozenset({Format.BF16, Format.NVFP4}),
    weight_only_layouts=frozenset({Layout.TOKENS}),
    ungated_multiple=128,  # rows of W1 in whole tiles of scales
    weights_per_layout=True,
    preference=10,
    grounds="written for these FP4 units; not measured here",
    deterministic=False,  # the sum over a token's experts is atomic
    workspace=cutedsl_workspace_bytes,
    checked=f"{CHECKED_BY_DEMO}, and compiled for sm_100a",
)

TRTLLM = _blackwell_runner(
    name="flashinfer_trtllm",
    summary="TensorRT-LLM's kernels through FlashInfer: NVFP4 W4A4 on Blackwell",
    implementation="turnout.moe.backends.flashinfer.trtllm:TrtllmRunner",
    layouts=frozenset({Layout.TOKENS}),
    activation_formats=frozenset({Format.NVFP4}),
    weight_only_formats=frozenset(),
    activations=frozenset({ActivationKind.SILU}),
    workspace=trtllm_workspace_bytes,
    checked=CHECKED_BY_DEMO,
    preference=5,
    grounds="written for these FP4 units, for fewer layers; not measured here",
)

MXFP4 = _runner(
    name="flashinfer_mxfp4",
    summary="FlashInfer's CUTLASS kernels for MXFP4 weights on Hopper: W4A16, fused activation",
    implementation="turnout.moe.backends.flashinfer.mxfp4:FlashinferMxfp4Runner",
    layouts=frozenset({Layout.TOKENS}),
    weight_formats=frozenset({Format.MXFP4}),
    weight_only_formats=frozenset({Format.MXFP4}),
    architectures=HOPPER,
    preference=5,
    grounds="behind hopper at every size measured on an H200",
    checked=CHECKED,
    workspace=cutlass_workspace_bytes,
)

CUTLASS = _runner(
    name="flashinfer_cutlass",
    summary="FlashInfer's CUTLASS kernels: bf16, FP8 blocks on Hopper, NVFP4 W4A4 on Blackwell",
    implementation="turnout.moe.backends.flashinfer.cutlass:FlashinferCutlassRunner",
    layouts=frozenset({Layout.TOKENS}),
    weight_formats=frozenset({Format.BF16, Format.FP8, Format.NVFP4}),
    activation_formats=frozenset({Format.BF16, Format.FP8, Format.NVFP4}),
    weight_only_formats=frozenset({Format.BF16}),
    fp4_units=True,
    fp8_units=True,
    architectures=HOPPER | BLACKWELL,
    format_architectures=((Format.FP8, HOPPER), (Format.NVFP4, BLACKWELL)),
    hidden_multiple=64,  # rows of scales, and 16-byte copies
    intermediate_multiple=64,
    preference=4,
    grounds="behind hopper at every size measured on an H200; not measured on Blackwell",
    checked=CHECKED,
    workspace=cutlass_workspace_bytes,
)

ALL_TO_ALL = DispatcherCapability(
    name="flashinfer",
    summary="FlashInfer's one-sided all-to-all: tokens written over NVLink into receivers' memory",
    implementation="turnout.moe.backends.flashinfer.dispatcher:FlashInferDispatch",
    layout=Layout.TOKENS,
    exchange=Exchange.ALL_TO_ALL,
    wire_formats=frozenset(WIRE_FORMATS),
    devices=frozenset({"cuda"}),
    architectures=HOPPER | BLACKWELL,
    multi_host=False,
    limits=Limits(
        one_to_one=True,
        ep_sizes=frozenset(range(2, 65)),
        top_ks=frozenset({1, 2, 4, 6, 8, 10, 12, 14, 16, 18, 22}),
        hidden_multiple=64,  # ids follow NVFP4's scales, at whole words
    ),
    buffers=buffer_bytes,
    checked="FlashInfer's own Python runs between CPU ranks, over kernels in plain torch",
    requires=(FLASHINFER,),
)

BACKEND = Backend(runners=(CUTEDSL, TRTLLM, MXFP4, CUTLASS), dispatchers=(ALL_TO_ALL,))
