"""What the all-to-all through torch.distributed declares."""

from __future__ import annotations

from dataclasses import replace

from turnout.formats.spec import WIRE_FORMATS
from turnout.moe.capabilities.capability import Backend, DispatcherCapability
from turnout.vocabulary import Exchange, Format, Layout

TOKENS = DispatcherCapability(
    name="collective",
    summary="all-to-all through torch.distributed: a token goes once to each rank that needs it",
    implementation="turnout.moe.backends.collective.dispatcher:CollectiveDispatch",
    layout=Layout.TOKENS,
    exchange=Exchange.ALL_TO_ALL,
    wire_formats=frozenset(WIRE_FORMATS),
    combine_formats=frozenset({Format.BF16, Format.FP8}),
    graph_safe=False,  # the host waits for counts where few ranks need a token
    batch_invariant=True,
    two_batch_overlap=True,
)

BATCHED_EXPERTS = replace(
    TOKENS,
    name="collective-experts",
    summary="the same exchange, batched by expert for masked runners",
    implementation="turnout.moe.backends.collective.batched_experts:CollectiveExpertsDispatch",
    layout=Layout.BATCHED_EXPERTS,
)

BACKEND = Backend(dispatchers=(TOKENS, BATCHED_EXPERTS))
