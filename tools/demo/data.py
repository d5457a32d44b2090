"""Endless training batches: conversations drawn, tokenised and laid end to end by worker processes."""

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

from .chat import segments
from .dialogues import Conversation, stream, word_problems
from .tokens import load_tokenizer

IGNORE = -100
LONGEST = 1024  # tokens of one conversation; longer ones are left out
ROW = 512  # tokens of a row of word problems, of which the longest has 315
SHORTEST = 24  # sizes `starts`, so that batches have one shape and are compiled once


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


# Some questions are split into smaller tokens than need be (I. Provilkov et al., "BPE-dropout", 2020), so that a word
# that training never had resembles those that share parts with it.
BROKEN_SHARE, MERGE_DROPOUT = 0.35, 0.15
# The tokens of one piece, and whether they are learned.
Piece = tuple[list[int], bool]


class Conversations(IterableDataset):
    """Batches of `tokens` tokens, in rows of `row` tokens of which each begins with a document."""

    def __init__(self, tokenizer: Path, tokens: int, seed: str, row: int, *, problems_only: bool):
        self.tokenizer, self.tokens, self.seed, self.row = tokenizer, tokens, seed, row
        self.stream = word_problems if problems_only else stream
        self.broken_share = 0.0 if problems_only else BROKEN_SHARE

    def __iter__(self) -> Iterator[Batch]:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        torch.set_num_threads(1)
        info = get_worker_info()
        worker = info.id if info else 0
        held: list[list[Piece]] = []
        rows: list[list[list[Piece]]] = []
        size = 0
        for document in self._documents(f"{self.seed}/{worker}"):
            length = sum(len(ids) for ids, _ in document)
            if length > min(LONGEST, self.row):
                continue
            held.append(document)
            size += length
            if size >= self.row:
                rows.append(held)
                held, size = [], 0
            if len(rows) == self.tokens // self.row:
                yield lay_out(rows, self.row)
                rows = []

    def _documents(self, seed: str) -> Iterator[list[Piece]]:
        exact, broken = load_tokenizer(self.tokenizer), load_tokenizer(self.tokenizer)
        broken.model.dropout = MERGE_DROPOUT
        rng = random.Random(seed)
        conversations = self.stream(seed)
        while True:
            parts = [_pieces(c) for c in islice(conversations, 256)]
            # What is asked; what is answered is always written in the usual tokens.
            apart = [rng.random() < self.broken_share for _ in parts]
            wanted = [
                (text, other and not learned)
                for pieces, other in zip(parts, apart, strict=True)
                for text, learned in pieces
            ]
            encoded = {
                other: iter(core.encode_batch_fast([text for text, kind in wanted if kind == other]))
                for other, core in ((False, exact), (True, broken))
            }
            for pieces, other in zip(parts, apart, strict=True):
                yield [(next(encoded[other and not learned]).ids, learned) for _, learned in pieces]


def _pieces(conversation: Conversation) -> list[tuple[str, bool]]:
    """Neighbours that are not learned joined, the answers to skip among them, and the last line end left out."""
    out: list[tuple[str, bool]] = []
    skipped = 0
    for text, learned in segments(conversation.messages, conversation.tools):
        if learned and skipped < conversation.skip:
            skipped, learned = skipped + 1, False
        if out and not learned and not out[-1][1]:
            text = out.pop()[0] + text
        out.append((text, learned))
    return out[:-1]


def lay_out(rows: list[list[list[Piece]]], row: int) -> Batch:
    """One batch of rows of exactly `row` tokens each; the last document of each is cut."""
    ids: list[int] = []
    answer: list[bool] = []
    starts = [0]
    for end, documents in enumerate(rows, 1):
        for document in documents:
            for piece, learned in document:
                ids += piece
                answer += [learned] * len(piece)
            starts.append(len(ids))
        del ids[end * row :], answer[end * row :]
        starts[-1] = len(ids)
    tokens = len(ids)
    edge = torch.tensor(starts, dtype=torch.int32)
    length = edge.diff()
    start = edge[:-1].repeat_interleave(length)
    id_T = torch.tensor([*ids, 0])
    # The token after a document's last is another document's first, which is never an answer's.
    target = torch.where(torch.tensor([*answer[1:], False]), id_T[1:], IGNORE)
    room = max(tokens // SHORTEST + 2, len(edge))
    starts_padded = torch.full((room,), tokens, dtype=torch.int32)
    starts_padded[: len(edge)] = edge
    position = torch.arange(tokens, dtype=torch.int32) - start
    return Batch(id_T[:-1], target, position.long(), start.long(), starts_padded)


def batches(
    tokenizer: Path, tokens: int, seed: str, workers: int, row: int, *, problems_only: bool = False
) -> Iterator[Batch]:
    loader = DataLoader(
        Conversations(tokenizer, tokens, seed, row, problems_only=problems_only),
        batch_size=None,
        num_workers=workers,
        pin_memory=torch.cuda.is_available(),
        prefetch_factor=8 if workers else None,
    )
    return iter(loader)
