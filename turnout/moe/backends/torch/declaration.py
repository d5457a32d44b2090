"""What the runner in plain torch declares."""

from __future__ import annotations

from turnout.formats.spec import WEIGHT_FORMATS, WIRE_FORMATS
from turnout.moe.backends.torch.workspace import workspace_bytes
from turnout.moe.capabilities.capability import Backend, RunnerCapability
from turnout.vocabulary import Format, Layout

TORCH = RunnerCapability(
    name="torch",
    summary="plain torch; every format and activation, fast on CPUs, correct on CUDA",
    implementation="turnout.moe.backends.torch.runner:TorchRunner",
    layouts=frozenset({Layout.TOKENS, Layout.BATCHED_EXPERTS}),
    weight_formats=frozenset(WEIGHT_FORMATS),
    wire_formats=frozenset(WIRE_FORMATS),
    activation_formats=frozenset({Format.BF16, Format.NVFP4, Format.FP8}),
    fp8_weight_formats=frozenset({Format.FP8, Format.MXFP4}),
    workspace=workspace_bytes,
    graph_safe=False,
    batch_invariant=True,
)

BACKEND = Backend(runners=(TORCH,))
