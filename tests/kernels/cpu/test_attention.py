"""Paged attention by compiled kernels against torch's SDPA over contexts that were never cut."""

import pytest
import torch
from torch.nn import functional as F

from turnout.kernels.cpu import attention

PAGE = 32
SHAPES = [(8, 4, 32), (7, 7, 16), (16, 2, 128)]  # query heads, KV heads, head size


class Sequences:
    """Random queries, keys and values of sequences, a cache full of NaN, and pages in no order."""

    def __init__(self, count: int, length: int, heads: int, kv_heads: int, size: int) -> None:
        self.kv_heads, self.group = kv_heads, heads // kv_heads
        pages = -(-length // PAGE)
        self.table = torch.randperm(count * pages).view(count, pages)
        self.cache = torch.full((kv_heads, count * pages * PAGE * 2 * size), float("nan"))
        self.q, self.k, self.v = (torch.randn(count, length, h, size) for h in (heads, kv_heads, kv_heads))

    def attend(self, *chunks: tuple[int, int, int]) -> torch.Tensor:
        """Of chunks (sequence, first position, length), one after the other."""
        q, k, v = (
            torch.cat([x[row, start : start + length] for row, start, length in chunks])
            for x in (self.q, self.k, self.v)
        )
        planned = attention.Chunks(chunks, self.group)
        return attention.attend(q, k, v, self.cache, planned, self.table, PAGE)

    def expected(self, row: int) -> torch.Tensor:
        q, k, v = (x[row].transpose(0, 1) for x in (self.q, self.k, self.v))
        k, v = (x.repeat_interleave(self.group, 0) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)


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


def test_company_chunks_and_threads_change_no_bit(monkeypatch):
    torch.manual_seed(1)
    sequences = Sequences(2, 300, 8, 4, 32)
    whole = sequences.attend((0, 0, 300))
    monkeypatch.setattr(attention, "threads_for", lambda multiplications: 2)
    cut = []
    for start, length in ((0, 1), (1, 16), (17, 100), (117, 183)):
        both = sequences.attend((1, start, length), (0, start, length))
        cut.append(both[length:])
    assert torch.equal(torch.cat(cut), whole)


def test_no_tokens():
    sequences = Sequences(1, 4, 8, 4, 32)
    none = torch.empty(0, 8, 32), torch.empty(0, 4, 32), torch.empty(0, 4, 32)
    out = attention.attend(*none, sequences.cache, attention.Chunks([], 2), sequences.table, PAGE)
    assert out.shape == (0, 8, 32)
