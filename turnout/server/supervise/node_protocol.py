"""What the head and the agents of other hosts say to each other: JSON lines over one TCP connection each."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import fields
from typing import Any

import msgspec

from turnout import __version__
from turnout.config import Config, ServerConfig
from turnout.errors import UserError
from turnout.parallel.health import Reading
from turnout.parallel.topology import split_address
from turnout.server.supervise.local_ranks import Rendezvous

PORTS = 4  # from --dist-init-addr on: agents, torch's rendezvous, commands, events
KEEPALIVE = {"TCP_KEEPIDLE": 4, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}  # seconds: missed within 10

# What may differ between hosts: where the model lies, and what concerns one process. Of what ServerConfig
# adds only SERVER_FIELDS reach the ranks.
OWN_FIELDS = ("model", "node_rank", "dist_init_addr", "num_threads", "load_progress", "trust_remote_code")
SERVER_FIELDS = ("verify",)


class Hello(msgspec.Struct, tag=True, frozen=True):
    """An agent's first line."""

    version: str
    node_rank: int
    config: dict[str, Any]


class Started(msgspec.Struct, tag=True, frozen=True):
    number: int
    pids: dict[int, int]


class Exited(msgspec.Struct, tag=True, frozen=True):
    number: int
    rank: int
    how: str
    by_signal: bool


class Gone(msgspec.Struct, tag=True, frozen=True):
    """Nothing is left of the agent's ranks."""

    number: int


class Readings(msgspec.Struct, tag=True, frozen=True):
    number: int
    readings: dict[int, Reading]


class Leaving(msgspec.Struct, tag=True, frozen=True):
    """The agent was told to stop, and takes its ranks with it."""


class Welcome(msgspec.Struct, tag=True, frozen=True):
    pass


class Later(msgspec.Struct, tag=True, frozen=True):
    """Not now; try again."""

    reason: str


class Refused(msgspec.Struct, tag=True, frozen=True):
    reason: str


class Start(msgspec.Struct, tag=True, frozen=True):
    rendezvous: Rendezvous


class Stop(msgspec.Struct, tag=True, frozen=True):
    """End the ranks of this life at once."""

    number: int


class Leave(msgspec.Struct, tag=True, frozen=True):
    """The head is about to end; `reason` unless it was told to."""

    reason: str | None = None


ToHead = Hello | Started | Exited | Gone | Readings | Leaving
ToAgent = Welcome | Later | Refused | Start | Stop | Leave

encoder = msgspec.json.Encoder()
to_head: msgspec.json.Decoder[ToHead] = msgspec.json.Decoder(ToHead)
to_agent: msgspec.json.Decoder[ToAgent] = msgspec.json.Decoder(ToAgent)


def send(writer: asyncio.StreamWriter, message: ToHead | ToAgent) -> None:
    """Queue a line; one that cannot be sent any more is dropped, since the reader finds out too."""
    if not writer.is_closing():
        writer.write(encoder.encode(message) + b"\n")


def keep_alive(writer: asyncio.StreamWriter) -> None:
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def hello(config: ServerConfig) -> Hello:
    return Hello(version=__version__, node_rank=config.node_rank, config=_common(config))


def objection(config: ServerConfig, said: Hello) -> str | None:
    """Why an agent that says this cannot take part in what `config` says, if it cannot."""
    if said.version != __version__:
        return f"the head runs version {__version__} of Turnout, node {said.node_rank} {said.version}"
    if not 1 <= said.node_rank < config.nnodes:
        return f"--node-rank {said.node_rank}: other hosts than the head have 1 to {config.nnodes - 1}"
    ours = _common(config)
    different = [
        f"--{name.replace('_', '-')} is {ours.get(name)!r} at the head, "
        f"{said.config.get(name)!r} on node {said.node_rank}"
        for name in sorted(ours.keys() | said.config.keys())
        if ours.get(name) != said.config.get(name)
    ]
    return "; ".join(different) or None


def _common(config: ServerConfig) -> dict[str, Any]:
    """What all hosts must agree on."""
    names = [f.name for f in fields(Config) if f.name not in OWN_FIELDS]
    return {name: getattr(config, name) for name in (*names, *SERVER_FIELDS)}


def head_address(config: ServerConfig) -> tuple[str, int]:
    """IPv4 address and first port of the head. Raises UserError."""
    flag = f"--dist-init-addr {config.dist_init_addr}"
    parts = split_address(config.dist_init_addr)
    if parts is None:
        raise UserError(
            f"{flag}: --nnodes {config.nnodes} needs HOST:PORT of the first host, the same on all of them"
        )
    host, port = parts
    if port > 65536 - PORTS:
        raise UserError(f"{flag}: {PORTS} ports are needed from there on; use one up to {65536 - PORTS}")
    try:
        found = socket.getaddrinfo(host, port, family=socket.AF_INET, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise UserError(f"{flag}: {error.strerror}") from None
    return str(found[0][4][0]), port
