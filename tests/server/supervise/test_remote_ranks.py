"""Who gets which place and which GPU, and what a rank says of itself; addresses."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest

from tests.server.processes import free_port
from turnout.checkpoint.fingerprint import fingerprint
from turnout.config import ServerConfig
from turnout.errors import UserError
from turnout.parallel.health import Reading
from turnout.server.supervise import rank_protocol
from turnout.server.supervise.local_ranks import Rendezvous
from turnout.server.supervise.rank_agent import hello
from turnout.server.supervise.rank_protocol import Hello
from turnout.server.supervise.remote_ranks import (
    OVERDUE_SECONDS,
    RemoteRank,
    RemoteRanks,
    on_hosts,
    share_gpus,
)
from turnout.server.supervise.secret import LONGEST_LINE, Channel

HEAD = ServerConfig(model="/models/demo", tp_size=2, nnodes=2, dist_init_addr="127.0.0.1:5000")
SECRET = b"pears and plums, and then some plums"


def come(*places: tuple[str, int | None]) -> list[RemoteRank]:
    """Ranks on these machines with these orders, in the order in which they came."""
    return [
        RemoteRank(Hello(f"{machine}{at}", machine, order, ()), "10.0.0.1", lambda message: None)
        for at, (machine, order) in enumerate(places)
    ]


def names(ranks: list[RemoteRank], hosts: int, per_host: int) -> list[str] | None:
    chosen = on_hosts(ranks, hosts, per_host, hosts)
    return chosen and [rank.hello.host for rank in chosen[1]]


def test_places_are_given_host_by_host():
    ranks = come(("a", None), ("b", None), ("a", None), ("b", None), ("a", None))
    assert names(ranks, 2, 2) == ["a0", "a2", "b1", "b3"]  # the fifth is a spare
    assert names(ranks, 1, 3) == ["a0", "a2", "a4"]
    assert names(ranks, 1, 4) is None
    assert names(ranks, 2, 3) is None


def test_a_launchers_numbers_give_the_order():
    assert names(come(("b", 3), ("a", 1), ("b", 2), ("a", 0)), 2, 2) == ["a3", "a1", "b2", "b0"]
    assert names(come(("x", None), ("b", 1), ("a", 0)), 3, 1) == ["a2", "b1", "x0"]


def test_every_rank_of_a_host_gets_a_gpu_that_it_may_use():
    assert share_gpus([("0", "1"), ("0", "1")]) == ["0", "1"]
    assert share_gpus([("0", "1"), ("0",)]) == ["1", "0"]
    assert share_gpus([("GPU-7f",), ("GPU-3a",)]) == ["GPU-7f", "GPU-3a"]
    assert share_gpus([("0",), ("0",)]) == []
    assert share_gpus([(), ()]) == []


@pytest.mark.parametrize(
    ("environment", "count", "order", "gpus"),
    [
        ({}, 1, None, ("0", "1", "5")),
        ({"RANK": "5", "LOCAL_RANK": "1"}, 1, 5, ("1",)),  # torchrun
        ({"SLURM_PROCID": "3", "SLURM_LOCALID": "2"}, 1, 3, ("5",)),
        ({"LWS_WORKER_INDEX": "2"}, 4, 9, ("0", "1", "5")),  # the second of the third pod
        ({"RANK": "many"}, 1, None, ("0", "1", "5")),
    ],
)
def test_what_launchers_say_of_a_rank(monkeypatch, environment, count, order, gpus):
    for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID", "SLURM_LOCALID", "LWS_WORKER_INDEX"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (environment | {"CUDA_VISIBLE_DEVICES": "0, 1,5"}).items():
        monkeypatch.setenv(name, value)
    said = hello(1 if count > 1 else 0, count)
    assert (said.order, said.gpus) == (order, gpus)
    assert said.machine == hello().machine


@pytest.mark.parametrize("address", ["", "5000", "host:", ":5000", "host:port", "127.0.0.1:65533"])
def test_addresses_that_cannot_be(address: str):
    with pytest.raises(UserError, match="--dist-init-addr"):
        rank_protocol.head_address(dataclasses.replace(HEAD, dist_init_addr=address))


def test_where_the_head_is():
    assert rank_protocol.head_address(HEAD) == ("127.0.0.1", 5000)
    with pytest.raises(UserError, match="--dist-init-addr nowhere"):
        rank_protocol.head_address(dataclasses.replace(HEAD, dist_init_addr="nowhere.invalid:5000"))


def test_what_a_lost_rank_did_last_is_known():
    """But not what it did in an earlier life of the group."""
    (rank,) = come(("a", None))
    rank.place(1, HEAD, "")
    ended: list[str] = []
    for life in (1, 2):
        rendezvous = Rendezvous(number=life, commands="", events="", init_method="")
        asyncio.run(rank.start(rendezvous, lambda rank, how, by_signal: ended.append(how)))
        assert rank.readings() == {}
        last = Reading(beats=9, step=12 * life, phase="decode", collectives=4, parts=50)
        rank.hear(rank_protocol.Report(life, 77, last))
        assert rank.readings() == {1: last}
    rank.lose("closed its connection")
    assert ended == ["is lost: on a0 (10.0.0.1) it closed its connection"]
    assert rank.readings() == {1: last}


def test_a_head_to_which_no_rank_comes_says_what_it_waited_for():
    """And why it refused whoever else did."""
    port = free_port(rank_protocol.PORTS)
    address = f"127.0.0.1:{port}"
    config = dataclasses.replace(HEAD, dist_init_addr=address, startup_timeout=1)

    async def wait_in_vain() -> None:
        ranks = RemoteRanks(config, SECRET)
        await ranks.open()
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.1\r\n")
            await reader.read()
            await ranks.placed()
        finally:
            writer.close()
            await ranks.close(None)

    with pytest.raises(UserError) as caught:
        asyncio.run(asyncio.wait_for(wait_in_vain(), 60))
    said = str(caught.value)
    assert "not enough ranks came within --startup-timeout 1 s: 0 of 1" in said
    assert "refused: 127.0.0.1: it does not speak as Turnout does" in said
    assert f"`turnout rank --head {address} --secret-file FILE`" in said


async def dial_in(port: int, files: dict[str, str], name: str) -> Channel[rank_protocol.ToRank]:
    """Come as a rank of a machine with that name, and report once."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=LONGEST_LINE)
    channel = await Channel.open(reader, writer, rank_protocol.to_rank, SECRET, is_head=False)
    channel.send(Hello(name, name, None, ()))
    assert isinstance(await channel.receive(), rank_protocol.Welcome)
    channel.send(rank_protocol.Weights(files))
    channel.send(rank_protocol.Report(0, 0, Reading()))
    return channel


