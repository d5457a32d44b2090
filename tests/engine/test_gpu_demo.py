"""The same engine on a GPU: the bundled model answers as it does on the CPU."""

from __future__ import annotations

import pytest
import torch

from turnout import LLM, SamplingParams
from turnout.evals import wordmath

QUESTIONS = 100


def answers(device: str, **flags) -> tuple[list[str], dict]:
    problems = wordmath.heldout(QUESTIONS, seed=7)
    asked = [[{"role": "user", "content": problem.question}] for problem in problems]
    with LLM("demo", device=device, **flags) as llm:
        completions = llm.chat(asked, SamplingParams(max_tokens=400, temperature=0), progress=False)
        return [completion.text for completion in completions], llm.info()


def accuracy(texts: list[str]) -> float:
    problems = wordmath.heldout(QUESTIONS, seed=7)
    right = sum(wordmath.extract_answer(t) == p.final for t, p in zip(texts, problems, strict=True))
    return right / QUESTIONS


@pytest.fixture(scope="module")
def on_cpu() -> list[str]:
    return answers("cpu")[0]


@pytest.mark.gpu
@pytest.mark.parametrize("runner", ["hopper", "torch"])
def test_greedy_answers_equal_the_cpus(on_cpu: list[str], runner: str):
    texts, info = answers("cuda", moe_runner_backend=runner)
    assert info["plan"]["decode"]["runner"] == runner
    same = sum(a == b for a, b in zip(texts, on_cpu, strict=True)) / QUESTIONS
    assert same >= 0.98, f"{same:.0%} of the answers are the same"
    assert accuracy(texts) >= accuracy(on_cpu) - 0.01


@pytest.mark.gpu
def test_auto_takes_the_fast_runner():
    texts, info = answers("cuda")
    fast = torch.cuda.get_device_capability() == (9, 0)
    assert info["plan"]["decode"]["runner"] == ("hopper" if fast else "torch")
    assert accuracy(texts) >= 0.95


@pytest.mark.gpu
def test_chunks_and_batches_change_nothing_that_matters():
    whole, _ = answers("cuda")
    cut, _ = answers("cuda", chunked_prefill_size=16, max_running_requests=7)
    assert sum(a == b for a, b in zip(whole, cut, strict=True)) >= 0.98 * QUESTIONS
