"""What the library fla-core declares, which takes prompts through Gated DeltaNet.

From which length on it is faster than our kernels is not known yet (tools/delta_prompts.py measures it), so
that it does so only where --attention-backend names it.
"""

from __future__ import annotations

from turnout.attention.capability import HALF_PRECISION, AttentionBackend
from turnout.packages import Package
from turnout.vocabulary import AttentionKind

PACKAGE = Package(
    module="fla", distribution="fla-core", minimum="0.6", install="pip install 'turnout[fla-core]'"
)

BACKEND = AttentionBackend(
    name="fla-core",
    devices=frozenset({"cuda"}),
    dtypes=HALF_PRECISION,
    implementations={AttentionKind.RECURRENT: "turnout.attention.backends.fla_core.prompts:FlaCorePrompts"},
    package=PACKAGE,
    prompts_for="triton",
)
