"""Every family's logits equal transformers' in float32, however tokens arrive, from a publisher's tensors."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from tests.checkpoint.writers import save
from tests.models.families import FAMILIES, Built, build
from tests.models.running import PlainAttention, load
from tests.models.test_logits import BOUND, error, prompt, reference
from turnout import LLM, SamplingParams
from turnout.attention.kinds import AttentionSpec
from turnout.errors import UserError

IDS, OTHER = prompt(82), prompt(20, seed=1)


@dataclass(frozen=True, kw_only=True)
class Case:
    built: Built
    expected: Tensor  # logits of IDS
    other: Tensor  # of OTHER


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    built = build(tmp_path_factory.mktemp(request.param), FAMILIES[request.param])
    return Case(built=built, expected=reference(built.model, IDS), other=reference(built.model, OTHER))


def test_whole_prompts_and_pieces(case: Case) -> None:
    """Two prompts in one step; then one in chunks of 64, 7 and 1, and token by token next to the other."""
    model = load(case.built.folder)
    together = PlainAttention(model).logits(("a", IDS), ("b", OTHER))
    assert error(together[0], case.expected) <= BOUND
    assert error(together[1], case.other) <= BOUND
    run = PlainAttention(model)
    parts, others = [], []
    for start, end in ((0, 64), (64, 71), (71, 72)):
        parts.append(run.logits(("a", IDS[start:end]))[0])
    for i, token in enumerate(IDS[72:]):
        mine, theirs = run.logits(("a", [token]), ("b", OTHER[i : i + 1]), phase="decode")
        parts.append(mine)
        others.append(theirs)
    assert error(torch.cat(parts), case.expected) <= BOUND
    assert error(torch.cat(others), case.other[: len(others)]) <= BOUND


def test_transformers_reads_the_same_tensors(case: Case) -> None:
    """So they are a publisher's, and not names that Turnout made up."""
    make = AutoModelForCausalLM if case.built.family.text else AutoModelForImageTextToText
    theirs = make.from_pretrained(case.built.folder, dtype=torch.float32)
    assert error(reference(theirs, IDS), case.expected) <= BOUND


def test_what_transformers_saves(case: Case, tmp_path: Path) -> None:
    case.built.model.save_pretrained(tmp_path)
    if case.built.family.model_type == "kimi_k25":
        with safe_open(tmp_path / "model.safetensors", "pt") as file:
            saved = set(file.keys())
        assert any(".blocks." in name for name in saved)  # text too: transformers cannot read it itself
        return
    (logits,) = PlainAttention(load(tmp_path)).logits(("a", IDS))
    assert error(logits, case.expected) <= BOUND


def test_what_is_skipped_is_logged_and_nothing_else_is(
    case: Case, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    built = case.built
    with caplog.at_level(logging.INFO, "turnout.models"):
        load(built.folder)
    skipped = [record.getMessage() for record in caplog.records if "skipped" in record.getMessage()]
    assert bool(skipped) == built.skips
    (tmp_path / "config.json").write_bytes((built.folder / "config.json").read_bytes())
    save(tmp_path, built.tensors | {"model.layers.1.self_attn.gate.bias": torch.ones(4)})
    with pytest.raises(
        UserError, match=r"1 tensors have no place .* model\.layers\.1\.self_attn\.gate\.bias"
    ):
        load(tmp_path)


ENGINE = {
    "num_threads": 1,
    "load_progress": False,
    "page_size": 4,
    "chunked_prefill_size": 16,
    "max_total_tokens": 160,  # less than four sequences of 30 + 24 tokens
    "max_running_requests": 4,
}


def test_in_the_engine(case: Case) -> None:
    """Paged caches, after being put back and recomputed, and from pages that another request left behind."""
    built = case.built
    prompts = [prompt(30, seed=s) for s in range(4)]
    sampling = SamplingParams(max_tokens=24, ignore_eos=True, logprobs=0)
    with LLM(str(built.folder), **ENGINE) as llm:
        first = llm.generate(prompts, sampling)
        whole = any(not group["window"] for group in llm.info()["kv"]["groups"])
        assert (llm.stats().preemptions > 0) == whole  # pages of windows suffice for all that run
        again = llm.generate(prompts[-1] + first[-1].token_ids, sampling)[0]
        assert (again.cached_tokens > 0) == built.family.reuses
    for asked, answer in zip([*prompts, again.prompt_token_ids], [*first, again], strict=True):
        scores = reference(built.model, asked + answer.token_ids).log_softmax(-1)[len(asked) - 1 : -1]
        chosen = scores.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
        assert error(chosen, scores.amax(1)) <= BOUND, "a token that is not the likeliest one"
        assert error(torch.tensor([entry.logprob for entry in answer.logprobs]), chosen) <= BOUND


def test_shortened_it_has_a_layer_of_each_kind(case: Case) -> None:
    """Attention and MLP; it computes, and is whole again afterwards."""
    model = load(case.built.folder)

    def kinds() -> list[tuple[AttentionSpec, type]]:
        order = {id(layer): i for i, layer in enumerate(whole)}
        return [(model.shape.attention[order[id(layer)]], type(layer.mlp)) for layer in model._layers]

    whole = model._layers
    of_whole = kinds()
    with model.shortened():
        assert set(kinds()) == set(of_whole)
        assert len(model._layers) == len(set(of_whole))
        assert len(PlainAttention(model).logits(("a", IDS))[0]) == len(IDS)
    assert model._layers is whole
    assert error(PlainAttention(model).logits(("a", IDS))[0], case.expected) <= BOUND
