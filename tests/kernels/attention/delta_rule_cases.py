"""Steps of Gated DeltaNet on slots, by a kernel and by torch."""

from __future__ import annotations

from functools import partial

import torch

from turnout.attention.delta_rule import DeltaCell, step
from turnout.attention.kinds import DeltaNetSpec


def drawn_cell(
    draw: torch.Generator, heads: tuple[int, int], sizes: tuple[int, int], width: int, dtype: torch.dtype
) -> DeltaCell:
    """With values that `dtype` holds. heads: (keys, values); sizes: theirs."""
    (Hk, Hv), (Dk, Dv), drawn = heads, sizes, partial(torch.randn, generator=draw)
    spec = DeltaNetSpec(
        num_heads=Hv, num_kv_heads=Hk, head_dim=Dk, value_dim=Dv, scale=Dk**-0.5, conv_width=width
    )
    return DeltaCell(
        spec=spec,
        conv_WC=drawn(width, spec.channels).to(dtype).float() / 2,
        decay_H=-drawn(Hv).exp(),
        bias_H=drawn(Hv),
        norm_D=1 + drawn(Dv) / 4,
        eps=1e-6,
    )


def learned(cell: DeltaCell, device: str, dtype: torch.dtype) -> tuple[torch.Tensor | float, ...]:
    """As kernels take it, on `device`."""
    conv_WC, *rest, eps = cell.learned
    return conv_WC.to(device, dtype), *(x.to(device) for x in rest), eps


def close(
    requests: int,
    *,
    heads: tuple[int, int] = (2, 4),
    sizes: tuple[int, int] = (16, 32),
    width: int = 4,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    bound: float = 2e-5,
    columns: bool = False,
    parts: int = 0,
) -> bool:
    """Whether outputs, windows and states are alike; slots of others and what ended requests left (NaN)
    change nothing. heads: (keys, values); sizes: theirs. columns: as few requests are computed; parts: whose
    sum is what goes in."""
    from turnout.kernels.attention import delta_rule as kernel

    Hv, (Dk, Dv), slots = heads[1], sizes, requests + 2
    draw = torch.Generator().manual_seed(requests)
    cell = drawn_cell(draw, heads, sizes, width, dtype)
    spec, drawn = cell.spec, partial(torch.randn, generator=draw)
    windows, states = drawn(slots, width - 1, spec.channels).to(dtype).float(), drawn(slots, Hv, Dk, Dv) / 4
    mixed, at = (
        drawn(requests, spec.mixed).to(dtype).float(),
        torch.randperm(slots, generator=draw)[:requests],
    )
    positions = torch.tensor([7, 0, 100_000, 1, 0] * 26)[:requests]
    mine = windows[at], states[at]
    begins = (positions == 0)[:, None, None]
    mine[0].masked_fill_(begins, 0)
    mine[1].masked_fill_(begins[..., None], 0)
    windows[at[positions == 0]] = float("nan")
    states[at[positions == 0]] = float("nan")
    wanted = step(cell, mixed, *mine)
    windows_of_others, states_of_others = windows.clone(), states.clone()
    held = windows.to(device, dtype), states.to(device)
    done = torch.zeros(kernel.FEW * Hv, dtype=torch.int32, device=device) if columns else None
    given = mixed.to(device, dtype)
    if parts:
        given = torch.stack([given.float() * share for share in (2, -1, 1, -1)[:parts]])
        assert torch.equal(given.sum(0), mixed.to(device))
    found = kernel.step(
        given,
        *(x.to(device) for x in (at, positions)),
        *held,
        *learned(cell, device, dtype),
        done,
    )
    if done is not None and done.count_nonzero():
        return False
    got_windows, got_states = (x.float().cpu() for x in held)
    rest = [slot for slot in range(slots) if slot not in at.tolist()]
    return (
        torch.allclose(found.float().cpu(), wanted, atol=bound, rtol=bound)
        and torch.equal(got_windows[at], mine[0])
        and torch.allclose(got_states[at], mine[1], atol=2e-5, rtol=2e-5)
        and torch.equal(got_windows[rest], windows_of_others[rest])
        and torch.equal(got_states[rest], states_of_others[rest])
    )


def advanced(
    tokens: int,
    *,
    heads: tuple[int, int] = (2, 4),
    sizes: tuple[int, int] = (16, 32),
    width: int = 4,
    alike: bool = False,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    bound: float = 5e-5,
) -> bool:
    """Whether a prompt's outputs, window and state are those of single steps in torch.

    alike: all tokens are one, hardly decay and are taken whole: the worst of all triangular systems.
    """
    from turnout.kernels.attention.delta_prompt import advance

    Hv, (Dk, Dv) = heads[1], sizes
    draw = torch.Generator().manual_seed(tokens)
    cell = drawn_cell(draw, heads, sizes, width, dtype)
    spec, drawn = cell.spec, partial(torch.randn, generator=draw)
    mixed, window = drawn(tokens, spec.mixed), drawn(width - 1, spec.channels).to(dtype).float()
    state = drawn(Hv, Dk, Dv) / 4
    if alike:
        mixed[:] = mixed[0]
        mixed[:, -2 * Hv : -Hv], mixed[:, -Hv:] = 9.0, -9.0
    mixed = mixed.to(dtype).float()
    held = window.clone().to(device, dtype), state.clone().to(device)
    found = advance(
        mixed.to(device, dtype),
        *held,
        *learned(cell, device, dtype),
    )
    steps = [step(cell, row[None], window[None], state[None]) for row in mixed]
    return (
        torch.allclose(found.float().cpu(), torch.cat(steps), atol=bound, rtol=bound)
        and torch.equal(held[0].float().cpu(), window)
        and torch.allclose(held[1].cpu(), state, atol=bound, rtol=bound)
    )
