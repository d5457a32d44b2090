"""Models that keep more of a request than keys and values: same tokens as a plain loop in any schedule.

Recurrent layers, whose plain loop is the toy's; sparse latent attention (DeepSeek-V3.2, GLM-5) and compressed
attention (DeepSeek-V4), whose plain loop is transformers'. Over ranks: test_request_states_on_ranks.py.

`python -m tests.engine.test_request_states 5000` sends each model as many requests, and prints what happened;
names behind the number choose models.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.engine.step.rerun import with_prefill_graphs
from tests.engine.test_cache_groups import asked
from tests.engine.test_core import _drive_at_random, assert_idle, requests_of
from tests.engine.toy import SHAPE, ToyModel, make_core, request, run
from tests.models.families import FAMILIES, build
from tests.models.running import PlainAttention, load
from tests.models.test_deepseek_v4 import build_published
from turnout.attention.compressed import CompressedAttention
from turnout.attention.kinds import AttentionSpec, DeltaNetSpec, keeps_states
from turnout.attention.sparse_latent import SparseLatentAttention
from turnout.engine.core import EngineCore
from turnout.engine.scheduler.snapshots import SnapshotPool
from turnout.models.interface import Model

FULL = AttentionSpec.full(num_heads=4, num_kv_heads=2, head_dim=8)
DELTA = DeltaNetSpec(num_heads=4, num_kv_heads=2, head_dim=16, value_dim=16, scale=0.25, conv_width=4)
MODELS = {
    "hybrid": (DELTA, DELTA, FULL, DELTA),
    "two kinds of state, and a window": (DELTA, replace(DELTA, num_kv_heads=4), FULL.sliding(6), FULL),
}
LONG = "deepseek_v4, entries of 4 and 128"
IN_FP8 = "deepseek_v32, index keys in FP8"
PUBLISHED_MODELS = ("deepseek_v4", LONG, "deepseek_v32", IN_FP8, "glm_moe_dsa")
FEW = {LONG: 5, IN_FP8: 3}  # schedules under the mark more
VOCABULARY = 16  # so small that a random draft layer foretells some tokens
PROMPTS, ROUND = 14, 36  # of a schedule; schedules with the same prompts
NGRAM: list[dict[str, object]] = [
    {"speculative_algorithm": "ngram", "speculative_num_draft_tokens": count} for count in (2, 4, 6)
]
MTP: list[dict[str, object]] = [
    {"speculative_algorithm": "MTP", "speculative_num_steps": count} for count in (1, 2, 4)
]
FLAGS: list[dict[str, object]] = [
    {},
    {"deterministic": True},
    *(flags for pair in zip(NGRAM, MTP, strict=True) for flags in pair),
]


def toy(name: str) -> ToyModel:
    return ToyModel(seed=4, shape=replace(SHAPE, attention=MODELS[name]))


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model, its plain loop, and what its schedules are drawn from. flags: of schedules, in turn. shared:
    how much prompts have in common; longest, room: of prompts and of contexts; sizes in tokens."""

    model: Any
    greedy: Callable[[list[list[int]], int], list[list[int]]]
    flags: Sequence[dict[str, object]]
    page_sizes: Sequence[int] = (4,)
    intervals: Sequence[int] = (0, 4, 8, 8)
    shared: Sequence[int] = (0, 8, 16, 23, 26)
    longest: int = 44
    room: int = 60
    pages_of: Sequence[int] = (64, 80, 256)
    chunks: Sequence[int] = (1, 3, 8, 32)
    prefill: Sequence[int] = (4, 8, 40)


def recurrent(name: str) -> Subject:
    """With a draft layer behind the layers of its name."""
    shape = replace(
        SHAPE,
        attention=(*MODELS[name], FULL),
        vocab_size=VOCABULARY,
        eos_token_ids=(VOCABULARY - 1,),
    )
    model = ToyModel(seed=4, shape=shape, drafts=True)
    return Subject(
        model=model, greedy=lambda prompts, count: [model.greedy(p, count) for p in prompts], flags=FLAGS
    )


def published(name: str, folder: Path) -> Subject:
    """A family of tests/models/families.py, or DeepSeek-V4 with entries of 4 and 128 tokens."""
    small = {"vocab_size": VOCABULARY, "eos_token_id": VOCABULARY - 1}
    long, in_fp8 = name == LONG, name == IN_FP8
    family = FAMILIES[name.partition(",")[0]]
    built = build_published(folder, **small) if long else build(folder, family, **small)
    model = load(folder, index_fp8=in_fp8)
    found = Subject(
        model=model,
        greedy=lambda prompts, count: (
            greedy_with_rounded_keys(model, prompts, count) if in_fp8 else greedy(built.model, prompts, count)
        ),
        flags=[{}, *NGRAM],
        page_sizes=(4, 8),
        intervals=(0,),
    )
    if not name.startswith("deepseek_v4"):
        return found
    found = replace(found, page_sizes=(2, 4, 8, 16), intervals=(0, 16, 32))
    if not long:
        return found
    return replace(
        found,
        page_sizes=(16, 64, 128),
        intervals=(0, 128, 128),
        shared=(0, 3, 115, 124, 127, 128, 129, 244),
        longest=270,
        room=300,
        pages_of=(384, 512, 2048),
        chunks=(7, 32, 128, 300),
        prefill=(16, 64, 400),
    )


