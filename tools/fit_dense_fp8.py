"""The constants by which kernels/hopper/dense_fp8.py chooses among its tiles, fitted to a measurement.

    python -m tools.fit_dense_fp8 benchmarks/results/dense-fp8-nvidia-h200-2026-11-26.json

A product takes `waves` x (`steps` x what a step of its tile takes + a program's part) + what a MB of its
parts takes + a constant: least squares of the relative error over all that tools/dense_fp8.py measured.
Printed with it: of each shape and number of rows, how much longer than the best of all ways the one takes
that the constants choose, and the same of constants fitted without that matrix.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from turnout.kernels.common import row_gemm
from turnout.kernels.hopper import dense_fp8
from turnout.kernels.hopper.dense_fp8 import Tile

Way = tuple[Tile | row_gemm.Tile, int]


def ways(row: dict[str, Any]) -> dict[Way, float]:
    """us of what `plan` chooses among, of a row of the result."""
    names: dict[str, Way] = {}
    for tile in dense_fp8.STEP_US:
        if dense_fp8.suits(tile, row["rows"]):
            for count in dense_fp8.counts(tile, *shape(row)):
                names[name(tile, count)] = tile, count
    return {way: row["ways"][name] for name, way in names.items()}


def name(tile: Tile | row_gemm.Tile, count: int) -> str:
    """As the result calls it."""
    if isinstance(tile, Tile):
        return f"specialised {tile.rows},{tile.groups}x{tile.blocks},{tile.stages} P{count}"
    return f"rows {tile.rows}x{tile.outputs}x{tile.columns},{tile.warps},{tile.stages}"


def shape(row: dict[str, Any]) -> tuple[int, int, int]:
    return row["rows"], row["outputs"], row["inputs"]


def terms(way: Way, row: dict[str, Any]) -> list[float]:
    """What the constants are multiplied by: the steps of each tile, then the others of `dense_fp8.terms`."""
    steps, *others = dense_fp8.terms(*way, *shape(row))
    return [*(steps * (tile == way[0]) for tile in dense_fp8.STEP_US), *others]


def fitted(rows: list[dict[str, Any]]) -> torch.Tensor:
    points = [(terms(way, row), us) for row in rows for way, us in ways(row).items()]
    left = torch.tensor([[term / us for term in found] for found, us in points], dtype=torch.float64)
    return torch.linalg.lstsq(left, torch.ones(len(points), 1, dtype=torch.float64)).solution[:, 0]


def chosen(constants: torch.Tensor, row: dict[str, Any]) -> Way:
    expected = {way: float(constants @ torch.tensor(terms(way, row)).double()) for way in ways(row)}
    return min(expected, key=expected.__getitem__)


def excess(constants: torch.Tensor, row: dict[str, Any]) -> float:
    """How much longer than the best of all ways the one takes that is chosen, as a share of it."""
    return ways(row)[chosen(constants, row)] / min(row["ways"].values()) - 1


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("result", type=Path)
    rows = json.loads(parser.parse_args().result.read_text())["rows"]
    constants = fitted(rows)
    names = [*map(str, dense_fp8.STEP_US), "PROGRAM_US", "MB_US", "PRODUCT_US", "BY_ROWS_US"]
    for what, us in zip(names, constants.tolist(), strict=True):
        print(f"{what}: {us:.3f}")
    apart = [
        excess(fitted([other for other in rows if other["matrix"] != row["matrix"]]), row) for row in rows
    ]
    for row, without in zip(rows, apart, strict=True):
        tile, count = chosen(constants, row)
        print(
            f"{row['matrix']} {row['rows']}: {tuple(tile)} P{count}, {excess(constants, row):.1%} longer "
            f"than the best; {without:.1%} by constants fitted without it"
        )
    for what, shares in (("all", [excess(constants, row) for row in rows]), ("fitted without", apart)):
        print(f"{what}: mean {sum(shares) / len(shares):.1%}, at most {max(shares):.1%}")


if __name__ == "__main__":
    main()
