"""Tables of tile configurations that were measured: those shipped with the package, and this machine's own.

One file holds tables of one device. `turnout tune` writes a layer's to the cache; assets/tuning/ has those
of common layers (tools/tune_tiles.py made them), so that a first start measures nothing. The cache comes
first. A table counts while the device, the layer's sizes, the versions and its kernels' revision are those it
was measured with and every configuration in it is one that runs; else it is left aside with a warning, and
the next source or the rule decides (kernels/).

No torch here: planning reads tables.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import logging
import math
import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from turnout.moe.backends.hopper.kernels import AnyConfig, refuse
from turnout.moe.backends.hopper.layer_shape import REVISIONS, LayerShape
from turnout.moe.backends.hopper.tile_config import LayerTiles, TileTable
from turnout.moe.capabilities.tuning import AGAIN
from turnout.packages import versions_of
from turnout.parallel.hardware import Hardware

SHIPPED = Path(__file__).parents[3] / "assets" / "tuning"
VERSION = 2  # of the form of these files; 1 had numbers by place, which kernels gave different meanings
PACKAGES = ("triton",)  # whose versions kernels depend on

log = logging.getLogger("turnout.moe")


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was best for batches of `tokens`, and what the rule's choice took in the same run."""

    tokens: int
    first: AnyConfig  # of GEMM1
    second: AnyConfig
    us: float
    rule_us: float

    @property
    def tiles(self) -> LayerTiles:
        return LayerTiles(self.first, self.second)


class Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One layer's entries, by ascending tokens, and which kernels and whose code they were measured with."""

    shape: LayerShape
    revision: int
    date: str
    commit: str = ""
    entries: tuple[Entry, ...]

    @classmethod
    def now(cls, shape: LayerShape, entries: Sequence[Entry], commit: str = "") -> Table:
        """What was measured today, with these kernels."""
        return cls(
            shape=shape,
            revision=REVISIONS[shape.weights],
            date=datetime.date.today().isoformat(),
            commit=commit,
            entries=tuple(entries),
        )


class Versioned(msgspec.Struct, frozen=True, kw_only=True):
    """What all files of tables begin with."""

    version: int = 1


class TileFile(Versioned, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tables of one device, and what they were measured with."""

    version: int = VERSION
    device: str
    versions: dict[str, str]
    tables: tuple[Table, ...]


def versions() -> dict[str, str]:
    """Of what is installed here."""
    return versions_of(PACKAGES)


def find(shape: LayerShape, hardware: Hardware, folder: Path | None = None) -> TileTable:
    """The table that counts for a layer on `hardware`; empty if none does. folder: of this machine's own."""
    if hardware.device != "cuda" or not hardware.present:
        return ()
    files = [shipped(hardware.name)]
    if folder is not None:
        files.insert(0, path(folder, shape, hardware))
    for file in files:
        table = _read(file, shape, hardware)
        if table:
            return table
    return ()


def shipped(device: str) -> Path:
    return SHIPPED / f"{device.lower().replace(' ', '_')}.json"


def path(folder: Path, shape: LayerShape, hardware: Hardware) -> Path:
    key: dict[str, Any] = {"device": hardware.name, "shape": dataclasses.asdict(shape)}
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return folder / "tiles" / f"{digest[:32]}.json"


def write(file: Path, content: TileFile) -> Path:
    """Whole or not at all. Raises OSError."""
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_suffix(f".{os.getpid()}")
    draft.write_bytes(encode(content))
    draft.replace(file)
    return file


def encode(content: TileFile) -> bytes:
    """JSON, an entry a line."""
    head: dict[str, Any] = msgspec.to_builtins(content)
    tables = head.pop("tables")
    lines = [f'"{name}": {json.dumps(value)},' for name, value in head.items()]
    parts = []
    for table in tables:
        entries = ",\n  ".join(json.dumps(entry) for entry in table["entries"])
        about = json.dumps({name: value for name, value in table.items() if name != "entries"})
        parts.append(f'{about[:-1]}, "entries": [\n  {entries}]}}')
    return ("{\n" + "\n".join(lines) + '\n"tables": [\n' + ",\n".join(parts) + "\n]\n}\n").encode()


def _read(file: Path, shape: LayerShape, hardware: Hardware) -> TileTable:
    try:
        written = file.read_bytes()
        version = msgspec.json.decode(written, type=Versioned).version
        if version != VERSION:
            log.warning(
                "%s: left aside, for its form is version %d, not %d; %s", file, version, VERSION, AGAIN
            )
            return ()
        content = msgspec.json.decode(written, type=TileFile)
    except FileNotFoundError:
        return ()
    except (OSError, msgspec.MsgspecError) as error:
        log.warning("%s: left aside, for it cannot be read (%s); %s", file, error, AGAIN)
        return ()
    table = next((table for table in content.tables if table.shape == shape), None)
    own = file.parent != SHIPPED
    if table is None and not own:
        return ()
    reason = _mistake(content, table, hardware)
    if reason:
        log.warning("%s: left aside, for %s; %s", file, reason, AGAIN)
        return ()
    assert table is not None, "else that is the reason"
    return tuple((entry.tokens, entry.tiles) for entry in table.entries)


def _mistake(content: TileFile, table: Table | None, hardware: Hardware) -> str:
    """Why a table does not count; "" if it does."""
    if table is None or content.device != hardware.name:
        return f"it holds no tile configurations of this layer on {hardware.name}"
    revision = REVISIONS[table.shape.weights]
    if table.revision != revision:
        return f"it was measured with kernels of revision {table.revision}, and these are of {revision}"
    for package, installed in versions().items():
        measured = content.versions.get(package)
        if measured != installed:
            return f"it was measured with {package} {measured}, and {installed} is installed"
    entries = table.entries
    if not entries or entries[0].tokens < 1 or any(a.tokens >= b.tokens for a, b in pairwise(entries)):
        return "its batches do not ascend"
    for entry in entries:
        if not all(0 < time < math.inf for time in (entry.us, entry.rule_us)):
            return f"the times at {entry.tokens} tokens are none"
        reason = refuse(table.shape, entry.tiles)
        if reason:
            return f"no kernel runs what it has for {entry.tokens} tokens: {reason}"
    return ""
