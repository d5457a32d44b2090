"""Logits -> next tokens, for all requests of a step at once.

Order: logit bias, minimum length, repetition, presence and frequency penalties, grammar, temperature,
top-k, top-p, min-p, draw. Log-probabilities are the model's own, before any of these.

A draw turns one uniform number into a token through the cumulative distribution. That number is a
digest of (seed, position), not the next one of a generator: a request draws the same tokens whatever
else is in the batch, and after a preemption.

Legend: S rows, one per request or several where it brings draft tokens, V vocabulary, W all of it or the
best, R rows of the page table, one per running request.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor

from turnout.engine.messages import TokenLogprobs
from turnout.engine.sampling.greedy import greedy
from turnout.engine.sampling.token_masks import forbid
from turnout.engine.sampling_params import SamplingParams
from turnout.engine.scheduler.request import Request
from turnout.parallel.transfers import HostCopy, on_device

WIDTH = 1024  # tokens that top-k and top-p look at first
_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, slots=True)
class Sampled:
    """One entry per request.

    valid: False where the logits held no finite maximum.
    near_ties: True where the two best logits of a greedy choice were so close that rounding may have made it.
    """

    token_ids: list[int]
    valid: list[bool]
    near_ties: list[bool]
    logprobs: list[TokenLogprobs | None]


class Drawn:
    """Tokens that a step draws, before the host knows them.

    ids_S: int64, on the device. A step that runs ahead takes its inputs from there.
    """

    def __init__(self, columns_CS: Tensor, scores: Scores | None = None):
        """columns: int64, token, whether its row was finite, and, where it was looked for, whether it is a
        near-tie; copied to the host from now on."""
        self.ids_S = columns_CS[0]
        self._columns, self._scores = HostCopy(columns_CS), scores

    def read(self) -> Sampled:
        """Waits until the tokens are there."""
        token_ids, valid, *reported = self._columns.tolist()
        near_ties = reported[0] if reported else [False] * len(token_ids)
        logprobs: list[TokenLogprobs | None] = [None] * len(token_ids)
        if self._scores is not None:
            for i, entry in zip(self._scores.rows, self._scores.read(), strict=True):
                logprobs[i] = entry
        return Sampled(token_ids, list(map(bool, valid)), list(map(bool, near_ties)), logprobs)


class Sampler:
    """Stateless but for the token counts that penalties need."""

    def __init__(
        self,
        vocab_size: int,
        max_running: int,
        device: torch.device,
        *,
        report_near_ties: bool = True,
        one_by_one: bool = False,
    ):
        """report_near_ties: False makes `Sampled.near_ties` all False, and costs nothing.

        one_by_one: draw each row apart from the others, since the order of a sum over the vocabulary may
        depend on the number of rows.
        """
        self.device = device
        self._one_by_one = one_by_one
        self._report_near_ties = report_near_ties
        self._counts = TokenCounts(vocab_size, max_running, device)

    def __call__(
        self,
        logits_SV: Tensor,
        requests: Sequence[Request],
        drafted: Sequence[int] | None = None,
        best_2S: Tensor | None = None,
        allowed_SW: Tensor | None = None,
    ) -> Drawn:
        """Draw the next tokens of `requests`; `logits_SV` is float32 and may be overwritten.

        drafted: how many draft tokens of its request each row has before it (default: none), where the same
        request may stand several times. Penalties do not see drafts. best_2S: int64, the token of each row's
        largest logit and whether that is finite, where the caller knows. allowed_SW: tokens that grammars
        permit, as TokenMaskFiller gives them.
        """
        if all(request.plain for request in requests):
            if best_2S is not None and not self._report_near_ties:
                return Drawn(best_2S)
            return Drawn(greedy(logits_SV, near_ties=self._report_near_ties))
        wanted = [i for i, r in enumerate(requests) if r.sampling.logprobs is not None]
        scores_SV = torch.log_softmax(logits_SV[self._index(wanted)], dim=-1) if wanted else None
        ahead = drafted or [0] * len(requests)
        num_outputs = [r.num_output + more for r, more in zip(requests, ahead, strict=True)]
        low_S = logits_SV.amin(-1) if self._report_near_ties else None
        self._adjust(logits_SV, requests, num_outputs)
        if allowed_SW is not None:
            forbid(logits_SV, allowed_SW)
        choices_SV = logits_SV.clone() if self._report_near_ties else logits_SV
        columns_CS = greedy(choices_SV, near_ties=self._report_near_ties, low_S=low_S)
        random = [i for i, r in enumerate(requests) if r.sampling.temperature > 0]
        # Drawn apart: in the order of ids or of probability, and the batch must not decide which.
        for ordered in (False, True):
            drawn = [i for i in random if _needs_order(requests[i].sampling) is ordered]
            for rows in [[i] for i in drawn] if self._one_by_one else [drawn] * bool(drawn):
                params = [requests[i].sampling for i in rows]
                uniforms = [uniform(requests[i].seed, num_outputs[i]) for i in rows]
                draw, index = draw_ordered if ordered else _draw, self._index(rows)
                columns_CS[0, index] = draw(logits_SV[index], params, uniforms)
                if self._report_near_ties:
                    columns_CS[2, index] = 0  # no choice between two best ones
        if scores_SV is None:
            return Drawn(columns_CS)
        counts = [requests[i].sampling.logprobs or 0 for i in wanted]
        labels = [requests[i].sampling.logprob_token_ids for i in wanted]
        ids_S = columns_CS[0, self._index(wanted)]
        return Drawn(columns_CS, Scores(wanted, scores_SV, ids_S, counts, labels))

    def _adjust(self, logits_SV: Tensor, requests: Sequence[Request], num_outputs: Sequence[int]) -> None:
        """Bias, minimum length and penalties, in place; num_outputs: of generated tokens before each row."""
        biased = [
            (i, token, bias) for i, r in enumerate(requests) for token, bias in r.sampling.logit_bias.items()
        ]
        if biased:
            rows, tokens, values = zip(*biased, strict=True)
            at = (self._index(rows), self._index(tokens))
            logits_SV.index_put_(at, on_device(values, torch.float32, self.device), accumulate=True)
        too_early = [
            (i, token)
            for i, r in enumerate(requests)
            if num_outputs[i] < r.sampling.min_tokens
            for token in r.stop_ids
        ]
        if too_early:
            rows, tokens = zip(*too_early, strict=True)
            logits_SV[self._index(rows), self._index(tokens)] = float("-inf")
        penalised = [i for i, r in enumerate(requests) if r.penalised]
        if penalised:
            rows_S = self._index(penalised)
            logits_SV[rows_S] = self._counts.penalise(logits_SV[rows_S], [requests[i] for i in penalised])

    def _index(self, values: Sequence[int]) -> Tensor:
        return on_device(values, torch.int64, self.device)


class TokenCounts:
    """How often each request's output holds each token, and which tokens it holds at all."""

    def __init__(self, vocab_size: int, max_running: int, device: torch.device):
        self._shape, self._device = (max_running, vocab_size), device
        self._output_RV: Tensor | None = None  # float32, allocated for the first penalty
        self._seen_RV: Tensor | None = None  # bool, prompt or output
        self._owners: list[tuple[Request, int] | None] = [None] * max_running  # and tokens counted

    def penalise(self, logits_SV: Tensor, requests: Sequence[Request]) -> Tensor:
        """Logits with the penalties of `requests` applied."""
        output_SV, seen_SV = self._count(requests)
        params = [request.sampling for request in requests]
        repetition = _column([p.repetition_penalty for p in params], self._device)
        presence = _column([p.presence_penalty for p in params], self._device)
        frequency = _column([p.frequency_penalty for p in params], self._device)
        repeated_SV = torch.where(logits_SV < 0, logits_SV * repetition, logits_SV / repetition)
        logits_SV = torch.where(seen_SV, repeated_SV, logits_SV)
        return logits_SV - presence * (output_SV > 0) - frequency * output_SV

    def _count(self, requests: Sequence[Request]) -> tuple[Tensor, Tensor]:
        """Bring the requests' rows up to date: output counts and seen tokens, [S, V] each."""
        if self._output_RV is None or self._seen_RV is None:
            self._output_RV = torch.zeros(self._shape, device=self._device)
            self._seen_RV = torch.zeros(self._shape, dtype=torch.bool, device=self._device)
        rows, tokens, weights = [], [], []
        for request in requests:
            owner = self._owners[request.row]
            start = owner[1] if owner is not None and owner[0] is request else 0
            if start == 0:
                self._output_RV[request.row] = 0
                self._seen_RV[request.row] = False
            new = request.tokens[start:]
            rows += [request.row] * len(new)
            tokens += new
            weights += [float(i >= request.num_prompt) for i in range(start, len(request.tokens))]
            self._owners[request.row] = (request, len(request.tokens))
        if rows:
            at = (on_device(rows, torch.int64, self._device), on_device(tokens, torch.int64, self._device))
            weights_N = on_device(weights, torch.float32, self._device)
            self._output_RV.index_put_(at, weights_N, accumulate=True)
            self._seen_RV[at] = True
        mine = on_device([request.row for request in requests], torch.int64, self._device)
        return self._output_RV[mine], self._seen_RV[mine]


