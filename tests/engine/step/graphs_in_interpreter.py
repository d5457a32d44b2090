"""Run by test_cuda_graphs.py with TRITON_INTERPRET=1 and names of RUNS: steps as CUDA has them; prints JSON.

What a graph would replay runs again instead, with the same tensors at the same addresses; attention, of
decode steps and of others, runs in the interpreter.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from tests.engine.step.rerun import with_prefill_graphs
from tests.engine.test_cache_groups import SINKS
from tests.engine.toy import SHAPE, ToyModel, make_core, merge, request
from tests.kernels import interpreter
from turnout.attention.backends.triton.paged import TritonAttention
from turnout.attention.backends.triton.states import TritonStates
from turnout.attention.kinds import DeltaNetSpec
from turnout.engine.step import cuda_graphs, two_batch_overlap
from turnout.engine.step.cuda_graphs import Captured, DecodeGraphs
from turnout.engine.step.rehearsal import Zeros
from turnout.kernels.attention import decode
from turnout.models.interface import ModelShape
from turnout.registry import ATTENTION_BACKENDS

interpreter.prepare()
ATTENTION_BACKENDS._loaded["triton"] = replace(
    ATTENTION_BACKENDS.get("triton"), devices=frozenset({"cpu"}), dtypes=frozenset({"float32"})
)
two_batch_overlap.LEAST = 3  # so that some graphs are one batch and others two


@dataclass
class Again:
    """In the place of a CUDA graph."""

    forward: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    captured: Captured | None = None
    times: int = 0

    def replay(self) -> None:
        assert self.captured is not None
        self.times += 1
        hidden_BH, best_2B = self.forward(self.captured.rows_FB)
        self.captured.hidden_BH.copy_(hidden_BH)
        self.captured.best_2B.copy_(best_2B)


class Replayed(DecodeGraphs):
    def _capture(self, size: int, context: int) -> Captured:
        graph = Again(partial(self._forward, context=context))
        rows_FB = self._rows(size)
        H = self._model.shape.hidden_size
        left = torch.zeros(size, H), torch.zeros(2, size).long()
        graph.captured = Captured(graph, context, rows_FB, *left)
        return graph.captured


class InTurns(ToyModel):
    """Both micro-batches of a step, one after the other; turns: how many steps had two."""

    turns = 0

    def forward(self, step):
        own = super().forward(step)
        self.turns += step.other is not None
        return own if step.other is None else torch.cat((own, super().forward(step.other)))


DELTA = DeltaNetSpec(num_heads=4, num_kv_heads=2, head_dim=16, value_dim=16, scale=0.25, conv_width=4)
STATES = replace(SHAPE, attention=(DELTA, SHAPE.attention[0], DELTA))
WINDOWS = replace(SHAPE, attention=(SINKS.sliding(5), SINKS))  # two cache groups
# So few tokens that drafts hold now and then; the last layer may be a draft layer.
GUESSED = replace(SHAPE, attention=(SINKS.sliding(5), SINKS, SINKS), vocab_size=4, eos_token_ids=())


@contextmanager
def on_zeros() -> Iterator[bool]:
    with Zeros():
        yield True


def answers(
    seed: int,
    *,
    graphs: bool,
    overlap: str = "off",
    shape: ModelShape = SHAPE,
    prefill: bool = False,
    short: bool = False,
    **drafts: Any,
) -> dict[str, bool]:
    """Requests come and go over few pages; each gets what the model says, whatever shared its steps. short:
    some contexts are long enough to be cut into spans."""
    draw, model = random.Random(seed), InTurns(shape=shape, drafts="speculative_num_steps" in drafts)
    core = make_core(
        model, num_pages=8, max_running_requests=4, max_context=24, overlap_schedule=overlap, **drafts
    )
    assert all(isinstance(group, TritonAttention) for group in core._attention.groups)
    if short:
        for group in core._attention.groups:
            group.processors = 132
    for states in core._attention.states:
        assert isinstance(states, TritonStates)
        states.states.fill_(float("nan"))
    if graphs:
        drawn = 4 if overlap == "on" else 0
        replayed = Replayed(
            model,
            core._attention,
            sizes=[1, 12 if drafts else 4],
            later=[2, 3],
            num_drawn=drawn,
            dp_size=1,
            two_batches=not drafts,
            pool=None,
            progress=None,
            rehearse=on_zeros,
        )
        core._forward.graphs, core._forward._drawn_R = replayed, replayed.drawn_R
    if prefill:
        with_prefill_graphs(core, [2, 4, 16], stored=True)
    core._commit.resolves_near_ties, core._commit._sampler._report_near_ties = False, False
    words = shape.vocab_size - 1
    asked = {str(i): [draw.randrange(words) for _ in range(draw.choice([1, 3, 6]))] for i in range(5)}
    found, pending = {}, list(asked)
    while pending or core.has_work():
        if pending and draw.random() < 0.7:
            id = pending.pop()
            core.add(request(id, asked[id], max_tokens=8, ignore_eos=True))
        if graphs and len(found) == 2:
            replayed.capture_one_more()
        for output in core.step():
            merge(found, output)
    for _ in range(2):  # with nothing to do twice in a row, which is when an engine captures the rest
        core.step()
    assert not graphs or replayed.sizes == [1, 2, 3, 12 if drafts else 4]
    wanted = {id: model.greedy(asked[id], 8, eos=False) for id in asked}
    stats = core.stats()
    return {
        "tokens": {id: output.token_ids for id, output in found.items()} == wanted,
        "turns": (model.turns > 0) == (graphs and not drafts),
        "drafts": (0 < stats.spec_accepted_tokens < stats.spec_draft_tokens) == bool(drafts),
        "replays": (stats.graph_steps > 0) == (graphs or prefill),
        "short": not graphs
        or {key[1] for key, each in replayed._graphs.items() if each.graph.times} == {False, short},
    }


RUNS: dict[str, dict[str, Any]] = {
    "graphs": {"seed": 1, "graphs": True},
    "short contexts": {"seed": 1, "graphs": True, "short": True},
    "eager": {"seed": 2, "graphs": False, "shape": WINDOWS},
    "windows": {"seed": 4, "graphs": True, "shape": WINDOWS},
    "states": {"seed": 6, "graphs": True, "shape": STATES},
    "overlap": {"seed": 3, "graphs": True, "overlap": "on"},
    "ngrams": {
        "seed": 7,
        "graphs": True,
        "shape": GUESSED,
        "speculative_algorithm": "ngram",
        "speculative_num_draft_tokens": 3,
    },
    "draft layer": {
        "seed": 8,
        "graphs": True,
        "shape": GUESSED,
        "speculative_algorithm": "MTP",
        "speculative_num_steps": 2,
    },
    "prefill": {"seed": 5, "graphs": True, "overlap": "on", "shape": WINDOWS, "prefill": True},
    "prefill of states": {"seed": 7, "graphs": False, "shape": STATES, "prefill": True},
}
# Of two tokens at a time, so that contexts of more than 8 have spans.
with patch.object(decode, "BLOCK", 2), patch.object(cuda_graphs, "short_context", lambda spans: 8):
    print(json.dumps({kind: answers(**RUNS[kind]) for kind in sys.argv[1:]}))
