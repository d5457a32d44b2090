"""Small random checkpoints in the real on-disk formats, written by transformers itself."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_position_embeddings": 512,
    "eos_token_id": 257,
    "bos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
QWEN2_MOE = QWEN3_MOE | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 64}
QWEN2_MOE.pop("head_dim")

CHAT_TEMPLATE = (
    "{% if reasoning_effort is defined %}effort: {{ reasoning_effort }}\n{% endif %}"
    "{% for m in messages %}{{ m['role'] }}{% if m.name %} ({{ m.name }}){% endif %}: "
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m['content'] }}\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}assistant: "
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}"
)


def write_model(folder: Path, base: dict = QWEN3_MOE, *, dtype=torch.float32, seed=0, **overrides):
    """Save a randomly initialised model and a byte-level tokenizer to `folder`; returns the model.

    Router and norm weights are perturbed so that routing and norms are not degenerate.
    """
    fields = base | overrides
    config = AutoConfig.for_model(**fields)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval().to(dtype)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.add_(0.1 * torch.randn_like(p))
            else:
                p.copy_(torch.randn_like(p) * (0.5 if name.endswith("gate.weight") else 0.08))
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return model


def write_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer without merges: 256 bytes, then <|pad|>=256 and <|end|>=257."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: i for i, symbol in enumerate(alphabet)}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<|pad|>", "<|end|>"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|end|>", pad_token="<|pad|>", chat_template=CHAT_TEMPLATE
    )
    tokenizer.save_pretrained(folder)
    return tokenizer
