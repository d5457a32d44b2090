"""What the runner for Hopper declares."""

from __future__ import annotations

from turnout.moe.backends.hopper.tuning import HopperTuning
from turnout.moe.backends.hopper.workspace import workspace_bytes
from turnout.moe.capabilities.capability import Backend, RunnerCapability
from turnout.packages import TRITON
from turnout.vocabulary import Format, Layout, WeightStorage

RUNNER = RunnerCapability(
    name="hopper",
    aliases=("triton",),
    summary="Gluon and Triton kernels for Hopper: W4A16, W4A8, W8A8, bf16; fused, no host waits",
    implementation="turnout.moe.backends.hopper.runner:HopperRunner",
    layouts=frozenset({Layout.TOKENS, Layout.BATCHED_EXPERTS}),
    weight_formats=frozenset({Format.BF16, Format.MXFP4, Format.NVFP4, Format.INT4, Format.FP8}),
    activation_formats=frozenset({Format.BF16, Format.FP8}),
    fp8_weight_formats=frozenset({Format.FP8, Format.MXFP4}),
    weight_only_formats=frozenset({Format.BF16, Format.MXFP4, Format.NVFP4, Format.INT4}),
    fp8_units=True,
    compute_dtypes=frozenset({"bfloat16"}),
    devices=frozenset({"cuda"}),
    architectures=frozenset({90}),
    hidden_multiple=16,  # compiled for rows that begin at multiples of 16 bytes
    intermediate_multiple=16,
    weight_storages=frozenset({WeightStorage.PACKED}),
    workspace=workspace_bytes,
    preference=10,
    grounds="ahead of torch at every point measured on an H200",
    all_triton=True,
    tuning=HopperTuning(),
    batch_invariant=True,
    requires=(TRITON,),
)

BACKEND = Backend(runners=(RUNNER,))
