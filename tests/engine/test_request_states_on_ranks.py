"""Models that keep more of a request than keys and values, over ranks: same tokens as transformers' loop."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.engine.cluster import Cluster
from tests.engine.step.test_draft_layer import published as with_draft_layer
from tests.engine.test_cache_groups import asked
from tests.engine.test_request_states import VOCABULARY, greedy
from tests.models.families import FAMILIES, build
from tests.models.running import load
from tests.ranks import Pools
from turnout.attention.kinds import keeps_states

PROMPTS = 10
MTP = {"speculative_algorithm": "MTP", "speculative_num_steps": 2}
NGRAM = {"speculative_algorithm": "ngram", "speculative_num_draft_tokens": 4}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {}),
    "dp2 ep2": (2, {"dp_size": 2, "ep_size": 2}),
    "dp4 ep4": (4, {"dp_size": 4, "ep_size": 4}),
    "dp2 tp2 ep4": (4, {"dp_size": 2, "ep_size": 4}),
}


@pytest.mark.more
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("deepseek_v4", "dp2 ep2"),
        ("deepseek_v4", "dp4 ep4"),
        ("deepseek_v32", "tp2"),
        ("qwen3_next", "dp2 ep2"),
        ("qwen3_next", "dp2 tp2 ep4"),
    ],
)
def test_ranks_never_change_an_answer(name: str, layout: str, ranks: Pools, tmp_path: Path) -> None:
    """With requests of their own or shared ones: drafts, known prefixes, few pages, aborts."""
    folder, draw, (size, sizes) = tmp_path / "model", random.Random(3), LAYOUTS[layout]
    if name == "qwen3_next":
        (built, _), flags = with_draft_layer(folder, name), MTP
    else:
        flags = NGRAM
        built = build(folder, FAMILIES[name], vocab_size=VOCABULARY, eos_token_id=VOCABULARY - 1)
    eos = built.model.config.eos_token_id
    prompts = [[token % eos for token in prompt] for prompt in asked(draw, PROMPTS)]
    answers = greedy(built.model, prompts, 14)
    interval = 8 if keeps_states(load(folder).shape.attention) else 0
    flags = flags | sizes | {"state_snapshot_interval": interval, "max_total_tokens": 64}
    aborted = set()
    with Cluster(ranks(size), tmp_path, folder, **flags) as cluster:
        for again in "ab":  # the second time behind prefixes of the first
            names = [f"{i}{again}" for i in range(PROMPTS)]
            for i, id in enumerate(names):
                cluster.add(id, prompts[i], dp_rank=draw.randrange(cluster.config.dp_size), max_tokens=14)
                if draw.random() < 0.15:
                    cluster.abort(gone := draw.choice(names[: i + 1]))
                    aborted.add(gone)
            cluster.wait(names, 120)
    for id, output in cluster.outputs.items():
        answer = answers[int(id[:-1])]
        ended = id not in aborted or output.finish_reason != "abort"
        expected = answer if ended else answer[: len(output.token_ids)]
        assert output.token_ids == expected, f"{id}: {output.finish_reason}, {output.token_ids}, not {answer}"
    stats = cluster.stats.values()
    for count in ("cached_prompt_tokens", "spec_accepted_tokens"):
        assert sum(getattr(rank, count) for rank in stats) > 0, count
    assert sum(rank.spec_accepted_tokens - rank.spec_draft_tokens for rank in stats) < 0
