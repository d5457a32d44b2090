"""The whole way from a checkpoint folder to text, against transformers' `generate` and `log_softmax`."""

from __future__ import annotations

import multiprocessing
import pickle
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from tests.tiny import QWEN2_MOE, QWEN3_MOE, write_model
from turnout import LLM, SamplingParams
from turnout.commands.generate import generate
from turnout.errors import UserError

SETTINGS = {"num_threads": 1, "load_progress": False, "max_total_tokens": 2048}
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module", params=["qwen3_moe", "qwen2_moe"])
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp(request.param)
    base = QWEN3_MOE if request.param == "qwen3_moe" else QWEN2_MOE
    return folder, write_model(folder, base)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3")
    write_model(folder)
    return folder


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(256) for _ in range(draw.randint(1, 60))] for _ in range(count)]


@pytest.fixture(scope="module")
def answers(model: tuple[Path, PreTrainedModel]) -> list[list[int]]:
    """What transformers continues `prompts(10)` with."""
    return [expected(model[1], prompt, 24) for prompt in prompts(10)]


def expected(reference: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    out = reference.generate(
        torch.tensor([prompt]), max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=256
    )
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"chunked_prefill_size": 5, "max_running_requests": 3, "page_size": 4},
        {"max_total_tokens": 192, "chunked_prefill_size": 16},
    ],
    ids=["default", "small chunks", "few pages"],
)
def test_greedy_equals_transformers(
    model: tuple[Path, PreTrainedModel], answers: list[list[int]], flags: dict
) -> None:
    with LLM(str(model[0]), **(SETTINGS | flags)) as llm:
        completions = llm.generate(prompts(10), GREEDY)
    assert [completion.token_ids for completion in completions] == answers
    assert {completion.finish_reason for completion in completions} == {"length"}


def test_scores_equal_transformers(model: tuple[Path, PreTrainedModel]) -> None:
    path, reference = model
    prompt = prompts(1, seed=3)[0] * 2
    with LLM(str(path), **(SETTINGS | {"chunked_prefill_size": 16})) as llm:
        sampling = SamplingParams(max_tokens=5, ignore_eos=True, logprobs=4, prompt_logprobs=4)
        completion = llm.generate(prompt, sampling)[0]
    tokens = prompt + completion.token_ids
    with torch.no_grad():
        scores = torch.log_softmax(reference(torch.tensor([tokens])).logits[0].double(), -1)
    assert completion.prompt_logprobs is not None
    assert completion.logprobs is not None
    entries = [*completion.prompt_logprobs, *completion.logprobs]
    assert len(entries) == len(tokens)
    assert entries[0] is None
    for place, entry in enumerate(entries[1:], 1):
        assert entry is not None
        row = scores[place - 1]
        assert (entry.token_id, entry.rank) == (tokens[place], 1 + int((row > row[tokens[place]]).sum()))
        assert entry.logprob == pytest.approx(float(row[tokens[place]]), abs=2e-4)
        assert [p for _, p in entry.top] == pytest.approx(row.topk(4).values.tolist(), abs=2e-4)


def test_text_chat_stop_strings_and_one_sampling_each(folder: Path) -> None:
    with LLM(str(folder), **SETTINGS) as llm:
        whole = llm.generate("hello", GREEDY)[0]
        assert whole.text == llm.tokenizer.decode(whole.token_ids)
        assert whole.prompt_token_ids == llm.tokenizer.encode("hello")
        middle = len(whole.text) // 2
        stop = whole.text[middle : middle + 2]
        cut, free = llm.generate(
            ["hello", "hello"], [SamplingParams(max_tokens=24, ignore_eos=True, stop=(stop,)), GREEDY]
        )
        assert cut.text == whole.text[: whole.text.index(stop)]
        assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
        assert free.text == whole.text
        messages = [{"role": "user", "content": "hello"}]
        chat = llm.chat(messages, GREEDY)[0]
        assert chat.prompt_token_ids == llm.tokenizer.encode("user: hello\nassistant: ")
        assert [c.text for c in llm.chat([messages, messages], GREEDY)] == [chat.text] * 2
        assert llm.info()["config"]["max_total_tokens"] == 2048


def test_a_bad_prompt_is_named_and_nothing_runs(folder: Path) -> None:
    with LLM(str(folder), **SETTINGS) as llm:
        with pytest.raises(UserError, match="prompt 2 of 3: the prompt is empty"):
            llm.generate([[1], [], [2]], GREEDY)
        with pytest.raises(UserError, match="the context holds 512"):
            llm.generate([[1] * 600], GREEDY)
        with pytest.raises(UserError, match=r"token id 384 is not in \[0, 384\)"):
            llm.generate([[384]], GREEDY)
        with pytest.raises(UserError, match="2 sampling parameters for 1 prompts"):
            llm.generate([[1]], [GREEDY, GREEDY])
        with pytest.raises(UserError, match="prompt 2 of 2 is None: must be a text or a list of token ids"):
            llm.generate(["one", None])  # type: ignore[list-item]
        with pytest.raises(UserError, match=r"sampling=\{'max_tokens': 5\}: must be SamplingParams"):
            llm.generate("one", {"max_tokens": 5})  # type: ignore[arg-type]
        with pytest.raises(UserError, match="messages='hello': must be a list of messages"):
            llm.chat("hello")  # type: ignore[arg-type]
        with pytest.raises(UserError, match=r"messages\[0\]='hello': must be a dictionary with a role"):
            llm.chat(["hello"])  # type: ignore[list-item]
        with pytest.raises(UserError, match="must be a text or a list of token ids"):
            llm.generate([2**70])
        with pytest.raises(UserError, match=r"'\\udcff' at character 2: half of a surrogate pair"):
            llm.generate("ab\udcff")
        assert llm.generate([], GREEDY) == []
        assert len(llm.generate([1, 2, 3], GREEDY)) == 1
    with pytest.raises(UserError, match="closed"):
        llm.generate("x")
    with pytest.raises(UserError, match="closed"), llm:
        pass
    with pytest.raises(UserError, match="model=None: must be the path"):
        LLM(None)  # type: ignore[arg-type]


