"""A server whose ranks and keepers are killed: streams go on, and weights are read only when they must be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.server.processes import Background, eventually, has_ended, is_ready
from tests.serving import tiny_config
from tests.tiny import write_model
from turnout.server.launch import ServerProcess

GPU = pytest.mark.gpu
SEQUENCES = 20
TOKENS = {"cpu": 60, "cuda": 300}  # of each: long enough to be there when ranks are killed


def streamed(root: str) -> Background:
    tokens = TOKENS[info(root)["engine"]["hardware"]["device"]]
    return Background(root, tokens, SEQUENCES, temperature=0)


def tokens(stream: Background) -> list[list[str]]:
    """Of each sequence, in order."""
    *events, done = stream.result()
    assert done == "[DONE]"
    found: list[list[str]] = [[] for _ in range(SEQUENCES)]
    for event in events:
        for choice in json.loads(event)["choices"]:
            found[choice["index"]] += choice["logprobs"]["tokens"]
    return found


def info(root: str) -> dict[str, Any]:
    return httpx.get(f"{root}/server_info", timeout=60).json()


def keepers(server: ServerProcess) -> list[psutil.Process]:
    children = psutil.Process(server.process.pid).children(recursive=True)
    return [child for child in children if not has_ended(child) and child.name() == "turnout keeper"]


def kill_while_streaming(root: str, *victims: psutil.Process) -> list[list[str]]:
    """What a stream brings meanwhile."""
    before = info(root)["restarts"]
    stream = streamed(root)
    for victim in victims:
        victim.kill()
    found = tokens(stream)
    # Where the machine is busy the stream may have ended before its rank was killed.
    assert eventually(lambda: info(root)["restarts"] > before)
    assert eventually(lambda: is_ready(root))
    # A spare that has not died yet when the rank has may be taken on, and its death is another one.
    assert info(root)["restarts"] <= before + len(victims)
    return found


def captured(root: str) -> set[int]:
    """Sizes of decode graphs that the ranks began with."""
    sizes = info(root)["engine"]["decode_graphs"]
    return set() if isinstance(sizes, str) else set(sizes)


@pytest.mark.parametrize(
    "fields",
    [
        {"device": "cpu"},
        pytest.param({"device": "cuda", "dtype": "float32"}, marks=GPU),
        pytest.param(
            {"device": "cuda", "dtype": "bfloat16", "moe_runner_backend": "hopper", "deterministic": True},
            marks=GPU,
        ),
    ],
    ids=lambda fields: "-".join(list(fields.values())[:2]),
)
def test_ranks_and_keepers_are_killed(fields: dict[str, Any], tmp_path: Path):
    write_model(tmp_path, hidden_size=256, moe_intermediate_size=128, num_hidden_layers=2, head_dim=64)
    config = tiny_config(
        tmp_path, **fields, enable_weight_keeper=True, mem_fraction_static=0.2, max_running_requests=40
    )
    server = ServerProcess(config)
    try:
        root = server.wait_ready().removesuffix("/v1")
        expected = tokens(streamed(root))
        assert [len(sequence) for sequence in expected] == [TOKENS[fields["device"]]] * SEQUENCES
        sizes = captured(root)
        first = info(root)["engine"]["prepared_weights"]
        assert first["found"] == 0
        assert first["made"] >= 5
        lent = {"found": first["made"], "made": 0}
        (keeper,) = keepers(server)

        assert kill_while_streaming(root, rank(root)) == expected
        assert info(root)["engine"]["prepared_weights"] == lent
        assert keepers(server) == [keeper]
        assert captured(root) == (sizes and sizes | {24})  # what 20 sequences need

        keeper.kill()
        assert eventually(lambda: "the keeper of the weights on GPU 0 was killed" in server.last_lines())
        assert tokens(streamed(root)) == expected  # on memory of a process that is gone
        assert info(root)["engine"]["prepared_weights"] == lent

        assert kill_while_streaming(root, rank(root)) == expected
        assert info(root)["engine"]["prepared_weights"] == first
        (other,) = keepers(server)

        assert kill_while_streaming(root, rank(root), other) == expected  # both at once
        if not keepers(server):  # the next rank was there before the keeper was gone, and reads for itself
            assert kill_while_streaming(root, rank(root)) == expected
        assert kill_while_streaming(root, rank(root)) == expected
        assert info(root)["engine"]["prepared_weights"] == lent
        (last,) = keepers(server)
    finally:
        assert server.stop() == 0
    assert eventually(lambda: has_ended(last))


@pytest.mark.more
def test_spares_take_the_places_of_killed_ranks(tiny_folder: Path):
    """Where the spare was killed, too, a rank starts without it."""
    config = tiny_config(tiny_folder, device="auto", enable_weight_keeper=True, mem_fraction_static=0.2)
    server = ServerProcess(config)

    def spares() -> list[psutil.Process]:
        children = psutil.Process(server.process.pid).children(recursive=True)
        return [child for child in children if not has_ended(child) and child.name() == "turnout spare"]

    try:
        root = server.wait_ready().removesuffix("/v1")
        expected = tokens(streamed(root))
        for _ in range(2):
            assert eventually(lambda: len(spares()) == 1)
            (spare,) = spares()
            assert kill_while_streaming(root, rank(root)) == expected
            assert rank(root) == spare
            assert info(root)["engine"]["startup_seconds"]["imports"] < 5  # since it got its orders
        assert eventually(lambda: len(spares()) == 1)
        (spare,) = spares()
        assert kill_while_streaming(root, spare, rank(root)) == expected
        assert rank(root) != spare
        assert eventually(lambda: len(spares()) == 1)
        (spare,) = spares()
    finally:
        assert server.stop() == 0
    assert eventually(lambda: has_ended(spare))


def rank(root: str) -> psutil.Process:
    return psutil.Process(info(root)["ranks"][0]["pid"])
