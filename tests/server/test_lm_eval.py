"""lm-eval's `local-completions` scores a tiny local task; transformers computes the same by itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

QUESTIONS = [
    {"question": "two and two is", "choices": [" four", " five", " a pear"], "answer": 0},
    {"question": "the sky is", "choices": [" blue", " loud", " été"], "answer": 2},
    {"question": "after Monday comes", "choices": [" Tuesday", " noon", " cheese"], "answer": 1},
    {"question": "x", "choices": ["y", "yy", " zzz zzz zzz"], "answer": 1},
]


@torch.no_grad()
def scores_by_hand(model, tokenizer, context: str, continuation: str) -> tuple[float, bool]:
    """Sum of log-probabilities of `continuation` after `context`, and whether it is the greedy answer."""
    before, after = tokenizer.encode(context), tokenizer.encode(continuation)
    logits = model(torch.tensor([before + after])).logits[0].float()
    rows = torch.log_softmax(logits, -1)[len(before) - 1 : -1]
    total = sum(row[token].item() for row, token in zip(rows, after, strict=True))
    return total, rows.argmax(-1).tolist() == after


def test_scores_equal_transformers(
    base_url: str, tiny_folder: Path, reference, tokenizer, tmp_path: Path, monkeypatch
):
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    from lm_eval import evaluate
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    data = tmp_path / "questions.jsonl"
    data.write_text("\n".join(json.dumps(question) for question in QUESTIONS))
    task = ConfigurableTask(
        config={
            "task": "tiny",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}},
            "test_split": "test",
            "output_type": "multiple_choice",
            "doc_to_text": "{{question}}",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "{{answer}}",
            "target_delimiter": "",
            "metric_list": [{"metric": "acc"}],
        }
    )
    model = LocalCompletionsAPI(
        model="tiny",
        base_url=f"{base_url}/completions",
        tokenizer_backend="huggingface",
        tokenizer=str(tiny_folder),
        batch_size=4,
        num_concurrent=2,
        max_length=512,
    )
    results = evaluate(lm=model, task_dict={"tiny": task}, bootstrap_iters=0)
    samples = sorted(results["samples"]["tiny"], key=lambda sample: sample["doc_id"])
    assert len(samples) == len(QUESTIONS)
    correct = 0
    for question, sample in zip(QUESTIONS, samples, strict=True):
        expected = [
            scores_by_hand(reference, tokenizer, question["question"], c) for c in question["choices"]
        ]
        for (logprob, greedy), (found, found_greedy) in zip(expected, sample["filtered_resps"], strict=True):
            assert float(found) == pytest.approx(logprob, abs=1e-3)
            assert str(found_greedy) == str(greedy)
        totals = [logprob for logprob, _ in expected]
        correct += totals.index(max(totals)) == question["answer"]
    assert results["results"]["tiny"]["acc,none"] == correct / len(QUESTIONS)
