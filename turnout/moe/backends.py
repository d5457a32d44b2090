"""What the backends of this version declare, apart from their code: planning imports none of them.

A new backend is its own file, a line in registry.py that names it, and its declaration here, which its
class carries as `capability` (a test compares).
"""

from __future__ import annotations

from turnout.moe.budget import WEIGHT_GROUP, WIRE_GROUP
from turnout.moe.capability import DispatcherCapability, RunnerCapability
from turnout.moe.packages import TRITON
from turnout.moe.workspace import workspace_bytes as hopper_workspace_bytes

RUNNER_CAPABILITIES = {
    declared.name: declared
    for declared in (
        RunnerCapability(
            name="torch",
            summary="plain torch; every format and activation, fast on CPUs, correct on CUDA",
            layouts=frozenset({"tokens", "experts"}),
            weight_formats=frozenset(WEIGHT_GROUP),
            wire_formats=frozenset(WIRE_GROUP),
            activation_formats=frozenset({"bf16", "nvfp4", "fp8"}),
            graph_safe=False,
            batch_invariant=True,
        ),
        RunnerCapability(
            name="triton",
            summary="Gluon and Triton kernels for Hopper: W4A16, W8A8, bf16; fused activation, no host waits",
            layouts=frozenset({"tokens", "experts"}),
            weight_formats=frozenset({"bf16", "mxfp4", "nvfp4", "fp8"}),
            activation_formats=frozenset({"bf16", "fp8"}),
            weight_only_formats=frozenset({"bf16", "mxfp4", "nvfp4"}),
            fp8_units=True,
            compute_dtypes=frozenset({"bfloat16"}),
            devices=frozenset({"cuda"}),
            architectures=frozenset({90}),
            hidden_multiple=8,  # 16-byte copies of rows
            intermediate_multiple=8,  # gate and up alternate by as many rows
            weight_storages=frozenset({"packed"}),
            tiled=True,
            workspace=hopper_workspace_bytes,
            preference=10,  # ahead of torch at every measured point (docs/performance.md)
            batch_invariant=True,
            requires=(TRITON,),
        ),
    )
}

DISPATCHER_CAPABILITIES = {
    declared.name: declared
    for declared in (
        DispatcherCapability(
            name="none",
            summary="every rank sees all tokens and computes its experts'; data-parallel groups gather",
            layout="tokens",
            exchange="gather",
            wire_formats=frozenset(WIRE_GROUP),
            preference=10,  # two collectives a layer, and no waits of the host
            batch_invariant=True,
        ),
        DispatcherCapability(
            name="collective",
            summary="all-to-all through torch.distributed: a token goes once to each rank that needs it",
            layout="tokens",
            exchange="all_to_all",
            wire_formats=frozenset(WIRE_GROUP),
            graph_safe=False,  # the host waits for counts where few ranks need a token
            batch_invariant=True,
        ),
        DispatcherCapability(
            name="collective-experts",
            summary="the same exchange, laid out as a slab per expert for masked runners",
            layout="experts",
            exchange="all_to_all",
            wire_formats=frozenset(WIRE_GROUP),
            graph_safe=False,
            batch_invariant=True,
        ),
    )
}
