"""What the backends of this version declare, apart from their code: planning imports none of them.

A new backend is its own file, a line in registry.py that names it, and its declaration here, which its
class carries as `capability` (a test compares).
"""

from __future__ import annotations

from turnout.formats.spec import WEIGHT_FORMATS, WIRE_FORMATS
from turnout.moe.backends.cpu.workspace import workspace_bytes as cpu_workspace_bytes
from turnout.moe.backends.flashinfer.workspace_blackwell import (
    cutedsl_workspace_bytes,
    trtllm_workspace_bytes,
)
from turnout.moe.backends.flashinfer.workspace_cutlass import workspace_bytes as cutlass_workspace_bytes
from turnout.moe.backends.hopper.workspace import workspace_bytes as hopper_workspace_bytes
from turnout.moe.planning.capability import DispatcherCapability, RunnerCapability, WireNeed
from turnout.moe.planning.cost import Cost
from turnout.moe.planning.dispatcher_limits import Limits
from turnout.moe.planning.packages import DEEPEP, DEEPEP_NVFP4, FLASHINFER, NCCL, NUMBA, NVSHMEM, TRITON
from turnout.vocabulary import Exchange, Format, Layout, Phase, WeightStorage

HOPPER_AND_BLACKWELL = frozenset({90, 100, 103})
DEEPEP_RANKS = frozenset({2, 4, 8})  # between which it has kernels over NVLink

