"""What is owed to clients: every request that is not finished, through all lives of the group of ranks.

A request is its prompt, its sampling parameters with a seed, and the tokens that its client got. That is all
it takes to go on with it on other ranks as if nothing had happened.

A request that kills ranks must not do so for ever. Each of those that were being computed when ranks died
gets a strike; for one that had got on since it was submitted it is the first one. Those that reach the limit
are suspects: the next ranks get each of them when all that they have already got on, and nothing more until
it got on too. If the ranks die then, it goes first in the next life; if they die once more, it is to blame,
and nothing else is lost: once might have another reason. One of 64 requests that always kills costs four
restarts in that way; halving the suspects from death to death would cost about six.

Ranks also die for reasons that no request has, and who sent a SIGKILL cannot be known. Suspects are therefore
not preferred: requests are submitted by age, so that a younger one delays an older one by no more than that
one first trial. The oldest is computed from the start of every life, and no request waits for ever while
lives suffice to get on. And whenever one gets on over which the ranks had died in its trial, it is certain
that they die by chance, too: from then on it takes one more death to blame one, up to `MAX_DOUBT` more.

Pure: no clock, no sockets. One caller.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from itertools import takewhile

import msgspec

from turnout.engine.messages import AddRequest, RequestOutput

GOT_ON = 2  # outputs: the step that computes the known tokens, and one that decodes
MAX_DOUBT = 2  # deaths


class EngineFailed(Exception):
    """The engine cannot go on. `user_error` tells a wrong input from a bug.

    spoken: a rank said so itself, so that the next attempt is likely to end in the same way.
    """

    def __init__(self, message: str, *, user_error: bool = False, spoken: bool = False):
        super().__init__(message)
        self.user_error = user_error
        self.spoken = spoken


Sink = Callable[[RequestOutput | EngineFailed], None]


@dataclass(eq=False, slots=True)
class Entry:
    """One request. lives: of the group, in which it was submitted. outputs: that the present ranks sent."""

    request: AddRequest
    sink: Sink
    output_ids: list[int] = field(default_factory=list)  # that the client got
    outputs: int = 0
    lives: int = 0
    strikes: int = 0

    @property
    def got_on(self) -> bool:
        return self.outputs >= GOT_ON

    def message(self) -> AddRequest:
        """What to tell ranks that know nothing of it."""
        if not self.output_ids:
            return self.request
        return msgspec.structs.replace(self.request, output_ids=self.output_ids)


class Ledger:
    """Entries in order of arrival.

    resumed: how often one was submitted to further ranks. replayed_tokens: that these had to compute again.
    """

    def __init__(self, max_strikes: int, first_seed: int = 0):
        """max_strikes: see above; 0: requests end when their ranks die. first_seed: of the first request that
        brings none; each further one takes the next."""
        self.resumed = self.replayed_tokens = 0
        self._max_strikes = max_strikes
        self._next_seed = first_seed
        self._entries: dict[str, Entry] = {}
        self._parked: dict[str, Entry] = {}  # those of them that are not submitted
        self._unproven: dict[str, Entry] = {}  # those that are, and have not got on
        self._on_trial: Entry | None = None  # the only one of these
        self._doubt = 0  # deaths over one request that had another reason, as far as they count

    @property
    def num_parked(self) -> int:
        """Requests that wait for ranks."""
        return len(self._parked)

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, request: AddRequest, sink: Sink) -> None:
        """A new request, to be submitted when `due` says so."""
        if request.sampling.seed is None:
            sampling = msgspec.structs.replace(request.sampling, seed=self._next_seed)
            request = msgspec.structs.replace(request, sampling=sampling)
            self._next_seed = (self._next_seed + 1) % 2**63
        self._entries[request.id] = self._parked[request.id] = Entry(request, sink)

    def due(self) -> list[Entry]:
        """What to submit now to ranks that serve, which afterwards counts as submitted.

        Everything, oldest first, up to the first suspect; this one by itself once all others have got on.
        """
        if self._on_trial:
            return []
        # One whose trial the ranks did not survive goes first: it is unlikely that they die again by chance.
        waiting = sorted(self._parked.values(), key=lambda entry: not self._failed_trial(entry))
        due = list(takewhile(lambda entry: not self._is_suspect(entry), waiting))
        if waiting and not due and not self._unproven:
            due = waiting[:1]
            self._on_trial = due[0]
        for entry in due:
            del self._parked[entry.request.id]
            self._unproven[entry.request.id] = entry
            entry.outputs = 0
            entry.lives += 1
            if entry.lives > 1:
                self.resumed += 1
                self.replayed_tokens += len(entry.request.prompt_ids) + len(entry.output_ids)
        return due

    def delivered(self, entry: Entry, output: RequestOutput) -> bool:
        """Note what goes to a client; whether more may be `due` thereby."""
        entry.output_ids += output.token_ids
        entry.outputs += 1
        if entry.got_on:  # also if ranks die in a later step that is not its own
            if self._failed_trial(entry):
                self._doubt = min(self._doubt + 1, MAX_DOUBT)
            entry.strikes = 0
        if output.finish_reason is not None:
            self._forget(entry)
            return bool(self._parked)
        if not entry.got_on or entry.request.id not in self._unproven:
            return False
        del self._unproven[entry.request.id]
        self._end_trial(entry)
        return bool(self._parked)

    def abort(self, ids: Iterable[str]) -> bool:
        """Forget requests, of which some may be unknown; whether more may be `due` thereby."""
        for entry in [self._entries[id] for id in ids if id in self._entries]:
            self._forget(entry)
        return bool(self._parked)

    def park(self) -> None:
        """The ranks are gone: all requests wait for the next ones."""
        self._on_trial = None
        self._unproven = {}
        self._parked = dict(self._entries)

    def ranks_died(self, computed: Collection[str]) -> list[Entry]:
        """As `park`, and returns requests that end by that, which are forgotten.

        computed: ids of requests that may have been in the step that failed.
        """
        blamed = [entry for id, entry in self._entries.items() if id not in self._parked]
        if self._max_strikes:
            blamed = self._strike([self._entries[id] for id in computed if id in self._entries])
        for entry in blamed:
            self._forget(entry)
        self.park()
        return blamed

    def fail(self, failure: EngineFailed) -> None:
        """End all requests."""
        entries, self._entries = self._entries, {}
        self.park()
        for entry in entries.values():
            entry.sink(failure)

    def _strike(self, computed: Iterable[Entry]) -> list[Entry]:
        """Count strikes; the one request that is to blame, if it is certain."""
        stuck = []
        for entry in computed:
            if entry.got_on:
                entry.strikes = 1
            else:
                entry.strikes += 1
                stuck.append(entry)
        enough = self._max_strikes + 2 + self._doubt
        return stuck if len(stuck) == 1 and stuck[0].strikes >= enough else []

    def _is_suspect(self, entry: Entry) -> bool:
        return 0 < self._max_strikes <= entry.strikes

    def _failed_trial(self, entry: Entry) -> bool:
        return 0 < self._max_strikes < entry.strikes

    def _forget(self, entry: Entry) -> None:
        del self._entries[entry.request.id]
        self._parked.pop(entry.request.id, None)
        self._unproven.pop(entry.request.id, None)
        self._end_trial(entry)

    def _end_trial(self, entry: Entry) -> None:
        if entry is self._on_trial:
            self._on_trial = None
