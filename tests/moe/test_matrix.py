"""What every runner behind every dispatcher must do, in every format, against the float32 reference."""

from __future__ import annotations

import pytest
import torch

from tests.moe.bounds import BOUNDS, assert_close, relative_error
from tests.moe.build import MAX_TOKENS
from tests.moe.matrix import Case, cases

pytestmark = pytest.mark.parametrize("case", cases())


def check(case: Case, y, ref) -> None:
    assert y.dtype == case.dtype
    assert_close(y, ref, activation_format=case.activation_format, compute_dtype=case.compute_dtype)


def test_token_counts(case: Case):
    experts = case.experts()
    run = case.pipeline(experts)
    for tokens in (0, 1, 3, 17, MAX_TOKENS):
        batch = case.batch(tokens)
        check(case, run(*batch), case.reference(experts, *batch))


def test_all_tokens_to_one_expert(case: Case):
    """The other slot is padding, which must add nothing."""
    experts = case.experts()
    x, ids, weights = case.batch(17)
    ids[:, 0], ids[:, 1] = case.spec.num_experts - 1, -1
    check(case, case.pipeline(experts)(x, ids, weights), case.reference(experts, x, ids, weights))


def test_all_padding(case: Case):
    """Rows of padding may hold anything, and come out as zero."""
    for tokens in (1, MAX_TOKENS):
        x, ids, weights = case.batch(tokens)
        y = case.pipeline(case.experts())(
            torch.full_like(x, torch.nan), torch.full_like(ids, -1), torch.zeros_like(weights)
        )
        assert torch.equal(y.cpu(), torch.zeros_like(x))


def test_padding_next_to_tokens(case: Case):
    experts = case.experts()
    x, ids, weights = case.batch(17)
    ids[::3], weights[::3] = -1, 0
    ref = case.reference(experts, x, ids, weights)
    x[::3] = torch.nan
    y = case.pipeline(experts)(x, ids, weights)
    assert not y[::3].any()
    check(case, y, ref)


def test_expert_without_a_token(case: Case):
    experts = case.experts()
    x, ids, weights = case.batch(MAX_TOKENS)
    ids[ids == 3] = 4
    check(case, case.pipeline(experts)(x, ids, weights), case.reference(experts, x, ids, weights))


@pytest.mark.parametrize("ep", [2, 4])
def test_expert_parallel_slices_sum_to_the_whole(case: Case, ep: int):
    experts = case.experts()
    slices = case.slices(experts, ep)
    runs = [case.pipeline(part) for part in slices]
    for tokens in (3, MAX_TOKENS):
        batch = case.batch(tokens)
        y = torch.stack([run(*batch).float() for run in runs]).sum(dim=0)
        ref = torch.stack([case.reference(part, *batch) for part in slices]).sum(dim=0)
        numbers = (case.activation_format, case.compute_dtype)
        # Partial sums are rounded to the compute dtype before they are added.
        assert relative_error(y.cpu(), ref) <= BOUNDS[numbers] * (1 if case.compute_dtype == "float32" else 2)
        assert relative_error(ref, case.reference(experts, *batch)) <= 1e-6


def test_repeat_calls_are_bit_equal(case: Case):
    assert case.deterministic, "a runner that is not deterministic needs a bound here"
    run, batch = case.pipeline(case.experts()), case.batch(17)
    assert torch.equal(run(*batch), run(*batch))
