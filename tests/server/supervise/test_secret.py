"""Who is let in: connections of ranks, made for real over a socket of this machine."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
import zmq

import turnout
from turnout.errors import UserError
from turnout.server.supervise.secret import (
    Channel,
    Rejected,
    admit_ranks_only,
    curve_keys,
    read_secret,
    version,
)

SECRET = b"pears and plums, and a few more plums"
ANYTHING = msgspec.json.Decoder(object)
Head = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def meet(rank: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[object]], secret=SECRET):
    """What `rank` returns, on a connection to a head that sends back what it gets, and what the head says."""

    async def main() -> tuple[object, str]:
        said = asyncio.get_running_loop().create_future()

        async def head(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                channel = await Channel.open(reader, writer, ANYTHING, secret, is_head=True)
                while (message := await channel.receive()) is not None:
                    channel.send(message)
                said.set_result("the end")
            except Rejected as rejection:
                said.set_result(str(rejection))
            writer.close()

        async with await asyncio.start_server(head, "127.0.0.1", 0) as server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            result = await rank(reader, writer)
            writer.close()
            return result, await said

    return asyncio.run(asyncio.wait_for(main(), 60))


async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> object:
    channel = await Channel.open(reader, writer, ANYTHING, SECRET, is_head=False)
    answers = []
    for message in ("one", {"two": [2, "zwei"]}, "one"):
        channel.send(message)
        answers.append(await channel.receive())
    return answers


def test_both_hold_the_secret():
    assert meet(talk) == (["one", {"two": [2, "zwei"]}, "one"], "the end")


def test_another_secret_is_noticed_by_the_head_at_the_first_words():
    async def rank(reader, writer):
        channel = await Channel.open(reader, writer, ANYTHING, SECRET, is_head=False)
        channel.send("let me in")
        return await channel.receive()

    assert meet(rank, secret=SECRET + b"!") == (None, "it does not hold the same secret")


@pytest.mark.parametrize("forge", ["repeat", "change", "reflect", "unsigned"])
def test_lines_can_be_neither_repeated_nor_changed_nor_sent_back(forge: str):
    async def rank(reader, writer):
        channel = await Channel.open(reader, writer, ANYTHING, SECRET, is_head=False)
        sent: list[bytes] = []
        write = writer.write
        writer.write = lambda line: (sent.append(line), write(line))
        channel.send("ten pears")
        answer = await reader.readline()
        forged = {
            "repeat": sent[0],
            "change": sent[0].replace(b"ten", b"one"),
            "reflect": answer,
            "unsigned": b'"ten pears"\n',
        }
        write(forged[forge])
        return await reader.readline()

    assert meet(rank) == (b"", "it does not hold the same secret")


@pytest.mark.parametrize(
    ("greeting", "why"),
    [
        (b"GET / HTTP/1.1\r\n", "it does not speak as Turnout does"),
        (b"x" * 100_000 + b"\n", "it does not speak as Turnout does"),
        (b"\n", "it does not speak as Turnout does"),
        (b"turnout 0.0 abc\n", f"it is version '0.0' of Turnout, and here is {version()!r}"),
    ],
)
def test_strangers_and_other_versions(greeting: bytes, why: str):
    async def rank(reader, writer):
        writer.write(greeting)
        with suppress(ConnectionResetError):  # if the head had not read all when it closed
            await reader.read()

    assert meet(rank) == (None, why)


def test_a_changed_copy_is_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    copies = [tmp_path / "same", tmp_path / "other"]
    for copy in copies:
        shutil.copytree(Path(turnout.__file__).parent / "parallel", copy)
    (copies[1] / "health.py").write_text("changed = True\n")
    found = []
    for copy in (copies[0], copies[0], copies[1]):
        monkeypatch.setattr(turnout, "__file__", str(copy / "__init__.py"))
        found.append(version.__wrapped__())
    assert found[0] == found[1] != found[2]
    assert all(one.startswith(f"{turnout.__version__}+") for one in found)


def test_what_is_no_secret(tmp_path: Path):
    path = tmp_path / "secret"
    with pytest.raises(UserError, match=r"give --secret-file FILE; make one with `openssl rand"):
        read_secret("")
    with pytest.raises(UserError, match="No such file"):
        read_secret(str(path))
    path.write_text("short\n")
    with pytest.raises(UserError, match="holds 5 bytes, and at least 16 are needed"):
        read_secret(str(path))
    path.write_text("long enough to be one\n")
    assert read_secret(str(path)) == b"long enough to be one"


@pytest.mark.parametrize(
    ("server", "own", "admitted"),
    [
        (SECRET, SECRET, True),
        (SECRET, b"another", False),  # the head's key is known, the rank's is not
        (b"another", b"another", False),
        (None, None, False),  # no encryption at all
    ],
)
def test_sockets_of_requests_take_nothing_from_others(server, own, admitted: bool):
    context, other = zmq.Context(), zmq.Context()
    authenticator = admit_ranks_only(context, SECRET)
    try:
        pull, push = context.socket(zmq.PULL), other.socket(zmq.PUSH)
        pull.curve_server, pull.curve_secretkey = True, curve_keys(SECRET, "head")[1].encode()
        port = pull.bind_to_random_port("tcp://127.0.0.1")
        if server is not None:
            push.curve_serverkey = curve_keys(server, "head")[0].encode()
            push.curve_publickey, push.curve_secretkey = (key.encode() for key in curve_keys(own, "rank"))
        push.connect(f"tcp://127.0.0.1:{port}")
        push.send(b"here I am")
        assert bool(pull.poll(30_000 if admitted else 1000)) == admitted
    finally:
        authenticator.stop()
        context.destroy(linger=0)
        other.destroy(linger=0)
