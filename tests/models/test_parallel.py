"""A model over ranks gives the logits of transformers' model, however heads, experts and tokens are split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.checkpoint.writers import write_checkpoint
from tests.engine.cluster import Cluster
from tests.models.configs import BASES
from tests.models.on_ranks import run
from tests.models.test_logits import BOUND, error, prompt, reference
from tests.ranks import Pools
from tests.tiny import write_model

# Vocabulary, shared expert and dense MLPs that no number of ranks divides; every kind of layer and bias.
UNEVEN = {"vocab_size": 387, "num_hidden_layers": 3, "mlp_only_layers": [1], "intermediate_size": 130}
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {"base": BASES["qwen2"], "shared_expert_intermediate_size": 67} | UNEVEN,
    "qwen3": {"base": BASES["qwen3"], "attention_bias": True, "tie_word_embeddings": True} | UNEVEN,
}
TOPOLOGIES = {
    "tp2": (2, {}),
    "tp2 ep2": (2, {"ep_size": 2}),
    "tp4": (4, {}),  # more ranks than KV heads
    "tp4 ep2": (4, {"ep_size": 2}),
    "dp2 tp2 ep4": (4, {"dp_size": 2, "ep_size": 4}),
    "dp4 ep4": (4, {"dp_size": 4, "ep_size": 4}),
}
GPUS = max(2, torch.cuda.device_count())
NCCL_TIMEOUT = 240  # seconds: kernels are loaded and NCCL connects
LENGTHS = {"a": 40, "b": 9, "c": 1}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(its folder, transformers' logits of every sequence)"""
    folder = tmp_path_factory.mktemp(request.param)
    write_model(folder, dtype=torch.bfloat16, **MODELS[request.param])
    return folder, expected_logits(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))


def expected_logits(theirs: Any) -> dict[str, Tensor]:
    return {name: reference(theirs, ids_of(name)) for name in LENGTHS}


def ids_of(name: str) -> list[int]:
    return prompt(LENGTHS[name], seed=ord(name))


def schedule(dp_size: int) -> list[tuple[str, list[list[tuple[str, list[int]]]]]]:
    """Steps in which data-parallel ranks bring unequal numbers of tokens, or none.

    Sequence a is the first rank's and comes in three parts, b and c are the last one's.
    """
    a, b, c = (ids_of(name) for name in LENGTHS)
    steps = [
        ("prefill", [("a", a[:25])], [("b", b[:7]), ("c", c)]),
        ("prefill", [("a", a[25:39])], []),
        ("decode", [], [("b", b[7:8])]),
        ("decode", [("a", a[39:])], [("b", b[8:])]),
    ]
    if dp_size == 1:
        return [(phase, [first + last]) for phase, first, last in steps]
    return [(phase, [first, *[[]] * (dp_size - 2), last]) for phase, first, last in steps]


def by_sequence(results: list[list[Tensor]], steps: list, dp_rank: int) -> dict[str, Tensor]:
    parts: dict[str, list[Tensor]] = {}
    for logits, (_, chunks) in zip(results, steps, strict=True):
        for (name, _), rows in zip(chunks[dp_rank], logits, strict=True):
            parts.setdefault(name, []).append(rows)
    return {name: torch.cat(rows) for name, rows in parts.items()}


def check(
    ranks: Pools,
    folder: Path,
    expected: dict[str, Tensor],
    size: int,
    sizes: dict[str, int],
    device: str = "cpu",
    timeout: float = 60,
    **options: str,
) -> None:
    dp_size = sizes.get("dp_size", 1)
    steps, attention_tp = schedule(dp_size), size // dp_size
    results = ranks(size).run(run, folder, sizes, options, steps, device, timeout=timeout)
    for dp_rank in range(dp_size):
        group = [by_sequence(r, steps, dp_rank) for r in results[dp_rank * attention_tp :][:attention_tp]]
        for name, logits in group[0].items():
            assert error(logits, expected[name]) <= BOUND, f"sequence {name} of DP rank {dp_rank}"
            assert all(torch.equal(logits, other[name]) for other in group), "ranks of a group differ"


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_logits_equal_transformers(name: str, model: Any, ranks: Pools) -> None:
    folder, expected = model
    size, sizes = TOPOLOGIES[name]
    check(ranks, folder, expected, size, sizes)


@pytest.mark.parametrize("dispatcher", ["collective", "collective-experts"])
@pytest.mark.parametrize("name", ["tp4 ep2", "dp2 tp2 ep4", "dp4 ep4"])
def test_tokens_that_are_sent(name: str, dispatcher: str, model: Any, ranks: Pools) -> None:
    """Each rank sees some of the tokens, and a shared expert only its own."""
    folder, expected = model
    size, sizes = TOPOLOGIES[name]
    check(ranks, folder, expected, size, sizes, moe_a2a_backend=dispatcher)


@pytest.mark.parametrize("name", ["tp4", "tp4 ep2", "dp2 tp2 ep4"])
def test_greedy_answers_are_those_of_transformers(
    name: str, model: Any, ranks: Pools, tmp_path: Path
) -> None:
    """Through the engine: paged KV cache of this rank's heads, chunked prefill, settled close calls."""
    folder, _ = model
    size, sizes = TOPOLOGIES[name]
    with Cluster(ranks(size), tmp_path, folder, **sizes) as cluster:
        for sequence in LENGTHS:
            cluster.add(sequence, ids_of(sequence), max_tokens=12, ignore_eos=True)
        cluster.wait(LENGTHS)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for sequence, length in LENGTHS.items():
        answer = cluster.outputs[sequence].token_ids
        assert len(answer) == 12
        logits = reference(theirs, ids_of(sequence) + answer)[length - 1 : -1]
        chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        assert error(chosen, logits.amax(1)) <= BOUND, "a token that is not the likeliest one"


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """NVFP4 with attention, shared expert and dense MLP quantised too; expectations from decoded weights."""
    folder = tmp_path_factory.mktemp("nvfp4")
    written = write_checkpoint(
        folder,
        "modelopt",
        BASES["qwen2"],
        dense=True,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        mlp_only_layers=[1],
    )
    return folder, expected_logits(written.model)


@pytest.mark.parametrize("storage", ["packed", "decoded"])
@pytest.mark.parametrize("name", ["tp4", "tp4 ep2", "dp2 tp2 ep4"])
def test_quantised_weights(name: str, storage: str, quantized: Any, ranks: Pools) -> None:
    folder, expected = quantized
    size, sizes = TOPOLOGIES[name]
    check(ranks, folder, expected, size, sizes, moe_weight_storage=storage, moe_activation_dtype="bf16")


@pytest.mark.multigpu
@pytest.mark.timeout(NCCL_TIMEOUT + 30)
@pytest.mark.parametrize(
    ("size", "sizes"),
    [
        (size, sizes)
        for size, sizes in [*TOPOLOGIES.values(), (2, {"dp_size": 2, "ep_size": 2})]
        if size <= GPUS
    ],
    ids=str,
)
def test_logits_over_gpus(size: int, sizes: dict[str, int], model: Any, ranks: Pools) -> None:
    folder, expected = model
    check(ranks, folder, expected, size, sizes, device="cuda", timeout=NCCL_TIMEOUT)
