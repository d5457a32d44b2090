"""Paged attention by compiled kernels against torch's SDPA over contexts that were never cut."""

import pytest
import torch
from torch.nn import functional as F

from turnout.kernels.cpu import attention

PAGE = 32
SCALE = 0.2
SHAPES = [(8, 4, 32), (7, 7, 16), (16, 2, 128)]  # query heads, KV heads, head size


class Sequences:
    """Random queries, keys and values of sequences, a cache full of NaN, and pages in no order."""

    def __init__(self, count: int, length: int, heads: int, kv_heads: int, size: int) -> None:
        self.kv_heads, self.group = kv_heads, heads // kv_heads
        pages = -(-length // PAGE)
        self.table = torch.randperm(count * pages).view(count, pages)
        self.cache = torch.full((kv_heads, count * pages * PAGE * 2 * size), float("nan"))
        self.q, self.k, self.v = (torch.randn(count, length, h, size) for h in (heads, kv_heads, kv_heads))

    def attend(
        self, *chunks: tuple[int, int, int], window: int = 0, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Of chunks (sequence, first position, length), one after the other."""
        q, k, v = (
            torch.cat([x[row, start : start + length] for row, start, length in chunks])
            for x in (self.q, self.k, self.v)
        )
        cache = attention.Cache(self.cache, self.table, PAGE, window=window, scale=SCALE)
        return attention.attend(q, k, v, attention.Chunks(chunks, self.group, window), cache, sinks)

    def expected(self, row: int) -> torch.Tensor:
        q, k, v = (x[row].transpose(0, 1) for x in (self.q, self.k, self.v))
        k, v = (x.repeat_interleave(self.group, 0) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE).transpose(0, 1)


@pytest.mark.parametrize(("heads", "kv_heads", "size"), SHAPES)
def test_as_over_whole_contexts(heads, kv_heads, size):
    torch.manual_seed(0)
    length = 2 * attention.SPAN + 9  # three spans, the last one short
    sequences = Sequences(2, length, heads, kv_heads, size)
    expected = [sequences.expected(row) for row in range(2)]
    first = sequences.attend((0, 0, length - 1), (1, 0, 5))
    torch.testing.assert_close(first[: length - 1], expected[0][:-1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(first[length - 1 :], expected[1][:5], rtol=1e-5, atol=1e-5)
    then = sequences.attend((0, length - 1, 1), (1, 5, 40))
    torch.testing.assert_close(then[0], expected[0][-1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(then[1:], expected[1][5:45], rtol=1e-5, atol=1e-5)


def test_batches_chunks_and_threads_change_no_bit(monkeypatch):
    torch.manual_seed(1)
    sequences = Sequences(2, 300, 8, 4, 32)
    whole = sequences.attend((0, 0, 300))
    monkeypatch.setattr(attention, "threads_for", lambda multiplications: 2)
    cut = []
    for start, length in ((0, 1), (1, 16), (17, 100), (117, 183)):
        both = sequences.attend((1, start, length), (0, start, length))
        cut.append(both[length:])
    assert torch.equal(torch.cat(cut), whole)


def test_pages_in_order_or_not_change_no_bit():
    """Blocks that follow each other in the cache are multiplied at once."""
    torch.manual_seed(2)
    sequences = Sequences(1, 2 * attention.SPAN + 9, 8, 4, 32)
    mixed = sequences.attend((0, 0, 500), (0, 500, 9))
    sequences.table = torch.arange(sequences.table.shape[1])[None]
    assert torch.equal(sequences.attend((0, 0, 500), (0, 500, 9)), mixed)


def test_no_tokens():
    sequences = Sequences(1, 4, 8, 4, 32)
    none = torch.empty(0, 8, 32), torch.empty(0, 4, 32), torch.empty(0, 4, 32)
    cache = attention.Cache(sequences.cache, sequences.table, PAGE, window=0, scale=SCALE)
    out = attention.attend(*none, attention.Chunks([], 2), cache)
    assert out.shape == (0, 8, 32)


@pytest.mark.parametrize("size", [16, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("window", [1, 8, 128, 300])
def test_windows_and_sinks(size: int, window: int):
    """As a softmax written out, in chunks, where pages below the window are no longer the sequence's."""
    torch.manual_seed(size + window)
    length = attention.SPAN + 150
    sequences = Sequences(2, length, 6, 2, size)
    sinks = torch.randn(6)
    k, v = (x[0].repeat_interleave(3, 1) for x in (sequences.k, sequences.v))
    ages = torch.arange(length)[:, None] - torch.arange(length)
    scores = torch.einsum("thd,lhd->htl", sequences.q[0], k) * SCALE
    scores = scores.masked_fill((ages < 0) | (ages >= window), float("-inf"))
    weights = torch.cat((scores, sinks[:, None, None].expand(-1, length, 1)), dim=-1).softmax(-1)
    expected = torch.einsum("htl,lhd->thd", weights[..., :-1], v)
    at = 0
    for count in (1, 20, 250, 1, length - 272):
        out = sequences.attend((1, at, count), (0, at, count), window=window, sinks=sinks)[count:]
        torch.testing.assert_close(out, expected[at : at + count], rtol=1e-5, atol=1e-5)
        at += count
        unseen = max(0, at - window + 1) // PAGE
        blocks = sequences.cache.view(2, -1, PAGE * 2 * size)
        blocks[:, sequences.table[:, :unseen].flatten()] = float("nan")
