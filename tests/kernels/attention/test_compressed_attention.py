"""Compressed attention's kernels in Triton's interpreter, against transformers' model; and on a GPU, at real
sizes, against torch."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels import interpreted
from tests.kernels.compiled import compiled, machine_code
from turnout.attention.backends.triton.compressed import TritonCompressed
from turnout.attention.compressed import CompressedAttention
from turnout.attention.entries import Compressible, Compressor
from turnout.attention.kinds import CompressedSpec, cache_groups
from turnout.kernels.attention import compressed
from turnout.kernels.attention.latent import Tiles
from turnout.models.blocks import Norm, RotaryEmbedding
from turnout.models.compressed_attention import TurnAt
from turnout.models.rope import Rope

FLASH = {
    "num_heads": 64,
    "num_kv_heads": 1,
    "head_dim": 512,
    "value_dim": 512,
    "scale": 512**-0.5,
    "sinks": True,
}
FLASH |= {"rope_dim": 64, "recent": 128, "output_groups": 8}
INDEX = {"rate": 4, "overlap": True, "index_heads": 64, "index_dim": 128, "index_topk": 512}


RESULTS = cache(partial(interpreted.printed, "tests.kernels.attention.compressed_in_interpreter"))
CASES = ["choose", "choose-near", "choose-ties", "chunks-window", "chunks-chosen", "chunks-whole"]
STEPS = ["steps", "steps-page-of-windows", "steps-page-in-windows", "steps-whole"]


@pytest.mark.parametrize("case", CASES)
def test_interpreted(case: str):
    assert RESULTS()[case]


@pytest.mark.more
@pytest.mark.parametrize("case", STEPS)
def test_steps_of_a_model_interpreted(case: str):
    assert RESULTS("steps")[case]


def test_attention_compiles_for_hopper():
    """With the tiles that few rows have, within the memory of a multiprocessor."""
    from turnout.kernels.attention.compressed import PLAIN, attend_compressed_span

    halves = dict.fromkeys(("q_ptr", "recent_ptr", "cache_ptr"), "*bf16")
    whole = {"ends_ptr": "*i64", "states_ptr": "*i64", "table_ptr": "*i32", "counts_ptr": "*i32"}
    constants = {
        "RECENT": 128,
        "HB": PLAIN.heads,
        "DP": 512,
        "PAGE": 1,
        "TOKENS": PLAIN.tokens,
        "PDL": True,
    }
    constants |= {"scale": 0.06, "RING": True}
    compiled(attend_compressed_span, constants, warps=PLAIN.warps, multiples=("D", "Y"), **halves, **whole)


@pytest.mark.parametrize(("ring", "page", "whole"), [(True, 1, True), (True, 16, False), (False, 1, True)])
def test_specialised_attention_compiles_for_hopper(ring: bool, page: int, whole: bool, tmp_path: Path):
    from turnout.kernels.attention.compressed_specialised import attend_compressed_span_specialised
    from turnout.kernels.attention.specialised_spans import STAGES

    halves = dict.fromkeys(("q_ptr", "recent_ptr", "cache_ptr", "partial_ptr"), "*bf16")
    whole_numbers = {"ends_ptr": "*i64", "states_ptr": "*i64", "table_ptr": "*i32", "counts_ptr": "*i32"}
    constants = {"RING": ring, "RECENT": 128, "PAGE": page, "WHOLE": whole, "STAGES": STAGES, "PDL": True}
    constants |= {"scale": 0.06}
    done = compiled(
        attend_compressed_span_specialised,
        constants,
        warps=4,
        multiples=("Y", "H"),
        **halves,
        **whole_numbers,
    )
    instructions, needs = machine_code(done, tmp_path)
    assert "HGMMA.64x64x16" in instructions
    assert "HGMMA.64x256x16" in instructions
    assert "STACK:0" in needs  # nothing is spilt


def test_choice_compiles_for_hopper():
    from turnout.kernels.attention.index import RANKED, choose_places

    integers = {"table_ptr": "*i64", "ends_ptr": "*i64", "out_ptr": "*i32", "counts_ptr": "*i32"}
    compiled(choose_places, {"PAGE": 16, "BLOCK": RANKED, "PDL": True}, warps=8, multiples=(), **integers)


class Layer:
    """What one layer brings to a step of N tokens, of values as a model's, and the caches of a group full of
    noise."""

    def __init__(self, rate: dict[str, Any], N: int, device: torch.device):
        self.spec = spec = CompressedSpec(**FLASH, **rate)
        self.device, self.N = device, N
        rope = Rope(
            head_dim=64,
            rotary_dim=64,
            theta=160000.0,
            max_positions=10**6,
            adjust=lambda plain: plain,
            scaling=1.0,
            latent_scaling=1.0,
            interleaved=True,
        )
        turn = TurnAt(RotaryEmbedding(rope, device=device, dtype=torch.bfloat16))

        def maker(dim: int) -> Compressor:
            weight = 1 + self.drawn(dim) / 4
            return Compressor(
                spec=spec,
                bias_RX=self.drawn(spec.rate, spec.series * dim),
                norm=Norm(weight, 1e-6),
                turn=turn,
            )

        self.rest = None
        if spec.rate:
            self.rest = Compressible(raw_NX=self.drawn(N, spec.open_dim), entries=maker(512))
        if spec.index_heads:
            self.rest = Compressible(
                raw_NX=self.drawn(N, spec.open_dim),
                entries=maker(512),
                index_entries=maker(128),
                index_queries=self.drawn(N, 64, 128),
                index_weights=self.drawn(N, 64).float() * (64 * 128) ** -0.5,
            )
        self.q, self.kv, self.sinks = self.drawn(N, 64, 512), self.drawn(N, 512), self.drawn(64).float()

    def drawn(self, *size: int) -> Tensor:
        return torch.randn(*size, device=self.device).bfloat16()

    def paged(
        self, make: type[CompressedAttention], requests: int, pages: int
    ) -> tuple[CompressedAttention, list[Any]]:
        """Caches full of noise, and requests that own so many pages each."""
        torch.manual_seed(1)
        (group,) = cache_groups([self.spec])
        sizes = {"num_pages": requests * pages, "page_size": 16, "max_running": requests}
        made = make(group, **sizes, max_context=pages * 16, device=self.device, dtype=torch.bfloat16)
        for kept in (made._cache, made._recent, made._open):
            kept.normal_()
        owned = [range(row, requests * pages, requests) for row in range(requests)]
        return made, [
            SimpleNamespace(row=row, kv=[SimpleNamespace(pages=list(p), placed=0)], state_slots=[row])
            for row, p in enumerate(owned)
        ]


def chunk(request: Any, start: int, end: int) -> Any:
    return SimpleNamespace(request=request, start=start, end=end, length=end - start)


def assert_alike(kernels: CompressedAttention, reference: CompressedAttention) -> None:
    for name in ("_recent", "_open", "_cache"):
        ours, theirs = getattr(kernels, name), getattr(reference, name)
        torch.testing.assert_close(ours, theirs, rtol=3e-2, atol=3e-2)


TILES = [pytest.param(compressed.PLAIN, id="plain"), pytest.param(compressed.SPECIALISED, id="specialised")]
RATES = pytest.mark.parametrize("rate", [{}, INDEX, {"rate": 128}], ids=["window", "rate-4", "rate-128"])


@pytest.mark.gpu
@RATES
@pytest.mark.parametrize("tiles", TILES)
def test_rows_on_a_gpu(rate: dict[str, Any], tiles: Tiles, monkeypatch: pytest.MonkeyPatch):
    """A step of single tokens as a graph has it, and what it leaves, against torch's blocks, at the sizes of
    DeepSeek-V4-Flash: contexts with no entries, with few, with more than are chosen, some of whose windows
    end."""
    monkeypatch.setattr(compressed, "tiles_for", lambda *_, **__: tiles)
    starts = [0, 2, 127, 128, 3000, 5119, 8191, 8190]
    N, pages = len(starts), 513
    torch.manual_seed(0)
    layer = Layer(rate, N, torch.device("cuda"))
    given = layer.q, layer.kv, layer.sinks, layer.rest
    reference, requests = layer.paged(CompressedAttention, N, pages)
    chunks = [chunk(request, s, s + 1) for request, s in zip(requests, starts, strict=True)]
    wanted = reference.laid_out(chunks, []).compressed(0, *given)
    kernels, requests = layer.paged(TritonCompressed, N, pages)
    chunks = [chunk(request, s, s + 1) for request, s in zip(requests, starts, strict=True)]
    slots = torch.tensor(kernels.place_singles(chunks), device="cuda")
    rows, at = (torch.tensor(x, device="cuda") for x in (list(range(N)), starts))
    kernels.table[rows, at // 16] = slots // 16
    found = kernels.rows(slots, kernels.table[rows], at + 1, rows).compressed(0, *given)
    torch.testing.assert_close(found, wanted, rtol=3e-2, atol=3e-2)
    assert_alike(kernels, reference)


@pytest.mark.gpu
@RATES
@pytest.mark.parametrize(("start", "length"), [(0, 700), (3001, 700), (3001, 530)])
@pytest.mark.parametrize("tiles", TILES)
def test_chunks_on_a_gpu(
    rate: dict[str, Any], start: int, length: int, tiles: Tiles, monkeypatch: pytest.MonkeyPatch
):
    """Of a prompt, and what they leave, against torch; 512 tokens at a time."""
    monkeypatch.setattr(compressed, "tiles_for", lambda *_, **__: tiles)
    torch.manual_seed(0)
    layer, found = Layer(rate, length, torch.device("cuda")), []
    made = [layer.paged(make, 1, 300) for make in (CompressedAttention, TritonCompressed)]
    for paged, (request,) in made:
        step = paged.laid_out([], [chunk(request, start, start + length)])
        found.append(step.compressed(0, layer.q, layer.kv, layer.sinks, layer.rest))
    torch.testing.assert_close(found[1], found[0], rtol=3e-2, atol=3e-2)
    assert_alike(made[1][0], made[0][0])


@pytest.mark.gpu
@pytest.mark.parametrize("ties", [False, True])
def test_choice_on_a_gpu(ties: bool):
    """Of 2048 among up to 40,000, as torch chooses."""
    from turnout.attention.indexing import largest, places
    from turnout.kernels.attention.index import chosen

    torch.manual_seed(0)
    scores, table = torch.randn(6, 2500 * 16).cuda(), torch.randperm(6 * 2500).view(6, 2500).cuda()
    scores = scores.round() if ties else scores
    ends = torch.tensor([0, 3, 2048, 2049, 32768, 40000]).cuda()
    found, counts = chosen(scores, table, ends, 2048, page_size=16)
    at = places(largest(scores, torch.arange(40000).cuda() < ends[:, None], 2048), 2048)
    wanted = torch.where(at < 0, -1, table.gather(1, at.clamp(min=0) // 16) * 16 + at % 16)
    assert torch.equal(found.long(), wanted)
    assert torch.equal(counts.long(), (wanted >= 0).sum(1))
