"""Random requests with steps that overlap and without: every request must get the same from both.

    python -m tests.engine.overlap_soak 10000 --output benchmarks/results/overlap-soak-cpu-DATE.json

Requests ask for every sampling field, grammars, stop strings and several answers; their prompts begin alike,
some hold a token that makes NaN. They come at random over few pages, so that some are preempted; some are
aborted before a token of theirs is known. Models keep whole contexts, windows with sinks, and states of
recurrent layers. One rank is also compared with drafts, which rest and come back at random; four ranks share
requests by pairs, or, with such drafts too, all of them.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import random
import string
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import torch

from tests.engine.cluster import SMALL
from tests.engine.toy import SHAPE, ToyModel, engine_plan, merge, request
from tests.models.families import FAMILIES, build
from tests.ranks import Rank, RankPool
from tests.tiny import write_model, write_tokenizer
from turnout.attention.kinds import AttentionSpec, DeltaNetSpec
from turnout.bench.results import result, save
from turnout.config import Config
from turnout.engine import grammar
from turnout.engine.builder import build_engine
from turnout.engine.core import EngineCore
from turnout.engine.engine_plan import EnginePlan, resolve
from turnout.engine.messages import AddRequest, EngineStats, RequestOutput
from turnout.engine.ranks.step_sync import StepSync
from turnout.engine.sampling import greedy
from turnout.engine.sampling.detokenizer import TextStream
from turnout.engine.speculative.switch import DraftSwitch
from turnout.engine.tokenizer import Tokenizer
from turnout.parallel.exchange import SharedExchange
from turnout.parallel.hardware import cpu_name

FULL = AttentionSpec.full(num_heads=4, num_kv_heads=2, head_dim=8)
SINKS = replace(FULL, sinks=True)
DELTA = DeltaNetSpec(num_heads=4, num_kv_heads=2, head_dim=16, value_dim=16, scale=0.25, conv_width=4)
TOYS = {
    "full attention": (FULL, FULL),
    "windows and sinks": (SINKS.sliding(6), SINKS),
    "recurrent": (DELTA, FULL),
}
TINY = {"hidden_size": 32, "head_dim": 8, "moe_intermediate_size": 16, "intermediate_size": 32}
RANK_FAMILIES = ("qwen3_moe", "gpt_oss")
VOCABULARY, END, POISON = 258, 257, 256  # of tests/tiny.py's tokenizer
CONTEXT = 60
DRAFTS = {"speculative_algorithm": "ngram", "speculative_num_draft_tokens": 4}
LIST = {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3}


def grammars() -> list[str]:
    return [
        grammar.grammar(grammar.matching("(ab|cd){1,9}")),
        grammar.grammar(grammar.json_value(LIST)),
    ]


def sampling(draw: random.Random, followed: list[str]) -> dict[str, Any]:
    """Some of the fields that change what is drawn, or what is said about it."""
    fields: dict[str, list[Any]] = {
        "temperature": [0.0, 0.0, 0.7, 1.5],
        "seed": [None, 11],
        "top_k": [0, 3],
        "top_p": [1.0, 0.8],
        "min_p": [0.0, 0.05],
        "logprobs": [None, None, 0, 3],
        "prompt_logprobs": [None, None, 1],
        "presence_penalty": [0.0, 0.8],
        "frequency_penalty": [0.0, 0.5],
        "repetition_penalty": [1.0, 1.3],
        "logit_bias": [{}, {4: 3.0}, {END: 4.0}],
        "min_tokens": [0, 3],
        "max_tokens": [0, 1, 2, 9, 20],
        "stop_token_ids": [(), tuple(range(0, VOCABULARY, 20))],
        "stop": [(), tuple(string.ascii_lowercase), ("ab", "dab")],
        "include_stop_str_in_output": [False, True],
        "skip_special_tokens": [True, False],
        "ignore_eos": [False, True],
        "grammar": ["", "", *followed],
    }
    chosen = {name: draw.choice(values) for name, values in fields.items() if draw.random() < 0.5}
    if chosen.get("min_tokens"):
        chosen["max_tokens"] = 12
    if chosen.get("logprobs") is not None and draw.random() < 0.3:
        chosen["logprob_token_ids"] = (1, 5)
    if chosen.get("grammar"):
        chosen.pop("ignore_eos", None)
        chosen["stop"] = ()
    return chosen


def groups_of_requests(draw: random.Random, count: int) -> list[list[AddRequest]]:
    """`count` requests or a few more; those of a group are answers to one prompt, and come together."""
    begin, followed = [draw.randrange(POISON) for _ in range(26)], grammars()
    groups: list[list[AddRequest]] = []
    while sum(map(len, groups)) < count:
        own = [draw.randrange(POISON) for _ in range(draw.randint(1, 8))] * draw.choice([1, 1, 1, 3])
        prompt = (begin[: draw.choice([0, 0, 8, 16, 23, 26])] + own)[: CONTEXT - 24]
        if draw.random() < 0.02:
            prompt[-1] = POISON
        fields = sampling(draw, followed)
        output_ids: list[int] = []  # told by an engine before this one
        if fields.get("max_tokens", 16) > 3 and not fields.get("grammar") and draw.random() < 0.1:
            output_ids = [draw.randrange(POISON) for _ in range(3)]
        priority = draw.randint(-2, 2)
        answers = draw.choice([1] * 8 + [3])
        if answers > 1 and fields.get("seed") is not None:
            fields["temperature"] = 1.0
        group = []
        for i in range(answers):
            seed = {"seed": fields["seed"] + i} if fields.get("seed") is not None else {}
            message = request(f"{len(groups)}.{i}", prompt, **fields | seed)
            group.append(msgspec.structs.replace(message, priority=priority, output_ids=output_ids))
        groups.append(group)
    return groups


@dataclass
class Answers:
    """What requests got: outputs merged into one and texts, by request. seen: how often what happened.

    tokenizer, streams: while answers come."""

    tokenizer: Tokenizer | None
    outputs: dict[str, RequestOutput] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    seen: Counter[str] = field(default_factory=Counter)
    streams: dict[str, TextStream] = field(default_factory=dict)
    stopped: set[str] = field(default_factory=set)

    def add(self, core: EngineCore, message: AddRequest) -> None:
        assert self.tokenizer is not None
        core.add(message)
        self.streams[message.id] = TextStream(self.tokenizer, message.sampling)
        self.texts[message.id] = ""
        self.seen["with grammars"] += bool(message.sampling.grammar)
        self.seen["with several answers"] += message.id.endswith(".1")

    def take(self, core: EngineCore, output: RequestOutput) -> None:
        """As the server does: a stop string in the text ends the request."""
        if output.id in self.stopped:
            return
        delta = self.streams[output.id].push(output)
        self.texts[output.id] += delta.text
        if delta.stopped:
            if output.finish_reason is None:
                core.abort([output.id])
            self.stopped.add(output.id)
            output.finish_reason = "stop string"
        self.seen[f"ended by {output.finish_reason}"] += bool(output.finish_reason)
        self.seen["tokens"] += len(output.token_ids)
        merge(self.outputs, output)

    def without(self, doomed: set[str]) -> Answers:
        left = {id: output for id, output in self.outputs.items() if id not in doomed}
        return replace(self, outputs=left, tokenizer=None, streams={})

    def note(self, stats: EngineStats) -> None:
        self.seen["preemptions"] = stats.preemptions
        self.seen["prompt tokens from the prefix cache"] = stats.cached_prompt_tokens
        self.seen["drafts that held"] = stats.spec_accepted_tokens
        self.seen["overlapped steps"] = stats.overlapped_steps


@dataclass(frozen=True)
class Compared:
    """How many requests were compared, which differ, and what happened where steps overlapped."""

    requests: int
    differing: list[str]
    seen: Counter[str]


@dataclass(frozen=True)
class ComparedRanks(Compared):
    """With counters of the first rank of each pair, without overlap and with it."""

    apart: list[EngineStats] = field(kw_only=True)
    overlapped: list[EngineStats] = field(kw_only=True)


@dataclass(frozen=True, kw_only=True)
class LateNearTies(EnginePlan):
    """A plan for a toy with states in float32, which overlaps as one in bfloat16 would."""

    @property
    def keeps_states(self) -> bool:
        return False

    @property
    def num_snapshots(self) -> int:
        return self.config.max_running_requests if self.config.state_snapshot_interval else 0


class Restless(DraftSwitch):
    """Lets drafts rest at random, and not by the clock: steps that overlap come between others."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._draw = random.Random(seed)
        self._rests = 0

    def drafts(self, decoding: int) -> bool:
        return decoding % 3 != self._rests and self._rests < 3

    def ran(self, decoding: int, way: bool, tokens: int, seconds: float) -> None:
        if self._draw.random() < 0.2:
            self._rests = self._draw.randrange(5)


