"""What the engine remembers of one request, from arrival to its last token. Torch-free."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import islice

from turnout.engine.grammar_matcher import GrammarMatcher
from turnout.engine.messages import AddRequest, TokenLogprobs
from turnout.engine.sampling_params import SamplingParams
from turnout.engine.scheduler.block_pool import Digest, chain, root
from turnout.engine.speculative.ngram import NgramIndex


@dataclass(eq=False, slots=True)
class GroupPages:
    """Pages of a request in one cache group, in the order of its tokens.

    freed: the first so many are not held (any more); what stands there is the number of some page.
    placed: how many attention has written to its page table.
    """

    pages: list[int]
    freed: int = 0
    placed: int = 0


@dataclass(eq=False, slots=True)
class Request:
    """`tokens` is prompt and output; keys and values of the first `computed` lie in the pages of `kv`.

    pending: 1 between the step that draws a token and the next one, where steps overlap: the token is on the
    device only, in row `drawn_row` of what that step drew. ended: it gets no more tokens.
    """

    id: str
    sampling: SamplingParams
    tokens: list[int]
    num_prompt: int
    seed: int
    stop_ids: frozenset[int]  # any of these ends the output
    plain: bool  # greedy, with nothing that changes or reports logits
    row: int = -1  # of the page table while running, else -1
    state_slots: list[int] = field(default_factory=list)  # while running; the first has its state
    kv: list[GroupPages] = field(default_factory=list)  # while running, one of each cache group
    room: int = 0  # tokens that its pages have room for
    computed: int = 0
    pending: int = 0
    drawn_row: int = 0
    ended: bool = False
    published: int = 0  # pages already offered to the pools
    order: tuple[int, int] = (0, 0)  # lower ones first: by priority, if that counts, then by arrival
    priority: int = 0
    root: Digest = b""  # parent of the first page's digest
    digests: list[Digest] = field(default_factory=list)  # of full pages, as far as asked for
    cached_tokens: int = 0  # prompt tokens found in the prefix cache at first admission
    admitted: bool = False
    added_at: float = field(default_factory=time.monotonic)
    admitted_at: float = 0.0  # first; time.monotonic() as all of these
    timed: bool = False  # whether its output said how long it waited
    preempted: list[float] = field(default_factory=list)  # when, each time.time()
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    ngrams: NgramIndex = field(default_factory=NgramIndex)  # of `tokens`, for drafts
    proposed: list[int] = field(default_factory=list)  # drafts of a draft layer, where the model has one
    drafts_by_layer: bool = False
    matcher: GrammarMatcher | None = None  # of its grammar, if it has one

    @classmethod
    def start(
        cls,
        message: AddRequest,
        *,
        seed: int,
        eos_token_ids: tuple[int, ...],
        matcher: GrammarMatcher | None = None,
        drafts_by_layer: bool = False,
    ) -> Request:
        """`seed` counts where the request brings none."""
        sampling = message.sampling
        eos = () if sampling.ignore_eos else eos_token_ids
        return cls(
            id=message.id,
            sampling=sampling,
            tokens=[*message.prompt_ids, *message.output_ids],
            num_prompt=len(message.prompt_ids),
            seed=seed if sampling.seed is None else sampling.seed,
            stop_ids=frozenset((*eos, *sampling.stop_token_ids)),
            plain=_is_plain(sampling),
            prompt_logprobs=None if sampling.prompt_logprobs is None or message.output_ids else [None],
            priority=message.priority,
            root=root(message.cache_salt),
            matcher=matcher,
            drafts_by_layer=drafts_by_layer,
        )

    @property
    def penalised(self) -> bool:
        return _penalised(self.sampling)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def length(self) -> int:
        """Of all tokens, the pending one included."""
        return len(self.tokens) + self.pending

    @property
    def remaining(self) -> int:
        """Tokens whose keys and values are to be computed: 1 while decoding, 0 if the last one is pending."""
        if self.pending and self.num_output + self.pending >= self.sampling.max_tokens:
            return 0
        return self.length - self.computed

    @property
    def scores_missing(self) -> bool:
        """Whether log-probabilities of prompt tokens are still to be computed."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt

    @property
    def most_drafts(self) -> int:
        """How many draft tokens could be of use: the step that accepts them all samples one more.

        None under penalties, which depend on all tokens before: every row would need counts of its own.
        """
        return 0 if self.penalised else self.sampling.max_tokens - self.num_output - 1

    def draft(self, count: int) -> list[int]:
        """At most `count` tokens that may follow, by its grammar too."""
        drafts = self.proposed[:count] if self.drafts_by_layer else self.ngrams.draft(self.tokens, count)
        if drafts and self.matcher is not None:
            self.matcher.advance(self.tokens, self.num_prompt)
            drafts = drafts[: self.matcher.allowed(drafts)]
        return drafts

    @property
    def reusable(self) -> int:
        """Tokens that may come from the prefix cache: all before the first row whose logits are needed."""
        if self.scores_missing:
            assert self.prompt_logprobs is not None
            return len(self.prompt_logprobs) - 1
        return len(self.tokens) - 1

    def prefix_digests(self, num_pages: int, page_size: int) -> list[Digest]:
        """Digests of the first `num_pages` pages, all of which must be full of known tokens."""
        for page in range(len(self.digests), num_pages):
            parent = self.digests[-1] if self.digests else self.root
            tokens = self.tokens[page * page_size : (page + 1) * page_size]
            self.digests.append(chain(parent, tokens))
        return list(islice(self.digests, num_pages))


def _penalised(sampling: SamplingParams) -> bool:
    return (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) != (0, 0, 1)


def _is_plain(sampling: SamplingParams) -> bool:
    adjusts = sampling.logit_bias or sampling.min_tokens or sampling.grammar or _penalised(sampling)
    return sampling.temperature == 0 and sampling.logprobs is None and not adjusts
