"""What the indexer chooses equals sorting by score and then by place, token by token."""

from __future__ import annotations

import pytest
import torch

from turnout.attention import indexing
from turnout.attention.indexing import Fp8Keys, Index, index_scores, largest, places, rounded


@pytest.mark.parametrize("count", [1, 3, 8, 20, 40])
def test_the_largest_with_ties_by_lowest_place(count: int) -> None:
    """Scores of 0, 1 and 2 only, so that most choices are among equals."""
    draw = torch.Generator().manual_seed(count)
    scores = torch.randint(0, 3, (25, 30), generator=draw).float()
    ends = torch.randint(1, 31, (25,), generator=draw)
    seen = torch.arange(30) < ends[:, None]
    found = places(largest(scores, seen, count), count).tolist()
    for row, end, chosen in zip(scores.tolist(), ends.tolist(), found, strict=True):
        wanted = sorted(sorted(range(end), key=lambda i, row=row: (-row[i], i))[:count])
        assert chosen == wanted + [-1] * (count - len(wanted))


@pytest.mark.parametrize("each", [False, True], ids=["one context", "contexts of each token"])
def test_scores_by_their_definition(each: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Span by span, the last of them shorter."""
    monkeypatch.setattr(indexing, "INDEX_SPAN", 7)
    draw = torch.Generator().manual_seed(0)
    index = Index(*(torch.randn(size, generator=draw) for size in ((4, 3, 5), (4, 5), (4, 3))))
    keys = torch.randn(*((4,) if each else ()), 16, 5, generator=draw)
    found = index_scores(index, keys)
    for n in range(4):
        for place, key in enumerate(keys[n] if each else keys):
            terms = [max(0.0, float(q @ key)) for q in index.q_NHD[n]]
            wanted = sum(float(w) * term for w, term in zip(index.weights_NH[n], terms, strict=True))
            assert float(found[n, place]) == pytest.approx(wanted, abs=1e-5)


def test_keys_in_fp8_come_back_as_they_were_rounded() -> None:
    """Of sizes from 1e-20 to 1e20, among them zeros and those that fill the format's range."""
    draw = torch.Generator().manual_seed(0)
    keys = torch.randn(41, 16, generator=draw) * torch.logspace(-20, 20, 41)[:, None]
    keys[3], keys[7] = 0, torch.linspace(-448, 448, 16)
    kept = Fp8Keys(torch.full((50, 16), 255, dtype=torch.uint8), torch.full((50,), torch.nan))
    slots = torch.randperm(50, generator=draw)[:41]
    kept.store(slots, rounded(keys))
    assert torch.equal(kept[slots], rounded(keys))
    largest_of = keys.abs().amax(1, keepdim=True)
    assert bool(((kept[slots] - keys).abs() <= keys.abs() / 16 + largest_of * 2**-17).all())
    assert kept[slots[None]].shape == (1, 41, 16)
