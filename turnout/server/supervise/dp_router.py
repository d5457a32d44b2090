"""Which data-parallel rank gets a request: where it would wait for the least work.

The work of a rank is what its requests still need: prompt tokens not yet computed and output tokens to
come. Of the latter only an upper bound is known, often far too high (the rest of the context), so a request
is taken to be as long as those that finished lately. A rank that holds a prefix of the prompt needs not
compute that, so it wins unless it is busier than the least busy one by more than it saves.

Which prefixes a rank holds is guessed from what was sent there, the latest first, and never asked: a wrong
guess costs time, not correctness.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from turnout.engine.scheduler.block_pool import Digest, chain, root

TYPICAL_OUTPUT = 128.0  # tokens, until requests have finished
WEIGHT = 0.05  # of the latest finished request in what is typical
KNOWN_PAGES = 1 << 16


@dataclass(slots=True)
class Outstanding:
    """What one request still needs of the rank it was given to: so many prompt and output tokens."""

    rank: int
    prompt: int
    output: int
    produced: int = 0

    @property
    def work(self) -> int:
        return self.prompt + self.output


class Router:
    """The requests of one group of ranks. One caller, no clock, no randomness.

    dp_size ranks hold pages of `page_size` tokens; `known_pages` bounds what is remembered of all of them
    together, and 0 means that they keep nothing.
    """

    def __init__(self, dp_size: int, page_size: int, *, known_pages: int = KNOWN_PAGES):
        self.dp_size = dp_size
        self._page_size = page_size
        self._known_pages = known_pages
        self._requests: dict[str, Outstanding] = {}
        self._holders: OrderedDict[Digest, int] = OrderedDict()  # page -> bits of ranks; latest use last
        self._typical = TYPICAL_OUTPUT
        self._work = [0] * dp_size

    def place(self, id: str, prompt_ids: Sequence[int], max_tokens: int, salt: str = "") -> int:
        """The rank for a new request, which from now on counts there. salt: see `block_pool.root`."""
        rank, held = 0, 0
        if self.dp_size > 1:
            digests = list(self._digests(prompt_ids, salt))
            by_rank = self._held(digests)
            # Of equals, the rank that saves most, then the first.
            rank = min(range(self.dp_size), key=lambda r: (self._work[r] - by_rank[r], -by_rank[r], r))
            held = by_rank[rank]
            self._remember(digests, rank)
        request = Outstanding(rank, len(prompt_ids) - held, max(1, min(max_tokens, round(self._typical))))
        self._requests[id] = request
        self._work[rank] += request.work
        return rank

    def rank_of(self, id: str) -> int:
        return self._requests[id].rank

    def produced(self, id: str, num_tokens: int) -> None:
        """The request got `num_tokens` more, so its prompt has been computed. Unknown ids are ignored."""
        request = self._requests.get(id)
        if request:
            left = request.output - num_tokens
            if left < 1:  # one longer than expected may end any moment
                left = 1
            self._work[request.rank] += left - request.output - request.prompt
            request.prompt, request.output = 0, left
            request.produced += num_tokens

    def finished(self, id: str, *, complete: bool = True) -> None:
        """The request needs nothing more; only one that is `complete` tells what is typical."""
        request = self._requests.pop(id, None)
        if request:
            self._work[request.rank] -= request.work
            if complete:
                self._typical += WEIGHT * (request.produced - self._typical)

    def forget_prefixes(self) -> None:
        self._holders.clear()

    def work(self) -> list[int]:
        """Tokens that each rank has yet to compute."""
        return list(self._work)

    def _digests(self, prompt_ids: Sequence[int], salt: str) -> Iterator[Digest]:
        """Names of the full pages of a prompt. The last token is always computed, so its page is not one."""
        if not self._known_pages:
            return
        digest = root(salt)
        for end in range(self._page_size, len(prompt_ids), self._page_size):
            digest = chain(digest, prompt_ids[end - self._page_size : end])
            yield digest

    def _held(self, digests: Sequence[Digest]) -> list[int]:
        """By rank, how many tokens of the prompt it needs not compute."""
        held = [0] * self.dp_size
        ranks = (1 << self.dp_size) - 1
        for digest in digests:
            ranks &= self._holders.get(digest, 0)
            if not ranks:
                break
            for rank in range(self.dp_size):
                held[rank] += self._page_size * (ranks >> rank & 1)
        return held

    def _remember(self, digests: Sequence[Digest], rank: int) -> None:
        """`rank` will hold these pages. Later ones of a prefix are forgotten before those they depend on."""
        for digest in reversed(digests):
            self._holders[digest] = self._holders.pop(digest, 0) | 1 << rank
        while len(self._holders) > self._known_pages:
            self._holders.popitem(last=False)
