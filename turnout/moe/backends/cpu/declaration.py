"""What the runner for CPUs declares."""

from __future__ import annotations

from turnout.moe.backends.cpu.workspace import workspace_bytes
from turnout.moe.capabilities.capability import Backend, RunnerCapability
from turnout.packages import NUMBA
from turnout.vocabulary import Format, Layout

RUNNER = RunnerCapability(
    name="numba",
    summary="kernels for CPUs, compiled at start-up: fused activation and sum, FP8 and 4-bit weights too",
    implementation="turnout.moe.backends.cpu.runner:NumbaRunner",
    layouts=frozenset({Layout.TOKENS, Layout.BATCHED_EXPERTS}),
    weight_formats=frozenset({Format.BF16, Format.FP8, Format.NVFP4, Format.MXFP4, Format.INT4}),
    compute_dtypes=frozenset({"float32", "bfloat16"}),
    devices=frozenset({"cpu"}),
    hidden_multiple=16,  # outputs come in panels
    intermediate_multiple=16,
    fast_packed=frozenset({Format.BF16}),
    decoded_as_bf16=frozenset({Format.NVFP4, Format.MXFP4, Format.INT4}),
    workspace=workspace_bytes,
    preference=10,
    grounds="ahead of torch at every point measured on an AMD EPYC",
    graph_safe=False,
    batch_invariant=True,
    requires=(NUMBA,),
)

BACKEND = Backend(runners=(RUNNER,))
