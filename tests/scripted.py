"""A checkpoint whose model says what is written here: a real MoE model of Qwen3's kind.

Attention and experts add nothing, embeddings are one-hot, and the head maps each token to its successor, so
that the next token is a function of the last. A script is a list of pieces, each its own token; it begins
after the last token of a prompt.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from tests.tiny import QWEN3_MOE

END = "<|im_end|>"
HIDDEN = 384
# In the layout of Qwen3's own, and as strict about the system as Qwen3.5's. What the answer begins after, and
# so what it is, depends on the conversation: on tools, on thinking, on "?" or "!" at the end of the user's
# message, on the last digit of a tool's result.
CHAT_TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\\n<tool_call>{"name": ..., "arguments": ...}</tool_call>\\n' }}
{%- for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'system' and not loop.first %}{{ raise_exception('the system must come first') }}{% endif %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.reasoning_content %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}{{ m.content }}
{%- for call in m.tool_calls %}
{{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}
{{- '}</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant' }}
{%- if messages[-1].role == 'tool' %}{{ messages[-1].content }}
{%- elif not tools %}{{ ':' }}
{%- elif messages[-1].content[-1] in '?!' %}{{ messages[-1].content[-1] }}
{%- elif enable_thinking is defined and not enable_thinking %}{{ '<think></think>' }}
{%- else %}{{ '\\n' }}{% endif %}{% endif %}"""
SCRIPTS = {
    # with tools: thought, text, a call. Without thinking it begins after </think>
    "\n": [
        *("<think>", "\nThe user ", "wants a sum.\n", "</think>", "\n\nI will add.", "\n<tool_call>\n"),
        *('{"name": "add", "argu', 'ments": {"a": 19, ', '"b": 23}}', "\n</tool_", "call>"),
    ],
    # two calls
    "!": [
        *("<tool_call>{", '"name": "add", "arguments": {"a": 1, "b": 2}}', "</tool_call>"),
        *("\n<tool_call>{ ", '"name": "add", "arguments": {"a": 3, "b": 4}}', "</tool_call> "),
    ],
    # a call that is none
    "?": ["Well: ", "<tool_call>add(", "19, 23)", "</tool_call>.", " That was it."],
    # after a tool's result that ends in 2, and in anything else
    "2": ["The sum ", "is 42."],
    **{digit: [f"That is not right: {digit}"] for digit in "013456789"},
    ":": ["Hello", " there,", " how are you?"],
}


def write_scripted(folder: Path) -> None:
    tokenizer = _write_tokenizer(folder)
    fields = QWEN3_MOE | {
        "hidden_size": HIDDEN,
        "vocab_size": len(tokenizer),
        "max_position_embeddings": 4096,
        "eos_token_id": tokenizer.convert_tokens_to_ids(END),
        "num_hidden_layers": 1,
        "num_experts": 4,
    }
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields)).eval().float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name:
                weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(HIDDEN)[: len(tokenizer)])
        for trigger, pieces in SCRIPTS.items():
            for last, following in itertools.pairwise([trigger, *pieces, END]):
                model.lm_head.weight[_token(tokenizer, following), _token(tokenizer, last)] = 10.0
    model.save_pretrained(folder)


def _token(tokenizer: PreTrainedTokenizerFast, text: str) -> int:
    (token,) = tokenizer.encode(text)
    return token


def _write_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Byte-level without merges, and a token for each piece."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<|im_start|>", END])
    pieces = [piece for script in SCRIPTS.values() for piece in script]
    assert len(set(pieces)) == len(pieces), "each piece once, since it decides what follows"
    core.add_tokens(pieces)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=END, chat_template=CHAT_TEMPLATE)
    tokenizer.save_pretrained(folder)
    assert len(tokenizer) <= HIDDEN
    return tokenizer
