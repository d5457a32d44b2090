"""Weights that a keeper holds: what ranks find there, and how each of them, or it, may end."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.models.families import FAMILIES, build
from tests.models.keepers import WORDS, Keeper, Rank, some
from tests.models.running import PlainAttention, count_reads, load
from turnout.models import weight_keeper
from turnout.models.weight_keeper import WeightKeeper
from turnout.moe import arena

FEW = ("deepseek_v3", "glm4_moe", "gpt_oss", "qwen3_next")  # between them, every kind of part
IDS = [5, 77, 9, 300, 12]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture
def keeper() -> Iterator[Keeper]:
    made = Keeper()
    yield made
    made.door.close()
    assert made.ends() in (0, -signal.SIGKILL)


def never() -> torch.Tensor:
    raise AssertionError("it was to be found")


@pytest.mark.parametrize(
    ("family", "device", "runner"),
    [
        *(
            pytest.param(name, "cpu", "auto", marks=[] if name in FEW else pytest.mark.more)
            for name in FAMILIES
        ),
        ("glm4_moe", "cpu", "torch"),
        *(pytest.param(name, "cuda", "auto", marks=pytest.mark.gpu) for name in ("glm4_moe", "gpt_oss")),
    ],
)
def test_a_model_on_lent_memory_computes_what_the_one_that_was_read_does(
    family: str, device: str, runner: str, keeper: Keeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = build(tmp_path, FAMILIES[family]).folder
    flags = {"device": device, "moe_runner_backend": runner}
    read = load(folder, **flags)
    prepared = load(folder, **flags, shared=(first := keeper.view(device)))
    assert first.found == 0
    reads = count_reads(monkeypatch)
    lent = load(folder, **flags, shared=(second := keeper.view(device)))
    assert (second.found, second.made) == (first.made, 0)
    assert len(reads) <= 3 * read.shape.num_layers + 1  # routers, their biases, the last norm
    (expected,) = PlainAttention(read, device).logits(("a", IDS))
    for model in (prepared, lent):
        (found,) = PlainAttention(model, device).logits(("a", IDS))
        bound = 1e-4 if device == "cuda" else 0  # the runner of float32 adds up in any order there
        torch.testing.assert_close(found, expected, rtol=bound, atol=bound)


@pytest.mark.parametrize("device", DEVICES)
def test_large_tensors_are_the_keepers_memory_and_small_ones_are_not(device: str, keeper: Keeper):
    def make() -> dict[str, torch.Tensor | None]:
        large = torch.zeros(4, WORDS, device=device)
        small = torch.zeros(3, device=device)
        host = torch.ones(WORDS)
        return {
            "large": large,
            "row": large[1],
            "small": small,
            "first": small[:1],
            "host": host,
            "none": None,
        }

    one, other = (keeper.view(device).keep("x", make) for _ in range(2))
    one["large"][1] += 1
    assert other["row"].tolist() == [1] * WORDS
    one["small"] += 2
    assert one["first"].item() == 2
    assert other["small"].tolist() == [0] * 3
    assert other["large"].device.type == device
    assert other["host"].device.type == "cpu"
    assert other["host"].sum() == WORDS
    assert other["none"] is None


@pytest.mark.parametrize("device", DEVICES)
def test_what_has_changed_is_prepared_again_in_the_same_memory(device: str, keeper: Keeper, caplog):
    first = keeper.view(device)
    mine = first.keep("x", some(device))
    mine[7] = -1
    again = keeper.view(device)
    assert torch.equal(again.keep("x", some(device)), some(device)())
    assert (again.found, again.made) == (0, 1)
    assert "x: prepared again" in caplog.text
    assert torch.equal(mine, some(device)())  # the memory that it had
    assert torch.equal(keeper.view(device).keep("x", never), some(device)())


def test_scratch_memory_is_not_kept(keeper: Keeper):
    sets = {"tokens": {"a": 64, "b": WORDS * 4}}

    def make() -> tuple[arena.Arena, torch.Tensor, torch.Tensor]:
        scratch = arena.shared(torch.device("cpu"), sets)
        return scratch, scratch.take("tokens", "b", 2, WORDS // 2, dtype=torch.float32), torch.zeros(2)

    mine, theirs = (keeper.view("cpu").keep("x", make) for _ in range(2))
    assert mine[0] is theirs[0] is arena.shared(torch.device("cpu"), sets)
    assert mine[1].shape == (2, WORDS // 2)
    mine[1].fill_(5)
    assert theirs[1].tolist() == mine[0].take("tokens", "b", 2, WORDS // 2, dtype=torch.float32).tolist()
    keeper.view("cpu").keep("x", never)  # it has not changed


def test_a_keeper_of_other_weights_ends(keeper: Keeper, caplog):
    keeper.view("cpu").keep("x", some("cpu"))
    other = keeper.view("cpu", "b")
    assert keeper.ends() == 0
    assert "it holds other weights" in caplog.text
    assert torch.equal(other.keep("x", some("cpu", 3.0)), some("cpu", 3.0)())
    assert (other.found, other.made) == (0, 1)


def test_a_rank_goes_on_without_a_keeper_that_has_no_memory(keeper: Keeper, caplog, monkeypatch):
    mine = keeper.view("cpu")
    kept = mine.keep("x", some("cpu"))
    monkeypatch.setattr(weight_keeper, "size_of", lambda storages: 1 << 60)
    assert torch.equal(mine.keep("y", some("cpu", 1.0)), some("cpu", 1.0)())
    assert "not kept for the next one" in caplog.text
    assert keeper.ends() == 0
    assert torch.equal(kept, some("cpu")())


def test_memory_of_a_rank_that_died_before_it_filled_it_is_lent_again():
    keeper = WeightKeeper()
    assert keeper.open("a", "cpu")
    first = keeper.lend(4096)
    keeper.free.append(first)
    assert keeper.lend(8192) is not first
    assert keeper.lend(4096) is first
    assert keeper.lend(4096) is not first


@pytest.mark.parametrize("device", DEVICES)
def test_ranks_and_the_keeper_may_be_killed(device: str, keeper: Keeper):
    first = Rank(keeper, device, 20)
    assert first.holds(20, found=0)
    first.kill()
    second = Rank(keeper, device, 25)
    assert second.holds(25, found=20)
    keeper.kill()
    used = [
        torch.full((WORDS,), -1.0, device=device) for _ in range(200)
    ]  # no other allocation gets what it had
    assert second.holds(25, found=20)
    second.told.send(25)  # without a keeper
    assert second.holds(26, found=20)
    second.kill()
    del used


@pytest.mark.gpu
def test_weights_are_in_the_gpus_memory_once(keeper: Keeper):
    def used() -> int:
        torch.cuda.empty_cache()  # a sum of bytes takes 2 GB for them in int64
        free, total = torch.cuda.mem_get_info()
        return total - free

    mine, size = keeper.view("cuda"), 1 << 28
    mine.keep("first", some("cuda"))  # the keeper opens the device, and takes a first segment
    before = used()
    kept = [mine.keep(f"{i}", lambda: torch.ones(size, dtype=torch.uint8, device="cuda")) for i in range(8)]
    mine.close()
    more, noise = used() - before, 1 << 26
    assert 8 * size - weight_keeper.SEGMENT - noise <= more <= 8 * size + noise
    assert all(int(tensor.sum()) == size for tensor in kept)
    keeper.kill()
    assert all(int(tensor.sum()) == size for tensor in kept)
    del kept[:]
    torch.cuda.synchronize()
    assert used() < before + size


def test_a_keeper_ends_with_its_door():
    keeper = Keeper()
    rank = keeper.view("cpu")
    keeper.door.close()
    assert keeper.ends() == 0
    assert torch.equal(rank.keep("x", some("cpu")), some("cpu")())
