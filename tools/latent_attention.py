"""Which tiles decode latent attention fastest on this GPU, and how close that is to its limits.

    python -m tools.latent_attention --output benchmarks/results/latent-attention-DEVICE-DATE.json

The absorbed form alone, in a CUDA graph: queries of 1, 32 and 128 requests over contexts of 4096 and 32768
tokens of 512 + 64 values in bfloat16, read once, with 128 heads and with 16 (a rank of 8). `share` is what
one H200 needs, bytes of latent vectors over 4.2 TB/s or products over 790 TFLOP/s, whichever is longer, over
the time that it took. Contexts of all layers together exceed the cache of the GPU, as a model's do. `error`
is the largest difference from attention in float32, of contexts of several lengths; tiles that miss BOUND, or
that the GPU has no room for, are reported and not timed.

With --flash-mla, the compiled library of FlashMLA as vLLM's wheels have it (`vllm/_flashmla_C.abi3.so`), each
shape is also computed by that kernel, which needs --page-size 64; `kernel` tells its rows.

With --chosen each token also attends to as many vectors of its context, anywhere in it, in the tiles that are
chosen for the shape, as sparse attention does (2048 of 32768: `--chosen 2048 --known`).

The last lines are the best of each shape, how much faster that is of what is chosen than of the whole, and
CHOICES for turnout/kernels/attention/latent.py: of each number
of heads and requests the tiles with the least time over all contexts.

--device cpu --requests 2 --context 40 shows on any machine that all tiles give what they should, in Triton's
interpreter.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tools.kernel_timing import (
    BYTES_PER_S,
    PROCESSORS,
    PRODUCTS_PER_S,
    device_of,
    device_parser,
    keep,
    line,
    seconds_of,
)

if TYPE_CHECKING:
    from turnout.kernels.attention.latent import Tiles

LATENT, ROPE = 512, 64
FLASH_MLA_PAGE = 64
SCALE = 192**-0.5
CACHES = 512 * 10**6  # bytes read in turn, ten times the GPU's cache
BOUND = 2e-2  # of values near 1 in bfloat16


def candidates(num_heads: int) -> list[Tiles]:
    """The default first. Of Hopper's tensor cores (wgmma) with 64 heads a program."""
    from turnout.kernels.attention.latent import SPECIALISED, Tiles

    narrow = {"narrow": True, "parts": 4}
    found = [
        Tiles(),
        Tiles(shortest=64, **narrow),
        Tiles(programs=4, shortest=64, **narrow),
        Tiles(warps=8, stages=3, ahead=True, shortest=64, **narrow),
        Tiles(tokens=32, stages=3, ahead=True, shortest=64, **narrow),
        Tiles(tokens=32, stages=4, ahead=True),
        Tiles(tokens=32, stages=4, ahead=True, programs=4, shortest=64, **narrow),
        Tiles(tokens=128, warps=8, ahead=True, **narrow),
    ]
    if num_heads > 16:
        found += [
            Tiles(heads=32, warps=8, ahead=True, shortest=64, **narrow),
            Tiles(heads=64, warps=8),
            Tiles(heads=64, warps=8, shortest=64, **narrow),
            Tiles(heads=64, warps=8, ahead=True, **narrow),
            Tiles(heads=64, warps=8, programs=1, **narrow),
            Tiles(heads=64, warps=8, ahead=True),
            Tiles(heads=64, warps=8, tokens=32, stages=4, ahead=True),
            Tiles(heads=64, warps=8, tokens=32, stages=3, **narrow),
            Tiles(heads=64, warps=8, tokens=32, stages=3, ahead=True, **narrow),
            Tiles(heads=64, warps=8, tokens=32, stages=4, ahead=True, **narrow),
            Tiles(heads=64, warps=8, tokens=32, stages=4, ahead=True, programs=1, **narrow),
        ]
        found += [
            SPECIALISED,
            SPECIALISED._replace(programs=2),
            SPECIALISED._replace(parts=8, joining=8),
            SPECIALISED._replace(parts=8, joining=8, shortest=64),
        ]
    return found


@dataclass(frozen=True)
class Case:
    """chosen: vectors of the context that are read; 0: all of them."""

    requests: int
    num_heads: int
    context: int
    chosen: int = 0

    @property
    def read(self) -> int:
        return self.chosen or self.context