RUNNER_CAPABILITIES = {
    declared.name: declared
    for declared in (
        RunnerCapability(
            name="torch",
            summary="plain torch; every format and activation, fast on CPUs, correct on CUDA",
            layouts=frozenset({Layout.TOKENS, Layout.BATCHED_EXPERTS}),
            weight_formats=frozenset(WEIGHT_FORMATS),
            wire_formats=frozenset(WIRE_FORMATS),
            activation_formats=frozenset({Format.BF16, Format.NVFP4, Format.FP8}),
            fp8_weight_formats=frozenset({Format.FP8, Format.MXFP4}),
            graph_safe=False,
            batch_invariant=True,
        ),
        RunnerCapability(
            name="numba",
            summary="kernels for CPUs, compiled at start-up: fused activation and sum, 4-bit weights too",
            layouts=frozenset({Layout.TOKENS, Layout.BATCHED_EXPERTS}),
            weight_formats=frozenset({Format.BF16, Format.NVFP4, Format.MXFP4}),
            compute_dtypes=frozenset({"float32", "bfloat16"}),
            devices=frozenset({"cpu"}),
            hidden_multiple=16,  # outputs come in panels
            intermediate_multiple=16,
            fast_packed=frozenset({Format.BF16}),
            decoded_as_bf16=frozenset({Format.NVFP4, Format.MXFP4}),
            workspace=cpu_workspace_bytes,
            preference=10,
            grounds="ahead of torch at every point measured on an AMD EPYC",
            graph_safe=False,
            batch_invariant=True,
            requires=(NUMBA,),
        ),
        RunnerCapability(
            name="triton",
            summary="Gluon and Triton kernels for Hopper: W4A16, W4A8, W8A8, bf16; fused, no host waits",
            layouts=frozenset({Layout.TOKENS, Layout.BATCHED_EXPERTS}),
            weight_formats=frozenset({Format.BF16, Format.MXFP4, Format.NVFP4, Format.FP8}),
            activation_formats=frozenset({Format.BF16, Format.FP8}),
            fp8_weight_formats=frozenset({Format.FP8, Format.MXFP4}),
            weight_only_formats=frozenset({Format.BF16, Format.MXFP4, Format.NVFP4}),
            fp8_units=True,
            compute_dtypes=frozenset({"bfloat16"}),
            devices=frozenset({"cuda"}),
            architectures=frozenset({90}),
            hidden_multiple=16,  # compiled for rows that begin at multiples of 16 bytes
            intermediate_multiple=16,
            weight_storages=frozenset({WeightStorage.PACKED}),
            workspace=hopper_workspace_bytes,
            preference=10,
            grounds="ahead of torch at every point measured on an H200",
            tiled=True,
            batch_invariant=True,
            requires=(TRITON,),
        ),
        RunnerCapability(
            name="flashinfer_cutedsl",
            summary="FlashInfer's CuTe DSL kernels: NVFP4 W4A4 and W4A16 on Blackwell, masked ones for slabs",
            layouts=frozenset({Layout.TOKENS, Layout.BATCHED_EXPERTS}),
            weight_formats=frozenset({Format.NVFP4}),
            wire_formats=frozenset({Format.BF16, Format.NVFP4}),
            activation_formats=frozenset({Format.BF16, Format.NVFP4}),
            weight_only_layouts=frozenset({Layout.TOKENS}),
            fp4_units=True,
            compute_dtypes=frozenset({"bfloat16"}),
            expert_bias=False,
            devices=frozenset({"cuda"}),
            architectures=frozenset({100, 103}),
            hidden_multiple=128,  # rows of W2 in whole tiles of scales
            intermediate_multiple=64,  # up and gate in blocks of as many rows
            ungated_multiple=128,  # rows of W1 in whole tiles of scales
            weight_storages=frozenset({WeightStorage.PACKED}),
            weights_per_layout=True,
            preference=10,
            grounds="written for these FP4 units; not measured here",
            autotuned=True,
            deterministic=False,  # the sum over a token's experts is atomic
            workspace=cutedsl_workspace_bytes,
            checked="what FlashInfer is handed is decoded and computed on a CPU, where the demo answers as "
            "through torch, and compiled for sm_100a",
            requires=(FLASHINFER,),
        ),
        RunnerCapability(
            name="flashinfer_trtllm",
            summary="TensorRT-LLM's kernels through FlashInfer: NVFP4 W4A4 on Blackwell",
            layouts=frozenset({Layout.TOKENS}),
            weight_formats=frozenset({Format.NVFP4}),
            wire_formats=frozenset({Format.BF16, Format.NVFP4}),
            activation_formats=frozenset({Format.NVFP4}),
            weight_only_formats=frozenset(),
            fp4_units=True,
            compute_dtypes=frozenset({"bfloat16"}),
            activations=frozenset({"silu"}),
            expert_bias=False,
            workspace=trtllm_workspace_bytes,
            checked="what FlashInfer is handed is decoded and computed on a CPU, where the demo answers as "
            "through torch",
            devices=frozenset({"cuda"}),
            architectures=frozenset({100, 103}),
            hidden_multiple=128,
            intermediate_multiple=64,
            weight_storages=frozenset({WeightStorage.PACKED}),
            preference=5,
            grounds="written for these FP4 units, for fewer layers; not measured here",
            autotuned=True,
            requires=(FLASHINFER,),
        ),
        RunnerCapability(
            name="flashinfer_mxfp4",
            summary="FlashInfer's CUTLASS kernels for MXFP4 weights on Hopper: W4A16, fused activation",
            layouts=frozenset({Layout.TOKENS}),
            weight_formats=frozenset({Format.MXFP4}),
            weight_only_formats=frozenset({Format.MXFP4}),
            compute_dtypes=frozenset({"bfloat16"}),
            devices=frozenset({"cuda"}),
            architectures=frozenset({90}),
            weight_storages=frozenset({WeightStorage.PACKED}),
            preference=5,
            grounds="behind triton at every size measured on an H200",
            checked="what FlashInfer is handed is decoded and computed on a CPU",
            autotuned=True,
            workspace=cutlass_workspace_bytes,
            requires=(FLASHINFER,),
        ),
        RunnerCapability(
            name="flashinfer_cutlass",
            summary="FlashInfer's CUTLASS kernels: bf16, FP8 blocks on Hopper, NVFP4 W4A4 on Blackwell",
            layouts=frozenset({Layout.TOKENS}),
            weight_formats=frozenset({Format.BF16, Format.FP8, Format.NVFP4}),
            activation_formats=frozenset({Format.BF16, Format.FP8, Format.NVFP4}),
            weight_only_formats=frozenset({Format.BF16}),
            fp4_units=True,
            fp8_units=True,
            compute_dtypes=frozenset({"bfloat16"}),
            devices=frozenset({"cuda"}),
            architectures=frozenset({90, 100, 103}),
            format_architectures=((Format.FP8, frozenset({90})), (Format.NVFP4, frozenset({100, 103}))),
            hidden_multiple=64,  # rows of scales, and 16-byte copies
            intermediate_multiple=64,
            weight_storages=frozenset({WeightStorage.PACKED}),
            preference=4,
            grounds="behind triton at every size measured on an H200; not measured on Blackwell",
            checked="what FlashInfer is handed is decoded and computed on a CPU",
            autotuned=True,
            workspace=cutlass_workspace_bytes,
            requires=(FLASHINFER,),
        ),
    )
}