def test_an_interrupt_leaves_nothing_behind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(str(folder), **SETTINGS) as llm:
        core = llm._open()
        step, calls = core.step, []

        def interrupted() -> list:
            calls.append(1)
            if len(calls) == 3:
                raise KeyboardInterrupt
            return step()

        monkeypatch.setattr(core, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(prompts(4), GREEDY)
        assert not core.has_work()
        assert core.stats().pages_used == 0
        assert len(llm.generate("again", GREEDY)[0].token_ids) == 24


LIMITED = """
import resource, sys
from pathlib import Path
from turnout import LLM
from turnout.errors import UserError

LLM("demo", num_threads=1).close()
mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (mapped + 10**9, resource.RLIM_INFINITY))
try:
    LLM("demo", num_threads=1, max_total_tokens=2**18)  # 2.1 GB
except UserError as error:
    sys.exit(str(error))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads what is mapped as Linux shows it")
def test_an_address_space_that_is_too_small() -> None:
    run = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, check=False)
    assert run.stderr.startswith("memory ran out while the model was loaded")
    assert "Traceback" not in run.stderr


def test_threads_share_a_model_in_turn(folder: Path) -> None:
    with LLM(str(folder), **SETTINGS) as llm, ThreadPoolExecutor(6) as pool:
        alone = [llm.generate(prompt, GREEDY)[0].token_ids for prompt in prompts(12)]
        together = list(pool.map(lambda prompt: llm.generate(prompt, GREEDY)[0].token_ids, prompts(12)))
        assert together == alone
        running = pool.submit(llm.generate, prompts(12), GREEDY)
        llm.close()  # before that is answered, or after
        error = running.exception()
        assert "closed" in str(error) if error else [c.token_ids for c in running.result()] == alone


def test_several_models_answer_side_by_side(folder: Path) -> None:
    with LLM(str(folder), **SETTINGS) as one, LLM(folder, **SETTINGS) as other, ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda llm: llm.generate(prompts(6), GREEDY), (one, other)))
        again = one.generate(prompts(6), GREEDY)
    assert [[c.token_ids for c in found] for found in answers] == [[c.token_ids for c in again]] * 2


def test_a_call_in_the_middle_of_another_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a signal's handler would make it."""
    with LLM(str(folder), **SETTINGS) as llm:
        core = llm._open()
        step = core.step

        def interrupted() -> list:
            with pytest.raises(UserError, match="in the middle of an answer"):
                llm.generate("nested", GREEDY)
            return step()

        monkeypatch.setattr(core, "step", interrupted)
        assert len(llm.generate("hello", GREEDY)[0].token_ids) == 24


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_is_told_that_it_cannot_compute(folder: Path) -> None:
    def told(pipe: Connection) -> None:
        for call in (lambda: llm.generate("hello", GREEDY), lambda: LLM(str(folder), **SETTINGS)):
            try:
                pipe.send(call())
            except UserError as error:
                pipe.send(str(error))
        llm.close()  # of the other process: not here
        pipe.send(llm.rank)

    fork = multiprocessing.get_context("fork")
    with LLM(str(folder), **SETTINGS) as llm:
        ours, theirs = fork.Pipe()
        child = fork.Process(target=told, args=(theirs,))
        child.start()
        assert all("was forked from one that had made an LLM" in ours.recv() for _ in range(2))
        assert ours.recv() == 0
        child.join()
        assert child.exitcode == 0
        assert len(llm.generate("hello", GREEDY)[0].token_ids) == 24


def test_completions_are_pickled_and_models_are_not(folder: Path) -> None:
    with LLM(str(folder), **SETTINGS) as llm:
        scored = SamplingParams(max_tokens=3, ignore_eos=True, logprobs=2, prompt_logprobs=2)
        completions = llm.generate(["hello", [1, 2]], scored)
        assert pickle.loads(pickle.dumps(completions)) == completions
        with pytest.raises(TypeError, match="make one in each process"):
            pickle.dumps(llm)


def test_without_standard_error_no_bar_is_shown(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", None)
    with LLM(str(folder), **SETTINGS) as llm:
        assert len(llm.generate(["a", "b"], SamplingParams(max_tokens=2))) == 2


def test_a_progress_bar_goes_to_standard_error(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with LLM(str(folder), **SETTINGS) as llm:
        llm.generate(["a", "b"], SamplingParams(max_tokens=2), progress=True)
    assert capsys.readouterr().out == ""


def test_generate_command_reads_jsonl_and_writes_jsonl(folder: Path, tmp_path: Path) -> None:
    import json

    from turnout.config import Config

    config = Config(model=str(folder), **SETTINGS)
    questions, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    questions.write_text('{"prompt": "one"}\n\n{"prompt": "two"}\n')
    generate(config, str(questions), GREEDY, chat=False, output=answers)
    records = [json.loads(line) for line in answers.read_text().splitlines()]
    assert [r["prompt"] for r in records] == ["one", "two"]
    assert [(r["finish_reason"], r["tokens"]) for r in records] == [("length", 24)] * 2
    questions.write_text('{"prompt": 1}\n')
    with pytest.raises(UserError, match=r"in\.jsonl:1: must be an object"):
        generate(config, str(questions), GREEDY, chat=False, output=None)
    with pytest.raises(UserError, match="cannot be written"):
        generate(config, "x", GREEDY, chat=False, output=tmp_path / "missing" / "out.jsonl")