def test_a_host_that_went_silent_gets_no_place(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Though its connection stands and it came first; once it is heard again, it may have one."""
    monkeypatch.setattr(rank_protocol, "SILENT_SECONDS", 60.0)
    port = free_port(rank_protocol.PORTS)
    config = dataclasses.replace(HEAD, model=str(tiny_folder), dist_init_addr=f"127.0.0.1:{port}")

    async def report(channel: Channel[rank_protocol.ToRank]) -> None:
        while True:
            channel.send(rank_protocol.Report(0, 0, Reading()))
            await asyncio.sleep(rank_protocol.REPORT_SECONDS)

    async def chosen(ranks: RemoteRanks) -> str:
        return (await asyncio.wait_for(ranks.placed(), 30))[1][0].hello.host

    async def main() -> None:
        ranks = RemoteRanks(config, SECRET)
        await ranks.open()
        files = fingerprint(tiny_folder)
        silent = await dial_in(port, files, "silent")
        reports = [asyncio.create_task(report(silent))]
        try:
            assert await chosen(ranks) == "silent"
            reports.pop().cancel()
            await asyncio.sleep(OVERDUE_SECONDS + 0.1)
            waiting = asyncio.create_task(chosen(ranks))
            spare = await dial_in(port, files, "spare")
            reports.append(asyncio.create_task(report(spare)))
            assert await waiting == "spare"
            reports.append(asyncio.create_task(report(silent)))
            while await chosen(ranks) != "silent":
                await asyncio.sleep(0.01)
            for task in reports:
                task.cancel()
        finally:
            await ranks.close(None)

    asyncio.run(asyncio.wait_for(main(), 60))
