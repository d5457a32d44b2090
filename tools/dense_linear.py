"""What dense products of few and of many rows take on this GPU, by library and by the kernels here.

    python -m tools.dense_linear --output benchmarks/results/dense-linear-DEVICE-DATE.json

Of matrices as decoders have them, in bfloat16 and in FP8, in CUDA graphs, with weights that left the cache.
`ways`: us of a product by `library` (torch's own), `parts` (split_gemm.py, left to be added up by what comes
next) and `parts_added`, `rows` (row_gemm.py); of FP8 weights also `decoded` (and then the library's), and
`chosen`, what models take. `copy_us` is the time of the weights' bytes at the rate of a copy.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.command_line import parser_for
from tools.kernel_timing import BYTES_PER_S, keep
from turnout.bench.timing import on_gpu
from turnout.formats.fp8 import encode_blocks
from turnout.formats.packed import PackedTensor
from turnout.kernels.common import row_gemm, rows, split_gemm
from turnout.kernels.common.fp8_weights import decode
from turnout.models import dense
from turnout.models.dense import Fp8Weight
from turnout.models.shares import whole
from turnout.parallel.hardware import L2_BYTES
from turnout.vocabulary import Format

MOST_COPIES = 64
MATRICES = {  # outputs, inputs
    "qkv of Qwen3-30B-A3B": (5120, 2048),
    "o of Qwen3-30B-A3B": (2048, 4096),
    "router of Qwen3-30B-A3B": (128, 2048),
    "head of Qwen3-30B-A3B": (151936, 2048),
    "down to latents of DeepSeek-V3": (2112, 7168),
    "q_b of DeepSeek-V3": (24576, 1536),
    "o of DeepSeek-V3": (7168, 16384),
    "shared expert of DeepSeek-V3": (4096, 7168),
}
Way = Callable[[Tensor], Any]


def plain_ways(weight: Tensor) -> dict[str, Way]:
    return {
        "library": lambda x: F.linear(x, weight),
        "parts": lambda x: split_gemm.parts(x, weight),
        "parts_added": lambda x: _added(split_gemm.parts(x, weight)),
        "rows": lambda x: row_gemm.linear(x, weight, None),
    }


def fp8_ways(weight: Fp8Weight) -> dict[str, Way]:
    data, scale, group = weight.data_MK, weight.scale_GM, weight.group
    return {
        "parts": lambda x: split_gemm.parts(x, data, scale_GM=scale, group=group),
        "parts_added": lambda x: _added(split_gemm.parts(x, data, scale_GM=scale, group=group)),
        "rows": lambda x: row_gemm.linear(x, data, None, scale_GM=scale, group=group),
        "decoded": lambda x: F.linear(x, decode(data, scale, group, x.dtype)),
        "chosen": lambda x: dense.linear(x, weight),
    }


def _added(parts_PNM: Tensor | None) -> Tensor | None:
    return None if parts_PNM is None else rows.add(parts_PNM, None, torch.bfloat16)


def measure(name: str, format: str, counts: list[int]) -> list[dict[str, Any]]:
    """A row for each number of rows."""
    M, K = MATRICES[name]
    nbytes = M * K * (2 if format == "bf16" else 1)
    copies = min(MOST_COPIES, L2_BYTES // nbytes + 2)
    made: list[dict[str, Way]] = []
    for _ in range(copies):
        plain = torch.randn(M, K, device="cuda", dtype=torch.bfloat16) * K**-0.5
        if format == "bf16":
            made.append(plain_ways(plain))
            continue
        data, scale = encode_blocks(plain)
        weight = Fp8Weight.of(PackedTensor(format=Format.FP8, data=data, scale=scale), whole(M), whole(K))
        assert weight is not None, "whole columns"
        made.append(fp8_ways(weight))
    found = []
    for count in counts:
        x = torch.randn(count, K, device="cuda", dtype=torch.bfloat16)
        ways = [way for way in made[0] if made[0][way](x) is not None]
        times = {way: on_gpu([partial(each[way], x) for each in made])[0] for way in ways}
        row = {"matrix": name, "outputs": M, "inputs": K, "format": format, "rows": count}
        found.append(row | {"copy_us": nbytes / BYTES_PER_S * 1e6, "ways": times})
        print(f"{name} {format} {count}: " + " ".join(f"{w} {us:.1f}" for w, us in times.items()), flush=True)
    return found


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64, 128, 256, 1024])
    parser.add_argument("--matrices", nargs="+", choices=list(MATRICES), default=list(MATRICES))
    parser.add_argument("--formats", nargs="+", choices=["bf16", "fp8"], default=["bf16", "fp8"])
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    with torch.inference_mode():
        found = [
            row
            for name in options.matrices
            for format in options.formats
            for row in measure(name, format, options.rows)
        ]
    keep("dense_linear", found, options)


if __name__ == "__main__":
    main()