class Scores:
    """Log-probability, rank and the `counts[s]` best alternatives of token s, on their way to the host.

    rows: which rows of a step the S rows of `scores_SV`, log-probabilities, are. ids_S: int64, the tokens.
    labels: tokens that take the place of the best ones, where a row has any.
    """

    def __init__(
        self,
        rows: Sequence[int],
        scores_SV: Tensor,
        ids_S: Tensor,
        counts: Sequence[int],
        labels: Sequence[Sequence[int]] = (),
    ):
        self.rows, self._counts, self._labels = rows, counts, labels or [()] * len(rows)
        self._width = min(max(counts), scores_SV.shape[1])
        own_S1 = scores_SV.gather(1, ids_S[:, None])
        ranks_S1 = (scores_SV > own_S1).sum(1, keepdim=True) + 1
        best = torch.topk(scores_SV, self._width, dim=1)
        # One transfer: float64 holds token ids and float32 values exactly.
        parts = [ids_S[:, None], own_S1, ranks_S1, best.indices, best.values]
        if any(labels):
            most = max(map(len, labels))
            padded = [id for of in labels for id in (*of, *[0] * (most - len(of)))]
            wanted_SL = on_device(padded, torch.int64, scores_SV.device).view(len(labels), most)
            parts.append(scores_SV.gather(1, wanted_SL))
        self._copy = HostCopy(torch.cat([part.double() for part in parts], dim=1))

    def read(self) -> list[TokenLogprobs]:
        """Waits until they are there."""
        W = self._width
        return [
            TokenLogprobs(
                token_id=int(token),
                logprob=own,
                rank=int(rank),
                top=list(zip(labels, best[2 * W :], strict=False))  # the list may go on with padding
                if labels
                else list(zip(map(int, best[:W][:n]), best[W : 2 * W][:n], strict=True)),
            )
            for (token, own, rank, *best), n, labels in zip(
                self._copy.tolist(), self._counts, self._labels, strict=True
            )
        ]


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on nothing else: 53 bits of a digest."""
    digest = blake2b(struct.pack("<qq", seed, position), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2**53


def _needs_order(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1


def _draw(logits_SV: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> Tensor:
    """int64 [S]: a random token per row, by temperature and min-p.

    uniforms: numbers in [0, 1), which decide.
    """
    return _pick(_probabilities(logits_SV, params), params, uniforms)[:, 0]


def draw_ordered(logits_SV: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> Tensor:
    """As `_draw`, by top-k and top-p as well.

    Most rows keep few tokens, and sorting 64 vocabularies of 150,000 takes longer than a forward: the best
    WIDTH are looked at first, and all only for rows to which those are not enough. Whether they are follows
    from the row alone, and so does what it draws. Without a top-k only the device knows, and a GPU is not
    waited for: a kernel looks at all of such rows (kernels/common/top_p.py).
    """
    probs_SV = _probabilities(logits_SV, params)
    totals_S1 = probs_SV.sum(-1, keepdim=True, dtype=torch.float64)
    chosen = torch.zeros(len(params), dtype=torch.int64, device=probs_SV.device)
    rows = set(range(len(params)))
    if probs_SV.shape[1] > WIDTH:
        best_SW, order_SW = _best(probs_SV)
        held = {i for i in rows if 0 < params[i].top_k <= WIDTH}
        if unknown := {i for i in rows if not params[i].top_k}:
            limits_S1 = _top_p(params, probs_SV.device) * totals_S1
            held_S1 = best_SW.sum(-1, keepdim=True, dtype=torch.float64) > limits_S1
            held |= {i for i in unknown if held_S1[i, 0].item()} if probs_SV.is_cpu else unknown
        _draw_from(best_SW, order_SW, totals_S1, sorted(held), params, uniforms, chosen)
        if unknown and not probs_SV.is_cpu:
            _draw_from_all(probs_SV, best_SW[:, :1], held_S1, limits_S1, params, uniforms, chosen)
        rows -= held
    if rows:
        # Stable, so that equal probabilities come in the order of ids in every batch.
        all_SV, order_SV = probs_SV.sort(dim=-1, descending=True, stable=True)
        _draw_from(all_SV, order_SV, totals_S1, sorted(rows), params, uniforms, chosen)
    return chosen


def _draw_from_all(
    probs_SV: Tensor,
    best_S1: Tensor,
    held_S1: Tensor,
    limits_S1: Tensor,
    params: Sequence[SamplingParams],
    uniforms: Sequence[float],
    chosen_S: Tensor,
) -> None:
    """Put a token into `chosen` for each row without a top-k that is not `held`: of those that hold
    `limits`."""
    from turnout.kernels.common.top_p import draw_top_p

    device = probs_SV.device
    held_S1 |= on_device([p.top_k > 0 for p in params], torch.bool, device)[:, None]
    floors_S1 = best_S1 * _column([p.min_p for p in params], device)
    uniforms_S = on_device(uniforms, torch.float64, device)
    draw_top_p(probs_SV, held_S1, limits_S1, floors_S1, uniforms_S, chosen_S)


def _draw_from(
    sorted_SW: Tensor,
    order_SW: Tensor,
    totals_S1: Tensor,
    rows: Sequence[int],
    params: Sequence[SamplingParams],
    uniforms: Sequence[float],
    chosen: Tensor,
) -> None:
    """Put a token into `chosen` [S] for each of `rows`: sorted probabilities, of the tokens `order`; totals:
    of all tokens."""
    if not rows:
        return
    params, uniforms = [params[i] for i in rows], [uniforms[i] for i in rows]
    index = on_device(rows, torch.int64, sorted_SW.device)
    kept = _keep_top(sorted_SW[index], totals_S1[index], params)
    chosen[index] = order_SW[index].gather(1, _pick(kept, params, uniforms))[:, 0]


def _probabilities(logits_SV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    # As float32 a temperature may vanish; and 0 / 0 is NaN.
    temperature = _column([max(p.temperature, _TINY) for p in params], logits_SV.device)
    # The largest logit first becomes 0: a tiny temperature then sends the others to -inf, not to NaN.
    return torch.softmax((logits_SV - logits_SV.amax(-1, keepdim=True)) / temperature, dim=-1)


def _best(probs_SV: Tensor) -> tuple[Tensor, Tensor]:
    """The WIDTH largest probabilities [S, WIDTH], descending, and their tokens, in order among equals."""
    V = probs_SV.shape[1]
    # Not negative, so that their bits order them as they do; below these the token, the first one largest.
    keys_SV = (probs_SV.view(torch.int32).long() << 32) + torch.arange(V - 1, -1, -1, device=probs_SV.device)
    best_SW = keys_SV.topk(WIDTH, dim=-1).values
    return (best_SW >> 32).int().view(torch.float32), V - 1 - (best_SW & 0xFFFFFFFF)


def _pick(probs_SW: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> Tensor:
    """int64 [S, 1]: a place in each row, by min-p and the row's uniform number."""
    device = probs_SW.device
    if any(p.min_p > 0 for p in params):
        floor_S1 = probs_SW.amax(-1, keepdim=True) * _column([p.min_p for p in params], device)
        probs_SW = probs_SW.masked_fill(probs_SW < floor_S1, 0)
    cumulative_SW = probs_SW.double().cumsum(-1)
    target_S1 = on_device(uniforms, torch.float64, device)[:, None] * cumulative_SW[:, -1:]
    # The first place beyond the target: never one of probability 0, whose sum equals the one before.
    return torch.searchsorted(cumulative_SW, target_S1, right=True).clamp_(max=probs_SW.shape[1] - 1)


