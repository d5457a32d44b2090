"""Tokens that every rank sees: as many rows as the phase says, and each rank's own sums back."""

from __future__ import annotations

import torch

from tests.moe.build import make_plan, make_setup, make_spec
from tests.ranks import Pools, Rank
from turnout.moe.backends.local.dispatcher import NoDispatch

SPEC = make_spec()


def tokens_of(rank: int, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, ids and weights [count, ...], which tell the rank and the place of each token."""
    x_TH = torch.full((count, SPEC.hidden_size), 10.0 * rank) + torch.arange(count)[:, None]
    ids_TK = torch.tensor([[rank, rank + 4]], dtype=torch.int32).expand(count, 2)
    return x_TH, ids_TK, torch.full((count, 2), 0.5)


def exchanged(rank: Rank, phase: str, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(what the runner sees; its ids; what comes back when each rank's runner answers with 1 + its rank)."""
    groups = rank.groups(dp_size=rank.size, ep_size=rank.size)
    sends = NoDispatch(make_setup(SPEC, make_plan(SPEC), phase, groups=groups))
    batch, state = sends.dispatch(*tokens_of(rank.number, tokens[rank.number]), tokens)
    back_TH = sends.combine(torch.full_like(batch.hidden.data, 1.0 + rank.number), state)
    return batch.hidden.data, batch.topk_ids, back_TH


def test_prefill_gathers_exactly_what_ranks_bring(ranks: Pools):
    tokens = [5, 0, 2]
    for rank, (x_AH, ids_AK, back_TH) in enumerate(ranks(3).run(exchanged, "prefill", tokens)):
        assert x_AH[:, 0].tolist() == [0, 1, 2, 3, 4, 20, 21]
        assert ids_AK[:, 0].tolist() == [0] * 5 + [2] * 2
        assert back_TH.shape == (tokens[rank], SPEC.hidden_size)
        assert (back_TH == 1 + 2 + 3).all()


def test_decode_is_padded_to_the_largest_rank(ranks: Pools):
    tokens = [1, 3, 0]
    for rank, (x_AH, ids_AK, back_TH) in enumerate(ranks(3).run(exchanged, "decode", tokens)):
        assert len(x_AH) == 3 * max(tokens)
        real = ids_AK[:, 0] >= 0
        assert real.tolist() == [True, False, False, True, True, True, False, False, False]
        assert x_AH[real, 0].tolist() == [0, 10, 11, 12]
        assert back_TH.shape == (tokens[rank], SPEC.hidden_size)
        assert (back_TH == 1 + 2 + 3).all()


def test_one_group_exchanges_nothing():
    """Ranks that share all tokens keep partial sums, which the layer reduces."""
    sends = NoDispatch(make_setup(SPEC, make_plan(SPEC)))
    x_TH, ids_TK, weights_TK = tokens_of(0, 4)
    batch, state = sends.dispatch(x_TH, ids_TK, weights_TK, [4])
    assert batch.hidden.data is x_TH
    assert sends.combine(x_TH, state) is x_TH
