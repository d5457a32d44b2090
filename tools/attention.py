"""Attention over paged bf16 caches: our kernels, flash-attn-4 and torch's SDPA, in one run.

    python -m tools.attention --output benchmarks/results/attention-DEVICE-DATE.json

Ours and the library's attend as in a step of the engine, over the same pages. SDPA gets contexts that lie one
after the other, with no gathering counted, and nothing where it has no such attention (sinks, windows). Times
are of one layer in a CUDA graph, the mean over as many layers, each with a cache and queries of its own, as
exceed the cache of the GPU together; `host_us` is what a call takes the host. `error` is that of attention in
float32, relative, in the root mean square over all rows. Decoding reads each key and value once
(`kv_tb_per_s`).

--device cpu --attention-tp 8 --requests 2 --tokens 40 shows on any machine that it runs, in Triton's
interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.kernel_timing import device_of, device_parser, keep, line, seconds_of
from turnout.attention.backends.flash_attn_4.declaration import BACKEND, PACKAGE
from turnout.attention.backends.flash_attn_4.prompts import FlashAttn4Prompts
from turnout.attention.backends.triton.paged import StepAttention, TritonAttention
from turnout.attention.capability import Chosen
from turnout.attention.kinds import AttentionSpec, cache_groups
from turnout.attention.torch import additive, attend_chunk, visible
from turnout.engine.scheduler.request import GroupPages
from turnout.parallel.hardware import L2_BYTES

PEERS = ("triton", BACKEND.name, "sdpa")
MOST_LAYERS = 64


@dataclass(frozen=True)
class Case:
    """Tokens [start, end) of so many requests; single ones decode."""

    shape: str
    spec: AttentionSpec
    requests: int
    start: int
    end: int
    page_size: int = 16

    @property
    def length(self) -> int:
        return self.end - self.start

    @property
    def pairs(self) -> int:
        """Of a query and a key that it sees, over all requests."""
        seen = (place + 1 - self.spec.first_seen(place) for place in range(self.start, self.end))
        return self.requests * sum(seen)

    def within(self, requests: int, tokens: int, ranks: int) -> Case:
        """The same with no more than so many, and the heads of one of so many ranks."""
        end = min(self.end, tokens)
        start = min(self.start, end - 1 if self.length == 1 else end // 2)
        return replace(
            self, spec=self.spec.split(ranks), requests=min(self.requests, requests), start=start, end=end
        )

    def describe(self) -> dict[str, Any]:
        spec = self.spec
        return {
            "shape": self.shape, "heads": spec.num_heads, "kv_heads": spec.num_kv_heads,
            "head_dim": spec.head_dim, "window": spec.window, "sinks": spec.sinks,
            "requests": self.requests, "tokens": self.length, "context": self.end,
            "page_size": self.page_size,
        }  # fmt: skip


@dataclass(frozen=True)
class Sequence:
    row: int
    kv: list[GroupPages]


@dataclass(frozen=True)
class Span:
    request: Sequence
    start: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.start


def cases() -> list[Case]:
    """Prompts, prompts behind a long context and decoding, of each shape of heads."""
    wide = AttentionSpec.full(num_heads=32, num_kv_heads=4, head_dim=128)
    gpt_oss = replace(AttentionSpec.full(num_heads=64, num_kv_heads=8, head_dim=64), sinks=True)
    shapes = {
        "32/4 x 128": wide,
        "64/8 x 64": replace(gpt_oss, sinks=False),
        "64/8 x 64, sinks": gpt_oss,
        "64/8 x 64, sinks, window 128": gpt_oss.sliding(128),
        "16/2 x 256": AttentionSpec.full(num_heads=16, num_kv_heads=2, head_dim=256),
    }
    found = []
    for shape, spec in shapes.items():
        prompts = [(1, 0, 2048), (4, 0, 512), (8, 0, 256), (16, 0, 128), (1, 16384, 18432), (1, 16384, 16512)]
        decoding = [(requests, 1023, 1024) for requests in (1, 16, 128)] + [(16, 8191, 8192)]
        found += [Case(shape, spec, *place) for place in (*prompts, *decoding)]
    found += [Case("32/4 x 128", wide, *place, page_size=128) for place in ((1, 0, 2048), (1, 16384, 18432))]
    for shape in ("32/4 x 128", "64/8 x 64"):  # what pages cost decoding
        found += [Case(shape, shapes[shape], 128, 1023, 1024, page_size=size) for size in (1, 4, 128)]
    return found


class Bench:
    """A case on a device: caches and queries of as many layers as exceed the cache of a GPU together."""

    def __init__(
        self, case: Case, device: torch.device, dtype: torch.dtype, seed: int = 0, max_context: int = 0
    ):
        """max_context: contexts that decode are cut as where they may be so long."""
        from turnout.kernels.attention import decode  # with Triton, which is told by now where it runs

        self.case, self.device = case, device
        spec, pages = case.spec, -(-case.end // case.page_size)
        rows = case.requests * case.length
        itemsize = torch.empty(0, dtype=dtype).element_size()
        nbytes = case.requests * case.end * spec.token_bytes(itemsize)
        nbytes += 2 * rows * spec.num_heads * spec.head_dim * itemsize
        on_gpu = device.type == "cuda"
        self.layers = max(2, min(MOST_LAYERS, -(-L2_BYTES // nbytes))) if on_gpu else 2
        (group,) = cache_groups([spec] * self.layers)
        self.paged = TritonAttention(
            group, num_pages=case.requests * pages, page_size=case.page_size, max_running=case.requests,
            max_context=case.end, device=device, dtype=dtype,
            chosen=Chosen(backend="triton", prompts="triton"),
        )  # fmt: skip
        longest = max(case.end, max_context)
        self.cut = decode.cut_of(
            case.requests, spec.num_kv_heads, spec.head_dim, itemsize, longest, spec.window,
            self.paged.processors,
        )  # fmt: skip
        torch.manual_seed(seed)
        self.paged.cache.normal_()
        self.table_BP = torch.randperm(case.requests * pages).view(case.requests, pages)
        self.q = torch.randn(self.layers, rows, spec.num_heads, spec.head_dim, device=device, dtype=dtype)
        self.out = torch.empty_like(self.q[0])
        self.sinks_H = torch.randn(spec.num_heads, device=device) if spec.sinks else None
        self.chunks = [
            Span(Sequence(row, [GroupPages(pages=held)]), case.start, case.end)
            for row, held in enumerate(self.table_BP.tolist())
        ]

    def context(self, layer: int, request: int) -> tuple[Tensor, Tensor]:
        """Keys and values [Hkv, L, D] of a request."""
        size = self.case.page_size
        slots = (self.table_BP[request, :, None] * size + torch.arange(size)).flatten()[: self.case.end]
        k, v = self.paged.layer_cache(layer)[:, slots.to(self.device)].unbind(2)
        return k, v

    def peer(self, name: str) -> Callable[[int], Tensor] | str:
        """Attention of a layer [N, Hq, D] by one of PEERS; or why there is none."""
        if name == "sdpa":
            return self._sdpa()
        decodes = self.case.length == 1
        if name == "triton":
            parts = (self.chunks, []) if decodes else ([], self.chunks)
            step = StepAttention(self.paged, *parts)
            step._cut = self.cut
            return lambda layer: step.attend(layer, self.q[layer], self.sinks_H, self.out)
        if PACKAGE.lacking() or self.device.type != "cuda":
            return PACKAGE.lacking() or "runs on GPUs"
        library = FlashAttn4Prompts(self.paged, self.chunks, self.table_BP)

        def attend(layer: int) -> Tensor:
            library.attend(layer, self.q[layer], self.out, self.sinks_H)
            return self.out

        return attend

    def _sdpa(self) -> Callable[[int], Tensor] | str:
        case, spec = self.case, self.case.spec
        if spec.sinks or spec.window:
            return "has no sinks or windows"
        every = [[self.context(layer, b) for b in range(case.requests)] for layer in range(self.layers)]
        kv = [[torch.stack(x) for x in zip(*contexts, strict=True)] for contexts in every]
        mask: Any = None
        if case.start and case.length > 1:
            from torch.nn.attention.bias import causal_lower_right

            mask = causal_lower_right(case.length, case.end)

        def attend(layer: int) -> Tensor:
            q = self.q[layer].unflatten(0, (case.requests, -1)).transpose(1, 2)
            causal = mask is None and case.length > 1
            found = F.scaled_dot_product_attention(
                q, *kv[layer], attn_mask=mask, is_causal=causal, scale=spec.scale, enable_gqa=True
            )
            return found.transpose(1, 2).flatten(0, 1)

        return attend

    def reference(self, layer: int) -> Tensor:
        """In float32 [N, Hq, D], by the attention that all others are compared with."""
        case, spec = self.case, self.case.spec
        first = spec.first_seen(case.start)
        mask = additive(visible(spec, case.start, case.end, first, self.device), torch.float32)
        parts = []
        for request, q in enumerate(self.q[layer].float().split(case.length)):
            k, v = (x[:, first:].float() for x in self.context(layer, request))
            heads = [  # one KV head at a time: scores of long contexts are large
                attend_chunk(q_THD, k[h : h + 1], v[h : h + 1], mask, spec.scale, sinks)
                for h, (q_THD, sinks) in enumerate(self._by_kv_head(q))
            ]
            parts.append(torch.cat(heads, 1))
        return torch.cat(parts)

    def _by_kv_head(self, q_THD: Tensor) -> list[tuple[Tensor, Tensor | None]]:
        count = self.case.spec.num_kv_heads
        sinks = self.sinks_H.chunk(count) if self.sinks_H is not None else [None] * count
        return list(zip((x.contiguous() for x in q_THD.chunk(count, 1)), sinks, strict=True))


def measure(bench: Bench, name: str) -> dict[str, Any]:
    """A row of the result."""
    case, row = bench.case, {"peer": name, **bench.case.describe()}
    attend = bench.peer(name)
    if isinstance(attend, str):
        return row | {"error_message": attend}
    last = bench.layers - 1
    expected = bench.reference(last)
    try:
        found = attend(last).float()
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        if name == PEERS[0]:
            raise
        return row | {"error_message": f"{type(error).__name__}: {error}"[:300]}
    difference = (found - expected).square().mean().sqrt() / expected.square().mean().sqrt()

    def run() -> None:
        for layer in range(bench.layers):
            attend(layer)

    seconds, host = seconds_of(run, bench.device)
    seconds, host = seconds / bench.layers, host / bench.layers
    spec, keys = case.spec, case.requests * (case.end - case.spec.first_seen(case.start))
    row |= {"layers": bench.layers, "us": seconds * 1e6, "host_us": host * 1e6, "error": float(difference)}
    row["tflop_per_s"] = 4 * case.pairs * spec.num_heads * spec.head_dim / seconds / 1e12
    if case.length == 1:
        row["kv_tb_per_s"] = keys * spec.token_bytes(bench.q.element_size()) / seconds / 1e12
    return row


def main() -> None:
    parser = device_parser(__doc__)
    parser.add_argument("--peers", nargs="+", default=PEERS, choices=PEERS)
    parser.add_argument("--shapes", nargs="+", help="parts of shapes' names; default: all")
    parser.add_argument("--requests", type=int, default=1 << 20, help="at most so many")
    parser.add_argument("--tokens", type=int, default=1 << 20, help="of a context at most so many")
    parser.add_argument("--attention-tp", type=int, default=1, help="with the heads of one of so many ranks")
    parser.add_argument(
        "--decode-blocks",
        nargs="+",
        type=int,
        help="tokens that our kernel decodes at a time; default: as in the engine",
    )
    parser.add_argument(
        "--max-context",
        type=int,
        default=0,
        help="contexts that decode are cut as where they may be so long; default: as where none is longer",
    )
    options = parser.parse_args()
    device = device_of(options)
    chosen = (
        case.within(options.requests, options.tokens, options.attention_tp)
        for case in cases()
        if not options.shapes or any(part in case.shape for part in options.shapes)
    )
    rows = []
    for case in dict.fromkeys(chosen):
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        bench = Bench(case, device, dtype, max_context=options.max_context)
        for name in options.peers:
            ours, cut = name == "triton" and case.length == 1, bench.cut
            for block in options.decode_blocks or [cut.block] if ours else [cut.block]:
                bench.cut = cut._replace(block=block)
                used = {"decode_block": block, "splits": cut.splits} if ours else {}
                rows.append(measure(bench, name) | used)
                print(line(rows[-1]), flush=True)
        del bench
    keep("attention", rows, options)


if __name__ == "__main__":
    main()
