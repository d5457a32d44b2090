"""Prompts through Gated DeltaNet by fla-core against torch's, in pieces, whatever slots held before.

Without a GPU functions in torch take the library's place, which do what it says of itself.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels.attention.delta_rule_cases import drawn_cell
from turnout.attention.backends.fla_core.declaration import BACKEND, PACKAGE
from turnout.attention.capability import Chosen, Place
from turnout.attention.choose import choose, choose_states, refusals, state_refusals
from turnout.attention.kinds import AttentionSpec, DeltaNetSpec, StateGroup, cache_groups
from turnout.attention.states import RequestStates
from turnout.registry import ATTENTION_BACKENDS, load
from turnout.vocabulary import AttentionKind

ENDS = ((1, 3, 70, 150), (66, 67, 69, 150))  # of the pieces of two prompts, which are taken together
SLOTS = (3, 1)


@dataclass(frozen=True)
class Prompt:
    state_slots: tuple[int, ...]


@dataclass(frozen=True)
class Span:
    request: Prompt
    start: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.start


def prepare_chunk_indices(cu_seqlens: Tensor, chunk_size: int, cu_seqlens_cpu: Tensor) -> Tensor:
    """[blocks, 2]: the sequence of each block, and which of its blocks it is."""
    counts = -(-cu_seqlens_cpu.diff() // chunk_size)
    found = [(n, i) for n, count in enumerate(counts.tolist()) for i in range(count)]
    return torch.tensor(found, device=cu_seqlens.device)


def causal_conv1d(
    x, weight, *, activation, backend, output_final_state, initial_state, cu_seqlens, cu_seqlens_cpu,
    chunk_indices,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """x [1, T, D], weight [D, W], states [N, D, W]: the last W inputs of each sequence."""
    assert (activation, backend, output_final_state) == ("silu", "triton", True)
    assert torch.equal(chunk_indices, prepare_chunk_indices(cu_seqlens, 64, cu_seqlens_cpu))
    found, final = [], []
    for part, state in zip(x[0].split(cu_seqlens.diff().tolist()), initial_state, strict=True):
        seen = torch.cat((state, part.T), dim=1)
        final.append(seen[:, -weight.shape[1] :])
        found.append(F.conv1d(seen[None, :, 1:], weight[:, None], groups=len(weight))[0].T)
    return F.silu(torch.cat(found))[None], torch.stack(final)


def chunk_gated_delta_rule(
    q, k, v, g, beta, *, initial_state, output_final_state, use_qk_l2norm_in_kernel,
    use_beta_sigmoid_in_kernel, use_gate_in_kernel, A_log, dt_bias, cu_seqlens, cu_seqlens_cpu, chunk_indices,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """q, k [1, T, H, K], v [1, T, HV, V], g and beta [1, T, HV]: (outputs, states [N, HV, K, V])."""
    assert output_final_state
    assert use_qk_l2norm_in_kernel
    assert use_beta_sigmoid_in_kernel
    assert use_gate_in_kernel
    assert initial_state.dtype == A_log.dtype == dt_bias.dtype == torch.float32
    assert cu_seqlens.tolist() == cu_seqlens_cpu.tolist()
    assert chunk_indices is not None
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(v.shape[2] // q.shape[2], 2) for x in (q * q.shape[-1] ** -0.5, k))
    kept, beta = (-A_log.exp() * F.softplus(g + dt_bias)).exp(), beta.sigmoid()
    states, o = initial_state.clone(), torch.empty_like(v)
    for n, state in enumerate(states):
        for t in range(int(cu_seqlens[n]), int(cu_seqlens[n + 1])):
            state *= kept[0, t, :, None, None]
            d = beta[0, t, :, None] * (v[0, t] - (k[0, t, :, None] @ state)[:, 0])
            state += k[0, t, :, :, None] * d[:, None]
            o[0, t] = (q[0, t, :, None] @ state)[:, 0]
    return o, states


def rms_norm_gated(x, g, weight, bias, *, activation, eps) -> Tensor:
    assert (bias, activation) == (None, "swish")
    return F.rms_norm(x, (x.shape[-1],), weight, eps) * F.silu(g)


LIBRARY = {
    "fla.ops.utils.index": prepare_chunk_indices,
    "fla.modules.causal_conv1d": causal_conv1d,
    "fla.ops.gated_delta_rule": chunk_gated_delta_rule,
    "fla.modules.norm.fused_norm_gate": rms_norm_gated,
}


def in_pieces(states: RequestStates, cell, mixed_BTX: Tensor) -> tuple[Tensor, ...]:
    """(outputs [B, T, Hv Dv], windows, states) of two prompts, whose slots held NaN."""
    for kept in (states.states, states.windows):
        kept.fill_(torch.nan)
    found: tuple[list[Tensor], ...] = ([], [])
    starts = [0, 0]
    for ends in zip(*ENDS, strict=True):
        spans = [Span(Prompt((s,)), *places) for s, *places in zip(SLOTS, starts, ends, strict=True)]
        rows = torch.cat([x[span.start : span.end] for x, span in zip(mixed_BTX, spans, strict=True)])
        y_NY = states.laid_out([], spans).recur(5, rows, cell)
        for outputs, part in zip(found, y_NY.split([span.length for span in spans]), strict=True):
            outputs.append(part)
        starts = [span.end for span in spans]
    kept = (x[0, list(SLOTS)] for x in (states.windows, states.states))
    return torch.stack([torch.cat(outputs) for outputs in found]), *kept


def check(device: str, dtype: torch.dtype, bound: float, *, sizes: tuple[int, int]) -> None:
    draw = torch.Generator().manual_seed(0)
    cell = drawn_cell(draw, (2, 4), sizes, 4, dtype)
    mixed = torch.randn(2, 150, cell.spec.mixed, generator=draw).to(dtype)
    group = StateGroup(layers=(5,), spec=cell.spec)
    wanted = in_pieces(
        RequestStates(group, max_running=4, device=torch.device("cpu"), dtype=torch.float32),
        cell,
        mixed.float(),
    )
    learned = (x.to(device) for x in (cell.conv_WC.to(dtype), cell.decay_H, cell.bias_H, cell.norm_D))
    names = ("conv_WC", "decay_H", "bias_H", "norm_D")
    placed = replace(cell, **dict(zip(names, learned, strict=True)))
    prompts = load(BACKEND.implementations[AttentionKind.RECURRENT])()
    states = RequestStates(group, max_running=4, device=torch.device(device), dtype=dtype, prompts=prompts)
    for found, expected in zip(in_pieces(states, placed, mixed.to(device)), wanted, strict=True):
        torch.testing.assert_close(found.cpu().float(), expected, rtol=bound, atol=bound)


@pytest.mark.parametrize("sizes", [(16, 16), (16, 32)], ids=str)
def test_what_the_library_is_given(sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, function in LIBRARY.items():
        parts = name.split(".")
        for module in (".".join(parts[: n + 1]) for n in range(len(parts))):
            if module not in sys.modules or module == name:
                monkeypatch.setitem(sys.modules, module, ModuleType(module))
        monkeypatch.setattr(sys.modules[name], function.__name__, function, raising=False)
    check("cpu", torch.float32, 5e-5, sizes=sizes)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_library(dtype: torch.dtype) -> None:
    if PACKAGE.lacking():
        pytest.skip(f"{PACKAGE.lacking()}: {PACKAGE.install}")
    check("cuda", dtype, 3e-2, sizes=(128, 128))


DELTA = DeltaNetSpec(num_heads=4, num_kv_heads=2, head_dim=128, value_dim=128, scale=1.0, conv_width=4)
H200 = Place(device="cuda", dtype="bfloat16", page_size=16, architecture=90, present=False, asked="fla-core")


def test_it_takes_prompts_where_it_is_asked_to() -> None:
    own, _ = choose_states(DELTA, replace(H200, asked="auto"))
    assert own == Chosen(backend="triton", prompts="triton")
    assert choose_states(DELTA, H200)[0] == replace(own, prompts="fla-core")
    assert state_refusals([DELTA], H200) == state_refusals([], replace(H200, asked="triton")) == []
    attention = AttentionSpec.full(num_heads=16, num_kv_heads=2, head_dim=256)
    assert choose(attention, H200) == choose(attention, replace(H200, asked="auto"))
    assert refusals(cache_groups([attention]), H200) == []


def test_prompts_go_to_it_where_it_was_measured_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        ATTENTION_BACKENDS._loaded, "fla-core", replace(BACKEND, pays_from=lambda spec, place: 256)
    )
    auto = replace(H200, asked="auto")
    chosen, _ = choose_states(DELTA, auto)
    assert str(chosen) == (
        "triton, and fla-core for prompts of 256 tokens or more (faster from there on, as measured)"
    )
    assert choose_states(DELTA, replace(auto, asked="triton"))[0].prompts == "triton"
    assert choose_states(DELTA, replace(auto, dtype="float32"))[0].prompts == "triton"


def test_short_prompts_stay_with_the_backend() -> None:
    class Refusing:
        def laid_out(self, states, rows, lengths):
            raise AssertionError(lengths)

    cell = drawn_cell(torch.Generator(), (2, 4), (16, 16), 4, torch.float32)
    states = RequestStates(
        StateGroup(layers=(0,), spec=cell.spec), max_running=2, device=torch.device("cpu"),
        dtype=torch.float32, prompts=Refusing(),
        chosen=Chosen(backend="triton", prompts="fla-core", prompt_tokens=64),
    )  # fmt: skip
    rows = torch.randn(63, cell.spec.mixed)
    assert states.laid_out([], [Span(Prompt((0,)), 0, 63)]).recur(0, rows, cell).isfinite().all()
    with pytest.raises(AssertionError, match="64"):
        states.laid_out([], [Span(Prompt((0,)), 0, 64)])


@pytest.mark.parametrize(
    ("specs", "place", "limit", "remedy"),
    [
        ([], H200, "computes recurrent layers only, and the model has none", ""),
        ([replace(DELTA, value_dim=256)], H200, "for triton, which does not take the states", ""),
        ([DELTA], replace(H200, dtype="float32"), "computes in bfloat16, float16, not float32", "--dtype"),
        ([DELTA], replace(H200, device="cpu"), "runs on cuda", "use --device cuda"),
    ],
)
def test_refusals(specs: list[DeltaNetSpec], place: Place, limit: str, remedy: str) -> None:
    (found,) = state_refusals(specs, place)
    assert found.asked == "--attention-backend fla-core"
    assert limit in found.limit
    assert found.remedy.startswith("use --attention-backend auto")
    assert remedy in found.remedy


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turnout.packages._is_here", lambda module: module != "fla")
    (found,) = state_refusals([DELTA], replace(H200, present=True))
    assert found.limit == "fla-core needs fla-core>=0.6, not installed here"
    assert found.remedy.endswith(", or pip install 'turnout[fla-core]'")
