"""Whether products with dense FP8 weights are right on this GPU, and what each tile takes.

    python -m tools.dense_fp8 --output benchmarks/results/dense-fp8-DEVICE-DATE.json
    python -m tools.dense_fp8 --rows 1 2 4 8 --output benchmarks/results/dense-fp8-few-DEVICE-DATE.json

Of DeepSeek-V3's, DeepSeek-V4-Flash's, Qwen3.5-35B-A3B's and Qwen3-30B-A3B's matrices, in CUDA graphs, with
weights that left the cache: us of a product whose parts rows.py adds up, as the next norm does. Ways: `rows`,
row_gemm.py as models call it, and with other tiles (rows x outputs x columns, warps, stages); `specialised`,
hopper/dense_fp8.py (rows, groups x blocks of 64 outputs, stages, and parts); `planned`, what that file
chooses among both. Up to 8 rows: `split`, split_gemm.py as models call it, and up to 2 `few`, few_rows.py as
it chooses and in other numbers of parts; `alone` are these without the sum of the
parts. Every way's result is compared with float64 products of the decoded weights first, also of shapes that
fill no tile. `bytes_us`: the weights at the rate of a copy; `products_us`: at 790 TFLOP/s.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tools.command_line import parser_for
from tools.kernel_timing import BYTES_PER_S, PRODUCTS_PER_S, compile_ahead, keep
from turnout.bench.timing import on_gpu
from turnout.formats.fp8 import BLOCK, encode_blocks
from turnout.kernels.common import few_rows, row_gemm, rows, split_gemm
from turnout.kernels.hopper import dense_fp8
from turnout.parallel.hardware import L2_BYTES

MOST_COPIES = 128
MOST_FEW = 8  # rows, up to which other kernels are compared
BOUND = 1e-3  # of a result's error, by the root of the mean square of all
MATRICES = {  # outputs, inputs
    "v3 down to latents": (2112, 7168),
    "v3 q_a": (1536, 7168),
    "v3 q_b": (24576, 1536),
    "v3 kv_a": (576, 7168),
    "v3 o": (7168, 16384),
    "v3 shared gate_up": (4096, 7168),
    "v3 shared down": (7168, 2048),
    "v3 dense gate_up": (36864, 7168),
    "v3 dense down": (7168, 18432),
    "v4 q_b": (32768, 1024),
    "v4 o_b": (4096, 8192),
    "v4 shared gate_up": (4096, 4096),
    "v4 shared down": (4096, 2048),
    "v4 index q_b": (8192, 1024),
    "qwen3.5 delta in": (12288, 2048),
    "qwen3.5 attention gate": (4096, 2048),
    "qwen3 and qwen3.5 out": (2048, 4096),
    "qwen3.5 shared gate_up": (1024, 2048),
    "qwen3.5 shared down": (2048, 512),
    "qwen3 and qwen3.5 qkv": (5120, 2048),
}
# rows, outputs, inputs: with rests of tiles, of groups, and fewer steps than stages
ODD = (
    (65, 576, 7168),
    (77, 2112, 1536),
    (100, 1008, 1040),
    (130, 208, 272),
    (200, 4096, 2064),
    (256, 64, 256),
    (1, 70, 1536),
    (2, 33, 512),
    (3, 1008, 1024),
    (4, 208, 2048),
)
ROW_TILES = (
    row_gemm.Tile(128, 128, 64, 8, 4),
    row_gemm.Tile(128, 256, 64, 8, 3),
    row_gemm.Tile(64, 128, 128, 4, 3),
)
TILES = (
    dense_fp8.Tile(128, 2, 2, 3),
    dense_fp8.Tile(128, 3, 1, 4),
    dense_fp8.Tile(128, 4, 1, 3),
    dense_fp8.Tile(128, 2, 1, 4),
    dense_fp8.Tile(64, 2, 2, 4),
    dense_fp8.Tile(64, 3, 2, 3),
    dense_fp8.Tile(256, 2, 1, 2),
)
Way = Callable[[Tensor, Tensor, Tensor], Tensor]  # (x [N, K], weight [M, K], scale [G, M]) -> parts


def split(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    found = split_gemm.parts(x, weight, scale_GM=scale, group=BLOCK)
    assert found is not None
    return found


def ways(rows_: int, outputs: int, inputs: int) -> Iterator[tuple[str, Way]]:
    def few(count: int | None, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        return few_rows.parts(x, weight, scale, count)

    if rows_ <= MOST_FEW:
        yield "split", split
        if rows_ <= few_rows.MOST_ROWS and inputs % few_rows.STEP == 0:
            yield "few", partial(few, None)
            for count in few_rows.counts(outputs, inputs):
                yield f"few P{count}", partial(few, count)
        return

    def by_rows(tile: row_gemm.Tile | None, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        return row_gemm.parts(x, weight, scale, BLOCK, tile)

    def specialised(tile: dense_fp8.Tile, count: int, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        return dense_fp8.parts(x, weight, scale, tile, count)

    yield "rows", partial(by_rows, None)
    yield "planned", dense_fp8.parts
    for tile in ROW_TILES:
        yield (
            f"rows {tile.rows}x{tile.outputs}x{tile.columns},{tile.warps},{tile.stages}",
            partial(by_rows, tile),
        )
    for one in TILES:
        if not dense_fp8.suits(one, rows_):
            continue
        for count in dense_fp8.counts(one, rows_, outputs, inputs):
            name = f"specialised {one.rows},{one.groups}x{one.blocks},{one.stages} P{count}"
            yield name, partial(specialised, one, count)


def drawn(outputs: int, inputs: int) -> tuple[Tensor, Tensor]:
    """e4m3 [M, K] and its scales [G, M], whose blocks differ in size."""
    plain = torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16)
    plain *= torch.rand(outputs, 1, device="cuda", dtype=torch.bfloat16) + 0.1
    data, scale = encode_blocks(plain)
    return data, scale.repeat_interleave(BLOCK, 0)[:outputs].T.contiguous()


def decoded(data: Tensor, scale_GM: Tensor, kind: torch.dtype) -> Tensor:
    spread = scale_GM.T.repeat_interleave(BLOCK, 1)[:, : data.shape[1]]
    return (data.float() * spread).to(kind)


def sums(way: Way, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor | None:
    return rows.add(way(x, weight, scale), None, torch.bfloat16)


def errors(rows_: int, outputs: int, inputs: int) -> dict[str, float]:
    """Of every way, by the root of the mean square of all results. few_rows.py does not round weights."""
    x = torch.randn(rows_, inputs, device="cuda", dtype=torch.bfloat16)
    data, scale = drawn(outputs, inputs)
    right = [products(x, decoded(data, scale, kind)) for kind in (torch.bfloat16, torch.float64)]
    size = right[0].square().mean().sqrt()
    found = {}
    for name, way in ways(rows_, outputs, inputs):
        wanted = right[name.startswith("few")]
        wrong = (way(x, data, scale).double().sum(0) - wanted).abs().max() / size
        found[name] = float(wrong) if wrong.isfinite() else float("inf")
    return found


def products(x: Tensor, weight: Tensor) -> Tensor:
    """In float64."""
    return torch.cat([x.double() @ piece.double().T for piece in weight.split(4096)], 1)


def measure(name: str, counts_: list[int]) -> list[dict[str, Any]]:
    M, K = MATRICES[name]
    copies = [drawn(M, K) for _ in range(min(MOST_COPIES, L2_BYTES // (M * K) + 2))]
    found = []
    for count in counts_:
        wrong = errors(count, M, K)
        x = torch.randn(count, K, device="cuda", dtype=torch.bfloat16)
        times, alone = {}, {}
        for label, way in ways(count, M, K):
            if wrong[label] < BOUND:
                times[label] = on_gpu([partial(sums, way, x, *weight) for weight in copies])[0]
                if count <= MOST_FEW:
                    alone[label] = on_gpu([partial(way, x, *weight) for weight in copies])[0]
        row = {"matrix": name, "outputs": M, "inputs": K, "rows": count, "ways": times, "errors": wrong}
        row |= {"alone": alone} if alone else {}
        bounds = {
            "bytes_us": M * K / BYTES_PER_S * 1e6,
            "products_us": 2 * M * K * count / PRODUCTS_PER_S * 1e6,
        }
        found.append(row | bounds)
    return found


def launch_all(names: list[str], counts_: list[int]) -> None:
    """Every way of every product, on what memory holds."""
    for count, M, K in [*((c, *MATRICES[name]) for name in names for c in counts_), *ODD]:
        x = torch.empty(count, K, device="cuda", dtype=torch.bfloat16)
        data = torch.empty(M, K, device="cuda", dtype=torch.float8_e4m3fn)
        scale = torch.empty(-(-K // BLOCK), M, device="cuda")
        for _, way in ways(count, M, K):
            sums(way, x, data, scale)


def table(found: list[dict[str, Any]]) -> None:
    """Of each product what `rows` takes, and the five fastest ways."""
    for row in found:
        best = sorted(row["ways"], key=row["ways"].get)[:5]
        M, K = row["outputs"], row["inputs"]
        head = f"{row['matrix']} {M}x{K} rows {row['rows']}: bytes {row['bytes_us']:.1f}"
        now = row["ways"].get("rows", row["ways"].get("split", 0.0))
        head += f" products {row['products_us']:.1f} now {now:.1f}"
        if "alone" in row:
            least = min(row["alone"].items(), key=lambda item: item[1])
            head += f" (alone {row['alone'].get('split', 0.0):.1f}, best {least[0]} {least[1]:.1f})"
        print(head + "".join(f" | {way} {row['ways'][way]:.1f}" for way in best))


def few_next_to_now(found: list[dict[str, Any]]) -> None:
    """For each number of rows that few_rows.py takes: all matrices together, now, as it chooses, and at best;
    each by the product and the sum of its parts, and by the product alone."""
    for count in range(1, few_rows.MOST_ROWS + 1):
        these = [row for row in found if row["rows"] == count and "few" in row["ways"] and "alone" in row]
        for what in ("ways", "alone") if these else ():
            now, chosen = (sum(row[what][way] for row in these) for way in ("split", "few"))
            best = sum(min(row[what].values()) for row in these)
            floor = sum(row["bytes_us"] for row in these)
            print(
                f"{count} rows, {what}, us: bytes {floor:.1f} now {now:.1f} few {chosen:.1f} best {best:.1f}"
            )


def by_tile(found: list[dict[str, Any]], names: list[str], counts_: list[int]) -> None:
    """For each number of rows, what all matrices take together, with the best number of parts each."""
    for count in counts_:
        sums: dict[str, float] = {}
        these = [row for row in found if row["rows"] == count]
        for row in these:
            best: dict[str, float] = {}
            for way, us in row["ways"].items():
                tile = way.split(" P")[0]
                best[tile] = min(best.get(tile, us), us)
            for tile, us in best.items():
                sums[tile] = sums.get(tile, 0.0) + us
        print(
            f"all at {count}: "
            + " | ".join(f"{t} {u:.0f}" for t, u in sorted(sums.items(), key=lambda i: i[1]))
        )


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 128, 192, 256])
    parser.add_argument("--matrices", nargs="+", choices=list(MATRICES), default=list(MATRICES))
    parser.add_argument("--seed", type=int, default=None, help="of random inputs; another one each time")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.manual_seed(time.time_ns() % 2**32 if options.seed is None else options.seed)
    started = time.monotonic()
    with torch.inference_mode():
        kernels = compile_ahead(partial(launch_all, options.matrices, options.rows))
        print(f"{kernels} kernels compiled in {time.monotonic() - started:.0f} s", flush=True)
        odd: list[dict[str, Any]] = [{"shape": shape, "errors": errors(*shape)} for shape in ODD]
        for one in odd:
            worst = max(one["errors"], key=one["errors"].get)
            print(
                f"rows, outputs, inputs {one['shape']}: worst {worst} {one['errors'][worst]:.1e}", flush=True
            )
        found = [row for name in options.matrices for row in measure(name, options.rows)]
    table(found)
    few_next_to_now(found)
    by_tile(found, options.matrices, options.rows)
    checked = [(str(one["shape"]), one["errors"]) for one in odd]
    checked += [(f"{one['matrix']} {one['rows']}", one["errors"]) for one in found]
    wrong = {(way, what) for what, by_way in checked for way, error in by_way.items() if not error < BOUND}
    print(f"{time.monotonic() - started:.0f} s; wrong: {sorted(wrong) if wrong else 'none'}")
    keep("dense_fp8", found, options)
    if wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
