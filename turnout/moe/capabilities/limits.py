"""Limits of a dispatcher: which ranks, sizes and steps its kernels were made for, as data."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from turnout.errors import Refusal, listed
from turnout.moe.budget import Budget, fewer_tokens
from turnout.moe.spec import MoESpec
from turnout.parallel.topology import Topology, divisors, one_of
from turnout.vocabulary import ComputeDtype, Phase

OTHER_DISPATCHER = "choose another --moe-a2a-backend"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """None stands for any.

    one_to_one:    every rank has tokens of its own and whole experts of its own: dp = ep = tp
    ep_sizes:      numbers of expert-parallel ranks
    hidden_sizes:  those that kernels were compiled for
    max_tokens:    the most that a rank brings to one step
    """

    one_to_one: bool = False
    ep_sizes: frozenset[int] | None = None
    compute_dtypes: frozenset[ComputeDtype] | None = None  # of hidden states
    top_ks: frozenset[int] | None = None
    hidden_sizes: frozenset[int] | None = None
    hidden_multiple: int = 1
    max_hidden: int | None = None
    max_tokens: int | None = None

    def refusals(
        self, who: str, spec: MoESpec, topology: Topology, compute_dtype: ComputeDtype
    ) -> list[Refusal]:
        """The limits that rule out layers like `spec` between these ranks, whatever a step brings."""
        H, k, found = spec.hidden_size, spec.top_k, []

        def refuse(asked: str, limit: str, remedy: str) -> None:
            found.append(Refusal(who=who, asked=asked, limit=limit, remedy=remedy))

        if self.one_to_one and not topology.dp_size == topology.ep_size == topology.tp_size:
            n = topology.tp_size
            refuse(
                f"--dp-size {topology.dp_size} and --ep-size {topology.ep_size} with --tp-size {n}",
                "every rank sends tokens of its own to ranks with whole experts",
                f"use --dp-size {n} --ep-size {n} --enable-dp-attention, or {OTHER_DISPATCHER}",
            )
        if self.ep_sizes is not None and topology.ep_size not in self.ep_sizes:
            fitting = [ep for ep in divisors(topology.tp_size) if ep in self.ep_sizes]
            other = f"use --ep-size {one_of(fitting)}, or " if fitting and not self.one_to_one else ""
            limit = f"connects {_spans(self.ep_sizes)} expert-parallel ranks"
            refuse(f"--ep-size {topology.ep_size}", limit, other + OTHER_DISPATCHER)
        if self.compute_dtypes is not None and compute_dtype not in self.compute_dtypes:
            names = listed(self.compute_dtypes)
            remedy = f"use --dtype {min(self.compute_dtypes)}, or {OTHER_DISPATCHER}"
            refuse(f"hidden states in {compute_dtype}", f"moves {names}", remedy)
        if self.top_ks is not None and k not in self.top_ks:
            refuse(f"top-{k} routing", f"has kernels for top-{_spans(self.top_ks)}", OTHER_DISPATCHER)
        if self.hidden_sizes is not None and H not in self.hidden_sizes:
            refuse(f"hidden size {H}", f"has kernels for {_spans(self.hidden_sizes)}", OTHER_DISPATCHER)
        if H % self.hidden_multiple:
            limit = f"must be a multiple of {self.hidden_multiple}"
            refuse(f"hidden size {H}", limit, OTHER_DISPATCHER)
        if self.max_hidden is not None and self.max_hidden < H:
            refuse(f"hidden size {H}", f"moves rows of at most {self.max_hidden} values", OTHER_DISPATCHER)
        return found

    def phase_refusals(self, who: str, phase: Phase, budget: Budget) -> list[Refusal]:
        """The limits that rule out steps of `phase` as large as `budget` allows."""
        tokens = budget.capacity if phase == Phase.PREFILL else budget.decode
        if self.max_tokens is None or tokens <= self.max_tokens:
            return []
        most = self.max_tokens
        fewer = fewer_tokens(budget, _at_most(most)) if phase == Phase.PREFILL else []
        fewer = fewer or [f"lower --max-running-requests and --cuda-graph-max-bs to {most} tokens a step"]
        return [
            Refusal(
                who=who,
                asked=f"{phase} steps of {tokens} tokens on a rank",
                limit=f"takes at most {most}",
                remedy=f"{', '.join(fewer)}, or {OTHER_DISPATCHER}",
            )
        ]

    def described(self) -> str:
        """For tables."""
        parts = [
            "dp = ep = tp" * self.one_to_one,
            "" if self.ep_sizes is None else f"ep {_spans(self.ep_sizes)}",
            "" if self.top_ks is None else f"top-{_spans(self.top_ks)}",
            "" if self.hidden_sizes is None else f"hidden size {_spans(self.hidden_sizes)}",
            f"hidden size a multiple of {self.hidden_multiple}" * (self.hidden_multiple > 1),
            "" if self.max_hidden is None else f"hidden size at most {self.max_hidden}",
            "" if self.max_tokens is None else f"{self.max_tokens} tokens a step",
            "" if self.compute_dtypes is None else listed(self.compute_dtypes),
        ]
        return "; ".join(part for part in parts if part) or "-"


NO_LIMITS = Limits()


def _at_most(tokens: int) -> Callable[[Budget], bool]:
    return lambda budget: budget.capacity <= tokens


def _spans(numbers: Iterable[int]) -> str:
    """ "1, 2, 4 to 8": ascending, runs of three and more in short."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    shown = []
    for run in runs:
        shown += [f"{run[0]} to {run[-1]}"] if len(run) > 2 else list(map(str, run))
    return ", ".join(shown)
