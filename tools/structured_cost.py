"""What structured output costs, on this machine: the same load with a JSON schema and without, in turns.

    python -m tools.structured_cost demo --output benchmarks/results/structured-DEVICE-DATE.json

First token: requests one after another, each schema one that the server has not seen. Time per output token:
rounds of 32 requests at once, each round with a schema of its own. Whether the schema comes first or second
changes from pair to pair; what is held against the bars is the median over pairs. The server is started
without a prefix cache. Ends with status 1 beyond a bar. Takes about a minute and wants a quiet machine.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from tools.command_line import parser_for
from turnout.bench.results import check_output, result, save
from turnout.bench.serve import ServeBench, measure, place
from turnout.config import ServerConfig, load
from turnout.errors import UserError
from turnout.server.launch import launch

FIRST_TOKEN_MS = 5.0  # at most so much more until the first token
PER_TOKEN = 1.03  # at most so many times as long for each further token
CONCURRENCY, OUTPUT_LEN = 32, 96


def schema(seed: int) -> dict[str, Any]:
    """Of answers that are longer than any of these loads; with names that only this seed has."""
    item = {
        "type": "object",
        "properties": {
            f"name_{seed}": {"type": "string", "pattern": f"^[a-z]{{1,12}}-{seed}$"},
            f"kind_{seed}": {"enum": ["cat", "dog", f"kind {seed}"]},
            f"size_{seed}": {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "null"}]},
            f"tags_{seed}": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 3},
        },
        "additionalProperties": False,
    }
    item["required"] = list(item["properties"])
    return {"type": "array", "items": item, "minItems": 64}


def structured(bench: ServeBench, seed: int) -> ServeBench:
    named = {"name": "answer", "schema": schema(seed)}
    format = {"type": "json_schema", "json_schema": named}
    return replace(bench, ignore_eos=False, extra={"response_format": format})


def pairs(
    base_url: str, bench: ServeBench, count: int, name: str, first_seed: int
) -> list[tuple[float, float]]:
    """(`name` of a load without, and with a schema), `count` times."""
    found = []
    for seed in range(first_seed, first_seed + count):
        plain = replace(bench, seed=seed)
        both = [plain, structured(plain, seed)]
        order = both if seed % 2 else both[::-1]
        seen = {bool(load.extra): measure(load, base_url) for load in order}
        if any(row["output_tokens"] != bench.num_prompts * bench.output_len for row in seen.values()):
            raise UserError(f"answers to schema {seed} ended early, so that the two loads differ")
        found.append((seen[False][name], seen[True][name]))
    return found


def rows(base_url: str, first_tokens: int, rounds: int) -> list[dict[str, Any]]:
    one = ServeBench(input_len=64, output_len=1, num_prompts=1, max_concurrency=1)
    many = ServeBench(
        input_len=64, output_len=OUTPUT_LEN, num_prompts=CONCURRENCY, max_concurrency=CONCURRENCY
    )
    pairs(base_url, one, 4, "median_ttft_ms", 10_000)
    pairs(base_url, many, 1, "median_tpot_ms", 20_000)
    first = pairs(base_url, one, first_tokens, "median_ttft_ms", 0)
    token = pairs(base_url, many, rounds, "median_tpot_ms", 30_000)
    return [
        _row("first_token_ms", first, 1)
        | {"more_ms": statistics.median(b - a for a, b in first), "bar_more_ms": FIRST_TOKEN_MS},
        _row("time_per_output_token_ms", token, CONCURRENCY)
        | {"ratio": statistics.median(b / a for a, b in token), "bar_ratio": PER_TOKEN},
    ]


def _row(measured: str, found: list[tuple[float, float]], concurrency: int) -> dict[str, Any]:
    plain, bound = zip(*found, strict=True)
    return {
        "measured": measured,
        "max_concurrency": concurrency,
        "median_plain": statistics.median(plain),
        "median_structured": statistics.median(bound),
        "plain": list(plain),
        "structured": list(bound),
    }


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("model")
    parser.add_argument("--first-tokens", type=int, default=80, help="pairs of single requests")
    parser.add_argument("--rounds", type=int, default=12, help=f"pairs of {CONCURRENCY} requests at once")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    check_output(options.output)
    config = load(ServerConfig, {"model": options.model, "port": 0, "disable_prefix_cache": True})
    with launch(config, show=False) as base_url:
        first, token = measured = rows(base_url, options.first_tokens, options.rounds)
        where = place(base_url)
    if options.output is not None:
        save(result("structured", measured, **where), options.output)
    print(f"first token: {first['more_ms']:+.2f} ms (at most {FIRST_TOKEN_MS:+})")
    print(f"time per output token: {token['ratio']:.3f} times (at most {PER_TOKEN})")
    if first["more_ms"] > FIRST_TOKEN_MS or token["ratio"] > PER_TOKEN:
        raise SystemExit("beyond a bar")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        raise SystemExit(str(error)) from None
