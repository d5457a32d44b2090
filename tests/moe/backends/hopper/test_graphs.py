"""Backends that claim to be safe in CUDA graphs: a replay with new inputs is what running eagerly gives."""

from __future__ import annotations

import pytest
import torch

from tests.moe.matrix import LOCAL, Case, cases
from turnout.moe.capabilities.declared import RUNNERS


def on_gpu(param) -> bool:
    (case,) = param.values
    parts = RUNNERS.load(case.runner), LOCAL[case.dispatcher]
    return case.device == "cuda" and all(part.capability.graph_safe for part in parts)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [param for param in cases() if on_gpu(param)])
def test_replay_equals_eager(case: Case):
    run = case.pipeline(case.experts())
    for tokens in (1, 17):
        first, second = (tuple(t.cuda() for t in case.batch(tokens, seed=seed)) for seed in (3, 4))
        inputs = tuple(t.clone() for t in first)
        run(*inputs)  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run(*inputs)
        for batch in (second, first):
            for mine, new in zip(inputs, batch, strict=True):
                mine.copy_(new)
            graph.replay()
            assert torch.equal(out, run(*batch))
