"""Gated DeltaNet in blocks and step by step equals its definition, and slots keep nothing of others.

The definition, one token and one head at a time, is `tests/models/running.py`'s.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tests.models.running import PlainAttention
from turnout.attention.backends.cpu.states import CompiledStates
from turnout.attention.capability import Place
from turnout.attention.delta_rule import SPAN, DeltaCell, advance, step
from turnout.attention.kinds import DeltaNetSpec, state_groups
from turnout.attention.states import RequestStates, SequenceStates, request_states, state_size, window_size

SPEC = DeltaNetSpec(num_heads=4, num_kv_heads=2, head_dim=16, value_dim=32, scale=0.25, conv_width=4)
BOUND = 2e-5
HOST = Place(device="cpu", dtype="float32", page_size=16)


def drawn(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def cell(decay: float = 1.0) -> DeltaCell:
    return DeltaCell(
        spec=SPEC,
        conv_WC=drawn(4, SPEC.channels, seed=1) / 2,
        decay_H=-torch.tensor([0.01, 0.3, 1.0, 3.0]) * decay,
        bias_H=drawn(4, seed=2),
        norm_D=1 + drawn(32, seed=3) / 4,
        eps=1e-6,
    )


def tokens(count: int, seed: int = 0) -> Tensor:
    return drawn(count, SPEC.mixed, seed=10 + seed)


class Definition(PlainAttention):
    def __init__(self) -> None:
        super().__init__(model=None)  # type: ignore[arg-type]

    def of(self, mixed_TX: Tensor, decay: float = 1.0) -> Tensor:
        self._chunks = [("a", len(mixed_TX))]
        return self.recur(0, mixed_TX, cell(decay))


def empty() -> tuple[Tensor, Tensor]:
    return torch.zeros(window_size(SPEC)), torch.zeros(state_size(SPEC))


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 130])
@pytest.mark.parametrize("decay", [1.0, 100.0], ids=["slow", "fast"])
def test_blocks_equal_the_definition(length: int, decay: float) -> None:
    """A decay that forgets all of the past in one token overflows nothing either."""
    mixed = tokens(length)
    plain = Definition()
    kept = empty()
    assert torch.allclose(advance(cell(decay), mixed, *kept), plain.of(mixed, decay), atol=BOUND, rtol=BOUND)
    window, state = plain.states[0, "a"]
    assert torch.equal(kept[0], window[:, 1:].T)
    assert torch.allclose(kept[1], state, atol=BOUND, rtol=BOUND)


@pytest.mark.parametrize("cuts", [(0, 63, 130), (0, 64, 130), (0, 65, 130), (0, 1, 3, 70, 130)], ids=str)
def test_where_a_prompt_is_cut_does_not_matter(cuts: tuple[int, ...]) -> None:
    mixed, whole, parts = tokens(130), empty(), SequenceStates()
    expected = advance(cell(), mixed, *whole)
    got = torch.cat([parts.recur(0, mixed[a:b], cell()) for a, b in pairwise(cuts)])
    assert torch.allclose(got, expected, atol=BOUND, rtol=BOUND)


def test_long_prompts_are_taken_in_spans() -> None:
    mixed, kept = tokens(SPAN + 70), empty()
    got = advance(cell(), mixed, *kept)
    assert torch.allclose(got, Definition().of(mixed), atol=BOUND, rtol=BOUND)


def test_steps_of_several_requests() -> None:
    mixed_BTX = torch.stack([tokens(6, seed) for seed in range(3)])
    windows, states = torch.zeros(3, *window_size(SPEC)), torch.zeros(3, *state_size(SPEC))
    got = torch.stack([step(cell(), mixed_BTX[:, t], windows, states) for t in range(6)], dim=1)
    for b in range(3):
        assert torch.allclose(got[b], Definition().of(mixed_BTX[b]), atol=BOUND, rtol=BOUND)


@dataclass
class Running:
    row: int

    @property
    def state_slots(self) -> list[int]:
        return [self.row]


@dataclass
class Part:
    """Tokens [start, end) of the request in `row`."""

    request: Running
    start: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.start


def part(row: int, start: int, end: int) -> Part:
    return Part(Running(row), start, end)


def slots(place: Place = HOST) -> RequestStates:
    (group,) = state_groups([SPEC, SPEC])
    return request_states(group, place, max_running=3, device=torch.device("cpu"), dtype=torch.float32)


@pytest.mark.parametrize(
    ("place", "made"), [(HOST, CompiledStates), (replace(HOST, dtype="bfloat16"), RequestStates)]
)
def test_a_step_of_prompts_and_single_tokens(place: Place, made: type[RequestStates]) -> None:
    """Each request keeps to its slot, in every layer; others are left as they are."""
    held = slots(place)
    assert type(held) is made
    mixed = [tokens(80, seed) for seed in range(3)]
    expected = [Definition().of(x) for x in mixed]
    for layer in (0, 1):
        first = held.laid_out([], [part(0, 0, 70), part(2, 0, 5)])
        got = first.recur(layer, torch.cat((mixed[0][:70], mixed[2][:5])), cell())
        assert torch.allclose(got, torch.cat((expected[0][:70], expected[2][:5])), atol=BOUND, rtol=BOUND)
        both = held.laid_out([part(2, 5, 6), part(1, 0, 1)], [part(0, 70, 80)])
        got = both.recur(layer, torch.cat((mixed[2][5:6], mixed[1][:1], mixed[0][70:])), cell())
        wanted = torch.cat((expected[2][5:6], expected[1][:1], expected[0][70:]))
        assert torch.allclose(got, wanted, atol=BOUND, rtol=BOUND)
    assert held.states[:, 3].count_nonzero() == 0


def test_the_compiled_kernel_gives_the_same_bits_however_a_prompt_is_cut() -> None:
    mixed, found = tokens(130), []
    for cuts in ((0, 130), (0, 1, 64, 65, 130), (0, 63, 129, 130)):
        held, outs = slots(), []
        for a, b in pairwise(cuts):
            mine = [part(1, a, b)]
            laid_out = held.laid_out(mine, []) if b - a == 1 else held.laid_out([], mine)
            outs.append(laid_out.recur(0, mixed[a:b], cell()))
        found.append((torch.cat(outs), held.states[0, 1], held.windows[0, 1]))
    for other in found[1:]:
        assert all(torch.equal(x, y) for x, y in zip(other, found[0], strict=True))


@pytest.mark.parametrize("length", [1, 9])
def test_a_slot_used_again_begins_with_zeros(length: int) -> None:
    """Whatever the request before left in it, as a chunk or as a single token."""
    held, mixed = slots(), tokens(length)
    held.states.fill_(float("nan"))
    held.windows.fill_(float("nan"))
    mine = part(1, 0, length)
    laid_out = held.laid_out([mine], []) if length == 1 else held.laid_out([], [mine])
    assert torch.allclose(laid_out.recur(0, mixed, cell()), Definition().of(mixed), atol=BOUND, rtol=BOUND)
    assert held.states[0, 1].isfinite().all()
    assert held.states[0, 0].isnan().all()


def test_recurrent_layers_have_no_keys_and_values() -> None:
    with pytest.raises(ValueError, match="layer 0 keeps no keys and values"):
        slots().laid_out([], [])(0, *(torch.zeros(0, 4, 16),) * 3)


@pytest.mark.parametrize("requests", [1, 5])
def test_the_compiled_step_equals_torch(requests: int) -> None:
    """On slots in any order, next to requests that begin; slots of others are left as they are."""
    from turnout.kernels.cpu import delta_rule as compiled

    windows, states = drawn(7, *window_size(SPEC), seed=5), drawn(7, *state_size(SPEC), seed=6) / 4
    slots = torch.tensor([4, 0, 6, 1, 3])[:requests]
    positions = torch.tensor([9, 0, 700, 1, 0])[:requests]
    mixed = tokens(requests, 7)
    begins = (positions == 0)[:, None, None]
    ours, theirs = (windows.clone(), states.clone()), (windows[slots], states[slots])
    ours[1][slots[positions == 0]] = float("nan")
    theirs[0].masked_fill_(begins, 0)
    theirs[1].masked_fill_(begins[..., None], 0)
    one = cell()
    got = compiled.advance(
        mixed, slots, positions, *ours, one.conv_WC, one.decay_H, one.bias_H, one.norm_D, one.eps
    )
    assert torch.allclose(got, step(one, mixed, *theirs), atol=BOUND, rtol=BOUND)
    for mine, reference, before in zip(ours, theirs, (windows, states), strict=True):
        assert torch.allclose(mine[slots], reference, atol=BOUND, rtol=BOUND)
        rest = [slot for slot in range(7) if slot not in slots]
        assert torch.equal(mine[rest], before[rest])