DISPATCHER_CAPABILITIES = {
    declared.name: declared
    for declared in (
        DispatcherCapability(
            name="none",
            summary="every rank sees all tokens and computes its experts'; data-parallel groups gather",
            layout=Layout.TOKENS,
            exchange=Exchange.GATHER,
            wire_formats=frozenset(WIRE_FORMATS),
            preference=10,  # two collectives a layer, and no waits of the host
            batch_invariant=True,
            in_turns=True,
            cost=Cost(call_us=19, GBps=216),
        ),
        DispatcherCapability(
            name="collective",
            summary="all-to-all through torch.distributed: a token goes once to each rank that needs it",
            layout=Layout.TOKENS,
            exchange=Exchange.ALL_TO_ALL,
            wire_formats=frozenset(WIRE_FORMATS),
            combine_formats=frozenset({Format.BF16, Format.FP8}),
            graph_safe=False,  # the host waits for counts where few ranks need a token
            batch_invariant=True,
            in_turns=True,
        ),
        DispatcherCapability(
            name="collective-experts",
            summary="the same exchange, laid out as a slab per expert for masked runners",
            layout=Layout.BATCHED_EXPERTS,
            exchange=Exchange.ALL_TO_ALL,
            wire_formats=frozenset(WIRE_FORMATS),
            combine_formats=frozenset({Format.BF16, Format.FP8}),
            graph_safe=False,
            batch_invariant=True,
            in_turns=True,
        ),
        DispatcherCapability(
            name="nvlink",
            summary="stores into peers' memory: two launches a layer, no collective, no wait of the host",
            layout=Layout.TOKENS,
            exchange=Exchange.ALL_TO_ALL,
            wire_formats=frozenset(WIRE_FORMATS),
            combine_formats=frozenset({Format.BF16, Format.FP8}),
            devices=frozenset({"cuda"}),
            architectures=HOPPER_AND_BLACKWELL,
            multi_host=False,
            peer_access=True,
            limits=Limits(hidden_multiple=64),  # rows begin at 16 bytes, and scales are whole words
            buffers="symmetric",
            preference=20,  # on 2 H200s faster than gathering at every size, up to 128 tokens by half
            batch_invariant=True,
            in_turns=True,
            in_chunks=True,
            cost=Cost(call_us=6, GBps=340),
            requires=(TRITON,),
        ),
        DispatcherCapability(
            name="nvlink-experts",
            summary="the same stores, laid out as a slab per expert for masked runners",
            layout=Layout.BATCHED_EXPERTS,
            exchange=Exchange.ALL_TO_ALL,
            wire_formats=frozenset(WIRE_FORMATS),
            combine_formats=frozenset({Format.BF16, Format.FP8}),
            devices=frozenset({"cuda"}),
            architectures=HOPPER_AND_BLACKWELL,
            multi_host=False,
            peer_access=True,
            limits=Limits(hidden_multiple=64),  # rows begin at 16 bytes, and scales are whole words
            checked="its kernels run between CPU ranks, in Triton's interpreter",
            buffers="symmetric",
            batch_invariant=True,
            in_turns=True,
            in_chunks=True,
            cost=Cost(call_us=6, GBps=340),
            requires=(TRITON,),
        ),
        DispatcherCapability(
            name="flashinfer",
            summary="FlashInfer's one-sided all-to-all: tokens written over NVLink into receivers' memory",
            layout=Layout.TOKENS,
            exchange=Exchange.ALL_TO_ALL,
            wire_formats=frozenset(WIRE_FORMATS),
            devices=frozenset({"cuda"}),
            architectures=HOPPER_AND_BLACKWELL,
            multi_host=False,
            limits=Limits(
                one_to_one=True,
                ep_sizes=frozenset(range(2, 65)),
                top_ks=frozenset({1, 2, 4, 6, 8, 10, 12, 14, 16, 18, 22}),
                hidden_multiple=64,  # ids follow NVFP4's scales, at whole words
            ),
            buffers="one_sided",
            checked="FlashInfer's own Python runs between CPU ranks, over kernels in plain torch",
            requires=(FLASHINFER,),
        ),
        DispatcherCapability(
            name="deepep-normal",
            summary="DeepEP's normal kernels, for throughput: a token goes once to a rank that needs it",
            layout=Layout.TOKENS,
            exchange=Exchange.ALL_TO_ALL,
            wire_formats=frozenset(WIRE_FORMATS),
            devices=frozenset({"cuda"}),
            architectures=HOPPER_AND_BLACKWELL,
            multi_host=False,
            limits=Limits(
                one_to_one=True,
                ep_sizes=DEEPEP_RANKS,
                compute_dtypes=frozenset({"bfloat16"}),
                top_ks=frozenset(range(1, 33)),
                hidden_multiple=16,  # half a row in 16-byte words
                max_hidden=8176,  # and in 8 KB of shared memory, with a barrier
            ),
            buffers="chunked",
            family="deepep",
            mode="normal",
            checked="what DeepEP is handed is checked and moved between CPU ranks, as its documentation says",
            made_for=frozenset({Phase.PREFILL}),
            graph_safe=False,  # the host waits for counts
            requires=(DEEPEP, NVSHMEM, NCCL),
        ),
        DispatcherCapability(
            name="deepep-low-latency",
            summary="DeepEP's low-latency kernels: a slab per expert, made for small steps",
            layout=Layout.BATCHED_EXPERTS,
            exchange=Exchange.ALL_TO_ALL,
            wire_formats=frozenset({Format.BF16, Format.FP8, Format.NVFP4}),
            wire_needs=(
                WireNeed(format=Format.NVFP4, architectures=frozenset({100, 103}), package=DEEPEP_NVFP4),
            ),
            devices=frozenset({"cuda"}),
            architectures=HOPPER_AND_BLACKWELL,
            multi_host=False,
            limits=Limits(
                one_to_one=True,
                ep_sizes=DEEPEP_RANKS,
                compute_dtypes=frozenset({"bfloat16"}),
                top_ks=frozenset(range(1, 12)),
                hidden_sizes=frozenset({2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192}),
                max_tokens=1024,
            ),
            buffers="low_latency",
            row_multiple=128,  # scales of NVFP4 come in tiles of as many rows
            family="deepep",
            mode="low_latency",
            checked="what DeepEP is handed is checked and moved between CPU ranks, as its documentation says",
            made_for=frozenset({Phase.DECODE}),
            environment=(
                ("NVSHMEM_QP_DEPTH", "2050"),  # its send queues hold two of the largest steps
                ("NVSHMEM_REMOTE_TRANSPORT", "none"),  # one host, which may have no InfiniBand
            ),
            requires=(DEEPEP, NVSHMEM, NCCL),
        ),
    )
}
