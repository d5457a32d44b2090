"""A checkpoint with random weights in the shape of a published model, for measuring, not for use.

    python -m tools.random_checkpoint /tmp/qwen3-30b                  # 17.5 GB, shaped like Qwen3-30B-A3B
    python -m tools.random_checkpoint /tmp/qwen3-30b --format fp8     # 31.2 GB; bf16: 61.1 GB
    python -m tools.random_checkpoint /tmp/qwen3-30b --format nvfp4-fp8  # experts in NVFP4, the rest in FP8
    python -m tools.random_checkpoint OUT --num-layers 4
    python -m tools.random_checkpoint OUT --config tests/models/published/gpt-oss-120b.json  # 65.2 GB, MXFP4
    python -m tools.random_checkpoint OUT --config tests/models/published/qwen3.5-35b-a3b.json

Names and shapes are those of transformers' model for the configuration, with the experts one by one. Types
and files are those of published checkpoints: experts in NVFP4 as ModelOpt exports them, with other products
in FP8 blocks where asked; experts and other products in FP8 blocks as DeepSeek-V3 and Qwen3-30B-A3B-FP8 have
them; in MXFP4 as `turnout quantize` writes them; or bf16. GPT-OSS is in MXFP4, and DeepSeek-V4 as released,
without its draft stages. A configuration for text and images gives the text model. Only values are made up.
They come from pools of random numbers, each tensor starting elsewhere in its pool: drawing 17 GB takes
minutes, this as long as writing, which several threads do, a file each. Only bf16 tensors larger than the
pool (embeddings and head) are drawn value by value, since a repeated pool would give many token ids the same
row. The scales give weights a standard deviation of 0.02: hidden states stay finite and routing is spread
over the experts.

The tokenizer is made up as well: 256 bytes, then one word per remaining id, so that whatever such a model
says is text.
"""

from __future__ import annotations

import copy
import json
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from tools.command_line import parser_for
from tools.released_tensors import RELEASED, linear
from turnout.checkpoint.encoders import PROJECTIONS, Encoder, ExpertLayer, Fp8, Mxfp4, Nvfp4
from turnout.checkpoint.experts import ExpertShape
from turnout.checkpoint.writer import Entry, ShardWriter, new_folder, write_json
from turnout.formats import fp8, nvfp4

