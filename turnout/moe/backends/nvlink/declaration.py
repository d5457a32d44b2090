"""What the all-to-all by stores into peers' memory declares."""

from __future__ import annotations

from dataclasses import replace

from turnout.formats.spec import WIRE_FORMATS
from turnout.moe.backends.nvlink.buffers import buffer_bytes
from turnout.moe.capabilities.capability import Backend, DispatcherCapability
from turnout.moe.capabilities.cost import Cost
from turnout.moe.capabilities.limits import Limits
from turnout.packages import TRITON
from turnout.vocabulary import Exchange, Format, Layout

TOKENS = DispatcherCapability(
    name="nvlink",
    summary="stores into peers' memory: two launches a layer, no collective, no wait of the host",
    implementation="turnout.moe.backends.nvlink.dispatcher:NvlinkDispatch",
    layout=Layout.TOKENS,
    exchange=Exchange.ALL_TO_ALL,
    wire_formats=frozenset(WIRE_FORMATS),
    combine_formats=frozenset({Format.BF16, Format.FP8}),
    devices=frozenset({"cuda"}),
    architectures=frozenset({90, 100, 103}),
    multi_host=False,
    peer_access=True,
    limits=Limits(hidden_multiple=64),  # rows begin at 16 bytes, and scales are whole words
    buffers=buffer_bytes,
    equal_shares=True,
    preference=20,  # on 2 H200s faster than gathering at every size, up to 128 tokens by half
    batch_invariant=True,
    two_batch_overlap=True,
    in_chunks=True,
    cost=Cost(call_us=6, GBps=340),
    requires=(TRITON,),
)

BATCHED_EXPERTS = replace(
    TOKENS,
    name="nvlink-experts",
    summary="the same stores, batched by expert for masked runners",
    implementation="turnout.moe.backends.nvlink.batched_experts:NvlinkExpertsDispatch",
    layout=Layout.BATCHED_EXPERTS,
    checked="its kernels run between CPU ranks, in Triton's interpreter",
    preference=0,
)

BACKEND = Backend(dispatchers=(TOKENS, BATCHED_EXPERTS))
