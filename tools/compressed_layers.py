"""Whether DeepSeek-V4-Flash's own kernels of a decode step are right on this GPU, and what their tiles take.

    python -m tools.compressed_layers --output benchmarks/results/compressed-layers-DEVICE-DATE.json

In CUDA graphs, at a context of 8,192 tokens, next to the time of their bytes at the rate of a copy: attention
of each kind of layer, by Tiles, its results compared with float32 products; the connections of the streams,
by Cut, compared with torch's composition; and the rotation of heads, and gates. Prompts are attention of
1,024 tokens of one sequence. Inputs are random, others each time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tools.command_line import parser_for
from tools.kernel_timing import BYTES_PER_S, PROCESSORS, compile_ahead, keep
from turnout.bench.timing import on_gpu
from turnout.kernels.attention import compressed
from turnout.kernels.attention.latent import Tiles
from turnout.kernels.common import rows, streams, turned
from turnout.models.blocks import Norm
from turnout.models.spec import StreamSpec
from turnout.models.streams import StreamWeights

HEADS, DIM, WINDOW, HIDDEN, STREAMS = 64, 512, 128, 4096, 4
CONTEXT, PROMPT = 8192, 1024
TOLERANCE = 2e-2  # of bfloat16 results of size 1
COPIES = 3  # of what is read, taken in turn
MANY = 32  # rows, from which on connections are cut up in several ways
KINDS = ("window", "chosen", "whole")
TILES = {
    "now": None,
    "plain": compressed.PLAIN,
    "specialised": compressed.SPECIALISED,
    "specialised, spans of 256": compressed.SPECIALISED._replace(shortest=256),
    "64 heads, 32 tokens": Tiles(64, 32, 8, 2, 1, shortest=64, narrow=True, parts=4),
}
CUTS = {
    f"{steps} steps, {blocks} blocks, {warps} and {mixing} warps": streams.Cut(steps, blocks, warps, mixing)
    for steps, warps in ((1, 4), (4, 4), (2, 4), (4, 2))
    for blocks, mixing in ((1, 4), (2, 4), (4, 4), (8, 4), (4, 8), (8, 8))
}
Call = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """Calls of one way, each with inputs of its own; and whether the first one's result is right."""

    what: str
    rows: int
    way: str
    calls: list[Call]
    nbytes: int
    error: Callable[[], float]


