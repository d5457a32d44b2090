"""Every request that is not finished, kept while the group of ranks restarts.

A request is its prompt, its sampling parameters with a seed, and the tokens that its client got. Other ranks
need no more than that to continue it as if nothing had happened.

A request that kills ranks must not do so for ever. Each request that was being computed when ranks died gets
a strike; for one that had made progress since it was submitted, it is the first. Those that reach the limit
are suspects, and a bisection finds the culprit: after all other requests have made progress, the ranks get
the older half of the suspects, and nothing more until that half made progress too. If the ranks die first,
that half is halved, and nothing counts against the other requests. If not, the reason is in the other half,
which is halved without a further death. A request over which ranks die while it is tried by itself goes first
after the restart; if they die once more, it is blamed and ends, and nothing else is lost. Once is not enough:
that death might have another reason. One of n suspects that always kills costs at most log2(n) + 1 further
restarts, of 64 between four and five on average. Trying suspects one after the other would cost two restarts,
but as many trials as suspects, for which younger requests wait.

Ranks also die for reasons that no request has, and who sent a SIGKILL cannot be known. Suspects are therefore
not preferred: requests are submitted by age, so that a younger one delays an older one by no more than one
trial. The oldest is computed from every start of the ranks, and no request waits for ever if the ranks live
long enough for it to make progress. Whenever a request makes progress over which the ranks had died in its
trial, they evidently die by chance too: from then on it takes one more death to blame one, up to `MAX_DOUBT`
more.

Pure: no clock, no sockets. One caller.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import takewhile

import msgspec

from turnout.engine.messages import AddRequest, RequestOutput

PROGRESS_OUTPUTS = 2  # the step that computes the known tokens, and one that decodes
BLAMED = 2  # deaths of ranks in trials of one request by itself
MAX_DOUBT = 2  # more of them


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
    """One request. submissions: to how many groups of ranks. outputs: that the present ranks sent.

    strikes: deaths of ranks without progress in between. alone: of these, in trials of it by itself.
    """

    request: AddRequest
    sink: Sink
    output_ids: list[int] = field(default_factory=list)  # that the client got
    outputs: int = 0
    submissions: int = 0
    strikes: int = 0
    alone: int = 0
    part: Part | None = None  # the suspects that it is tried with

    @property
    def progressed(self) -> bool:
        return self.outputs >= PROGRESS_OUTPUTS

    def message(self) -> AddRequest:
        """What to tell ranks that know nothing of it."""
        if not self.output_ids:
            return self.request
        return msgspec.structs.replace(self.request, output_ids=self.output_ids)


@dataclass(eq=False, slots=True)
class Part:
    """Suspects that are tried together. other: the half that holds the reason if this one makes progress."""

    entries: list[Entry]
    other: Part | None = None


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
        self._unproven: dict[str, Entry] = {}  # those that are, and made no progress yet
        self._on_trial: Part | None = None  # all of these, while there are any
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
            sampling = copy(request.sampling)  # unlike `replace` it does not check all fields again
            msgspec.structs.force_setattr(sampling, "seed", self._next_seed)
            request = msgspec.structs.replace(request, sampling=sampling)
            self._next_seed = (self._next_seed + 1) % 2**63
        self._entries[request.id] = self._parked[request.id] = Entry(request, sink)

    def due(self) -> list[Entry]:
        """What to submit now to ranks that serve, which afterwards counts as submitted.

        Everything, oldest first, up to the first suspect; its part by itself once all others made progress.
        """
        if self._on_trial:
            return []
        # One whose trial the ranks did not survive goes first: it is unlikely that they die again by chance.
        waiting = sorted(self._parked.values(), key=lambda entry: not entry.alone)
        due = list(takewhile(lambda entry: entry.part is None, waiting))
        if waiting and not due and not self._unproven:
            self._on_trial = waiting[0].part
            due = [entry for entry in waiting if entry.part is self._on_trial]
        for entry in due:
            del self._parked[entry.request.id]
            self._unproven[entry.request.id] = entry
            entry.outputs = 0
            entry.submissions += 1
            if entry.submissions > 1:
                self.resumed += 1
                self.replayed_tokens += len(entry.request.prompt_ids) + len(entry.output_ids)
        return due

    def delivered(self, entry: Entry, output: RequestOutput) -> bool:
        """Note what goes to a client; whether more may be `due` then."""
        entry.output_ids += output.token_ids
        if (
            entry.outputs >= PROGRESS_OUTPUTS and output.finish_reason is None
        ):  # as most of them: all else was noted before
            return False
        entry.outputs += 1
        if entry.progressed:  # also if ranks die in a later step that is not its own
            if entry.alone:
                self._doubt = min(self._doubt + 1, MAX_DOUBT)
            entry.strikes = entry.alone = 0
            entry.part = None
        if output.finish_reason is not None:
            self._forget(entry)
            return bool(self._parked)
        if not entry.progressed or entry.request.id not in self._unproven:
            return False
        self._proven(entry)
        return bool(self._parked)

    def abort(self, ids: Iterable[str]) -> bool:
        """Forget requests, of which some may be unknown; whether more may be `due` then."""
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
            together = set(computed)
            blamed = self._strike([entry for id, entry in self._entries.items() if id in together])
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

    def _strike(self, computed: Sequence[Entry]) -> list[Entry]:
        """Count strikes; the one request that is to blame, if it is certain."""
        stuck = [entry for entry in computed if not entry.progressed]
        over = stuck if self._on_trial and stuck else computed
        for entry in over:
            entry.strikes = 1 if entry.progressed else entry.strikes + 1
        self._halve([entry for entry in over if entry.strikes >= self._max_strikes])
        if not self._on_trial or len(stuck) != 1:
            return []
        stuck[0].alone += 1
        return stuck if stuck[0].alone >= BLAMED + self._doubt else []

    def _halve(self, suspects: Sequence[Entry]) -> None:
        """Let each half of those, of which one is likely to be the reason of a death, be tried by itself."""
        middle = (len(suspects) + 1) // 2
        younger = Part(list(suspects[middle:]))
        older = Part(list(suspects[:middle]), younger if younger.entries else None)
        for part in (older, younger):
            for entry in part.entries:
                entry.part = part

    def _forget(self, entry: Entry) -> None:
        del self._entries[entry.request.id]
        self._parked.pop(entry.request.id, None)
        self._proven(entry)

    def _proven(self, entry: Entry) -> None:
        """It made progress, or ended. The last one ends a trial; the other half is next."""
        self._unproven.pop(entry.request.id, None)
        if self._on_trial and not self._unproven:
            other, self._on_trial = self._on_trial.other, None
            if other:
                self._halve([one for one in other.entries if one.part is other])
