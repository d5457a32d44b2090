"""Prefill graphs on a GPU: answers with and without, at edges of sizes and in mixed steps; planned bytes."""

from __future__ import annotations

import gc
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.families import FAMILIES, build
from tests.models.test_families_describe import published
from tests.tiny import write_model
from tools.random_checkpoint import QWEN3_30B, text_config, write
from turnout import LLM, SamplingParams
from turnout.engine.llm import Completion

pytestmark = pytest.mark.gpu

SETTINGS: dict[str, Any] = {
    "device": "cuda",
    "load_progress": False,
    "max_total_tokens": 16384,
    "mem_fraction_static": 0.3,
    "max_running_requests": 16,
    "disable_prefix_cache": True,
}
SIZES = {"hidden_size": 1024, "moe_intermediate_size": 256, "num_hidden_layers": 4, "num_experts": 64}


PUBLISHED = {"latent": "glm-4.7-flash", "compressed": "deepseek-v4-flash"}


def sizes_of(model: str, **sizes: int) -> Mapping[str, Any]:
    """A model whose layers all have attention, one whose layers are recurrent but for every fourth, or one of
    latent or compressed attention."""
    if model == "attention":
        return QWEN3_30B | SIZES | sizes
    if model in PUBLISHED:
        found = {name: value for name, value in (SIZES | sizes).items() if name != "num_experts"}
        inner = {"intermediate_size": 1024} if model == "latent" else {}
        more = {"n_routed_experts": 64, "pad_token_id": None} | inner
        return text_config(published(PUBLISHED[model])) | found | more
    hybrid = text_config(published("qwen3.5-35b-a3b"))
    return hybrid | SIZES | {"shared_expert_intermediate_size": 256, "layer_types": None} | sizes


def prompt(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(1000 * seed + length)
    return [draw.randrange(256) for _ in range(length)]


def scores(completion: Completion) -> torch.Tensor:
    """Log-probabilities of the prompt's tokens but the first."""
    return torch.tensor([s.logprob for s in completion.prompt_logprobs if s is not None])


def close(found: list[Completion], plain: list[Completion], bound: float) -> None:
    for a, b in zip(found, plain, strict=True):
        difference = (scores(a) - scores(b)).abs()
        if len(difference):
            assert difference.max() < bound, (len(difference), difference.max())


def check_as_exact(found: list[Completion], plain: list[Completion], exact: list[Completion]) -> None:
    """What bfloat16 costs depends on the model, its depth and its recurrence; graphs must not add to it."""
    errors = []
    for some in (found, plain):
        pairs = [(scores(a), scores(b)) for a, b in zip(some, exact, strict=True)]
        errors.append(torch.cat([(a - b).abs() for a, b in pairs]))
    assert len(errors[0]) > 5000
    assert errors[0].mean() < 1.1 * errors[1].mean(), [e.mean() for e in errors]
    assert errors[0].max() < 1.5 * errors[1].max(), [e.max() for e in errors]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder, max_position_embeddings=4096)
    return folder


@pytest.mark.parametrize("flags", [{}, {"disable_cuda_graph": True}, {"chunked_prefill_size": 100}])
def test_edges_of_sizes_alone_and_together(folder: Path, flags: dict[str, Any]) -> None:
    """Chunks share steps with decoding requests."""
    scored = SamplingParams(max_tokens=12, ignore_eos=True, prompt_logprobs=1)
    asked = [prompt(n) for n in (1, 2, 63, 64, 65, 127, 128, 129, 256, 257, 500, 30)]
    found = []
    for disabled in (False, True):
        with LLM(str(folder), disable_prefill_graph=disabled, **(SETTINGS | flags)) as llm:
            assert isinstance(llm.info()["prefill_graphs"], list) is not disabled
            found.append(
                llm.generate(asked, scored) + [c for own in asked for c in llm.generate([own], scored)]
            )
            assert llm.stats().kernels_compiled == 0
    close(*found, bound=0.35)


