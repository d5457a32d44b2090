"""The KV pages that requests hold, in every cache group of a model: taken, shared, freed below windows.

Layers of one kind and shape share a pool (attention/kinds.py); a request has a list of pages in each.

  * Groups that keep whole contexts take pages for all known tokens at admission, so that only decoding can
    run out of them. Groups with a sliding window take pages as chunks are computed, and free those wholly
    below the window of the next token after each step; these are still found by their prefix until they are
    given out again.
  * A prefix is reused where every group can go on from its end: groups that keep whole contexts have all of
    its pages, those with a window the pages that the next token sees. Layers that keep
    states also need a snapshot of these at that end (snapshots.py).

Torch-free.
"""

from __future__ import annotations

from collections.abc import Sequence

from turnout.engine.scheduler.block_pool import Digest, KVBlockPool
from turnout.engine.scheduler.request import GroupPages, Request
from turnout.engine.scheduler.snapshots import SnapshotPool

UNHELD = 0  # stands where a request does not hold a page (any more)


class KVCache:
    """Pools of all groups, those of whole contexts first; pages of all hold as many tokens.

    snapshots: of layers' states, at multiples of the page size; None where they are not kept.
    """

    def __init__(self, pools: Sequence[KVBlockPool], page_size: int, snapshots: SnapshotPool | None = None):
        self.pools, self.page_size, self.snapshots = tuple(pools), page_size, snapshots
        self._reuse = any(pool.reuse for pool in pools)
        self._windows = [i for i, pool in enumerate(pools) if pool.window]

    @property
    def most_tokens(self) -> int | None:
        """Of one request; None where every group has a window."""
        whole = [pool.num_pages for pool in self.pools if not pool.window]
        return min(whole) * self.page_size if whole else None

    def admit(self, request: Request, tokens: int, *, spare: int) -> bool:
        """Give `request` pages for all its tokens, or of windows for its next `tokens`; reuse a known prefix.

        False, and no change, if that would leave fewer than `spare` pages in any pool.
        """
        prefix, found = self._known_prefix(request) if self._reuse else (0, [[] for _ in self.pools])
        start, end = prefix * self.page_size, len(request.tokens)
        wanted = []
        for pool, pages in zip(self.pools, found, strict=True):
            fresh = self._pages_for(min(end, start + tokens) if pool.window else end) - prefix
            if fresh + pool.num_idle(pages) + spare > pool.num_available:
                return False
            wanted.append(fresh)
        request.kv = []
        for pool, pages, fresh in zip(self.pools, found, wanted, strict=True):
            pool.hold(pages)
            freed = prefix - len(pages)
            held = [UNHELD] * freed + pages + (pool.allocate(fresh) or [])
            request.kv.append(GroupPages(pages=held, freed=freed))
        request.computed, request.published = start, prefix
        self._measure(request)
        return True

    def begun(self, request: Request) -> None:
        """Record that `request`, admitted, has its row: with a known prefix it goes on from a snapshot."""
        if self.snapshots is not None and request.computed:
            digests = request.prefix_digests(request.computed // self.page_size, self.page_size)
            self.snapshots.restore(digests[-1], request.state_slots[0])

    def longest_chunk(self, start: int) -> int | None:
        """Tokens of a chunk from `start` on, at whose end states are to be kept; None: any number."""
        return None if self.snapshots is None else self.snapshots.interval - start % self.snapshots.interval

    def forget(self) -> None:
        """Find no prefix again that was computed so far."""
        for pool in self.pools:
            pool.forget()
        if self.snapshots is not None:
            self.snapshots.forget()

    def grow(self, request: Request, tokens: int) -> bool:
        """Give `request` pages for its first `tokens` tokens; False, and no change, if there are too few."""
        wanted = self._pages_for(tokens)
        for held, pool in zip(request.kv, self.pools, strict=True):
            if wanted - len(held.pages) > pool.num_available:
                return False
        for held, pool in zip(request.kv, self.pools, strict=True):
            if wanted > len(held.pages):
                held.pages += pool.allocate(wanted - len(held.pages)) or []
        self._measure(request)
        return True

    def computed(self, request: Request, end: int) -> None:
        """Record that the first `end` tokens are computed: full pages become reusable, and those below the
        windows of what comes next are freed."""
        request.computed = end
        full = end // self.page_size
        if self._reuse and full > request.published:
            digests = request.prefix_digests(full, self.page_size)
            for held, pool in zip(request.kv, self.pools, strict=True):
                for page in range(max(request.published, held.freed), full):
                    pool.publish(held.pages[page], digests[page])
            request.published = full
        if self.snapshots is not None and end and end % self.snapshots.interval == 0:
            self.snapshots.save(request.prefix_digests(full, self.page_size)[-1], request.state_slots[0])
        for i in self._windows:
            held, pool = request.kv[i], self.pools[i]
            first = max(0, end + 1 - pool.window) // self.page_size
            if first > held.freed:
                pool.release(held.pages[held.freed : first])
                held.freed = first

    def trim(self, request: Request) -> None:
        """Free the pages behind what is computed."""
        kept = self._pages_for(request.computed)
        for held, pool in zip(request.kv, self.pools, strict=True):
            pool.release(held.pages[kept:])
            del held.pages[kept:]
            held.placed = min(held.placed, kept)
        self._measure(request)

    def release(self, request: Request) -> None:
        """Free all that `request` holds, as if nothing of it had been computed."""
        for held, pool in zip(request.kv, self.pools, strict=True):
            pool.release(held.pages[held.freed :])
        request.kv = []
        request.room = request.computed = request.published = 0

    def _known_prefix(self, request: Request) -> tuple[int, list[list[int]]]:
        """How many pages of a prefix need not be computed, and the pages of each group that hold what the
        next token sees of it."""
        digests = request.prefix_digests(request.reusable // self.page_size, self.page_size)
        whole = [pool.match(digests) for pool in self.pools if not pool.window]
        prefix = min((len(pages) for pages in whole), default=len(digests))
        found: list[list[int]] = []
        again = True
        while again:  # a shorter prefix needs other pages of each window
            before = prefix
            for i in self._windows:
                prefix = self._seen_prefix(self.pools[i], digests, prefix)
            again = len(self._windows) > 1 and prefix < before
        prefix = self._snapshot_prefix(digests, prefix)
        for i, pool in enumerate(self.pools):
            first = self._first_seen(pool, prefix)
            pages = pool.match(digests[first:prefix]) if pool.window else whole[i][:prefix]
            found.append(pages)
        return prefix, found

    def _snapshot_prefix(self, digests: Sequence[Digest], longest: int) -> int:
        """The longest prefix, of at most so many pages, at whose end every group and all states can go on."""
        if self.snapshots is None:
            return longest
        step = self.snapshots.interval // self.page_size
        for at in range(longest - longest % step, 0, -step):
            windows = (self._seen_prefix(self.pools[i], digests, at) == at for i in self._windows)
            if digests[at - 1] in self.snapshots and all(windows):
                return at
        return 0

    def _seen_prefix(self, pool: KVBlockPool, digests: Sequence[Digest], longest: int) -> int:
        """The longest prefix, of at most so many pages, of which `pool` has what the next token sees."""
        at = longest
        while at > 0:
            first = self._first_seen(pool, at)
            missing = next(
                (page for page in range(at - 1, first - 1, -1) if not pool.has(digests[page])), None
            )
            if missing is None:
                return at
            at = missing
        return 0

    def _first_seen(self, pool: KVBlockPool, pages: int) -> int:
        """The first page that the token behind so many pages sees."""
        return max(0, pages * self.page_size + 1 - pool.window) // self.page_size if pool.window else 0

    def _measure(self, request: Request) -> None:
        request.room = min(len(held.pages) for held in request.kv) * self.page_size

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)
