"""Token bounds of the MoE layers, and the sizes that no single backend owns, each formula once.

Legend: T tokens of a batch, E_loc experts held by a rank, k top-k, H hidden size, I a rank's shard of
the expert intermediate size, dp data-parallel groups, C capacity: tokens a rank may dispatch in one step.
All sizes are bytes per rank. Bounds come from configuration, never from the first batch seen.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from turnout.errors import Refusal
from turnout.formats.spec import matrix_bytes
from turnout.moe.spec import MoESpec, RankShape
from turnout.vocabulary import Exchange, Format, Phase

ARENA_ALIGN = 256  # bytes; regions of an arena begin at multiples


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Token bounds of one rank.

    tokens_per_request: tokens one decoding request brings to a step: 1, or as many as drafts are verified
                        with, the newest one among them (--speculative-num-draft-tokens)
    local:    the most tokens of one step on this rank, decode and prompt tokens together
    decode:   the most tokens of a step without prompt tokens
    capacity: the tokens of one step for which the buffers of an all-to-all are made, per rank
    dp_size:  data-parallel groups, each with tokens of its own
    """

    tokens_per_request: int
    local: int
    decode: int
    capacity: int
    dp_size: int = 1

    @classmethod
    def from_limits(
        cls,
        *,
        chunked_prefill_size: int,
        max_prefill_tokens: int,
        max_running_requests: int,
        draft_tokens: int = 0,
        near_tie_tokens: int = 0,
        dp_size: int = 1,
        max_dispatch_tokens_per_rank: int = 0,
    ) -> Budget:
        """The bounds that follow from the limits a user sets.

        `draft_tokens` 0: no speculative decoding. `near_tie_tokens`: of a forward that decides a near-tie.
        `max_dispatch_tokens_per_rank` 0: as much as is needed.
        """
        tokens_per_request = draft_tokens or 1
        decode = max_running_requests * tokens_per_request
        local = max(chunked_prefill_size, max_prefill_tokens, near_tie_tokens, decode)
        return cls(
            tokens_per_request=tokens_per_request,
            local=local,
            decode=decode,
            capacity=max_dispatch_tokens_per_rank or local,
            dp_size=dp_size,
        )

    @property
    def gathered(self) -> int:
        """The most tokens after a gather over the data-parallel groups."""
        return rows_seen(Exchange.GATHER, Phase.PREFILL, self)

    @property
    def received(self) -> int:
        """The most tokens that the buffers of an all-to-all hold on one rank."""
        return rows_seen(Exchange.ALL_TO_ALL, Phase.PREFILL, self)

    def phase_tokens(self, phase: Phase) -> int:
        """The most tokens one rank brings to a step of `phase`."""
        return self.local if phase == Phase.PREFILL else self.decode

    def refusals(self, *, in_chunks: bool = False) -> list[Refusal]:
        """in_chunks: prefill may pass buffers in several goes, decoding may not."""
        needed = self.decode if in_chunks else self.local
        if self.capacity >= needed:
            return []
        step = "step of decoding" if in_chunks else "step"
        return [
            Refusal(
                who="budget",
                asked=f"--max-dispatch-tokens-per-rank {self.capacity}",
                limit=f"a rank may have {needed} tokens to send in one {step}",
                remedy=f"use --max-dispatch-tokens-per-rank {needed} or more, or lower "
                "--max-prefill-tokens, --chunked-prefill-size, --max-running-requests or "
                "--cuda-graph-max-bs",
            )
        ]


def aligned(size: int, multiple: int = 128) -> int:
    """Up to the next multiple."""
    return -(-size // multiple) * multiple


def arena_bytes(regions: Mapping[str, int]) -> int:
    """Of an arena's regions (arena.py), one after the other."""
    return sum(aligned(size, ARENA_ALIGN) for size in regions.values())


def moves(exchange: Exchange, *, dp_size: int) -> bool:
    """Whether tokens leave their rank. A gather has nothing to fetch where all ranks hold the same ones."""
    return exchange == Exchange.ALL_TO_ALL or dp_size > 1


def reach(top_k: int, ep_size: int) -> float:
    """The share of the expert-parallel ranks that hold an expert of a token, routed evenly."""
    return 1 - (1 - 1 / ep_size) ** top_k


def rows_seen(exchange: Exchange, phase: Phase, budget: Budget, *, senders: int = 1) -> int:
    """The most tokens a runner sees in a step of `phase` behind a dispatcher of that `exchange`.

    gather: each of the dp groups brings T tokens, dp * T.
    all_to_all: all ranks send. The attention-TP ranks of a group hold the same T tokens and each sends its
    share of them, so a token is sent by one rank; a receiver gets it once, however many of its experts the
    token chose. Hence at most dp * T, each group sending all it has to one receiver; buffers are made for
    dp * C. With whole experts and attention on every rank (tp = dp = ep) that is ep * C. A decode step
    brings fewer tokens, and a dispatcher for decode only has buffers for those. Where each of a group's
    `senders` has rows of its own, all have as many.
    """
    tokens = budget.phase_tokens(phase)
    if exchange == Exchange.ALL_TO_ALL and phase == Phase.PREFILL:
        tokens = budget.capacity
    return budget.dp_size * senders * -(-tokens // senders)


def fewer_tokens(budget: Budget, fits: Callable[[Budget], bool], *, in_chunks: bool = False) -> list[str]:
    """The flags that bound a prefill step, with the largest value that `fits`; [] if there is none.
    in_chunks: it may pass buffers that hold less."""

    def bounded(tokens: int) -> Budget:
        return replace(budget, local=min(budget.local, tokens), capacity=tokens)

    sizes = range(budget.decode, budget.capacity + 1)
    # Mostly it is the weights that do not fit: asked first, whether any size does.
    if not sizes or not fits(bounded(sizes[0])):
        return []
    most = sizes[bisect_left(sizes, True, key=lambda tokens: not fits(bounded(tokens))) - 1]
    if in_chunks or most >= budget.local:
        return [f"use --max-dispatch-tokens-per-rank {most} or less"]
    flags = "--max-prefill-tokens and --chunked-prefill-size"
    if budget.capacity > budget.local:
        flags += " and --max-dispatch-tokens-per-rank"
    return [f"lower {flags} to {most} or less"]


def expert_bytes(spec: MoESpec, shape: RankShape, *, decoded: bool, itemsize: int) -> int:
    """This rank's experts of one layer as kept for use: packed as in the checkpoint, or decoded once.

    `itemsize` is that of unquantised weights: as stored if packed, of the compute dtype if decoded.
    """
    weight_format = Format.BF16 if decoded else spec.format
    one = matrix_bytes(weight_format, shape.w13_rows, shape.hidden, itemsize=itemsize)
    one += matrix_bytes(weight_format, shape.hidden, shape.inner, itemsize=itemsize)
    if spec.expert_bias:
        one += 4 * (shape.w13_rows + shape.hidden)
    input_scales = 8 * spec.num_experts if spec.quantized_activations else 0
    return shape.local_experts * one + input_scales


def logits_bytes(rows: int, vocab_size: int) -> int:
    """float32 logits of the rows sampled in one step, and the copy that sampling works on."""
    return 2 * 4 * rows * vocab_size


def gigabytes(size: int) -> str:
    """For people: decimal, three digits."""
    return f"{size / 10**9:.3g} GB"
