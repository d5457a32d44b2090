"""The tokenizer: byte-level BPE with 1536 entries in which every digit is a token of its own.

Byte-level, so that any text can be written; digits apart, so that a number is always spelled the
same way and arithmetic works digit by digit.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from .chat import CHAT_TEMPLATE, END, MARKS, PAD, SPECIAL, START, segments
from .dialogues import stream

VOCAB = 1536


def train_tokenizer(folder: Path, conversations: int = 40_000) -> None:
    """Learn the merges from training conversations and write the tokenizer's files to `folder`."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - len(MARKS),
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(_corpus(conversations), trainer)
    core.add_tokens([AddedToken(mark, normalized=False, special=False) for mark in MARKS])
    assert core.get_vocab_size() == VOCAB
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.save_pretrained(folder)
    _name_class(folder / "tokenizer_config.json")


def _name_class(path: Path) -> None:
    """Write the class name that transformers 4 and 5 both know."""
    config = json.loads(path.read_text(encoding="utf-8"))
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "additional_special_tokens": [START]}
    for name in ("backend", "extra_special_tokens"):
        config.pop(name, None)
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load_tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def token_id(tokenizer: Tokenizer, token: str) -> int:
    found = tokenizer.token_to_id(token)
    assert found is not None, f"the tokenizer has no {token}"
    return int(found)


def _corpus(conversations: int) -> Iterator[str]:
    marks = re.compile("|".join(map(re.escape, (*SPECIAL, *MARKS))))
    for conversation in islice(stream("tokenizer"), conversations):
        for text, _ in segments(conversation.messages, conversation.tools):
            yield marks.sub("\n", text)
