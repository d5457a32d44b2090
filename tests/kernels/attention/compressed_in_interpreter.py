"""Run by test_compressed_attention.py with TRITON_INTERPRET=1: kernels of compressed attention; prints JSON.

In float32: the interpreter's products of bfloat16 are wrong.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch

from tests.kernels import interpreter
from tests.models.running import load
from tests.models.test_deepseek_v4 import IDS, Paged, build_published
from tests.models.test_logits import BOUND, error, reference
from turnout.attention.backends.triton.compressed import TritonCompressed
from turnout.attention.indexing import largest, places
from turnout.kernels.attention import index
from turnout.models.interface import Step
from turnout.vocabulary import Phase

interpreter.prepare()
torch.manual_seed(0)
results = {}


def chooses(*, ties: bool) -> bool:
    """Against torch's top-k, of contexts with nothing, with fewer than K, with K, and in several blocks."""
    K, page = 16, 4
    scores, table = torch.randn(5, 160), torch.randperm(5 * 40).view(5, 40)
    if ties:
        scores = scores.round() * torch.where(torch.rand(5, 160) < 0.5, 1.0, -0.0)
    ends = torch.tensor([0, 7, 16, 100, 160])
    found, counts = index.chosen(scores, table, ends, K, page_size=page)
    at = places(largest(scores, torch.arange(160) < ends[:, None], K), K)
    wanted = torch.where(at < 0, -1, table.gather(1, at.clamp(min=0) // page) * page + at % page)
    return torch.equal(found.long(), wanted) and torch.equal(counts.long(), (wanted >= 0).sum(1))


index.RANKED, whole = 64, index.RANKED
results["choose"] = chooses(ties=False)
results["choose-ties"] = chooses(ties=True)
index.RANKED = whole


def steps(page_size: int, starts: list[int], count: int) -> bool:
    """Rows of a graph, in caches full of NaN, give what transformers' model gives; with a row of padding."""
    with tempfile.TemporaryDirectory() as folder:
        built = build_published(Path(folder))
        model, expected = load(built.folder), reference(built.model, IDS)
    paged = Paged(model, page_size, len(starts), TritonCompressed)
    requests = [paged.request(row) for row in range(len(starts))]
    groups, right = paged.caches.groups, True
    for request, start in zip(requests, starts, strict=True):
        paged.logits((request, IDS, 0, start))
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


results["steps"] = steps(16, [2, 126, 254], 3)
results["steps-page-of-windows"] = steps(128, [127], 2)
results["steps-page-in-windows"] = steps(4, [126], 2)

print(json.dumps(results))
