"""Prompts by flash-attn-4 against a softmax written out, while all that is not their request's is NaN.

On a GPU the library itself computes. Elsewhere what it promises is written out in its place: whole tiles are
loaded, and what a row does not see is multiplied by zero.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import ModuleType

import pytest
import torch
from torch import Tensor

from turnout.attention.backends.flash_attn_4.declaration import PACKAGE
from turnout.attention.backends.triton.latent import TritonLatent
from turnout.attention.backends.triton.paged import TritonAttention
from turnout.attention.capability import Chosen
from turnout.attention.kinds import AttentionSpec, cache_groups
from turnout.attention.latent import LatentAttention
from turnout.attention.up_projection import UpProjection
from turnout.engine.scheduler.request import GroupPages

TILE = 64  # tokens; of the library's, 64 to 128


@dataclass(frozen=True)
class Sequence:
    row: int
    kv: list[GroupPages] = field(default_factory=list)


@dataclass(frozen=True)
class Span:
    request: Sequence
    start: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.start


def library(q, k, v, *, cu_seqlens_q, seqused_k, page_table, softmax_scale, causal, window_size_left,
            learnable_sink, out) -> None:  # fmt: skip
    """As `_flash_attn_fwd` says of itself."""
    assert causal
    assert {x.dtype for x in (cu_seqlens_q, seqused_k, page_table)} == {torch.int32}
    rows, group = cu_seqlens_q.tolist(), q.shape[1] // k.shape[2]
    for b, end in enumerate(seqused_k.tolist()):
        mine = slice(rows[b], rows[b + 1])
        place_T = torch.arange(end - (rows[b + 1] - rows[b]), end)[:, None]
        first = 0 if window_size_left is None else max(0, int(place_T[0]) - window_size_left)
        place_L = torch.arange(first // TILE * TILE, -(-end // k.shape[1]) * k.shape[1])
        page_L, at_L = page_table[b, place_L // k.shape[1]].long(), place_L % k.shape[1]
        keys, values = (x[page_L, at_L].repeat_interleave(group, 1) for x in (k, v))
        seen = place_L <= place_T
        if window_size_left is not None:
            seen &= place_L >= place_T - window_size_left
        scores = torch.einsum("thd,lhd->htl", q[mine], keys) * softmax_scale
        scores = scores.masked_fill(~seen, -torch.inf)
        if learnable_sink is not None:
            column = learnable_sink.view(-1, 1, 1).expand(-1, len(place_T), 1)
            scores = torch.cat((scores, column), -1)
        shares = scores.softmax(-1)[..., : len(place_L)]
        out[mine] = torch.einsum("htl,lhd->thd", shares, values)


def wanted(
    spec: AttentionSpec, cache_HS2D: Tensor, slots_L: Tensor, span: Span, q_THD: Tensor, sinks
) -> Tensor:
    """In float64, of what each row sees alone."""
    rows = []
    for row, place in enumerate(range(span.start, span.end)):
        first = spec.first_seen(place)
        k, v = cache_HS2D[:, slots_L[first : place + 1]].double().unbind(2)
        scores = torch.einsum("hgd,hld->hgl", q_THD[row].double().unflatten(0, (len(k), -1)), k) * spec.scale
        scores = scores.flatten(0, 1)
        if sinks is not None:
            scores = torch.cat((scores, sinks.double()[:, None]), 1)
        shares = scores.softmax(-1)[:, : place + 1 - first].unflatten(0, (len(k), -1))
        rows.append(torch.einsum("hgl,hld->hgd", shares, v).flatten(0, 1))
    return torch.stack(rows)


def error(device: str, dtype: torch.dtype, *, heads, size: int, page: int, window: int, sinks: bool) -> float:
    """The largest difference over chunks of four requests, in a layer behind another one."""
    draw = torch.Generator().manual_seed(page + size)
    spec = AttentionSpec.full(num_heads=heads[0], num_kv_heads=heads[1], head_dim=size)
    spec = spec.sliding(window) if window else spec
    (group,) = cache_groups([spec, spec])
    spans, pages = [(0, 130), (300, 333), (257, 401), (0, 1)], -(-401 // page)
    paged = TritonAttention(
        group, num_pages=4 * pages + 1, page_size=page, max_running=4, max_context=401,
        device=torch.device(device), dtype=dtype, chosen=Chosen(backend="triton", prompts="flash-attn-4"),
    )  # fmt: skip
    free = 1 + torch.randperm(4 * pages, generator=draw).view(4, pages)  # 0 stands for a freed page
    paged.cache.copy_(torch.randn(paged.cache.shape, generator=draw))
    used = torch.zeros(paged.cache.shape[2], dtype=torch.bool)
    chunks, every_slot = [], []
    for row, (start, end) in enumerate(spans):
        first, last = spec.first_seen(start), (end - 1) // page
        slots = (free[row, :, None] * page + torch.arange(page)).flatten()
        used[slots[first // page * page : end]] = True
        held = [0] * (first // page) + free[row, first // page : last + 1].tolist()
        chunks.append(Span(Sequence(row, [GroupPages(pages=held, freed=first // page)]), start, end))
        every_slot.append(slots.to(device))
    paged.cache[:, :, ~used.to(device)] = torch.nan
    q = torch.randn(sum(c.length for c in chunks), heads[0], size, generator=draw).to(device, dtype)
    logits = torch.randn(heads[0], generator=draw).to(device) if sinks else None
    clean = torch.nan_to_num(paged.layer_cache(1)).clone()
    found = paged.laid_out([], chunks).attend(1, q, logits)
    worst, at = 0.0, 0
    for chunk, slots_L in zip(chunks, every_slot, strict=True):
        mine = slice(at, at + chunk.length)
        difference = found[mine].double() - wanted(spec, clean, slots_L, chunk, q[mine], logits)
        worst, at = max(worst, float(difference.abs().max())), mine.stop
    return worst if not found.isnan().any() else float("nan")


CASES = [
    {"heads": (8, 2), "size": 128, "page": 16, "window": 0, "sinks": False},
    {"heads": (8, 1), "size": 64, "page": 16, "window": 128, "sinks": True},
    {"heads": (8, 1), "size": 64, "page": 128, "window": 100, "sinks": True},
    {"heads": (4, 4), "size": 128, "page": 128, "window": 0, "sinks": True},
    {"heads": (16, 2), "size": 256, "page": 16, "window": 0, "sinks": False},
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_the_library_is_given(case, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules["flash_attn.cute.interface"], "_flash_attn_fwd", library, raising=False)
    assert error("cpu", torch.float32, **case) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_library(case, dtype: torch.dtype) -> None:
    if PACKAGE.lacking():
        pytest.skip(f"{PACKAGE.lacking()}: {PACKAGE.install}")
    assert error("cuda", dtype, **case) < 2e-2


def of_made_keys(q, k, v, *, softmax_scale, causal, return_lse) -> tuple[Tensor, Tensor]:
    """As `_flash_attn_fwd` says of itself, of tensors [B, T, H, D]."""
    assert return_lse
    scores = torch.einsum("bthd,blhd->bhtl", q, k) * softmax_scale
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
    return torch.einsum("bhtl,blhd->bthd", scores.softmax(-1), v), scores.logsumexp(-1)


def latent_error(device: str, dtype: torch.dtype, *, heads: int, nope: int, value: int, prefix: int) -> float:
    """The largest difference in the latent attention of a chunk of several spans."""
    draw, length = torch.Generator().manual_seed(nope), prefix + 1500
    spec = AttentionSpec.latent(num_heads=heads, nope_dim=nope, rope_dim=64, value_dim=value, latent_dim=512)
    (group,), pages = cache_groups([spec]), -(-length // 16)
    made = TritonLatent if device == "cuda" else LatentAttention
    paged = made(
        group, num_pages=pages, page_size=16, max_running=1, max_context=length, dtype=dtype,
        device=torch.device(device), chosen=Chosen(backend="triton", prompts="flash-attn-4"),
    )  # fmt: skip
    request = Sequence(0, [GroupPages(pages=torch.randperm(pages, generator=draw).tolist(), freed=0)])

    def drawn(*size: int, spread: float = 1.0) -> Tensor:
        return (torch.randn(size, generator=draw) * spread).to(device, dtype)

    up = UpProjection(drawn(heads, nope + value, 512, spread=0.04), nope)
    q, latent = drawn(length, heads, nope + 64), drawn(length, 576)
    for start, end in ((0, prefix), (prefix, length)):
        if start < end:
            step = paged.laid_out([], [Span(request, start, end)])
            found = step.latent(0, q[start:end], latent[start:end], up)
    k, v = UpProjection(up.weight_HXL.double(), nope).expand(latent.double())
    scores = q[prefix:].double().transpose(0, 1) @ k.transpose(1, 2) * spec.scale
    hidden = torch.ones(length, length, device=device).triu(1).bool()[prefix:]
    wanted = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v
    return float((found.transpose(0, 1).double() - wanted).abs().max())


LATENTS = [  # of DeepSeek-V3, and of GLM-4.7-Flash
    {"heads": 4, "nope": 128, "value": 128, "prefix": 0},
    {"heads": 4, "nope": 128, "value": 128, "prefix": 1100},
    {"heads": 3, "nope": 192, "value": 256, "prefix": 300},
]


@pytest.mark.parametrize("case", LATENTS, ids=str)
def test_keys_and_values_that_latent_attention_makes(case, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []

    def noted(q, k, v, **options):
        calls.append((q.shape[1], k.shape[1]))
        return of_made_keys(q, k, v, **options)

    for name in ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules["flash_attn.cute.interface"], "_flash_attn_fwd", noted, raising=False)
    assert latent_error("cpu", torch.float32, **case) < 1e-4
    assert {(1024, 1024), (476, 1024), (476, 476)} <= set(calls)  # spans of the chunk's own tokens
    assert (1500, min(1024, case["prefix"])) in calls or not case["prefix"]


@pytest.mark.gpu
@pytest.mark.parametrize("case", LATENTS, ids=str)
def test_the_library_with_keys_and_values_that_latent_attention_makes(case) -> None:
    if PACKAGE.lacking():
        pytest.skip(f"{PACKAGE.lacking()}: {PACKAGE.install}")
    assert latent_error("cuda", torch.bfloat16, **case) < 3e-2


def test_short_prompts_stay_with_our_kernels() -> None:
    chosen = Chosen(backend="triton", prompts="flash-attn-4", prompt_tokens=512)
    assert chosen.takes_prompts([1000])
    assert chosen.takes_prompts([1000, 100])
    assert not chosen.takes_prompts([1000, 100, 100])
    assert not chosen.takes_prompts([])
    assert not Chosen(backend="triton", prompts="triton").takes_prompts([1000])
