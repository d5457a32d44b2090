"""Where the experts of one layer lie in the files, and how they are stacked without a second copy.

Legend: E experts of the model, n experts wanted, I intermediate, H hidden; matrices are [N, K].

Published checkpoints store them in two ways:

| stored      | names                                       | matrices                                  |
|-------------|---------------------------------------------|-------------------------------------------|
| per expert  | `{prefix}.{e}.{gate,up,down}_proj.weight`   | gate, up separate                         |
| fused       | `{prefix}.gate_up_proj`, `{prefix}.down_proj` | [E, 2I, H], or transposed, or interleaved |

Interleaved: rows gate 0, up 0, gate 1, up 1, ... as GPT-OSS has them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from turnout.checkpoint.errors import CheckpointError
from turnout.checkpoint.files import FLOATS, TensorFiles
from turnout.checkpoint.parts import Part, check_positive, read_scalars, require_columns
from turnout.formats.experts import ExpertWeights
from turnout.formats.packed import PackedTensor
from turnout.vocabulary import Format

# Families whose stacked experts are [E, H, 2I]; asked only where the sizes leave both readings possible.
TRANSPOSED_FAMILIES = ("gpt_oss", "llama4", "llama4_text", "qwen3_vl_moe", "qwen3_vl_moe_text")
INTERLEAVED_FAMILIES = ("gpt_oss",)
PROJECTIONS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))


@dataclass(frozen=True, kw_only=True)
class ExpertShape:
    """Sizes of one layer's experts. `intermediate` is a whole expert's."""

    num_experts: int
    hidden: int
    intermediate: int
    gated: bool = True
    biased: bool = False

    def matrix(self, name: str) -> tuple[int, int]:
        """(N, K) of "w13" or "w2"."""
        if name == "w2":
            return self.hidden, self.intermediate
        return (2 if self.gated else 1) * self.intermediate, self.hidden


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Experts `first .. first + count` of the layer at `prefix`. `config` is the model's config.json."""

    files: TensorFiles
    config: dict[str, Any]
    prefix: str
    shape: ExpertShape
    stored: str  # the format that the configuration has, for error messages
    first: int
    count: int

    @property
    def local(self) -> range:
        return range(self.first, self.first + self.count)

    @property
    def all(self) -> range:
        return range(self.shape.num_experts)

    @property
    def others(self) -> list[int]:
        return [e for e in self.all if e not in self.local]

    def require_columns(self, multiple: int) -> None:
        """Groups along K of either matrix must be whole."""
        for matrix in ("w13", "w2"):
            require_columns(self.files, self.prefix, self.shape.matrix(matrix)[1], multiple)


class StoredExperts(Protocol):
    """How to find and read the experts of one layer; `matrix` is "w13" or "w2"."""

    wanted: Wanted

    def modules(self, matrix: str) -> list[str]:
        """The modules whose tensors make up this matrix of the experts wanted."""
        ...

    def read(self, matrix: str, part: Part) -> Tensor:
        """[n, *part.shape(N, K)], gate rows before up rows."""
        ...

    def scalars(self, matrix: str, suffix: str, experts: range, why: str) -> Tensor:
        """Positive float32 [len(experts), c]: c is 2 where gate and up have their own, else 1."""
        ...

    def bias(self, matrix: str) -> Tensor | None:
        """float32 [n, N], gate before up; None where the layer has none."""
        ...

    def weights(self, matrix: Callable[[str], PackedTensor]) -> ExpertWeights:
        """The experts wanted. matrix: gives "w13" and "w2" of them, [n, N, K]."""
        return ExpertWeights(
            w13=matrix("w13"),
            w2=matrix("w2"),
            b13=self.bias("w13"),
            b2=self.bias("w2"),
            first_expert=self.wanted.first,
            num_experts=self.wanted.shape.num_experts,
        )


def stored_experts(wanted: Wanted, data: Part) -> StoredExperts:
    """How these experts are stored; `data` is the part that holds their codes or plain values."""
    if f"{wanted.prefix}.down_proj" in wanted.files:
        return Fused(wanted, data)
    return PerExpert(wanted)