def _keep_top(probs_SW: Tensor, totals_S1: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Zero all but the top-k, then all but the fewest that hold `top_p` of the rest; sorted input.

    totals: float64, of all tokens, of which the input may have the best only.
    """
    device, W = probs_SW.device, probs_SW.shape[1]
    k_S1 = on_device([min(p.top_k, W) if p.top_k > 0 else W for p in params], torch.int64, device)[:, None]
    limited_S1 = on_device([p.top_k > 0 for p in params], torch.bool, device)[:, None]
    places_W = torch.arange(W, device=device)
    probs_SW = probs_SW.masked_fill(places_W >= k_S1, 0)
    totals_S1 = torch.where(limited_S1, probs_SW.sum(-1, keepdim=True, dtype=torch.float64), totals_S1)
    # As float64, in which no order of summation moves the end.
    before_SW = probs_SW.cumsum(-1, dtype=torch.float64) - probs_SW
    top_p_S1 = _top_p(params, device)
    beyond_SW = before_SW >= top_p_S1 * totals_S1
    # top_p 1 keeps all, for rounding of the sums must not cut the tail; the first is always kept.
    return probs_SW.masked_fill(beyond_SW & (top_p_S1 < 1) & (places_W > 0), 0)


def _top_p(params: Sequence[SamplingParams], device: torch.device) -> Tensor:
    return _column([p.top_p for p in params], device)


def _column(values: Sequence[float], device: torch.device) -> Tensor:
    return on_device(values, torch.float32, device)[:, None]
