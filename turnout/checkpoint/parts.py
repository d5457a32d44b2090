"""One tensor of a stored matrix: what it is called, what it must look like, and reading it checked.

A matrix [N, K] is kept as codes and scales; each of these parts is a tensor [ceil(N / rows),
ceil(K / columns)] whose element [i, j] belongs to `rows` x `columns` of the weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from turnout.checkpoint.errors import CheckpointError
from turnout.checkpoint.files import FLOATS, TensorFiles
from turnout.checkpoint.headers import TensorMeta
from turnout.formats.packed import PackedTensor
from turnout.vocabulary import Format

E4M3 = torch.float8_e4m3fn
ROWS_AT_ONCE = 1024  # decoded together; a multiple of every block height


@dataclass(frozen=True)
class Sound:
    """What each value of a scale must be; `holds` sees some of them as stored."""

    holds: Callable[[Tensor], bool]
    words: str


def _positive(scale: Tensor) -> bool:
    low, high = (float(bound) for bound in scale.float().aminmax())  # NaN if any element is
    return low > 0 and high < math.inf


def _not_negative_e4m3(scale: Tensor) -> bool:
    # By numpy: a model has tens of thousands of such tensors, too small for torch's threads to meet over.
    code = scale.view(torch.uint8).numpy()
    # One pass over sound scales: 0x7F is NaN, 0x80 is -0, and what follows is negative.
    return int(code.max()) < 0x7F or bool(((code < 0x7F) | (code == 0x80)).all())


POSITIVE = Sound(_positive, "finite and positive")
E4M3_SCALE = Sound(_not_negative_e4m3, "finite and not negative")
E8M0_SCALE = Sound(lambda s: int(s.view(torch.uint8).numpy().max()) < 0xFF, "finite (e8m0 byte 255 is NaN)")


@dataclass(frozen=True)
class Part:
    suffix: str  # after the module's name, such as ".weight_scale"
    dtypes: tuple[torch.dtype, ...]
    rows: int = 1
    columns: int = 1  # 0: all of them
    sound: Sound | None = None
    any_ones: bool = False  # writers differ in dimensions of size 1

    def shape(self, n: int, k: int) -> tuple[int, int]:
        return -(-n // self.rows), -(-k // self.columns) if self.columns else 1

    def expect(self, files: TensorFiles, name: str, shape: tuple[int, ...], why: str) -> TensorMeta:
        """As `files.expect`; where `any_ones`, dimensions of size 1 may be missing or more."""
        found = files.meta(name, why=why).shape
        alike = [n for n in found if n != 1] == [n for n in shape if n != 1]
        return files.expect(name, found if self.any_ones and alike else shape, self.dtypes, why=why)

    def check(self, files: TensorFiles, name: str, value: Tensor) -> None:
        """Raises CheckpointError if the values read from `name` cannot be scales."""
        if self.sound is not None and not self.sound.holds(value):
            raise files.wrong(
                name,
                "holds values that are no scales",
                f"every element {self.sound.words}",
                summary(value),
                "The file is damaged, or its quantisation went wrong; write it again",
            )

    def read(self, files: TensorFiles, module: str, n: int, k: int, why: str) -> Tensor:
        """This part of the matrix [n, k] called `module`."""
        name, shape = module + self.suffix, self.shape(n, k)
        self.expect(files, name, shape, why)
        value = files.read(name).view(shape)
        self.check(files, name, value)
        return value


PLAIN = Part(".weight", FLOATS)


def read_scalar(files: TensorFiles, name: str, why: str) -> Tensor:
    """A positive scale, one number, as float32 [1]."""
    return read_scalars(files, [name], why)


def read_scalars(files: TensorFiles, names: Sequence[str], why: str) -> Tensor:
    """Positive scales, one number each, as float32 [len(names)]."""
    together = files.read_scalars(names, FLOATS)
    if together is not None and POSITIVE.holds(together):
        return together.float()
    values = torch.empty(len(names))  # again one by one, for the error to name the first that is wrong
    for name, value in zip(names, values.split(1), strict=True):
        meta = files.expect(name, None, FLOATS, why=why)
        if meta.shape not in ((), (1,)):
            raise files.wrong(name, "has the wrong shape", "a scalar", list(meta.shape), why)
        files.read_into(name, value)
    if not POSITIVE.holds(values):
        for name, value in zip(names, values, strict=True):
            check_positive(files, name, value)
    return values


def check_positive(files: TensorFiles, name: str, value: Tensor) -> None:
    Part("", FLOATS, sound=POSITIVE).check(files, name, value)


def require_columns(files: TensorFiles, module: str, k: int, multiple: int) -> None:
    """Groups along K must be whole."""
    if k % multiple:
        raise CheckpointError(
            "cannot be in this format",
            file=files.folder,
            tensor=module,
            expected=f"a multiple of {multiple} columns",
            found=k,
        )


def summary(value: Tensor) -> str:
    """What is wrong among the elements of a scale, in a few words."""
    flat = value.float().flatten()
    if flat.numel() == 1:
        return f"{float(flat):g}"
    counts = {
        "NaN": int(flat.isnan().sum()),
        "infinite": int(flat.isinf().sum()),
        "zero": int((flat == 0).sum()),
        "negative": int((flat < 0).sum()),
    }
    return ", ".join(f"{n} {what}" for what, n in counts.items() if n) + f" of {flat.numel()}"


def decode_by_rows(packed: PackedTensor, dtype: torch.dtype) -> Tensor:
    """A packed matrix [N, K] decoded to `dtype`, few rows at a time: float32 in between is not held whole."""
    out = torch.empty(packed.shape, dtype=dtype)
    height = packed.block_rows if packed.format == Format.FP8 else 1
    scales = None if packed.scale is None else packed.scale.split(ROWS_AT_ONCE // height)
    for i, rows in enumerate(packed.data.split(ROWS_AT_ONCE)):
        few = replace(packed, data=rows, scale=None if scales is None else scales[i])
        out[i * ROWS_AT_ONCE :][: len(rows)] = few.decode(dtype)
    return out
