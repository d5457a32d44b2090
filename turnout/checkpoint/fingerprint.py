"""Whether two folders, or one at two times, hold the same model, without reading all of it. Torch-free."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

from turnout.checkpoint.config import CONFIG

SAMPLES = 16  # of each file, evenly spaced, of this many bytes; files that are no larger are read whole
SAMPLE = 1 << 14


def fingerprint(folder: Path) -> dict[str, str]:
    """A digest of each file that decides what a rank computes, by name: size, and samples of the content."""
    return {path.name: _digest(path) for path in sorted([folder / CONFIG, *folder.glob("*.safetensors")])}


def stamp(folder: Path) -> str:
    """Changes whenever one of these files does, or is replaced."""
    files = [path.resolve() for path in sorted([folder / CONFIG, *folder.glob("*.safetensors")])]
    facts = [(path, s.st_ino, s.st_size, s.st_mtime_ns) for path in files if (s := path.stat())]
    return blake2b(repr(facts).encode(), digest_size=16).hexdigest()


def differences(one: dict[str, str], other: dict[str, str]) -> list[str]:
    """Names of files that only one has, or that differ."""
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def _digest(path: Path) -> str:
    size = path.stat().st_size
    digest = blake2b(str(size).encode(), digest_size=16)
    step = max(SAMPLE, (size - SAMPLE) // (SAMPLES - 1))
    with path.open("rb") as file:
        for start in range(0, size, step):
            file.seek(start)
            digest.update(file.read(SAMPLE))
    return digest.hexdigest()
