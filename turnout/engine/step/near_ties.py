"""Greedy choices that rounding could turn (near-ties) are decided by a batch-invariant computation.

Matrix products sum in an order that depends on the number of rows, so the last bits of a request's logits
depend on the other requests of a step and on how its prompt was cut into chunks. Where the two best logits
are closer than such noise, the argmax would too, and with it all that follows. There the request's logits are
computed again: without other requests, from its first token, in blocks of a fixed size, with no cache. That
result is a function of its tokens only. Where the gap is just above the threshold, all computations agree on
the larger one, as long as the noise is below half the threshold; so greedy output does not depend on the
batch.

Legend: N tokens of a block, L context, Hq/Hkv query/KV heads, G = Hq/Hkv, D head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from turnout.attention.compressed import WholeCompressed
from turnout.attention.delta_rule import DeltaCell
from turnout.attention.entries import Compressible
from turnout.attention.indexing import Index, index_scores, largest
from turnout.attention.interface import Attention
from turnout.attention.kinds import AttentionSpec, CompressedSpec, SparseLatentSpec
from turnout.attention.states import SequenceStates
from turnout.attention.torch import additive, attend_chunk, visible
from turnout.attention.up_projection import UpProjection
from turnout.engine.engine_plan import NEAR_TIE_BLOCK
from turnout.models.interface import Model, Step

BLOCK = NEAR_TIE_BLOCK  # tokens; never from configuration, for the result must not depend on it


class WholeAttention(SequenceStates):
    """Over one sequence that comes in blocks, with keys, values and states of its own.

    layers: what each layer of the model declares.
    """

    def __init__(self, layers: Sequence[AttentionSpec]):
        super().__init__()
        self._layers = layers
        self._tokens: list[list[Tensor]] = [[] for _ in layers]  # keys and values, or latent vectors
        self._index_keys: list[list[Tensor]] = [[] for _ in layers]
        self._compressed = {
            i: WholeCompressed(spec) for i, spec in enumerate(layers) if isinstance(spec, CompressedSpec)
        }
        self._chosen_NL: Tensor | None = None  # what the last indexer chose for this block

    def __call__(
        self, layer: int, q_NHD: Tensor, k_NHD: Tensor, v_NHD: Tensor, sinks_H: Tensor | None = None
    ) -> Tensor:
        spec = self._layers[layer]
        self._tokens[layer].append(torch.stack((k_NHD, v_NHD)).transpose(1, 2))
        k_HLD, v_HLD = torch.cat(self._tokens[layer], dim=2)
        end = k_HLD.shape[1]
        seen_NL = visible(spec, end - len(q_NHD), end, 0, q_NHD.device)
        return attend_chunk(q_NHD, k_HLD, v_HLD, additive(seen_NL, q_NHD.dtype), spec.scale, sinks_H)

    def latent(
        self, layer: int, q_NHD: Tensor, latent_NC: Tensor, up: UpProjection, index: Index | None = None
    ) -> Tensor:
        """In the expanded form."""
        spec = self._layers[layer]
        self._tokens[layer].append(latent_NC)
        k_HLD, v_HLD = up.expand(torch.cat(self._tokens[layer]))
        end = k_HLD.shape[1]
        seen_NL = visible(spec, end - len(q_NHD), end, 0, q_NHD.device)
        if isinstance(spec, SparseLatentSpec):
            if index is not None:
                self._index_keys[layer].append(index.key_ND)
                scores_NL = index_scores(index, torch.cat(self._index_keys[layer]))
                self._chosen_NL = largest(scores_NL, seen_NL, spec.index_topk)
            assert self._chosen_NL is not None, "the first layer has an indexer"
            seen_NL = self._chosen_NL
        return attend_chunk(q_NHD, k_HLD, v_HLD, additive(seen_NL, q_NHD.dtype), spec.scale)

    def compressed(
        self, layer: int, q_NHD: Tensor, kv_ND: Tensor, sinks_H: Tensor, rest: Compressible | None
    ) -> Tensor:
        return self._compressed[layer].attend(q_NHD, kv_ND, sinks_H, rest)


class NoAttention(Attention):
    """Over no sequence."""

    def __call__(
        self, layer: int, q_NHD: Tensor, k_NHD: Tensor, v_NHD: Tensor, sinks_H: Tensor | None = None
    ) -> Tensor:
        return q_NHD

    def recur(self, layer: int, mixed_NX: Tensor, cell: DeltaCell) -> Tensor:
        return mixed_NX.new_empty(0, cell.spec.num_heads * cell.spec.value_dim)

    def latent(
        self, layer: int, q_NHD: Tensor, latent_NC: Tensor, up: UpProjection, index: Index | None = None
    ) -> Tensor:
        return q_NHD.new_empty(0, *up.values_size)

    def compressed(
        self, layer: int, q_NHD: Tensor, kv_ND: Tensor, sinks_H: Tensor, rest: Compressible | None
    ) -> Tensor:
        return q_NHD


def recomputed_logits(
    model: Model, tokens: Sequence[int], device: torch.device, place: tuple[int, int] = (0, 1)
) -> Tensor:
    """float32 logits [1, V] after `tokens`, which alone decide them.

    place: (DP rank, DP size) of this rank; the others `join_recomputation` it.
    """
    ids_L = torch.tensor(tokens, device=device)
    positions_L = torch.arange(len(tokens), device=device)
    attention = WholeAttention(model.shape.attention)
    for start in range(0, len(tokens), BLOCK):
        block = slice(start, start + BLOCK)
        ids_N = ids_L[block]
        hidden_NH = model.forward(
            Step(
                input_ids=ids_N,
                positions=positions_L[block],
                attention=attention,
                tokens=_brought(len(ids_N), *place),
            )
        )
    return model.logits(hidden_NH[-1:])


def join_recomputation(model: Model, length: int, device: torch.device, place: tuple[int, int]) -> None:
    """Take part without tokens while the DP rank of `place` recomputes a sequence of `length`."""
    none_N = torch.empty(0, dtype=torch.int64, device=device)
    for start in range(0, length, BLOCK):
        tokens = _brought(min(BLOCK, length - start), *place)
        model.forward(Step(input_ids=none_N, positions=none_N, attention=NoAttention(), tokens=tokens))


def _brought(count: int, dp_rank: int, dp_size: int) -> tuple[int, ...]:
    return tuple(count if rank == dp_rank else 0 for rank in range(dp_size))
