"""Held-out accuracy: greedy answers to many questions at once, in any of the formats.

B questions; other letters as in model.py
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from turnout.evals.wordmath import extract_answer

from . import fakequant, wordmath
from .model import DemoModel, Quantization
from .tokens import END, load_tokenizer, prompt

FORMATS = {"bf16": fakequant.BF16, "nvfp4": fakequant.NVFP4, "mxfp4": fakequant.MXFP4}
LIMIT = 400


@torch.inference_mode()
def accuracy(model: DemoModel, tokenizer: Path, amax: Tensor, name: str, count: int, seed: int) -> dict:
    """Correct answers of `count` held-out questions under one format, and which templates fail."""
    quant = Quantization(torch.full_like(amax[:, 0], FORMATS[name], dtype=torch.int64), amax)
    problems = wordmath.generate("heldout", count, seed)
    texts = answer(model, tokenizer, [p.question for p in problems], quant)
    wrong: dict[str, int] = {}
    samples = []
    for problem, text in zip(problems, texts, strict=True):
        if extract_answer(text) != problem.final:
            wrong[problem.template] = wrong.get(problem.template, 0) + 1
            samples.append([problem.question, text, problem.answer])
    failed = sum(wrong.values())
    return {
        "accuracy": 1 - failed / count,
        "questions": count,
        "seed": seed,
        "wrong": dict(sorted(wrong.items(), key=lambda item: -item[1])),
        "samples": samples[:20],
    }


def answer(model: DemoModel, tokenizer: Path, questions: list[str], quant: Quantization) -> list[str]:
    """All sequences start at position 0 and step together, each fed its question before its own words."""
    core = load_tokenizer(tokenizer)
    end = core.token_to_id(END)
    prompts = [e.ids for e in core.encode_batch([prompt(q) for q in questions])]
    device = model.embed.device
    longest = max(map(len, prompts))
    given = torch.full((len(prompts), LIMIT), -1, device=device)
    for row, ids in zip(given, prompts, strict=True):
        row[: len(ids)] = torch.tensor(ids, device=device)
    cache = KVCache(model, len(prompts))
    done = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    for step in range(LIMIT - 1):
        cache.length = step + 1
        position = torch.full((len(prompts),), step, device=device)
        out = model(given[:, step], position, cache.attend, quant)
        chosen = model.logits(out.hidden).argmax(dim=-1)
        following = given[:, step + 1]
        done |= (following < 0) & (chosen == end)
        given[:, step + 1] = torch.where(following < 0, chosen, following)
        if step > longest and step % 16 == 0 and bool(done.all()):
            break
    rows = [row[len(ids) :] for row, ids in zip(given.tolist(), prompts, strict=True)]
    return core.decode_batch([row[: row.index(end)] if end in row else row for row in _written(rows)])


def _written(rows: list[list[int]]) -> list[list[int]]:
    return [[i for i in row if i >= 0] for row in rows]


class KVCache:
    """Keys and values of B sequences of equal length [L, B, LIMIT, G, D]."""

    def __init__(self, model: DemoModel, sequences: int):
        s = model.shape
        shape = (s.layers, sequences, LIMIT, s.kv_heads, s.head_dim)
        self.k, self.v = (torch.zeros(shape, dtype=model.dtype, device=model.embed.device) for _ in "kv")
        self.group = s.heads // s.kv_heads
        self.length = 0

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.k[layer, :, self.length - 1], self.v[layer, :, self.length - 1] = k, v
        keys, values = (t[layer, :, : self.length].transpose(1, 2) for t in (self.k, self.v))
        out = torch.nn.functional.scaled_dot_product_attention(q.unsqueeze(2), keys, values, enable_gqa=True)
        return out.squeeze(2)
