"""Keys and values that latent attention makes for a prompt, attended to by the library flash-attn-4.

Unlike torch's kernels it takes values smaller than keys, so that none are padded.

Legend: T rows of a prompt, L keys, H heads, D/Dv sizes of keys and values.
"""

from __future__ import annotations

from torch import Tensor


def attend(
    q_HTD: Tensor, k_HLD: Tensor, v_HLV: Tensor, scale: float, *, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """As `attention.latent.attend`: ([H, T, Dv], float32 log-sum-exp [H, T] of the scores)."""
    from flash_attn.cute.interface import _flash_attn_fwd

    q_1THD, k_1LHD, v_1LHV = (x.transpose(0, 1)[None] for x in (q_HTD, k_HLD, v_HLV))
    out_1THV, lse_1HT = _flash_attn_fwd(
        q_1THD, k_1LHD, v_1LHV, softmax_scale=scale, causal=causal, return_lse=True
    )
    return out_1THV[0].transpose(0, 1), lse_1HT[0]
