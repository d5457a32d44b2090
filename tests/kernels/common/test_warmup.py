"""First prompts need every variant of the kernels outside the experts that any step does: Triton's own binder
says which those are. Nothing is launched.

Tensors lie where a step's do: what is sent to the device in one transfer begins anywhere in it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from tests.kernels.bound import bound
from tools.dense_fp8 import MATRICES
from turnout import kernels
from turnout.attention.paged import pack_together, unpacked
from turnout.engine.warmup import prompt_sizes
from turnout.kernels.attention import (
    compressed,
    decode,
    decode_heads,
    delta_prompt,
    delta_rule,
    index,
    latent,
    latent_heads,
    latent_prefill,
    prefill,
    prefill_specialised,
)
from turnout.kernels.common import (
    best_token,
    few_rows,
    fp8_weights,
    gated_row,
    latent_rows,
    normed_row,
    pack,
    route,
    row_gemm,
    rows,
    split_gemm,
    streams,
    token_mask,
    top_p,
    turned,
)
from turnout.kernels.hopper import dense_fp8, dense_rows
from turnout.models import dense

MOST, RUNNING = 4096, 256
BF16, HQ, HKV, D, PAGE, H, E = torch.bfloat16, 32, 4, 128, 16, 2048, 128
CACHE = torch.empty(HKV, 64 * PAGE, 2, D, dtype=BF16)
LATENTS = torch.empty(64 * PAGE, 576, dtype=BF16)
GLOBAL = torch.ones(())
KEY_HEADS, STATE_HEADS = 16, 32  # of recurrent layers
CHANNELS = (2 * KEY_HEADS + STATE_HEADS) * D
GAIN, COUNTS = torch.empty(H, dtype=BF16), torch.empty(E, dtype=torch.int64)


def b16(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=BF16)


CELL = b16(4, CHANNELS), torch.empty(STATE_HEADS), torch.empty(STATE_HEADS), b16(D)


def to_parts(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Where these lie on the device, as `attention.paged.to_device` sends them."""
    packed = pack_together(tensors)
    return unpacked(packed, tensors)


