"""`turnout bench`: the benchmarks, with what the flags leave open."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from turnout.errors import UserError


def serve(
    *,
    model: str | None,
    base_url: str,
    api_key: str,
    dataset_name: str,
    output: Path | None,
    **load: Any,
) -> None:
    """Measure a server of our own with `model`, or the one at `base_url`. load: fields of `ServeBench`."""
    from turnout.bench.serve import ServeBench, run

    if (model is None) == (not base_url):
        raise UserError("bench serve needs either MODEL or --base-url URL")
    if dataset_name != "random":
        raise UserError(f"--dataset-name {dataset_name!r}: only `random` is known")
    run(ServeBench(**load), model=model, base_url=base_url, api_key=api_key, output=output)


def moe(**options: Any) -> None:
    """Measure one layer's experts. options: of `bench.moe.run`; its defaults for those that are None."""
    from turnout.bench.moe import run

    run(**_given(options))


def a2a(*, experts: int, top_k: int, **options: Any) -> None:
    """Measure dispatch and combine. options: of `bench.a2a.run`; its defaults for those that are None."""
    from turnout.bench.a2a import run

    if top_k > experts:
        raise UserError(f"--topk {top_k}: a layer of --experts {experts} has no more to choose")
    run(experts=experts, top_k=top_k, **_given(options))


def _given(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value not in (None, [])}
