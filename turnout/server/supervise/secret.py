"""What the head and the ranks that dial in prove to each other: that both hold one secret.

The connection on which a rank gets its orders is one of signed lines (`Channel`): each side begins with a
number that it never used before, and the key of the connection is made from the secret and both numbers. Each
line then carries a code (HMAC-SHA256) of its direction, place and content, so that lines can be neither made
up, changed, repeated nor sent back. They can be read: nothing in them is secret. Requests and answers, on
sockets of ZeroMQ, are encrypted, too (CURVE), with keys made from the secret.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator

import turnout
from turnout.engine.ranks.local_launcher import signals_held
from turnout.errors import UserError

SHORTEST = 16  # bytes of a secret
LONGEST_LINE = 1 << 20  # bytes: names of many files
GREETING_SECONDS = 10.0
REMEDY = "make one with `openssl rand -hex 32 > FILE`, and give all hosts the same"

encoder = msgspec.json.Encoder()
Message = TypeVar("Message")  # that comes in


class Rejected(Exception):
    """The other side is not one to talk to, and why. final: trying again would not change that."""

    def __init__(self, why: str, *, final: bool = True):
        super().__init__(why)
        self.final = final


@asynccontextmanager
async def within(seconds: float, otherwise: str) -> AsyncIterator[None]:
    """Raises Rejected for the reason `otherwise`, not final, if what is inside takes longer."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise Rejected(otherwise, final=False) from None


@cache
def version() -> str:
    """Of Turnout, with a digest of its source: copies may differ between two versions, too."""
    package, digest = Path(turnout.__file__).parent, hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(str(file.relative_to(package)).encode() + b"\0" + file.read_bytes() + b"\0")
    return f"{turnout.__version__}+{digest.hexdigest()[:8]}"


def read_secret(path: str) -> bytes:
    """What the file at `path` holds, but for blanks around it. Raises UserError."""
    if not path:
        raise UserError(f"ranks that dial in must prove that they may: give --secret-file FILE; {REMEDY}")
    try:
        secret = Path(path).read_bytes().strip()
    except OSError as error:
        raise UserError(f"--secret-file {path}: cannot be read ({error.strerror}); {REMEDY}") from None
    if len(secret) < SHORTEST:
        raise UserError(
            f"--secret-file {path}: holds {len(secret)} bytes, and at least {SHORTEST} are needed; {REMEDY}"
        )
    return secret


def curve_keys(secret: bytes, role: str) -> tuple[str, str]:
    """Public and secret key of `role`, "head" or "rank", in ZeroMQ's Z85."""
    from zmq.utils import z85

    own = z85.encode(_derive(secret, f"curve {role}"))
    return zmq.curve_public(own).decode(), own.decode()


def admit_ranks_only(context: zmq.Context, secret: bytes) -> ThreadAuthenticator:
    """Let sockets of `context` that are CURVE servers accept nothing but the key of ranks; to be stopped."""
    admitted = curve_keys(secret, "rank")[0].encode()

    class Admitted:
        def callback(self, domain: str, key: bytes) -> bool:
            return hmac.compare_digest(key, admitted)

    authenticator = ThreadAuthenticator(context)
    with signals_held():
        authenticator.start()
    authenticator.configure_curve_callback("*", credentials_provider=Admitted())
    return authenticator


class Channel(Generic[Message]):
    """One connection between a head and a rank, once both have said their numbers."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        decoder: msgspec.json.Decoder[Message],
        key: bytes,
        is_head: bool,
    ):
        """Use `open`."""
        self.writer = writer
        self._reader, self._decoder, self._key = reader, decoder, key
        self._directions = (b"head", b"rank") if is_head else (b"rank", b"head")  # out, in
        self._sent = self._received = 0

    @classmethod
    async def open(
        cls,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        decoder: msgspec.json.Decoder[Message],
        secret: bytes,
        *,
        is_head: bool,
    ) -> Channel[Message]:
        """Exchange numbers with the other side. Raises Rejected, OSError."""
        own = secrets.token_hex(32)
        writer.write(f"turnout {version()} {own}\n".encode())
        words = []
        async with within(GREETING_SECONDS, "it does not speak as Turnout does: it says nothing"):
            with suppress(ValueError):  # longer than what is read at most
                words = (await reader.readline()).decode("ascii", "replace").split()
        if len(words) != 3 or words[0] != "turnout":
            raise Rejected("it does not speak as Turnout does", final=False)
        if words[1] != version():
            raise Rejected(f"it is version {words[1][:20]!r} of Turnout, and here is {version()!r}")
        numbers = (own, words[2]) if is_head else (words[2], own)
        return cls(reader, writer, decoder, _derive(secret, f"session {numbers}"), is_head)

    def send(self, message: object) -> None:
        """Queue a line; one that cannot be sent any more is dropped, since the reader finds out too."""
        if not self.writer.is_closing():
            payload = encoder.encode(message)
            code = self._code(self._directions[0], self._sent, payload)
            self._sent += 1
            self.writer.write(code + b" " + payload + b"\n")

    async def receive(self) -> Message | None:
        """The next message; None at the end. Raises Rejected, OSError."""
        try:
            line = await self._reader.readline()
        except ValueError:  # longer than what is read at most
            raise Rejected("it does not speak as Turnout does") from None
        if not line.endswith(b"\n"):
            return None
        code, _, payload = line[:-1].partition(b" ")
        if not hmac.compare_digest(code, self._code(self._directions[1], self._received, payload)):
            raise Rejected("it does not hold the same secret")
        self._received += 1
        return self._decoder.decode(payload)

    def _code(self, direction: bytes, number: int, payload: bytes) -> bytes:
        return hmac.digest(self._key, b"%s %d " % (direction, number) + payload, "sha256").hex().encode()


def _derive(secret: bytes, purpose: str) -> bytes:
    """A key of 32 bytes that says nothing about `secret`."""
    return hmac.digest(secret, purpose.encode(), "sha256")
