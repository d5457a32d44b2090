"""What an attention backend declares, where layers are to run, and what was chosen for them. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from turnout.attention.kinds import (
    LATENT_KINDS,
    AttentionSpec,
    CompressedSpec,
    DeltaNetSpec,
    SparseLatentSpec,
)
from turnout.packages import Package
from turnout.vocabulary import AttentionKind, ComputeDtype, Device

AUTO = "auto"
HOPPER = 9  # a major compute capability
HALF_PRECISION = frozenset({"bfloat16", "float16"})


@dataclass(frozen=True, kw_only=True)
class Place:
    """What layers of a rank are to run on.

    architecture: a GPU's compute capability times ten. present: on this machine, whose packages count.
    asked: --attention-backend.
    """

    device: Device
    dtype: ComputeDtype
    page_size: int
    architecture: int = 0
    present: bool = True
    asked: str = AUTO


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """What computes the attention of a cache group: `backend`, but `prompts` in steps whose prompts bring
    `prompt_tokens` or more on average. These two are the same where one computes everything.

    why: of the prompts' backend, in words; "" where there is nothing to choose from.
    """

    backend: str
    prompts: str
    prompt_tokens: int = 0
    why: str = ""

    def takes_prompts(self, lengths: Sequence[int]) -> bool:
        """Whether prompts of a step that bring so many tokens are computed by `prompts`, not by `backend`."""
        others = self.prompts != self.backend and len(lengths) > 0
        return others and sum(lengths) >= self.prompt_tokens * len(lengths)

    def __str__(self) -> str:
        least = f" of {self.prompt_tokens} tokens or more" if self.prompt_tokens else ""
        prompts = "" if self.prompts == self.backend else f", and {self.prompts} for prompts{least}"
        return self.backend + prompts + (f" ({self.why})" if self.why else "")


class Obstacle(NamedTuple):
    """Why a backend cannot compute a layer, and what to change: the end of a `Refusal`."""

    limit: str
    remedy: str


@dataclass(frozen=True, kw_only=True)
class StateKernels:
    """What a backend declares of recurrent layers, whose states it keeps on its devices.

    implementation: "package.module:class", `RequestStates` (states.py) or a subclass. dtypes, most_head_dim,
    head_multiple: as of attention, but for keys and values alike. takes_chunks: one call takes those of
    several requests.
    """

    implementation: str
    dtypes: frozenset[str] = HALF_PRECISION | {"float32"}
    most_head_dim: int | None = None
    head_multiple: int = 1
    takes_chunks: bool = False


@dataclass(frozen=True, kw_only=True)
class AttentionBackend:
    """What a folder of attention/backends declares, the `BACKEND` of its declaration.py.

    implementations: of each kind that it computes, "package.module:class", a subclass of `PagedAttention`
    (paged.py). most_head_dim: but of compressed attention. head_multiple, page_multiple: what head sizes and
    pages are multiples of. architectures: major compute capabilities of GPUs that it runs on; empty: all.
    device_tables: it reads pages and lengths on the device, so that CUDA graphs may hold its decoding, and
    kernels that make keys and values store them (`Attention.place`).
    index_fp8: it reads index keys in FP8. states: of recurrent layers; None: it has nothing for them.

    prompts_for: it has no decoding, and computes prompts for this backend, by classes like
    `FlashAttn4Prompts`, of latent attention by functions like `latent.attend`, and of recurrent layers by a
    `StatePrompts` (states.py). pays_from: tokens that
    prompts of a step must have on average for it to be faster than that one; None where that is not known.
    own_prompts: layers whose prompts no library computes faster; one is taken only where it is asked for.
    """

    name: str
    devices: frozenset[str]
    dtypes: frozenset[str]
    implementations: Mapping[AttentionKind, str]
    sinks: bool = True
    architectures: frozenset[int] = frozenset()
    most_head_dim: int | None = None
    head_multiple: int = 1
    page_multiple: int = 1
    package: Package | None = None
    device_tables: bool = False
    index_fp8: bool = False
    states: StateKernels | None = None
    prompts_for: str = ""
    pays_from: Callable[[AttentionSpec, Place], int | None] = lambda spec, place: None
    own_prompts: Callable[[AttentionSpec, Place], bool] = lambda spec, place: False

    def obstacles(self, spec: AttentionSpec, place: Place) -> list[Obstacle]:
        """All that stands in the way of this layer; [] if nothing does."""
        package = self.package
        lacking = package.lacking() if package and place.present else ""
        absent = (bool(lacking), lacking, package.install if package else "")
        found = (*self._of_place(place), *self._of_layer(spec, place), absent)
        return [Obstacle(limit, remedy) for stands, limit, remedy in found if stands]

    def _of_place(self, place: Place) -> tuple[tuple[bool, str, str], ...]:
        """Device and type: whether each stands in the way, the limit, and the remedy."""
        on_gpu = place.device == "cuda"
        generations = " and ".join(f"{major}.x" for major in sorted(self.architectures))
        return (
            (
                place.device not in self.devices,
                f"runs on {' and '.join(sorted(self.devices))}",
                f"use --device {' or '.join(sorted(self.devices))}",
            ),
            (
                on_gpu and bool(self.architectures) and place.architecture // 10 not in self.architectures,
                f"runs on GPUs of compute capability {generations}",
                "use such a GPU",
            ),
            (
                place.dtype not in self.dtypes,
                f"computes in {', '.join(sorted(self.dtypes))}, not {place.dtype}",
                f"use --dtype {' or '.join(sorted(self.dtypes))}",
            ),
        )

    def _of_layer(self, spec: AttentionSpec, place: Place) -> tuple[tuple[bool, str, str], ...]:
        """The same of the layer: kind, sizes, sinks and pages."""
        most, D, pages = self.most_head_dim, spec.head_dim, self.page_multiple
        latent, other_model = spec.kind in LATENT_KINDS, "use another model"
        paged = not isinstance(spec, DeltaNetSpec)
        return (
            (spec.kind not in self.implementations, f"has no {spec.kind} attention", other_model),
            (
                isinstance(spec, SparseLatentSpec) and spec.index_fp8 and not self.index_fp8,
                "does not read index keys in FP8",
                "leave --index-cache-dtype out",
            ),
            (spec.sinks and not self.sinks, "has no sinks", other_model),
            (
                spec.value_dim != D and paged and not latent,
                f"keeps values as large as keys ({D}), not {spec.value_dim}",
                other_model,
            ),
            (
                most is not None and most < D and not isinstance(spec, CompressedSpec),
                f"takes heads of at most {most}, not {D}",
                other_model,
            ),
            (
                D % self.head_multiple > 0,
                f"takes heads of multiples of {self.head_multiple}, not {D}",
                other_model,
            ),
            (
                isinstance(spec, CompressedSpec) and spec.splits_windows(place.page_size),
                f"needs pages of {getattr(spec, 'rate', 0)} tokens, a multiple or a part of them",
                f"use --page-size {getattr(spec, 'rate', 0)}",
            ),
            (
                place.page_size % pages > 0,
                f"takes pages of multiples of {pages} tokens",
                f"use --page-size {pages}",
            ),
        )

    def limits(self, spec: AttentionSpec, place: Place) -> list[str]:
        """The obstacles in words."""
        return [obstacle.limit for obstacle in self.obstacles(spec, place)]

    def states_of(self, spec: DeltaNetSpec, place: Place) -> StateKernels | None:
        """What it has for the states of such layers there; None if nothing."""
        kernels, sizes = self.states, (spec.head_dim, spec.value_dim)
        if kernels is None or place.device not in self.devices or place.dtype not in kernels.dtypes:
            return None
        if kernels.most_head_dim is not None and kernels.most_head_dim < max(sizes):
            return None
        if any(size % kernels.head_multiple for size in sizes):
            return None
        return None if self.package and place.present and self.package.lacking() else kernels
