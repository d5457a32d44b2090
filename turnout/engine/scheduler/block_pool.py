"""The page pool: who holds which KV page, and which free pages still hold a reusable prefix.

A page is in exactly one of three states:
  free     holds nothing of use
  cached   no request holds it, but its content is known by a digest and can be taken up again
  live     held by one or more requests (its reference count)

A full page is named by the digest of all tokens up to its end, so equal digests mean equal prefixes,
and equal keys and values. Sharing copies nothing: full pages are never written again. Torch-free.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

Digest = bytes
ROOT: Digest = b""


def chain(parent: Digest, tokens: Sequence[int]) -> Digest:
    """Name of the page that holds `tokens` after the prefix named `parent`.

    A cryptographic digest: a collision would hand one client the context of another.
    """
    return blake2b(array("q", tokens).tobytes(), key=parent, digest_size=16).digest()


def root(salt: str) -> Digest:
    """Parent of first pages: prefixes under one salt are not found under another."""
    return blake2b(salt.encode(), digest_size=16).digest() if salt else ROOT


class KVBlockPool:
    """Reference-counted pages with an LRU of reusable ones. Pages are ints in [0, num_pages).

    window: how many last tokens of a context are looked at; 0: all.
    """

    def __init__(self, num_pages: int, *, reuse: bool = True, window: int = 0):
        self.num_pages = num_pages
        self.reuse = reuse
        self.window = window
        self._free = list(range(num_pages - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently released first
        self._holders = [0] * num_pages
        self._digest_of: dict[int, Digest] = {}
        self._page_of: dict[Digest, int] = {}

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can give out now."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_live(self) -> int:
        return self.num_pages - self.num_available

    def has(self, digest: Digest) -> bool:
        """Whether a page with this name can be held."""
        return digest in self._page_of

    def match(self, digests: Iterable[Digest]) -> list[int]:
        """Pages of the longest known prefix of `digests`; they must be taken by `hold` to be kept."""
        pages: list[int] = []
        for digest in digests:
            page = self._page_of.get(digest)
            if page is None:
                break
            pages.append(page)
        return pages

    def num_idle(self, pages: Iterable[int]) -> int:
        """How many of `pages` no request holds: holding these makes fewer pages available."""
        return sum(self._holders[page] == 0 for page in pages)

    def hold(self, pages: Iterable[int]) -> None:
        """Become one more holder of pages returned by `match`."""
        for page in pages:
            if self._holders[page] == 0:
                del self._cached[page]
            self._holders[page] += 1

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages with one holder and no content, or None (and no change) if there are too few."""
        if count > self.num_available:
            return None
        pages = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def publish(self, page: int, digest: Digest) -> None:
        """Declare that live `page` is full and holds the prefix `digest`; the first publisher wins."""
        if self.reuse and digest not in self._page_of:
            self._page_of[digest] = page
            self._digest_of[page] = digest

    def release(self, pages: Sequence[int]) -> None:
        """Stop holding `pages`, given in prefix order.

        Later pages of a prefix are released, hence evicted, before the earlier ones they depend on.
        """
        for page in reversed(pages):
            self._holders[page] -= 1
            if self._holders[page] == 0:
                if page in self._digest_of:
                    self._cached[page] = None
                else:
                    self._free.append(page)

    def forget(self) -> None:
        """Find no page again that was published so far; live ones stay with their holders."""
        self._free += self._cached
        self._cached.clear()
        self._digest_of.clear()
        self._page_of.clear()

    def _evict(self) -> int:
        page, _ = self._cached.popitem(last=False)
        del self._page_of[self._digest_of.pop(page)]
        return page
