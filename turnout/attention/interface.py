"""What attention is to a model, and what it must know of the sequences of a step. Torch-free.

Legend: N tokens of a step (all sequences concatenated), Hq/Hkv query/KV heads, D head size, Dv of values, S
slots of a KV cache: places of one token each, C what latent attention keeps of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from turnout.attention.delta_rule import DeltaCell
    from turnout.attention.entries import Compressible
    from turnout.attention.indexing import Index
    from turnout.attention.up_projection import UpProjection
    from turnout.kernels.cpu.attention import Cache, Chunks
    from turnout.kernels.cpu.recurrent_layer import Requests


class ProjectedHeads(NamedTuple):
    """Queries, keys and values of a layer as its projection gives them, and how they are normed and rotated.

    heads: [N, X], contiguous, num_q heads of queries, num_k of keys, then values; or [P, N, X], whose sum
    over P is meant. cos, sin: [N, D], contiguous, sin with the rotation's sign. weight: [num_q + num_k, D] of
    an RMS norm of each query and key, with `eps`; None: there is none.
    """

    heads: Tensor
    num_q: int
    num_k: int
    cos_ND: Tensor
    sin_ND: Tensor
    weight_GD: Tensor | None
    eps: float


class Attention(Protocol):
    """Attention over the sequences of this step. The engine's version reads and writes paged KV.

    places_N: int64, the positions of the step's tokens on the device, where laying it out made them.
    """

    places_N: Tensor | None = None

    def __call__(
        self, layer: int, q_NHD: Tensor, k_NHD: Tensor, v_NHD: Tensor, sinks_H: Tensor | None = None
    ) -> Tensor:
        """Store k and v [N, Hkv, D] for `layer`, attend with q [N, Hq, D] as the layer declares (kinds.py).

        sinks: float32 [Hq], of a layer that declares them. Returns [N, Hq, D]. Raises ValueError for layers
        of the kinds below.
        """
        raise ValueError(f"layer {layer} keeps no keys and values of each token")

    def place(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """Where a kernel that computes keys and values may store them itself: the layer's cache
        [Hkv, S, 2, D], keys before values, and each token's slot, int64 [N]. None: hand them to the call."""
        return None

    def queries(self, shape: Sequence[int]) -> Tensor | None:
        """Memory of this shape where queries for `attend` had best be written, in the type that the cache
        has; None: anywhere."""
        return None

    def attend(
        self, layer: int, q_NHD: Tensor, sinks_H: Tensor | None = None, out_NHD: Tensor | None = None
    ) -> Tensor:
        """As a call, for keys and values that are stored already. out: contiguous, to be filled and returned.
        Raises ValueError if `place` gives None."""
        raise ValueError("keys and values were not stored: place() gives None")

    def attend_projected(
        self, layer: int, projected: ProjectedHeads, sinks_H: Tensor | None = None
    ) -> Tensor | None:
        """As `attend`, of heads that are neither normed nor rotated, whose keys and values it stores. None:
        it does not, and nothing is done."""
        return None

    def compiled(self, layer: int) -> tuple[Chunks, Cache] | None:
        """What a kernel for CPUs needs that stores keys and values and attends itself, with all else that
        attention is (kernels/cpu/decoder_layer.py). None: call."""
        return None

    def compiled_states(self, layer: int) -> Requests | None:
        """As `compiled`, of a recurrent layer (kernels/cpu/recurrent_layer.py). None: `recur`."""
        return None

    def adds_parts(self, layer: int, rows: int) -> bool:
        """Whether `recur` adds up parts of what a recurrent `layer` computed of so many tokens."""
        return False

    def recur(self, layer: int, mixed_NX: Tensor, cell: DeltaCell) -> Tensor:
        """Take the states of this step's requests in a recurrent `layer` over their tokens (delta_rule.py).

        mixed [N, X]: what the layer computed of each token; or float32 parts [P, N, X], whose sum is meant,
        where `adds_parts`. Returns [N, Hv Dv], value heads normed and gated. Raises ValueError where no state
        is kept.
        """
        raise ValueError(f"layer {layer} is recurrent, and no states are kept for it")

    def latent(
        self, layer: int, q_NHD: Tensor, latent_NC: Tensor, up: UpProjection, index: Index | None = None
    ) -> Tensor:
        """Of a layer that declares latent attention: store latent [N, C], attend with q [N, Hq, D].

        latent: normed, then the part of the keys that all heads share, rotated; q ends in its rotated part.
        up: makes keys and values of the heads. index: of sparse latent attention, unless the layer shares the
        choice of the last one before it that has an indexer. Returns [N, Hq, Dv]. Raises ValueError for other
        layers.
        """
        raise ValueError(f"layer {layer} keeps keys and values, not latent vectors")

    def compressed(
        self, layer: int, q_NHD: Tensor, kv_ND: Tensor, sinks_H: Tensor, rest: Compressible | None
    ) -> Tensor:
        """Of a layer that declares compressed attention: store kv [N, D], key and value of all heads, and
        attend with q [N, Hq, D]. rest: of which entries are made; None in layers that have none.
        Returns [N, Hq, D], not turned back. Raises ValueError for other layers.
        """
        raise ValueError(f"layer {layer} keeps each token, not entries made of several")


class GroupPages(Protocol):
    """The pages of a sequence in one cache group, in the order of its tokens."""

    @property
    def pages(self) -> list[int]: ...

    placed: int  # pages already written to the page table; attention updates it


class PagedSequence(Protocol):
    """A request as page tables see it."""

    @property
    def row(self) -> int:
        """Of the page tables; unique among running requests."""
        ...

    @property
    def kv(self) -> Sequence[GroupPages]:
        """By cache group."""
        ...

    @property
    def state_slots(self) -> Sequence[int]:
        """Of its state; where there are recurrent layers, then one for each draft of a step."""
        ...


class Chunk(Protocol):
    """Tokens [start, end) of one request, to be computed in this step."""

    @property
    def request(self) -> PagedSequence: ...
    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def length(self) -> int: ...
