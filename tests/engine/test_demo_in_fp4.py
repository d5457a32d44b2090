"""The demo answers the same in W4A4 through FlashInfer's runners as through the torch runner.

Their launches are computed on the CPU (tests/moe/backends/flashinfer/flashinfer_contract.py). To see the
accuracy:

    python -m tests.engine.test_demo_in_fp4 200
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from tests.moe.backends.flashinfer.flashinfer_contract import Launches, library
from turnout import LLM, SamplingParams
from turnout.engine.llm import Completion
from turnout.evals.tasks import Question, is_correct, load_task
from turnout.moe.capabilities.declared import RUNNERS

THROUGH = ("flashinfer_cutedsl", "flashinfer_trtllm")


class Keeping(Launches):
    """Decodes a layer's weights once: here they do not change."""

    def __init__(self, originals: dict[str, Callable[..., Any]]) -> None:
        super().__init__(originals)
        self._kept: dict[int, Tensor] = {}

    def _decoded(self, codes: Tensor, decode: Callable[[], Tensor]) -> Tensor:
        if codes.data_ptr() not in self._kept:
            self._kept[codes.data_ptr()] = super()._decoded(codes, decode)
        return self._kept[codes.data_ptr()]


def answers(questions: list[Question], max_tokens: int) -> list[Completion]:
    """Greedy, with what the registry has as runner torch."""
    with LLM(
        "demo",
        device="cpu",
        dtype="bfloat16",
        moe_runner_backend="torch",
        moe_activation_dtype="nvfp4",
        moe_weight_storage="packed",
    ) as llm:
        asked = [[{"role": "user", "content": question.text}] for question in questions]
        return llm.chat(asked, SamplingParams(max_tokens=max_tokens, temperature=0), progress=False)


def through(
    runner: str, questions: list[Question], max_tokens: int, patch: pytest.MonkeyPatch
) -> tuple[list[Completion], list[str]]:
    """The same with `runner` in its place, and what was launched."""
    taken = replace(RUNNERS["torch"], implementation=RUNNERS[runner].implementation)
    with patch.context() as only_here, library(Keeping) as launches:
        only_here.setitem(RUNNERS.entries, "torch", taken)
        return answers(questions, max_tokens), launches.names


@pytest.mark.more
def test_the_same_tokens_through_each_runner(monkeypatch: pytest.MonkeyPatch):
    questions = load_task("wordmath", 2, 0)
    expected = [answer.token_ids for answer in answers(questions, 6)]
    for runner, launch in zip(THROUGH, ("cutedsl_w4a4", "trtllm"), strict=True):
        found, launched = through(runner, questions, 6, monkeypatch)
        assert [answer.token_ids for answer in found] == expected
        assert set(launched) == {"fp4_quantize", launch}


def main(count: int) -> None:
    questions = load_task("wordmath", count, 0)
    torch = answers(questions, 512)
    results = {"torch": torch}
    with pytest.MonkeyPatch.context() as patch:
        results |= {runner: through(runner, questions, 512, patch)[0] for runner in THROUGH}
    for runner, found in results.items():
        right = sum(is_correct(a.text, q) for a, q in zip(found, questions, strict=True))
        alike = sum(a.token_ids == t.token_ids for a, t in zip(found, torch, strict=True))
        print(f"{runner}: {right} of {count} right, {alike} with the very tokens of torch")


if __name__ == "__main__":
    main(int(sys.argv[1]))
