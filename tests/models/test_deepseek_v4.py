"""DeepSeek-V4 where it differs from other families: caches, cuts, token ids, formats and refusals.

What all families have in common is in test_families*.py. Here entries are of 4 and 128 tokens, as published.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.checkpoint import packing
from tests.models.families import FAMILIES, Built, build, write
from tests.models.running import PlainAttention, load, no_layer_is_read
from tests.models.test_dense import check_bytes
from tests.models.test_dense import kept as kept_in_fp8
from tests.models.test_logits import BOUND, error, prompt, reference
from turnout import LLM, SamplingParams
from turnout.attention.caches import AttentionCaches
from turnout.attention.compressed import CompressedAttention
from turnout.attention.kinds import cache_groups
from turnout.checkpoint import CheckpointError
from turnout.config import Config
from turnout.engine.engine_plan import resolve
from turnout.errors import UserError
from turnout.models import describe
from turnout.models.interface import Model, Step

FAMILY = FAMILIES["deepseek_v4"]
PUBLISHED = replace(
    FAMILY,
    config=FAMILY.config | {"compress_rates": None, "index_topk": 16},
    extra={name: value for name, value in FAMILY.extra.items() if name != "layer_types"}
    | {"compress_ratios": [0, 4, 128, 4, 0]},
)
IDS = prompt(330)


def build_published(folder: Path, **overrides: Any) -> Built:
    found = build(folder, PUBLISHED, **overrides)
    config = {name: value for name, value in found.config.items() if name != "compress_rates"}
    (folder / "config.json").write_text(json.dumps(config))
    return replace(found, config=config)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build_published(tmp_path_factory.mktemp("v4"))


@pytest.fixture(scope="module")
def expected(built: Built) -> Tensor:
    return reference(built.model, IDS)


class Paged:
    """Sequences in pages of the engine's caches, full of NaN at first."""

    def __init__(
        self,
        model: Model,
        page_size: int,
        rows: int = 2,
        make: type[CompressedAttention] = CompressedAttention,
    ):
        self.model, layers = model, model.shape.attention
        self.caches = AttentionCaches(
            [
                make(
                    group,
                    number=number,
                    num_pages=rows * (512 // page_size),
                    page_size=page_size,
                    max_running=rows,
                    max_context=512,
                    device=torch.device("cpu"),
                    dtype=torch.float32,
                )
                for number, group in enumerate(cache_groups(layers))
            ]
        )
        for group in self.caches.groups:
            for kept in (group._cache, group._recent, group._open):
                kept.fill_(torch.nan)
        self.pages, self.rows = 512 // page_size, rows

    def request(self, row: int) -> Any:
        pages = range(row, self.rows * self.pages, self.rows)  # those of requests alternate
        groups = [SimpleNamespace(pages=list(pages), placed=0) for _ in self.caches.groups]
        return SimpleNamespace(row=row, kv=groups, state_slots=[row])

    @torch.inference_mode()
    def logits(self, *chunks: tuple[Any, Sequence[int], int, int]) -> list[Tensor]:
        """Of tokens [start, end) of requests with these ids."""
        laid = [SimpleNamespace(request=r, start=s, end=e, length=e - s) for r, _, s, e in chunks]
        step = Step(
            input_ids=torch.tensor([i for _, ids, s, e in chunks for i in ids[s:e]]),
            positions=torch.cat([torch.arange(s, e) for _, _, s, e in chunks]),
            attention=self.caches.laid_out([], laid),
        )
        found = self.model.logits(self.model.forward(step))
        return list(found.split([e - s for _, _, s, e in chunks]))


def test_a_prompt_of_published_rates(built: Built, expected: Tensor) -> None:
    (plain,) = PlainAttention(load(built.folder)).logits(("a", IDS))
    assert error(plain, expected) <= BOUND


@pytest.mark.parametrize(
    "page_size", [4, *(pytest.param(size, marks=pytest.mark.more) for size in (16, 128)), 256]
)
def test_cuts_around_windows(page_size: int, built: Built, expected: Tensor) -> None:
    """At, before and behind multiples of 4 and 128, in chunks of 1, 7 and 64; a row is used again later."""
    model = load(built.folder)
    cuts = [3, 4, 5, 8, 63, 127, 128, 129, 132, 196, 203, 255, 256, 257, 258, 259, 260, 261, 325]
    for ends in (cuts, [*range(7, 129, 7), *range(129, 142), 206, 270]):
        paged = Paged(model, page_size)
        for row in (0, 1, 0):
            request, parts, start = paged.request(row), [], 0
            for end in [*ends, len(IDS)]:
                parts += paged.logits((request, IDS, start, end))
                start = end
            assert error(torch.cat(parts), expected) <= BOUND


def test_two_requests_in_a_step(built: Built, expected: Tensor) -> None:
    """One decodes past 128 while the other's prompt comes in chunks."""
    paged = Paged(load(built.folder), 16)
    first, second, at, parts, others = paged.request(0), paged.request(1), 120, [], []
    (start,) = paged.logits((first, IDS, 0, at))
    for end in (5, 69, 128, 130, 194, 260, 261, 300, 327, 330):
        mine, theirs = paged.logits(
            (first, IDS, at, at + 1), (second, IDS, len(torch.cat(others)) if others else 0, end)
        )
        at += 1
        parts.append(mine)
        others.append(theirs)
    assert error(torch.cat((start, *parts)), expected[:at]) <= BOUND
    assert error(torch.cat(others), expected) <= BOUND


@pytest.mark.parametrize("page_size", [4, 128])
def test_single_tokens_of_a_step_are_computed_together(
    page_size: int, built: Built, expected: Tensor
) -> None:
    """Contexts without entries, with few and with many, next to a chunk; some windows end in each step."""
    starts = [0, 1, 2, 3, 7, 30, 33, 63, 120, 126, 127, 128, 200, 255, 301]
    paged = Paged(load(built.folder), page_size, len(starts) + 1)
    other, *requests = (paged.request(row) for row in range(len(starts) + 1))
    rows = list(zip(requests, starts, strict=True))
    paged.logits(*((request, IDS, 0, start) for request, start in rows if start))
    single = [SimpleNamespace(request=r, start=s, end=s + 1, length=1) for r, s in rows]
    for group in paged.caches.groups:
        together = [len(block.rows_B) for block in group.laid_out(single, []).blocks]
        assert sum(together) >= len(starts) - 3
        assert max(together) >= len(starts) // 3
    for k in range(9):
        singles = [(request, IDS, start + k, start + k + 1) for request, start in rows]
        *found, chunk = paged.logits(*singles, (other, IDS, 20 * k, 20 * k + 20))
        assert error(torch.cat(found), expected[[start + k for start in starts]]) <= BOUND
        assert error(chunk, expected[20 * k : 20 * k + 20]) <= BOUND


@pytest.mark.parametrize(
    ("chunk", "flags"),
    [(7, {}), (64, {"speculative_algorithm": "ngram", "state_snapshot_interval": 128})],
    ids=["chunks of 7", "drafts and snapshots"],
)
def test_the_engine_decodes_past_windows(chunk: int, flags: dict[str, Any], built: Built) -> None:
    """Several requests at a time, some put back and computed again, or behind a prefix that is known."""
    asked = [prompt(length, seed=length) for length in (120, 127, 128, 250)]
    asked[1] = asked[1][:7] * 18  # which drafts foretell
    sampling = SamplingParams(max_tokens=16, ignore_eos=True, logprobs=0)
    sizes = {"chunked_prefill_size": chunk, "max_total_tokens": 672, "max_running_requests": 4}
    with LLM(str(built.folder), num_threads=1, load_progress=False, page_size=16, **sizes, **flags) as llm:
        answers = llm.generate(asked, sampling)
        if flags:
            answers += llm.generate(asked[-1:], sampling)
            asked.append(asked[-1])
            assert [answer.cached_tokens for answer in answers] == [0, 0, 0, 0, 128]
            assert llm.stats().spec_draft_tokens > 0
    for ids, answer in zip(asked, answers, strict=True):
        scores = reference(built.model, ids + answer.token_ids).log_softmax(-1)[len(ids) - 1 : -1]
        chosen = scores.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
        assert error(chosen, scores.amax(1)) <= BOUND, "a token that is not the likeliest one"
        assert error(torch.tensor([entry.logprob for entry in answer.logprobs]), chosen) <= BOUND


def fp8_of_powers(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(e4m3, e8m0 scale of each 128 x 128 block, what they stand for)."""
    rows, columns = weight.shape
    padded = torch.zeros(-(-rows // 128) * 128, -(-columns // 128) * 128)
    padded[:rows, :columns] = weight
    blocks = padded.view(padded.shape[0] // 128, 128, -1, 128)
    scale = torch.exp2((blocks.abs().amax((1, 3)).clamp(min=1e-9) / 448).log2().ceil())
    stored = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    plain = (stored.float() * scale[:, None, :, None]).view_as(padded)[:rows, :columns].contiguous()
    return (
        stored.view(torch.uint8).view_as(padded)[:rows, :columns].contiguous().view(torch.float8_e4m3fn),
        scale.to(torch.float8_e8m0fnu),
        plain,
    )


@pytest.mark.parametrize("experts", FAMILY.own_formats)
def test_as_released(experts: str, built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FP8 with e8m0 scales, experts in FP4, or of base models all in FP8 with float32 scales.

    Decoded, or kept in FP8 as on a GPU.
    """
    tensors, plain = {}, {}
    kept = ("norm", "gate.", "compressor", "weights_proj", "hc_", "embed", "head", "ape", "sink", "mtp")
    for name, tensor in built.tensors.items():
        module = name.removesuffix(".weight")
        if ".experts." in name and experts == "fp4":
            packed, plain[name] = packing.mxfp4(tensor)
            tensors[name] = packed["_blocks"].flatten(1).view(torch.int8)
            tensors[f"{module}.scale"] = packed["_scales"].view(torch.float8_e8m0fnu)
        elif any(part in name for part in kept) and ".experts." not in name:
            tensors[name] = plain[name] = tensor
        else:
            tensors[name], scale, plain[name] = fp8_of_powers(tensor)
            tensors[f"{module}.scale"] = scale if experts == "fp4" else scale.float()
    record = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
    write(
        tmp_path / "stored", built.config | {"expert_dtype": experts, "quantization_config": record}, tensors
    )
    write(tmp_path / "plain", built.config, plain)
    ids = IDS[:140]
    stored, same = (
        PlainAttention(load(tmp_path / name, **formats)).logits(("a", ids))[0]
        for name, formats in (("stored", {"moe_activation_dtype": "bf16"}), ("plain", {}))
    )
    assert error(same, reference(built.model, ids)) > 10 * BOUND  # the rounding shows
    assert error(stored, same) <= 1e-3 * float(same.abs().max())
    check_bytes(tmp_path / "stored", kept_in_fp8(tmp_path / "stored", monkeypatch))
    model = load(tmp_path / "stored", moe_activation_dtype="bf16")
    assert error(PlainAttention(model).logits(("a", ids))[0], same) <= 1e-3 * float(same.abs().max())


def test_a_table_that_names_no_expert(built: Built, tmp_path: Path) -> None:
    name = "layers.1.ffn.gate.tid2eid"
    write(tmp_path, built.config, built.tensors | {name: built.tensors[name] + 7})
    with pytest.raises(CheckpointError, match="names experts that the layer does not have") as refused:
        load(tmp_path, progress=no_layer_is_read)
    assert name in str(refused.value)
    assert "ids from 0 to 7" in str(refused.value)


@pytest.mark.parametrize(
    "lost",
    [
        "layers.1.attn.indexer.compressor.ape",
        "layers.2.attn.compressor.wkv.weight",
        "layers.3.attn.compressor.wgate.weight",
        "layers.3.attn.compressor.norm.weight",
        "layers.3.attn.attn_sink",
        "layers.2.ffn.gate.bias",
    ],
)
def test_missing_small_tensors(lost: str, built: Built, tmp_path: Path) -> None:
    write(tmp_path, built.config, {n: t for n, t in built.tensors.items() if n != lost})
    with pytest.raises(CheckpointError, match=re.escape(lost)):
        load(tmp_path, progress=no_layer_is_read)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vision_n_layers": 2}, "vision_n_layers = 2: is not implemented"),
        ({"vision_config": {"depth": 1}}, "vision_config"),
        ({"index_cache_dtype": "int4"}, "index_cache_dtype"),
        ({"compress_rates": {"heavily_compressed_attention": 1}}, "compress_rates.*at least 2"),
        ({"compress_rates": {"lightly_compressed_attention": 2}}, "compress_rates.*must be an object"),
        ({"compress_ratios": [0, 4, 64, 4]}, "compress_ratios.*64"),
        ({"compress_ratios": [0, 4]}, "compress_ratios"),
        ({"compress_ratios": [0, 0, 0, 0]}, "compressed attention"),
        ({"hc_mult": 2}, "hc_mult"),
        ({"scoring_func": "sigmoid"}, "scoring_func"),
        ({"num_key_value_heads": 2}, "num_key_value_heads"),
        ({"o_groups": 3}, "o_groups"),
        ({"index_head_dim": 4}, "index_head_dim"),
        ({"num_hash_layers": 3}, "mlp_layer_types"),
        ({"compress_rope_theta": -1}, "compress_rope_theta"),
        ({"attention_bias": True}, "attention_bias"),
        ({"index_rope": 1}, "index_rope"),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}},
            "weight_block_size",
        ),
        (
            {
                "expert_dtype": "int3",
                "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
            },
            "expert_dtype",
        ),
    ],
    ids=str,
)
def test_refusals(fields: dict[str, Any], message: str, built: Built) -> None:
    with pytest.raises(UserError, match=message):
        describe(built.config | fields)


def test_fields_of_draft_stages_change_nothing(built: Built) -> None:
    dspark = {"dspark_block_size": 5, "dspark_target_layer_ids": [0, 1], "dspark_markov_rank": 8}
    assert describe(built.config | dspark) == describe(built.config)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"speculative_algorithm": "MTP"}, "DeepseekV4ForCausalLM has no draft layer here"),
        ({"state_snapshot_interval": 120}, "use a multiple of 16"),
        ({"page_size": 48}, "pages of 128 tokens, a multiple or a part"),
        ({"context_length": 600}, "positions beyond 512.*use --context-length 512 or less"),
    ],
    ids=str,
)
def test_flags_that_it_does_not_have(
    flags: dict[str, Any], message: str, built: Built, tmp_path: Path
) -> None:
    """Refused by config.json alone: there are no weights."""
    (tmp_path / "config.json").write_text(json.dumps(built.config))
    with pytest.raises(UserError, match=message):
        resolve(Config(model=str(tmp_path), device="cpu", **flags))
