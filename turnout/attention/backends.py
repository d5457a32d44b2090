"""What each attention backend can do, as data, and which of them a cache group gets. Torch-free.

A new backend is a record here and a subclass of `PagedAttention`, or, if it computes prompts only, a class
that takes them from another backend (`prompts_for`). The first that takes a group is chosen, or the one that
--attention-backend names; where none does, the plan is refused before weights load.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from turnout.attention.kinds import (
    LATENT_KINDS,
    AttentionSpec,
    CacheGroup,
    CompressedSpec,
    DeltaNetSpec,
    SparseLatentSpec,
)
from turnout.errors import Refusal
from turnout.packages import NUMBA, TRITON, Package
from turnout.vocabulary import AttentionKind, ComputeDtype, Device

AUTO = "auto"
FLASH_ATTN_4 = Package(
    module="flash_attn",
    distribution="flash-attn-4",
    install="pip install 'turnout[flash-attn-4]'",
    minimum="4.0.0b36",
)
HOPPER = 9  # the major compute capability


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

    def __str__(self) -> str:
        least = f" of {self.prompt_tokens} tokens or more" if self.prompt_tokens else ""
        prompts = "" if self.prompts == self.backend else f", and {self.prompts} for prompts{least}"
        return self.backend + prompts + (f" ({self.why})" if self.why else "")


class Obstacle(NamedTuple):
    """Why a backend cannot compute a layer, and what to change: the end of a `Refusal`."""

    limit: str
    remedy: str


@dataclass(frozen=True, kw_only=True)
class AttentionBackend:
    """head_multiple, page_multiple: what head sizes and pages are multiples of. architectures: major
    compute capabilities of GPUs that it runs on; empty: all. prompts_for: it has no decoding, and computes
    prompts for this backend. on_request: of `kinds`, those it computes only where --attention-backend names
    it."""

    name: str
    devices: frozenset[str]
    dtypes: frozenset[str]
    kinds: frozenset[AttentionKind]
    sinks: bool
    architectures: frozenset[int] = frozenset()
    most_head_dim: int | None = None
    head_multiple: int = 1
    page_multiple: int = 1
    package: Package | None = None
    prompts_for: str = ""
    on_request: frozenset[AttentionKind] = frozenset()

    def obstacles(self, spec: AttentionSpec, place: Place) -> list[Obstacle]:
        """All that stands in the way of this layer; [] if nothing does."""
        most, D, package = self.most_head_dim, spec.head_dim, self.package
        latent, on_gpu = spec.kind in LATENT_KINDS, place.device == "cuda"
        generations = " and ".join(f"{major}.x" for major in sorted(self.architectures))
        lacking = package.lacking() if package and place.present else ""
        pages, other_model = self.page_multiple, "use another model"
        found = (
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
            (spec.kind not in self.kinds, f"has no {spec.kind} attention", other_model),
            (
                spec.kind in self.on_request and place.asked != self.name,
                f"computes {spec.kind} attention on request only",
                f"use --attention-backend {self.name}",
            ),
            (spec.sinks and not self.sinks, "has no sinks", other_model),
            (
                spec.value_dim != D and not latent,
                f"keeps values as large as keys ({D}), not {spec.value_dim}",
                other_model,
            ),
            (most is not None and most < D, f"takes heads of at most {most}, not {D}", other_model),
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
            (bool(lacking), lacking, package.install if package else ""),
        )
        return [Obstacle(limit, remedy) for stands, limit, remedy in found if stands]

    def limits(self, spec: AttentionSpec, place: Place) -> list[str]:
        """The obstacles in words."""
        return [obstacle.limit for obstacle in self.obstacles(spec, place)]


HALVES = frozenset({"bfloat16", "float16"})
KINDS = frozenset({AttentionKind.FULL, AttentionKind.SLIDING_WINDOW})
BACKENDS = (
    AttentionBackend(
        name="triton",
        devices=frozenset({"cuda"}),
        dtypes=HALVES,
        kinds=KINDS | LATENT_KINDS,
        sinks=True,
        most_head_dim=256,
        package=TRITON,
        on_request=frozenset({AttentionKind.SPARSE_LATENT}),  # until its kernels have run on a GPU
    ),
    AttentionBackend(
        name="cpu",
        devices=frozenset({"cpu"}),
        dtypes=frozenset({"float32"}),
        kinds=KINDS,
        sinks=True,
        most_head_dim=256,
        head_multiple=16,
        page_multiple=16,
        package=NUMBA,
    ),
    AttentionBackend(
        name="torch",
        devices=frozenset({"cpu", "cuda"}),
        dtypes=HALVES | {"float32"},
        kinds=KINDS | LATENT_KINDS | {AttentionKind.COMPRESSED},
        sinks=True,
    ),
    AttentionBackend(
        name="flash-attn-4",
        devices=frozenset({"cuda"}),
        dtypes=HALVES,
        kinds=KINDS,
        sinks=True,
        architectures=frozenset({HOPPER, 10}),
        most_head_dim=256,
        head_multiple=8,
        package=FLASH_ATTN_4,
        prompts_for="triton",
    ),
)
NAMED = {backend.name: backend for backend in BACKENDS}
LATENT_SPAN = 1024  # tokens whose keys and values latent attention expands at a time
SPARSE_ROWS = 16  # tokens that sparse latent attention computes at a time
COMPRESSED_ROWS = 32  # tokens that compressed attention computes at a time
INDEX_SPAN = 4096  # tokens of a context that it scores at a time


def choose(spec: AttentionSpec, place: Place) -> Chosen | None:
    """What computes such layers; None if nothing does, or not what was asked for."""
    asked = NAMED.get(place.asked)
    main = asked and (asked.prompts_for or asked.name)
    for backend in BACKENDS:
        if backend.prompts_for or (main and main != backend.name) or backend.limits(spec, place):
            continue
        others = [b for b in BACKENDS if b.prompts_for == backend.name and asked in (None, b)]
        return _with_prompts(backend, others, spec, place)
    return None


def _with_prompts(
    backend: AttentionBackend, others: Sequence[AttentionBackend], spec: AttentionSpec, place: Place
) -> Chosen | None:
    """`backend`, with one of `others` for prompts: if it is asked for, or where it is faster."""
    own = Chosen(backend=backend.name, prompts=backend.name)
    for other in others:
        limits = other.limits(spec, place)
        if place.asked == other.name:
            return None if limits else replace(own, prompts=other.name)
        least = pays_from(spec, place)
        if least is None:
            continue
        if limits:
            why = f"{other.name} is faster for prompts of {least} tokens or more, but {', '.join(limits)}"
            return replace(own, why=why)
        return replace(own, prompts=other.name, prompt_tokens=least, why="faster from there on, as measured")
    return own


def pays_from(spec: AttentionSpec, place: Place) -> int | None:
    """Tokens that prompts of a step must have on average for flash-attn-4 to be faster than our kernels; None
    where that is not known.

    Measured on an H200 with pages of 16 (tools/attention.py), us, ours against the library's: heads of 128,
    2048 tokens 100 : 74, behind 16k of context 1256 : 887, 4 x 512 43 : 38, 16 x 128 26 : 29; heads of 64,
    116 : 99, 1368 : 1158, 43 : 53, 25 : 40.
    """
    if place.architecture // 10 != HOPPER or spec.window:
        return None
    return 512 if spec.head_dim >= 128 else 1024


def recurrence(spec: DeltaNetSpec, device: Device, dtype: ComputeDtype, *, present: bool = True) -> str:
    """What takes states of recurrent layers over single tokens, and on CPUs over prompts; on CUDA torch takes
    all of them over prompts."""
    sizes = spec.head_dim, spec.value_dim
    if device == "cuda" and max(sizes) <= 128 and not (present and TRITON.lacking()):
        return "triton"
    fits = dtype == "float32" and max(sizes) <= 256 and not any(size % 16 for size in sizes)
    if device == "cpu" and fits and not (present and NUMBA.lacking()):
        return "cpu"
    return "torch"


def workspace_bytes(groups: Sequence[CacheGroup], tokens: int, itemsize: int, longest: int = 0) -> int:
    """The most that attention allocates for a chunk of so many tokens, next to queries and results.

    Only latent attention does: keys and values of a span, made and then padded, and in float32 what the spans
    give. longest: of contexts, in tokens, whose scores sparse latent attention ranks.
    """
    most = max((_compressed_bytes(g.spec, itemsize, longest) for g in groups), default=0)
    for spec in (group.spec for group in groups if group.spec.kind in LATENT_KINDS):
        expanded = LATENT_SPAN * (3 * spec.head_dim + 2 * spec.value_dim) * itemsize
        joined = tokens * (3 * spec.value_dim * 4 + spec.head_dim * itemsize)
        most = max(most, spec.num_heads * (expanded + joined))
        if isinstance(spec, SparseLatentSpec):
            most = max(most, _sparse_bytes(spec, tokens, itemsize, longest))
    return most


def _compressed_bytes(spec: AttentionSpec, itemsize: int, longest: int) -> int:
    """The entries of a context, and of some tokens the scores of these and of the last tokens, thrice."""
    if not isinstance(spec, CompressedSpec):
        return 0
    entries = longest // spec.rate if spec.rate else 0
    seen = spec.recent + COMPRESSED_ROWS + entries
    scored = COMPRESSED_ROWS * max(spec.num_heads, spec.index_heads) * seen * 3 * 4
    return scored + seen * (spec.head_dim + spec.index_dim) * 2 * itemsize


def _sparse_bytes(spec: SparseLatentSpec, tokens: int, itemsize: int, longest: int) -> int:
    """The choices of a step, and of some of its tokens the products and scores of index keys, their ranking,
    and the chosen vectors with their scores."""
    scored = INDEX_SPAN * (2 * spec.index_heads * 4 + spec.index_dim * (4 + itemsize))
    ranked = longest * (3 * 8 + 3 * 4)
    read = (spec.latent_dim + spec.rope_dim) * 2 * itemsize + spec.num_heads * 3 * 4
    absorbed = tokens * spec.num_heads * (2 * spec.latent_dim + spec.rope_dim) * itemsize
    return (
        tokens * spec.index_topk * 4
        + absorbed
        + SPARSE_ROWS * max(scored + ranked, spec.index_topk * (read + 8))
    )


def refusals(groups: Sequence[CacheGroup], place: Place) -> list[Refusal]:
    """Why layers of these groups can run on no backend, or not on the one that was asked for."""
    if place.asked not in (AUTO, *NAMED):
        return [
            Refusal(
                who="attention",
                asked=f"--attention-backend {place.asked}",
                limit="there is no such backend",
                remedy=f"use one of {', '.join((AUTO, *NAMED))}",
            )
        ]
    asked = NAMED.get(place.asked)
    tried = [b for b in BACKENDS if asked is None or b.name in (asked.name, asked.prompts_for)]
    found = []
    for group in groups:
        spec = group.spec
        if choose(spec, place):
            continue
        obstacles = {backend.name: backend.obstacles(spec, place) for backend in tried}
        remedies = dict.fromkeys(o.remedy for each in obstacles.values() for o in each)
        found.append(
            Refusal(
                who="attention",
                asked=("" if asked is None else f"--attention-backend {asked.name}, ")
                + f"layer {group.layers[0]}: {spec.kind}, heads of {spec.head_dim} and {spec.value_dim}, "
                f"on {place.device} in {place.dtype}",
                limit="; ".join(
                    f"{name} {', '.join(o.limit for o in each)}" for name, each in obstacles.items() if each
                ),
                remedy="use --dtype, --page-size or --device that one of them takes, or another model"
                if asked is None
                else f"use --attention-backend auto, or {', and '.join(remedies)}",
            )
        )
    return found
