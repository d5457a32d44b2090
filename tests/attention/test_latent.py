"""Latent attention: both forms equal a softmax written out, whatever the chunks and the spans."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from turnout.attention.capability import Chosen, Place
from turnout.attention.choose import choose
from turnout.attention.kinds import AttentionSpec, cache_groups
from turnout.attention.latent import LatentAttention, attend_expanded, expands
from turnout.attention.paged import paged_attention
from turnout.attention.up_projection import UpProjection
from turnout.attention.workspace import workspace_bytes
from turnout.engine.scheduler.request import GroupPages

SPEC = AttentionSpec.latent(num_heads=4, nope_dim=16, rope_dim=8, value_dim=12, latent_dim=32, scaling=1.3)
DEEPSEEK = AttentionSpec.latent(num_heads=128, nope_dim=128, rope_dim=64, value_dim=128, latent_dim=512)
BOUND = 2e-5


@dataclass
class Sequence:
    row: int
    kv: list[GroupPages]


@dataclass
class Chunk:
    request: Sequence
    start: int
    end: int
    length: int = field(init=False)

    def __post_init__(self) -> None:
        self.length = self.end - self.start


@dataclass
class Drawn:
    """A sequence's queries [L, H, D] and kept vectors [L, C], and the projection of the layer."""

    q_LHD: Tensor
    latent_LC: Tensor
    up: UpProjection

    def expected(self) -> Tensor:
        """[L, H, Dv] by the definition, in float64, head by head."""
        rank, nope = SPEC.latent_dim, self.up.nope_dim
        seen_LL = torch.ones(len(self.q_LHD), len(self.q_LHD)).tril().bool()
        out = []
        for h, weight_XL in enumerate(self.up.weight_HXL.double()):
            made_LX = self.latent_LC[:, :rank].double() @ weight_XL.T
            k_LD = torch.cat((made_LX[:, :nope], self.latent_LC[:, rank:].double()), dim=1)
            scores_LL = (self.q_LHD[:, h].double() @ k_LD.T * SPEC.scale).masked_fill(~seen_LL, -torch.inf)
            out.append(scores_LL.softmax(-1) @ made_LX[:, nope:])
        return torch.stack(out, dim=1)


def drawn(length: int, seed: int = 0) -> Drawn:
    draw = torch.Generator().manual_seed(seed)
    made = SPEC.head_dim - SPEC.rope_dim + SPEC.value_dim
    return Drawn(
        torch.randn(length, SPEC.num_heads, SPEC.head_dim, generator=draw),
        torch.randn(length, SPEC.latent_dim + SPEC.rope_dim, generator=draw),
        UpProjection(
            torch.randn(SPEC.num_heads, made, SPEC.latent_dim, generator=draw) * 0.2, made - SPEC.value_dim
        ),
    )


def paged(backend: str = "torch") -> LatentAttention:
    attention = paged_attention(
        *cache_groups([SPEC, SPEC]),
        num_pages=64,
        page_size=4,
        max_running=4,
        max_context=256,
        device=torch.device("cpu"),
        dtype=torch.float32,
        chosen=Chosen(backend=backend, prompts=backend),
    )
    assert isinstance(attention, LatentAttention)
    attention.cache.fill_(torch.nan)  # what is not written is never read
    return attention


def sequence(row: int, first: int, pages: int) -> Sequence:
    return Sequence(row, [GroupPages(pages=list(range(first + pages - 1, first - 1, -1)))])


@pytest.mark.parametrize(
    "cuts", [(0, 90), (0, 1, 90), (0, 7, 14, 90), (0, 64, 65, 66, 90), (0, 50, 90)], ids=str
)
def test_chunks_of_any_length_equal_the_definition(cuts: tuple[int, ...]) -> None:
    """Chunks of 40 tokens and more are expanded behind a prefix, shorter ones absorbed; some decode."""
    one, two = drawn(90), drawn(90, seed=1)
    two.up = one.up
    attention, requests = paged(), (sequence(0, 0, 23), sequence(1, 30, 23))
    found: tuple[list[Tensor], list[Tensor]] = ([], [])
    for start, end in pairwise(cuts):
        chunks = [Chunk(request, start, end) for request in requests]
        step = attention.laid_out(chunks, []) if end - start < 3 else attention.laid_out([], chunks)
        q, latent = (
            torch.cat([getattr(x, name)[start:end] for x in (one, two)]) for name in ("q_LHD", "latent_LC")
        )
        step.latent(1, q, -latent, one.up)  # the layers share pages, not what is in them
        out = step.latent(0, q, latent, one.up)
        found[0].append(out[: end - start])
        found[1].append(out[end - start :])
    for parts, drawn_from in zip(found, (one, two), strict=True):
        assert float((torch.cat(parts) - drawn_from.expected()).abs().max()) < BOUND


