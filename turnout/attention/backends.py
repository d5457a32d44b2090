"""What each attention backend can do, as data, and which one a cache group gets. Torch-free.

A new backend is a record here and a subclass of `PagedAttention`. The first that takes a group is chosen;
where none does, the plan is refused before weights load.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from turnout.attention.kinds import AttentionSpec, CacheGroup, DeltaNetSpec
from turnout.errors import Refusal
from turnout.vocabulary import AttentionKind


@dataclass(frozen=True, kw_only=True)
class Place:
    """What layers of a rank are to run on. present: on this machine, whose packages count."""

    device: str
    dtype: str
    page_size: int
    present: bool = True


@dataclass(frozen=True, kw_only=True)
class AttentionBackend:
    """head_multiple, page_multiple: what head sizes and pages are multiples of. package: that it needs."""

    name: str
    devices: frozenset[str]
    dtypes: frozenset[str]
    kinds: frozenset[AttentionKind]
    sinks: bool
    most_head_dim: int | None = None
    head_multiple: int = 1
    page_multiple: int = 1
    package: str | None = None

    def limits(self, spec: AttentionSpec, place: Place) -> list[str]:
        """All that stands in the way of this layer, in words; [] if nothing does."""
        most, D, package = self.most_head_dim, spec.head_dim, self.package
        device, dtype, page_size = place.device, place.dtype, place.page_size
        latent = spec.kind == AttentionKind.LATENT
        obstacles = (
            (device not in self.devices, f"runs on {' and '.join(sorted(self.devices))}"),
            (dtype not in self.dtypes, f"computes in {', '.join(sorted(self.dtypes))}, not {dtype}"),
            (spec.kind not in self.kinds, f"has no {spec.kind} attention"),
            (spec.sinks and not self.sinks, "has no sinks"),
            (
                spec.value_dim != D and not latent,
                f"keeps values as large as keys ({D}), not {spec.value_dim}",
            ),
            (most is not None and most < D, f"takes heads of at most {most}, not {D}"),
            (D % self.head_multiple > 0, f"takes heads of multiples of {self.head_multiple}, not {D}"),
            (page_size % self.page_multiple > 0, f"takes pages of multiples of {self.page_multiple} tokens"),
            (bool(package) and place.present and find_spec(package or "") is None, f"needs {package}"),
        )
        return [limit for stands, limit in obstacles if stands]


HALVES = frozenset({"bfloat16", "float16"})
KINDS = frozenset({AttentionKind.FULL, AttentionKind.SLIDING_WINDOW})
BACKENDS = (
    AttentionBackend(
        name="triton",
        devices=frozenset({"cuda"}),
        dtypes=HALVES,
        kinds=KINDS | {AttentionKind.LATENT},
        sinks=True,
        most_head_dim=256,
        package="triton",
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
        package="numba",
    ),
    AttentionBackend(
        name="torch",
        devices=frozenset({"cpu", "cuda"}),
        dtypes=HALVES | {"float32"},
        kinds=KINDS | {AttentionKind.LATENT},
        sinks=True,
    ),
)
LATENT_SPAN = 1024  # tokens whose keys and values latent attention expands at a time


def choose(spec: AttentionSpec, place: Place) -> str | None:
    """The name of the first backend that takes such layers; None if there is none."""
    for backend in BACKENDS:
        if not backend.limits(spec, place):
            return backend.name
    return None


def recurrence(spec: DeltaNetSpec, device: str, dtype: str, *, present: bool = True) -> str:
    """What takes states of recurrent layers over single tokens; torch takes all of them over prompts."""
    sizes = spec.head_dim, spec.value_dim
    if device == "cuda" and max(sizes) <= 128 and not (present and find_spec("triton") is None):
        return "triton"
    fits = dtype == "float32" and max(sizes) <= 256 and not any(size % 16 for size in sizes)
    if device == "cpu" and fits and not (present and find_spec("numba") is None):
        return "cpu"
    return "torch"


def workspace_bytes(groups: Sequence[CacheGroup], tokens: int, itemsize: int) -> int:
    """The most that attention allocates for a chunk of so many tokens, next to queries and results.

    Only latent attention does: keys and values of a span, made and then padded, and in float32 what the spans
    give.
    """
    most = 0
    for spec in (group.spec for group in groups if group.spec.kind == AttentionKind.LATENT):
        expanded = LATENT_SPAN * (3 * spec.head_dim + 2 * spec.value_dim) * itemsize
        joined = tokens * (3 * spec.value_dim * 4 + spec.head_dim * itemsize)
        most = max(most, spec.num_heads * (expanded + joined))
    return most


def refusals(groups: Sequence[CacheGroup], place: Place) -> list[Refusal]:
    """Why layers of these groups can run on no backend."""
    found = []
    for group in groups:
        spec = group.spec
        if choose(spec, place):
            continue
        reasons = [f"{backend.name} {', '.join(backend.limits(spec, place))}" for backend in BACKENDS]
        found.append(
            Refusal(
                who="attention",
                asked=f"layer {group.layers[0]}: {spec.kind}, heads of {spec.head_dim} and {spec.value_dim}, "
                f"on {place.device} in {place.dtype}",
                limit="; ".join(reasons),
                remedy="use --dtype, --page-size or --device that one of them takes, or another model",
            )
        )
    return found
