"""Names, shapes and types of all tensors of models that are written as they are released.

GPT-OSS holds experts in MXFP4, DeepSeek-V4 experts in MXFP4 and other linear layers in FP8, neither as
transformers saves it. config: the fields of the release's config.json.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from turnout.checkpoint.writer import Entry
from turnout.formats import fp8, mxfp4

GPT_OSS, DEEPSEEK_V4 = "GptOssForCausalLM", "DeepseekV4ForCausalLM"


def linear(module: str, *shape: int) -> Entry:
    """The weight of a layer in bfloat16."""
    return Entry(f"{module}.weight", torch.bfloat16, shape)


def _biased(module: str, rows: int, columns: int) -> list[Entry]:
    return [linear(module, rows, columns), Entry(f"{module}.bias", torch.bfloat16, (rows,))]


def gpt_oss_entries(config: Mapping[str, Any]) -> Iterator[list[Entry]]:
    """All tensors of a GPT-OSS model with experts in MXFP4, in groups that belong into one file."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    experts, inner = config["num_local_experts"], config["intermediate_size"]
    heads, queries = config["num_attention_heads"], config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    yield [linear("model.embed_tokens", vocab, hidden)]
    for i in range(config["num_hidden_layers"]):
        attention, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        yield [
            linear(f"model.layers.{i}.input_layernorm", hidden),
            *_biased(f"{attention}.q_proj", queries, hidden),
            *_biased(f"{attention}.k_proj", keys, hidden),
            *_biased(f"{attention}.v_proj", keys, hidden),
            *_biased(f"{attention}.o_proj", hidden, queries),
            Entry(f"{attention}.sinks", torch.bfloat16, (heads,)),
            linear(f"model.layers.{i}.post_attention_layernorm", hidden),
            *_biased(f"{mlp}.router", experts, hidden),
        ]
        for name, rows, columns in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
            blocks = (experts, rows, columns // mxfp4.GROUP)
            yield [
                Entry(f"{mlp}.experts.{name}_blocks", torch.uint8, (*blocks, mxfp4.GROUP // 2)),
                Entry(f"{mlp}.experts.{name}_scales", torch.uint8, blocks),
                Entry(f"{mlp}.experts.{name}_bias", torch.bfloat16, (experts, rows)),
            ]
    yield [linear("model.norm", hidden)]
    yield [linear("lm_head", vocab, hidden)]


def deepseek_v4_entries(config: Mapping[str, Any]) -> Iterator[list[Entry]]:
    """All tensors of a DeepSeek-V4 model as released, but for draft stages: experts in MXFP4, other linear
    layers in FP8."""
    hidden, vocab, count = config["hidden_size"], config["vocab_size"], config["num_hidden_layers"]
    experts, chosen = config["n_routed_experts"], config["num_experts_per_tok"]
    streams = config["hc_mult"]
    yield [linear("embed", vocab, hidden)]
    for i, rate in enumerate(config["compress_ratios"][:count]):
        layer, ffn = f"layers.{i}", f"layers.{i}.ffn"
        yield [
            *(linear(f"{layer}.{name}", hidden) for name in ("attn_norm", "ffn_norm")),
            *_streams(f"{layer}.hc_attn", streams * (streams + 2), 3, config),
            *_streams(f"{layer}.hc_ffn", streams * (streams + 2), 3, config),
            *_compressed_attention(f"{layer}.attn", rate, config),
            linear(f"{ffn}.gate", experts, hidden),
            Entry(f"{ffn}.gate.tid2eid", torch.int64, (vocab, chosen))
            if i < config["num_hash_layers"]
            else Entry(f"{ffn}.gate.bias", torch.float32, (experts,)),
            *_mlp(f"{ffn}.shared_experts", config, _fp8),
        ]
        yield from (_mlp(f"{ffn}.experts.{e}", config, _mxfp4) for e in range(experts))
    yield [linear("norm", hidden), *_streams("hc_head", streams, 1, config)]
    yield [linear("head", vocab, hidden)]


def _compressed_attention(prefix: str, rate: int, config: Mapping[str, Any]) -> Iterator[Entry]:
    hidden, rank, size = config["hidden_size"], config["q_lora_rank"], config["head_dim"]
    heads, groups = config["num_attention_heads"], config["o_groups"]
    outputs = groups * config["o_lora_rank"]
    yield from _fp8(f"{prefix}.wq_a", rank, hidden)
    yield linear(f"{prefix}.q_norm", rank)
    yield from _fp8(f"{prefix}.wq_b", heads * size, rank)
    yield from _fp8(f"{prefix}.wkv", size, hidden)
    yield linear(f"{prefix}.kv_norm", size)
    yield from _fp8(f"{prefix}.wo_a", outputs, heads * size // groups)
    yield from _fp8(f"{prefix}.wo_b", hidden, outputs)
    yield Entry(f"{prefix}.attn_sink", torch.float32, (heads,))
    made = {f"{prefix}.compressor": size} if rate else {}
    if rate == 4:
        index_size = config["index_head_dim"]
        made[f"{prefix}.indexer.compressor"] = index_size
        yield from _fp8(f"{prefix}.indexer.wq_b", config["index_n_heads"] * index_size, rank)
        yield linear(f"{prefix}.indexer.weights_proj", config["index_n_heads"], hidden)
    for name, dim in made.items():
        rows = dim * (2 if rate == 4 else 1)
        yield linear(f"{name}.wkv", rows, hidden)
        yield linear(f"{name}.wgate", rows, hidden)
        yield Entry(f"{name}.ape", torch.float32, (rate, rows))
        yield linear(f"{name}.norm", dim)


def _streams(name: str, rows: int, scales: int, config: Mapping[str, Any]) -> list[Entry]:
    shapes = {"fn": (rows, config["hc_mult"] * config["hidden_size"]), "base": (rows,), "scale": (scales,)}
    return [Entry(f"{name}_{part}", torch.float32, shape) for part, shape in shapes.items()]


def _mlp(prefix: str, config: Mapping[str, Any], of: Callable[[str, int, int], list[Entry]]) -> list[Entry]:
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    shapes = {"w1": (inner, hidden), "w3": (inner, hidden), "w2": (hidden, inner)}
    return [entry for name, shape in shapes.items() for entry in of(f"{prefix}.{name}", *shape)]


def _fp8(module: str, rows: int, columns: int) -> list[Entry]:
    blocks = -(-rows // fp8.BLOCK), -(-columns // fp8.BLOCK)
    return [
        Entry(f"{module}.weight", fp8.DTYPE, (rows, columns)),
        Entry(f"{module}.scale", torch.float8_e8m0fnu, blocks),
    ]


def _mxfp4(module: str, rows: int, columns: int) -> list[Entry]:
    return [
        Entry(f"{module}.weight", torch.int8, (rows, columns // 2)),
        Entry(f"{module}.scale", torch.float8_e8m0fnu, (rows, columns // mxfp4.GROUP)),
    ]


# Models that are written as they are released, in the formats of that: their tensors, and what says so.
RELEASED: Mapping[str, tuple[Callable[[Mapping[str, Any]], Iterator[list[Entry]]], dict[str, Any]]] = {
    GPT_OSS: (gpt_oss_entries, {"quant_method": "mxfp4"}),
    DEEPSEEK_V4: (
        deepseek_v4_entries,
        {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [fp8.BLOCK] * 2},
    ),
}
