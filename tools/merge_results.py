"""Put results of one benchmark together that were measured in parts:

    python -m tools.merge_results OUT.json PART.json ... --command "turnout bench moe --preset all ..."

All parts must come from the same device, driver, versions and commit. Ceilings are medians over the parts;
every row keeps the floor and the efficiency of its own run.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from turnout.bench.results import save
from turnout.errors import UserError

SAME = ("benchmark", "device", "devices", "driver", "versions", "commit")


def merge(parts: Sequence[dict[str, Any]], command: str) -> dict[str, Any]:
    """One result with the rows of all. Raises UserError for parts that do not belong together."""
    first = parts[0]
    for name in SAME:
        found = {json.dumps(part[name], sort_keys=True) for part in parts}
        if len(found) > 1:
            raise UserError(f"parts differ in {name}: {', '.join(sorted(found))}")
    names = dict.fromkeys(name for part in parts for name in part["ceilings"])
    return {
        **{name: first[name] for name in SAME},
        "date": max(part["date"] for part in parts),
        "command": command,
        "ceilings": {
            name: statistics.median(part["ceilings"][name] for part in parts if name in part["ceilings"])
            for name in names
        },
        "rows": [row for part in parts for row in part["rows"]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("parts", nargs="+", type=Path)
    parser.add_argument("--command", required=True, help="what the parts were measured with")
    args = parser.parse_args()
    save(merge([json.loads(part.read_text()) for part in args.parts], args.command), args.output)


if __name__ == "__main__":
    main()
