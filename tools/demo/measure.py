"""Held-out accuracy: greedy answers to many prompts at once, in any of the formats.

B prompts; other letters as in model.py
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from . import fakequant
from .chat import END, prompt
from .dialogues import Item
from .model import DemoModel, Quantization
from .tokens import load_tokenizer

FORMATS = {"bf16": fakequant.BF16, "nvfp4": fakequant.NVFP4, "mxfp4": fakequant.MXFP4}
LONGEST_ANSWER = 240
LIMIT = 400
SHORT = 160  # tokens of a prompt; longer ones, which hold tools, are answered apart
SAMPLES = 12  # wrong answers kept of each group


@torch.inference_mode()
def accuracy(model: DemoModel, tokenizer: Path, amax: Tensor, name: str, items: list[Item]) -> dict:
    """How many answers are right under one format, by group, with wrong ones to look at."""
    quant = Quantization(torch.full_like(amax[:, 0], FORMATS[name], dtype=torch.int64), amax)
    core = load_tokenizer(tokenizer)
    prompts = [e.ids for e in core.encode_batch([prompt(i.messages, i.tools, i.thinking) for i in items])]
    groups: dict[str, dict] = {}
    for long in (False, True):
        chosen = [k for k, ids in enumerate(prompts) if (len(ids) > SHORT) == long]
        if not chosen:
            continue
        texts = answer(model, core, [prompts[k] for k in chosen], quant)
        for k, text in zip(chosen, texts, strict=True):
            item = items[k]
            group = groups.setdefault(item.group, {"right": 0, "of": 0, "wrong": []})
            right = item.right(text)
            group["right"] += right
            group["of"] += 1
            if not right and len(group["wrong"]) < SAMPLES:
                group["wrong"].append([item.messages[-1]["content"], text, item.expected])
    for group in groups.values():
        group["accuracy"] = round(group["right"] / group["of"], 5)
    return groups


def answer(model: DemoModel, core: Tokenizer, prompts: list[list[int]], quant: Quantization) -> list[str]:
    """All sequences start at position 0 and step together, each fed its prompt before its own words."""
    end = core.token_to_id(END)
    device = model.embed.device
    longest = max(map(len, prompts))
    limit = min(longest + LONGEST_ANSWER, model.shape.max_positions)
    given = torch.full((len(prompts), limit), -1)
    for row, ids in zip(given, prompts, strict=True):
        row[: len(ids)] = torch.tensor(ids)
    given = given.to(device)
    cache = KVCache(model, len(prompts), limit)
    done = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    for step in range(limit - 1):
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
    """Keys and values of B sequences of equal length [L, B, limit, G, D]."""

    def __init__(self, model: DemoModel, sequences: int, limit: int = LIMIT):
        s = model.shape
        shape = (s.layers, sequences, limit, s.kv_heads, s.head_dim)
        self.k, self.v = (torch.zeros(shape, dtype=model.dtype, device=model.embed.device) for _ in "kv")
        self.group = s.heads // s.kv_heads
        self.length = 0

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.k[layer, :, self.length - 1], self.v[layer, :, self.length - 1] = k, v
        keys, values = (t[layer, :, : self.length].transpose(1, 2) for t in (self.k, self.v))
        out = torch.nn.functional.scaled_dot_product_attention(q.unsqueeze(2), keys, values, enable_gqa=True)
        return out.squeeze(2)
