"""Ranks are killed, stopped and crashed under load, and every answer is compared with an undisturbed one.

    python -m tools.chaos demo --clients 64 --failures 100 --output benchmarks/results/chaos-DEVICE.json
    python -m tools.chaos MODEL --mode tp2 --kinds kill raise

Starts a server on this machine, asks it for an answer to each client's request, and then lets all clients ask
theirs again and again while ranks fail. Exits with 1 if an answer failed or differs, or if something is left
behind.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
from prometheus_client.parser import text_string_to_metric_families

from tools.faults.sitecustomize import SIGNALS
from tools.ranks import MODES, chaos_options, finish, ranks_parser
from turnout.bench.events import post
from turnout.bench.results import check_output
from turnout.config import ServerConfig, load
from turnout.errors import UserError
from turnout.server.launch import ServerProcess

KINDS: dict[str, int] = {
    "kill": signal.SIGKILL,
    "crash": signal.SIGSEGV,
    "stop": signal.SIGSTOP,
    **SIGNALS,
    "restart": 0,  # of all ranks, by POST /restart
}
KEY = "chaos"
FLAGS = {
    "api_key": KEY,
    "speculative_algorithm": "ngram",
    "tool_call_parser": "qwen3",
    "reasoning_parser": "qwen3",
}
HEADERS = {"Authorization": f"Bearer {KEY}"}
FAULTS = Path(__file__).parent / "faults"
LOGPROB_ERROR = 1e-3  # sums in another order; the same tokens all the same
GIVEN_UP = 300.0  # seconds
LETTERS = [*"aeiourstln"]
# Threads of gRPC and of Ray's client, by the first 15 letters of their names. They start more of them when
# the first are busy, and keep them: of event_engine there are two or three, and of worker.io one or two,
# before the first failure.
POOLS = ("default-executo", "event_engine", "grpc_global_tim", "resolver-execut", "worker.io")

# Pieces of answers between two failures, at least. A request over which ranks die again and again before it
# makes progress is blamed for that in the end (server/supervise/ledger.py), which on a busy machine may take
# longer than `every`.
PROGRESS = 3

COUNT = {"type": "integer", "minimum": 0, "maximum": 99}
SHAPE = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["pears", "plums"]},
        "counts": {"type": "array", "items": COUNT, "minItems": 9, "maxItems": 9},
    },
    "required": ["kind", "counts"],
}
TOOL = {"type": "function", "function": {"name": "count", "parameters": SHAPE}}
CALLING = {"tools": [TOOL], "tool_choice": "required", "chat_template_kwargs": {"enable_thinking": False}}
THINKING = {"continue_final_message": True, "add_generation_prompt": False}  # a thought that is begun for it

# What clients ask for, in turn; each adds a prompt and a seed of its own. Streams where nothing else is said.
ASKED: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.9, "top_p": 0.95, "top_k": 40},
    {"temperature": 0.8, "n": 3},
    {"temperature": 0, "logprobs": 2, "echo": True},
    {"temperature": 0.7, "presence_penalty": 0.5, "frequency_penalty": 0.8, "repetition_penalty": 1.2},
    {"temperature": 0.9, "min_tokens": 8, "stop": LETTERS, "include_stop_str_in_output": True},
    {"temperature": 1.0, "logit_bias": {"65": 3, "66": -50}, "logprobs": 0, "n": 2},
    {"temperature": 0.8, "max_tokens": 150, "ignore_eos": False, "guided_json": SHAPE},
    {"temperature": 0.8, "max_tokens": 150, "ignore_eos": False} | CALLING,
    {"temperature": 0, "n": 2, "echo": True, "stream": False},
    {"temperature": 0.7, "n": 2} | THINKING,
)


def body(client: int, tokens: int) -> dict[str, Any]:
    """What a client asks for, each time the same."""
    again = "Ann has 3 pears and Bob has 4 plums. " * (client % 3)  # what drafts live on
    prompt = f"{again}Client {client} says:"
    given = ASKED[client % len(ASKED)]
    asked: dict[str, Any] = {"max_tokens": tokens, "seed": client, "ignore_eos": True}
    messages = [{"role": "user", "content": prompt}]
    if "continue_final_message" in given:
        messages.append({"role": "assistant", "content": "<think>Let me"})
    asked |= {"messages": messages} if given.keys() & (CALLING | THINKING) else {"prompt": prompt}
    if given.get("stream", True):
        asked |= {"stream": True, "stream_options": {"include_usage": True}}
    return asked | given


@dataclass
class Answer:
    """Of one request: by choice, and the usage that it was told."""

    texts: dict[int, str] = field(default_factory=dict)
    thoughts: dict[int, str] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    tokens: dict[int, list[str]] = field(default_factory=dict)
    offsets: dict[int, list[int]] = field(default_factory=dict)
    usage: dict[str, int] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    pause: float = 0.0  # the longest between two events, in seconds

    def add(self, content: dict[str, Any]) -> None:
        if "error" in content:
            raise UserError(content["error"]["message"])
        for choice in content["choices"]:
            index = choice["index"]
            self.texts[index] = self.texts.get(index, "") + _text(choice)
            thought = _said(choice).get("reasoning_content") or ""
            self.thoughts[index] = self.thoughts.get(index, "") + thought
            if choice["finish_reason"]:
                if index in self.reasons:
                    raise UserError(f"choice {index} ended twice")
                self.reasons[index] = choice["finish_reason"]
            if scores := choice.get("logprobs"):
                self.tokens.setdefault(index, []).extend(scores["tokens"])
                self.offsets.setdefault(index, []).extend(scores["text_offset"])
                given = [logprob for logprob in scores["token_logprobs"] if logprob is not None]
                self.logprobs.setdefault(index, []).extend(given)
        if usage := content.get("usage"):
            names = ("prompt_tokens", "completion_tokens", "total_tokens")
            self.usage = {name: usage[name] for name in names}

    def differs(self, other: Answer) -> str:
        """Where, if it does."""
        for name in ("reasons", "usage", "texts", "thoughts", "tokens", "offsets"):
            if (one := getattr(self, name)) != (another := getattr(other, name)):
                return f"{name}: {one} and {another}"
        for index, own in self.logprobs.items():
            errors = [abs(a - b) for a, b in zip(own, other.logprobs[index], strict=True)]
            if max(errors) > LOGPROB_ERROR:
                return f"logprobs of choice {index}: by up to {max(errors)}"
        return ""


def _said(choice: dict[str, Any]) -> dict[str, Any]:
    """Of a chat."""
    return choice.get("delta") or choice.get("message") or {}


def _text(choice: dict[str, Any]) -> str:
    """What a choice of an answer or event says, calls of tools written out."""
    if "text" in choice:
        return choice["text"]
    said = _said(choice)
    calls = [call["function"] for call in said.get("tool_calls") or ()]
    return (said.get("content") or "") + "".join(c.get("name", "") + c["arguments"] for c in calls)


async def ask(
    http: httpx.AsyncClient, asked: dict[str, Any], heard: Callable[[], None] = lambda: None
) -> Answer:
    """Raises UserError and OSError for an answer that failed. heard: called for each piece of it."""
    answer, last = Answer(), 0.0
    path = "chat/completions" if "messages" in asked else "completions"
    if not asked.get("stream"):
        reply = await http.post(path, json=asked)
        answer.add(reply.json())
        heard()
        return answer
    content = msgspec.json.encode(asked)
    async for data in post(str(http.base_url), path, content, headers=HEADERS):
        now = time.monotonic()
        answer.pause = max(answer.pause, now - last if last else 0.0)
        last = now
        if data == b"[DONE]":
            return answer
        answer.add(msgspec.json.decode(data))
        heard()
    raise UserError("a stream ended without [DONE]")


@contextmanager
def server_of(config: ServerConfig, *, faults: bool = True) -> Iterator[tuple[ServerProcess, Path]]:
    """A server, and the folder that holds all its temporary files. faults: whether its ranks can fail inside
    steps."""
    before = {name: os.environ.get(name) for name in ("PYTHONPATH", "TMPDIR")}
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        if faults:
            os.environ["PYTHONPATH"] = os.pathsep.join([str(FAULTS), before["PYTHONPATH"] or ""])
        os.environ["TMPDIR"] = folder
        server = ServerProcess(config, show=False)
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
        try:
            server.wait_ready()
            yield server, Path(folder)
        finally:
            server.process.kill()
            server.stop()


class CpuWaits:
    """For how long the main threads of processes were ready to run and none of the CPUs had time for them."""

    def __init__(self, pids: Iterable[int]):
        self._first = {pid: self._of(pid) for pid in pids}
        self._last = dict(self._first)

    def look(self) -> float:
        """In seconds, of all processes together, those that have ended up to the look before."""
        self._last = {pid: max(last, self._of(pid)) for pid, last in self._last.items()}
        return sum(self._last[pid] - first for pid, first in self._first.items())

    def add(self, pids: Iterable[int]) -> None:
        """Also those of processes that have started since, from their start."""
        for pid in pids:
            self._first.setdefault(pid, 0.0)
            self._last.setdefault(pid, 0.0)

    @staticmethod
    def _of(pid: int) -> float:
        try:
            return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
        except (OSError, IndexError):  # it has ended, or the system does not count
            return 0.0


class Chaos:
    """Clients and failures of one server. given_up: seconds that a failure may take."""

    given_up = GIVEN_UP

    def __init__(self, server: ServerProcess, folder: Path, tokens: int, clients: int):
        assert server.base_url is not None
        self.root = server.base_url.removesuffix("/v1")
        self.http = httpx.AsyncClient(base_url=server.base_url + "/", headers=HEADERS, timeout=GIVEN_UP)
        self.process, self.folder = psutil.Process(server.process.pid), folder
        self.asked = [body(client, tokens) for client in range(clients)]
        self.failures: list[dict[str, Any]] = []
        self.wrong: list[str] = []
        self.answered = 0
        self.pauses: list[float] = []
        self._over = False
        self._heard = 0
        self._draw = random.Random(0)

    async def run(self, kinds: Sequence[str], failures: int, every: float) -> dict[str, Any]:
        """What became of all requests while ranks failed so many times, and what is left behind."""
        expected = list(await asyncio.gather(*(ask(self.http, asked) for asked in self.asked)))
        await self._start_all_threads()
        before = await self._held()
        clients = asyncio.gather(*(self._client(*both) for both in zip(self.asked, expected, strict=True)))
        start = time.monotonic()
        for kind in itertools.islice(itertools.cycle(kinds), failures):
            heard, end = self._heard, time.monotonic() + self.given_up
            await asyncio.sleep(every)
            while self._heard < heard + PROGRESS and time.monotonic() < end:
                await asyncio.sleep(0.01)
            await self._fail(kind)
        self._over = True
        await clients
        seconds = time.monotonic() - start
        info = await self._info()
        after = await self._held()
        metrics = await self._metrics()
        await self.http.aclose()
        return {
            "clients": len(self.asked),
            "answers": self.answered,
            "wrong": self.wrong,
            "seconds": seconds,
            "failures": len(self.failures),
            "restarts": info["restarts"],
            "resumed_requests": metrics["turnout:resumed_requests_total"],
            "replayed_tokens": metrics["turnout:replayed_tokens_total"],
            "longest_pause_s": spread([pause for pause in self.pauses if pause]),
            "kinds": {kind: self._summary(kind) for kind in kinds},
            "before": before,
            "after": after,
            "left_behind": more(before, after),
        }

    async def _start_all_threads(self) -> None:
        """Of asyncio's pool, which starts one when all are busy and keeps it, until no more come."""
        long = {"prompt": "pears " * 5000, "max_tokens": 1}
        counts = [0]
        while len(counts) < 20 and counts[-3:] != [counts[-1]] * 3:
            await asyncio.gather(*(self.http.post("completions", json=long) for _ in range(64)))
            counts.append(self.process.num_threads())

    async def _client(self, asked: dict[str, Any], expected: Answer) -> None:
        while not self._over:
            try:
                answer = await ask(self.http, asked, self._hear)
            except (UserError, OSError, httpx.HTTPError) as error:
                self.wrong.append(f"{asked}: {type(error).__name__}: {error}")
                continue
            if difference := answer.differs(expected):
                self.wrong.append(f"{asked}: {difference}")
            self.answered += 1
            self.pauses.append(answer.pause)

    def _hear(self) -> None:
        self._heard += 1

    async def _fail(self, kind: str) -> None:
        """Let a rank fail, or all be restarted, and wait until they serve again."""
        ranks = (await self._info())["ranks"]
        victim = self._draw.choice(ranks)
        waits = CpuWaits([os.getpid(), self.process.pid, *(rank["pid"] for rank in ranks)])
        start = time.monotonic()
        if kind == "restart":
            (await self.http.post(f"{self.root}/restart")).raise_for_status()
        else:
            os.kill(victim["pid"], KINDS[kind])
        noticed = await self._until(lambda ready: not ready, waits) - start
        on_time = noticed - waits.look()
        ready = await self._until(lambda ready: ready) - start
        why = (await self._info())["last_failure"]
        self.failures.append(
            {
                "kind": kind,
                "rank": victim["rank"],
                "noticed_s": noticed,
                "noticed_less_cpu_waits_s": max(on_time, 0.0),
                "ready_s": ready,
                "said": why,
            }
        )

    async def _until(self, reached: Callable[[bool], bool], waits: CpuWaits | None = None) -> float:
        """time.monotonic() when /ready is as wanted; `waits` are looked at until then.

        Raises UserError if that takes too long."""
        end = time.monotonic() + self.given_up
        while time.monotonic() < end:
            if reached((await self.http.get(f"{self.root}/ready")).status_code == 200):
                return time.monotonic()
            if waits:
                waits.look()
            await asyncio.sleep(0.01)
        raise UserError(
            f"/ready did not change within {self.given_up:g} s; the last failure: {self.failures[-1:]}"
        )

    async def _info(self) -> dict[str, Any]:
        return (await self.http.get(f"{self.root}/server_info")).json()

    async def _metrics(self) -> dict[str, float]:
        text = (await self.http.get(f"{self.root}/metrics")).text
        return {s.name: s.value for family in text_string_to_metric_families(text) for s in family.samples}

    async def _held(self) -> dict[str, int]:
        """What the server holds when it has nothing to do."""
        await asyncio.sleep(1.5)  # the ranks' last report
        ranks = (await self._info())["ranks"]
        return {
            "pages": sum(rank["pages_used"] for rank in ranks),
            "sequences": sum(rank["num_running"] + rank["num_waiting"] for rank in ranks),
            "descriptors": self.process.num_fds() - len(self.process.net_connections("tcp")),
            **threads(self.process.pid),
            "processes": len(self.process.children(recursive=True)),
            "zombies": sum(c.status() == psutil.STATUS_ZOMBIE for c in self.process.children()),
            "sockets": len(self.process.net_connections("unix")),
            "files": sum(len(files) for _, _, files in os.walk(self.folder)),
        }

    def _summary(self, kind: str) -> dict[str, Any]:
        of_kind = [failure for failure in self.failures if failure["kind"] == kind]
        return {
            "count": len(of_kind),
            **{
                name: spread([failure[name] for failure in of_kind])
                for name in ("noticed_s", "noticed_less_cpu_waits_s", "ready_s", "cpu_waits_s")
                if any(name in failure for failure in of_kind)
            },
            "said": of_kind[-1]["said"] if of_kind else "",
        }