@torch.inference_mode()
def greedy(model: PreTrainedModel, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Transformers' whole computation for each token, of all prompts at once: what follows a token, padding
    too, changes nothing."""
    eos = model.config.get_text_config().eos_token_id
    ends = [len(prompt) for prompt in prompts]
    tokens = torch.zeros(len(prompts), max(ends) + count, dtype=torch.int64)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    rows, ends_R = torch.arange(len(prompts)), torch.tensor(ends)
    for i in range(count):
        logits = model(tokens[:, : max(ends) + i], use_cache=False).logits
        tokens[rows, ends_R + i] = logits[rows, ends_R + i - 1].argmax(-1)
    answers = [row[end : end + count].tolist() for row, end in zip(tokens, ends, strict=True)]
    return [answer[: [*answer, eos].index(eos) + 1] for answer in answers]


@torch.inference_mode()
def greedy_with_rounded_keys(model: Model, prompts: list[list[int]], count: int) -> list[list[int]]:
    """As `greedy`, over attention written out (transformers has no index keys in FP8)."""
    answers = []
    for prompt in prompts:
        attention, answer, fresh = PlainAttention(model), [], prompt
        while len(answer) < count and answer[-1:] != [VOCABULARY - 1]:
            (logits_LV,) = attention.logits(("a", fresh))
            fresh = [int(logits_LV[-1].argmax())]
            answer += fresh
        answers.append(answer)
    return answers


def subject(name: str, folder: Path) -> Subject:
    return recurrent(name) if name in MODELS else published(name, folder)


@pytest.mark.parametrize(
    ("name", "schedules"),
    [
        ("hybrid", 3),
        *((name, 3) for name in PUBLISHED_MODELS if name not in (LONG, IN_FP8)),
        *(pytest.param(name, 30, marks=pytest.mark.more) for name in MODELS),
        *(pytest.param(name, FEW.get(name, 9), marks=pytest.mark.more) for name in PUBLISHED_MODELS),
    ],
)
def test_schedules_never_change_an_answer(name: str, schedules: int, tmp_path: Path) -> None:
    seen = drive(subject(name, tmp_path), schedules)
    if name == LONG:
        del seen["preemptions"]  # its prompts wait for pages, and there are few of these schedules
    assert min(seen.values()) > 0


def drive(subject: Subject, schedules: int, first: int = 0, graphs: Sequence[int] = ()) -> Counter[str]:
    """Prefix hits, chunks, drafts of both kinds, preemption, aborts, slots used again: survivors equal the
    plain loop. graphs: sizes of prefill graphs. Returns how often what happened."""
    seen = Counter[str]()
    stateful = keeps_states(subject.model.shape.attention)
    for seed in range(first, first + schedules):
        draw = random.Random(seed)
        if seed % ROUND == 0 or seed == first:
            prompts = asked(
                random.Random(5 + seed // ROUND), PROMPTS, shared=subject.shared, longest=subject.longest
            )
            prompts = [[token % (VOCABULARY - 1) for token in prompt] for prompt in prompts]
            answers = subject.greedy(prompts, 14)
        interval, flags = draw.choice(subject.intervals), subject.flags[seed % len(subject.flags)]
        tokens, page_size = draw.choice(subject.pages_of), draw.choice(subject.page_sizes)
        core = make_core(
            subject.model,
            state_snapshot_interval=interval,
            page_size=page_size,
            num_pages=tokens // page_size,
            max_context=subject.room,
            chunked_prefill_size=draw.choice(subject.chunks),
            max_prefill_tokens=draw.choice(subject.prefill),
            max_running_requests=draw.choice([1, 3, 6]),
            **flags,
        )
        replayed = with_prefill_graphs(core, graphs) if graphs else None
        spoil(core)
        got, aborted = _drive_at_random(core, prompts, draw)
        for i, answer in enumerate(answers):
            tokens = got[str(i)].token_ids
            assert tokens == (answer[: len(tokens)] if i in aborted else answer), (
                f"schedule {seed}, request {i}"
            )
            seen["tokens"] += len(tokens)
        assert_idle(core)
        stats = core.stats()
        assert interval or not stateful or stats.cached_prompt_tokens == 0
        kind = flags.get("speculative_algorithm", "none")
        if kind != "none":
            seen[f"{kind} drafts that held"] += stats.spec_accepted_tokens
            seen[f"{kind} drafts that did not"] += stats.spec_draft_tokens - stats.spec_accepted_tokens
        if any(subject.intervals) or not stateful:
            seen["prompt tokens from the prefix cache"] += stats.cached_prompt_tokens
        if replayed is not None:
            seen["steps replayed"] += len(replayed.steps)
        seen["preemptions"] += stats.preemptions
        seen["aborts"] += len(aborted)
        seen["requests"] += PROMPTS
    return seen


def spoil(core: EngineCore) -> None:
    """Whatever is left in memory by others must never be read."""
    for states in core._attention.states:
        states.states.fill_(torch.nan)
        states.windows.fill_(torch.nan)
    for group in core._attention.groups:
        if isinstance(group, CompressedAttention):
            for kept in (group.cache, group._recent, group._open):
                kept.fill_(torch.nan)
        if isinstance(group, SparseLatentAttention):
            group.cache.fill_(torch.nan)
            (group.index_scales if group.spec.index_fp8 else group.index_keys).fill_(torch.nan)


def test_near_ties_are_decided_over_states_too() -> None:
    """Every token has a twin whose logit differs in the last bits only."""
    model = toy("hybrid")
    model.head[25:] = model.head[:25] * (1 + 1e-7 * torch.randn(25, 32))
    prompts, seen = asked(random.Random(7), 6), []
    for flags in ({"max_running_requests": 1}, {}, {"chunked_prefill_size": 3}):
        core = make_core(model, overlap_schedule="on", **flags)
        assert core.info()["overlap_schedule"].startswith("a near-tie decided late")
        got = run(core, requests_of(prompts, max_tokens=8, ignore_eos=True))
        seen.append([got[str(i)].token_ids for i in range(len(prompts))])
    assert all(answers == seen[0] for answers in seen)


def test_slots_take_what_the_plan_says() -> None:
    core = make_core(toy("two kinds of state, and a window"), max_running_requests=5)
    assert core._attention.state_bytes == 6 * core.engine_plan.request_bytes
    assert core.info()["state_bytes"] == 6 * core.engine_plan.request_bytes
    kinds = core.engine_plan.describe()["kv"]["states"]
    assert [(kind["layers"], kind["num_slots"]) for kind in kinds] == [(1, 5), (1, 5)]


def test_a_request_has_a_state_for_each_draft() -> None:
    flags = {"speculative_algorithm": "ngram", "speculative_num_draft_tokens": 4}
    core = make_core(toy("hybrid"), max_running_requests=5, state_snapshot_interval=4, **flags)
    assert core.info()["state_bytes"] == (5 * 4 + 1 + 5) * core.engine_plan.request_bytes
    (kind,) = core.engine_plan.describe()["kv"]["states"]
    assert kind["num_slots"] == 20


def finished(core, id: str, prompt: list[int]):
    return run(core, [request(id, prompt, max_tokens=6, ignore_eos=True)])[id]


def test_a_prefix_is_reused_where_pages_and_a_snapshot_are() -> None:
    """Prompts of 22 tokens with snapshots every 8: after 8, 16 and, while decoding, 24."""
    model = toy("hybrid")
    core = make_core(model, state_snapshot_interval=8, max_running_requests=2)
    kv = core._scheduler.kv
    prompt = [i % 49 for i in range(5, 27)]
    first = finished(core, "a", prompt)
    assert len(kv.snapshots) == 2  # of as many as requests that run: the one after 8 made room
    assert finished(core, "b", prompt).cached_tokens == 16
    longer = prompt + first.token_ids
    again = finished(core, "c", longer)
    assert (again.cached_tokens, again.token_ids) == (24, model.greedy(longer, 6, eos=False))
    core.reset_prefix_cache()
    assert finished(core, "d", prompt).cached_tokens == 0
    # Without the pages of attention a snapshot alone is no prefix, nor are these without it.
    kv.pools[0].forget()
    assert finished(core, "e", prompt).cached_tokens == 0
    kv.snapshots.forget()
    assert finished(core, "f", prompt).cached_tokens == 0
    assert finished(core, "g", prompt).token_ids == first.token_ids == model.greedy(prompt, 6, eos=False)


def test_snapshots_are_planned() -> None:
    core = make_core(toy("hybrid"), state_snapshot_interval=4, max_running_requests=5)
    assert core.engine_plan.num_snapshots == 5
    assert core._attention.state_bytes == (5 + 1 + 5) * core.engine_plan.request_bytes


def test_the_snapshot_used_longest_ago_makes_room() -> None:
    pool = SnapshotPool(8, range(4, 6))
    pool.save(b"a", 0)
    pool.save(b"b", 1)
    pool.restore(b"a", 2)
    pool.save(b"c", 1)
    assert (b"a" in pool, b"b" in pool, b"c" in pool) == (True, False, True)
    assert pool.take_copies() == [(0, 4), (1, 5), (4, 2), (1, 5)]
    pool.save(b"c", 0)
    assert pool.take_copies() == []
    pool.forget()
    assert len(pool) == 0


if __name__ == "__main__":
    for name in sys.argv[2:] or (*MODELS, *PUBLISHED_MODELS):
        with tempfile.TemporaryDirectory() as folder:
            seen = drive(subject(name, Path(folder)), -(-int(sys.argv[1]) // PROMPTS))
        print(name, dict(seen), flush=True)
