"""Steps of Gated DeltaNet on slots, by a kernel and by torch."""

from __future__ import annotations

import torch

from turnout.attention.delta_rule import DeltaCell, delta_rule, step
from turnout.attention.kinds import DeltaNetSpec


def close(
    requests: int,
    *,
    heads: tuple[int, int] = (2, 4),
    sizes: tuple[int, int] = (16, 32),
    width: int = 4,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    bound: float = 2e-5,
) -> bool:
    """Whether outputs, windows and states are alike; slots of others and what ended requests left (NaN)
    change nothing. heads: (keys, values); sizes: theirs."""
    from turnout.kernels.attention import delta_rule as kernel

    (Hk, Hv), (Dk, Dv), slots = heads, sizes, requests + 2
    spec = DeltaNetSpec(
        num_heads=Hv, num_kv_heads=Hk, head_dim=Dk, value_dim=Dv, scale=Dk**-0.5, conv_width=width
    )
    draw = torch.Generator().manual_seed(requests)

    def drawn(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=draw)

    cell = DeltaCell(
        spec=spec,
        conv_WC=drawn(width, spec.channels).to(dtype).float() / 2,
        decay_H=-drawn(Hv).exp(),
        bias_H=drawn(Hv),
        norm_D=1 + drawn(Dv) / 4,
        eps=1e-6,
    )
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
    found = kernel.step(
        mixed.to(device, dtype),
        *(x.to(device) for x in (at, positions)),
        *held,
        cell.conv_WC.to(device, dtype),
        *(x.to(device) for x in (cell.decay_H, cell.bias_H, cell.norm_D)),
        cell.eps,
    )
    got_windows, got_states = (x.float().cpu() for x in held)
    rest = [slot for slot in range(slots) if slot not in at.tolist()]
    return (
        torch.allclose(found.float().cpu(), wanted, atol=bound, rtol=bound)
        and torch.equal(got_windows[at], mine[0])
        and torch.allclose(got_states[at], mine[1], atol=2e-5, rtol=2e-5)
        and torch.equal(got_windows[rest], windows_of_others[rest])
        and torch.equal(got_states[rest], states_of_others[rest])
    )


def carried(
    tokens: int,
    *,
    heads: int = 2,
    sizes: tuple[int, int] = (16, 32),
    device: str = "cpu",
    bound: float = 2e-5,
) -> bool:
    """Whether a prompt's outputs and state are those of torch alone, with strong and with weak decay."""
    from turnout.kernels.attention.delta_rule import carry_states

    draw = torch.Generator().manual_seed(tokens)
    q, k, v = (torch.randn(tokens, heads, size, generator=draw) for size in (sizes[0], *sizes))
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q * sizes[0] ** -0.5, k))
    beta = torch.rand(tokens, heads, generator=draw)
    g = -(torch.rand(tokens, heads, generator=draw) ** 6) * 30
    state = torch.randn(heads, *sizes, generator=draw)
    mine = state.clone().to(device)
    found = delta_rule(*(x.to(device) for x in (q, k, v, beta, g)), mine, carry_states).cpu()
    wanted = delta_rule(q, k, v, beta, g, state)
    return all(
        torch.allclose(a, b, atol=bound, rtol=bound) for a, b in ((found, wanted), (mine.cpu(), state))
    )