def toy_core(name: str, folder: Path, seed: int, **flags: Any) -> EngineCore:
    """folder: of the tokenizer. seed: of when drafts rest, if there are any."""
    shape = replace(SHAPE, attention=TOYS[name], vocab_size=VOCABULARY, eos_token_ids=(END,))
    model = ToyModel(seed=1, shape=shape)
    model.poison = POISON
    pages = flags.pop("num_pages")
    config = Config(page_size=4, num_threads=1, **flags)
    plan = replace(engine_plan(config, shape, num_pages=pages, max_context=CONTEXT), folder=folder)
    if name == "recurrent":
        values = {f.name: getattr(plan, f.name) for f in dataclasses.fields(plan)}
        plan = LateNearTies(**values)
    core = build_engine(plan, model=model)
    if core._scheduler.switch is not None:
        core._scheduler.switch = Restless(seed)
    return core


def answers(name: str, folder: Path, seed: int, count: int, **flags: Any) -> Answers:
    """Of one rank. What comes when, and what is aborted, depends on `seed` alone."""
    with patch.object(greedy, "CLOSE", 0.0 if name == "recurrent" else greedy.CLOSE):
        return _answers(name, folder, seed, count, **flags)


def _answers(name: str, folder: Path, seed: int, count: int, **flags: Any) -> Answers:
    draw = random.Random(seed)
    core = toy_core(
        name,
        folder,
        seed,
        num_pages=draw.choice([16, 24, 64]),
        chunked_prefill_size=draw.choice([2, 5, 16]),
        max_prefill_tokens=draw.choice([8, 40]),
        max_running_requests=draw.choice([1, 3, 8]),
        disable_prefix_cache=draw.random() < 0.3,
        scheduling_policy=draw.choice(["fcfs", "priority"]),
        state_snapshot_interval=draw.choice([4, 8]),
        **flags,
    )
    waiting = groups_of_requests(draw, count)[::-1]
    doomed = {message.id for group in waiting for message in group if draw.random() < 0.05}
    arrivals = random.Random(seed)
    found = Answers(Tokenizer.load(folder))
    while waiting or core.has_work():
        for _ in range(min(len(waiting), arrivals.choice([0, 1, 5]))):
            for message in waiting.pop():
                found.add(core, message)
        if arrivals.random() < 0.3:
            core.abort(list(doomed & set(core._requests)))
        for output in core.step():
            found.take(core, output)
    assert core.stats().pages_used == 0
    found.note(core.stats())
    return found.without(doomed)