class PerExpert(StoredExperts):
    """`{prefix}.{e}.{projection}{suffix}`."""

    def __init__(self, wanted: Wanted):
        self.wanted = wanted
        gate, up, down = self._names()
        self._projections = {"w13": (gate, up) if wanted.shape.gated else (up,), "w2": (down,)}
        self._refuse_surplus()

    def modules(self, matrix: str) -> list[str]:
        return [name for e in self.wanted.local for name in self._modules(matrix, e)]

    def read(self, matrix: str, part: Part) -> Tensor:
        n, k = self.wanted.shape.matrix(matrix)
        return self._stack(matrix, part, part.shape(n // len(self._projections[matrix]), k))

    def scalars(self, matrix: str, suffix: str, experts: range, why: str) -> Tensor:
        names = [module + suffix for e in experts for module in self._modules(matrix, e)]
        return read_scalars(self.wanted.files, names, why).view(len(experts), -1)

    def bias(self, matrix: str) -> Tensor | None:
        if not self.wanted.shape.biased:
            _refuse_biases(self.wanted.files, [f"{m}.bias" for m in self.modules(matrix)])
            return None
        n, _ = self.wanted.shape.matrix(matrix)
        return self._stack(matrix, Part(".bias", FLOATS), (n // len(self._projections[matrix]),)).float()

    def _stack(self, matrix: str, part: Part, shape: tuple[int, ...]) -> Tensor:
        """[n, rows of all projections, ...] from one tensor of `shape` per expert and projection."""
        files, why = self.wanted.files, _expected_by(self.wanted)
        names = [module + part.suffix for module in self.modules(matrix)]
        # The first tensor decides which of the allowed dtypes all have.
        first = part.expect(files, names[0], shape, why)
        part = replace(part, dtypes=(first.dtype,))
        for name in names[1:]:
            meta = files.find(name)
            if meta is None or meta.stored != first.stored or meta.shape != first.shape:
                part.expect(files, name, shape, why)
        out = files.empty((self.wanted.count, len(self._projections[matrix]), *shape), first.dtype)
        files.read_stacked(
            names,
            out.flatten(0, 1),
            holds=part.sound.holds if part.sound else None,
            check=(lambda name, value: part.check(files, name, value)) if part.sound else None,
        )
        return out.flatten(1, 2)

    def _modules(self, matrix: str, expert: int) -> list[str]:
        return [f"{self.wanted.prefix}.{expert}.{name}" for name in self._projections[matrix]]

    def _names(self) -> tuple[str, str, str]:
        first = f"{self.wanted.prefix}.{self.wanted.first}."
        present = self.wanted.files.under(first)
        for names in PROJECTIONS:
            if any(tensor.startswith(f"{first}{names[2]}.") for tensor in present):
                return names
        return PROJECTIONS[0]

    def _refuse_surplus(self) -> None:
        count = self.wanted.shape.num_experts
        for tensor in self.wanted.files.under(f"{self.wanted.prefix}.{count}.")[:1]:
            raise self.wanted.files.wrong(
                tensor,
                "belongs to an expert that config.json does not count",
                f"experts 0 to {count - 1}",
                f"expert {count}",
                "Correct the number of experts in config.json",
            )


class Fused(StoredExperts):
    """All experts in the leading dimension: `{prefix}.gate_up_proj`, `{prefix}.gate_up_proj_weight_scale`."""

    def __init__(self, wanted: Wanted, data: Part):
        self.wanted = wanted
        family = wanted.config.get("model_type")
        self._interleaved = wanted.shape.gated and family in INTERLEAVED_FAMILIES
        self._transposed = {
            matrix: self._is_transposed(matrix, data, family in TRANSPOSED_FAMILIES)
            for matrix in ("w13", "w2")
        }

    def modules(self, matrix: str) -> list[str]:
        return [self._module(matrix)]

    def read(self, matrix: str, part: Part) -> Tensor:
        files, wanted, transposed = self.wanted.files, self.wanted, self._transposed[matrix]
        rows, columns = part.shape(*wanted.shape.matrix(matrix))
        name = self._module(matrix) + part.suffix.removesuffix(".weight").replace(".", "_")
        stored = (columns, rows) if transposed else (rows, columns)
        meta = files.expect(name, (wanted.shape.num_experts, *stored), part.dtypes, why=_expected_by(wanted))
        interleaved = self._interleaved and matrix == "w13"
        if not transposed and not interleaved:
            out = files.empty((wanted.count, rows, columns), meta.dtype)
            files.read_into(name, out, first=wanted.first)
        else:
            out = torch.empty((wanted.count, rows, columns), dtype=meta.dtype)
            for i, expert in enumerate(wanted.local):  # one at a time, so that little is held twice
                one = files.read(name, first=expert, count=1)[0]
                copy_rows(one.T if transposed else one, out[i], interleaved=interleaved)
        part.check(files, name, out)
        return out

    def scalars(self, matrix: str, suffix: str, experts: range, why: str) -> Tensor:
        name = self._module(matrix) + suffix.replace(".", "_")
        files, total = self.wanted.files, self.wanted.shape.num_experts
        meta = files.expect(name, None, FLOATS, why=why)
        value = files.read(name).float()
        check_positive(files, name, value)
        if meta.shape in ((), (1,)):
            return value.reshape(1, 1).expand(len(experts), 1).clone()
        two = matrix == "w13" and self.wanted.shape.gated
        if meta.shape not in ((total,), (total, 1), *(((total, 2),) if two else ())):
            expected = f"a scalar or [{total}]" + (f" or [{total}, 2]" if two else "")
            raise files.wrong(name, "has the wrong shape", expected, list(meta.shape), why)
        return value.reshape(total, -1)[experts.start : experts.stop]

    def bias(self, matrix: str) -> Tensor | None:
        name = f"{self._module(matrix)}_bias"
        return read_stacked_bias(self.wanted, matrix, name, interleaved=self._interleaved)

    def _module(self, matrix: str) -> str:
        wide = "gate_up_proj" if self.wanted.shape.gated else "up_proj"
        return f"{self.wanted.prefix}.{wide if matrix == 'w13' else 'down_proj'}"

    def _is_transposed(self, matrix: str, data: Part, by_family: bool) -> bool:
        """From the shape of the weights; where that fits both ways, from the model's family."""
        meta = self.wanted.files.meta(self._module(matrix), why="The other stacked matrix is there")
        rows, columns = data.shape(*self.wanted.shape.matrix(matrix))
        return by_family if rows == columns else meta.shape[1:] == (columns, rows)


def set_aside_input_scales(wanted: Wanted, stored: StoredExperts, suffix: str) -> None:
    """Calibrated scales of inputs that are not quantised with them: finer ones are computed, or none."""
    modules = [*stored.modules("w13"), *stored.modules("w2")]
    wanted.files.set_aside(name for m in modules for name in (m + suffix, m + suffix.replace(".", "_")))


def read_stacked_bias(wanted: Wanted, matrix: str, name: str, *, interleaved: bool) -> Tensor | None:
    """float32 [n, N] of a bias stored [E, N]; None, and refused where there is one, for biasless experts."""
    if not wanted.shape.biased:
        _refuse_biases(wanted.files, [name])
        return None
    n, _ = wanted.shape.matrix(matrix)
    wanted.files.expect(name, (wanted.shape.num_experts, n), FLOATS, why="These experts carry biases")
    value = wanted.files.read(name, first=wanted.first, count=wanted.count).float()
    if not interleaved or matrix == "w2":
        return value
    return torch.cat([value[:, 0::2], value[:, 1::2]], dim=1)


def copy_rows(source: Tensor, out: Tensor, *, interleaved: bool) -> None:
    """source [N, X] to out [N, X]; interleaved rows (gate, up, gate, up) become gate then up."""
    if not interleaved:
        out.copy_(source)
        return
    half = out.shape[0] // 2
    out[:half].copy_(source[0::2])
    out[half:].copy_(source[1::2])


def _expected_by(wanted: Wanted) -> str:
    s = wanted.shape
    stored = "not quantised" if wanted.stored == Format.BF16 else f"stored as {wanted.stored}"
    return (
        f"config.json says {s.num_experts} experts of hidden size {s.hidden} and expert size "
        f"{s.intermediate}, {stored}"
    )


def _refuse_biases(files: TensorFiles, names: Sequence[str]) -> None:
    """A bias left out would change every answer, so it is not quietly dropped."""
    for name in names:
        if name in files:
            raise CheckpointError(
                "is a bias of experts that have none in this architecture",
                file=files.meta(name).file,
                tensor=name,
                remedy="Check that `architectures` in config.json names this checkpoint's model",
            )
