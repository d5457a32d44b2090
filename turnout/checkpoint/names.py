"""Which tensors a folder holds, by name alone. Does not import torch; `headers.py` checks what it reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from turnout.checkpoint.config import read_json_object
from turnout.checkpoint.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
METADATA = "__metadata__"  # of a header: no tensor
_LFS_POINTER = b"version https://git-lfs"  # how a file begins that Git has not fetched
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library


def tensor_names(folder: Path) -> list[str]:
    """Empty where there are no weights: a bare configuration can be planned for, too.

    Raises CheckpointError for an index or a header that cannot be read.
    """
    if (folder / INDEX).is_file():
        return list(read_json_object(folder / INDEX).get("weight_map") or {})
    files = [folder / SINGLE] if (folder / SINGLE).is_file() else sorted(folder.glob("*.safetensors"))
    return [name for path in files for name in read_header(path)[0]]


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """(name -> entry, unchecked; where the data begin) of a safetensors file."""
    content, start = header_bytes(path)
    try:
        header = json.loads(content)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise CheckpointError(f"has a header that is not valid JSON ({error})", file=path) from None
    if not isinstance(header, dict):
        raise CheckpointError("has a header that is not a JSON object", file=path)
    header.pop(METADATA, None)
    return header, start


def header_bytes(path: Path) -> tuple[bytes, int]:
    """(JSON, unchecked; where the data begin) of a safetensors file."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(len(_LFS_POINTER))
            if start == _LFS_POINTER:
                raise CheckpointError(
                    "is a pointer of Git LFS, not the weights",
                    file=path,
                    remedy="Run `git lfs pull` in the folder, or fetch the model with `hf download`",
                )
            length = int.from_bytes(start[:8], "little")
            file.seek(8)
            if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
                raise CheckpointError(
                    "is truncated or not a safetensors file",
                    file=path,
                    expected=f"a header of {length} bytes",
                    found=f"a file of {size} bytes",
                    remedy="Download the file again",
                )
            return file.read(length), 8 + length
    except OSError as error:
        raise CheckpointError(f"cannot be read ({error.strerror})", file=path) from None
