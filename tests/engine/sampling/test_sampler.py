"""The batched sampler against transformers' logits processors, numpy, and counted frequencies."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.generation import logits_process as hf

from turnout.engine.messages import AddRequest
from turnout.engine.sampling import sampler
from turnout.engine.sampling.sampler import (
    Sampler,
    Scores,
    _best,
    _draw,
    _keep_top,
    draw_ordered,
    uniform,
)
from turnout.engine.sampling_params import SamplingParams
from turnout.engine.scheduler.request import Request
from turnout.errors import UserError

V = 40
CPU = torch.device("cpu")


def start(
    row: int = 0, prompt: tuple[int, ...] = (1, 2, 3), output: tuple[int, ...] = (), **fields: object
) -> Request:
    params = SamplingParams(max_tokens=100, **fields)  # type: ignore[arg-type]
    message = AddRequest(id=str(row), prompt_ids=list(prompt), sampling=params)
    request = Request.start(message, seed=row, eos_token_ids=(V - 1,))
    request.row = row
    request.tokens += output
    return request


def random_logits(rows: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(seed)) * 2


def adjusted(logits: Tensor, requests: list[Request]) -> Tensor:
    """What the sampler chooses from, before temperature."""
    logits = logits.clone()
    Sampler(V, 16, CPU)._adjust(logits, requests, [r.num_output for r in requests])
    return logits


@pytest.mark.parametrize("penalty", [0.5, 1.3, 2.0])
def test_repetition_penalty_equals_transformers(penalty: float) -> None:
    requests = [start(i, (1, 2, 3), (4, 5, i), repetition_penalty=penalty) for i in range(6)]
    logits = random_logits(6)
    got = adjusted(logits, requests)
    processor = hf.RepetitionPenaltyLogitsProcessor(penalty)
    for i, request in enumerate(requests):
        expected = processor(torch.tensor([request.tokens]), logits[i : i + 1].clone())
        torch.testing.assert_close(got[i : i + 1], expected)


def test_presence_and_frequency_penalties_by_their_definition() -> None:
    outputs = [(), (4,), (4, 4, 5), (7,) * 9]
    requests = [
        start(i, (4, 6), out, presence_penalty=0.7, frequency_penalty=-0.3) for i, out in enumerate(outputs)
    ]
    logits = random_logits(4)
    got = adjusted(logits, requests).numpy()
    for i, out in enumerate(outputs):
        counts = np.bincount(np.array(out, dtype=np.int64), minlength=V)
        expected = logits[i].numpy() - 0.7 * (counts > 0) + 0.3 * counts
        np.testing.assert_allclose(got[i], expected, rtol=1e-6, atol=1e-6)


def test_logit_bias_and_min_tokens_equal_transformers() -> None:
    biased = start(0, logit_bias={3: 5.0, 7: -100.0})
    early = start(1, output=(5,), min_tokens=2, stop_token_ids=(9,))
    late = start(2, output=(5, 6), min_tokens=2, stop_token_ids=(9,))
    logits = random_logits(3)
    got = adjusted(logits, [biased, early, late])
    expected = hf.SequenceBiasLogitsProcessor([[[3], 5.0], [[7], -100.0]])(
        torch.tensor([biased.tokens]), logits[:1].clone()
    )
    torch.testing.assert_close(got[:1], expected)
    expected = hf.MinNewTokensLengthLogitsProcessor(3, 2, [V - 1, 9])(
        torch.tensor([early.tokens]), logits[1:2].clone()
    )
    torch.testing.assert_close(got[1:2], expected)
    torch.testing.assert_close(got[2], logits[2])


def test_counts_follow_a_row_that_changes_hands() -> None:
    sampler = Sampler(V, 4, CPU)
    zeros = torch.zeros(1, V)
    first = start(2, output=(4,), frequency_penalty=1.0)
    for output in ((4,), (4, 4), (4, 4, 5)):
        first.tokens[first.num_prompt :] = output
        logits = zeros.clone()
        sampler._adjust(logits, [first], [first.num_output])
        assert logits[0].tolist() == [-float(output.count(token)) for token in range(V)]
    second = start(2, output=(8,), frequency_penalty=1.0)
    logits = zeros.clone()
    sampler._adjust(logits, [second], [second.num_output])
    assert logits[0].nonzero().flatten().tolist() == [8]


@pytest.mark.parametrize("top_k", [0, 1, 5, V, 2**64])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.5, 1e-6, 1e-320])
@pytest.mark.parametrize("min_p", [0.0, 0.1])
def test_the_tokens_that_may_be_drawn_are_those_of_transformers(
    top_k: int, top_p: float, min_p: float
) -> None:
    logits = random_logits(8)
    params = [SamplingParams(temperature=1.3, top_k=top_k, top_p=top_p, min_p=min_p)] * 8
    kept = logits / 1.3
    ids = torch.zeros(8, 1, dtype=torch.int64)
    if top_k:
        kept = hf.TopKLogitsWarper(min(top_k, V))(ids, kept)
    if top_p < 1:
        kept = hf.TopPLogitsWarper(top_p)(ids, kept)
    if min_p:
        kept = hf.MinPLogitsWarper(min_p)(ids, kept)
    allowed = kept.isfinite()
    drawn = torch.zeros(8, V, dtype=torch.bool)
    for place in range(150):
        uniforms = [uniform(seed, place) for seed in range(8)]
        draw = draw_ordered if top_k or top_p < 1 else _draw
        for i, token in enumerate(draw(logits.clone(), params, uniforms)):
            drawn[i, token] = True
    assert not (drawn & ~allowed).any()
    likely = torch.softmax(kept, -1) > 0.08
    assert (drawn | ~likely).all()


def test_looking_at_the_best_first_draws_as_looking_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peaked rows and flat ones, for which the best are too few, with many equal probabilities; alone too."""
    draw = torch.Generator().manual_seed(5)
    logits = (
        torch.randn(6, 3000, generator=draw).mul_(torch.tensor([[0.1, 1, 2, 3, 4, 6]]).T).bfloat16().float()
    )
    kinds = [{"top_k": 50}, {"top_p": 0.9}, {"top_k": 2000, "top_p": 0.99}, {"top_p": 0.3, "min_p": 0.01}]
    for kind in kinds:
        params = [SamplingParams(temperature=0.9, **kind)] * 6
        for place in range(20):
            uniforms = [uniform(seed, place) for seed in range(6)]
            monkeypatch.setattr(sampler, "WIDTH", 10**6)
            expected = draw_ordered(logits, params, uniforms).tolist()
            monkeypatch.setattr(sampler, "WIDTH", 128)
            assert draw_ordered(logits, params, uniforms).tolist() == expected
            alone = [draw_ordered(logits[i : i + 1], params[:1], uniforms[i : i + 1])[0] for i in range(6)]
            assert alone == expected
    probs, tokens = _best(torch.softmax(logits, -1))
    wanted, order = torch.softmax(logits, -1).sort(dim=-1, descending=True, stable=True)
    assert torch.equal(probs, wanted[:, :128])
    assert torch.equal(tokens, order[:, :128])


