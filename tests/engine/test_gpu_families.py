"""Whole models with latent, sparse and compressed attention on a GPU, by the kernels: log-probabilities of
prompts and answers are as close to those of transformers in float32 as torch's attention is in bfloat16, and
no further from them than a bound.

Heads have the sizes of the published models; what they are made of, layers and experts are small. Weights are
numbers of bfloat16, so that only arithmetic differs. Where routers choose by score, tokens go to all experts:
a close call there moves a token further than all rounding, and as often with torch as with kernels. Answers
are the model's own: transformers scores the tokens that were chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.models.families import FAMILIES, random_model, release_config, write
from tests.models.test_logits import BOUND, error, prompt
from turnout import LLM, SamplingParams

pytestmark = pytest.mark.gpu

SETTINGS: dict[str, Any] = {
    "dtype": "bfloat16",
    "load_progress": False,
    "max_total_tokens": 4096,
    "max_running_requests": 8,
    "mem_fraction_static": 0.3,
    "disable_prefix_cache": True,
}
LENGTHS = (1, 6, 127, 128, 129, 300, 700)  # around windows of 4 and 128, and more than an index chooses
ANSWER = 40
EAGER = {"disable_prefill_graph": True}
CHUNKS = {"chunked_prefill_size": 200}
MORE = 4 / 3  # of torch's error
# Three times what a CPU in bfloat16 came to, of log-probabilities that vary by more than 1. An index chooses
# among scores in bfloat16, too.
FAR = {
    "deepseek_v4": 0.06,
    "deepseek_v32": 0.7,
    "glm_moe_dsa": 0.3,
    "deepseek_v3": 0.08,
    "glm4_moe_lite": 0.06,
}

SMALL = {
    "hidden_size": 256,
    "moe_intermediate_size": 128,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 1024,
}
LATENT = SMALL | {"intermediate_size": 256, "kv_lora_rank": 512, "q_lora_rank": 128, "qk_rope_head_dim": 64}
LATENT |= {"head_dim": 64, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 8}
DEEPSEEK = LATENT | {"qk_nope_head_dim": 128, "v_head_dim": 128}
GLM = LATENT | {"qk_nope_head_dim": 192, "v_head_dim": 256}
INDEX = {"index_head_dim": 128, "index_topk": 128}
RATES = [0, 4, 128, 4, 128]


def heads(count: int) -> dict[str, int]:
    return {"num_attention_heads": count, "num_key_value_heads": count}


MODELS: dict[str, dict[str, Any]] = {
    "deepseek_v4": SMALL
    | {
        "num_hidden_layers": len(RATES),
        "num_attention_heads": 64,
        "head_dim": 512,
        "partial_rotary_factor": 64 / 512,
        "q_lora_rank": 128,
        "o_groups": 8,
        "o_lora_rank": 64,
        "sliding_window": 128,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 64,
        "swiglu_limit": 10.0,
        "mlp_layer_types": ["hash_moe", "hash_moe", "moe", "moe", "moe"],
        "compress_rates": None,
    },
    "deepseek_v32": DEEPSEEK | INDEX | heads(64) | {"index_n_heads": 64},
    "glm_moe_dsa": GLM | INDEX | heads(64) | {"index_n_heads": 32},
    "deepseek_v3": DEEPSEEK | heads(16),
    "glm4_moe_lite": GLM | heads(20),
}


def made_up(folder: Path, name: str) -> PreTrainedModel:
    """transformers' model in float32, with its checkpoint as released."""
    family = FAMILIES[name]
    if name == "deepseek_v4":
        own = {"compress_ratios": RATES, "qk_rope_head_dim": 64}
        kept = {field: value for field, value in family.extra.items() if field != "layer_types"}
        kinds = {0: "sliding", 4: "compressed_sparse", 128: "heavily_compressed"}
        layers = {"layer_types": [f"{kinds[rate]}_attention" for rate in RATES]}
        family = replace(family, config=family.config | layers, extra=kept | own)
    model = random_model(family, **MODELS[name])
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            tensor.copy_(tensor.bfloat16())
    config = release_config(family, model)
    if name == "deepseek_v4":
        config.pop("compress_rates")
    write(folder, config, family.release({n: t.detach().clone() for n, t in model.state_dict().items()}))
    return model


@dataclass(frozen=True)
class Errors:
    """Of log-probabilities, of all tokens together."""

    prompts: Tensor
    answers: Tensor

    def root_mean_squares(self) -> tuple[float, float]:
        prompts, answers = (float(x.square().mean().sqrt()) for x in (self.prompts, self.answers))
        return prompts, answers


@torch.inference_mode()
def scores(model: PreTrainedModel, ids: Sequence[int]) -> Tensor:
    """Log-probabilities of all tokens but the first."""
    on_device = torch.tensor([ids], device=model.device)
    found = model(on_device).logits[0, :-1].float().log_softmax(-1)
    return found.gather(1, on_device[0, 1:, None])[:, 0].cpu()


def errors(model: PreTrainedModel, folder: Path, device: str, **flags: Any) -> Errors:
    """Of prompts together, then of one alone."""
    asked = [prompt(length, seed=length) for length in LENGTHS]
    scored = SamplingParams(max_tokens=ANSWER, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    with LLM(str(folder), device=device, **(SETTINGS | flags)) as llm:
        backend = flags["attention_backend"]
        by_kernels, whole = backend == "triton", not flags.get("disable_prefill_graph")
        assert isinstance(llm.info()["decode_graphs"], list) is by_kernels
        assert isinstance(llm.info()["prefill_graphs"], list) is (by_kernels and whole)
        answers = [*llm.generate(asked, scored), *llm.generate(asked[-2:-1], scored)]
        print(f"{flags}: {llm.stats().kernels_compiled} kernels compiled while serving")
    found = Errors(torch.empty(0), torch.empty(0))
    for answer in answers:
        ids = [*answer.prompt_token_ids, *answer.token_ids]
        assert answer.logprobs
        assert answer.prompt_logprobs
        given = [entry.logprob for entry in [*answer.prompt_logprobs[1:], *answer.logprobs] if entry]
        exact = scores(model, ids)
        away, start = torch.tensor(given) - exact, len(answer.prompt_token_ids) - 1
        assert len(away) == len(ids) - 1
        found = Errors(torch.cat((found.prompts, away[:start])), torch.cat((found.answers, away[start:])))
    return found


def compare(folder: Path, name: str, device: str, kernels: str) -> None:
    """Prompts by torch, by the kernels, by these between prefill graphs, and in chunks."""
    model, found = made_up(folder, name), {}
    model.set_experts_implementation("eager")
    on_cpu = scores(model, ids := prompt(100))
    assert error(scores(model.to(device), ids), on_cpu) <= BOUND
    runs: dict[str, dict[str, Any]] = {
        "torch": EAGER,
        kernels: EAGER,
        f"{kernels}, graphs": {},
        f"{kernels}, graphs and chunks": CHUNKS,
    }
    for run, flags in runs.items():
        backend = {"attention_backend": run.partition(",")[0].strip()}
        found[run] = errors(model, folder, device, **backend, **flags).root_mean_squares()
        print(f"{name}, {run}: {found[run][0]:.5f} of prompts, {found[run][1]:.5f} of answers")
    for run in found:
        for ours, torchs in zip(found[run], found["torch"], strict=True):
            assert ours <= MORE * torchs, (run, found)
            assert ours <= FAR[name], (run, found)


@pytest.mark.parametrize("name", MODELS)
def test_kernels_are_as_exact_as_torch(tmp_path: Path, name: str) -> None:
    compare(tmp_path, name, "cuda", "triton")
