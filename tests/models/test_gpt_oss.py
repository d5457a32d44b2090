"""GPT-OSS beyond what all families are tested for: published MXFP4 tensors, the engine, sizes, refusals."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from tests.models.families import FAMILIES, Built, build, write
from tests.models.running import PlainAttention, load, no_layer_is_read
from tests.models.test_families_describe import PUBLISHED, published
from tests.models.test_logits import BOUND, error, prompt, reference
from turnout.checkpoint.quantize import quantize
from turnout.config import Config
from turnout.engine.builder import build_engine
from turnout.engine.engine_plan import resolve
from turnout.engine.messages import AddRequest
from turnout.engine.sampling_params import SamplingParams
from turnout.errors import UserError
from turnout.models import describe
from turnout.parallel.hardware import named

IDS = [i % 256 for i in prompt(60)]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build(tmp_path_factory.mktemp("gpt_oss"), FAMILIES["gpt_oss"])


def decoded(blocks: np.ndarray, scales: np.ndarray) -> Tensor:
    """float32 [E, N, K] of codes [E, N, K / 32, 16], low halves of bytes first, and e8m0 scales."""
    codes = np.stack((blocks & 15, blocks >> 4), axis=-1).reshape(*blocks.shape[:-1], 32)
    values = codes.astype(np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    whole = values * np.exp2(scales.astype(np.float32) - 127)[..., None]
    return torch.from_numpy(whole.reshape(*blocks.shape[:2], -1))


def publish(built: Built, folder: Path) -> None:
    """Random blocks and scales in the published names and layout; the model gets what they stand for."""
    draw, tensors = np.random.default_rng(0), dict(built.tensors)
    for name, parameter in built.model.named_parameters():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        experts, columns, rows = parameter.shape  # transformers has them transposed
        blocks = draw.integers(0, 256, (experts, rows, columns // 32, 16), dtype=np.uint8)
        scales = draw.integers(119, 123, (experts, rows, columns // 32), dtype=np.uint8)
        del tensors[name]
        tensors |= {f"{name}_blocks": torch.from_numpy(blocks), f"{name}_scales": torch.from_numpy(scales)}
        with torch.no_grad():
            parameter.copy_(decoded(blocks, scales).transpose(1, 2))
    config = built.config | {"quantization_config": published("gpt-oss-20b")["quantization_config"]}
    write(folder, config, tensors)


@pytest.mark.parametrize("storage", ["packed", "decoded"])
def test_published_mxfp4(storage: str, tmp_path: Path) -> None:
    built = build(tmp_path / "bf16", FAMILIES["gpt_oss"], seed=1)
    publish(built, tmp_path / "mxfp4")
    model = load(tmp_path / "mxfp4", moe_weight_storage=storage, moe_activation_dtype="bf16")
    (logits,) = PlainAttention(model).logits(("a", IDS))
    assert error(logits, reference(built.model, IDS)) <= BOUND


def test_quantize_writes_what_is_published(built: Built, tmp_path: Path) -> None:
    """Names, shapes and types are the published ones, and logits those of the weights they stand for."""
    quantize(built.folder, tmp_path / "out", format="mxfp4")
    model = load(tmp_path / "out")
    (ours,) = PlainAttention(model).logits(("a", IDS))
    other = build(tmp_path / "same", FAMILIES["gpt_oss"])  # as `built`, to be changed
    from turnout.checkpoint import open_checkpoint

    with open_checkpoint(tmp_path / "out") as checkpoint:
        for name, parameter in other.model.named_parameters():
            if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                parts = (checkpoint.tensor(f"{name}_{part}").numpy() for part in ("blocks", "scales"))
                with torch.no_grad():
                    parameter.copy_(decoded(*parts).transpose(1, 2))
    assert error(ours, reference(other.model, IDS)) <= BOUND


def scores(model: Any, ids: list[int]) -> Tensor:
    return torch.log_softmax(reference(model, ids).double(), dim=-1)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_the_engine_computes_what_transformers_does(built: Built, chunk: int) -> None:
    """In chunks, next to others, from a prefix hit, with drafts and after preemptions: every score of prompts
    and outputs, and every token."""
    draw = random.Random(chunk)
    config = Config(
        model=str(built.folder),
        page_size=16,
        max_total_tokens=112,
        max_running_requests=4,
        chunked_prefill_size=chunk,
        max_prefill_tokens=max(chunk, 8),
        num_threads=1,
        speculative_algorithm="ngram",
    )
    core = build_engine(resolve(config))
    assert [group.spec.window for group in core.engine_plan.cache_groups] == [0, 8]
    prompts = [IDS[: draw.randint(34, 50)] for _ in range(3)] + [IDS[5:30], IDS[:33] + IDS[:3] * 4]
    for round in range(2):
        asked = {}
        for i, ids in enumerate(prompts):
            asked[f"{round}-{i}"] = ids
            scored = 0 if round == 0 else None  # a scored prompt is computed whole
            sampling = SamplingParams(max_tokens=24, ignore_eos=True, logprobs=0, prompt_logprobs=scored)
            core.add(AddRequest(id=f"{round}-{i}", prompt_ids=list(ids), sampling=sampling))
        found: dict[str, tuple[list[int], list[Any]]] = {id: ([], []) for id in asked}
        while core.has_work():
            for output in core.step():
                tokens, logprobs = found[output.id]
                if output.prompt_logprobs:
                    logprobs += output.prompt_logprobs[1:]
                tokens += output.token_ids
                logprobs += output.logprobs or []
        for id, (tokens, logprobs) in found.items():
            whole = asked[id] + tokens
            wanted = scores(built.model, whole)
            assert tokens == [int(i) for i in wanted[len(asked[id]) - 1 : -1].argmax(-1)]
            assert len(logprobs) == len(whole) - 1 if round == 0 else len(tokens)
            for at, entry in enumerate(logprobs, len(whole) - len(logprobs)):
                assert entry.token_id == whole[at]
                assert abs(entry.logprob - float(wanted[at - 1, whole[at]])) <= BOUND
    stats = core.stats()
    assert stats.preemptions > 0
    assert stats.cached_prompt_tokens > 0


@pytest.mark.parametrize("hardware", ["h200", "b200"])
@pytest.mark.parametrize(("name", "token"), [("gpt-oss-20b", 24_576), ("gpt-oss-120b", 36_864)])
def test_a_context_takes_bytes_of_full_layers_only(name: str, token: int, hardware: str) -> None:
    """32 contexts of 32 k tokens take half of what they would without window groups, and a bit."""
    tokens = 32 * 32768
    flags = {"max_running_requests": 32, "context_length": 32768, "max_total_tokens": tokens}
    plan = resolve(Config(model=str(PUBLISHED / f"{name}.json"), **flags), named(hardware))
    assert plan.description.moe.format == "mxfp4"
    full, window = plan.describe()["kv"]["groups"]
    assert (full["token_bytes"], window["token_bytes"], window["window"]) == (token, token, 128)
    assert plan.num_pages * plan.page_size == tokens
    assert plan.memory.kv == full["bytes"] + window["bytes"] <= 0.56 * 2 * token * tokens


def test_values() -> None:
    config = published("gpt-oss-20b")
    description = describe(config)
    assert [layer.window for layer in description.shape.attention[:3]] == [128, 0, 128]
    assert all(layer.sinks and layer.scale == 1 / 8 for layer in description.shape.attention)
    del config["layer_types"]  # even layers have the window then
    assert describe(config) == description


def test_a_missing_sink_is_named_before_weights_are_read(built: Built, tmp_path: Path) -> None:
    name = "model.layers.2.self_attn.sinks"
    write(tmp_path, built.config, {k: v for k, v in built.tensors.items() if k != name})
    with pytest.raises(UserError, match=rf"{re.escape(name)}: is missing\. .* download the checkpoint again"):
        load(tmp_path, progress=no_layer_is_read)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("glm4_moe", "model.layers.1.mlp.gate.e_score_correction_bias"),
        ("minimax_m2", "model.layers.2.block_sparse_moe.e_score_correction_bias"),
        ("hy_v3", "model.layers.1.mlp.expert_bias"),
    ],
)
def test_so_is_a_missing_correction_bias(name: str, tensor: str, tmp_path: Path) -> None:
    built = build(tmp_path / "whole", FAMILIES[name])
    write(tmp_path / "out", built.config, {k: v for k, v in built.tensors.items() if k != tensor})
    with pytest.raises(UserError, match=rf"{re.escape(tensor)}: is missing\. "):
        load(tmp_path / "out", progress=no_layer_is_read)
