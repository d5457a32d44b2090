"""Run by test_latent_attention.py with TRITON_INTERPRET=1: the absorbed form over pages; prints JSON.

In float32: the interpreter's products of bfloat16 are wrong.
"""

from __future__ import annotations

import json

import torch

from tests.attention import test_sparse_latent as sparse
from tests.attention.test_latent import Chunk, drawn, paged, sequence
from tests.kernels import interpreter
from turnout.attention.capability import Chosen
from turnout.attention.kinds import AttentionSpec, cache_groups
from turnout.attention.latent import LatentAttention
from turnout.attention.paged import paged_attention
from turnout.attention.up_projection import UpProjection
from turnout.kernels.attention import latent_heads
from turnout.kernels.attention.latent import Tiles, attend

results = {}
interpreter.prepare()


def error(ends: list[int], *, H=4, LC=32, DR=8, page=16, splits=1, tiles=None) -> float:
    """The largest difference from a softmax written out; every slot that no row sees is NaN."""
    draw = torch.Generator().manual_seed(len(ends))
    B, P = len(ends), 1 + -(-max(ends) // page)
    pages = torch.randperm(B * P, generator=draw).view(B, P)
    cache = torch.randn(B * P * page, LC + DR, generator=draw)
    q = torch.randn(B, H, LC + DR, generator=draw)
    wanted = torch.zeros(B, H, LC)
    used = torch.zeros(len(cache), dtype=torch.bool)
    for b, end in enumerate(ends):
        slots = (pages[b, :, None] * page + torch.arange(page)).flatten()[:end]
        used[slots] = True
        kept = cache[slots]
        wanted[b] = (q[b] @ kept.T * 0.3).softmax(-1) @ kept[:, :LC] if end else 0
    cache[~used] = torch.nan
    rest = {"latent_dim": LC, "page_size": page, "splits": splits, "scale": 0.3, "tiles": tiles}
    return float((attend(q, cache, pages, torch.tensor(ends), **rest) - wanted).abs().max())


results["short"] = error([1, 5, 17]) < 1e-5
results["splits"] = error([300, 7, 129, 64], splits=4) < 1e-5
results["padding"] = error([40, 0, 3, 0], splits=2) < 1e-5
results["odd-heads"] = error([90, 33], H=20, LC=24, DR=6, page=4, splits=2) < 1e-5
results["many-heads"] = error([70], H=40, tiles=Tiles(heads=32)) < 1e-5
results["ahead"] = error([300, 7, 0, 64], splits=4, tiles=Tiles(tokens=32, ahead=True)) < 1e-5
results["joined-in-parts"] = error([90, 33], H=20, LC=24, DR=6, splits=2, tiles=Tiles(parts=2)) < 1e-5
results["deepseek"] = error([100], H=16, LC=512, DR=64, splits=2) < 1e-5


def by_head(N: int, *, H=4, DN=24, DR=8, DV=20, LC=40, stored=0) -> bool:
    """Products by head, and what is stored with them, as written out; no other slot is touched."""
    draw = torch.Generator().manual_seed(N)
    up = torch.randn(H, DN + DV, LC, generator=draw)
    q, latent = torch.randn(N, H, DN + DR, generator=draw), torch.randn(stored, LC + DR, generator=draw)
    slots, cache = torch.randperm(90, generator=draw)[:stored], torch.zeros(90, LC + DR)
    wanted_cache = cache.index_copy(0, slots, latent)
    found = latent_heads.absorbed(q, up[:, :DN], (latent, slots, cache) if stored else None)
    wanted = torch.cat((torch.einsum("nhd,hdl->nhl", q[..., :DN], up[:, :DN]), q[..., DN:]), -1)
    mixed = torch.randn(min(N, latent_heads.MOST_OF_VALUES), H, LC, generator=draw)
    values = latent_heads.values(mixed, up[:, DN:])
    right = torch.allclose(values, torch.einsum("nhl,hvl->nhv", mixed, up[:, DN:]), atol=1e-4)
    return right and torch.allclose(found, wanted, atol=1e-4) and torch.equal(cache, wanted_cache)


results["heads-of-one-row"] = by_head(1, stored=1)
results["heads-of-few-rows"] = by_head(7, H=20, stored=5)
results["heads-of-more-rows"] = by_head(70, H=3, DN=128, DV=128, LC=128, stored=70)
results["heads-store-nothing"] = by_head(17, DN=128, DR=64, DV=128, LC=512)
results["heads-of-no-row"] = by_head(0)
results["no-rows"] = attend(
    torch.empty(0, 4, 40),
    torch.empty(16, 40),
    torch.empty(0, 1).long(),
    torch.empty(0).long(),
    latent_dim=32,
    page_size=16,
    splits=1,
    scale=1.0,
).shape == (0, 4, 32)


def steps() -> bool:
    """Steps of decoding tokens, drafts and chunks, and rows of a graph, give what torch gives."""
    whole, decoded = drawn(90), drawn(90, seed=1)
    decoded.up = whole.up
    reference, kernels = paged(), paged(backend="triton")
    requests = {group: (sequence(0, 0, 23), sequence(1, 30, 23)) for group in (reference, kernels)}

    def chunk(group: LatentAttention, row: int, start: int, end: int) -> Chunk:
        return Chunk(requests[group][row], start, end)

    right = True
    # Both as chunks; then three drafts, and one token, next to a chunk behind a prefix.
    for (begin, end), (first, last) in (((0, 60), (0, 45)), ((60, 63), (45, 60)), ((63, 64), (60, 90))):
        parts = [(decoded, begin, end), (whole, first, last)]
        q = torch.cat([x.q_LHD[a:b] for x, a, b in parts])
        latent = torch.cat([x.latent_LC[a:b] for x, a, b in parts])
        found = []
        for group in (reference, kernels):
            own, other = chunk(group, 1, begin, end), chunk(group, 0, first, last)
            step = group.laid_out([own], [other]) if begin else group.laid_out([], [own, other])
            found.append(step.latent(0, q, latent, whole.up))
        right &= torch.allclose(*found, atol=2e-5)
    # One token more, and two rows of padding.
    slots = kernels.place_singles([chunk(kernels, 1, 64, 65)])
    rows = torch.tensor([1, kernels.spare_row, kernels.spare_row])
    kernels.table[1, 16] = slots[0] // kernels.page_size
    slots_N = torch.tensor([*slots, kernels.spare_slot, kernels.spare_slot])
    graph = kernels.rows(slots_N, kernels.table[rows], torch.tensor([65, 0, 0]))
    q, latent = decoded.q_LHD[[64, 0, 0]], decoded.latent_LC[[64, 0, 0]]
    padded = graph.latent(0, q, latent, whole.up)
    wanted = reference.laid_out([chunk(reference, 1, 64, 65)], []).latent(0, q[:1], latent[:1], whole.up)
    return right and torch.allclose(padded[:1], wanted, atol=2e-5) and not padded[1:].any()


results["steps"] = steps()


def sparse_steps() -> bool:
    """As `steps`, of layers that choose and that share the choice; no slot is read that was not written."""
    whole, decoded = drawn(28), drawn(28, seed=1)
    decoded.up = whole.up
    indices = sparse.drawn_index(28, 0), sparse.drawn_index(28, 1)
    group = sparse.paged(backend="triton")
    requests = sequence(0, 0, 7), sequence(1, 30, 7)
    wanted = [sparse.expected(x, index) for x, index in zip((whole, decoded), indices, strict=True)]

    right = True
    # A chunk that sees all it may choose, and one that does not; then three drafts next to a chunk.
    for (first, last), (begin, end) in (((0, 12), (0, 20)), ((12, 28), (20, 23)), ((28, 28), (23, 24))):
        own, other = Chunk(requests[1], begin, end), Chunk(requests[0], first, last)
        if begin == 0:
            q, latent, up, index = sparse.both(
                whole, decoded, slice(first, last), slice(begin, end), list(indices)
            )
            step = group.laid_out([], [other, own])
            expected = torch.cat((wanted[0][first:last], wanted[1][begin:end]))
        else:
            q, latent, up, index = sparse.both(
                decoded, whole, slice(begin, end), slice(first, last), [indices[1], indices[0]]
            )
            chunks = [other] if last > first else []
            step = group.laid_out([own], chunks)
            expected = torch.cat((wanted[1][begin:end], wanted[0][first:last]))
        chosen, shared = step.latent(0, q, latent, up, index), step.latent(1, q, latent, up)
        right &= torch.allclose(chosen, expected.float(), atol=2e-5) and torch.equal(chosen, shared)
    slots = group.place_singles([Chunk(requests[1], 24, 25)])
    group.table[1, 6] = slots[0] // group.page_size
    rows = torch.tensor([1, group.spare_row])
    slots_N = torch.tensor([*slots, group.spare_slot])
    graph = group.rows(slots_N, group.table[rows], torch.tensor([25, 0]))
    q, latent, up, index = sparse.both(decoded, decoded, slice(24, 25), slice(0, 1), [indices[1], indices[1]])
    found = graph.latent(0, q, latent, up, index)
    right &= torch.equal(found, graph.latent(1, q, latent, up))
    return right and torch.allclose(found[:1], wanted[1][24:25].float(), atol=2e-5) and not found[1:].any()


results["sparse-steps"] = sparse_steps()


def prompts() -> bool:
    """Prompts by the kernel, also behind prefixes and next to a token that decodes and to a short chunk, give
    what torch gives. Lengths around those of tiles; what another request keeps is NaN."""
    sizes = {"nope_dim": 48, "rope_dim": 16, "value_dim": 32, "latent_dim": 64}
    spec = AttentionSpec.latent(num_heads=3, **sizes)
    draw = torch.Generator().manual_seed(0)
    up = UpProjection(torch.randn(3, 80, 64, generator=draw) * 0.1, 48)
    q, latent = torch.randn(3, 100, 3, 64, generator=draw), torch.randn(3, 100, 80, generator=draw)
    found = []
    for backend in ("torch", "triton"):
        group = paged_attention(
            *cache_groups([spec]), num_pages=80, page_size=4, max_running=4, max_context=256,
            device=torch.device("cpu"), dtype=torch.float32, chosen=Chosen(backend=backend, prompts=backend),
        )  # fmt: skip
        group.cache.fill_(torch.nan)
        requests, parts = [sequence(row, 26 * row, 25) for row in range(3)], []
        steps = [
            [(0, 0, 65), (1, 0, 1)],  # two prompts, one of a single token
            [(2, 0, 32), (1, 1, 97)],  # one behind a token
            [(0, 65, 66), (2, 32, 99), (1, 97, 100)],  # one decodes; the last is absorbed
        ]
        for described in steps:
            chunks = [Chunk(requests[row], start, end) for row, start, end in described]
            decoding = chunks[:1] if chunks[0].start == 65 else []
            step = group.laid_out(decoding, chunks[len(decoding) :])
            own = [tuple(x[row, start:end] for row, start, end in described) for x in (q, latent)]
            parts.append(step.latent(0, torch.cat(own[0]), torch.cat(own[1]), up))
        found.append(torch.cat(parts))
    return bool((found[0] - found[1]).abs().max() < 1e-5)


results["prompts"] = prompts()

print(json.dumps(results))
