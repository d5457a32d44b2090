"""Prompts through Gated DeltaNet by the library fla-core (Triton); a backend of ours decodes from the slots.

All prompts of a step are taken together, in some ten launches a layer. What the library hands from kernel to
kernel is in the compute type: queries, keys and values after the convolution, and the states between blocks;
sums and the states that are left are in float32.

Legend: N tokens of the prompts, B prompts, X what the layer computed of a token, C channels of the
convolution, W its width, Hk/Hv key/value heads, Dk/Dv their sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from turnout.attention.delta_rule import DeltaCell
from turnout.attention.interface import Attention
from turnout.attention.states import RequestStates, Rows

BLOCK = 64  # tokens that a program of the library takes


class FlaCorePrompts:
    def __init__(self) -> None:
        self._learned: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def laid_out(self, states: RequestStates, rows: Rows, lengths: Sequence[int]) -> Attention:
        """All prompts in one call of each of the library's functions."""
        from fla.ops.utils.index import prepare_chunk_indices

        on_host = torch.tensor([0, *lengths]).cumsum(0)
        ends = on_host.to(states.device)
        # Given both, the library does not wait for the device.
        blocks = prepare_chunk_indices(ends, BLOCK, cu_seqlens_cpu=on_host)
        where = {"cu_seqlens": ends, "cu_seqlens_cpu": on_host, "chunk_indices": blocks}
        return _Prompts(self, states, rows, where)

    def advance(self, layer: int, mixed_NX: Tensor, cell: DeltaCell, step: _Prompts) -> Tensor:
        """The tokens of all prompts: [N, Hv Dv]."""
        from fla.modules.causal_conv1d import causal_conv1d
        from fla.modules.norm.fused_norm_gate import rms_norm_gated
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        kept, slots_B, spec = step.states, step.rows.slots_B, cell.spec
        i, begins_B11 = kept.index[layer], (step.rows.positions_B == 0)[:, None, None]
        windows_BWC = kept.windows[i, slots_B].masked_fill_(begins_B11, 0)
        states_BHKV = kept.states[i, slots_B].masked_fill_(begins_B11[..., None], 0)
        conv_CW, a_log_H, norm_D = self._learned_of(layer, cell, mixed_NX.dtype)
        qkv_NC, z_NY, b_NH, a_NH = cell.parts(mixed_NX)
        convolved, recent_BCW = causal_conv1d(
            qkv_NC[None], weight=conv_CW, activation="silu", backend="triton", output_final_state=True,
            initial_state=F.pad(windows_BWC.transpose(1, 2), (1, 0)), **step.where,
        )  # fmt: skip
        keys = spec.num_kv_heads * spec.head_dim
        q, k, v = convolved.split([keys, keys, spec.num_heads * spec.value_dim], dim=-1)
        o_1NHV, states_BHKV = chunk_gated_delta_rule(
            *(x.unflatten(-1, (-1, spec.head_dim)) for x in (q, k)),
            v.unflatten(-1, (-1, spec.value_dim)),
            a_NH[None], b_NH[None], initial_state=states_BHKV, output_final_state=True,
            use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True,
            use_gate_in_kernel=True, A_log=a_log_H, dt_bias=cell.bias_H, **step.where,
        )  # fmt: skip
        kept.windows[i].index_copy_(0, slots_B, recent_BCW[..., 1:].transpose(1, 2).to(kept.windows.dtype))
        kept.states[i].index_copy_(0, slots_B, states_BHKV)
        gates_NHV = z_NY.unflatten(-1, (-1, spec.value_dim))
        y_NHV: Tensor = rms_norm_gated(o_1NHV[0], gates_NHV, norm_D, None, activation="swish", eps=cell.eps)
        return y_NHV.flatten(1)

    def _learned_of(self, layer: int, cell: DeltaCell, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """(convolution [C, W], A_log float32 [Hv], norm [Dv]), as the library takes them."""
        if layer not in self._learned:
            decay_H = (-cell.decay_H).log()
            self._learned[layer] = cell.conv_WC.T.contiguous(), decay_H, cell.norm_D.to(dtype)
        return self._learned[layer]


@dataclass(frozen=True)
class _Prompts(Attention):
    """where: of each prompt among the tokens, as all of the library's functions take it."""

    by: FlaCorePrompts
    states: RequestStates
    rows: Rows
    where: Mapping[str, Tensor]

    def recur(self, layer: int, mixed_NX: Tensor, cell: DeltaCell) -> Tensor:
        return self.by.advance(layer, mixed_NX, cell, self)
