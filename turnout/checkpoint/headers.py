"""Which tensors a folder holds and where: every header is parsed and checked before anything is read.

A safetensors file is an 8-byte little-endian header length, a JSON header (name -> dtype, shape, byte
range), and the data, tensors end to end. Does not import torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from turnout.checkpoint.config import read_json_object
from turnout.checkpoint.errors import CheckpointError
from turnout.checkpoint.names import INDEX, METADATA, SINGLE, header_bytes, read_header

if TYPE_CHECKING:
    import torch

# By a header's name of a dtype: torch's name, and bytes of an element.
DTYPES = {
    "BOOL": ("bool", 1),
    "U8": ("uint8", 1),
    "I8": ("int8", 1),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1),
    "I16": ("int16", 2),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "I32": ("int32", 4),
    "F32": ("float32", 4),
    "I64": ("int64", 8),
    "F64": ("float64", 8),
}


class TensorMeta(msgspec.Struct, frozen=True, gc=False):
    """Where a tensor lies: `nbytes` bytes from `offset` of `file`. stored: its dtype, a key of DTYPES."""

    file: Path
    stored: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def dtype(self) -> torch.dtype:
        return torch_dtype(self.stored)


Natural = Annotated[int, msgspec.Meta(ge=0)]


class Entry(msgspec.Struct, gc=False):
    """Of a header. Metadata have none of these, and the defaults fit nothing: -1 byte, or -3 numbers."""

    dtype: str = ""
    shape: tuple[Natural, ...] = (-3,)
    data_offsets: tuple[Natural, Natural] = (1, 0)


_decoder = msgspec.json.Decoder(dict[str, Entry])


def torch_dtype(stored: str) -> torch.dtype:
    """Of a tensor whose header calls it `stored`."""
    import torch

    found: torch.dtype = getattr(torch, DTYPES[stored][0])
    return found


def open_folder(folder: Path) -> dict[str, TensorMeta]:
    if not folder.is_dir():
        raise CheckpointError("is not a folder", file=folder)
    if (folder / INDEX).is_file():
        return _open_index(folder, folder / INDEX)
    found = sorted(folder.glob("*.safetensors"))
    if (folder / SINGLE).is_file():
        found = [folder / SINGLE]
    if not found:
        raise _no_weights(folder)
    _check_numbering(folder, found)
    metas: dict[str, TensorMeta] = {}
    for path in found:
        for name, meta in _read_header(path).items():
            if name in metas:
                raise CheckpointError(f"is also in {metas[name].file.name}", file=path, tensor=name)
            metas[name] = meta
    return metas


def _no_weights(folder: Path) -> CheckpointError:
    pickled = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in folder.glob(pattern))
    if pickled:
        return CheckpointError(
            f"holds pickled weights ({pickled[0]}), which can run code when opened",
            file=folder,
            remedy="Only safetensors are loaded: convert the model, or take the model's safetensors release",
        )
    return CheckpointError(
        "holds no *.safetensors file",
        file=folder,
        remedy="Download the weights, too: `hf download ID` takes all files of a model",
    )


def _check_numbering(folder: Path, found: Sequence[Path]) -> None:
    """Without an index, `x-00001-of-00003` still says how many files there should be."""
    for path in found:
        match = re.fullmatch(r"(.*)-(\d+)-of-(\d+)\.safetensors", path.name)
        if not match:
            continue
        stem, width, total = match[1], len(match[2]), int(match[3])
        for i in range(1, total + 1):
            other = folder / f"{stem}-{i:0{width}d}-of-{match[3]}.safetensors"
            if not other.is_file():
                raise CheckpointError(
                    f"shard {i} of {total} is missing", file=other, remedy="Download the checkpoint again"
                )


def _open_index(folder: Path, index: Path) -> dict[str, TensorMeta]:
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError(
            "has no usable weight_map",
            file=index,
            expected="an object of tensor name: file name",
            found=weight_map,
        )
    headers: dict[str, dict[str, TensorMeta]] = {}
    metas: dict[str, TensorMeta] = {}
    for name, shard in weight_map.items():
        if shard not in headers:
            headers[shard] = _read_header(_shard_path(folder, index, shard))
        if name not in headers[shard]:
            raise CheckpointError(
                f"is listed by {index.name} but is not in this file", file=folder / shard, tensor=name
            )
        metas[name] = headers[shard][name]
    return metas


def _shard_path(folder: Path, index: Path, shard: str) -> Path:
    """Names with a folder part are refused: an index must not lead out of its own folder."""
    if Path(shard).name != shard or "\\" in shard or not shard.endswith(".safetensors"):
        raise CheckpointError(f"names {shard!r}, which is not a safetensors file of this folder", file=index)
    path = folder / shard
    if not path.is_file():
        raise CheckpointError(
            f"is missing, though {index.name} lists it", file=path, remedy="Download the checkpoint again"
        )
    return path


def _read_header(path: Path) -> dict[str, TensorMeta]:
    content, start = header_bytes(path)
    metas = _well_formed(path, content, start)
    if metas is None:  # so it is read again, in a way that tells what is wrong
        header, start = read_header(path)
        metas = {name: _parse_entry(path, name, entry, start) for name, entry in header.items()}
    _check_extent(path, metas, start, path.stat().st_size)
    return metas


def _well_formed(path: Path, content: bytes, start: int) -> dict[str, TensorMeta] | None:
    """What `_parse_entry` makes of every entry, in a fifth of the time; None if it refuses one."""
    try:
        entries = _decoder.decode(content)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    entries.pop(METADATA, None)
    metas = {}
    for name, entry in entries.items():
        begin, end = entry.data_offsets
        known = DTYPES.get(entry.dtype)
        if known is None or end - begin != math.prod(entry.shape) * known[1]:
            return None
        metas[name] = TensorMeta(path, entry.dtype, entry.shape, start + begin, end - begin)
    return metas


def _parse_entry(path: Path, name: str, entry: Any, start: int) -> TensorMeta:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        well_formed = isinstance(dtype, str) and begin <= end
        well_formed &= all(type(n) is int and n >= 0 for n in (*shape, begin, end))
    except (KeyError, TypeError, ValueError):
        well_formed = False
    if not well_formed:
        raise CheckpointError(f"has a malformed header entry {entry!r}", file=path, tensor=name)
    if dtype not in DTYPES:
        raise CheckpointError(
            "has an unknown dtype", file=path, tensor=name, expected=", ".join(DTYPES), found=dtype
        )
    nbytes = math.prod(shape) * DTYPES[dtype][1]
    if end - begin != nbytes:
        raise CheckpointError(
            f"has the wrong size for {dtype} {list(shape)}",
            file=path,
            tensor=name,
            expected=f"{nbytes} bytes",
            found=end - begin,
        )
    return TensorMeta(path, dtype, shape, start + begin, nbytes)


def _check_extent(path: Path, metas: dict[str, TensorMeta], start: int, size: int) -> None:
    """Tensors lie end to end and fill the file, as the format demands."""
    end = start
    for name, meta in sorted(metas.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if meta.offset != end:
            raise CheckpointError(
                "overlaps another tensor or leaves a hole",
                file=path,
                tensor=name,
                expected=f"offset {end}",
                found=meta.offset,
            )
        end += meta.nbytes
        if end > size:
            raise CheckpointError(
                "is truncated",
                file=path,
                tensor=name,
                expected=f"{end} bytes",
                found=f"a file of {size} bytes",
                remedy="Download the file again",
            )
    if end != size:
        raise CheckpointError("has bytes after its last tensor", file=path, expected=end, found=size)
