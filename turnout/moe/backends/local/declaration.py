"""What the dispatcher without an all-to-all declares."""

from __future__ import annotations

from turnout.formats.spec import WIRE_FORMATS
from turnout.moe.capabilities.capability import Backend, DispatcherCapability
from turnout.moe.capabilities.cost import Cost
from turnout.vocabulary import Exchange, Layout

DISPATCHER = DispatcherCapability(
    name="none",
    summary="every rank sees all tokens and computes its experts'; data-parallel groups gather",
    implementation="turnout.moe.backends.local.dispatcher:NoDispatch",
    layout=Layout.TOKENS,
    exchange=Exchange.GATHER,
    wire_formats=frozenset(WIRE_FORMATS),
    preference=10,  # two collectives a layer, and no waits of the host
    batch_invariant=True,
    two_batch_overlap=True,
    cost=Cost(call_us=19, GBps=216),
)

BACKEND = Backend(dispatchers=(DISPATCHER,))
