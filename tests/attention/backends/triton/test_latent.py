"""Which prompts of latent attention a kernel takes at once, and whose keys and values are made for them."""

from __future__ import annotations

import pytest
import torch

from tests.attention.test_latent import Chunk, Sequence
from turnout.attention.backends.triton.latent import TritonLatent, prompts
from turnout.attention.capability import Chosen
from turnout.attention.kinds import AttentionSpec, cache_groups
from turnout.engine.scheduler.request import GroupPages
from turnout.kernels.attention import latent_prefill

SPEC = AttentionSpec.latent(num_heads=4, nope_dim=128, rope_dim=64, value_dim=128, latent_dim=512)


def latent(**chosen: int | str) -> TritonLatent:
    return TritonLatent(
        *cache_groups([SPEC]), num_pages=256, page_size=16, max_running=3, max_context=4096,
        dtype=torch.bfloat16, device=torch.device("cpu"),
        chosen=Chosen(**({"backend": "triton", "prompts": "triton"} | chosen)),  # type: ignore[arg-type]
    )  # fmt: skip


def chunks(*bounds: tuple[int, int]) -> list[Chunk]:
    pages = [GroupPages(pages=[], freed=0)]
    return [Chunk(Sequence(row, pages), start, end) for row, (start, end) in enumerate(bounds)]


def taken(paged: TritonLatent, given: list[Chunk]) -> tuple[int, int, list[int]]:
    """(tokens that the kernel takes; tokens whose keys and values are gathered for it; first rows of other
    chunks), of chunks behind 5 rows that decode."""
    found, others = prompts(paged, given, 5)
    if found is None:
        return 0, 0, [at for at, _ in others]
    gathered = 0 if found.slots_L is None else len(found.slots_L)
    return int(found.tiles_TF[:, 1].sum()), gathered, [at for at, _ in others]


def test_contexts_are_made_at_once_up_to_three_times_the_step() -> None:
    paged = latent()
    assert taken(paged, chunks((0, 300), (0, 40))) == (340, 0, [])
    assert taken(paged, chunks((600, 900), (0, 40))) == (340, 940, [])
    assert taken(paged, chunks((900, 1200), (0, 40))) == (40, 0, [5])
    assert taken(paged, chunks((30, 50), (0, 40))) == (40, 0, [5])  # so short that it is absorbed
    assert taken(paged, chunks((30, 50))) == (0, 0, [5])


def test_prompts_are_left_to_the_library_that_was_chosen() -> None:
    paged = latent(prompts="flash-attn-4", prompt_tokens=100)
    assert taken(paged, chunks((0, 500), (0, 50))) == (50, 0, [5])


def test_no_more_is_made_than_the_kernel_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a step has more rows, only those of prompts are made."""
    monkeypatch.setattr(latent_prefill, "MOST_VALUES", 400 * 4 * 256)
    paged = latent()
    assert taken(paged, chunks((0, 300), (0, 90))) == (390, 0, [])
    assert taken(paged, chunks((0, 300), (0, 98))) == (398, 398, [])
    assert taken(paged, chunks((0, 300), (0, 101))) == (300, 300, [305])
