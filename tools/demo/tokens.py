"""The tokenizer: byte-level BPE with 1024 entries in which every digit is a token of its own.

Byte-level, so that any text can be written; digits apart, so that a number is always spelled the
same way and arithmetic works digit by digit.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from . import wordmath

VOCAB = 1024
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL = (PAD, START, END)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def prompt(question: str, system: str = "") -> str:
    """What CHAT_TEMPLATE makes of an optional system message and one question."""
    head = f"{START}system\n{system}{END}\n" if system else ""
    return f"{head}{START}user\n{question}{END}\n{START}assistant\n"


def train_tokenizer(folder: Path, problems: int = 20_000) -> None:
    """Learn the merges from training problems and write the tokenizer's files to `folder`."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    corpus = (f"user\nassistant\nsystem\n{p.question}\n{p.answer}" for p in _problems(problems))
    core.train_from_iterator(corpus, trainer)
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


def _problems(count: int) -> list[wordmath.Problem]:
    return wordmath.generate("train", count, seed=-1)
