"""Which states of requests are kept for prefixes that may be asked for again. Torch-free.

A snapshot is a copy of a request's slot (attention/states.py, attention/compressed.py) as of the end of a
prefix, in a slot of its own, found by the prefix's digest; the one that was used longest ago makes room for
another. What is to be copied is collected, and carried out in order before the next forward, which is the
first to change a state.
"""

from __future__ import annotations

from collections import OrderedDict

from turnout.engine.scheduler.block_pool import Digest


class SnapshotPool:
    """interval: a snapshot is taken at each multiple, in tokens. slots: where they go."""

    def __init__(self, interval: int, slots: range):
        self.interval = interval
        self._slot_of: OrderedDict[Digest, int] = OrderedDict()  # least recently used first
        self._free = list(reversed(slots))
        self._copies: list[tuple[int, int]] = []

    def __contains__(self, digest: Digest) -> bool:
        return digest in self._slot_of

    def __len__(self) -> int:
        return len(self._slot_of)

    def save(self, digest: Digest, state: int) -> None:
        """Keep the state in slot `state`, which is that of the prefix named `digest`."""
        if digest in self._slot_of:
            self._slot_of.move_to_end(digest)
            return
        slot = self._free.pop() if self._free else self._slot_of.popitem(last=False)[1]
        self._slot_of[digest] = slot
        self._copies.append((state, slot))

    def restore(self, digest: Digest, state: int) -> None:
        """Let the request whose state is in that slot go on from a prefix whose snapshot is there."""
        self._slot_of.move_to_end(digest)
        self._copies.append((self._slot_of[digest], state))

    def take_copies(self) -> list[tuple[int, int]]:
        """(from, to) slots, to be copied in this order before the next forward."""
        copies, self._copies = self._copies, []
        return copies

    def forget(self) -> None:
        """Find none again that was saved so far."""
        self._free += self._slot_of.values()
        self._slot_of.clear()
