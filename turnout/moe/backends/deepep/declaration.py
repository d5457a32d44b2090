"""What the dispatchers over DeepEP declare."""

from __future__ import annotations

from functools import partial

from turnout.formats.spec import WIRE_FORMATS
from turnout.moe.backends.deepep.buffers import low_latency_bytes, normal_bytes
from turnout.moe.capabilities.capability import Backend, DispatcherCapability, WireNeed
from turnout.moe.capabilities.limits import Limits
from turnout.packages import Package
from turnout.vocabulary import Exchange, Format, Layout, Phase

DEEPEP = Package(
    module="deep_ep",
    distribution="deep_ep",
    install="pip install --no-deps 'tokenspeed-deepep<2' (Python 3.12 and CUDA 13), or build DeepEP",
)
DEEPEP_NVFP4 = Package(
    module="deep_ep",
    distribution="sgl-deep-ep",
    minimum="0.1.2",
    install="pip install --no-deps 'sgl-deep-ep>=0.1.2'",
)
NVSHMEM = Package(
    module="nvidia.nvshmem",
    distribution="nvidia-nvshmem-cu13",
    minimum="3.4",
    install="pip install 'nvidia-nvshmem-cu13>=3.4'",
)
NCCL = Package(
    module="nvidia.nccl",
    distribution="nvidia-nccl-cu13",
    minimum="2.30",
    install="pip install --no-deps 'nvidia-nccl-cu13>=2.30'",
    only_with="sgl-deep-ep",  # DeepEP 2 is linked against it, and checks which one PyTorch has loaded
)
RANKS = frozenset({2, 4, 8})  # between which it has kernels over NVLink

_dispatcher = partial(  # what both kinds of kernels share
    DispatcherCapability,
    exchange=Exchange.ALL_TO_ALL,
    devices=frozenset({"cuda"}),
    architectures=frozenset({90, 100, 103}),
    multi_host=False,
    family="deepep",
    checked="what DeepEP is handed is checked and moved between CPU ranks, as its documentation says",
    requires=(DEEPEP, NVSHMEM, NCCL),
)

NORMAL = _dispatcher(
    name="deepep-normal",
    summary="DeepEP's normal kernels, for throughput: a token goes once to a rank that needs it",
    implementation="turnout.moe.backends.deepep.dispatcher:NormalDispatch",
    layout=Layout.TOKENS,
    wire_formats=frozenset(WIRE_FORMATS),
    limits=Limits(
        one_to_one=True,
        ep_sizes=RANKS,
        compute_dtypes=frozenset({"bfloat16"}),
        top_ks=frozenset(range(1, 33)),
        hidden_multiple=16,  # half a row in 16-byte words
        max_hidden=8176,  # and in 8 KB of shared memory, with a barrier
    ),
    buffers=normal_bytes,
    mode="normal",
    made_for=frozenset({Phase.PREFILL}),
    graph_safe=False,  # the host waits for counts
)

LOW_LATENCY = _dispatcher(
    name="deepep-low-latency",
    summary="DeepEP's low-latency kernels: rows batched by expert, made for small steps",
    implementation="turnout.moe.backends.deepep.dispatcher:LowLatencyDispatch",
    layout=Layout.BATCHED_EXPERTS,
    wire_formats=frozenset({Format.BF16, Format.FP8, Format.NVFP4}),
    wire_needs=(WireNeed(format=Format.NVFP4, architectures=frozenset({100, 103}), package=DEEPEP_NVFP4),),
    limits=Limits(
        one_to_one=True,
        ep_sizes=RANKS,
        compute_dtypes=frozenset({"bfloat16"}),
        top_ks=frozenset(range(1, 12)),
        hidden_sizes=frozenset({2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192}),
        max_tokens=1024,
    ),
    buffers=low_latency_bytes,
    row_multiple=128,  # scales of NVFP4 come in tiles of as many rows
    mode="low_latency",
    made_for=frozenset({Phase.DECODE}),
    environment=(
        ("NVSHMEM_QP_DEPTH", "2050"),  # its send queues hold two of the largest steps
        ("NVSHMEM_REMOTE_TRANSPORT", "none"),  # one host, which may have no InfiniBand
    ),
)

BACKEND = Backend(dispatchers=(NORMAL, LOW_LATENCY))
