"""For how long streams pause when ranks are killed, and where that time goes, with kept weights or without.

    python -m tools.chaos_streams demo --output benchmarks/results/chaos-streams-DEVICE.json
    python -m tools.random_checkpoint /dev/shm/q30
    python -m tools.chaos_streams /dev/shm/q30 --moe-a2a-backend nvlink --servers plain keeper deterministic

Starts one server after the other on the ranks of this machine, lets streams run without a break, kills ranks
with kill -9 (or stops them), and measures of each failure when /ready told of it, when the ranks served
again, when each stream went on, and the phases of the ranks' start. A pause is the longest time without a
text of a stream. Answers are compared with undisturbed ones of the same server. Where numbers depend on what
else is in a batch (bfloat16 without --deterministic), undisturbed answers differ among themselves; there only
what does not depend on it counts: each answer has all its tokens, once, and one end. How many are equal all
the same is told next to how many undisturbed ones are.

Exits with 1 if an answer was lost or wrong, if a kill was noticed after 1 s, if a stream paused for longer
than 15 s, or if something was left behind. After --seconds no further failure begins; the result says so.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec

from tools import chaos
from tools.ranks import MODES, finish, ranks_parser
from turnout.bench.events import post
from turnout.bench.results import check_output
from turnout.bench.serve import place
from turnout.config import ServerConfig, load
from turnout.errors import UserError
from turnout.server.launch import ServerProcess

NOTICED_SECONDS = 1.0  # of a kill
PAUSE_SECONDS = 15.0
KINDS = ("kill", "stop", "crash", "restart")
SERVERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "keeper": {"enable_weight_keeper": True},
    "deterministic": {"enable_weight_keeper": True, "deterministic": True},
}
PROMPT_TOKENS = 128
TOKEN_IDS = range(10, 250)  # that any tokenizer has
SETTLED_SECONDS = 0.5  # of service before the first failure
GAP_SECONDS = 0.05  # shorter ones are no pause

# What clients ask for, in turn.
ASKED: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.8, "top_p": 0.95, "top_k": 40},
    {"temperature": 0, "logprobs": 2},
    {"temperature": 0.7, "presence_penalty": 0.5, "frequency_penalty": 0.8, "repetition_penalty": 1.2},
)


def body(client: int, tokens: int) -> dict[str, Any]:
    """What a client asks for, each time the same."""
    draw = random.Random(client)
    return {
        "prompt": [draw.choice(TOKEN_IDS) for _ in range(PROMPT_TOKENS)],
        "max_tokens": tokens,
        "seed": client,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    } | ASKED[client % len(ASKED)]


def lacks(answer: chaos.Answer, asked: dict[str, Any]) -> str:
    """What is not as asked for, of all that depends on no number that was computed; "" if nothing."""
    tokens = asked["max_tokens"]
    if answer.reasons != {0: "length"}:
        return f"ended with {answer.reasons}"
    if answer.usage != {
        "prompt_tokens": PROMPT_TOKENS,
        "completion_tokens": tokens,
        "total_tokens": PROMPT_TOKENS + tokens,
    }:
        return f"usage {answer.usage}"
    if "logprobs" in asked and len(answer.tokens[0]) != tokens:
        return f"{len(answer.tokens[0])} tokens came, of {tokens}"
    return ""


@dataclass(eq=False)
class Client:
    """One stream after the other. gaps: those between two texts that are worth a look, as (from, to)."""

    asked: dict[str, Any]
    heard: float = 0.0  # when it last got a text
    gaps: list[tuple[float, float]] = field(default_factory=list)
    running: bool = False

    async def ask(self, base_url: str) -> chaos.Answer:
        """Raises UserError and OSError for an answer that failed."""
        answer, content = chaos.Answer(), msgspec.json.encode(self.asked)
        async for data in post(base_url, "completions", content, headers=chaos.HEADERS):
            now = time.monotonic()
            if data == b"[DONE]":
                return answer
            event = msgspec.json.decode(data)
            answer.add(event)
            if event["choices"]:
                if self.running and now - self.heard > GAP_SECONDS:
                    self.gaps.append((self.heard, now))
                self.heard, self.running = now, True
        raise UserError("a stream ended without [DONE]")

    def pause(self, start: float) -> tuple[float, float]:
        """Of the longest gap that ended after `start`: (its length, how long after `start` it ended)."""
        length, at = max((to - at, at) for at, to in self.gaps if to > start)
        return length, at + length - start


class Streams(chaos.Chaos):
    """Clients that are never without a stream, and failures of one server."""

    given_up = 240.0  # a start that reads all weights, and longer than PAUSE_SECONDS, so that it is measured

    def __init__(self, server: ServerProcess, folder: Path, tokens: int, clients: int):
        super().__init__(server, folder, tokens, 0)
        assert server.base_url is not None
        self.base_url = server.base_url
        self.clients = [Client(body(client, tokens)) for client in range(clients)]
        self.equal = 0

    async def measure(self, kinds: Sequence[str], every: float, exact: bool, until: float) -> dict[str, Any]:
        """exact: whether answers depend on the request alone. until: when no further failure begins."""
        expected = await self._undisturbed()
        again = await self._undisturbed()
        same = sum(not one.differs(other) for one, other in zip(expected, again, strict=True))
        if exact and same < len(expected):
            self.wrong.append(f"{len(expected) - same} undisturbed answers differ from each other")
        before = await self._held()
        asking = asyncio.gather(
            *(self._ask(client, answer, exact) for client, answer in zip(self.clients, expected, strict=True))
        )
        await self._all_heard(time.monotonic())
        await asyncio.sleep(SETTLED_SECONDS)
        skipped = 0
        for number, kind in enumerate(kinds):
            if time.monotonic() > until:
                skipped = len(kinds) - number
                break
            await self._fail_one(kind, number)
            await asyncio.sleep(every)
        self._over = True
        await asking
        after = await self._held()
        metrics = await self._metrics()
        await self.http.aclose()
        return {
            "clients": len(self.clients),
            "tokens": self.clients[0].asked["max_tokens"],
            "compared": "token by token" if exact else "by their number of tokens and their end",
            "undisturbed_equal": [same, len(expected)],
            "answers": self.answered,
            "answers_equal": self.equal,
            "wrong": self.wrong,
            "resumed_requests": metrics["turnout:resumed_requests_total"],
            "replayed_tokens": metrics["turnout:replayed_tokens_total"],
            "failures": self.failures,
            "failures_skipped": skipped,
            "left_behind": chaos.more(before, after),
        }

    async def _undisturbed(self) -> list[chaos.Answer]:
        answers = await asyncio.gather(*(client.ask(self.base_url) for client in self.clients))
        for client, answer in zip(self.clients, answers, strict=True):
            client.gaps, client.running = [], False
            if lack := lacks(answer, client.asked):
                raise UserError(f"an undisturbed answer is wrong already: {lack}")
        return list(answers)

    async def _ask(self, client: Client, expected: chaos.Answer, exact: bool) -> None:
        while not self._over:
            try:
                answer = await client.ask(self.base_url)
            except (UserError, OSError) as error:
                self.wrong.append(f"seed {client.asked['seed']}: {type(error).__name__}: {error}")
                continue
            difference = answer.differs(expected)
            self.equal += not difference
            if reason := (difference if exact else lacks(answer, client.asked)):
                self.wrong.append(f"seed {client.asked['seed']}: {reason[:300]}")
            self.answered += 1

    async def _all_heard(self, since: float) -> None:
        """Wait until each client has got a text after that."""
        end = time.monotonic() + self.given_up
        while lacking := sum(client.heard <= since for client in self.clients):
            if time.monotonic() > end:
                raise UserError(f"{lacking} streams did not go on within {self.given_up:g} s")
            await asyncio.sleep(0.02)

    async def _fail_one(self, kind: str, number: int) -> None:
        """Let a rank fail, and wait until all streams have gone on."""
        ranks = (await self._info())["ranks"]
        victim = ranks[number % len(ranks)]
        waits = chaos.CpuWaits([os.getpid(), self.process.pid, *(rank["pid"] for rank in ranks)])
        start = time.monotonic()
        if kind == "restart":
            (await self.http.post(f"{self.root}/restart")).raise_for_status()
        else:
            os.kill(victim["pid"], chaos.KINDS[kind])
        noticed = await self._until(lambda ready: not ready, waits)
        on_time = noticed - start - waits.look()
        ready = await self._until(lambda ready: ready)
        await self._all_heard(ready)
        info = await self._info()
        pauses, gone_on = zip(*(client.pause(start) for client in self.clients), strict=True)
        phases = info["engine"]["startup_seconds"]
        self.failures.append(
            {
                "kind": kind,
                "rank": victim["rank"],
                "noticed_s": round(noticed - start, 3),
                "noticed_less_cpu_waits_s": round(max(on_time, 0.0), 3),
                "ready_s": round(ready - start, 3),
                "pause_s": {"least": round(min(pauses), 3), **chaos.spread(pauses)},
                "all_go_on_s": round(max(gone_on), 3),
                "start_phases_s": {name: round(seconds, 3) for name, seconds in phases.items()},
                "ranks_end_and_fork_s": round(ready - noticed - sum(phases.values()), 3),
                "prepared_weights": info["engine"].get("prepared_weights"),
                "said": info["last_failure"],
            }
        )
        for client in self.clients:
            client.gaps.clear()
        print(msgspec.json.encode(self.failures[-1]).decode(), flush=True)

    async def _held(self) -> dict[str, int]:
        """But for threads and descriptors, of which the first long answers leave more."""
        held = await super()._held()
        kept = [name for name in held if not name.startswith(("threads ", "descriptors"))]
        return {name: held[name] for name in kept}


def run(
    config: ServerConfig, *, clients: int, tokens: int, kinds: Sequence[str], every: float, until: float
) -> dict[str, Any]:
    """A row for one server; what was measured before an `error`, if there was one."""
    begun = time.monotonic()
    with chaos.server_of(config, faults=False) as (server, folder):
        started = time.monotonic() - begun
        streams = Streams(server, folder, tokens, clients)
        info = httpx.get(f"{streams.root}/server_info", headers=chaos.HEADERS, timeout=10).json()
        engine = info["engine"]
        exact = config.deterministic or engine["compute_dtype"] == "float32"
        row = {
            "started_s": round(started, 3),
            "start_phases_s": {
                name: round(seconds, 3) for name, seconds in engine["startup_seconds"].items()
            },
            "decode_graphs": engine["decode_graphs"],
            "device": place(streams.base_url, chaos.HEADERS),
        }
        try:
            row |= asyncio.run(streams.measure(kinds, every, exact, until))
            row["exit_code"], left = chaos.ended(server, folder)
            row["left_behind"] |= left
        except (UserError, OSError, httpx.HTTPError) as error:
            said = f"{type(error).__name__}: {error}"
            row |= {"failures": streams.failures, "wrong": streams.wrong, "error": said}
            row["log"] = server.last_lines()
    return row


def missed(row: dict[str, Any]) -> list[str]:
    """What did not come as it must."""
    found = [f"{len(row['wrong'])} answers are wrong or lost"] if row["wrong"] else []
    for number, failure in enumerate(row["failures"]):
        if failure["kind"] == "kill" and failure["noticed_s"] > NOTICED_SECONDS:
            found.append(f"failure {number} was noticed after {failure['noticed_s']} s")
        if failure["pause_s"]["most"] > PAUSE_SECONDS:
            found.append(f"a stream paused for {failure['pause_s']['most']} s at failure {number}")
    found += [f"left behind: {name}" for name in row.get("left_behind", ())]
    found += [f"{name}: {row[name]}" for name in ("error", "exit_code") if row.get(name)]
    return found


def main() -> None:
    parser = ranks_parser(__doc__, mode="dp2")
    parser.add_argument("--servers", nargs="+", choices=SERVERS, default=["plain"])
    parser.add_argument("--failures", nargs="+", choices=KINDS, default=["kill", "stop", "kill"])
    parser.add_argument("--clients", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=512, help="of each answer")
    parser.add_argument("--every", type=float, default=1.0, help="seconds of service between two failures")
    parser.add_argument("--seconds", type=float, default=600.0, help="after which no further failure begins")
    parser.add_argument("--moe-a2a-backend", default="auto")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    check_output(options.output)
    until = time.monotonic() + options.seconds
    flags = {"model": options.model, "port": 0, "api_key": chaos.KEY} | MODES[options.mode]
    flags |= {"moe_a2a_backend": options.moe_a2a_backend}
    rows: list[dict[str, Any]] = []
    where: dict[str, Any] = {}
    for name in options.servers:
        if time.monotonic() > until:
            rows.append({"server": name, "skipped": "no time was left"})
            continue
        try:
            row = run(
                load(ServerConfig, flags | SERVERS[name]),
                clients=options.clients,
                tokens=options.tokens,
                kinds=options.failures,
                every=options.every,
                until=until,
            )
        except UserError as error:  # the server did not start
            row = {"failures": [], "wrong": [], "error": str(error)}
        where = row.pop("device", where)
        rows.append({"server": name, "mode": options.mode, **row, "missed": missed(row)})
    failed = any(row.get("missed", True) for row in rows)
    finish("chaos-streams", rows, options.output, failed=failed, **where)


if __name__ == "__main__":
    main()