@pytest.mark.parametrize("model", ["attention", "hybrid", "latent"])
@pytest.mark.parametrize("format", ["nvfp4", "fp8", "bf16"])
@pytest.mark.parametrize("overlap", ["off", "on"])
def test_every_size_computes_what_eager_steps_do(
    tmp_path: Path, model: str, format: str, overlap: str
) -> None:
    """In bfloat16, with the kernels for Hopper: scores of prompts at the edges of all sizes are as close to
    float32's as those of eager steps; experts count tokens only; nothing is compiled."""
    write(tmp_path / "model", sizes_of(model, vocab_size=4096, eos_token_id=4095), format=format)
    scored = SamplingParams(max_tokens=6, ignore_eos=True, prompt_logprobs=1)
    edges = sorted({n for size in (64, 128, 256, 512, 1024, 2048) for n in (size - 1, size, size + 1)})
    found, counts = [], []
    for disabled, dtype in ((False, "bfloat16"), (True, "bfloat16"), (True, "float32")):
        flags = {"disable_prefill_graph": disabled, "overlap_schedule": overlap, "dtype": dtype}
        with LLM(str(tmp_path / "model"), **SETTINGS, **flags) as llm:
            sizes = llm.info()["prefill_graphs"]
            assert isinstance(sizes, list) is not disabled
            core = llm._open()
            for _ in range(40):  # sizes are left for steps with nothing to do
                core.step()
            core._model.reset_counts()
            completions = [c for n in edges[:-1] for c in llm.generate([prompt(n)], scored)]
            completions += llm.generate([prompt(n, seed=1) for n in (5, 700, 64, 130, 9, 333, 90, 1)], scored)
            found.append(completions)
            counts.append(sum(map(sum, core._model.expert_counts())))
            if not disabled:
                assert llm.stats().kernels_compiled == 0
    check_as_exact(*found)
    assert counts[0] == counts[1]  # in float32 near-ties are computed once more


@pytest.mark.parametrize(
    "family",
    ["gpt_oss", "minimax_m2", "llama4", "glm4_moe", "qwen3_next", "deepseek_v3", "glm4_moe_lite"],
)
def test_windows_sinks_and_norms_of_families(tmp_path: Path, family: str) -> None:
    build(tmp_path, FAMILIES[family])
    scored = SamplingParams(max_tokens=8, ignore_eos=True, prompt_logprobs=1)
    asked = [prompt(n) for n in (3, 64, 65, 118, 20)]  # Llama 4 has one attention chunk, of 128 here
    found = []
    for disabled in (False, True):
        flags = SETTINGS | {"max_total_tokens": 2048, "disable_prefill_graph": disabled}
        with LLM(str(tmp_path), **flags) as llm:
            assert isinstance(llm.info()["prefill_graphs"], list) is not disabled
            found.append(llm.generate(asked, scored))
    close(*found, bound=0.35)


def used() -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


@pytest.mark.parametrize("model", ["attention", "hybrid", "latent", "compressed"])
def test_graphs_take_the_memory_that_is_planned(tmp_path: Path, model: str) -> None:
    """Counts what the whole GPU has in use: run it without other processes there (no pytest -n)."""
    write(tmp_path / "model", sizes_of(model, hidden_size=2048, num_hidden_layers=12), format="nvfp4")
    taken, planned = [], []
    flags = SETTINGS | {"max_total_tokens": 4096}
    for disabled in (True, True, False):  # the first loads libraries, and what they keep
        before = used()
        with LLM(str(tmp_path / "model"), disable_prefill_graph=disabled, **flags) as llm:
            llm.generate([prompt(2000), prompt(100)], SamplingParams(max_tokens=2))
            taken.append(used() - before)
            planned.append(llm.info()["memory"]["prefill_graphs"])
    assert planned[:2] == [0, 0]
    print(f"prefill graphs take {taken[2] - taken[1]:,} bytes, planned {planned[2]:,}")
    assert taken[2] - taken[1] <= 1.1 * planned[2]
