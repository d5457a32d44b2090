"""Qwen3.5 and Qwen3-Next in the engine: however prompts are cut and next to whom.

test_families.py has what all families share.
"""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from tests.checkpoint.writers import save
from tests.models.families import FAMILIES, Built, build
from tests.models.running import load
from tests.models.test_logits import BOUND, error, prompt, reference
from turnout import LLM, SamplingParams
from turnout.engine.llm import Completion
from turnout.errors import PlanRefused, UserError

ENGINE = {"num_threads": 1, "load_progress": False, "page_size": 16, "max_running_requests": 4}


@pytest.fixture(scope="module", params=["qwen3_next", "qwen3_5_moe"])
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build(tmp_path_factory.mktemp(request.param), FAMILIES[request.param])


def check(built: Built, asked: list[int], answer: Completion) -> None:
    """Every token is the likeliest one after those before it, by transformers, which sees all at once."""
    scores = reference(built.model, asked + answer.token_ids).log_softmax(-1)[len(asked) - 1 : -1]
    chosen = scores.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
    assert error(chosen, scores.amax(1)) <= BOUND, "a token that is not the likeliest one"
    assert error(torch.tensor([entry.logprob for entry in answer.logprobs or []]), chosen) <= BOUND


@pytest.mark.parametrize("size", [1, 63, 64, 65])
def test_chunks(built: Built, size: int) -> None:
    """Prompts that end at and next to the edges of blocks and of chunks, and one of a single token."""
    lengths = [1, 63, 64, 65, 130] if size > 1 else [1, 20]
    prompts = [prompt(length, seed=length) for length in lengths]
    sampling = SamplingParams(max_tokens=5, ignore_eos=True, logprobs=0)
    with LLM(str(built.folder), chunked_prefill_size=size, **ENGINE) as llm:
        for asked, answer in zip(prompts, llm.generate(prompts, sampling), strict=True):
            check(built, asked, answer)


def test_deterministic_runs_repeat_to_the_bit(built: Built) -> None:
    prompts = [prompt(20, seed=s) for s in range(3)]
    sampling, found = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=0), []
    for chunk in (5, 64):
        with LLM(str(built.folder), deterministic=True, chunked_prefill_size=chunk, **ENGINE) as llm:
            together = llm.generate(prompts, sampling)
            found.append([answer.logprobs for answer in together])
            found.append([llm.generate(one, sampling)[0].logprobs for one in prompts])
    assert all(one == found[0] for one in found)
    check(built, prompts[0], together[0])


def test_prefixes_from_snapshots(built: Built) -> None:
    """A prompt that goes on from another's, and one that only begins like it."""
    first = prompt(100, seed=1)
    sampling = SamplingParams(max_tokens=5, ignore_eos=True, logprobs=0)
    with LLM(str(built.folder), state_snapshot_interval=32, **ENGINE) as llm:
        check(built, first, llm.generate(first, sampling)[0])
        for asked, known in ((first + prompt(9, seed=2), 96), (first[:70] + prompt(30, seed=3), 64)):
            answer = llm.generate(asked, sampling)[0]
            assert answer.cached_tokens == known
            check(built, asked, answer)


def test_snapshots_stand_where_pages_end(built: Built) -> None:
    with pytest.raises(
        PlanRefused, match=r"--state-snapshot-interval 20 with --page-size.*use a multiple of 16"
    ):
        LLM(str(built.folder), state_snapshot_interval=20, **ENGINE)


def test_what_a_model_without_prefix_reuse_says(built: Built, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "turnout"), LLM(str(built.folder), **ENGINE):
        pass
    assert "no prefix is reused: recurrent layers would need the state" in caplog.text


def test_drafts_change_no_answer(built: Built) -> None:
    """Answers of three words only, so that some drafts hold."""
    prompts = [prompt(40, seed=s) for s in range(2)]
    sampling = SamplingParams(max_tokens=24, ignore_eos=True, logit_bias={5: 50.0, 9: 50.0, 11: 50.0})
    with LLM(str(built.folder), **ENGINE) as llm:
        plain = [answer.token_ids for answer in llm.generate(prompts, sampling)]
    flags = {"speculative_algorithm": "ngram", "state_snapshot_interval": 16} | ENGINE
    with LLM(str(built.folder), **flags) as llm:
        for _ in range(2):  # at first without a known prefix
            assert [answer.token_ids for answer in llm.generate(prompts, sampling)] == plain
        assert llm._core is not None
        stats = llm._core.stats()
    assert 0 < stats.spec_accepted_tokens < stats.spec_draft_tokens
    assert stats.cached_prompt_tokens > 0


def test_drafts_with_a_state_that_goes_a_token_at_a_time_are_refused(built: Built) -> None:
    with pytest.raises(PlanRefused, match="a rejected draft cannot be taken out of it"):
        LLM(str(built.folder), speculative_algorithm="ngram", deterministic=True, **ENGINE)


@pytest.mark.parametrize("name", ["A_log", "dt_bias", "conv1d.weight"])
def test_a_missing_tensor_is_named(built: Built, name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((built.folder / "config.json").read_bytes())
    missing = next(key for key in built.tensors if key.endswith(f"layers.1.linear_attn.{name}"))
    save(tmp_path, {key: tensor for key, tensor in built.tensors.items() if key != missing})
    with pytest.raises(UserError, match=rf"{missing}: is missing"):
        load(tmp_path)