def threads(pid: int) -> dict[str, int]:
    """How many a process has of each name, which libraries give theirs; Python's have the process's own."""
    names: Counter[str] = Counter()
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # it has ended
            names[f"threads {(task / 'comm').read_text().strip()}"] += 1
    return dict(sorted(names.items()))


def more(before: dict[str, int], after: dict[str, int]) -> dict[str, tuple[int, int]]:
    """What there is more of than before, but for threads of POOLS."""
    kept = {name: held for name, held in after.items() if name.removeprefix("threads ") not in POOLS}
    return {name: (before.get(name, 0), held) for name, held in kept.items() if held > before.get(name, 0)}


def ended(server: ServerProcess, folder: Path) -> tuple[int, dict[str, tuple[int, int]]]:
    """Stop a server; its exit code, and what it left behind, as `more` says it."""
    children = psutil.Process(server.process.pid).children(recursive=True)
    code = server.stop()
    _, alive = psutil.wait_procs(children, timeout=10)
    names = [path.name for path in folder.iterdir()] + [f"process {process.pid}" for process in alive]
    return code, {f"after the end: {name}": (0, 1) for name in names}


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Median and largest, to a millisecond."""
    if not seconds:
        return {}
    return {"median": round(statistics.median(seconds), 3), "most": round(max(seconds), 3)}


def run(
    config: ServerConfig, *, clients: int, tokens: int, kinds: Sequence[str], failures: int, every: float
) -> dict[str, Any]:
    """A server with `config` under failures; what `Chaos.run` says, and what is left when it has ended."""
    with server_of(config) as (server, folder):
        chaos = Chaos(server, folder, tokens, clients)
        row = asyncio.run(chaos.run(kinds, failures, every))
        row["exit_code"], left = ended(server, folder)
        row["left_behind"] |= left
    return row


def main() -> None:
    parser = ranks_parser(__doc__, mode="dp2")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    chaos_options(parser, clients=64)
    options = parser.parse_args()
    check_output(options.output)
    flags = {"model": options.model, "port": 0} | FLAGS | MODES[options.mode]
    config = load(ServerConfig, flags)
    row = run(
        config,
        clients=options.clients,
        tokens=options.tokens,
        kinds=options.kinds,
        failures=options.failures,
        every=options.every,
    )
    row["mode"] = options.mode
    failed = bool(row["wrong"] or row["left_behind"] or row["exit_code"])
    finish("chaos", [row], options.output, failed=failed)


if __name__ == "__main__":
    main()
