"""How the ranks of one model synchronise before each step, by records that they exchange.

A forward is collective, so every rank runs it if any has work, and all of them must see it alike: its phase
is the busiest one's, and everyone knows how many tokens each data-parallel rank brings. Ranks that share
requests (attention TP) also execute the same commands at the same step, and are checked to sample the same
tokens. A single rank waits for no other.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from turnout.engine.scheduler.prefill_delayer import Prompts
from turnout.parallel.exchange import SingleRankExchange, StepExchange, StepRecord
from turnout.parallel.topology import Topology
from turnout.vocabulary import Phase

PHASES = (None, Phase.DECODE, Phase.PREFILL)  # by their code in a record


@dataclass(frozen=True, kw_only=True)
class SyncedStep:
    """phase: of the busiest rank; None if no rank has work.

    tokens:   how many each data-parallel rank brings
    longest:  tokens of the longest context of any rank, with what this step adds to it
    phases:   of each data-parallel rank, as `phase`
    prefill_due: whether prompts that a rank holds back (scheduler/prefill_delayer.py) run in the next step
    commands: how many of the commands received so far every rank of this data-parallel group has
    pending:  whether some rank has commands that it is yet to execute
    leaving:  whether all stop here, since one was told to
    step_us:  of the rank that leads this group: microseconds that its last step took, if that counts
    """

    phase: Phase | None
    tokens: tuple[int, ...]
    longest: int
    commands: int
    pending: bool
    leaving: bool
    phases: tuple[Phase | None, ...] = ()
    prefill_due: bool = False
    step_us: int = 0

    @property
    def uneven(self) -> bool:
        """Whether some ranks compute prompts while others only decode."""
        return Phase.DECODE in self.phases and Phase.PREFILL in self.phases

    @property
    def step_phase(self) -> Phase:
        """`phase` of a step that is computed."""
        assert self.phase is not None, "a step is computed only if some rank has work"
        return self.phase


class StepSync:
    """One rank's side of the synchronisation before each step.

    received: commands that came so far; executed: how many of them are done; leaving: whether one told this
    rank to stop. Set by whoever receives.
    """

    def __init__(self, topology: Topology = Topology(), exchange: StepExchange | None = None):
        self.topology = topology
        self.received = self.executed = 0
        self.leaving = False
        self._exchange = exchange or SingleRankExchange()
        self._digest = 0
        stride = topology.attention_tp
        self._group = slice(topology.dp_rank * stride, (topology.dp_rank + 1) * stride)

    @property
    def leads(self) -> bool:
        """Whether this rank speaks for its data-parallel group."""
        return self.topology.attention_tp_rank == 0

    def sync(
        self,
        tokens: int,
        phase: Phase | None,
        next_prompts: Prompts = Prompts.NONE,
        step_us: int = 0,
        *,
        longest: int,
    ) -> SyncedStep:
        """This rank would bring `tokens`, of contexts of up to `longest`, to a forward of `phase` (None: it
        has no work), and `next_prompts` to the one after it; the one before took `step_us`, if that counts.
        Collective.

        Raises RuntimeError if ranks that share requests have sampled different tokens.
        """
        records = self._exchange(
            StepRecord(
                tokens=tokens,
                phase=PHASES.index(phase),
                received=self.received,
                executed=self.executed,
                digest=self._digest,
                leaving=self.leaving,
                next_prompts=next_prompts,
                step_us=step_us,
                longest=longest,
            )
        )
        self._check_digests(records)
        return self.agreed(records)

    def agreed(self, records: Sequence[StepRecord]) -> SyncedStep:
        """What follows from the records of all ranks."""
        leading = records[:: self.topology.attention_tp]
        prompts = [record.next_prompts for record in records if record.tokens or record.next_prompts]
        return SyncedStep(
            phase=PHASES[max(record.phase for record in records)],
            tokens=tuple(record.tokens for record in leading),
            longest=max(record.longest for record in records),
            phases=tuple(PHASES[record.phase] for record in leading),
            prefill_due=Prompts.DUE in prompts or (bool(prompts) and all(prompts)),
            commands=min(record.received for record in records[self._group]),
            pending=any(record.executed < record.received for record in records),
            leaving=any(record.leaving for record in records),
            step_us=records[self._group.start].step_us,
        )

    def sampled(self, token_ids: Sequence[int]) -> None:
        """Note what the requests of this rank's group got."""
        if self.topology.attention_tp > 1:
            self._digest = zlib.crc32(array("q", token_ids).tobytes(), self._digest)

    def next_near_tie(self, length: int) -> tuple[int, int]:
        """This rank has a near-tie in a sequence of `length` tokens (0: none): (DP rank whose turn it is, its
        length), length 0 when no rank has one left. Collective."""
        records = self._exchange(StepRecord(near_tie_tokens=length))
        lengths = [record.near_tie_tokens for record in records[:: self.topology.attention_tp]]
        return next(((rank, n) for rank, n in enumerate(lengths) if n), (0, 0))

    def share_count(self, count: int) -> tuple[int, ...]:
        """That of each data-parallel rank. Collective."""
        records = self._exchange(StepRecord(tokens=count))
        return tuple(record.tokens for record in records[:: self.topology.attention_tp])

    def _check_digests(self, records: Sequence[StepRecord]) -> None:
        for first in range(0, len(records), self.topology.attention_tp):
            digests = [record.digest for record in records[first : first + self.topology.attention_tp]]
            if len(set(digests)) > 1:
                other = next(i for i, digest in enumerate(digests) if digest != digests[0])
                raise RuntimeError(
                    f"ranks {first} and {first + other} share requests but sampled different tokens: their "
                    "logits differ"
                )
