"""Offline generation on several ranks: the same completions as on one, on every rank; and how ranks start."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import Pools, Rank
from tests.server.namespaces import Namespace
from tests.server.processes import closing_terminals
from tests.tiny import write_model
from turnout import LLM, SamplingParams
from turnout.commands.generate import generate
from turnout.config import Config, Launched, launched
from turnout.engine.ranks.rendezvous import check_launch
from turnout.engine.ranks.step_sync import SyncedStep
from turnout.engine.scheduler.scheduler import Chunk
from turnout.engine.step.cuda_graphs import Computed
from turnout.engine.warmup import first_prompts
from turnout.errors import UserError

SETTINGS = {"device": "cpu", "num_threads": 1, "load_progress": False, "max_total_tokens": 2048}
PARALLEL_LAYOUTS = [
    {"tp_size": 4, "dp_size": 4, "ep_size": 4, "enable_dp_attention": True},
    {"tp_size": 2, "ep_size": 2},
]
PROMPTS = ["one", "two and more", "3", "four is a longer prompt than the others are", "five"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder)
    return folder


def varied(count: int) -> list[SamplingParams]:
    """Greedy with a stop string, sampled with the default seed, sampled with its own, scored, and so on."""
    kinds = [
        SamplingParams(max_tokens=12, stop=("e",)),
        SamplingParams(max_tokens=12, temperature=1.0),
        SamplingParams(max_tokens=12, temperature=1.0, seed=5),
        SamplingParams(max_tokens=4, logprobs=2, prompt_logprobs=1),
        SamplingParams(max_tokens=1),
    ]
    return [kinds[i % len(kinds)] for i in range(count)]


def calls(llm: LLM) -> list[Any]:
    """Everything a caller can see of more prompts than ranks, of one, and of none."""
    found = []
    for count in (5, 1, 0, 3):
        for c in llm.generate(PROMPTS[:count], varied(count)):
            scores = [round(entry.logprob, 3) for entry in c.logprobs or []]
            found.append((c.text, c.token_ids, c.finish_reason, c.stop_reason, scores))
    return found


def on_rank(rank: Rank, config: Config) -> list[Any]:
    with LLM.from_config(config, rank.launched()) as llm:
        return calls(llm)


@pytest.mark.parametrize("sizes", PARALLEL_LAYOUTS, ids=["dp 4", "tp 2"])
def test_every_rank_gets_what_a_single_rank_answers(ranks: Pools, folder: Path, sizes: dict):
    with LLM(str(folder), **SETTINGS) as llm:
        alone = calls(llm)
    config = Config(model=str(folder), **SETTINGS, **sizes)
    assert ranks(config.tp_size).run(on_rank, config) == [alone] * config.tp_size


def greedy(llm: LLM) -> list[list[int]]:
    return [completion.token_ids for completion in llm.generate(PROMPTS, SamplingParams(max_tokens=12))]


def greedy_on_rank(rank: Rank, config: Config) -> list[list[int]]:
    with LLM.from_config(config, rank.launched()) as llm:
        return greedy(llm)


def greedy_after_first_prompts(rank: Rank, config: Config) -> tuple[set[tuple[int, ...]], list[list[int]]]:
    """What ranks brought to a step, and what they answer."""
    with LLM.from_config(config, rank.launched()) as llm:
        core, brought = llm._open(), set()
        compute = core._forward.eagerly

        def noted(chunks: Sequence[Chunk], synced: SyncedStep) -> Computed:
            brought.add(synced.tokens)
            assert sum(chunk.length for chunk in chunks) == synced.tokens[core.engine_plan.topology.dp_rank]
            return compute(chunks, synced)

        core._forward.eagerly = noted
        with torch.inference_mode():
            first_prompts(core.engine_plan, core._forward, core._model, core._scheduler.kv, None)
        core._forward.eagerly = compute
        return brought, greedy(llm)


def test_ranks_warm_up_by_steps_of_few_tokens_next_to_many(ranks: Pools, folder: Path):
    """As they do on GPUs: all take part in every step, and answer afterwards as without."""
    sizes = PARALLEL_LAYOUTS[0] | {"max_prefill_tokens": 33, "max_running_requests": 4}
    config = Config(model=str(folder), **SETTINGS, **sizes)
    found = ranks(4).run(greedy_after_first_prompts, config)
    assert found == [found[0]] * 4
    brought, tokens = found[0]
    assert brought == {(n,) * 4 for n in (1, 2, 3, 4, 7, 8, 15, 16, 31, 32, 33)} | {(33, 1) * 2, (1, 33) * 2}
    with LLM(str(folder), **SETTINGS) as llm:
        assert tokens == greedy(llm)


@pytest.mark.multigpu
@pytest.mark.parametrize("dp_size", [1, 2])
def test_two_gpus_answer_as_one(ranks: Pools, folder: Path, dp_size: int):
    flags = SETTINGS | {"device": "cuda", "dtype": "float32", "mem_fraction_static": 0.2, "ep_size": 2}
    sizes = {"tp_size": 2, "dp_size": dp_size, "enable_dp_attention": dp_size > 1}
    found = ranks(2).run(greedy_on_rank, Config(model=str(folder), **flags, **sizes), timeout=300)
    with LLM(str(folder), **(flags | {"ep_size": 1})) as llm:
        assert found == [greedy(llm)] * 2


def with_prompts_of_its_own(rank: Rank, config: Config) -> tuple[str, bool]:
    with LLM.from_config(config, rank.launched()) as llm:
        with pytest.raises(UserError) as raised:
            llm.generate(PROMPTS[rank.number])
        again = llm.generate(PROMPTS[0])  # nothing was begun, so nothing is lost
        return str(raised.value), bool(again[0].token_ids)


def test_ranks_that_are_asked_different_things_say_so(ranks: Pools, folder: Path):
    config = Config(model=str(folder), **SETTINGS, **PARALLEL_LAYOUTS[1])
    told = ranks(2).run(with_prompts_of_its_own, config)
    message = "ranks 0 and 1 were given different prompts or parameters: every rank must make the same calls"
    assert told == [(message, True)] * 2


@pytest.mark.parametrize(
    ("flags", "place", "message"),
    [
        ({"tp_size": 4}, None, r"--tp-size 4: this is one process.*torchrun --nproc-per-node 4"),
        ({"tp_size": 4}, (2, 2), r"--tp-size 4, but 2 processes.*use --tp-size 2, or start 4"),
        ({}, (2, 2), r"--tp-size 1, but 2 processes"),
        ({"tp_size": 4}, (4, 2), r"--nnodes 1, but .* on 2 hosts .*: use --nnodes 2"),
        ({"tp_size": 4, "nnodes": 2}, (4, 4), r"--nnodes 2, but .* on 1 hosts"),
    ],
)
def test_processes_that_are_not_the_ranks_asked_for_are_refused(
    flags: dict, place: tuple[int, int] | None, message: str
):
    started = Launched(rank=0, size=place[0], ranks_per_node=place[1]) if place else None
    with pytest.raises(UserError, match=message):
        check_launch(Config(**flags), started)


def test_a_plain_process_is_no_rank(folder: Path):
    with pytest.raises(UserError, match="or start this script with `torchrun --nproc-per-node 2`"):
        LLM(str(folder), tp_size=2, **SETTINGS)


def test_torchruns_variables_are_read(monkeypatch: pytest.MonkeyPatch):
    assert launched() is None
    for name, value in {"RANK": 5, "WORLD_SIZE": 8, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 4}.items():
        monkeypatch.setenv(name, str(value))
    assert launched() == Launched(rank=5, size=8, ranks_per_node=4, init_method="env://")


FLAGS = ("--device", "cpu", "--num-threads", "1", "--max-total-tokens", "2048", "--tp", "2", "--ep", "2")


@pytest.mark.more
def test_torchrun_answers_as_one_process(folder: Path, tmp_path: Path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    out, expected = tmp_path / "out.jsonl", tmp_path / "expected.jsonl"
    sampling = SamplingParams(max_tokens=8)
    generate(Config(model=str(folder), **SETTINGS), str(prompts), sampling, chat=False, output=expected)
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "turnout.cli")
    words = ("generate", str(folder), str(prompts), "--max-tokens", "8", "--output", str(out), *FLAGS)
    done = subprocess.run(
        [sys.executable, "-m", *torchrun, *words], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert out.read_text() == expected.read_text()


class Command:
    """`turnout generate` on two ranks that it starts itself; its temporary files go to `folder`."""

    def __init__(self, model: Path, folder: Path, *words: str):
        folder.mkdir()
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-m", "turnout.cli", "generate", str(model), *words, *FLAGS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"TMPDIR": str(folder)},
            start_new_session=True,
            # A shell that starts tests in the background has them ignore Ctrl-C, and so would the command.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )

    def ranks(self) -> list[int]:
        """Process ids, of both ranks in order once they are there."""
        listed = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", str(self.process.pid)], capture_output=True, text=True, check=False
        )
        return sorted(map(int, listed.stdout.split()))

    def wait_for_ranks(self) -> list[int]:
        deadline = time.monotonic() + 60
        while len(found := self.ranks()) < 2 or not any(self.folder.iterdir()):
            assert time.monotonic() < deadline
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.05)
        return found

    def end(self, text: str | None = None) -> tuple[int, str, str]:
        """(exit code, output, errors)."""
        out, errors = self.process.communicate(text, timeout=120)
        return self.process.returncode, out, errors

    def leaves_nothing(self, ranks: list[int], seconds: float = 60) -> bool:
        deadline = time.monotonic() + seconds
        while any(map(alive, ranks)) or any(self.folder.iterdir()):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() != b""  # empty: a zombie
    except OSError:
        return False


def test_one_command_starts_the_ranks_and_passes_its_input_on(folder: Path, tmp_path: Path):
    with LLM(str(folder), **SETTINGS) as llm:
        expected = llm.generate(PROMPTS[1], SamplingParams(max_tokens=8))[0].text
    command = Command(folder, tmp_path / "files", "--max-tokens", "8", "--no-chat")
    code, out, errors = command.end(PROMPTS[1])
    assert (code, out) == (0, expected + "\n"), errors
    assert command.leaves_nothing([])


def test_a_rank_that_fails_ends_the_command_with_its_own_words(folder: Path, tmp_path: Path):
    command = Command(folder, tmp_path / "files", "--max-tokens", "8")
    ranks = command.wait_for_ranks()
    os.kill(ranks[1], signal.SIGKILL)  # the first waits for input, and must not be waited for
    command.process.wait(60)
    code, out, errors = command.end()
    assert (code, out) == (1, "")
    assert errors.endswith("error: rank 1 was killed by SIGKILL\n")
    assert command.leaves_nothing(ranks)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may make network namespaces")
def test_without_a_loopback_ranks_say_so(folder: Path):
    host = Namespace()
    host.ip("link", "set", "lo", "down")
    flags = [str(folder), "--device", "cpu", "--tp", "2"]
    for words in (["generate", *flags[:1], "one", *flags[1:]], ["serve", "--port", "0", *flags]):
        command = [sys.executable, "-m", "turnout", *words]
        done = host.call(subprocess.run, command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 2
        assert done.stderr.startswith("error: the ranks of a host meet at 127.0.0.1, and its loopback")
    host.close()


def test_what_cannot_run_is_refused_once_before_ranks_start(folder: Path, tmp_path: Path):
    command = Command(folder, tmp_path / "files", "PROMPT", "--moe-runner-backend", "nonesuch")
    code, out, errors = command.end()
    assert (code, out) == (2, "")
    assert errors.count("nonesuch") == 1
    assert command.leaves_nothing([])


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        pytest.param(signal.SIGHUP, marks=pytest.mark.more),
        pytest.param(signal.SIGTERM, marks=pytest.mark.more),
        signal.SIGKILL,
    ],
    ids=lambda n: n.name,
)
def test_however_the_command_ends_its_ranks_do(folder: Path, tmp_path: Path, number: signal.Signals):
    with closing_terminals(signal.SIG_DFL):
        command = Command(folder, tmp_path / "files")
    ranks = command.wait_for_ranks()
    if number in (signal.SIGINT, signal.SIGHUP):
        os.killpg(command.process.pid, number)  # as a terminal does
    else:
        command.process.send_signal(number)
    assert command.process.wait(60) != 0
    assert command.leaves_nothing(ranks)