def test_frequencies_follow_the_distribution() -> None:
    logits = random_logits(1, seed=3)
    expected = torch.softmax(logits[0] / 0.7, -1).double()
    n = 4000
    params = [SamplingParams(temperature=0.7)] * n
    tokens = _draw(logits.expand(n, V), params, [uniform(seed, 0) for seed in range(n)])
    seen = torch.bincount(tokens, minlength=V).double()
    error = (seen - n * expected).abs() / (n * expected * (1 - expected)).sqrt().clamp(min=1)
    assert error.max() < 4.5


def test_uniform_numbers_are_uniform_and_reproducible() -> None:
    numbers = np.array([uniform(seed, place) for seed in (-(2**63), 0, 5) for place in range(4000)])
    assert ((numbers >= 0) & (numbers < 1)).all()
    counts = np.histogram(numbers, bins=20, range=(0, 1))[0]
    assert (((counts - 600) ** 2) / 600).sum() < 45  # chi-squared, 19 degrees of freedom: p < 0.001
    assert len(set(numbers)) == len(numbers)
    assert uniform(1, 2) == uniform(1, 2)


def test_a_draw_does_not_depend_on_the_batch() -> None:
    logits = random_logits(8)
    requests = [
        start(0, temperature=0.9),
        start(1, temperature=1.5, top_k=3),
        start(2),
        start(3, temperature=0.3, top_p=0.8, presence_penalty=1.0),
        start(4, logprobs=2),
        start(5, temperature=1.0, min_p=0.2, logit_bias={1: 3.0}),
        start(6, repetition_penalty=1.4),
        start(7, temperature=2.0, min_tokens=9),
    ]
    together = Sampler(V, 16, CPU)(logits.clone(), requests).read()
    for i, request in enumerate(requests):
        alone = Sampler(V, 16, CPU)(logits[i : i + 1].clone(), [request]).read()
        assert alone.token_ids == together.token_ids[i : i + 1]
        assert (alone.logprobs[0] is None) == (together.logprobs[i] is None) == (i != 4)