# https://huggingface.co/Qwen/Qwen3-30B-A3B: config.json
QWEN3_30B: Mapping[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
SPREAD = 0.02  # standard deviation of weights
POOL_BYTES = 64 * 2**20
SHARD_BYTES = 10**9
THREADS = 16
CODE_RMS = math.sqrt(sum(v * v for v in (0, 0.5, 1, 1.5, 2, 3, 4, 6)) / 8)  # of e2m1, all codes alike
SCALES = (0x58, 0x68)  # e4m3 codes of block scales: 16 to 64, less one step
FP8_STD = 64.0  # of e4m3 values, whose largest is 448
E8M0 = 127 + round(math.log2(SPREAD / CODE_RMS))  # of the blocks of MXFP4
FP8_E8M0 = 127 + round(math.log2(SPREAD / FP8_STD))
INPUT_AMAX = 8.0


class Nvfp4WithFp8(Nvfp4):
    """Experts in NVFP4, other linear layers in FP8 blocks: ModelOpt's MIXED_PRECISION."""

    def __init__(self) -> None:
        super().__init__({})
        self._dense: list[str] = []

    def dense(self, module: str, shape: tuple[int, int]) -> list[Entry]:
        self._dense.append(module)
        rows, columns = (-(-size // fp8.BLOCK) for size in shape)
        scale = Entry(f"{module}.weight_scale", torch.float32, (rows, 1, columns, 1))
        return [Entry(f"{module}.weight", fp8.DTYPE, shape), scale]

    def declare(self, kept: Sequence[str], quantized: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
        layers: dict[str, Any] = {name: {"quant_algo": "FP8_PB_WO"} for name in self._dense}
        for experts in sorted({name.partition(".experts.")[0] + ".experts" for name in quantized}):
            layers[experts] = {"quant_algo": "NVFP4", "group_size": nvfp4.GROUP}
        return {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": layers,
            "ignore": list(kept),
        }, {}


ENCODERS: Mapping[str, Callable[[], Encoder]] = {
    "nvfp4": lambda: Nvfp4({}),
    "nvfp4-fp8": Nvfp4WithFp8,
    "fp8": Fp8,
    "mxfp4": Mxfp4,
}
FORMATS = (*ENCODERS, "bf16")


class Pool:
    """Random tensors, cheaply: views of blocks of random numbers."""

    def __init__(self, seed: int, num_experts: int):
        """num_experts: that tables of DeepSeek-V4 may name."""
        draw = torch.Generator().manual_seed(seed)
        self._bytes = torch.randint(256, (POOL_BYTES,), dtype=torch.uint8, generator=draw)
        self._scales = torch.randint(*SCALES, (POOL_BYTES // 4,), dtype=torch.uint8, generator=draw)
        self._weights = torch.empty(POOL_BYTES // 4, dtype=torch.bfloat16).normal_(0, SPREAD, generator=draw)
        values = torch.empty(POOL_BYTES // 4).normal_(0, FP8_STD, generator=draw)
        self._fp8 = values.clamp_(-448, 448).to(fp8.DTYPE).view(torch.uint8)
        mean_square = self._scales.view(torch.float8_e4m3fn).float().square().mean()
        self._global_scale = SPREAD / (CODE_RMS * mean_square.sqrt())
        self._seed, self._num_experts = seed, num_experts

    def tensor(self, entry: Entry) -> Tensor:
        """What `entry` holds; norms are 1."""
        if entry.name.endswith("weight_scale_2"):
            return self._global_scale
        if entry.name.endswith("input_scale"):
            return torch.tensor(INPUT_AMAX / nvfp4.GLOBAL_MAX)
        if entry.name.endswith(("weight_scale", "weight_scale_inv")) and entry.dtype == torch.float32:
            return torch.full(entry.shape, SPREAD / FP8_STD, dtype=entry.dtype)
        if entry.name.endswith("norm.weight"):
            return torch.ones(entry.shape, dtype=entry.dtype)
        if entry.name.endswith("_scales"):
            return torch.full(entry.shape, E8M0, dtype=entry.dtype)
        if entry.dtype == torch.float8_e8m0fnu:
            code = E8M0 if ".experts." in entry.name else FP8_E8M0
            return torch.full(entry.shape, code, dtype=torch.uint8).view(entry.dtype)
        if entry.dtype in (torch.uint8, torch.int8):
            return self._view(self._bytes, entry).view(entry.dtype)
        if entry.dtype == torch.int64:
            drawn = torch.rand(entry.shape, generator=self._draw(entry))
            return (drawn * self._num_experts).long()
        if entry.dtype in (torch.bfloat16, torch.float32):
            return self._weights_of(entry).to(entry.dtype)
        is_scale = entry.name.endswith("weight_scale")
        return self._view(self._scales if is_scale else self._fp8, entry).view(entry.dtype)

    def _weights_of(self, entry: Entry) -> Tensor:
        if math.prod(entry.shape) <= len(self._weights):
            return self._view(self._weights, entry)
        return torch.empty(entry.shape, dtype=torch.bfloat16).normal_(0, SPREAD, generator=self._draw(entry))

    def _draw(self, entry: Entry) -> torch.Generator:
        return torch.Generator().manual_seed(crc32(entry.name.encode(), self._seed))

    def _view(self, block: Tensor, entry: Entry) -> Tensor:
        size = math.prod(entry.shape)
        start = crc32(entry.name.encode(), self._seed) % len(block)
        if start + size <= len(block):
            return block[start : start + size].view(entry.shape)
        repeats = -(-(start + size) // len(block))
        return block.repeat(repeats)[start : start + size].view(entry.shape)


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of the model that reads text, without a quantisation."""
    from transformers import AutoConfig, AutoModelForCausalLM

    text = dict(config.get("text_config", config))
    if "text_config" in config:
        kind = AutoModelForCausalLM._model_mapping[type(AutoConfig.for_model(text["model_type"]))]
        text["architectures"] = [kind.__name__]
    return {name: value for name, value in text.items() if name != "quantization_config"}


def parameters(config: Mapping[str, Any]) -> Iterator[Entry]:
    """What transformers' model of this configuration holds, experts stacked, without making any of it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {name: value for name, value in copy.deepcopy(dict(config)).items() if name != "architectures"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields), dtype=torch.bfloat16)
    for name, tensor in model.state_dict().items():
        yield Entry(name, tensor.dtype, tuple(tensor.shape))


def entries(
    config: Mapping[str, Any], encoder: Encoder | None
) -> tuple[list[list[Entry]], list[ExpertLayer]]:
    """(all tensors, in groups that belong into one file; the experts of each layer). encoder None: bf16."""
    groups: list[list[Entry]] = []
    layers: list[ExpertLayer] = []
    for entry in parameters(config):
        prefix, _, name = entry.name.rpartition(".")
        if prefix.endswith("mlp.experts") and name == "gate_up_proj":
            num_experts, rows, hidden = entry.shape
            shape = ExpertShape(num_experts=num_experts, hidden=hidden, intermediate=rows // 2)
            layers.append(layer := ExpertLayer(prefix=prefix, experts=shape))
            groups += encoder.groups(layer) if encoder else _plain(layer)
        elif not prefix.endswith("mlp.experts"):
            groups.append([entry])
            if len(entry.shape) == 2 and _is_linear(entry.name):
                rows, columns = entry.shape
                if isinstance(encoder, Fp8):
                    groups[-1] = encoder.entries(prefix, (rows, columns))
                elif isinstance(encoder, Nvfp4WithFp8):
                    groups[-1] = encoder.dense(prefix, (rows, columns))
    return groups, layers


def _plain(layer: ExpertLayer) -> list[list[Entry]]:
    return [
        [linear(layer.module(e, p), *layer.shape(p)) for p in PROJECTIONS]
        for e in range(layer.experts.num_experts)
    ]


def _is_linear(name: str) -> bool:
    """Whether releases in FP8 blocks have this matrix so: neither embeddings nor what routes and gates."""
    return not re.search(r"embed_tokens|lm_head|\.gate\.|_gate\.|in_proj_[ab]\.", name)


def write(out: Path, config: Mapping[str, Any], *, format: str = "nvfp4", seed: int = 0) -> int:
    """A model folder at `out`; how many bytes its weights have. Raises UserError if it cannot be written.

    GPT-OSS and DeepSeek-V4 are in the formats of their releases, whatever `format` says.
    """
    config = text_config(config)
    released, quantization = RELEASED.get(config["architectures"][0], (None, {}))
    encoder = None if released or format == "bf16" else ENCODERS[format]()
    if released:
        groups, layers = list(released(config)), list[ExpertLayer]()
    else:
        groups, layers = entries(config, encoder)
    size = sum(entry.nbytes for group in groups for entry in group)
    pool = Pool(seed, config.get("n_routed_experts", 0))
    with new_folder(out, needed_bytes=size) as folder:
        writer = ShardWriter(folder, groups, SHARD_BYTES)

        def fill(entries: Sequence[Entry]) -> None:
            for entry in entries:
                writer.write(entry.name, pool.tensor(entry))

        with ThreadPoolExecutor(THREADS) as threads:
            list(threads.map(fill, writer.files))
        writer.finish()
        write_tokenizer(folder, config["vocab_size"])
        if encoder is not None:
            quantization = _declare(layers, encoder, groups, folder)
        declared = {"quantization_config": quantization} if quantization else {}
        write_json(folder / "config.json", {**config, **declared})
    return size


def _declare(
    layers: Sequence[ExpertLayer], encoder: Encoder, groups: Sequence[Sequence[Entry]], folder: Path
) -> dict[str, Any]:
    """What config.json says of the quantisation; writes the further files that say it too."""
    kept = [e.name.removesuffix(".weight") for group in groups for e in group if _stays(e)]
    names = [
        layer.module(e, p) for layer in layers for e in range(layer.experts.num_experts) for p in PROJECTIONS
    ]
    quantization, files = encoder.declare(kept, names)
    for name, value in files.items():
        write_json(folder / name, value)
    return quantization


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """tokenizer.json and tokenizer_config.json: ids 0 to 255 are bytes, then words, the last `<|end|>`."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"Ġw{i}" for i in range(len(symbols), vocab_size - 1)]
    core = Tokenizer(models.BPE(vocab={s: i for i, s in enumerate([*symbols, *words])}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<|end|>"])
    core.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "<|end|>"}))


def _stays(entry: Entry) -> bool:
    """Whether this is a linear layer that is not quantised."""
    return entry.dtype == torch.bfloat16 and len(entry.shape) == 2 and "embed" not in entry.name


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--config", type=Path, help="config.json of any model that transformers knows")
    parser.add_argument("--format", choices=FORMATS, default="nvfp4", help="of experts; GPT-OSS, V4: MXFP4")
    parser.add_argument("--num-layers", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--set", nargs=2, action="append", default=[], metavar=("FIELD", "VALUE"), help="of config.json"
    )
    options = parser.parse_args()
    start = time.perf_counter()
    fields = {name: json.loads(value) for name, value in options.set}
    config = QWEN3_30B if options.config is None else json.loads(options.config.read_text())
    config = text_config(config)
    num_layers = options.num_layers or config["num_hidden_layers"]
    config = {**config, "num_hidden_layers": num_layers, **fields}
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:num_layers]
    size = write(options.out, config, format=options.format, seed=options.seed)
    seconds = time.perf_counter() - start
    print(f"{options.out}: {size / 1e9:.1f} GB of weights in {seconds:.1f} s")


if __name__ == "__main__":
    main()