def differences(apart: Answers, overlapped: Answers) -> list[str]:
    """The requests that got something else."""
    assert overlapped.outputs.keys() == apart.outputs.keys()
    return [
        id
        for id, output in apart.outputs.items()
        if overlapped.texts[id] != apart.texts[id] or not _same(overlapped.outputs[id], output)
    ]


def _same(other: RequestOutput, output: RequestOutput) -> bool:
    if (other.token_ids, other.finish_reason, other.stop_token, other.error) != (
        output.token_ids,
        output.finish_reason,
        output.stop_token,
        output.error,
    ):
        return False
    if output.error:
        return True  # which rows of its prompt were NaN depends on how that was cut
    for ours, theirs in (
        (other.logprobs, output.logprobs),
        (other.prompt_logprobs, output.prompt_logprobs),
    ):
        if (ours is None) != (theirs is None) or len(ours or []) != len(theirs or []):
            return False
        for a, b in zip(ours or [], theirs or [], strict=True):
            if a is None or b is None:
                if a is not b:
                    return False
            elif math.isnan(a.logprob) or math.isnan(b.logprob):
                continue
            elif (a.token_id, a.rank) != (b.token_id, b.rank):
                return False
            elif not math.isclose(a.logprob, b.logprob, rel_tol=1e-4, abs_tol=1e-3):
                return False  # chunks of recurrent layers round otherwise than single tokens
    return True


def compare(name: str, folder: Path, seed: int, count: int) -> Compared:
    """About `count` requests to a toy, twice over, and for every other seed with drafts too."""
    apart = answers(name, folder, seed, count, overlap_schedule="off")
    overlapped = answers(name, folder, seed, count, overlap_schedule="on")
    assert overlapped.seen["overlapped steps"] > 0 == apart.seen["overlapped steps"]
    differing, seen = differences(apart, overlapped), overlapped.seen
    if seed % 2 == 0:
        drafted = answers(name, folder, seed, count, overlap_schedule="on", **DRAFTS)
        differing = sorted({*differing, *differences(apart, drafted)})
        seen += Counter({"drafts that held": drafted.seen["drafts that held"]})
        seen += Counter({"overlapped steps with drafts": drafted.seen["overlapped steps"]})
    return Compared(len(apart.outputs), differing, seen)


