"""What attention backends declare: the first that takes a layer is chosen, and refusals name all limits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.models.test_families_describe import published
from turnout.attention.backends.flash_attn_4.declaration import PACKAGE
from turnout.attention.capability import Chosen, Place
from turnout.attention.choose import choose, choose_states, refusals
from turnout.attention.kinds import AttentionSpec, DeltaNetSpec, SparseLatentSpec, cache_groups
from turnout.models import describe
from turnout.vocabulary import AttentionKind

SPEC = AttentionSpec.full(num_heads=8, num_kv_heads=2, head_dim=64)
H200 = Place(device="cuda", dtype="bfloat16", page_size=16, present=False)
LATENT = AttentionSpec.latent(num_heads=16, nope_dim=128, rope_dim=64, value_dim=128, latent_dim=512)
SPARSE = SparseLatentSpec(
    **vars(LATENT) | {"kind": AttentionKind.SPARSE_LATENT}, index_heads=64, index_dim=128, index_topk=2048
)
HOST = Place(device="cpu", dtype="float32", page_size=16)


@pytest.mark.parametrize(
    ("spec", "place", "chosen"),
    [
        (SPEC, H200, "triton"),
        (LATENT, H200, "triton"),
        (LATENT, replace(H200, dtype="float32"), "torch"),
        (LATENT, HOST, "torch"),
        (SPARSE, H200, "triton"),
        (replace(SPARSE, index_fp8=True), H200, "torch"),
        (replace(SPEC.sliding(128), sinks=True), H200, "triton"),
        (AttentionSpec.full(num_heads=4, num_kv_heads=4, head_dim=256), H200, "triton"),
        (AttentionSpec.full(num_heads=4, num_kv_heads=4, head_dim=512), H200, "torch"),
        (SPEC, replace(H200, dtype="float32"), "torch"),
        (replace(SPEC.sliding(128), sinks=True), HOST, "cpu"),
        (SPEC, replace(HOST, page_size=8), "torch"),
        (SPEC, replace(HOST, dtype="bfloat16"), "torch"),
        (AttentionSpec.full(num_heads=4, num_kv_heads=4, head_dim=24), HOST, "torch"),
    ],
)
def test_choice(spec: AttentionSpec, place: Place, chosen: str) -> None:
    found = choose(spec, place)
    assert found is not None
    assert found.backend == found.prompts == chosen
    assert refusals(cache_groups([spec]), place) == []


DELTA = DeltaNetSpec(num_heads=4, num_kv_heads=2, head_dim=128, value_dim=128, scale=1.0, conv_width=4)


@pytest.mark.parametrize(
    ("spec", "place", "states", "takes_chunks"),
    [
        (DELTA, H200, "triton", False),
        (DELTA, replace(H200, dtype="float32", asked="torch"), "triton", False),
        (replace(DELTA, value_dim=160), H200, "torch", False),
        (DELTA, HOST, "cpu", True),
        (replace(DELTA, head_dim=256), HOST, "cpu", True),
        (replace(DELTA, head_dim=272), HOST, "torch", False),
        (replace(DELTA, value_dim=24), HOST, "torch", False),
        (DELTA, replace(HOST, dtype="bfloat16"), "torch", False),
    ],
)
def test_choice_for_states_of_recurrent_layers(
    spec: DeltaNetSpec, place: Place, states: str, takes_chunks: bool
) -> None:
    chosen, kernels = choose_states(spec, place)
    assert chosen == Chosen(backend=states, prompts=states)
    assert kernels.takes_chunks == takes_chunks


@pytest.mark.parametrize(("place", "package"), [(H200, "triton"), (HOST, "numba")])
def test_states_are_torchs_where_a_package_is_missing(
    place: Place, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("turnout.packages._is_here", lambda module: module != package)
    assert choose_states(DELTA, replace(place, present=True))[0].backend == "torch"
    assert choose_states(DELTA, replace(place, present=False))[0].backend != "torch"


def test_a_layer_that_none_takes_is_refused_by_name() -> None:
    groups = cache_groups([SPEC, replace(SPEC, head_dim=192, value_dim=128)])
    (refusal,) = refusals(groups, H200)
    assert "layer 1: full, heads of 192 and 128, on cuda in bfloat16" in refusal.asked
    assert "torch keeps values as large as keys (192), not 128" in refusal.limit
    assert "cpu runs on cpu, computes in float32, not bfloat16" in refusal.limit
    assert refusal.remedy


HOPPER = replace(H200, architecture=90)
WIDE = AttentionSpec.full(num_heads=32, num_kv_heads=4, head_dim=128)


@pytest.mark.parametrize(
    ("spec", "place", "prompts", "tokens"),
    [
        (WIDE, HOPPER, "triton", 0),  # by specialised warps, which float16 and sinks have not
        (WIDE, replace(HOPPER, dtype="float16"), "flash-attn-4", 512),
        (replace(WIDE, sinks=True), HOPPER, "flash-attn-4", 512),
        (replace(WIDE, head_dim=256, value_dim=256), HOPPER, "flash-attn-4", 512),
        (SPEC, HOPPER, "flash-attn-4", 1024),
        (SPEC.sliding(128), HOPPER, "triton", 0),  # where it was not measured
        (WIDE, replace(HOPPER, architecture=100), "triton", 0),
        (LATENT, HOPPER, "triton", 0),  # as of that
        (LATENT, replace(HOPPER, asked="flash-attn-4"), "flash-attn-4", 0),
        (SPEC.sliding(128), replace(HOPPER, asked="flash-attn-4"), "flash-attn-4", 0),
        (WIDE, replace(HOPPER, architecture=100, asked="flash-attn-4"), "flash-attn-4", 0),
        (WIDE, replace(HOPPER, asked="triton"), "triton", 0),
    ],
)
def test_long_prompts_go_to_the_library_where_it_was_measured_faster(
    spec: AttentionSpec, place: Place, prompts: str, tokens: int
) -> None:
    found = choose(spec, place)
    assert found is not None
    assert (found.backend, found.prompts, found.prompt_tokens) == ("triton", prompts, tokens)


def test_a_library_that_is_not_installed_is_named_with_what_it_would_bring(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("turnout.packages._is_here", lambda module: module != "flash_attn")
    here = replace(HOPPER, present=True, dtype="float16")
    found = choose(WIDE, here)
    assert found is not None
    assert str(found) == (
        "triton (flash-attn-4 is faster for prompts of 512 tokens or more, but needs "
        "flash-attn-4>=4.0.0b36, not installed here)"
    )
    (refusal,) = refusals(cache_groups([WIDE]), replace(here, asked="flash-attn-4"))
    assert refusal.limit == "flash-attn-4 needs flash-attn-4>=4.0.0b36, not installed here"
    assert refusal.remedy == f"use --attention-backend auto, or {PACKAGE.install}"


def test_a_library_is_not_called_faster_at_what_it_lacks() -> None:
    lacking = {SPARSE, *describe(published("deepseek-v4-flash")).shape.attention}
    assert {layer.kind for layer in lacking} == {AttentionKind.SPARSE_LATENT, AttentionKind.COMPRESSED}
    for layer in lacking:
        assert choose(layer, HOPPER) == Chosen(backend="triton", prompts="triton")


@pytest.mark.parametrize(
    ("spec", "place", "limit"),
    [
        (
            WIDE,
            replace(HOPPER, architecture=80),
            "runs on GPUs of compute capability 9.x and 10.x",
        ),
        (WIDE, replace(HOST, asked=""), "flash-attn-4 runs on cuda"),
        (SPARSE, HOPPER, f"flash-attn-4 has no {SPARSE.kind} attention"),
        (
            replace(SPEC, head_dim=60, value_dim=60),
            HOPPER,
            "takes heads of multiples of 8, not 60",
        ),
    ],
)
def test_what_was_asked_for_is_used_or_refused(spec: AttentionSpec, place: Place, limit: str) -> None:
    place = replace(place, asked="flash-attn-4")
    (refusal,) = refusals(cache_groups([spec]), place)
    assert refusal.asked.startswith("--attention-backend flash-attn-4, layer 0: ")
    assert limit in refusal.limit
    assert refusal.remedy.startswith("use --attention-backend auto")


def test_pages_and_names_that_do_not_fit_are_refused() -> None:
    (refusal,) = refusals(cache_groups([SPEC]), replace(HOST, page_size=8, asked="cpu"))
    assert refusal.limit == "cpu takes pages of multiples of 16 tokens"
    assert refusal.remedy == "use --attention-backend auto, or use --page-size 16"
    (refusal,) = refusals(cache_groups([SPEC]), replace(HOST, asked="fa5"))
    assert refusal.remedy == "use one of auto, triton, cpu, torch, flash-attn-4, fla-core"
    assert choose(SPEC, replace(HOST, asked="torch")) == Chosen(backend="torch", prompts="torch")