def test_sequences_that_decode_with_drafts_next_to_chunks() -> None:
    """Of unequal lengths, so that contexts are padded."""
    one, two, three = drawn(30), drawn(11, seed=1), drawn(20, seed=2)
    two.up = three.up = one.up
    attention, requests = paged(), [sequence(i, 10 * i, 8) for i in range(3)]
    begun = [Chunk(requests[0], 0, 27), Chunk(requests[1], 0, 10)]
    attention.laid_out([], begun).latent(
        0,
        torch.cat((one.q_LHD[:27], two.q_LHD[:10])),
        torch.cat((one.latent_LC[:27], two.latent_LC[:10])),
        one.up,
    )
    step = attention.laid_out(
        [Chunk(requests[0], 27, 30), Chunk(requests[1], 10, 11)], [Chunk(requests[2], 0, 20)]
    )
    q = torch.cat((one.q_LHD[27:], two.q_LHD[10:], three.q_LHD))
    out = step.latent(0, q, torch.cat((one.latent_LC[27:], two.latent_LC[10:], three.latent_LC)), one.up)
    wanted = torch.cat((one.expected()[27:], two.expected()[10:], three.expected()))
    assert float((out - wanted).abs().max()) < BOUND


@pytest.mark.parametrize("span", [1, 7, 16, 39, 64])
@pytest.mark.parametrize("prefix", [0, 33])
def test_spans_joined_equal_the_definition(span: int, prefix: int) -> None:
    one = drawn(72)
    slots_L = torch.arange(prefix) if prefix else None
    out = attend_expanded(
        one.q_LHD[prefix:], one.latent_LC[prefix:], one.up, SPEC.scale, (one.latent_LC, slots_L), span
    )
    assert float((out - one.expected()[prefix:]).abs().max()) < BOUND


def test_no_tokens_attend_to_nothing() -> None:
    one = drawn(0)
    assert paged().laid_out([], []).latent(0, one.q_LHD, one.latent_LC, one.up).shape == (0, 4, 12)


def test_layers_of_another_kind_are_refused() -> None:
    full = AttentionSpec.full(num_heads=4, num_kv_heads=4, head_dim=16)
    attention = paged_attention(
        *cache_groups([full]),
        num_pages=4,
        page_size=4,
        max_running=1,
        max_context=16,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    one = drawn(0)
    with pytest.raises(ValueError, match="layer 0 keeps keys and values, not latent vectors"):
        attention.laid_out([], []).latent(0, one.q_LHD, one.latent_LC, one.up)


def test_what_deepseek_keeps_and_expands() -> None:
    """576 values of each token, whole on every rank; chunks of 171 tokens and more are worth expanding
    for."""
    assert DEEPSEEK.token_bytes(2) == 1152
    assert DEEPSEEK.split(8).token_bytes(2) == 1152
    assert DEEPSEEK.split(8).num_heads == 16
    assert not DEEPSEEK.splits(3)
    assert [expands(DEEPSEEK, start, length) for start, length in ((0, 1), (9, 170), (9, 171))] == [
        True,
        False,
        True,
    ]
    chosen = choose(DEEPSEEK, Place(device="cpu", dtype="float32", page_size=16))
    assert str(chosen) == "torch"


class Allocated(TorchDispatchMode):
    """The most bytes that tensors made by operations had at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.held = self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {x.untyped_storage()._cdata for x in args if isinstance(x, Tensor)}
        out = func(*args, **(kwargs or {}))
        for made in tree_leaves(out):
            if isinstance(made, Tensor) and made.untyped_storage()._cdata not in given:
                nbytes = made.untyped_storage().nbytes()
                self.held += nbytes
                self.most = max(self.most, self.held)
                weakref.finalize(made.untyped_storage(), self._freed, nbytes)
        return out

    def _freed(self, nbytes: int) -> None:
        self.held -= nbytes


def test_the_workspace_bounds_what_a_chunk_allocates() -> None:
    """Spans of 1024 tokens, however long the context."""
    spec = AttentionSpec.latent(num_heads=16, nope_dim=128, rope_dim=64, value_dim=128, latent_dim=512)
    tokens, context = 256, 8192
    up = UpProjection(torch.randn(16, 256, 512) * 0.05, 128)
    q, latent, cache = torch.randn(tokens, 16, 192), torch.randn(tokens, 576), torch.randn(context, 576)
    planned = workspace_bytes(cache_groups([spec]), tokens, 4)
    with Allocated() as allocated:
        attend_expanded(q, latent, up, spec.scale, (cache, torch.arange(context)))
    assert planned / 4 < allocated.most <= planned