@pytest.mark.parametrize("temperature", [1e-320, 1e-30, 1e-3])
def test_a_temperature_near_zero_is_greedy(temperature: float) -> None:
    logits = random_logits(8) * 50
    drawn = Sampler(V, 16, CPU)(logits.clone(), [start(i, temperature=temperature) for i in range(8)]).read()
    assert drawn.token_ids == logits.argmax(-1).tolist()


def test_rows_that_are_not_finite_are_told_and_harm_no_other() -> None:
    logits = random_logits(5)
    logits[1, 7] = float("nan")
    logits[2] = float("-inf")
    logits[3, 7] = float("inf")
    for fields in ({}, {"temperature": 1.0, "top_p": 0.9}, {"logprobs": 3}):
        sampled = Sampler(V, 16, CPU)(logits.clone(), [start(i, **fields) for i in range(5)]).read()
        assert sampled.valid == [True, False, False, False, True]
        assert all(0 <= token < V for token in sampled.token_ids)
    greedy = Sampler(V, 16, CPU)(logits.clone(), [start(i) for i in range(5)]).read()
    assert [greedy.token_ids[i] for i in (0, 4)] == logits[[0, 4]].argmax(-1).tolist()


def test_equal_logits_choose_the_lowest_id() -> None:
    logits = torch.zeros(3, V)
    logits[1, [11, 30, 35]] = 2.0
    logits[2, [39, 8]] = 2.0
    assert Sampler(V, 16, CPU)(logits.clone(), [start(i) for i in range(3)]).read().token_ids == [0, 11, 8]


def test_log_probabilities_are_the_models_own() -> None:
    logits = random_logits(2)
    requests = [start(0, temperature=3.0, logprobs=5, logit_bias={0: 50.0}), start(1, logprobs=0)]
    sampled = Sampler(V, 16, CPU)(logits.clone(), requests).read()
    scores = torch.log_softmax(logits.double(), -1)
    for i, entry in enumerate(sampled.logprobs):
        assert entry is not None
        token = sampled.token_ids[i]
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(float(scores[i, token]), abs=1e-5)
        assert entry.rank == 1 + int((scores[i] > scores[i, token]).sum())
        best = scores[i].topk(5 if i == 0 else 0)
        assert [t for t, _ in entry.top] == best.indices.tolist()
        assert [p for _, p in entry.top] == pytest.approx(best.values.tolist(), abs=1e-5)
    assert sampled.token_ids[0] == 0
    assert sampled.token_ids[1] == int(logits[1].argmax())


def test_more_alternatives_than_tokens() -> None:
    scores = Scores([0], torch.log_softmax(torch.randn(1, 3), -1), torch.tensor([0]), [20])
    (entry,) = scores.read()
    assert len(entry.top) == 3


def test_top_p_one_keeps_the_tail_that_rounding_would_cut() -> None:
    probs = torch.softmax(torch.linspace(10, -10, 4000), 0)[None]
    kept = _keep_top(probs, probs.sum(-1, keepdim=True), [SamplingParams(top_p=1.0)])
    assert torch.equal(kept, probs)


def test_a_stop_string_by_itself_is_no_list_of_letters():
    assert SamplingParams(stop="END").stop == ("END",)  # type: ignore[arg-type]
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("max_tokens", "5", "must be int"),
        ("max_tokens", True, "must be int"),
        ("temperature", None, "must be float"),
        ("top_p", 2, "must lie in (0, 1]"),
        ("seed", 2**70, "must fit a 64-bit integer"),
        ("stop", [1], "must be tuple[str, ...]"),
        ("logit_bias", {"1": 2}, "must be dict[int, float]"),
    ],
)
def test_wrong_parameters_are_refused_where_they_are_made(name, value, rule):
    with pytest.raises(UserError, match=re.escape(rule)) as caught:
        SamplingParams(**{name: value})
    assert str(caught.value).startswith(f"{name}=")
