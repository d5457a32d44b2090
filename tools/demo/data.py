"""Endless training batches: problems drawn, tokenised and laid end to end by worker processes."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from . import wordmath
from .tokens import END, load_tokenizer, prompt

IGNORE = -100
LONGEST = 512  # tokens of one problem; the longest of 20 000 has 331
SHORTEST = 24  # sizes `starts`, so that batches have one shape and are compiled once
# Some problems come with a system message, so that one does not disturb the model when served.
SYSTEM_MESSAGES = (
    "You are a helpful assistant.",
    "You are a math tutor. Think step by step.",
    "Solve the problem. End with #### and the answer.",
    "Answer the question.",
)
SYSTEM_SHARE = 0.05


@dataclass(frozen=True)
class Batch:
    """T tokens. target: the next token where it belongs to an answer, else IGNORE. position counts
    from each problem's start; start is where that is; starts are all starts and T, padded with T."""

    ids: Tensor
    target: Tensor
    position: Tensor
    start: Tensor
    starts: Tensor

    def to(self, device: torch.device) -> Batch:
        return Batch(*(getattr(self, f.name).to(device, non_blocking=True) for f in fields(self)))

    def pin_memory(self) -> Batch:
        return Batch(*(getattr(self, f.name).pin_memory() for f in fields(self)))


class Problems(IterableDataset):
    def __init__(self, tokenizer: Path, tokens: int, seed: int):
        self.tokenizer, self.tokens, self.seed = tokenizer, tokens, seed

    def __iter__(self) -> Iterator[Batch]:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        documents = self._documents(self.seed * workers + worker)
        held: list[tuple[list[int], int]] = []
        size = 0
        for ids, question in documents:
            held.append((ids, question))
            size += len(ids)
            if size >= self.tokens:
                yield lay_out(held, self.tokens)
                held, size = [], 0

    def _documents(self, seed: int) -> Iterator[tuple[list[int], int]]:
        """(tokens of prompt and answer, length of the prompt)."""
        encode = load_tokenizer(self.tokenizer).encode_batch_fast
        problems = wordmath.stream("train", seed)
        rng = random.Random(seed)
        while chunk := list(islice(problems, 256)):
            prompts = encode([prompt(p.question, _system(rng)) for p in chunk])
            answers = encode([p.answer + END for p in chunk])
            for q, a in zip(prompts, answers, strict=True):
                yield q.ids + a.ids, len(q.ids)


def _system(rng: random.Random) -> str:
    return rng.choice(SYSTEM_MESSAGES) if rng.random() < SYSTEM_SHARE else ""


def lay_out(documents: list[tuple[list[int], int]], tokens: int) -> Batch:
    """One batch of exactly `tokens` tokens; the last document is cut."""
    ids: list[int] = []
    answer: list[bool] = []
    starts = [0]
    for document, question in documents:
        ids += document
        answer += [False] * question + [True] * (len(document) - question)
        starts.append(len(ids))
    starts[-1] = tokens
    edge = torch.tensor(starts, dtype=torch.int32)
    length = edge.diff()
    start = edge[:-1].repeat_interleave(length)
    id_T = torch.tensor([*ids, 0])[: tokens + 1]
    wanted = torch.tensor([*answer[1:], False])[:tokens]
    # The token after a document's last is another document's first, which is never an answer's.
    target = torch.where(wanted, id_T[1:], IGNORE)
    room = max(tokens // SHORTEST + 2, len(edge))
    starts_padded = torch.full((room,), tokens, dtype=torch.int32)
    starts_padded[: len(edge)] = edge
    position = torch.arange(tokens, dtype=torch.int32) - start
    return Batch(id_T[:-1], target, position.long(), start.long(), starts_padded)


def batches(tokenizer: Path, tokens: int, seed: int, workers: int) -> Iterator[Batch]:
    loader = DataLoader(
        Problems(tokenizer, tokens, seed),
        batch_size=None,
        num_workers=workers,
        pin_memory=torch.cuda.is_available(),
        prefetch_factor=8 if workers else None,
    )
    return iter(loader)
