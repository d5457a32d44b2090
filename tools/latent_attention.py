"""How close decoding by the kernel of latent attention comes to this GPU's memory and tensor cores.

    python -m tools.latent_attention --output benchmarks/results/latent-attention-DEVICE-DATE.json

The absorbed form alone, in a CUDA graph: queries of 1, 32 and 128 requests over contexts of 4096 tokens of
512 + 64 values in bfloat16, read once, with 128 heads and with 16 (a rank of 8). `share` is what one H200
needs, bytes of latent vectors over 4.2 TB/s or products over 790 TFLOP/s, whichever is longer, over the time
that it took. Contexts of all layers together exceed the cache of the GPU, as a model's do. --heads: of a
program, to compare.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from triton.testing import do_bench_cudagraph

from turnout.bench.results import gpu_driver, result, save
from turnout.kernels.attention import latent

LATENT, ROPE, PAGE = 512, 64, 16
BYTES_PER_S, PRODUCTS_PER_S = 4.2e12, 790e12
CACHES = 512 * 10**6  # bytes read in turn, ten times the GPU's cache


def measure(requests: int, num_heads: int, context: int, heads: int) -> dict[str, Any]:
    """Microseconds of a call, the mean over layers with caches of their own."""
    pages = -(-context // PAGE)
    nbytes = requests * context * (LATENT + ROPE) * 2
    layers = max(2, min(64, CACHES // nbytes))
    caches = [
        torch.randn(requests * pages * PAGE, LATENT + ROPE, device="cuda", dtype=torch.bfloat16)
        for _ in range(layers)
    ]
    table = torch.randperm(requests * pages, device="cuda").view(requests, pages)
    ends = torch.full((requests,), context, device="cuda")
    q = torch.randn(requests, num_heads, LATENT + ROPE, device="cuda", dtype=torch.bfloat16)
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    splits = latent.spans(requests, num_heads, context, processors, heads)

    def run() -> None:
        for cache in caches:
            latent.attend(
                q,
                cache,
                table,
                ends,
                latent_dim=LATENT,
                page_size=PAGE,
                splits=splits,
                scale=192**-0.5,
                heads=heads,
            )

    torch.cuda.synchronize()  # the benchmark runs on a stream of its own
    seconds = do_bench_cudagraph(run, rep=100) / 1e3 / layers
    products = 2 * requests * context * num_heads * (2 * LATENT + ROPE)
    needed = max(nbytes / BYTES_PER_S, products / PRODUCTS_PER_S)
    return {
        "requests": requests,
        "num_heads": num_heads,
        "context": context,
        "heads_per_program": heads,
        "splits": splits,
        "us": seconds * 1e6,
        "tb_per_s": nbytes / seconds / 1e12,
        "tflop_per_s": products / seconds / 1e12,
        "share": needed / seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 32, 128])
    parser.add_argument("--num-heads", type=int, nargs="+", default=[128, 16])
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--heads", type=int, nargs="+", default=[16, 32, 64], help="of a program")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows = []
    for num_heads in options.num_heads:
        for requests in options.requests:
            for heads in options.heads:
                if heads > max(16, num_heads):
                    continue
                rows.append(measure(requests, num_heads, options.context, heads))
                print(" ".join(f"{k} {v:.4g}" for k, v in rows[-1].items()), flush=True)
    if options.output:
        device = torch.cuda.get_device_name()
        save(result("latent_attention", rows, device=device, driver=gpu_driver()), options.output)


if __name__ == "__main__":
    main()
