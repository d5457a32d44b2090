"""`turnout bench`: the benchmarks, with what the flags leave open."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from turnout.errors import UserError


def serve(*, model: str | None, base_url: str, dataset_name: str, output: Path | None, **load: Any) -> None:
    """Measure a server of our own with `model`, or the one at `base_url`. load: fields of `ServeBench`."""
    from turnout.bench.serve import ServeBench, run

    if (model is None) == (not base_url):
        raise UserError("bench serve needs either MODEL or --base-url URL")
    if dataset_name != "random":
        raise UserError(f"--dataset-name {dataset_name!r}: only `random` is known")
    run(ServeBench(**load), model=model, base_url=base_url, output=output)


def moe(
    *,
    shapes: Sequence[str] | None,
    formats: Sequence[str] | None,
    tokens: Sequence[int] | None,
    **options: Any,
) -> None:
    """Measure one layer's experts. None: a small layer, in BF16 and NVFP4, with 1, 16 and 256 tokens."""
    from turnout.bench.moe import run

    run(
        shapes=shapes or ["cpu-small"],
        formats=formats or ["bf16", "nvfp4"],
        tokens=tokens or [1, 16, 256],
        **options,
    )


def a2a(
    *,
    experts: int,
    top_k: int,
    tokens: Sequence[int] | None,
    dispatchers: Sequence[str] | None,
    formats: Sequence[str] | None,
    combine_formats: Sequence[str] | None,
    routings: Sequence[str] | None,
    **options: Any,
) -> None:
    """Measure dispatch and combine. None: every dispatcher; 16 and 256 tokens, in BF16, routed uniformly."""
    from turnout.bench.a2a import run

    if top_k > experts:
        raise UserError(f"--topk {top_k}: a layer of --experts {experts} has no more to choose")
    run(
        experts=experts,
        top_k=top_k,
        tokens=tokens or [16, 256],
        dispatchers=dispatchers or [],
        formats=formats or ["bf16"],
        combine_formats=combine_formats or ["bf16"],
        routings=routings or ["uniform"],
        **options,
    )