class Bench:
    """Caches of as many layers as exceed a GPU's cache together."""

    def __init__(self, case: Case, device: torch.device, page_size: int = 16):
        self.case, self.device, self.page = case, device, page_size
        on_gpu = device.type == "cuda"
        # The interpreter's products of bfloat16 are wrong.
        rest: Any = {"device": device, "dtype": torch.bfloat16 if on_gpu else torch.float32}
        pages = -(-case.context // page_size)
        self.nbytes = case.requests * case.read * (LATENT + ROPE) * 2
        layers = max(2, min(64, CACHES * case.read // (self.nbytes * case.context))) if on_gpu else 1
        size = case.requests * pages * page_size, LATENT + ROPE
        self.caches = [torch.randn(size, **rest) for _ in range(layers)]
        self.table = torch.randperm(case.requests * pages, device=device).view(case.requests, pages)
        if case.chosen:
            self.page, self.table = 1, self._chosen()
        self.ends = torch.full((case.requests,), case.read, device=device)
        self.q = torch.randn(case.requests, case.num_heads, LATENT + ROPE, **rest)
        self.processors = PROCESSORS
        if on_gpu:
            self.processors = torch.cuda.get_device_properties(device).multi_processor_count
        self.ragged = self.ends - 7 * torch.arange(case.requests, device=device) % case.read
        self.wanted = [self._expected(b) for b in self._checked()]

    def _chosen(self) -> Tensor:
        """int32 [requests, chosen]: slots of each context, ascending by place."""
        case = self.case
        drawn = torch.rand(case.requests, case.context, device=self.device)
        places = drawn.topk(case.chosen).indices.sort().values
        return (self.table.gather(1, places // self.page) * self.page + places % self.page).int()

    def _checked(self) -> range:
        return range(min(8, self.case.requests))

    def _expected(self, b: int) -> Tensor:
        """float32 [H, LATENT] of a request whose context ends at `ragged`."""
        slots = (self.table[b, :, None] * self.page + torch.arange(self.page, device=self.device)).flatten()
        kept = self.caches[-1][slots[: int(self.ragged[b])]].float()
        return (self.q[b].float() @ kept.T * SCALE).softmax(-1) @ kept[:, :LATENT]

    def attend(self, cache: Tensor, ends: Tensor, tiles: Tiles, splits: int) -> Tensor:
        from turnout.kernels.attention import latent

        rest: Any = {"latent_dim": LATENT, "page_size": self.page, "scale": SCALE}
        return latent.attend(self.q, cache, self.table, ends, splits=splits, tiles=tiles, **rest)

    def measure(self, tiles: Tiles) -> dict[str, Any]:
        """A row of the result; with `error_message` where it was not timed."""
        from triton.runtime.errors import OutOfResources

        from turnout.kernels.attention import latent

        case = self.case
        splits = latent.spans(case.requests, case.num_heads, case.read, self.processors, tiles)
        row = vars(case) | {"tiles": tiles._asdict(), "splits": splits}
        try:
            return row | self._timed(lambda cache, ends: self.attend(cache, ends, tiles, splits))
        except OutOfResources as error:
            return row | {"error_message": str(error)}

    def measure_flash_mla(self) -> dict[str, Any]:
        """The same of FlashMLA, which lays its work out in the first call with the same lengths."""
        pages = {id(cache): cache.view(-1, self.page, 1, LATENT + ROPE) for cache in self.caches}
        lengths = {id(ends): ends.int() for ends in (self.ends, self.ragged)}
        laid_out: dict[int, list[Tensor]] = {}
        q_B1HC, table = self.q[:, None], self.table.int()

        def attend(cache: Tensor, ends: Tensor) -> Tensor:
            given = q_B1HC, pages[id(cache)], LATENT, lengths[id(ends)], table, SCALE, False
            known = laid_out.get(id(ends), (None, None))
            out_B1HL, _, *laid_out[id(ends)] = torch.ops._flashmla_C.dense_decode_fwd(*given, *known, None)
            return out_B1HL[:, 0]

        return vars(self.case) | {"kernel": "FlashMLA"} | self._timed(attend)

    def _timed(self, attend: Callable[[Tensor, Tensor], Tensor]) -> dict[str, Any]:
        case, row = self.case, {}
        found = attend(self.caches[-1], self.ragged)
        difference = torch.stack([(found[b].float() - self.wanted[b]).abs().max() for b in self._checked()])
        row["error"] = float(difference.max())
        if not row["error"] < BOUND:
            return row | {"error_message": "wrong"}

        def run() -> None:
            for cache in self.caches:
                attend(cache, self.ends)

        seconds = seconds_of(run, self.device)[0] / len(self.caches)
        products = 2 * case.requests * case.read * case.num_heads * (2 * LATENT + ROPE)
        needed = max(self.nbytes / BYTES_PER_S, products / PRODUCTS_PER_S)
        return row | {
            "us": seconds * 1e6,
            "tb_per_s": self.nbytes / seconds / 1e12,
            "tflop_per_s": products / seconds / 1e12,
            "share": needed / seconds,
        }


def best(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The fastest row of each shape."""
    found: dict[Case, dict[str, Any]] = {}
    for row in rows:
        case = Case(row["requests"], row["num_heads"], row["context"], row.get("chosen", 0))
        if "us" in row and "tiles" in row and (case not in found or row["us"] < found[case]["us"]):
            found[case] = row
    return list(found.values())


def choices(rows: list[dict[str, Any]]) -> list[tuple[int, int, Tiles]]:
    """Of all numbers of heads and requests, CHOICES: the tiles whose times, each over the best of its shape,
    have the least product over the contexts. Between numbers of requests the larger's hold, beyond the last
    its own."""
    from turnout.kernels.attention.latent import Tiles

    rows = [row for row in rows if "tiles" in row and not row.get("chosen")]
    least = {(row["requests"], row["num_heads"], row["context"]): row["us"] for row in best(rows)}
    over: dict[tuple[int, int], dict[Tiles, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        shape = row["requests"], row["num_heads"], row["context"]
        if shape in least:
            times = over[row["num_heads"], row["requests"]][Tiles(**row["tiles"])]
            times.append(math.log(row["us"] / least[shape]) if "us" in row else math.inf)
    found = []
    for heads in sorted({heads for heads, _ in over}, reverse=True):
        counts = sorted(requests for h, requests in over if h == heads)
        for requests in counts:
            times = over[heads, requests]
            fastest = min(times, key=lambda tiles: sum(times[tiles]))
            found.append((heads, 1 << 30 if requests == counts[-1] else requests, fastest))
    return found


def sparse_gains(rows: list[dict[str, Any]]) -> list[str]:
    """Of each shape of which something is chosen: how many times as fast its best is as that of the whole."""
    least = {(row["requests"], row["num_heads"], row["context"], row["chosen"]): row for row in best(rows)}
    return [
        f"{chosen} of {context} tokens, {heads} heads, {requests} requests: {row['us']:.1f} us, "
        f"{least[requests, heads, context, 0]['us'] / row['us']:.2f} times as fast"
        for (requests, heads, context, chosen), row in least.items()
        if chosen and (requests, heads, context, 0) in least
    ]


def told(row: dict[str, Any]) -> str:
    tiles = " ".join(f"{k}={v}" for k, v in row.get("tiles", {}).items())
    return line({k: v for k, v in row.items() if k != "tiles"}) + f": {tiles}"


def main() -> None:
    parser = device_parser(__doc__)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 2, 4, 8, 32, 128])
    parser.add_argument("--num-heads", type=int, nargs="+", default=[128, 16])
    parser.add_argument("--context", type=int, nargs="+", default=[4096, 32768])
    parser.add_argument("--chosen", type=int, default=0, help="of a context, by sparse attention")
    parser.add_argument("--known", action="store_true", help="only the tiles that are chosen now")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--flash-mla", type=Path, metavar="LIBRARY", help="to compare with")
    options = parser.parse_args()
    device = device_of(options)
    if options.flash_mla is not None:
        if options.page_size != FLASH_MLA_PAGE:
            parser.error(f"--flash-mla reads pages of {FLASH_MLA_PAGE} tokens: give --page-size too")
        torch.ops.load_library(options.flash_mla)
    from turnout.kernels.attention.latent import tiles_for

    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    for context in options.context:
        for num_heads in options.num_heads:
            for requests in options.requests:
                for chosen in (0, options.chosen) if 0 < options.chosen < context else (0,):
                    bench = Bench(Case(requests, num_heads, context, chosen), device, options.page_size)
                    known = [tiles_for(requests, num_heads)]
                    for tiles in known if chosen or options.known else candidates(num_heads):
                        rows.append(bench.measure(tiles))
                        print(told(rows[-1]), flush=True)
                    if options.flash_mla is not None and not chosen:
                        rows.append(bench.measure_flash_mla())
                        print(told(rows[-1]), flush=True)
                    del bench
    print("Best:", *map(told, best(rows)), *sparse_gains(rows), "CHOICES:", sep="\n")
    print(*(f"    {choice}," for choice in choices(rows)), sep="\n", flush=True)
    keep("latent_attention", rows, options)


if __name__ == "__main__":
    main()
