"""The half of a recurrent layer in one call against the definition in torch."""

import pytest
import torch

from tests.kernels.cpu.test_decoder_layer import EPS, normed
from turnout.attention.delta_rule import DeltaCell, step
from turnout.attention.kinds import DeltaNetSpec
from turnout.attention.states import state_size, window_size
from turnout.kernels.cpu import decoder_layer, recurrent_layer
from turnout.kernels.cpu.recurrent_layer import RecurrentHalf, Requests

H, SLOTS = 48, 6
SPEC = DeltaNetSpec(num_heads=6, num_kv_heads=2, head_dim=16, value_dim=32, scale=0.25, conv_width=4)


def layer() -> tuple[RecurrentHalf, DeltaCell]:
    X, Y = SPEC.mixed, SPEC.num_heads * SPEC.value_dim
    cell = DeltaCell(
        spec=SPEC,
        conv_WC=torch.randn(SPEC.conv_width, SPEC.channels) / 2,
        decay_H=-torch.rand(SPEC.num_heads),
        bias_H=torch.randn(SPEC.num_heads),
        norm_D=torch.randn(SPEC.value_dim),
        eps=EPS,
    )
    half = RecurrentHalf(
        mixed_XH=torch.randn(X, H) / H**0.5,
        out_HY=torch.randn(H, Y) / Y**0.5,
        conv_WC=cell.conv_WC,
        decay_H=cell.decay_H,
        bias_H=cell.bias_H,
        norm_D=cell.norm_D,
        norm_eps=cell.eps,
        key_heads=SPEC.num_kv_heads,
    )
    return half, cell


@pytest.mark.parametrize("threads", [1, 3])
def test_requests_of_one_token_and_of_several(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that begin, whose slots held NaN, that go on, and chunks of both; then one token of each."""
    monkeypatch.setattr(recurrent_layer, "threads_for", lambda multiplications: threads)
    torch.manual_seed(0)
    half, cell = layer()
    gain = torch.randn(H)
    windows = torch.full((SLOTS, *window_size(SPEC)), float("nan"))
    states = torch.full((SLOTS, *state_size(SPEC)), float("nan"))
    kept = {
        slot: (torch.zeros(1, *window_size(SPEC)), torch.zeros(1, *state_size(SPEC))) for slot in (4, 0, 2)
    }
    seen = dict.fromkeys(kept, 0)
    for lengths in ({4: 1, 0: 5, 2: 11}, {4: 1, 2: 1, 0: 1}, {2: 3, 4: 1}, {0: 1}):
        N = sum(lengths.values())
        x, delta = torch.randn(N, H), torch.randn(N, H)
        counts = torch.tensor(list(lengths.values()))
        requests = Requests(
            torch.tensor(list(lengths)),
            torch.tensor([seen[slot] for slot in lengths]),
            counts.cumsum(0) if len(lengths) < N else None,
            windows,
            states,
        )
        found = half(x, delta, gain, EPS, requests)
        assert found is not None
        assert torch.equal(found[0], x + delta)
        mixed = normed(x + delta, gain) @ half.mixed_XH.T
        rows = []
        for slot, of_request in zip(lengths, mixed.split(list(lengths.values())), strict=True):
            rows += [step(cell, token, *kept[slot]) for token in of_request.split(1)]
            seen[slot] += lengths[slot]
            torch.testing.assert_close(states[slot], kept[slot][1][0], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(windows[slot], kept[slot][0][0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found[1], torch.cat(rows) @ half.out_HY.T, rtol=1e-4, atol=1e-4)
    assert states[[1, 3, 5]].isnan().all()


def test_steps_of_many_tokens_are_not_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    half, _ = layer()
    slots = torch.arange(1)
    windows, states = torch.zeros(1, *window_size(SPEC)), torch.zeros(1, *state_size(SPEC))
    monkeypatch.setattr(decoder_layer, "FEW_MULTIPLICATIONS", 1)
    for tokens, one in ((0, False), (8, True), (9, False)):
        requests = Requests(slots, torch.zeros_like(slots), torch.tensor([tokens]), windows, states)
        assert (half(torch.randn(tokens, H), None, torch.ones(H), EPS, requests) is not None) == one
