"""What the engine is like when somebody asks: the values that metrics and the dashboard show."""

from __future__ import annotations

from dataclasses import dataclass

from turnout.engine.messages import EngineStats
from turnout.server.expert_window import Counts, CountWindow, by_slice
from turnout.server.supervise.engine import EngineSupervisor


@dataclass(frozen=True)
class View:
    """What the engine is like when somebody asks.

    experts: tokens of each [layer, expert], since the ranks started; recent: in the last minute.
    by_rank: [1, data-parallel rank], tokens that each computed in the last minute.
    """

    engine: EngineSupervisor
    ranks: list[EngineStats]
    experts: Counts
    recent: Counts
    by_rank: Counts

    def total(self, field: str) -> float:
        """The sum of a counter over all ranks."""
        return sum(getattr(stats, field) for stats in self.ranks)

    @property
    def info(self) -> dict:
        """What rank 0 said when it was ready; empty before."""
        return self.engine.ready.info if self.engine.ready else {}


class Viewer:
    """Looks at an engine, and remembers the last minute."""

    def __init__(self, engine: EngineSupervisor):
        self._engine = engine
        self._experts = CountWindow(lambda: engine.expert_tokens)
        self._by_rank = CountWindow(
            lambda: {0: [[stats.computed_tokens for stats in leading(self._ranks())]]}
        )

    def view(self) -> View:
        experts = self._experts
        return View(self._engine, self._ranks(), experts.totals(), experts.recent(), self._by_rank.recent())

    def _ranks(self) -> list[EngineStats]:
        return [self._engine.stats[rank] for rank in sorted(self._engine.stats)]


def leading(ranks: list[EngineStats]) -> list[EngineStats]:
    """Those that lead a data-parallel group."""
    return [stats for stats in ranks if stats.pages_total]


def kv_usage(view: View) -> float:
    """The share of KV pages that live sequences hold, 0 to 1."""
    pages = view.total("pages_total")
    return view.total("pages_used") / pages if pages else 0.0


def waiting_by_reason(view: View) -> dict[str, int]:
    """Sequences in the queues, by what the first of their queue lacks."""
    found = dict.fromkeys(("running_requests", "kv_pages", "prefill_tokens", "other_ranks"), 0)
    for stats in view.ranks:
        if stats.waiting_for:
            found[stats.waiting_for] += stats.num_waiting
    return found | {"restart": view.engine.ledger.num_parked}


def rank_up(view: View) -> dict[int, bool]:
    """Which ranks serve."""
    return {rank["rank"]: rank["state"] in ("idle", "running") for rank in view.engine.describe_ranks()}


def expert_slices(view: View) -> list[int]:
    """Tokens of the last minute by the expert-parallel slice that computed them."""
    return by_slice(view.recent, view.engine.config.ep_size).tolist()