def serve_rank(
    rank: Rank, model: Path, seed: int, count: int, switch: str, dp_size: int
) -> tuple[Answers, EngineStats]:
    """Answers of one of several ranks, in `dp_size` groups that share requests. What comes and goes depends
    on the number of the step. switch: of overlap, and of --prefill-delayer or, in a single group, drafts."""
    flags: dict[str, Any] = SMALL | {"max_total_tokens": 96, "context_length": CONTEXT}
    if dp_size > 1:
        flags |= {"prefill_delayer": switch, "prefill_delayer_max_delay_ms": 1e6}
    elif switch == "on":
        flags |= DRAFTS
    config = Config(
        model=str(model),
        tp_size=rank.size,
        dp_size=dp_size,
        ep_size=rank.size,
        enable_dp_attention=dp_size > 1,
        overlap_schedule=switch,
        scheduling_policy="priority",
        **flags,
    )
    groups = rank.groups(dp_size=dp_size, ep_size=rank.size)
    exchange = SharedExchange(rank.folder / "steps", rank.number, rank.size)
    core = build_engine(
        resolve(config, rank=rank.number), groups=groups, step_sync=StepSync(groups.topology, exchange)
    )
    if core._scheduler.switch is not None:
        core._scheduler.switch = Restless(seed)
    draw = random.Random(2 * seed + groups.topology.dp_rank)
    waiting = groups_of_requests(draw, count)[::-1]
    found = Answers(Tokenizer.load(model))
    doomed: set[str] = set()
    step = 0
    while step < 4 * count or core.synced is None or core.synced.phase:
        (arriving,) = draw.choices([0, 1, 5], [80, 16, 4])
        for _ in range(min(arriving, len(waiting)) if step < 4 * count else 0):
            for message in waiting.pop():
                found.add(core, message)
        if step < 4 * count and found.texts and draw.random() < 0.05:
            doomed.add(id := draw.choice([*found.texts]))
            core.abort([id])
        for output in core.step():
            found.take(core, output)
        step += 1
    stats = core.stats()
    assert stats.pages_used == 0
    found.note(stats)
    return found.without(doomed), stats


def compare_ranks(pool: RankPool, model: Path, seed: int, count: int, dp_size: int = 2) -> ComparedRanks:
    """As `compare`, for up to `count` requests of each group of ranks. Where steps overlap prompts are also
    delayed, if there are several groups, and otherwise drafted for."""
    apart, overlapped = (
        pool.run(serve_rank, model, seed, count, switch, dp_size, timeout=600)[:: pool.size // dp_size]
        for switch in ("off", "on")
    )
    pairs = zip(apart, overlapped, strict=True)
    differing = [
        f"{pair}/{id}"
        for pair, ((ours, _), (theirs, _)) in enumerate(pairs)
        for id in differences(ours, theirs)
    ]
    return ComparedRanks(
        sum(len(answers.outputs) for answers, _ in apart),
        differing,
        sum((answers.seen for answers, _ in overlapped), Counter()),
        apart=[stats for _, stats in apart],
        overlapped=[stats for _, stats in overlapped],
    )


def write_family(name: str, folder: Path) -> None:
    if name == "qwen3_moe":
        write_model(folder, **TINY)
    else:
        build(folder, FAMILIES[name])


def soak(requests: int) -> list[dict[str, Any]]:
    """A row for each model. Of all requests a ninth goes to each family on four ranks, which takes longer."""
    rank_share = -(-requests // 9)
    share = -(-(requests - rank_share * len(RANK_FAMILIES)) // len(TOYS))
    with ProcessPoolExecutor(len(TOYS), mp_context=get_context("spawn")) as pool:
        toys = [pool.submit(soak_toy, name, share) for name in TOYS]
        ranks = [soak_ranks(name, rank_share) for name in RANK_FAMILIES]
        return [toy.result() for toy in toys] + ranks


def soak_toy(name: str, requests: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        one = partial(compare, name, Path(folder), count=100)
        return row({"model": f"toy, {name}", "ranks": 1}, requests, one)


def soak_ranks(name: str, requests: int) -> dict[str, Any]:
    pool = RankPool(4)
    with tempfile.TemporaryDirectory() as folder:
        write_family(name, Path(folder))

        def four(seed: int) -> Compared:
            return compare_ranks(pool, Path(folder), seed, 100, dp_size=1 + seed % 2)

        found = row({"model": name, "ranks": 4}, requests, four)
    pool.close()
    return found


def row(about: dict[str, Any], requests: int, once: Callable[..., Compared]) -> dict[str, Any]:
    """Compares with new seeds until so many requests have been."""
    began, done = time.monotonic(), 0
    seen, differing = Counter[str](), list[str]()
    for seed in itertools.count(1000):
        compared = once(seed=seed)
        done, seen = done + compared.requests, seen + compared.seen
        differing += [f"{seed}/{id}" for id in compared.differing]
        if done >= requests:
            break
    found = about | {"requests": done, "differing": differing, "seen": dict(sorted(seen.items()))}
    print(found | {"seconds": round(time.monotonic() - began)}, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("requests", type=int)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    command = f"python -m tests.engine.overlap_soak {options.requests}"
    content = result("overlap-soak", soak(options.requests), device=cpu_name(), command=command)
    if options.output is not None:
        save(content, options.output)


if __name__ == "__main__":
    main()