def attention(kind: str, count: int, way: str, seed: int) -> list[Case]:
    """kind: window, chosen (512 of the entries of 4 tokens), whole (entries of 128 tokens), and of a prompt
    "prompt" before it."""
    entries, page, channels = {"window": (0, 1, 512), "chosen": (512, 1, 640), "whole": (64, 1, 512)}[
        kind.removeprefix("prompt ")
    ]
    ring = not kind.startswith("prompt")
    generator = torch.Generator("cuda").manual_seed(seed)

    def drawn(*size: int) -> Tensor:
        return torch.randn(*size, device="cuda", generator=generator).bfloat16()

    made = []
    for _ in range(COPIES):
        total = max(1, count * entries) if ring else CONTEXT // 4
        cache, sinks = drawn(total, channels), drawn(HEADS).float()
        places = torch.rand(count, max(1, entries), device="cuda", generator=generator) * total
        ends = torch.full((count,), CONTEXT, device="cuda")
        states = torch.randperm(count, device="cuda", generator=generator)
        recent = drawn(count, WINDOW, DIM)
        if not ring:
            ends, recent = (
                torch.arange(1, count + 1, device="cuda") + CONTEXT - count,
                drawn(count + WINDOW, DIM),
            )
        counts = torch.full((count,), entries, device="cuda", dtype=torch.int32)
        made.append((drawn(count, HEADS, DIM), recent, ends, states, cache, places.int(), counts, sinks))
    fixed: dict[str, Any] = {"seen": WINDOW, "page": page, "longest": entries, "scale": DIM**-0.5}
    fixed |= {"processors": PROCESSORS, "first": 0 if ring else CONTEXT - count - WINDOW, "tiles": TILES[way]}

    def call(q: Tensor, recent: Tensor, ends: Tensor, states: Tensor, *rest: Tensor) -> Tensor:
        return compressed.attend(q, recent, ends, states if ring else None, *rest, **fixed)

    def error() -> float:
        q, recent, ends, states, cache, places, _, sinks = made[0]
        some = torch.arange(0, count, max(1, count // 32), device="cuda")
        if ring:
            near = recent[states[some]]
        else:
            at = ends[some, None] - WINDOW + torch.arange(WINDOW, device="cuda") - fixed["first"]
            near = recent[at]
        keys = torch.cat((near, cache[places[some].long()][:, :entries, :DIM]), 1).float()
        scores = torch.einsum("nhd,nkd->nhk", q[some].float(), keys) * DIM**-0.5
        weights = torch.cat((scores, sinks[None, :, None].expand(len(some), -1, 1)), 2).softmax(2)[..., :-1]
        wanted = torch.einsum("nhk,nkd->nhd", weights, keys)
        found = call(*made[0])[some].float()
        return float((found - wanted).abs().max() / wanted.square().mean().sqrt() / 4)

    nbytes = count * (2 * HEADS * DIM + (WINDOW + entries if ring else 0) * DIM) * 2
    return [Case(kind, count, way, [partial(call, *one) for one in made], nbytes, error)]


def connection(parts: int, count: int, way: str, seed: int) -> list[Case]:
    generator = torch.Generator("cuda").manual_seed(seed)

    def drawn(*size: int) -> Tensor:
        return torch.randn(*size, device="cuda", generator=generator)

    made = []
    for _ in range(COPIES):
        y = drawn(parts, count, HIDDEN) if parts > 1 else drawn(count, HIDDEN).bfloat16()
        weights = drawn(24, STREAMS * HIDDEN) / 128, drawn(24), torch.tensor([1.5, 0.7, 1.2], device="cuda")
        x, post = drawn(count, STREAMS, HIDDEN).bfloat16(), drawn(count, STREAMS).sigmoid()
        made.append((x, (post, y), *weights, drawn(HIDDEN).bfloat16()))
    fixed = {"iterations": 20, "eps": 1e-6, "norm_eps": 1e-6, "gain_eps": 1e-6}

    def error() -> float:
        x, (post, y), fn, base, scale, gain = made[0]
        spec = StreamSpec(count=STREAMS, iterations=20, eps=1e-6)
        ours = streams.connect(*made[0], cut=CUTS[way], **fixed)  # type: ignore[arg-type]
        plain = StreamWeights(spec=spec, fn=fn.cpu(), base=base.cpu(), scale=scale.cpu(), norm_eps=1e-6)
        added = post.cpu(), (y.sum(0) if parts > 1 else y).float().cpu()
        theirs = plain.of_sum(x.float().cpu(), added, Norm(gain.float().cpu(), 1e-6))
        return max(
            float((a.float().cpu() - b).abs().max() / b.square().mean().sqrt() / 4)
            for a, b in zip(ours, theirs, strict=True)
        )

    calls: list[Call] = [partial(streams.connect, *one, cut=CUTS[way], **fixed) for one in made]  # type: ignore[arg-type]
    nbytes = count * HIDDEN * (2 * STREAMS * 4 + 2 + 4 * parts) + 24 * STREAMS * HIDDEN * 4
    return [Case(f"connection of {parts} parts", count, way, calls, nbytes, error)]


def others(count: int) -> list[Case]:
    """Rotations and gates, which tests compare."""
    cos = torch.randn(count, 1, 64, device="cuda").bfloat16()
    heads = [torch.randn(2, count, HEADS, DIM, device="cuda") for _ in range(COPIES)]
    outputs = [torch.randn(count, HEADS, DIM, device="cuda").bfloat16() for _ in range(COPIES)]
    gates = [torch.randn(4, count, HIDDEN, device="cuda") for _ in range(COPIES)]
    gain = torch.ones(DIM, device="cuda").bfloat16()
    angles = cos[:, 0], cos[:, 0]

    def right() -> float:
        return 0.0

    return [
        Case(
            "queries of 2 parts, normed and turned", count, "now",
            [partial(turned.turn, x, *angles, weight_D=gain, eps=1e-6) for x in heads],
            count * HEADS * DIM * 10, right,
        ),
        Case(
            "outputs turned back", count, "now",
            [partial(turned.turn, x, *angles, back=True) for x in outputs],
            count * HEADS * DIM * 4, right,
        ),
        Case(
            "gates of 4 parts", count, "now",
            [partial(rows.gate, x, dtype=torch.bfloat16, limit=10.0) for x in gates],
            count * HIDDEN * 17, right,
        ),
    ]  # fmt: skip


def cases(counts: list[int], seed: int) -> list[Callable[[], list[Case]]]:
    """Made one after another, for the sake of memory."""
    found: list[Callable[[], list[Case]]] = []
    for count in counts:
        found += [partial(attention, kind, count, way, seed) for kind in KINDS for way in TILES]
        if count >= MANY:
            found += [partial(connection, parts, count, way, seed) for parts in (1, 2) for way in CUTS]
        found.append(partial(others, count))
    return found + [
        partial(attention, f"prompt {kind}", PROMPT, way, seed) for kind in KINDS for way in TILES
    ]


def launch_all(made: list[Callable[[], list[Case]]]) -> None:
    for make in made:
        for case in make():
            case.calls[0]()


def measure(case: Case) -> dict[str, Any]:
    wrong = case.error()
    row = {"what": case.what, "rows": case.rows, "way": case.way, "error": wrong}
    us = on_gpu(case.calls)[0] if wrong < TOLERANCE else float("inf")
    return row | {"us": us, "bytes_us": case.nbytes / BYTES_PER_S * 1e6}


def table(found: list[dict[str, Any]]) -> None:
    """Of each kernel and number of rows the fastest five ways, and the one that models take."""
    for what, count in dict.fromkeys((row["what"], row["rows"]) for row in found):
        ways = {row["way"]: row for row in found if (row["what"], row["rows"]) == (what, count)}
        now = next((way for way, cut in CUTS.items() if cut == streams.cut_of(count, HIDDEN)), "now")
        best = sorted(ways, key=lambda way: float(ways[way]["us"]))[:5]
        shown = list(dict.fromkeys([*best, *({now, "now"} & set(ways))]))
        line = " | ".join(f"{'*' if way in (now, 'now') else ''}{way} {ways[way]['us']:.1f}" for way in shown)
        print(f"{what}, {count} rows: bytes {ways[best[0]]['bytes_us']:.1f} | {line}")


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    started = time.monotonic()
    made = cases(options.rows, time.time_ns() % 2**31)
    with torch.inference_mode():
        kernels = compile_ahead(partial(launch_all, made))
        print(f"{kernels} kernels after {time.monotonic() - started:.0f} s", flush=True)
        found = [measure(case) for make in made for case in make()]
    table(found)
    wrong_ones = [(r["what"], r["rows"], r["way"], r["error"]) for r in found if not r["error"] < TOLERANCE]
    print(
        f"{time.monotonic() - started:.0f} s; worst {max(r['error'] for r in found):.1e}; wrong: {wrong_ones}"
    )
    keep("compressed_layers", found, options)
    if wrong_ones:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
