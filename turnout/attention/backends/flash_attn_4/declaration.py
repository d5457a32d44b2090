"""What the library flash-attn-4 declares, which computes prompts, and from which length on it is taken."""

from __future__ import annotations

from turnout.attention.capability import HALF_PRECISION, HOPPER, AttentionBackend, Place
from turnout.attention.kinds import AttentionSpec
from turnout.packages import Package
from turnout.vocabulary import AttentionKind

PACKAGE = Package(
    module="flash_attn",
    distribution="flash-attn-4",
    install="pip install 'turnout[flash-attn-4]'",
    minimum="4.0.0b36",
)


def pays_from(spec: AttentionSpec, place: Place) -> int | None:
    """Tokens that prompts of a step must have on average for flash-attn-4 to be faster than our kernels; None
    where that is not known, as for latent attention, which it then computes only where it is asked for.

    Measured on an H200 with pages of 16 (tools/attention.py), us, ours against the library's: heads of 128 in
    float16, 2048 tokens 100 : 74, behind 16k of context 1256 : 887, 4 x 512 43 : 38, 16 x 128 26 : 29; heads
    of 64, 116 : 99, 1368 : 1158, 43 : 53, 25 : 40.
    """
    if place.architecture // 10 != HOPPER or spec.window or spec.kind == AttentionKind.LATENT:
        return None
    return 512 if spec.head_dim >= 128 else 1024


BACKEND = AttentionBackend(
    name="flash-attn-4",
    devices=frozenset({"cuda"}),
    dtypes=HALF_PRECISION,
    implementations={
        AttentionKind.FULL: "turnout.attention.backends.flash_attn_4.prompts:FlashAttn4Prompts",
        AttentionKind.SLIDING_WINDOW: "turnout.attention.backends.flash_attn_4.prompts:FlashAttn4Prompts",
        AttentionKind.LATENT: "turnout.attention.backends.flash_attn_4.latent:attend",
    },
    architectures=frozenset({HOPPER, 10}),
    most_head_dim=256,
    head_multiple=8,
    package=PACKAGE,
    prompts_for="triton",
    pays_from=pays_from,
)
