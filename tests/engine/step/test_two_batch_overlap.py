"""Steps as two micro-batches: cut anywhere, on ranks with tokens or without, the answers are those of one."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.engine.planned import write
from tests.engine.scheduler.test_scheduler import start
from tests.engine.test_llm_ranks import SETTINGS
from tests.ranks import Pools, Rank
from tests.tiny import QWEN2_MOE, write_model
from turnout import LLM, SamplingParams
from turnout.config import Config
from turnout.engine.engine_plan import resolve
from turnout.engine.scheduler.scheduler import Chunk
from turnout.engine.step import two_batch_overlap
from turnout.errors import PlanRefused
from turnout.models.decoder import DecoderLayer

TWO = {
    "tp_size": 2,
    "dp_size": 2,
    "ep_size": 2,
    "enable_dp_attention": True,
    "enable_two_batch_overlap": True,
}
PROMPTS = ["one", "two and more", "3", "four is a longer prompt than the others are", "five"]


@pytest.mark.parametrize("seed", range(20))
def test_every_token_is_in_one_half(seed: int):
    draw = random.Random(seed)
    chunks = []
    for i in range(draw.randint(0, 6)):
        begin, length = draw.randint(0, 9), draw.choice([1, 1, 2, 17])
        chunks.append(Chunk(start(str(i), [0] * 40, 1), begin, begin + length))
    count = draw.randint(0, sum(chunk.length for chunk in chunks))
    first, rest = two_batch_overlap.split_chunks(chunks, count)

    def places(parts: list[Chunk]) -> list[tuple[str, int]]:
        return [(part.request.id, place) for part in parts for place in range(part.start, part.end)]

    assert len(places(first)) == count
    assert places(first) + places(rest) == places(chunks)
    assert all(part.length for part in first + rest)


def test_ranks_split_alike():
    assert two_batch_overlap.split_tokens((two_batch_overlap.LEAST - 1, 0)) is None
    assert two_batch_overlap.split_tokens((two_batch_overlap.LEAST, 0, 1, 7)) == (
        (two_batch_overlap.LEAST // 2, 0, 1, 4),
        (two_batch_overlap.LEAST // 2, 0, 0, 3),
    )


def answers(llm: LLM) -> list[tuple[str, list[int]]]:
    """Greedy and sampled, alone and together; a prompt of 30 tokens is cut in its middle."""
    kinds = [SamplingParams(max_tokens=10), SamplingParams(max_tokens=14, temperature=1.0, seed=3)]
    found = []
    for count in (1, 5):
        sampling = [kinds[i % 2] for i in range(count)]
        found += [(c.text, c.token_ids) for c in llm.generate(PROMPTS[:count], sampling)]
    return found


def on_rank(rank: Rank, config: Config) -> tuple[list[tuple[str, list[int]]], list[tuple[int, ...]]]:
    """Answers, and the tokens of each pair of micro-batches."""
    seen: list[tuple[int, ...]] = []
    taken, two_batch_overlap.LEAST = DecoderLayer.overlapped, 2

    def noting(layer, flows, rotaries, steps):
        seen.append(tuple(len(step.input_ids) for step in steps))
        return taken(layer, flows, rotaries, steps)

    DecoderLayer.overlapped = noting  # ranks are kept for other tests
    try:
        with LLM.from_config(config, rank.launched()) as llm:
            assert llm.info()["plan"]["two_batches"]
            return answers(llm), seen
    finally:
        DecoderLayer.overlapped, two_batch_overlap.LEAST = taken, 64


@pytest.mark.parametrize("dispatcher", ["none", "collective"])
def test_ranks_that_take_turns_answer_as_one_rank(ranks: Pools, tmp_path: Path, dispatcher: str):
    write_model(tmp_path, QWEN2_MOE, mlp_only_layers=[1], num_hidden_layers=3)
    flags = SETTINGS | {"model": str(tmp_path), "max_running_requests": 3, "chunked_prefill_size": 7}
    with LLM(**flags) as llm:
        alone = answers(llm)
    found = ranks(2).run(on_rank, Config(**flags, **TWO, moe_a2a_backend=dispatcher))
    assert [texts for texts, _ in found] == [alone] * 2
    for _, seen in found:
        assert any(len(sizes) == 2 and min(sizes) > 0 for sizes in seen)
        assert any(0 in sizes for sizes in seen), "no rank was idle"


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ({"tp_size": 2, "enable_two_batch_overlap": True}, "have nothing but their tokens"),
        (TWO | {"tp_size": 4, "ep_size": 4}, "have nothing but their tokens"),
        (TWO | {"speculative_algorithm": "ngram"}, "drafts cannot be split"),
        (TWO | {"deterministic": True}, "splits steps in another way"),
        (TWO | {"moe_a2a_backend": "flashinfer"}, "its buffers hold one batch at a time"),
    ],
)
def test_what_cannot_be_split_is_refused(tmp_path: Path, flags: dict, why: str):
    with pytest.raises(PlanRefused, match=why):
        resolve(write(tmp_path, **flags), rank=0)