def sent(size: int) -> list[Tensor]:
    """Positions, slots, pages, owners and tiles of a prompt of so many tokens, one behind the other as
    `attention.paged.to_device` sends them."""
    places, pages = torch.arange(size), torch.zeros(1, -(-size // PAGE), dtype=torch.int64)
    parts = [places, places, pages, places, prefill.tiles([(0, 0, size, 0)], prefill.tile_tokens(HQ // HKV))]
    return to_parts(parts)


def norm(size: int) -> None:
    rows.norm(b16(size, H), GAIN, 1e-6)
    rows.norm(b16(size, H), GAIN, 1e-6, b16(size, H))
    rows.norm(b16(size, H), GAIN, 1e-6, torch.empty(4, size, H))
    rows.norm(b16(size, H), GAIN, 1e-6, b16(size, 8, H).transpose(0, 1))


def rotate(size: int) -> None:
    heads, turns = b16(size, (HQ + 2 * HKV) * D), b16(size, D)
    slots = sent(size)[1]
    rows.rotate(heads, HQ, HKV, turns, turns, b16(2, D), 1e-6, store=(CACHE, slots))
    rows.rotate(heads, HQ, HKV, turns, turns, None, 1e-6)
    rows.angles(slots, *torch.empty(3, D).unbind(), BF16)


def sums(size: int) -> None:
    for bias in (GAIN, b16(size, H)):
        rows.add(torch.empty(4, size, H), bias, BF16)
    rows.gate(b16(size, 2 * H), BF16)
    for gate in (b16(size, H), torch.empty(4, size, H)):
        rows.gated(b16(size, H), gate)


def routing(size: int) -> None:
    real = torch.ones(size, dtype=torch.bool)
    for logits in (b16(size, E), torch.empty(8, size, E)):
        some = {"renormalize": True, "scaling": 1.0, "real_T": real, "counts_E": COUNTS}
        route.choose(logits, 8, of_all=False, **some)
        route.choose_sigmoid(logits, 8, bias_E=torch.empty(E), groups=8, kept=4, **some)
        table, tokens = torch.empty(9, 8, dtype=torch.int32), torch.zeros(size, dtype=torch.int64)
        route.choose_of_token(logits, 8, table_VK=table, token_ids_T=tokens, **some)


def low_ranks(size: int) -> None:
    turns = b16(size, 64)
    latent_rows.latents(b16(size, 1536 + 576), b16(1536), b16(512), turns, turns, 1e-6)
    latent_rows.rotated(b16(size, 16 * 192), 16, 192, turns, turns)


def products(size: int) -> None:
    row_gemm.linear(b16(size, H), b16(768, H), None)
    split_gemm.parts(b16(size, H), b16(E, H))
    split_gemm.parts(b16(size, H), b16(4 * H, H))
    split_gemm.parts(b16(size, H), torch.empty(E, H))
    if dense_rows.LEAST_ROWS <= size <= dense_rows.MOST_ROWS:
        out = dense_rows.parts(b16(size, 2 * H), b16(H, 2 * H))
        rows.norm(b16(size, H), GAIN, 1e-6, out)
        heads = dense_rows.parts(b16(size, H), b16((HQ + 2 * HKV) * D, H))
        turns, slots = b16(size, D), sent(size)[1]
        rows.rotate(heads, HQ, HKV, turns, turns, b16(2, D), 1e-6, store=(CACHE, slots))


def connections(size: int) -> None:
    """Of several residual streams."""
    fn, base, scale = torch.empty(24, 4 * H), torch.empty(24), torch.empty(3)
    eps = {"eps": 1e-6, "norm_eps": 1e-6, "gain_eps": 1e-6}
    for y in (b16(size, H), torch.empty(8, size, H)):
        added = torch.empty(size, 4), y
        streams.connect(b16(size, 4, H), added, fn, base, scale, GAIN, iterations=20, **eps)
        streams.connect_last(b16(size, 4, H), added, fn[:4], base, scale, GAIN, **eps)


def divided(size: int) -> None:
    """What the products of compressed attention give."""
    turns, sizes = b16(size, 64), (1024, 512, 2560, 64)
    for x in (b16(size, sum(sizes)), torch.empty(8, size, sum(sizes))):
        turned.divide(x, sizes, b16(1024), b16(512), turns, turns, scale=0.1, eps=1e-6)
    for x in (b16(size, 64, 512), torch.empty(1, size, 64, 512), torch.empty(4, size, 64, 512)):
        turned.turn(x, turns, turns, weight_D=b16(512), eps=1e-6)
        turned.turn(x, turns, turns, back=True)


def fp8_products(size: int) -> None:
    """Of matrices that stay in FP8, such as attention's."""
    scales, group = torch.empty(H // 128, 4 * H), 128
    weight = torch.empty(4 * H, H, dtype=torch.float8_e4m3fn)
    if size <= few_rows.MOST_ROWS:
        for more in (None, b16(16, H)):
            few_rows.parts(b16(size, H), weight, scales, None, more)
    row_gemm.linear(b16(size, H), weight, None, scale_GM=scales, group=group)
    row_gemm.parts(b16(size, H), weight, scales, group)
    split_gemm.parts(b16(size, H), weight, scale_GM=scales, group=group)
    fp8_weights.decode(weight, scales, group, BF16)


def fp8_matrices(size: int) -> None:
    """As models multiply by those that were measured, next to what adds up the parts."""
    with patch.object(dense_fp8, "runs", lambda *_: True):
        for outputs, inputs in MATRICES.values():
            data = torch.empty(outputs, inputs, dtype=torch.float8_e4m3fn)
            weight = dense.Fp8Weight(data, torch.empty(inputs // 128, outputs), 128)
            parts = dense._parts(b16(size, inputs), weight, None)
            if parts is not None:
                rows.add(parts, None, BF16)
                rows.gate(parts, BF16)
                rows.norm(b16(size, outputs), b16(outputs), 1e-6, parts)


def connected_products(size: int) -> None:
    """What attention of DeepSeek-V4 gives, in parts, added to its residual streams."""
    outputs, inputs = MATRICES["v4 o_b"]
    fn, base, scale = torch.empty(24, 4 * outputs), torch.empty(24), torch.empty(3)
    data = torch.empty(outputs, inputs, dtype=torch.float8_e4m3fn)
    weight = dense.Fp8Weight(data, torch.empty(inputs // 128, outputs), 128)
    with patch.object(dense_fp8, "runs", lambda *_: True):
        parts = dense._parts(b16(size, inputs), weight, None)
    streams.connect(
        b16(size, 4, outputs), (torch.empty(size, 4), b16(size, outputs) if parts is None else parts),
        fn, base, scale, b16(outputs), iterations=20, eps=1e-6, norm_eps=1e-6, gain_eps=1e-6,
    )  # fmt: skip


def wire(size: int) -> None:
    """Rows for other ranks, and the sums of what comes back."""
    ids, weights = torch.empty(size, 8, dtype=torch.int32), torch.empty(size, 8)
    for places, format in (((512, 516), "bf16"), ((256, 264, 268), "fp8"), ((128, 144, 148), "nvfp4")):
        out = torch.empty(size, places[-1] + 4, dtype=torch.int64)
        for source in (None, torch.zeros(size, dtype=torch.int64)):
            pack.pack(
                b16(size, H), ids, weights, out, places, format=format, global_scale=GLOBAL, source_R=source
            )
    pack.sum_rows(
        b16(size, H), torch.zeros(size, dtype=torch.int64), torch.zeros(size + 1, dtype=torch.int64)
    )
    pack.sum_parts(b16(2, size, H))


def states(size: int) -> None:
    """Of a step in which so many requests of a recurrent model decode, as `attention.states` sends them."""
    size = min(size, RUNNING)
    _, _, slots, starts = torch.zeros(4, size, dtype=torch.int64)
    done = torch.zeros(delta_rule.FEW * KEY_HEADS, dtype=torch.int32)
    mixed = b16(size, CHANNELS + STATE_HEADS * D + 2 * STATE_HEADS)
    parts = [torch.empty(4, *mixed.shape)] if size <= delta_rule.FEW else []
    for x in (mixed, *parts):
        held = b16(4, 3, CHANNELS), torch.empty(4, STATE_HEADS, D, D), *CELL, 1e-6
        delta_rule.step(x, slots, starts + 0, *held, done)


def state_prompts(size: int) -> None:
    """Of a prompt of so many tokens of a recurrent model."""
    mixed = b16(size, CHANNELS + STATE_HEADS * D + 2 * STATE_HEADS)
    delta_prompt.advance(mixed, b16(3, CHANNELS), torch.empty(STATE_HEADS, D, D), *CELL, 1e-6)


def index_scores(size: int) -> None:
    """Of a step in which so many tokens choose what they attend to, by pages of up to so many tokens, and of
    a chunk whose tokens do, by the slots of a context."""
    keys = b16(64 * PAGE, 128)

    def choose(count: int, table: Tensor, page: int) -> None:
        ends = torch.zeros(count, dtype=torch.int64)
        scores = index.scores(b16(count, 64, 128), torch.empty(count, 64), keys, table, ends, page_size=page)
        index.chosen(scores, table, ends, 2048, page_size=page)

    count, pages = min(size, RUNNING), -(-size // PAGE)
    choose(count, torch.zeros(count, pages, dtype=torch.int64), PAGE)
    slots = to_parts([torch.zeros(size, dtype=torch.int64)] * 2)[1]
    for count in {min(size, 512), (size - 1) % 512 + 1}:
        choose(count, slots.expand(count, size), 1)


def compressed_attention(size: int) -> None:
    """Of DeepSeek-V4: of a step in which so many tokens decode, and of a prompt of as many."""
    compressed_rows(min(size, RUNNING))
    compressed_prompt(size)


def compressed_attention_on_hopper(size: int) -> None:
    with patch.object(compressed, "can_specialise", lambda *_: True):
        compressed_attention(size)


def compressed_rows(size: int) -> None:
    kv, raw, turns = b16(size, 512), b16(size, 2560), b16(size, 64)
    recent, open, cache = b16(RUNNING, 128, 512), b16(RUNNING, 8, 2560), b16(4096, 640)
    ends, states, counts = torch.zeros(3, size, dtype=torch.int64)
    ends, states, counts = ends + 0, states + 0, counts + 0
    table = torch.zeros(size, 48, dtype=torch.int64)
    compressed.keep(kv, raw, ends, states, recent, open)
    compressed.keep(kv, None, ends, states, recent, b16(RUNNING, 0, 0))
    compressed.make_entries(
        open, ends, states, table, cache, b16(4, 1024), b16(512), turns, turns,
        series=2, page=4, at=0, to=0, eps=1e-6,
    )  # fmt: skip
    chosen = torch.zeros(size, 512, dtype=torch.int32)
    for of, page, longest in ((table, 4, 192), (chosen, 1, 512)):
        compressed.attend(
            b16(size, 64, 512), recent, ends, states, cache, of, counts, torch.empty(64),
            seen=128, page=page, longest=longest, scale=0.1, processors=132,
        )  # fmt: skip


def compressed_prompt(size: int) -> None:
    """Of the first and the last 512 or fewer of so many tokens, which choose 512 of more entries."""
    cache = b16(4096, 640)
    for rate in (4, 128):
        entries = size // rate
        slots = to_parts([torch.zeros(entries, dtype=torch.int64)] * 2)[1]
        for count in {min(size, 512), (size - 1) % 512 + 1}:
            ends, table = torch.zeros(count, dtype=torch.int64), slots.expand(count, entries)
            if rate == 4 and entries > 512:
                table = torch.zeros(count, 512, dtype=torch.int32)
            compressed.attend(
                b16(count, 64, 512), b16(128 + size, 512), ends, None, cache, table, ends, torch.empty(64),
                seen=128, page=1, longest=table.shape[1], scale=0.1, processors=132, first=size - 128,
            )  # fmt: skip


def latent_prompts(size: int) -> None:
    """Of DeepSeek-V3's sizes, and of GLM-4.7-Flash's."""
    for nope, rope, values, heads in ((128, 64, 128, 128), (192, 64, 256, 20)):
        sizes = latent_prefill.tiles_for(values, 2)
        parts = latent_prefill.key_parts(nope, rope, values)
        assert parts is not None
        latent_prefill.attend(
            b16(size, heads, nope + rope), b16(size, heads, nope + values), b16(size, 512 + rope),
            prefill.tiles([(0, 0, size, 0)], sizes.rows), b16(size, heads, values),
            scale=0.1, parts=parts, sizes=sizes,
        )  # fmt: skip


def prompt_attention(size: int) -> None:
    _, _, pages, _, tiles = sent(size)
    q = b16(size, HQ, D)
    given = q, CACHE, tiles, pages, torch.empty_like(q)
    prefill.attend(*given, page_size=PAGE, scale=0.1)
    prefill_specialised.attend(*given, page_size=PAGE, scale=0.1, processors=132)


def row_attention(size: int) -> None:
    """Of a step in which so many tokens decode."""
    size = min(size, RUNNING)
    table, ends = torch.zeros(size, 40, dtype=torch.int64), torch.zeros(size, dtype=torch.int64)
    for processors in (132, 78):
        for kv, dim in ((4, 128), (3, 128), (8, 64)):
            cache = b16(kv, 64 * PAGE, 2, dim)
            cut = decode.cut_of(size, kv, dim, 2, 4096, 0, processors)
            decode.attend(b16(size, 8 * kv, dim), cache, table, ends, page_size=PAGE, cut=cut, scale=0.1)
            of_rows = torch.empty(4, size, 10 * kv * dim), 8 * kv, kv, b16(size, dim), b16(size, dim)
            heads = *of_rows, b16(9 * kv, dim), 1e-6
            slots = torch.zeros(size, dtype=torch.int64)
            programs = decode_heads.programs_of(cut, size, kv, dim, 2, 0, processors)
            if programs is not None:
                some = {"page_size": PAGE, "programs": programs, "scale": 0.1}
                decode_heads.attend(*heads, cache, slots, table, ends, **some)
        splits = decode.cut_of(size, HKV, D, 2, 4096, 0, processors).splits
        sizes = {"latent_dim": 512, "page_size": PAGE, "splits": splits, "scale": 0.1}
        latent.attend(b16(size, 16, 576), LATENTS, table, ends, **sizes)
    with patch.object(latent, "can_specialise", lambda *_: True):
        for heads in (20, 128):
            sizes["splits"] = latent.spans(size, heads, 4096, 132)
            latent.attend(b16(size, heads, 576), LATENTS, table, ends, **sizes)
    slots = torch.zeros(size, dtype=torch.int64)
    for heads, nope, value in ((16, 128, 128), (128, 128, 128), (20, 192, 256)):
        for kept in ((b16(size, 576), slots, LATENTS), None):
            latent_heads.absorbed(b16(size, heads, nope + 64), b16(heads, nope, 512), kept)
        if size <= latent_heads.MOST_OF_VALUES:
            latent_heads.values(b16(size, heads, 512), b16(heads, value, 512))


def windowed_attention(size: int) -> None:
    """With sinks, of layers that see the last 128 tokens."""
    some: dict[str, Any] = {"page_size": PAGE, "scale": 0.1, "window": 128, "sinks_H": torch.empty(HQ)}
    _, _, pages, _, tiles = sent(size)
    q = b16(size, HQ, D)
    prefill.attend(q, CACHE, tiles, pages, torch.empty_like(q), **some)
    size = min(size, RUNNING)
    table, ends = torch.zeros(size, 40, dtype=torch.int64), torch.zeros(size, dtype=torch.int64)
    for kv, dim in ((HKV, D), (8, 64)):
        cut, cache = decode.cut_of(size, kv, dim, 2, 4096, 128, 132), b16(kv, 64 * PAGE, 2, dim)
        decode.attend(b16(size, HQ, dim), cache, table, ends, cut=cut, **some)


def chosen_attention(size: int) -> None:
    """Over the 2048 slots that each token of a step or of a chunk chose."""
    slots, ends = torch.zeros(size, 2048, dtype=torch.int32), torch.zeros(size, dtype=torch.int64)
    splits = latent.spans(size, 16, 2048, 132)
    sizes = {"latent_dim": 512, "page_size": 1, "splits": splits, "scale": 0.1}
    latent.attend(b16(size, 16, 576), LATENTS, slots, ends, **sizes)


def best_tokens(size: int) -> None:
    """Of decode graphs, whose logits are kept."""
    size = min(size, RUNNING)
    best_token.widen_and_choose(b16(size, 151_936), torch.empty(size, 151_936))


def grammar_masks(size: int) -> None:
    size = min(size, RUNNING)
    token_mask.forbid_tokens(torch.empty(size, 5000), torch.empty(size, 157, dtype=torch.int32))


def draws_by_top_p(size: int) -> None:
    size = min(size, RUNNING)
    of_rows = torch.empty(size), torch.empty(size, dtype=torch.float64), torch.zeros(size, dtype=torch.int64)
    top_p.draw_top_p(
        torch.empty(size, 5000), torch.empty(size, dtype=torch.bool), of_rows[1], of_rows[0], *of_rows[1:]
    )


def normed_products(size: int) -> None:
    """Of a step of one token."""
    for delta in (None, b16(size, H), b16(4, size, H)):
        for outputs in (E, 2 * H):  # of whole rows of weights, and of pieces
            normed_row.normed_parts(b16(size, H), delta, GAIN, 1e-6, b16(outputs, H))
    for x, token in ((b16(size, 1024), b16(size, 1)), (torch.empty(4, size, 1024), torch.empty(4, size, 1))):
        gated_row.gated_parts(x[..., :1, :], token[..., :1, :], b16(H, 512), b16(1, H))


PARTS = (
    norm, rotate, sums, routing, low_ranks, products, connections, divided, fp8_products, fp8_matrices,
    connected_products, wire, states, state_prompts, index_scores, compressed_attention,
    compressed_attention_on_hopper, latent_prompts, prompt_attention, row_attention, windowed_attention,
    chosen_attention, grammar_masks, draws_by_top_p, normed_products, best_tokens,
)  # fmt: skip


WITH_STREAMS = (connections, connected_products)  # of models with several residual streams


@pytest.mark.parametrize("part", PARTS)
def test_no_step_needs_what_first_prompts_did_not(part: Callable[[int], None]):
    def keys(size: int) -> set[tuple[str, str]]:
        with bound() as found:
            part(size)
        return found

    sizes = prompt_sizes(MOST, residual_streams=4 if part in WITH_STREAMS else 1)
    warmed = set().union(*map(keys, sizes))
    assert warmed
    for size in (*range(1, 300), *range(300, MOST, 97), 513, 1537, 3089, MOST):
        missing = keys(size) - warmed
        assert not missing, f"{size} tokens need {[name for name, _ in missing]}"


def test_every_kernel_that_is_launched_is_among_these():
    """But those of experts (tests/moe/backends/hopper/test_warmup.py) and of exchanges between GPUs, which
    compile theirs themselves (turnout/moe/backends/nvlink/warmup.py)."""
    text = "\n".join(path.read_text() for path in Path(kernels.__path__[0]).rglob("*.py"))
    launched = set(re.findall(r"^ +(\w+)\[.*\]\(", text, re.MULTILINE))
    found = set()
    for folder in ("attention", "common"):
        package = import_module(f"turnout.kernels.{folder}")
        for module in iter_modules(package.__path__):
            for name, value in vars(import_module(f"{package.__name__}.{module.name}")).items():
                if isinstance(value, JITFunction) and name in launched:
                    found.add(value.fn.__name__)
    found |= {k.fn.__name__ for k in (dense_fp8.multiply_rows_specialised, dense_rows.multiply_some_rows)}
    with bound() as called:
        for part in PARTS:
            for size in (1, 2, 64, MOST):
                part(size)
    assert len(found) > 30
    assert {name for name, _ in called} == found
