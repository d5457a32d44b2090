"""Run by test_compressed_attention.py with TRITON_INTERPRET=1: kernels of compressed attention; prints JSON.

By themselves, or with the argument "steps" as transformers' model uses them.

In float32: the interpreter's products of bfloat16 are wrong.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.kernels import interpreter
from tests.models.running import load
from tests.models.test_deepseek_v4 import IDS, Paged, build_published
from tests.models.test_logits import BOUND, error, reference
from turnout.attention.backends.triton import compressed
from turnout.attention.backends.triton.compressed import TritonCompressed
from turnout.attention.compressed import CompressedAttention
from turnout.attention.entries import Compressible, Compressor
from turnout.attention.indexing import largest, places
from turnout.attention.kinds import CompressedSpec, cache_groups
from turnout.kernels.attention import index
from turnout.models import compressed_attention
from turnout.models.blocks import Norm
from turnout.models.interface import Step
from turnout.models.streams import StreamWeights
from turnout.moe import routing
from turnout.vocabulary import Phase

interpreter.prepare()
torch.manual_seed(0)
results = {}


def chooses(*, ties: bool = False, near: bool = False) -> bool:
    """Against torch's top-k, of contexts with nothing, with fewer than K, with K, and in several blocks.
    near: scores that differ by their last bits, and infinite ones."""
    K, page = 16, 4
    scores, table = torch.randn(5, 160), torch.randperm(5 * 40).view(5, 40)
    if ties:
        scores = scores.round() * torch.where(torch.rand(5, 160) < 0.5, 1.0, -0.0)
    if near:
        scores = -1 - torch.randint(600, (5, 160)) * 2.0**-23
        scores[:, 3], scores[:, 40:90] = torch.inf, -torch.inf
    ends = torch.tensor([0, 7, 16, 100, 160])
    found, counts = index.chosen(scores, table, ends, K, page_size=page)
    at = places(largest(scores, torch.arange(160) < ends[:, None], K), K)
    wanted = torch.where(at < 0, -1, table.gather(1, at.clamp(min=0) // page) * page + at % page)
    return torch.equal(found.long(), wanted) and torch.equal(counts.long(), (wanted >= 0).sum(1))


class PromptsByTorch(TritonCompressed):
    """The interpreter would take minutes for them."""

    attend_part = CompressedAttention.attend_part


def between_products() -> None:
    """From now on models use the kernels of what is between products."""
    StreamWeights._by_kernels = True
    compressed_attention._by_kernel = lambda x: True


def steps(page_size: int, starts: list[int], count: int, *, whole: bool = False) -> bool:
    """Rows of a graph, in caches full of NaN, give what transformers' model gives; with a row of padding.
    whole: by kernels outside attention, too."""
    with tempfile.TemporaryDirectory() as folder:
        built = build_published(Path(folder))
        model, expected = load(built.folder), reference(built.model, IDS)
    paged = Paged(model, page_size, len(starts), PromptsByTorch)
    requests = [paged.request(row) for row in range(len(starts))]
    groups, right = paged.caches.groups, True
    for request, start in zip(requests, starts, strict=True):
        paged.logits((request, IDS, 0, start))
    if whole:
        between_products()
    spare = groups[0].spare_row
    rows = torch.tensor([*range(len(starts)), spare])
    for k in range(count):
        at = [start + k for start in starts]
        chunks = [
            SimpleNamespace(request=r, start=s, end=s + 1, length=1)
            for r, s in zip(requests, at, strict=True)
        ]
        positions, ends = torch.tensor([*at, 0]), torch.tensor([*(s + 1 for s in at), 0])
        attentions = []
        for group in groups:
            slots = torch.tensor([*group.place_singles(chunks), group.spare_slot])
            group.table[rows, positions // page_size] = slots // page_size
            attentions.append(group.rows(slots, group.table[rows], ends, rows))
        step = Step(
            input_ids=torch.tensor([*(IDS[s] for s in at), 0]),
            positions=positions,
            attention=paged.caches.together(attentions),
            phase=Phase.DECODE,
            real=ends > 0,
        )
        with torch.inference_mode():
            logits = model.logits(model.forward(step))
        right &= error(logits[:-1], expected[at]) <= BOUND and bool(logits.isfinite().all())
    return right


def chunks(rate: dict[str, Any]) -> bool:
    """A prompt in three chunks, one of a single token, next to another, by kernels and by torch; what is
    never written is NaN."""
    spec = CompressedSpec(
        num_heads=3, num_kv_heads=1, head_dim=32, value_dim=32, scale=0.2, recent=8, output_groups=1, **rate
    )
    (group,), sizes = cache_groups([spec]), {"num_pages": 32, "page_size": 4, "max_running": 2}
    found = []
    for make in (CompressedAttention, TritonCompressed):
        torch.manual_seed(0)
        paged = make(group, **sizes, max_context=64, device=torch.device("cpu"), dtype=torch.float32)
        for kept in (paged._cache, paged._recent, paged._open):
            kept.fill_(torch.nan)
        held = [SimpleNamespace(pages=list(range(row, 32, 2)), placed=0) for row in range(2)]
        requests = [SimpleNamespace(row=row, kv=[held[row]], state_slots=[row]) for row in range(2)]
        makers = [
            Compressor(
                spec=spec,
                bias_RX=torch.randn(spec.rate, spec.series * dim),
                norm=Norm(torch.randn(dim), 1e-6),
                turn=lambda x, at: x * (1 + at[:, None] / 50),
            )
            for dim in (32, spec.index_dim)
            if dim and spec.rate
        ]
        for first, second in (((0, 23), (0, 3)), ((23, 41), (3, 4)), ((41, 42), (4, 21))):
            parts = [
                SimpleNamespace(request=r, start=s, end=e, length=e - s)
                for r, (s, e) in zip(requests, (first, second), strict=True)
            ]
            N = sum(part.length for part in parts)
            rest = None
            if makers:
                rest = Compressible(
                    raw_NX=torch.randn(N, spec.open_dim),
                    entries=makers[0],
                    index_entries=makers[1] if spec.index_dim else None,
                    index_queries=torch.randn(N, 2, 16) if spec.index_dim else None,
                    index_weights=torch.randn(N, 2) if spec.index_dim else None,
                )
            q, kv, sinks = torch.randn(N, 3, 32), torch.randn(N, 32), torch.randn(3)
            found.append(paged.laid_out([], parts).compressed(0, q, kv, sinks, rest))
    return all(torch.allclose(*pair, atol=2e-5) for pair in zip(found[:3], found[3:], strict=True))


if sys.argv[1:] == ["steps"]:
    results["steps"] = steps(16, [2, 126, 254], 3)
    results["steps-page-of-windows"] = steps(128, [127], 2)
    results["steps-page-in-windows"] = steps(4, [126], 2)
    choose_experts = routing._one_kernel
    routing._one_kernel = lambda device, *rest: choose_experts(torch.device("cuda"), *rest)
    results["steps-whole"] = steps(16, [2, 126], 2, whole=True)
else:
    index.RANKED, whole = 64, index.RANKED
    results["choose"] = chooses()
    results["choose-near"] = chooses(near=True)
    results["choose-ties"] = chooses(ties=True)
    index.RANKED = whole
    compressed.ROWS = 10
    INDEX = {"rate": 4, "overlap": True, "index_heads": 2, "index_dim": 16, "index_topk": 5}
    results["chunks-window"] = chunks({})
    results["chunks-chosen"] = chunks(INDEX)
    results["chunks-whole"] = chunks({"rate": 8})

print(json.dumps(results))
