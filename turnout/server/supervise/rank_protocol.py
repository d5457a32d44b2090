"""What the head and the ranks that dial in say to each other, and where they meet."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import msgspec

from turnout.config import ServerConfig
from turnout.errors import UserError
from turnout.parallel.health import Reading
from turnout.parallel.topology import split_address
from turnout.server.supervise.local_ranks import Rendezvous

PORTS = 4  # from --dist-init-addr on: ranks that dial in, torch's rendezvous, commands, events
REPORT_SECONDS = 0.25  # between a rank's reports
SILENT_SECONDS = 4.0  # without a report, or without an acknowledgement of one, until the other side is lost
ALIVE_SECONDS = 1.0  # between a head's signs of life
HEAD_SILENT_SECONDS = 15.0  # without one, until a rank that has joined gives its head up
SERVER_FIELDS = ("verify", "enable_weight_keeper")  # what a rank needs of ServerConfig, beyond Config


class Hello(msgspec.Struct, tag=True, frozen=True):
    """A rank's first words: where it is, and what it could be.

    machine: the same for ranks that share memory. order: of this rank among all, where its starter numbers
    them. gpus: that it may use one of, as CUDA_VISIBLE_DEVICES names them.
    """

    host: str
    machine: str
    order: int | None
    gpus: tuple[str, ...]


class Weights(msgspec.Struct, tag=True, frozen=True):
    """The fingerprint of the model's files where the rank is."""

    files: dict[str, str]


class Report(msgspec.Struct, tag=True, frozen=True):
    """What the rank's process does; all zeros while there is none."""

    number: int
    pid: int
    reading: Reading


class Exited(msgspec.Struct, tag=True, frozen=True):
    number: int
    how: str
    by_signal: bool


class Gone(msgspec.Struct, tag=True, frozen=True):
    """Nothing is left of the process of this life."""

    number: int


class Leaving(msgspec.Struct, tag=True, frozen=True):
    """The rank was told to leave; `why`, as "it ..."."""

    why: str


class Welcome(msgspec.Struct, tag=True, frozen=True):
    """The rank may serve this model, if it has the same `Weights`."""

    model: str


class Refused(msgspec.Struct, tag=True, frozen=True):
    reason: str


class Alive(msgspec.Struct, tag=True, frozen=True):
    """The head's process runs, though it may have nothing else to say."""


class Start(msgspec.Struct, tag=True, frozen=True):
    """Run `rank` with these fields of ServerConfig. gpus: for CUDA_VISIBLE_DEVICES, empty to leave that."""

    rank: int
    rendezvous: Rendezvous
    config: dict[str, Any]
    gpus: str


class Stop(msgspec.Struct, tag=True, frozen=True):
    """End the process of this life at once."""

    number: int


class Leave(msgspec.Struct, tag=True, frozen=True):
    """The head is about to end; `reason` unless it was told to."""

    reason: str | None = None


ToHead = Hello | Weights | Report | Exited | Gone | Leaving
ToRank = Welcome | Refused | Alive | Start | Stop | Leave

to_head: msgspec.json.Decoder[ToHead] = msgspec.json.Decoder(ToHead)
to_rank: msgspec.json.Decoder[ToRank] = msgspec.json.Decoder(ToRank)


def notice_lost_host(writer: asyncio.StreamWriter) -> None:
    """Let the connection fail if what is sent is not acknowledged for SILENT_SECONDS."""
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        connection = writer.get_extra_info("socket")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SILENT_SECONDS * 1000))


def head_address(config: ServerConfig) -> tuple[str, int]:
    """IPv4 address and first port of the head. Raises UserError."""
    flag = f"--dist-init-addr {config.dist_init_addr}"
    parts = split_address(config.dist_init_addr)
    if parts is None:
        raise UserError(f"{flag}: ranks that dial in need HOST:PORT of the head, the same for all of them")
    host, port = parts
    if port > 65536 - PORTS:
        raise UserError(f"{flag}: {PORTS} ports are needed from there on; use one up to {65536 - PORTS}")
    try:
        found = socket.getaddrinfo(host, port, family=socket.AF_INET, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise UserError(f"{flag}: {error.strerror}") from None
    return str(found[0][4][0]), port
